"""Reading what the workers and the router wrote about each request."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass(frozen=True)
class Moved:
    """What moved for one request, as the receiving side counted it.

    ``transfer_us`` runs from the moment P had all blocks ready to the moment D had all of them: what of
    the transfer prefill did not hide. ``None`` if P's side is not known.
    """

    status: str
    bytes: int
    network_ops: int
    per_block_descriptors: int
    transfer_us: int | None


def read_lines(path: Path) -> list[Line]:
    """Return the complete JSON lines of a trace file; a line still being written is left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    complete = text[: text.rfind("\n") + 1]
    lines = [json.loads(line) for line in complete.splitlines() if line.strip()]
    return [line for line in lines if isinstance(line, dict)]


def of_key(lines: Iterable[Line], transfer_id: str, side: str) -> list[Line]:
    """Return the lines of one side that belong to the router's ``transfer_id``.

    The connector's key is the transfer id, followed by the prompt's index in a multi-prompt completion.
    """
    return [
        line
        for line in lines
        if line.get("side") == side and str(line.get("key", "")).startswith(transfer_id)
    ]


def moved(received: Sequence[Line], pushed: Sequence[Line]) -> Moved | None:
    """Sum up the lines of one request; ``None`` if nothing was received."""
    if not received:
        return None
    bad = [str(line.get("status")) for line in received if line.get("kind") != "received"]
    return Moved(
        status=bad[0] if bad else "ok",
        bytes=sum(int(line.get("bytes", 0)) for line in received),
        network_ops=sum(int(line.get("boxes", 0)) for line in received),
        per_block_descriptors=sum(int(line.get("per_block_descriptors", 0)) for line in received),
        transfer_us=_transfer_us(received, pushed),
    )


def _transfer_us(received: Sequence[Line], pushed: Sequence[Line]) -> int | None:
    # Wall clocks of two processes, comparable since the demo runs both on one machine.
    ready = [line["finished_at"] for line in pushed if isinstance(line.get("finished_at"), int | float)]
    done = [end for end in (_received_at(line) for line in received) if end is not None]
    return int(max(0.0, max(done) - max(ready)) * 1e6) if ready and done else None


def _received_at(line: Line) -> float | None:
    """Return when the engine had it all: vLLM asks for it only after its step, which ``ended_at`` tells."""
    started, timings = line.get("started_at"), line.get("timings")
    if isinstance(started, int | float) and isinstance(timings, dict) and "total_us" in timings:
        return started + int(timings["total_us"]) / 1e6
    ended = line.get("ended_at")
    return ended if isinstance(ended, int | float) else None


def wait_until(found: Callable[[], bool], deadline: float) -> bool:
    """Poll until ``found()``: the writers report just after the client has its answer.

    ``deadline`` is in monotonic seconds.
    """
    while not found():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
