"""Config: limits, precedence of argument, environment and default, and what the core is given."""

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from kvpush import config as config_module
from kvpush.config import Config, find_nixl_library
from kvpush.errors import InvalidArgument, Unsupported

FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def test_defaults_are_valid_and_frozen():
    config = Config()
    assert config == Config.from_env({})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_slots = 3  # type: ignore[misc]


def test_every_numeric_field_has_limits():
    numeric = {name for name, field in FIELDS.items() if type(field.default) in (int, float)}
    assert numeric == set(config_module._LIMITS)


@pytest.mark.parametrize("name", sorted(config_module._LIMITS))
def test_limits_name_field_value_and_limit(name):
    low, high = config_module._LIMITS[name]
    for bad in (low - 1, high * 2, "many", None, True, float("nan")):
        with pytest.raises(InvalidArgument, match=f"{name}=.*expected .* from {low:g} to") as caught:
            Config(**{name: bad})
        assert repr(bad) in str(caught.value)


@pytest.mark.parametrize("name", sorted(config_module._LIMITS))
def test_a_fraction_is_no_count(name):
    if isinstance(FIELDS[name].default, int):
        with pytest.raises(InvalidArgument, match="an integer"):
            Config(**{name: 7.5})
    else:
        assert getattr(Config(**{name: 7}), name) == 7.0


def test_integers_of_other_types_are_taken():
    numpy = pytest.importorskip("numpy")
    value = Config(num_slots=numpy.int64(5)).num_slots
    assert type(value) is int
    assert value == 5


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("transport", "carrier pigeon"),
        ("transport", None),
        ("nixl_backends", ()),
        ("nixl_backends", "UCX"),
        ("nixl_backends", ("",)),
        ("nixl_backends", (1,)),
        ("nixl_library", 3),
        ("nixl_device_memory", 1),
        ("fabric_device_memory", 1),
        ("fabric_pin_thread", 1),
        ("nixl_device_memory", "true"),
        ("fabric_library", 3),
        ("fabric_provider", None),
        ("fabric_rails", "eth0"),
        ("fabric_rails", ("eth0", "")),
        ("fabric_rails", ("eth0", "eth0")),
        ("fabric_rails", (1,)),
        ("fabric_rails", tuple(f"eth{i}" for i in range(17))),
        ("cuda_library", None),
    ],
)
def test_text_fields_are_checked(name, bad):
    with pytest.raises(InvalidArgument, match=name):
        Config(**{name: bad})


def test_a_landing_must_fit_its_budget():
    with pytest.raises(InvalidArgument, match="slot_bytes=1024 x num_slots=8 .* landing_bytes=8191"):
        Config(slot_bytes=1024, num_slots=8, landing_bytes=8191)
    Config(slot_bytes=1024, num_slots=8, landing_bytes=8192)


def test_each_field_has_an_environment_variable():
    texts = {
        "transport": ("nixl", "nixl"),
        "nixl_library": ("/lib/x.so", "/lib/x.so"),
        "nixl_backends": ("UCX, LIBFABRIC", ("UCX", "LIBFABRIC")),
        "nixl_device_memory": ("1", True),
        "fabric_device_memory": ("1", True),
        "fabric_pin_thread": ("1", True),
        "cuda_bulk": ("1", True),
        "fabric_library": ("/lib/y.so", "/lib/y.so"),
        "fabric_provider": ("tcp;ofi_rxm", "tcp;ofi_rxm"),
        "fabric_rails": ("eth0, 127.0.0.2", ("eth0", "127.0.0.2")),
        "slot_bytes": ("0x100", 256),
        "secret": ("correct horse battery", "correct horse battery"),
    }
    for name, field in FIELDS.items():
        text, expected = texts.get(name) or ("3", type(field.default)(3))
        config = Config.from_env({f"KVPUSH_{name.upper()}": text})
        assert getattr(config, name) == expected
        assert type(getattr(config, name)) is type(field.default)


