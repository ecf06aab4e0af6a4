"""``kvpush bench serve``: the hand-over from prefill to decode in real vLLM, beside NIXL's connectors."""

import importlib.util
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kvpush.bench.serve_run import ServeOptions

_COLUMNS = (
    ("hand-over", "hand_over_ms"),
    ("less one\nstep", "hand_over_less_step_ms"),
    ("until D's\nstep", "kv_wait_ms"),
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
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm.")] = 4,
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

    from kvpush.bench.serve_arms import DEFAULT_ARMS
    from kvpush.bench.serve_pair import ServeBenchError
    from kvpush.bench.serve_run import ServeOptions, run_serve
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
        for row in rows:
            typer.echo(json.dumps(row))
        return
    Console().print(table(rows))


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


def table(rows: list[dict[str, Any]]) -> "Table":
    """Return the rows as a table: p50 / p90 in milliseconds, and the ratio to kvpush of the medians."""
    from rich.table import Table

    shown = Table(title="P's answer to D's first token (ms, p50 / p90)", padding=(0, 1, 0, 0))
    for title in ("blocks", "free list", "tokens", "arm", "network\nops"):
        shown.add_column(title, justify="right" if title in ("tokens", "network\nops") else "left")
    for title, _ in _COLUMNS:
        shown.add_column(title, justify="right", no_wrap=True)
    shown.add_column("less one step,\nx kvpush's", justify="right")
    before: tuple[Any, ...] = ()
    for row in rows:
        kind = (row["shape"], row["free_list"], row["prompt_tokens"])
        if before and kind != before:
            shown.add_section()
        ratio = row.get("ratio_hand_over_less_step")
        shown.add_row(
            *(str(part) if kind != before else "" for part in kind),
            row["arm"],
            f"{row['network_ops']:.0f}",
            *(f"{row[f'{name}_p50']:.1f} / {row[f'{name}_p90']:.1f}" for _, name in _COLUMNS),
            "-" if ratio is None else f"{ratio:.2f}",
        )
        before = kind
    return shown
