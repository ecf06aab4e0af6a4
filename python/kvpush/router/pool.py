"""The router's backends: which are up, how busy each is, which one comes next."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator

import httpx

from kvpush.router.config import BackendSpec, KvIdentity, RouterLimits

logger = logging.getLogger("kvpush.router")


class Backend:
    """One vLLM server. It is in rotation (``up``) after its first passed health check."""

    def __init__(self, role: str, spec: BackendSpec) -> None:
        self.role = role
        self.url = spec.url
        self.up = False
        self.outstanding = 0
        self.last_picked = 0
        self.failures = 0
        self._configured = spec.identity
        self._learned: KvIdentity | None = None

    @property
    def identity(self) -> KvIdentity | None:
        """The KV identity as configured, or as learned since the backend last came up."""
        return self._configured or self._learned

    def learn(self, identity: KvIdentity) -> None:
        """Remember what the engine itself answered."""
        self._learned = identity

    def mark_up(self) -> None:
        """Put the backend (back) into rotation."""
        self.failures = 0
        if not self.up:
            logger.info("%s %s is up", self.role, self.url)
        self.up = True

    def mark_down(self, reason: str) -> None:
        """Take the backend out of rotation until a health check passes."""
        if self.up:
            logger.warning("%s %s is out of rotation: %s", self.role, self.url, reason)
        self.up = False
        # A restarted engine has a new id and port: what was learned dies with the old process.
        self._learned = None

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Count one request as outstanding while the block runs."""
        self.outstanding += 1
        try:
            yield
        finally:
            self.outstanding -= 1


class Pool:
    """All backends of one role."""

    def __init__(self, role: str, specs: Iterable[BackendSpec]) -> None:
        self.role = role
        self.backends = [Backend(role, spec) for spec in specs]
        self._turn = itertools.count(1)

    def pick(self, avoid: Iterable[Backend] = ()) -> Backend | None:
        """Return the backend in rotation with the fewest outstanding requests, else ``None``.

        Ties go to the one that was picked longest ago. ``avoid`` are never returned.
        """
        avoided = set(avoid)
        candidates = [b for b in self.backends if b.up and b not in avoided]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda b: (b.outstanding, b.last_picked))
        chosen.last_picked = next(self._turn)
        return chosen


class HealthChecker:
    """Asks every backend for ``/health`` again and again, each on its own task."""

    def __init__(self, client: httpx.AsyncClient, backends: list[Backend], limits: RouterLimits) -> None:
        self._client = client
        self._backends = backends
        self._limits = limits
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Run one check of every backend, then go on in the background."""
        await asyncio.gather(*(self._check(backend) for backend in self._backends))
        self._tasks = [asyncio.create_task(self._watch(backend)) for backend in self._backends]

    async def stop(self) -> None:
        """End all checks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, backend: Backend) -> None:
        while True:
            await asyncio.sleep(self._limits.health_interval_s)
            await self._check(backend)

    async def _check(self, backend: Backend) -> None:
        try:
            response = await self._client.get(f"{backend.url}/health", timeout=self._limits.health_timeout_s)
            problem = "" if response.is_success else f"/health answers {response.status_code}"
        except httpx.HTTPError as error:
            problem = f"/health: {type(error).__name__}: {error}"
        if not problem:
            backend.mark_up()
            return
        backend.failures += 1
        # One slow answer of a busy engine is no reason to drop it.
        if backend.failures >= self._limits.health_failures:
            backend.mark_down(problem)
