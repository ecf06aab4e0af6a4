"""``kvpush bench transfer``: every arm in one run, interleaved round by round."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import kvpush
from kvpush.bench.arm_fabric import WriteDataEnd
from kvpush.bench.arm_kvpush import KvpushEnd
from kvpush.bench.arm_memcpy import MemcpyEnd
from kvpush.bench.arm_nixl import ONE, PER_BLOCK, POLL, SLEEP, NixlEnd, find_module
from kvpush.bench.arms import PairSpec, Variant
from kvpush.bench.cases import Case, size
from kvpush.bench.environment import available_bytes
from kvpush.bench.pair import Pair, Round
from kvpush.bench.rows import make_rows
from kvpush.errors import InvalidArgument, Unsupported

DEFAULT_TLS = "default"
ARMS = (
    *("nixl-per-block", "nixl-one-descriptor", "fi-writedata"),
    *("kvpush-shm", "kvpush-nixl", "kvpush-fabric", "memcpy"),
)


def choose_arms(wanted: Sequence[str], fabric_provider: str = "") -> tuple[list[PairSpec], list[str]]:
    """Return the pairs of processes for the arms, all that work here if none is named, and what is left out.

    `fabric_provider` is that of the arms over libfabric; "" is as KVPUSH_FABRIC_PROVIDER says.

    Raises
    ------
    InvalidArgument
        No such arm.
    Unsupported
        An arm that was named cannot run here; the message says why.
    """
    unknown = [name for name in wanted if name not in ARMS]
    if unknown:
        raise InvalidArgument(f"arm {unknown[0]!r}: there are {', '.join(ARMS)}")
    provider = kvpush.Config.from_env(fabric_provider=fabric_provider or None).fabric_provider
    reasons = _reasons()
    for name in wanted:
        if reasons.get(name):
            raise Unsupported(f"arm {name} cannot run here: {reasons[name]}")
    names = [name for name in ARMS if not reasons.get(name) and (not wanted or name in wanted)]
    left_out = [f"{name} left out: {why}" for name, why in reasons.items() if why and not wanted]
    return list(_pairs(names, provider)), left_out


def _reasons() -> dict[str, str]:
    """Return for each arm that cannot run here why."""
    found = kvpush.transports()
    nixl = "" if find_module() else "NIXL's Python package is not installed: pip install 'kvpush[nixl]'"
    return {
        "nixl-per-block": nixl,
        "nixl-one-descriptor": nixl,
        "fi-writedata": found.get("fabric", "not in this build"),
        "kvpush-shm": found.get("shm", "not in this build"),
        "kvpush-nixl": found.get("nixl", "not in this build"),
        "kvpush-fabric": found.get("fabric", "not in this build"),
    }


def _pairs(names: Sequence[str], provider: str) -> Iterator[PairSpec]:
    nixl = [
        Variant(arm, "ucx", f"{kind}/{target}", target)
        for arm, kind in (("nixl-per-block", PER_BLOCK), ("nixl-one-descriptor", ONE))
        if arm in names
        for target in (POLL, SLEEP)
    ]
    if nixl:
        yield PairSpec("nixl", NixlEnd, tuple(nixl))
    if "fi-writedata" in names:
        writes = functools.partial(WriteDataEnd, provider=provider)
        yield PairSpec("fi-writedata", writes, (Variant("fi-writedata", "fabric", target=provider),))
    for transport in ("shm", "nixl", "fabric"):
        if f"kvpush-{transport}" in names:
            chosen = provider if transport == "fabric" else ""
            factory = functools.partial(KvpushEnd, transport=transport, fabric_provider=chosen)
            variant = Variant("kvpush", transport, target=chosen)
            yield PairSpec(f"kvpush over {transport}", factory, (variant,))
    if "memcpy" in names:
        yield PairSpec("memcpy", MemcpyEnd, (Variant("memcpy", "none"),))


def run(
    cases: Sequence[Case],
    specs: Sequence[PairSpec],
    rounds: int,
    ucx_tls: Sequence[str] = (DEFAULT_TLS,),
    progress: Callable[[int, int, str], None] = lambda done, of, text: None,
    device: str = "cpu",
    host: tuple[str, int] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of one case after another, for one UCX_TLS after another.

    Parameters
    ----------
    cases : sequence of Case
        With their cache (see :func:`kvpush.bench.cases.with_cache`), one size for all.
    specs : sequence of PairSpec
        What runs beside each other.
    rounds : int
        Of each arm in each case; one more before and one after are verified and not counted.
    ucx_tls : sequence of str
        Values of UCX_TLS for all processes; "default" leaves it unset.
    progress : callable
        Called before every round with the rounds done, of how many, and what comes.
    device : {"cpu", "cuda"}
        Where all caches are.
    host : (str, int), optional
        Address and port of the ``kvpush bench peer`` where D's processes are to run.

    Raises
    ------
    InvalidArgument
        The caches of all arms together are more than the machine has free.
    BenchError
        An arm failed or moved wrong bytes.
    """
    if device == "cpu":
        _check_memory(cases[0].cache_bytes, len(specs))
    slots = [(spec, variant) for spec in specs for variant in spec.variants]
    total = len(ucx_tls) * len(cases) * (rounds + 2) * len(slots)
    done = 0
    for tls in ucx_tls:
        env = {"UCX_TLS": None if tls == DEFAULT_TLS else tls}
        progress(done, total, "starting the processes")
        with contextlib.ExitStack() as stack:
            pairs = {
                s.name: stack.enter_context(Pair(s, cases[0].cache_bytes, env, device, host)) for s in specs
            }
            for case in cases:
                for pair in pairs.values():
                    pair.begin(case)
                measured: dict[Variant, list[Round]] = {variant: [] for _, variant in slots}
                for number in range(rounds + 2):
                    verify = {0: "spans" if case.num_batches > 1 else "all", rounds + 1: "spans"}.get(
                        number, ""
                    )
                    for slot, (spec, variant) in enumerate(slots):
                        progress(done, total, f"{case.label}: {variant.arm} {variant.transport}")
                        result = pairs[spec.name].round(variant, number, slot, len(slots), verify)
                        done += 1
                        if not verify:
                            measured[variant].append(result)
                yield [{**row, "device": device} for row in make_rows(case, measured, tls)]


def _check_memory(cache_bytes: int, num_pairs: int) -> None:
    needed = cache_bytes * (2 * num_pairs + 1)  # memcpy has a third
    free = available_bytes()
    if free and needed > free:
        raise InvalidArgument(
            f"{num_pairs} pairs of caches of {size(cache_bytes)} need {size(needed)}, {size(free)} are free: "
            "choose fewer --arms, less --total-bytes or --concurrency, or a smaller --cache-bytes"
        )