def test_an_argument_wins_over_the_environment():
    environ = {"KVPUSH_NUM_SLOTS": "3", "KVPUSH_TRANSPORT": "nixl", "KVPUSH_SLOT_BYTES": ""}
    config = Config.from_env(environ, num_slots=5, transport=None)
    assert (config.num_slots, config.transport, config.slot_bytes) == (5, "nixl", 0)


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("KVPUSH_PACK_THREADS", "2")
    assert Config.from_env().pack_threads == 2
    assert Config().pack_threads == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NUM_SLOTS", "eight"),
        ("PEER_TIMEOUT_S", "10s"),
        ("NUM_SLOTS", "1.5"),
        ("NIXL_DEVICE_MEMORY", "yes"),
    ],
)
def test_an_unreadable_variable_is_named(name, text):
    with pytest.raises(InvalidArgument, match=f"KVPUSH_{name}='{text}'"):
        Config.from_env({f"KVPUSH_{name}": text})


def test_an_unknown_override_is_refused():
    with pytest.raises(InvalidArgument, match=r"num_slot: no such setting; there are transport, .*num_slots"):
        Config.from_env({}, num_slot=4)


def test_core_gets_microseconds():
    core = Config(peer_timeout_s=0.25, close_timeout_s=0).to_core()
    assert core["peer_timeout_us"] == 250_000
    assert core["close_timeout_us"] == 0
    assert core["pairing_timeout_us"] == 60_000_000
    assert all(type(value) in (bool, int, str, list) for value in core.values())
    assert core.pop("cuda_kernels").endswith("kvpush_kernels.fatbin")
    assert core.pop("min_link_bytes_per_s") == 500_000_000
    assert {name.removesuffix("_us").removesuffix("_s") for name in core} == {
        name.removesuffix("_s") for name in FIELDS if name not in ("secret", "min_link_gb_per_s")
    }


class _Distribution:
    def __init__(self, folder: Path, files: list[str] | None) -> None:
        self._folder = folder
        self.files = None if files is None else [Path(file) for file in files]

    def locate_file(self, file: Path) -> Path:
        return self._folder / file


def _install(monkeypatch, **distributions):
    def distribution(name):
        if name.replace("-", "_") not in distributions:
            raise importlib.metadata.PackageNotFoundError(name)
        return distributions[name.replace("-", "_")]

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_nixl_library_is_found_among_the_installed_files(monkeypatch, tmp_path):
    library = tmp_path / ".libs" / "libnixl_capi.so"
    library.parent.mkdir()
    library.touch()
    _install(monkeypatch, nixl_cu12=_Distribution(tmp_path, ["a.py", ".libs/libnixl_capi.so"]))
    assert find_nixl_library() == str(library)
    assert Config(transport="nixl").to_core()["nixl_library"] == str(library)
    _install(monkeypatch, nixl_cu13=_Distribution(tmp_path, None))
    assert find_nixl_library() is None


def test_nixl_without_its_library_says_how_to_get_it(monkeypatch, tmp_path):
    _install(monkeypatch)
    assert Config(transport="shm").to_core()["nixl_library"] == ""
    with pytest.raises(Unsupported, match=r"libnixl_capi.so was not found; pip install 'kvpush\[nixl\]'"):
        Config(transport="nixl").to_core()
    with pytest.raises(Unsupported, match="elsewhere.so was not found"):
        Config(transport="nixl", nixl_library=str(tmp_path / "elsewhere.so")).to_core()


def test_libfabric_is_the_configured_one_or_the_systems_or_one_that_a_wheel_carries(monkeypatch, tmp_path):
    library = tmp_path / "lib" / "libfabric.so.1"
    library.parent.mkdir()
    library.touch()
    _install(monkeypatch)
    assert Config(transport="shm").to_core()["fabric_library"] == []
    assert Config(transport="fabric").to_core()["fabric_library"] == ["libfabric.so.1"]
    _install(monkeypatch, mpich=_Distribution(tmp_path, ["lib/libfabric.so.1"]))
    assert Config(transport="fabric").to_core()["fabric_library"] == ["libfabric.so.1", str(library)]
    named = Config(transport="fabric", fabric_library="/opt/x.so").to_core()
    assert named["fabric_library"] == ["/opt/x.so"]
