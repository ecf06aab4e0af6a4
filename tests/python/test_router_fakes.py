"""Fake OpenAI backends and the real router, each a real uvicorn server on its own thread.

A fake records every request and answers as its script says. Waiting is always for an event, never for a
length of time; ``DEADLINE_S`` only ends a test that hangs.
"""

import asyncio
import contextlib
import json
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvpush.router.app import Router, build_app
from kvpush.router.config import RouterLimits, parse_decode, parse_prefill

DEADLINE_S = 30.0


class _Server(uvicorn.Server):
    ready: threading.Event

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


@contextlib.contextmanager
def serve(app: Any, port: int = 0) -> Iterator[int]:
    """Run ``app`` on a thread; yields its port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    server = _Server(config)
    server.ready = threading.Event()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert server.ready.wait(DEADLINE_S)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


@dataclass
class Call:
    """One request as a fake saw it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def params(self) -> dict[str, Any]:
        return self.body["kv_transfer_params"]


class Held:
    """A step of a script: wait until released, or until the caller hangs up."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._release = threading.Event()

    def release(self) -> None:
        self._release.set()

    async def wait(self) -> None:
        self.reached.set()
        released = await asyncio.to_thread(self._release.wait, DEADLINE_S)
        assert released


Script = Callable[["Fake", Call], Any]


class Fake:
    """One backend. ``script`` makes the response; by default a plain good answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.healthy = True
        self.script: Script | None = None
        self.calls: deque[Call] = deque()
        self._arrival = threading.Condition()
        self.port = 0

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self._answer, methods=["POST"]),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
        ]
        return Starlette(routes=routes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, index: int = 0) -> Call:
        """Return a request once it is there."""
        with self._arrival:
            assert self._arrival.wait_for(lambda: len(self.calls) > index, DEADLINE_S)
            return self.calls[index]

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self.healthy else 503)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.name}]})

    async def _answer(self, request: Request) -> Response:
        call = Call(request.url.path, dict(request.headers), json.loads(await request.body()))
        with self._arrival:
            self.calls.append(call)
            self._arrival.notify_all()
        if self.script is None:
            return self.good(call)
        work = asyncio.ensure_future(self.script(self, call))
        gone = asyncio.ensure_future(request.receive())
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            call.cancelled.set()
            work.cancel()
            return Response(status_code=499)
        gone.cancel()
        response = work.result()
        assert isinstance(response, Response)
        return response

    def good(self, call: Call) -> Response:
        choices = [{"index": i, "text": f"from {self.name}"} for i in range(call.body.get("n") or 1)]
        answer: dict[str, Any] = {"object": "text_completion", "choices": choices}
        if call.params.get("do_remote_decode"):
            answer["kv_transfer_params"] = {
                "remote_engine_id": f"engine-{self.name}",
                "remote_host": "10.0.0.9",
                "remote_port": 5601,
                "tp_size": 2,
                "pp_size": 1,
            }
        return JSONResponse(answer)

    async def refuse(self, call: Call, status: int = 500) -> Response:
        error = {"message": f"{self.name} says no", "type": "Oops", "param": None, "code": status}
        return JSONResponse({"error": error}, status)

    def stream(self, call: Call, *steps: "str | Held") -> Response:
        async def events() -> Any:
            try:
                for step in steps:
                    if isinstance(step, Held):
                        await step.wait()
                    else:
                        yield step.encode()
            except asyncio.CancelledError:
                call.cancelled.set()
                raise

        return StreamingResponse(events(), media_type="text/event-stream")


@dataclass
class Cluster:
    """Fakes, and the router in front of them."""

    prefill: list[Fake]
    decode: list[Fake]
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, body: Any = None, path: str = "/v1/completions", **kwargs: Any) -> httpx.Response:
        body = {"model": "m", "prompt": "hello", "max_tokens": 7} if body is None else body
        return httpx.post(self.url + path, json=body, timeout=DEADLINE_S, **kwargs)

    def post_in_background(self, body: Any = None) -> "Background":
        return Background(lambda: self.post(body))

    def wait_for_state(self, role: str, up: list[bool]) -> None:
        """Return once the router shows this rotation; each question is a round trip to it."""
        while [b["up"] for b in httpx.get(self.url + "/health").json()[role]] != up:
            pass

    def metric(self, line_start: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        return sum(float(x.rsplit(" ", 1)[1]) for x in text.splitlines() if x.startswith(line_start))


class Background:
    """A request on its own thread."""

    def __init__(self, run: Callable[[], httpx.Response]) -> None:
        self._run = run
        self._outcome: httpx.Response | BaseException | None = None
        self._thread = threading.Thread(target=self._body, daemon=True)
        self._thread.start()

    def _body(self) -> None:
        try:
            self._outcome = self._run()
        except BaseException as error:
            self._outcome = error

    def result(self) -> httpx.Response:
        self._thread.join(DEADLINE_S)
        assert isinstance(self._outcome, httpx.Response), self._outcome
        return self._outcome


@contextlib.contextmanager
def cluster(
    num_prefill: int = 1,
    num_decode: int = 1,
    learn: bool = False,
    limits: RouterLimits | None = None,
    **router_options: Any,
) -> Iterator[Cluster]:
    """Start fakes and the router; the router has checked them all once when this enters."""
    limits = limits or RouterLimits(health_interval_s=0.01, health_failures=1)
    with contextlib.ExitStack() as stack:
        made = Cluster(
            [Fake(f"p{i}") for i in range(num_prefill)], [Fake(f"d{i}") for i in range(num_decode)]
        )
        for fake in made.prefill + made.decode:
            fake.port = stack.enter_context(serve(fake.app()))
        known = "" if learn else ",kv=127.0.0.1:{port},id=engine-{name}"
        prefill = [
            parse_prefill(fake.url + known.format(port=5600 + i, name=fake.name))
            for i, fake in enumerate(made.prefill)
        ]
        decode = [parse_decode(fake.url) for fake in made.decode]
        router = Router(prefill, decode, limits, **router_options)
        made.port = stack.enter_context(serve(build_app(router)))
        yield made
