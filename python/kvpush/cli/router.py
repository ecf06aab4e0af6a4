"""``kvpush router``: one OpenAI-compatible address in front of prefill and decode engines."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from kvpush.router.config import BackendSpec, RouterLimits

INSTALL_COMMAND = "pip install 'kvpush[router]'"


def router(
    prefill: Annotated[
        list[str],
        typer.Option(
            "--prefill",
            metavar="URL[,kv=HOST:PORT,id=ENGINE_ID[,tp=N][,pp=N]]",
            help="A prefill engine, and where decode engines find its KV side channel. Without kv= and id= "
            "both are learned from its first answer. May be given many times.",
        ),
    ],
    decode: Annotated[
        list[str],
        typer.Option("--decode", metavar="URL", help="A decode engine. May be given many times."),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    health_interval_s: Annotated[
        float, typer.Option(min=0.01, help="Seconds between two health checks of a backend.")
    ] = 2.0,
    max_body_mib: Annotated[int, typer.Option(min=1, help="Largest request body, in MiB.")] = 64,
    trace_file: Annotated[
        Path | None, typer.Option(help="Append one JSON line of timings per request to this file.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the configuration as one JSON object when it starts.")
    ] = False,
) -> None:
    """Serve the OpenAI API; send each request to a prefill and a decode engine at once.

    The two legs share one X-Request-Id and one transfer_id, new for each attempt. Routes:
    /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics.
    """
    from kvpush.router.config import RouterLimits, parse_decode, parse_prefill

    try:
        prefill_specs = [parse_prefill(text) for text in prefill]
        decode_specs = [parse_decode(text) for text in decode]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    limits = RouterLimits(max_body_bytes=max_body_mib << 20, health_interval_s=health_interval_s)
    try:
        import uvicorn

        app = _build(prefill_specs, decode_specs, limits, trace_file)
    except ImportError as error:
        typer.echo(f"kvpush router needs more packages ({error}). Run: {INSTALL_COMMAND}", err=True)
        raise typer.Exit(2) from None
    if as_json:
        import json

        typer.echo(json.dumps({"listen": f"http://{host}:{port}", "prefill": prefill, "decode": decode}))
    # Requests in flight get a moment at shut-down, then are cancelled, both legs.
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


def _build(
    prefill: "list[BackendSpec]",
    decode: "list[BackendSpec]",
    limits: "RouterLimits",
    trace_file: Path | None,
) -> "Starlette":
    from kvpush.router.app import Router, build_app

    return build_app(Router(prefill, decode, limits, trace_file))
