"""Rows for a person: tables on stdout."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpush.bench.cases import Case

_COLUMNS = (
    *("arm", "GB/s", "per layer", "p50 / p90 / p99 ms", "ops", "CPU s/GB"),
    *("x per-block", "of ceiling", "of memcpy"),
)
_PIPE_WIDTH = 120


def console() -> Console:
    """Return a console on stdout; into a pipe the tables are not squeezed into 80 columns."""
    made = Console()
    return made if made.is_terminal else Console(width=_PIPE_WIDTH)


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one case as a table."""
    case = _case(rows[0])
    title = f"{case.label}; cache {case.cache_bytes >> 20} MiB, UCX_TLS {rows[0]['ucx_tls']}"
    table = Table(title=escape(title), title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in rows:
        name = row["arm"] + (f" {row['transport']}" if row["arm"] == "kvpush" else "")
        table.add_row(
            escape(name + (f" ({row['target']})" if row["target"] else "")),
            f"{row['gb_per_s']:.3g}",
            f"{row['gb_per_s_per_layer']:.3g}",
            " / ".join(f"{row[field] / 1e3:.3g}" for field in ("p50_us", "p90_us", "p99_us")),
            str(row["network_ops"]),
            f"{row['cpu_s_per_gb']:.3g}",
            _ratio(row["ratio_to_nixl_per_block"], "x"),
            _ratio(row["share_of_ceiling"], "%"),
            _ratio(row["share_of_memcpy"], "%"),
        )
    console().print(table)


def _case(row: dict[str, Any]) -> Case:
    names = (
        "block_bytes",
        "run_blocks",
        "num_layers",
        "total_bytes",
        "concurrency",
        "idle_ms",
        "cache_bytes",
    )
    return Case(**{name: row[name] for name in names})


def _ratio(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.0f} %" if unit == "%" else f"{value:.2f}"
