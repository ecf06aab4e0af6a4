"""The demo's result, for people and for programs."""

import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvpush.demo.run import Row


def print_json(rows: list[Row], good: bool) -> None:
    """Print one JSON object on stdout."""
    json.dump({"ok": good, "requests": [asdict(row) for row in rows]}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_table(rows: list[Row], good: bool) -> None:
    """Print a table and the verdict on stdout."""
    table = Table(title="P computes the prompt, D answers; KV pushed by kvpush", padding=(0, 1, 0, 0))
    table.add_column("prompt\n(tokens)", min_width=12)
    table.add_column("answer", overflow="ellipsis", min_width=16)
    table.add_column("equal")
    table.add_column("KV MiB:\nmoved/exp.", justify="right", no_wrap=True)
    table.add_column("network\nops (un-\npacked)", justify="right", no_wrap=True)
    table.add_column("ms:\ntransfer/\nhand-over", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.prompt} ({row.prompt_tokens})",
            escape(" ".join(row.text.split())),
            "[green]yes[/]" if row.equal else "[red]NO[/]",
            _mib(row),
            f"{row.network_ops} ({row.per_block_descriptors})",
            f"{_ms(row.transfer_ms)}/{_ms(row.handover_ms)}",
        )
    console = Console()
    console.print(table)
    console.print(f"transport: {', '.join(sorted({row.transport for row in rows}))}")
    console.print("equal: token by token the same as one engine alone")
    console.print("unpacked: descriptors for the same KV when each block of each layer is sent by itself")
    console.print("transfer: what is left of it when P has computed the last block")
    console.print("hand-over: from P's answer to D's first token; negative when the token was faster")
    for row in rows:
        if not row.good:
            console.print(f"[red]{escape(_problem(row))}[/]")
    if good:
        console.print("[green]all texts equal, exactly the expected KV was moved[/]")


def _mib(row: Row) -> str:
    text = f"{row.bytes_moved / 2**20:.2f}/{row.bytes_expected / 2**20:.2f}"
    return text if row.bytes_moved == row.bytes_expected else f"[red]{text}[/]"


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _problem(row: Row) -> str:
    if row.status != "ok":
        return f"{row.prompt}: the transfer ended as: {row.status}"
    if row.bytes_moved != row.bytes_expected:
        return f"{row.prompt}: moved {row.bytes_moved} bytes of KV, expected {row.bytes_expected}"
    return f"{row.prompt}: {row.text!r}, but one engine alone: {row.reference!r}"
