"""The router as an ASGI application: OpenAI's routes in front, two legs behind."""

import asyncio
import contextlib
import json
import math
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvpush.router.config import BackendSpec, RouterLimits
from kvpush.router.exchange import Exchange
from kvpush.router.legs import error_object
from kvpush.router.metrics import RouterMetrics, TraceFile
from kvpush.router.pool import HealthChecker, Pool

_FORWARDED_HEADERS = (b"authorization", b"traceparent", b"tracestate")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Router:
    """All state of one router. Lives on one event loop."""

    def __init__(
        self,
        prefill: Sequence[BackendSpec],
        decode: Sequence[BackendSpec],
        limits: RouterLimits,
        trace_file: Path | None = None,
    ) -> None:
        self.limits = limits
        self.prefill = Pool("prefill", prefill)
        self.decode = Pool("decode", decode)
        self.metrics = RouterMetrics()
        self.traces = TraceFile(trace_file)
        self.settling: set[asyncio.Task[Any]] = set()
        self._client: httpx.AsyncClient | None = None

    @property
    def client(self) -> httpx.AsyncClient:
        """The HTTP client for the backends; there while the application runs."""
        if self._client is None:
            raise RuntimeError("the router's application is not running")
        return self._client

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Open the client, check all backends once, and go on checking until shut-down."""
        timeout = httpx.Timeout(None, connect=self.limits.connect_timeout_s)
        # vLLM closes idle connections after 5 s: drop ours earlier, or a request may meet the close.
        connections = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=2.0)
        async with httpx.AsyncClient(
            timeout=timeout, limits=connections, trust_env=False, headers={"accept-encoding": "identity"}
        ) as client:
            self._client = client
            checker = HealthChecker(client, self.prefill.backends + self.decode.backends, self.limits)
            await checker.start()
            try:
                yield
            finally:
                await checker.stop()
                for task in list(self.settling):
                    task.cancel()
                await asyncio.gather(*self.settling, return_exceptions=True)
                self._client = None

    async def generate(self, request: Request) -> Response:
        """``POST /v1/completions`` and ``/v1/chat/completions``."""
        body = await self._read_body(request)
        request_id = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        headers = _forwarded(request)
        headers["x-request-id"] = request_id
        headers["content-type"] = "application/json"
        return Exchange(self, request.url.path, body, headers)

    async def models(self, request: Request) -> Response:
        """``GET /v1/models``: what a backend in rotation answers."""
        backend = self.decode.pick() or self.prefill.pick()
        if backend is None:
            raise HTTPException(503, "no backend is in rotation")
        headers = _forwarded(request)
        try:
            answer = await self.client.get(f"{backend.url}/v1/models", headers=headers, timeout=30.0)
        except httpx.HTTPError as error:
            raise HTTPException(502, f"the {backend.role} engine did not answer ({error!r})") from error
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def health(self, request: Request) -> Response:
        """``GET /health``: 200 while a request could be served, else 503; each backend's state."""
        pools = (self.prefill, self.decode)
        ready = all(any(backend.up for backend in pool.backends) for pool in pools)
        state = {
            pool.role: [{"url": backend.url, "up": backend.up} for backend in pool.backends] for pool in pools
        }
        return JSONResponse(
            {"status": "ok" if ready else "unavailable", **state}, status_code=200 if ready else 503
        )

    async def prometheus(self, request: Request) -> Response:
        """``GET /metrics``."""
        text = self.metrics.render(self.prefill.backends + self.decode.backends)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _read_body(self, request: Request) -> dict[str, Any]:
        limit = self.limits.max_body_bytes
        too_large = HTTPException(413, f"the request body is larger than {limit} bytes")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        content = bytearray()
        async for chunk in request.stream():
            content += chunk
            if len(content) > limit:
                raise too_large
        try:
            body = json.loads(content, parse_constant=_no_constant, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise HTTPException(400, f"the request body is not valid JSON: {error}") from error
        if not isinstance(body, dict):
            raise HTTPException(400, "the request body must be a JSON object")
        return body


def _forwarded(request: Request) -> httpx.Headers:
    # As bytes: httpx would encode text as ASCII, and a client may send any byte.
    return httpx.Headers([(name, value) for name, value in request.headers.raw if name in _FORWARDED_HEADERS])


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(digits: str) -> float:
    number = float(digits)
    # It would be forwarded as Infinity, which is no JSON.
    if not math.isfinite(number):
        raise ValueError(f"{digits} is too large a number")
    return number


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody is there to read it


async def _as_openai_error(request: Request, error: Exception) -> Response:
    status, message, headers = 500, "internal error of the router", None
    if isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
        message = error.detail
        if status == 404:
            message = f"unknown route {request.method} {request.url.path}"
        elif status == 405:
            message = f"method {request.method} is not allowed for {request.url.path}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": error_object(message, kind, status)}, status, headers=headers)


def build_app(router: Router) -> Starlette:
    """Return the application around ``router``."""
    return Starlette(
        routes=[
            Route("/v1/completions", router.generate, methods=["POST"]),
            Route("/v1/chat/completions", router.generate, methods=["POST"]),
            Route("/v1/models", router.models, methods=["GET"]),
            Route("/health", router.health, methods=["GET"]),
            Route("/metrics", router.prometheus, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: _as_openai_error,
            ClientDisconnect: _client_left,
            Exception: _as_openai_error,
        },
        lifespan=router.lifespan,
    )
