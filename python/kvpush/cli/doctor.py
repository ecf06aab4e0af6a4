"""``kvpush doctor``: what works on this machine, and how to get what does not."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from kvpush.doctor.fabric import Libfabric, Provider
    from kvpush.doctor.host import FabricRail, Gpu, Nic, Vllm

_SELF_TEST_S = 120.0
_GET_LIBFABRIC = "apt-get install libfabric1 (1.17 or newer), or your distribution's package"
_HOW_TO_GET = {"nixl": "pip install 'kvpush[nixl]'", "fabric": _GET_LIBFABRIC}


@dataclass
class TransportReport:
    """One transport, between caches in "host" or "GPU" memory. ``ok`` means that its self-test passed.

    ``detail`` says why not, or what the self-test warned of, or on a GPU where the slots are.
    """

    name: str
    usable: bool
    ok: bool = False
    detail: str = ""
    how_to_get: str = ""
    memory: str = "host"
    gb_per_s: float = 0.0
    bytes_per_round: int = 0
    network_ops_per_round: int = 0


@dataclass
class Report:
    """All that the doctor found."""

    ok: bool
    kvpush: str | None
    python: str
    machine: str
    core_error: str
    transports: list[TransportReport]
    gpus: "list[Gpu]"
    cuda_kernels: bool
    nics: "list[Nic]"
    nixl: str | None
    libfabric: str | None
    fabric: "Libfabric | None"
    rails: "list[FabricRail]"
    vllm: "Vllm"
    missing: list[str] = field(default_factory=list)
    auto: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Check what works here: transports (with a real transfer each), GPUs, NICs, NIXL, libfabric, vLLM.

    Exit code 0 if at least one transport passes its self-test.
    """
    from rich.console import Console

    with Console(stderr=True).status("examining this machine") as status:
        report = examine(lambda name: status.update(f"self-test over {name}"))
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2))
    else:
        _print(report, Console())
    if not report.ok:
        raise typer.Exit(1)


def examine(progress: Any = lambda name: None) -> Report:
    """Look at everything and run the self-tests; ``progress`` gets each transport's name first."""
    from kvpush.doctor import fabric, host
    from kvpush.doctor.versions import version_of

    known, core_error = _known_transports()
    transports = []
    for name, reason in known.items():
        progress(name)
        transports.append(_examine_transport(name, reason))
    libfabric, no_libfabric = fabric.find()
    if libfabric is not None:
        fabric.test_providers(libfabric, lambda env: _test_provider(env, progress))
    gpus, no_gpu = host.gpus()
    if gpus and host.has_cuda_kernels():
        for name in [one.name for one in transports if one.ok]:
            progress(f"{name}, GPU memory")
            transports.append(_examine_on_gpu(name))
    report = Report(
        ok=any(transport.ok for transport in transports),
        kvpush=version_of("kvpush"),
        python=f"{platform.python_implementation()} {platform.python_version()}",
        machine=f"{platform.system()} {platform.release()} {platform.machine()}",
        core_error=core_error,
        transports=transports,
        gpus=gpus,
        cuda_kernels=host.has_cuda_kernels(),
        nics=host.nics(),
        nixl=host.nixl_version(),
        libfabric=libfabric.version if libfabric else None,
        fabric=libfabric,
        rails=host.fabric_rails(),
        vllm=host.vllm(),
    )
    report.missing = _missing(report, no_gpu, no_libfabric)
    report.auto = _auto()
    return report


def _auto() -> str:
    """Return what transport "auto" takes here, best first, and why."""
    why = {"host": "peers on this host", "rdma": "RDMA", "network": "TCP"}
    try:
        import kvpush

        found = kvpush.paths(kvpush.Config.from_env(transport="auto"))
    except Exception as error:
        return f"unknown: {error}"
    return ", ".join(
        f"{name} ({why[rank]}{': ' + reach if name == 'fabric' else ''})" for name, reach, rank in found
    )


def _known_transports() -> tuple[dict[str, str], str]:
    """Return each transport's reason why it is not usable ("" if it is), and why none are known."""
    try:
        import kvpush

        return dict(kvpush.transports()), ""
    except Exception as error:  # a broken build may fail in any way, and this is where it shows
        return {}, f"the native module does not work: {type(error).__name__}: {error}"


def _test_provider(env: dict[str, str], progress: Any) -> tuple[bool, str, float]:
    progress(f"fabric, {' '.join(env.values())}")
    result = _examine_transport("fabric", "", env=env)
    return result.ok, result.detail, result.gb_per_s


def _examine_transport(
    name: str, reason: str, *options: str, env: dict[str, str] | None = None
) -> TransportReport:
    if reason:
        return TransportReport(name, usable=False, detail=reason, how_to_get=_HOW_TO_GET.get(name, ""))
    argv = [sys.executable, "-m", "kvpush.doctor.selftest", name, *options]
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SELF_TEST_S,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        return TransportReport(name, usable=True, detail=f"the self-test hung for {_SELF_TEST_S:.0f} s")
    try:
        # Libraries below may print to stdout too: the result is the last line.
        result = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        tail = " ".join(done.stderr.split())[-300:]
        return TransportReport(
            name, usable=True, detail=f"the self-test died with code {done.returncode}: {tail}"
        )
    return TransportReport(
        name,
        usable=True,
        ok=bool(result["ok"]),
        detail=str(result["error"]) or _warnings(done.stderr),
        gb_per_s=float(result["gb_per_s"]),
        bytes_per_round=int(result["bytes_per_round"]),
        network_ops_per_round=int(result["network_ops_per_round"]),
    )


