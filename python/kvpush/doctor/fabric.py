"""libfabric as this machine has it: the library that kvpush would load, and its providers. Never raises."""

from collections.abc import Callable
from dataclasses import dataclass, field

PROVIDER_VARIABLE = "KVPUSH_FABRIC_PROVIDER"


@dataclass
class Provider:
    """One provider. ``usable``: it has what transport ``fabric`` needs; ``ok``: its self-test passed.

    ``detail`` says why not, or what the self-test warned of. ``protocol`` is libfabric's number of the wire
    protocol with its version: both sides of a pair need the same. ``delivery_complete``: it can tell when a
    write has arrived, without which landings stay quarantined until the peer's process is gone.
    """

    name: str
    version: str
    protocol: str
    delivery_complete: bool
    usable: bool
    ok: bool = False
    detail: str = ""
    gb_per_s: float = 0.0


@dataclass
class Libfabric:
    """The library that was loaded, by its path or the name given to the loader."""

    library: str
    version: str
    providers: list[Provider] = field(default_factory=list)


def find() -> tuple[Libfabric | None, str]:
    """Return the libfabric that an engine would load here, its providers not yet tested; or None and why."""
    try:
        from kvpush import _core
        from kvpush.config import Config, fabric_libraries

        found = _core.fabric_providers(fabric_libraries(Config.from_env().fabric_library))
    except Exception as error:  # a broken build or library may fail in any way, and this is where it shows
        return None, str(error)
    providers = [
        Provider(
            each["name"],
            each["version"],
            each["protocol"] if not each["reason"] else "",
            each["delivery_complete"],
            usable=not each["reason"],
            detail=each["reason"],
        )
        for each in found["providers"]
    ]
    return Libfabric(found["library"], found["version"], providers), ""


def test_providers(fabric: Libfabric, self_test: Callable[[dict[str, str]], tuple[bool, str, float]]) -> None:
    """Fill in how the self-test of each usable provider went.

    `self_test` takes what to add to the environment; it returns whether it passed, a detail, and GB/s.
    """
    for provider in fabric.providers:
        if provider.usable:
            provider.ok, provider.detail, provider.gb_per_s = self_test({PROVIDER_VARIABLE: provider.name})
