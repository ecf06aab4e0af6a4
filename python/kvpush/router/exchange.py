"""One request through the router: two legs at once, one answer.

Rules. The first leg to fail before the client got a byte ends the attempt and cancels the other leg. When
the backend is to blame, one more attempt runs on other backends under a new transfer id. From D's first
byte on the answer is D's alone: a failing P no longer matters, since D either has the KV or computes it.
A client that goes away cancels both legs.
"""

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import httpx
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvpush.router.config import KvIdentity
from kvpush.router.legs import (
    DecodeAnswer,
    LegError,
    decode_body,
    error_object,
    identity_from,
    new_transfer_id,
    open_decode,
    prefill_body,
    run_prefill,
)
from kvpush.router.metrics import RequestTrace
from kvpush.router.pool import Backend

if TYPE_CHECKING:
    from kvpush.router.app import Router

logger = logging.getLogger("kvpush.router")

_ATTEMPTS = 2


class Exchange(Response):
    """The answer to one completion request; runs both legs when the server calls it."""

    def __init__(self, router: "Router", path: str, body: dict[str, Any], headers: httpx.Headers) -> None:
        super().__init__()
        self._router = router
        self._path = path
        self._body = body
        self._leg_headers = headers
        self._trace = RequestTrace(headers["x-request-id"])
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request, or stop at once when the client goes away."""
        work = asyncio.create_task(self._serve(scope, receive, send))
        gone = asyncio.create_task(_client_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            # The server also reports a disconnect once the answer is complete: that is no cancel.
            if work.done() or self._trace.status:
                await work
        finally:
            await _cancel(work, gone)
            self._trace.status = self._trace.status or "client_gone"
            self._trace.total_us = self._trace.now_us()
            self._router.metrics.requests[self._trace.status] += 1
            self._router.traces.write(self._trace)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: LegError | None = None
        avoid: set[Backend] = set()
        for attempt in range(_ATTEMPTS):
            prefill = self._router.prefill.pick(avoid)
            decode = self._router.decode.pick(avoid)
            if prefill is None or decode is None:
                if failure is None:
                    missing = "prefill" if prefill is None else "decode"
                    await self._answer_error(scope, receive, send, 503, _unavailable(missing), "no_backend")
                    return
                break
            self._router.metrics.retries += attempt
            self._trace.attempts = attempt + 1
            try:
                await self._attempt(prefill, decode, send)
            except LegError as error:
                failure = error
                self._router.metrics.leg_failures[error.backend.role, error.backend.url] += 1
                logger.warning("%s: %s", self._trace.request_id, error)
                if not error.retryable:
                    break
                avoid.add(error.backend)
            else:
                return
        assert failure is not None  # the loop ends by return, or by a failure
        await self._answer_error(scope, receive, send, failure.status, failure.error, "failed")

    async def _attempt(self, prefill: Backend, decode: Backend, send: Send) -> None:
        """Run both legs and relay D's answer.

        Raises
        ------
        LegError
            One leg failed and nothing was sent to the client; the other is cancelled.
        """
        transfer_id = self._trace.key = new_transfer_id()
        self._trace.prefill_us = None
        prefill_leg = asyncio.create_task(self._prefill(prefill, transfer_id))
        decode_leg: asyncio.Task[None] | None = None
        answered = False
        try:
            identity = prefill.identity
            if identity is None:
                identity = await _learn_identity(prefill, prefill_leg)
            decode_leg = asyncio.create_task(self._decode(decode, identity, transfer_id, send))
            await asyncio.wait({prefill_leg, decode_leg}, return_when=asyncio.FIRST_COMPLETED)
            if prefill_leg.done() and not decode_leg.done() and not self._started:
                await prefill_leg  # raises if P failed
            await decode_leg
            answered = True
        finally:
            if decode_leg is not None:
                await _cancel(decode_leg)
            if answered:
                self._settle(prefill, prefill_leg)
            else:
                await _cancel(prefill_leg)

    async def _prefill(self, backend: Backend, transfer_id: str) -> Any:
        body = prefill_body(self._body, self._path, transfer_id)
        answer = await run_prefill(self._router.client, backend, self._path, body, self._leg_headers)
        self._trace.prefill_us = self._trace.now_us()
        return answer

    async def _decode(self, backend: Backend, identity: KvIdentity, transfer_id: str, send: Send) -> None:
        body = decode_body(self._body, identity, transfer_id)
        client = self._router.client
        async with open_decode(client, backend, self._path, body, self._leg_headers) as answer:
            self._started = True
            self._trace.first_us = self._trace.now_us()
            await self._relay(answer, backend, send)

    async def _relay(self, answer: DecodeAnswer, backend: Backend, send: Send) -> None:
        headers = [
            (b"content-type", answer.content_type.encode("latin-1")),
            (b"x-request-id", self._trace.request_id.encode()),
        ]
        if answer.streamed:
            headers.append((b"cache-control", b"no-cache"))
        else:
            headers.append((b"content-length", str(len(answer.first)).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if not answer.streamed:
            self._trace.status = "ok"  # before the send: see __call__
            await send({"type": "http.response.body", "body": answer.first, "more_body": False})
            return
        await send({"type": "http.response.body", "body": answer.first, "more_body": True})
        try:
            async for chunk in answer.rest:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._trace.status = "ok"
        except httpx.HTTPError as error:
            self._router.metrics.leg_failures[backend.role, backend.url] += 1
            self._trace.status = "broken_stream"
            message = f"the decode engine broke off ({type(error).__name__}: {error})"
            event = json.dumps({"error": error_object(message, "server_error", 502)})
            last = f"data: {event}\n\ndata: [DONE]\n\n".encode()
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _settle(self, backend: Backend, prefill_leg: asyncio.Task[Any]) -> None:
        """Let P's leg end by itself for a moment: its answer often comes just after D's."""

        async def settle() -> None:
            try:
                await asyncio.wait({prefill_leg}, timeout=self._router.limits.settle_s)
                if not prefill_leg.done():
                    logger.warning("%s: prefill %s does not end", self._trace.request_id, backend.url)
                elif prefill_leg.exception() is not None:
                    self._router.metrics.leg_failures[backend.role, backend.url] += 1
            finally:
                await _cancel(prefill_leg)

        task = asyncio.create_task(settle())
        self._router.settling.add(task)
        task.add_done_callback(self._router.settling.discard)

    async def _answer_error(
        self, scope: Scope, receive: Receive, send: Send, status: int, error: dict[str, Any], outcome: str
    ) -> None:
        self._trace.status = outcome
        headers = {"x-request-id": self._trace.request_id}
        await JSONResponse({"error": error}, status, headers=headers)(scope, receive, send)


async def _learn_identity(backend: Backend, prefill_leg: asyncio.Task[Any]) -> KvIdentity:
    """Wait for P's answer, which names its engine id and side channel, and remember them."""
    identity = identity_from(await prefill_leg)
    if identity is None:
        message = (
            f"the prefill engine {backend.url} did not answer with kv_transfer_params. Is it started with "
            "a push KV connector, kv_role kv_producer? Or give its kv= and id= to --prefill"
        )
        raise LegError(backend, 502, error_object(message, "server_error", 502), retryable=True)
    backend.learn(identity)
    return identity


def _unavailable(role: str) -> dict[str, Any]:
    return error_object(f"no {role} engine is in rotation; try again later", "server_error", 503)


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
