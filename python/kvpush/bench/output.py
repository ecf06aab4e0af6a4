"""Rows for a person: tables on stdout."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpush.bench.cases import Case, size

_COLUMNS = (
    *("arm", "GB/s", "per layer", "p50 / p90 / p99 ms", "ops", "CPU s/GB"),
    *("x per-block", "of ceiling", "of memcpy", "of writes"),
)
_PACK_ARMS = ("memcpy", "pack", "unpack")
_PIPE_WIDTH = 140


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
            _ratio(row["share_of_fi_writedata"], "%"),
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


def print_pack(rows: Sequence[dict[str, Any]]) -> None:
    """Print all rows of ``bench pack`` as one table."""
    table = Table(title="pack and unpack alone", title_justify="left")
    for name in ("blocks of", "in runs of", "layers", "bytes", "boxes", "threads"):
        table.add_column(name, justify="right", no_wrap=name in ("bytes", "boxes"))
    for arm in _PACK_ARMS:
        table.add_column(f"{arm} GB/s", justify="right")
    for arm in _PACK_ARMS[1:]:
        table.add_column(f"{arm} of memcpy", justify="right")
    for first in range(0, len(rows), len(_PACK_ARMS)):
        by_arm = {row["arm"]: row for row in rows[first : first + len(_PACK_ARMS)]}
        row = by_arm["pack"]
        table.add_row(
            size(row["block_bytes"]),
            str(row["run_blocks"] or "all"),
            str(row["num_layers"]),
            size(row["total_bytes"]),
            f"{row['in_flight']} x {size(row['box_bytes'])}",
            str(row["threads"]),
            *(f"{by_arm[arm]['gb_per_s']:.3g}" for arm in _PACK_ARMS),
            *(_ratio(by_arm[arm]["share_of_memcpy"], "%") for arm in _PACK_ARMS[1:]),
        )
    console().print(table)


def print_engine(rows: Sequence[dict[str, Any]]) -> None:
    """Print all rows of ``bench engine`` as one table."""
    table = Table(title="what is not copying, microseconds", title_justify="left")
    for name in ("what", "over", "requests", "p50", "p90", "p99", "samples"):
        table.add_column(name, justify="left" if name in ("what", "over") else "right")
    for row in rows:
        table.add_row(
            row["arm"].replace("_", " "),
            row["transport"],
            str(row["requests"] or ""),
            *(f"{row[name]:.3g}" for name in ("p50_us", "p90_us", "p99_us")),
            str(row["samples"]),
        )
    console().print(table)
