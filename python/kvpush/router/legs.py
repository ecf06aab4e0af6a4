"""The two legs of one request: prefill on P, decode on D.

Both requests are the client's own with different ``kv_transfer_params``. P generates one token, which is
thrown away: what counts is the KV that it pushes. D's answer is the client's answer.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx

from kvpush.router.config import KvIdentity
from kvpush.router.pool import Backend

Body = dict[str, Any]

# Of no use for one thrown-away token; some (min_tokens, best_of, stream_options) would make it an error.
_NOT_FOR_PREFILL = (
    "best_of",
    "echo",
    "logprobs",
    "min_tokens",
    "prompt_logprobs",
    "return_token_ids",
    "stream_options",
    "top_logprobs",
    "use_beam_search",
)


class LegError(Exception):
    """One leg failed before the client got a byte.

    ``status`` is the HTTP status for the client and ``error`` the OpenAI error object. ``retryable``: the
    backend is to blame, another one may do better.
    """

    def __init__(self, backend: Backend, status: int, error: Body, retryable: bool) -> None:
        super().__init__(f"{backend.role} {backend.url}: {error.get('message')}")
        self.backend = backend
        self.status = status
        self.error = error
        self.retryable = retryable


def error_object(message: str, kind: str, code: int, param: str | None = None) -> Body:
    """Return the inside of an OpenAI error answer."""
    return {"message": message, "type": kind, "param": param, "code": code}


def new_transfer_id() -> str:
    """Return an id for one attempt: an earlier attempt may still finish on P, so it is never reused."""
    return f"xfer-{uuid.uuid4().hex}"


def prefill_body(body: Body, path: str, transfer_id: str) -> Body:
    """Return the body for P: the same prompt, one token, not streamed."""
    leg = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    leg.update(stream=False, n=1, max_tokens=1)
    if path.endswith("/chat/completions"):
        leg["max_completion_tokens"] = 1
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": transfer_id,
    }
    return leg


def decode_body(body: Body, identity: KvIdentity, transfer_id: str) -> Body:
    """Return the body for D: the client's own, and where to get the KV from."""
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": identity.engine_id,
        "remote_host": identity.host,
        "remote_port": identity.port,
        "tp_size": identity.tp_size,
        "pp_size": identity.pp_size,
        "remote_request_id": str(uuid.uuid4()),
        "transfer_id": transfer_id,
    }
    return {**body, "kv_transfer_params": params}


def identity_from(answer: Any) -> KvIdentity | None:
    """Read a prefill engine's KV identity from its answer's ``kv_transfer_params``."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    if not isinstance(params, dict):
        return None
    try:
        return KvIdentity(
            engine_id=str(params["remote_engine_id"]),
            host=str(params["remote_host"]),
            port=int(params["remote_port"]),
            tp_size=int(params.get("tp_size") or 1),
            pp_size=int(params.get("pp_size") or 1),
        )
    except (KeyError, TypeError, ValueError):
        return None


async def run_prefill(
    client: httpx.AsyncClient, backend: Backend, path: str, body: Body, headers: httpx.Headers
) -> Any:
    """Run the prefill leg to its end and return P's parsed answer.

    Raises
    ------
    LegError
        P cannot be reached or answers with an error.
    """
    with backend.in_use():
        try:
            response = await client.post(backend.url + path, content=_encode(body), headers=headers)
        except httpx.HTTPError as error:
            raise _unreachable(backend, error) from error
    if not response.is_success:
        raise _refused(backend, response)
    try:
        return response.json()
    except ValueError:
        return None  # only the learning of an identity reads it


class DecodeAnswer:
    """D's answer: status and headers are in, the body so far is in ``first``."""

    def __init__(self, response: httpx.Response, first: bytes, rest: AsyncIterator[bytes] | None) -> None:
        self.streamed = rest is not None
        self.content_type = response.headers.get("content-type", "application/json")
        self.status = response.status_code
        self.first = first
        self.rest = rest if rest is not None else _nothing()


@contextlib.asynccontextmanager
async def open_decode(
    client: httpx.AsyncClient, backend: Backend, path: str, body: Body, headers: httpx.Headers
) -> AsyncIterator[DecodeAnswer]:
    """Start the decode leg; enters when the first bytes are there (all of them if not streamed).

    Leaving the block early closes the connection, which makes D abort the request.

    Raises
    ------
    LegError
        D cannot be reached, answers with an error, or breaks off before its first byte.
    """
    with backend.in_use():
        request = client.build_request("POST", backend.url + path, content=_encode(body), headers=headers)
        try:
            response = await client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(backend, error) from error
        try:
            yield await _first_bytes(backend, response)
        finally:
            await response.aclose()


async def _first_bytes(backend: Backend, response: httpx.Response) -> DecodeAnswer:
    streamed = response.headers.get("content-type", "").startswith("text/event-stream")
    try:
        if not response.is_success or not streamed:
            content = await response.aread()
            if not response.is_success:
                raise _refused(backend, response)
            return DecodeAnswer(response, content, None)
        rest = response.aiter_raw()
        first = await anext(rest, b"")
    except httpx.HTTPError as error:
        raise _unreachable(backend, error) from error
    if not first:
        empty = error_object("the decode engine sent an empty stream", "server_error", 502)
        raise LegError(backend, 502, empty, retryable=True)
    _raise_for_error_event(backend, first)
    return DecodeAnswer(response, first, rest)


def _raise_for_error_event(backend: Backend, first: bytes) -> None:
    """VLLM answers 200 before its first token: a request that fails then says so in its first event."""
    line = first.split(b"\n", 1)[0]
    if not line.startswith(b"data:") or b'"error"' not in line:
        return
    try:
        event = json.loads(line.removeprefix(b"data:"))
    except ValueError:
        return
    error = event.get("error") if isinstance(event, dict) else None
    if isinstance(error, dict):
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        raise LegError(backend, status, error, retryable=status >= 500)


def _unreachable(backend: Backend, cause: httpx.HTTPError) -> LegError:
    reason = f"{type(cause).__name__}: {cause}".rstrip(": ")
    if isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout):
        backend.mark_down(reason)
    message = f"the {backend.role} engine did not answer ({reason})"
    return LegError(backend, 502, error_object(message, "server_error", 502), retryable=True)


def _refused(backend: Backend, response: httpx.Response) -> LegError:
    """Pass on the backend's own error object, or make one from what it sent."""
    status = response.status_code
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = None
    if not isinstance(error, dict):
        text = response.text[:500] or response.reason_phrase
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = error_object(f"the {backend.role} engine answered {status}: {text}", kind, status)
    # A backend's redirect is its misconfiguration, not something the client can follow.
    client_status = status if status >= 400 else 502
    return LegError(backend, client_status, error, retryable=client_status >= 500)


def _encode(body: Body) -> bytes:
    # Not httpx' own json=: that one fails for a lone surrogate, which JSON allows as an escape.
    return json.dumps(body, separators=(",", ":")).encode()


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""
