"""``kvpush bench serve``: the hand-over from prefill to decode in real vLLM, beside NIXL's connectors."""

import importlib.util
import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvpush.bench.serve.run import ServeOptions

_COLUMNS = (
    ("hand-\nover", "hand_over_ms"),
    ("less a\nstep", "hand_over_less_step_ms"),
    ("kv\nwait", "kv_wait_ms"),
    ("TTFT", "ttft_ms"),
    ("TPOT", "tpot_ms"),
)


def serve(
    arms: Annotated[
        str, typer.Option(help="Connectors to compare, with commas. Default: shm, and four of NIXL.")
    ] = "",
    shapes: Annotated[
        str, typer.Option(help="KV caches: few-large and many-small blocks, with commas.")
    ] = "few-large,many-small",
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths, with commas.")] = "512,2048",
    free_lists: Annotated[
        str, typer.Option(help="Order of the free blocks on both sides: sorted, shuffled.")
    ] = "sorted,shuffled",
    requests: Annotated[int, typer.Option(min=1, help="Requests per arm and kind, warm-up apart.")] = 12,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm.")] = 6,
    output_tokens: Annotated[int, typer.Option(min=3, help="Tokens that D gives per request.")] = 12,
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prefill step.")] = 512,
    quick: Annotated[
        bool, typer.Option("--quick", help="One shape, 512 tokens, shuffled, two arms.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Measure the hand-over of real vLLM engines, kvpush against vLLM's NIXL connectors.

    A prefill and a decode process per connector, one request at a time, arms taking turns. Hand-over:
    from P's answer to D's first token. Fails if any text or any byte count is not what it must be.
    """
    from rich.console import Console

    from kvpush.bench.environment import environment
    from kvpush.bench.serve.arms import DEFAULT_ARMS
    from kvpush.bench.serve.pair import ServeBenchError
    from kvpush.bench.serve.run import ServeOptions, run_serve
    from kvpush.demo.servers import Terminated, sigterm_raises

    console = Console(stderr=True)
    chosen = _split(arms) or (("kvpush-shm", "nixl-push-slow") if quick else DEFAULT_ARMS)
    try:
        if importlib.util.find_spec("vllm") is None:
            raise ServeBenchError("vLLM is not installed. Run: pip install 'kvpush[demo]'")
        options = ServeOptions(
            arms=chosen,
            shapes=("many-small",) if quick else _split(shapes),
            prompt_tokens=(512,) if quick else tuple(int(count) for count in _split(prompt_tokens)),
            orders=("shuffled",) if quick else _split(free_lists),
            requests=10 if quick else requests,
            rounds=2 if quick else rounds,
            output_tokens=output_tokens,
            chunk_tokens=chunk_tokens,
        )
        with sigterm_raises():
            rows = _measure(run_serve, options, console)
    except (Terminated, KeyboardInterrupt) as stop:
        console.print("stopped; all engines are ended")
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    except (ServeBenchError, ValueError) as error:
        console.print(f"kvpush bench serve failed: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        for row in (environment(), *rows):
            typer.echo(json.dumps(row))
        return
    stdout = Console()
    for shown in tables(rows):
        stdout.print(shown)
    stdout.print("hand-over: from P's answer to D's first token; kv wait: to the begin of D's step for it")
    stdout.print("ops: network operations; x: hand-over less a step, as a multiple of kvpush's (medians)")


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _measure(run: Any, options: "ServeOptions", console: "Console") -> list[dict[str, Any]]:
    from dataclasses import replace

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        return list(run(replace(options, progress=show)))


def tables(rows: list[dict[str, Any]]) -> "Iterator[Table]":
    """Yield one table per model shape, free list and prompt length: medians and p90 in milliseconds."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for (shape, order, tokens), group in groupby(
        rows, key=lambda row: (row["shape"], row["free_list"], row["prompt_tokens"])
    ):
        title = f"{tokens} tokens, {shape} blocks, free list {order}: ms, p50/p90"
        shown = Table(title=title, box=SIMPLE_HEAD, padding=0, title_justify="left")
        for name in ("arm", "ops", *(name for name, _ in _COLUMNS), "x"):
            shown.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
        for row in group:
            ratio = row.get("ratio_hand_over_less_step")
            shown.add_row(
                row["arm"],
                f"{row['network_ops']:.0f}",
                *(f"{_ms(row[f'{name}_p50'])}/{_ms(row[f'{name}_p90'])}" for _, name in _COLUMNS),
                "-" if ratio is None else f"{ratio:.2f}",
            )
        yield shown


def _ms(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
