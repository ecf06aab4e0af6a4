"""Compares two recorded results of ``kvpush bench``: the second against the first, row by row.

    python bench/report.py before.jsonl after.jsonl --fail-below 0.9

A ratio above 1 means that the second is better (more GB/s, or less time where a row has no rate).
Exit code 1 if a ratio is below --fail-below, 2 if a file cannot be read or nothing compares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

# What makes two rows the same measurement; a kind of row has some of them.
KEY = (
    *("kind", "arm", "transport", "ucx_tls", "block_bytes", "run_blocks", "num_layers", "total_bytes"),
    *("concurrency", "idle_ms", "threads", "box_bytes", "in_flight", "requests"),
    *("shape", "free_list", "prompt_tokens", "device"),
)
ENVIRONMENT = ("commit", "kvpush", "nixl", "cpu", "num_cpus", "time")


class ReportError(Exception):
    pass


def read(path: Path) -> tuple[dict, dict[tuple, list[dict]]]:
    """The environment of a file, and its rows by what they measure; one may be there several times."""
    environment, rows = {}, {}
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            kind = row["kind"]
        except (ValueError, KeyError, TypeError):
            raise ReportError(f"{path}:{number}: no row of `kvpush bench --json`") from None
        if kind == "pack":  # before these could be chosen
            row = {"box_bytes": 1 << 20, "in_flight": 8} | row
        if kind == "environment":
            environment = row
        else:
            rows.setdefault(tuple(row.get(name) for name in KEY), []).append(row)
    return environment, rows


def value(rows: list[dict]) -> tuple[float, str]:
    """The median of the rate of the same row, or of its p50 time, and the unit."""
    if rows[0]["kind"] == "serve":
        name, unit = "hand_over_less_step_ms_p50", "ms"
    elif rows[0].get("idle_ms") is not None or "gb_per_s" not in rows[0]:
        name, unit = "p50_us", "us"
    else:
        name, unit = "gb_per_s", "GB/s"
    return statistics.median(row[name] for row in rows), unit


def compare(before: list[dict], after: list[dict]) -> tuple[str, str, float]:
    (old, unit), (new, _) = value(before), value(after)
    ratio = (new / old if unit == "GB/s" else old / new) if old and new else 1.0
    return f"{old:.4g} {unit}", f"{new:.4g} {unit}", ratio


def label(row: dict) -> str:
    parts = [f"{name}={row[name]}" for name in KEY[3:] if row.get(name) is not None]
    return ", ".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--fail-below", type=float, metavar="RATIO", help="exit code 1 if a ratio is below it"
    )
    options = parser.parse_args(argv)
    out = Console()
    if not out.is_terminal:
        out = Console(width=160)
    try:
        (old_env, old), (new_env, new) = read(options.before), read(options.after)
        common = [key for key in new if key in old]
        if not common:
            raise ReportError("the two files have no row in common")
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for name in ENVIRONMENT:
        same = old_env.get(name) == new_env.get(name)
        out.print(
            f"{name:10}{old_env.get(name)}" + ("" if same else f" -> {new_env.get(name)}"), markup=False
        )
    table = Table()
    for heading in ("kind", "arm", "of", "before", "after", "ratio"):
        table.add_column(heading, justify="right" if heading in ("before", "after", "ratio") else "left")
    low = []
    for key in common:
        was, now, ratio = compare(old[key], new[key])
        row = new[key][0]
        bad = options.fail_below is not None and ratio < options.fail_below
        low += [ratio] if bad else []
        arm = f"{row['arm']} {row.get('transport') or ''}".strip()
        style = "[red]" if bad else "[green]" if ratio > 1.1 else ""
        table.add_row(row["kind"], arm, label(row), was, now, f"{style}{ratio:.3f}")
    out.print(table)
    only = len(old) + len(new) - 2 * len(common)
    if only:
        out.print(f"{only} rows are in one file only")
    if low:
        print(f"report: {len(low)} of {len(common)} rows are below {options.fail_below:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
