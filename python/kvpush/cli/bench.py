"""``kvpush bench``: how fast this machine is, and beside what."""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpush.cli.bench_serve import serve

if TYPE_CHECKING:
    from kvpush.bench.cases import Case

INSTALL_COMMAND = "pip install 'kvpush[bench]'"

bench = typer.Typer(name="bench", help="Measure kvpush beside NIXL and memcpy.", no_args_is_help=True)
bench.command()(serve)

_Json = Annotated[bool, typer.Option("--json", help="One JSON object per line on stdout.")]
_Device = Annotated[str, typer.Option(help="Where caches and slots are: cpu, or cuda (GPU 0).")]


@bench.command()
def transfer(
    block_bytes: Annotated[str, typer.Option(help="Block bytes in one layer, 1KiB to 1MiB: a list.")] = "",
    run_blocks: Annotated[
        str, typer.Option(help="Neighbouring blocks in a row: 1 scattered, 0 contiguous; a list.")
    ] = "",
    num_layers: Annotated[str, typer.Option(help="Layers, 1 to 128; a list.")] = "",
    total_bytes: Annotated[str, typer.Option(help="Bytes of one transfer, up to 1GiB; a list.")] = "",
    concurrency: Annotated[str, typer.Option(help="Transfers at once, 1 to 64; a list.")] = "",
    model_shape: Annotated[
        str,
        typer.Option(help="Block bytes and layers of: llama-70b-tp8, qwen3-32b-tp4, deepseek-v3, smollm2."),
    ] = "",
    idle_ms: Annotated[
        str,
        typer.Option(help="Latency of one transfer at a time (64 KiB), so long after the last; a list."),
    ] = "",
    arms: Annotated[
        str,
        typer.Option(
            help="A list of nixl-per-block, nixl-one-descriptor, fi-writedata, kvpush-shm, kvpush-nixl, "
            "kvpush-fabric, memcpy."
        ),
    ] = "",
    ucx_tls: Annotated[
        list[str] | None, typer.Option(help="UCX_TLS of all processes, or 'default'. May be repeated.")
    ] = None,
    fabric_provider: Annotated[
        str, typer.Option(help="libfabric's provider of fi-writedata and kvpush-fabric, such as tcp.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each arm in each case.")] = 10,
    cache_bytes: Annotated[
        str, typer.Option(help="Size of each cache. Default: 8 x what moves at once, 512MiB at most.")
    ] = "0",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases, within a minute.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the results into this PNG file.")] = None,
    peer: Annotated[str, typer.Option(help="HOST or HOST:PORT of a `kvpush bench peer`: D runs there.")] = "",
    device: _Device = "cpu",
    as_json: _Json = False,
) -> None:
    """Move KV between two processes: kvpush, NIXL per block, NIXL as one descriptor, libfabric, memcpy.

    Arms take turns round by round. A transfer's time is from its submission at P until D has seen it
    complete. Bytes are verified before and after the rounds.
    """
    with _errors():
        _check_packages("numpy", *(["matplotlib"] if plot else []))
        cases = _cases(
            block_bytes, run_blocks, num_layers, total_bytes, concurrency, model_shape, idle_ms, quick
        )
        _transfer(
            cases, arms, fabric_provider, ucx_tls, rounds, cache_bytes, plot, peer, _device(device), as_json
        )


@bench.command()
def peer(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 5700,
) -> None:
    """Run D's end of `kvpush bench transfer --peer` on this host, until interrupted.

    Needs the same KVPUSH_SECRET on both hosts: whoever has it can run code here.
    """
    with _errors():
        _check_packages("numpy")
        from kvpush.bench import pair, remote

        with contextlib.suppress(KeyboardInterrupt):
            remote.serve(
                (host, port), pair.serve, lambda got: typer.echo(f"kvpush bench peer: {host}:{got}", err=True)
            )


@bench.command()
def pack(
    block_bytes: Annotated[
        str, typer.Option(help="Block bytes in one layer, 1KiB to 1MiB: a list.")
    ] = "1KiB,4KiB,16KiB,64KiB,256KiB",
    run_blocks: Annotated[str, typer.Option(help="1 scattered, 0 contiguous, or a run; a list.")] = "0,1",
    num_layers: Annotated[int, typer.Option(min=1, max=128, help="Layers.")] = 16,
    total_bytes: Annotated[str, typer.Option(help="Bytes of one pack.")] = "64MiB",
    cache_bytes: Annotated[str, typer.Option(help="Size of each of the two caches.")] = "0",
    threads: Annotated[str, typer.Option(help="Threads that copy, 0 for the caller's: a list.")] = "0",
    box_bytes: Annotated[str, typer.Option(help="Bytes that one job copies, as a slot's: a list.")] = "1MiB",
    in_flight: Annotated[str, typer.Option(help="Jobs at a time: a list.")] = "8",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 10,
    device: _Device = "cpu",
    as_json: _Json = False,
) -> None:
    """Time the packer alone: cache to slots, slots to cache, beside memcpy on one core, or the GPU's copy."""
    with _errors():
        _check_packages("numpy")
        from kvpush.bench.cases import parse_sizes, sweep, with_cache
        from kvpush.bench.output import print_pack
        from kvpush.bench.pack import run

        cases = sweep(
            parse_sizes("block-bytes", block_bytes),
            parse_sizes("run-blocks", run_blocks),
            [num_layers],
            parse_sizes("total-bytes", total_bytes),
            [1],
            [],
        )
        cases = with_cache(cases, parse_sizes("cache-bytes", cache_bytes)[0])
        boxes, jobs = parse_sizes("box-bytes", box_bytes), parse_sizes("in-flight", in_flight)
        with _bar() as show:
            batches = run(cases, parse_sizes("threads", threads), rounds, show, _device(device), boxes, jobs)
            _emit(batches, as_json, lambda lines: print_pack([r for r in lines if r["kind"] == "pack"]))