def _warnings(stderr: str) -> str:
    prefix = "kvpush warning: "
    return "; ".join(line.removeprefix(prefix) for line in stderr.splitlines() if line.startswith(prefix))


def _examine_on_gpu(name: str) -> TransportReport:
    from kvpush.config import Config

    result = _examine_transport(name, "", "gpu")
    result.memory = "GPU"
    if result.ok and not result.detail:  # else it warned: of slots elsewhere, too
        config = Config.from_env()
        places = {"nixl": config.nixl_device_memory, "fabric": config.fabric_device_memory}
        on_device = places.get(name, True)
        result.detail = "slots in GPU memory" if on_device else "slots in pinned host memory"
    return result


def _missing(report: Report, no_gpu: str, no_libfabric: str) -> list[str]:
    """Return one line for each thing that is not here: what, and how to get it."""
    lines = []
    if report.core_error:
        lines.append(f"{report.core_error}. Run: pip install --force-reinstall kvpush")
    if report.nixl is None:
        lines.append(f"NIXL: {_HOW_TO_GET['nixl']}")
    if report.libfabric is None:
        lines.append(f"libfabric: {no_libfabric}. Run: {_GET_LIBFABRIC}")
    if report.vllm.problem:
        lines.append(f"vLLM: {report.vllm.problem}")
    if not any(nic.kind == "rdma" for nic in report.nics):
        lines.append("RDMA: no device in /sys/class/infiniband; transfers between hosts run over TCP")
    if no_gpu:
        lines.append(f"GPU: {no_gpu}; KV in host memory works without one")
    elif not report.cuda_kernels:
        lines.append("CUDA kernels: not in this installation; build kvpush with nvcc on PATH (KVPUSH_NVCC)")
    return lines


def _print(report: Report, console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="transports: a real transfer between two engines", title_justify="left")
    for heading in ("transport", "memory", "works", "GB/s", "network ops", "note"):
        table.add_column(heading, justify="right" if heading in ("GB/s", "network ops") else "left")
    for one in report.transports:
        table.add_row(
            one.name,
            one.memory,
            _works(one),
            f"{one.gb_per_s:.2f}" if one.ok else "",
            f"{one.network_ops_per_round} for {one.bytes_per_round >> 10} KiB" if one.ok else "",
            escape(". ".join(part for part in (one.detail, one.how_to_get) if part)),
        )
    console.print(f"kvpush {report.kvpush or '(not installed by pip)'}, {report.python}, {report.machine}")
    console.print(table)
    if report.fabric is not None:
        _print_fabric(report.fabric, console)
    kernels = "kernels in this installation" if report.cuda_kernels else "NO kernels in this installation"
    gpus = "; ".join(
        f"{gpu.index}: {gpu.name}, compute {gpu.compute}, CUDA {gpu.driver}, {gpu.uuid}"
        for gpu in report.gpus
    )
    nics = "; ".join(f"{n.name} ({n.kind}, {n.state}{', ' + n.rate if n.rate else ''})" for n in report.nics)
    rails = "; ".join(str(rail) for rail in report.rails if rail.chosen)
    vllm = report.vllm
    plugin = "plugin registered" if vllm.plugin_registered else "plugin not registered"
    support = "supported" if vllm.supported else "NOT supported"
    for label, text in (
        ("auto", report.auto or "none"),
        ("GPUs", f"{gpus} ({kernels})" if gpus else "none"),
        ("NICs", nics or "none"),
        ("NIXL", report.nixl or "not found"),
        ("libfabric", f"{report.fabric.version}, {report.fabric.library}" if report.fabric else "not found"),
        ("rails", rails or "none"),
        ("vLLM", f"{vllm.version} ({support}, {plugin})" if vllm.version else "not found"),
    ):
        console.print(f"{label:10}{escape(text)}")
    if report.missing:
        console.print("\nnot here, and how to get it:")
        for line in report.missing:
            console.print(f"- {escape(line)}", soft_wrap=True)  # commands stay in one piece


def _print_fabric(fabric: "Libfabric", console: "Console") -> None:
    from rich.markup import escape
    from rich.table import Table

    title = f"libfabric {fabric.version}: its providers, as KVPUSH_FABRIC_PROVIDER names them"
    table = Table(title=title, title_justify="left")
    for heading in ("provider", "version", "protocol", "works", "GB/s", "note"):
        table.add_column(heading, justify="right" if heading == "GB/s" else "left")
    for one in fabric.providers:
        rate = f"{one.gb_per_s:.2f}" if one.ok else ""
        table.add_row(
            escape(one.name), one.version, one.protocol, _works(one), rate, escape(one.detail or _note(one))
        )
    console.print(table)


def _note(provider: "Provider") -> str:
    return "" if provider.delivery_complete else "cannot tell when a write has arrived"


def _works(one: "TransportReport | Provider") -> str:
    return "[green]yes[/]" if one.ok else "[red]no[/]" if one.usable else "[yellow]not here[/]"
