"""The router's counters, as Prometheus text and as one JSON line per request."""

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpush.router.pool import Backend


class RouterMetrics:
    """Counts of one router process. One event loop, so no lock."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.leg_failures: Counter[tuple[str, str]] = Counter()
        self.retries = 0

    def render(self, backends: list[Backend]) -> str:
        """Return everything in Prometheus' text format."""
        lines = _header("kvpush_router_requests_total", "counter", "Requests by outcome.")
        for outcome, count in sorted(self.requests.items()):
            lines.append(_sample("kvpush_router_requests_total", count, outcome=outcome))
        lines += _header("kvpush_router_retries_total", "counter", "Second attempts of a request.")
        lines.append(_sample("kvpush_router_retries_total", self.retries))
        lines += _header("kvpush_router_leg_failures_total", "counter", "Legs that a backend failed.")
        for (role, url), count in sorted(self.leg_failures.items()):
            lines.append(_sample("kvpush_router_leg_failures_total", count, role=role, backend=url))
        lines += _header("kvpush_router_backend_up", "gauge", "1 while the backend is in rotation.")
        for backend in backends:
            lines.append(
                _sample("kvpush_router_backend_up", int(backend.up), role=backend.role, backend=backend.url)
            )
        lines += _header("kvpush_router_backend_outstanding", "gauge", "Requests in flight.")
        for backend in backends:
            lines.append(
                _sample(
                    "kvpush_router_backend_outstanding",
                    backend.outstanding,
                    role=backend.role,
                    backend=backend.url,
                )
            )
        return "\n".join(lines) + "\n"


@dataclass
class RequestTrace:
    """When what happened to one request. Offsets count microseconds from ``start_unix_s``."""

    request_id: str
    key: str = ""
    attempts: int = 0
    status: str = ""
    prefill_us: int | None = None
    first_us: int | None = None
    total_us: int | None = None
    start_unix_s: float = field(default_factory=time.time)
    _start_ns: int = field(default_factory=time.monotonic_ns)

    def now_us(self) -> int:
        """Return the microseconds since the request came in."""
        return (time.monotonic_ns() - self._start_ns) // 1000

    def as_dict(self) -> dict[str, Any]:
        """Return the public fields."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class TraceFile:
    """Appends one JSON line per finished request; ``None`` as path writes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def write(self, trace: RequestTrace) -> None:
        """Append one line with a single write, so that readers see whole lines."""
        if self._path is None:
            return
        line = (json.dumps(trace.as_dict()) + "\n").encode()
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def _header(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]


def _sample(name: str, value: int, **labels: str) -> str:
    pairs = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{pairs}}} {value}" if pairs else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
