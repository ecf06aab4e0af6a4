"""``kvpush bench engine``: what the engine and the connector cost apart from copying, in percentiles."""

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import kvpush
from kvpush.bench.rows import quantile

BLOCK_TOKENS, BLOCK_BYTES = 16, 1024
NUM_BLOCKS = 512
MANY_BOXES = 257
REQUESTS = (1, 16, 128, 1024)
_WAIT_S = 60.0
_DIGEST = b"bench"
Progress = Callable[[str], None]


def run(
    transport: str, rounds: int, requests: Sequence[int], progress: Progress
) -> Iterator[list[dict[str, Any]]]:
    """Yield rows: first the engine's, then the connector's for each number of requests.

    Raises
    ------
    KvpushError
        The transport does not work here, or a transfer failed.
    """
    progress(f"engine over {transport}")
    yield list(_engine_rows(transport, rounds))
    if connector_reason():
        return
    step_cost = importlib.import_module("kvpush.vllm.step_cost")
    for count in requests:
        progress(f"connector, {count} requests")
        # A few hundred requests for each.
        yield list(_connector_rows(step_cost.measure(count, max(3, rounds // count)), count))


def connector_reason() -> str:
    """Return why the connector cannot be measured here; "" if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "the connector is left out: vLLM is not installed (pip install 'kvpush[demo]')"
    try:
        importlib.import_module("kvpush.vllm.step_cost")
    except ImportError as error:
        return f"the connector is left out: {error}"
    return ""


def _engine_rows(transport: str, rounds: int) -> Iterator[dict[str, Any]]:
    """Transfers of one box, then of many boxes of one small block each: the difference is the boxes'."""
    with _Pair(transport) as pair:
        for _ in range(10):
            pair.transfer(1)
        one = [pair.transfer(1) for _ in range(rounds)]
        sent = [pair.transfer(1, watch_p=True) for _ in range(rounds)]
        many = [pair.transfer(MANY_BOXES) for _ in range(max(10, rounds // 10))]
    base = quantile(sorted(each["total_us"] for each in one), 0.5)
    for what, values in (
        ("push_calls", [each["push_calls_us"] for each in one]),
        ("receive_call", [each["receive_call_us"] for each in one]),
        ("submit_to_sent", [each["total_us"] for each in sent]),
        ("submit_to_received", [each["total_us"] for each in one]),
        ("per_box", [(each["total_us"] - base) / (MANY_BOXES - 1) for each in many]),
    ):
        yield _row(what, transport, 0, values)


def _connector_rows(costs: Any, count: int) -> Iterator[dict[str, Any]]:
    for what, values in (
        ("step_per_request", [each / count for each in costs.steps]),
        ("idle_step", costs.idle_steps),
        ("new_request", costs.new),
        ("request_finished", costs.finished),
    ):
        yield _row(what, "shm", count, [each * 1e6 for each in values])


def _row(what: str, transport: str, requests: int, values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    return {
        "kind": "engine",
        "arm": what,
        "transport": transport,
        "requests": requests,
        **{f"p{q}_us": round(quantile(ordered, q / 100), 3) for q in (50, 90, 99)},
        "samples": len(ordered),
    }


class _Pair:
    """Two engines in this process, slots of one block: every block is a box of its own."""

    def __init__(self, transport: str) -> None:
        self._config = kvpush.Config.from_env(transport=transport, slot_bytes=BLOCK_BYTES)
        self._number = 0

    def __enter__(self) -> "_Pair":
        self._p, self._d = self._engine(), self._engine()
        self._peer = self._d.establish(self._p.answer(self._d.offer()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._d.close()
        self._p.close()

    def _engine(self) -> kvpush.Engine:
        array: Any = np.zeros((NUM_BLOCKS, 1, BLOCK_TOKENS, BLOCK_BYTES // BLOCK_TOKENS), dtype=np.uint8)
        group = kvpush.Group(BLOCK_TOKENS, [kvpush.Plane.from_array(array, name="layer0")])
        return kvpush.Engine(kvpush.Cache([group], fingerprint={"model": "bench"}), self._config)

    def transfer(self, blocks: int, watch_p: bool = False) -> dict[str, float]:
        """Move `blocks` boxes and return the times in microseconds, to D's event or to P's."""
        self._number += 1
        key = f"t{self._number}"
        ids = list(range(blocks))
        started = time.perf_counter()
        receive = self._d.receive(self._peer, key, digest=_DIGEST, blocks=[ids])
        received = time.perf_counter()
        time.sleep(0.001)  # the claim is at P, and both engines are at rest
        begun = time.perf_counter()
        push = self._p.push(key, _DIGEST)
        push.advance([ids])
        push.finish()
        pushed = time.perf_counter()
        first, second = (self._p, self._d) if watch_p else (self._d, self._p)
        self._wait(first)
        ended = time.perf_counter()
        self._wait(second)
        del receive, push  # until here: a handle that goes cancels its transfer
        return {
            "receive_call_us": (received - started) * 1e6,
            "push_calls_us": (pushed - begun) * 1e6,
            "total_us": (ended - begun) * 1e6,
        }

    @staticmethod
    def _wait(engine: kvpush.Engine) -> None:
        events = engine.poll(timeout=_WAIT_S)
        if not events or events[0].kind not in ("sent", "received"):
            raise kvpush.TransportError(f"a transfer failed: {events or f'nothing for {_WAIT_S:.0f} s'}")
