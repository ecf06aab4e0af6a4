"""Two drawings of the rows: time against run length, GB/s against block size. All arms."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the transfers among `rows` into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    rows = [row for row in rows if row["kind"] == "transfer" and row["idle_ms"] is None]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    _lines(
        left,
        rows,
        x=lambda row: row["run_blocks"] or row["total_bytes"] // (row["num_layers"] * row["block_bytes"]),
        y=lambda row: row["p50_us"] / 1e3,
        varied="run_blocks",
    )
    left.set(xlabel="neighbouring blocks in a row (the right end: contiguous)", ylabel="p50 time, ms")
    _lines(
        right,
        rows,
        x=lambda row: row["block_bytes"] / 1024,
        y=lambda row: row["gb_per_s"],
        varied="block_bytes",
    )
    right.set(xlabel="block bytes in one layer, KiB", ylabel="GB/s, median")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _lines(
    axes: Any,
    rows: Sequence[dict[str, Any]],
    x: Callable[[dict[str, Any]], float],
    y: Callable[[dict[str, Any]], float],
    varied: str,
) -> None:
    """Draw one line per arm through the largest set of rows that differ in nothing but `varied`."""
    fixed = ("ucx_tls", "block_bytes", "run_blocks", "num_layers", "total_bytes", "concurrency")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in fixed if name != varied), []).append(row)
    if not groups:
        return

    def interest(group: list[dict[str, Any]]) -> tuple[int, bool]:
        return len({row[varied] for row in group}), group[0]["run_blocks"] == 1

    chosen = max(groups.values(), key=interest)
    arms = dict.fromkeys((row["arm"], row["transport"]) for row in chosen)
    for arm, transport in arms:
        points = sorted(
            (x(row), y(row)) for row in chosen if (row["arm"], row["transport"]) == (arm, transport)
        )
        label = f"{arm} {transport}" if arm == "kvpush" else arm
        axes.plot([at for at, _ in points], [value for _, value in points], marker="o", label=label)
    axes.set_title(", ".join(f"{name} {chosen[0][name]}" for name in fixed if name != varied), fontsize=8)