@bench.command()
def engine(
    transport: Annotated[str, typer.Option(help="shm, nixl, ... as listed by `kvpush doctor`.")] = "shm",
    rounds: Annotated[int, typer.Option(min=10, help="Transfers that are timed.")] = 300,
    requests: Annotated[str, typer.Option(help="Requests in flight in the connector: a list.")] = "",
    as_json: _Json = False,
) -> None:
    """Time what is not copying: submit to post, each box, and the connector's Python per request and step."""
    with _errors():
        _check_packages("numpy")
        from kvpush.bench.cases import parse_sizes
        from kvpush.bench.engine import REQUESTS, connector_reason, run
        from kvpush.bench.output import print_engine

        counts = parse_sizes("requests", requests) if requests else list(REQUESTS)
        with _bar() as show:
            batches = run(transport, rounds, counts, lambda text: show(0, 0, text))
            _emit(batches, as_json, lambda lines: print_engine([r for r in lines if r["kind"] == "engine"]))
        if reason := connector_reason():
            typer.echo(reason, err=True)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """End with the message and code 1 instead of a traceback."""
    from kvpush.errors import KvpushError

    try:
        yield
    except KvpushError as error:
        typer.echo(f"kvpush bench: {error}", err=True)
        raise typer.Exit(1) from None


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show progress on stderr; yields what is told rounds done, of all, and what is going on."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, of, text: bar.update(task, completed=done, total=of or None, description=text)


def _emit(
    batches: "Iterator[list[dict[str, Any]]]",
    as_json: bool,
    print_all: Callable[[list[dict[str, Any]]], None] | None = None,
    print_each: Callable[[list[dict[str, Any]]], None] | None = None,
) -> list[dict[str, Any]]:
    """Print rows as they come, or as tables; returns all of them behind the environment."""
    from kvpush.bench.environment import environment

    lines = [environment()]
    if as_json:
        typer.echo(json.dumps(lines[0]))
    for rows in batches:
        lines += rows
        if as_json:
            for row in rows:
                typer.echo(json.dumps(row))
        elif print_each:
            print_each(rows)
    if print_all and not as_json:
        print_all(lines)
    return lines


def _device(name: str) -> str:
    from kvpush.bench.memory import DEVICES
    from kvpush.errors import InvalidArgument

    if name not in DEVICES:
        raise InvalidArgument(f"--device {name!r}: expected one of {', '.join(DEVICES)}")
    return name


def _check_packages(*modules: str) -> None:
    from kvpush.errors import Unsupported

    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise Unsupported(f"the package {module} is not installed. Run: {INSTALL_COMMAND}")


def _cases(
    block_bytes: str,
    run_blocks: str,
    num_layers: str,
    total_bytes: str,
    concurrency: str,
    model_shape: str,
    idle_ms: str,
    quick: bool,
) -> "list[Case]":
    from kvpush.bench.cases import MODEL_SHAPES, default_sweep, parse_sizes, sweep
    from kvpush.errors import InvalidArgument

    given = (block_bytes, run_blocks, num_layers, total_bytes, concurrency, model_shape, idle_ms)
    if not any(given):
        return default_sweep(quick)
    if model_shape:
        if model_shape not in MODEL_SHAPES:
            raise InvalidArgument(f"--model-shape {model_shape!r}: there are {', '.join(MODEL_SHAPES)}")
        if block_bytes or num_layers:
            raise InvalidArgument("--model-shape gives block bytes and layers: leave those options out")
        shape = MODEL_SHAPES[model_shape]
        block_bytes, num_layers = str(shape.block_bytes), str(shape.num_layers)
    latency = bool(idle_ms)
    return sweep(
        block_bytes=parse_sizes("block-bytes", block_bytes or "4KiB"),
        run_blocks=parse_sizes("run-blocks", run_blocks or "1"),
        num_layers=parse_sizes("num-layers", num_layers or ("4" if latency else "16")),
        total_bytes=parse_sizes("total-bytes", total_bytes or ("64KiB" if latency else "64MiB")),
        concurrency=parse_sizes("concurrency", concurrency or "1"),
        idle_ms=parse_sizes("idle-ms", idle_ms) if idle_ms else [],
        model_shape=model_shape,
    )


def _transfer(
    cases: "list[Case]",
    arms: str,
    fabric_provider: str,
    ucx_tls: list[str] | None,
    rounds: int,
    cache_bytes: str,
    plot: Path | None,
    peer: str,
    device: str,
    as_json: bool,
) -> None:
    from kvpush.bench.cases import parse_sizes, with_cache
    from kvpush.bench.output import print_rows
    from kvpush.bench.remote import parse_peer
    from kvpush.bench.transfer import DEFAULT_TLS, choose_arms, run

    names = [name.strip() for name in arms.split(",") if name.strip()]
    specs, left_out = choose_arms(names, fabric_provider)
    for line in left_out:
        typer.echo(line, err=True)
    cases = with_cache(cases, parse_sizes("cache-bytes", cache_bytes)[0])
    host = parse_peer(peer) if peer else None
    with _bar() as show:
        batches = run(cases, specs, rounds, ucx_tls or [DEFAULT_TLS], show, device, host)
        lines = _emit(batches, as_json, None, print_rows)
    if plot is not None:
        from kvpush.bench.plot import draw

        draw(lines, plot)
        typer.echo(f"drawn: {plot}", err=True)
