"""From rounds to rows: one flat dict per arm and case, as ``--json`` prints it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kvpush.bench.arms import Variant
from kvpush.bench.cases import Case
from kvpush.bench.pair import Round

BASELINE, CEILING, COPY = "nixl-per-block", "nixl-one-descriptor", "memcpy"
WRITES = "fi-writedata"


def make_rows(case: Case, measured: Mapping[Variant, Sequence[Round]], ucx_tls: str) -> list[dict[str, Any]]:
    """Return one row per arm and transport: of an arm's variants, the one with the higher median rate."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for variant, rounds in measured.items():
        row = _row(case, variant, rounds, ucx_tls)
        other = best.get((variant.arm, variant.transport))
        slower = None
        if other is not None:
            row, slower = (row, other) if _is_better(case, row, other) else (other, row)
        if slower is not None:
            row["other_target"] = {
                name: slower[name] for name in ("target", "gb_per_s", "p50_us", "cpu_s_per_gb")
            }
        best[variant.arm, variant.transport] = row
    rows = list(best.values())
    rates = {row["arm"]: row["gb_per_s"] for row in rows if row["arm"] in (BASELINE, CEILING, COPY, WRITES)}
    for row in rows:
        for field, arm in (
            ("ratio_to_nixl_per_block", BASELINE),
            ("share_of_ceiling", CEILING),
            ("share_of_memcpy", COPY),
            ("share_of_fi_writedata", WRITES),
        ):
            row[field] = round(row["gb_per_s"] / rates[arm], 4) if arm in rates else None
    return rows


def _is_better(case: Case, row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if case.idle_ms is not None:
        return bool(row["p50_us"] < other["p50_us"])
    return bool(row["gb_per_s"] > other["gb_per_s"])


def _row(case: Case, variant: Variant, rounds: Sequence[Round], ucx_tls: str) -> dict[str, Any]:
    rates = [each.gb_per_s for each in rounds]
    latencies = sorted(us * 1e6 for each in rounds for us in each.latencies_s)
    rate = statistics.median(rates)

    def cpu(side: str) -> float:
        return float(statistics.median(getattr(each, side) / (each.num_bytes / 1e9) for each in rounds))

    both = statistics.median((each.cpu_p_s + each.cpu_d_s) / (each.num_bytes / 1e9) for each in rounds)
    return {
        "kind": "transfer",
        "arm": variant.arm,
        "transport": variant.transport,
        "block_bytes": case.block_bytes,
        "run_blocks": case.run_blocks,
        "num_layers": case.num_layers,
        "total_bytes": case.total_bytes,
        "concurrency": case.concurrency,
        "gb_per_s": _round(rate),
        "gb_per_s_per_layer": _round(rate / case.num_layers),
        "p50_us": _round(quantile(latencies, 0.50)),
        "p90_us": _round(quantile(latencies, 0.90)),
        "p99_us": _round(quantile(latencies, 0.99)),
        "network_ops": rounds[-1].network_ops,
        "cpu_s_per_gb": _round(both),
        "ucx_tls": ucx_tls,
        "rounds": len(rounds),
        "idle_ms": case.idle_ms,
        "model_shape": case.model_shape,
        "cache_bytes": case.cache_bytes,
        "target": variant.target,
        "gb_per_s_min": _round(min(rates)),
        "gb_per_s_max": _round(max(rates)),
        "cpu_s_per_gb_p": _round(cpu("cpu_p_s")),
        "cpu_s_per_gb_d": _round(cpu("cpu_d_s")),
    }


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the nearest-rank quantile of an ordered sequence."""
    return ordered[min(len(ordered) - 1, max(0, int(q * len(ordered) + 0.5) - 1))]


def _round(value: float) -> float:
    return float(f"{value:.5g}")
