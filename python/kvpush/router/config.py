"""What the router is told on its command line: backends and limits."""

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class KvIdentity:
    """Where a decode engine finds a prefill engine's KV side channel.

    ``host`` and ``port`` are the scheduler's side channel, ``engine_id`` the engine's id; ``tp_size``
    and ``pp_size`` are its tensor and pipeline parallel sizes.
    """

    engine_id: str
    host: str
    port: int
    tp_size: int = 1
    pp_size: int = 1


@dataclass(frozen=True)
class BackendSpec:
    """One backend as given by ``--prefill`` or ``--decode``. ``identity`` is for prefill only."""

    url: str
    identity: KvIdentity | None = None


@dataclass(frozen=True)
class RouterLimits:
    """Bounds and periods of the router."""

    max_body_bytes: int = 64 << 20
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    health_failures: int = 2
    connect_timeout_s: float = 5.0
    settle_s: float = 5.0
    """How long a prefill leg may go on after its decode leg has answered in full."""


PREFILL_SYNTAX = "URL[,kv=HOST:PORT,id=ENGINE_ID[,tp=N][,pp=N]]"


def parse_prefill(text: str) -> BackendSpec:
    """Parse ``http://p1:8100,kv=p1:5600,id=prefill-1[,tp=1][,pp=1]``.

    ``kv`` and ``id`` come together. Without them the router learns both from the engine's first
    answer; that first request runs its two legs one after the other.

    Raises
    ------
    ValueError
        With the offending part and the expected syntax.
    """
    url, *parts = text.split(",")
    options: dict[str, str] = {}
    for part in parts:
        name, separator, value = part.partition("=")
        name = name.strip()
        if not separator or name not in ("kv", "id", "tp", "pp") or name in options or not value.strip():
            raise ValueError(f"--prefill {text!r}: cannot read {part!r}. Expected {PREFILL_SYNTAX}")
        options[name] = value.strip()
    spec_url = _parse_url("--prefill", url)
    if not options:
        return BackendSpec(spec_url)
    if "kv" not in options or "id" not in options:
        raise ValueError(
            f"--prefill {text!r}: kv= and id= must be given together (or neither: then the router "
            f"learns them). Expected {PREFILL_SYNTAX}"
        )
    host, port = _parse_address(text, options["kv"])
    sizes = [_parse_positive(text, name, options.get(name, "1")) for name in ("tp", "pp")]
    return BackendSpec(spec_url, KvIdentity(options["id"], host, port, sizes[0], sizes[1]))


def parse_decode(text: str) -> BackendSpec:
    """Parse the URL of a decode backend.

    Raises
    ------
    ValueError
        Not an http or https URL.
    """
    if "," in text:
        raise ValueError(f"--decode {text!r}: takes a URL alone. Give the option once per backend")
    return BackendSpec(_parse_url("--decode", text))


def _parse_url(option: str, text: str) -> str:
    url = text.strip().rstrip("/")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError(f"{option} {text!r}: not a URL like http://host:8100")
    # Everyone writes the OpenAI base URL with /v1; the router adds that part itself.
    return url[: -len("/v1")] if url.endswith("/v1") else url


def _parse_address(text: str, address: str) -> tuple[str, int]:
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--prefill {text!r}: kv={address!r} is not HOST:PORT")
    return host, int(port)


def _parse_positive(text: str, name: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"--prefill {text!r}: {name}={value!r} is not a positive number")
    return int(value)
