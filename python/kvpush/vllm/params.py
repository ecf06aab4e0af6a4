"""Request parameters, pairing keys and prompt digests: pure functions, no engine and no I/O.

Everything that comes from a request is validated here, once. The parameter mapping is shared by
sibling requests (``n`` > 1), so nothing here, or later, writes to it.
"""

import hashlib
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_NAME_CHARS = 1024
"""Longest accepted string parameter (characters)."""

_SUFFIX = r"-[0-9a-f]{8}"
_COMPLETION = r"cmpl-(?P<base>.+)-(?P<index>\d+)"
_OTHER = r"(?:chatcmpl-|generate-tokens-|resp_)(?P<other>.+)"


class BadParamsError(ValueError):
    """Transfer parameters of one request are unusable; the text says which one and why."""


@dataclass(frozen=True)
class Remote:
    """Where the prefill engine of one request answers."""

    host: str
    port: int
    engine_id: str


@dataclass(frozen=True)
class Leg:
    """What one request's parameters ask for; ``remote`` is set on the decode side only."""

    key: str
    transfer_id: str | None
    remote: Remote | None


def ids_are_randomized() -> bool:
    """Whether vLLM appends its 8-hex suffix to request ids (it does unless switched off)."""
    return os.environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0").lower() in ("", "0", "false")


def strip_decorations(request_id: str, randomized: bool = True) -> tuple[str, int, bool]:
    """Split an engine's request id into ``(base id, prompt index, was an API server's id)``.

    ``cmpl-<id>-<i>-<8 hex>`` gives ``(<id>, i)``; ``chatcmpl-<id>-<8 hex>`` gives ``(<id>, 0)``; a
    child of ``n`` > 1 has ``<index>_`` in front. An id of another form loses nothing but the suffix.
    """
    suffix = _SUFFIX if randomized else ""
    match = re.fullmatch(rf"(?:\d+_)?(?:{_COMPLETION}|{_OTHER}){suffix}", request_id, re.DOTALL)
    if match:
        if match["base"] is not None:
            return match["base"], int(match["index"]), True
        return match["other"], 0, True
    if randomized:
        plain = re.fullmatch(rf"(?P<id>.+){_SUFFIX}", request_id, re.DOTALL)
        if plain:
            return plain["id"], 0, False
    return request_id, 0, False


def make_key(base: str, index: int) -> str:
    """Return the pairing key of prompt ``index`` of request ``base``; distinct inputs, distinct keys."""
    if index == 0 and not re.search(r"#\d+$", base):
        return base
    return f"{base}#{index}"


def _text(params: Mapping[str, Any], name: str, required: bool) -> str | None:
    value = params.get(name)
    if value is None:
        if required:
            raise BadParamsError(f"{name} is missing: a non-empty string is required")
        return None
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        raise BadParamsError(
            f"{name} is {_show(value)}: a string of 1 to {MAX_NAME_CHARS} characters is required"
        )
    return value


def _integer(params: Mapping[str, Any], name: str, low: int, high: int, default: int | None = None) -> int:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadParamsError(f"{name} is {_show(value)}: an integer from {low} to {high} is required")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def parse_decode_leg(params: Mapping[str, Any], request_id: str, tp_size: int, pp_size: int) -> Leg:
    """Read the decode leg's parameters (``do_remote_prefill``).

    Raises
    ------
    BadParamsError
        One is missing, ill-typed or does not fit this engine.
    """
    transfer_id = _text(params, "transfer_id", required=False)
    engine_id = _text(params, "remote_engine_id", required=True)
    host = _text(params, "remote_host", required=True)
    port = _integer(params, "remote_port", 1, 65535)
    remote_request_id = _text(params, "remote_request_id", required=transfer_id is None)
    for name, ours, default in (("tp_size", tp_size, None), ("pp_size", pp_size, 1)):
        theirs = _integer(params, name, 1, 1 << 16, default)
        if theirs != ours:
            raise BadParamsError(
                f"{name} of the prefill engine is {theirs}, here it is {ours}: they must be equal"
            )
    assert engine_id is not None
    assert host is not None
    randomized = ids_are_randomized()
    _, index, _ = strip_decorations(request_id, randomized)
    if transfer_id is not None:
        base = transfer_id
    else:
        assert remote_request_id is not None
        # Either the router's own id, as it is, or an engine's id as prefill returned it.
        stripped, _, decorated = strip_decorations(remote_request_id, randomized)
        base = stripped if decorated else remote_request_id
    return Leg(make_key(base, index), transfer_id, Remote(host, port, engine_id))


def parse_prefill_leg(params: Mapping[str, Any], request_id: str) -> Leg:
    """Read the prefill leg's parameters (``do_remote_decode``).

    Raises
    ------
    BadParamsError
        ``transfer_id`` is there but is not a usable string.
    """
    transfer_id = _text(params, "transfer_id", required=False)
    base, index, _ = strip_decorations(request_id, ids_are_randomized())
    return Leg(make_key(transfer_id or base, index), transfer_id, None)


def flag(params: Mapping[str, Any], name: str) -> bool:
    """Return a boolean parameter; absent and null are False.

    Raises
    ------
    BadParamsError
        It is anything else.
    """
    value = params.get(name)
    if value is None or value is False or value is True:
        return bool(value)
    raise BadParamsError(f"{name} is {_show(value)}: true or false is required")


def digest(
    token_ids: Any,
    mm_items: Any = (),
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """Return the SHA-256 (32 bytes) of what determines a prompt's KV, the same on both sides.

    Every field is preceded by its length or count, so no two different prompts share an encoding.

    Parameters
    ----------
    token_ids
        The prompt's token ids.
    mm_items
        ``(identifier, offset, length)`` per multi-modal item: content hash, position in tokens.
    lora_name, cache_salt
        The adapter's name and the request's cache salt; None is not the same as "".
    """
    sha = hashlib.sha256(b"kvpush-prompt-v1")
    tokens = np.asarray(token_ids, dtype="<i8")
    sha.update(struct.pack("<Q", tokens.size))
    sha.update(tokens.tobytes())
    items = list(mm_items)
    sha.update(struct.pack("<Q", len(items)))
    for identifier, offset, length in items:
        sha.update(_field(identifier) + struct.pack("<qq", offset, length))
    sha.update(_field(lora_name) + _field(cache_salt))
    return sha.digest()


def _field(text: str | None) -> bytes:
    if text is None:
        return struct.pack("<q", -1)
    raw = text.encode("utf-8", "surrogatepass")
    return struct.pack("<q", len(raw)) + raw


def request_digest(request: Any) -> bytes:
    """Return the digest of a vLLM request.

    Raises
    ------
    BadParamsError
        Its KV is not determined by token ids (prompt embeddings, a streamed prompt).
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        raise BadParamsError("prompt embeddings cannot be transferred: use token ids")
    if getattr(request, "resumable", False):
        raise BadParamsError("a prompt that arrives in parts (streaming input) cannot be transferred")
    lora = getattr(request, "lora_request", None)
    items = (
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in (request.mm_features or ())
    )
    return digest(
        request.prompt_token_ids, items, lora.lora_name if lora is not None else None, request.cache_salt
    )
