"""`kvpush bench serve`: what it refuses to report, and one short run of real engines."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvpush.bench.serve.arms import ARMS, Moved, moved
from kvpush.bench.serve.model import SHAPES
from kvpush.bench.serve.pair import Sample
from kvpush.bench.serve.run import ORDERS, ServeOptions, add_ratios, check_request, quantile, run_serve
from kvpush.cli.bench_serve import tables
from kvpush.cli.main import app

SHAPE = SHAPES["many-small"]
ALONE = [7, 8, 9]
GOOD_SAMPLE = Sample(sent=0.0, answered=1.0, began=1.25, times=[1.5, 1.75, 2.25], tokens=ALONE, first=[7])
GOOD_MOVED = Moved(transfers=1, bytes=64 * SHAPE.token_bytes, network_ops=5, failures=0)


def check(sample: Sample = GOOD_SAMPLE, moved: Moved = GOOD_MOVED, computed: int = 3) -> str | None:
    # 40 tokens are two blocks of 32.
    return check_request(SHAPE, 40, len(ALONE), ALONE, sample, moved, computed)


def test_times_of_one_request() -> None:
    assert check() is None
    assert GOOD_SAMPLE.hand_over == 0.5
    assert GOOD_SAMPLE.kv_wait == 0.25
    assert GOOD_SAMPLE.ttft == 1.5
    assert GOOD_SAMPLE.steps == [0.25, 0.5]
    assert GOOD_SAMPLE.tpot == 0.375


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"moved": replace(GOOD_MOVED, transfers=0, bytes=0)}, "transfers: 0, must be 1"),
        ({"moved": replace(GOOD_MOVED, bytes=1)}, "bytes of KV moved: 1, must be 4194304"),
        ({"moved": replace(GOOD_MOVED, failures=1)}, "failed or skipped transfers: 1"),
        ({"computed": 42}, "tokens computed by D: 42, must be 3"),
        ({"sample": replace(GOOD_SAMPLE, tokens=[7, 8, 1])}, r"D's text: \[7, 8, 1\]"),
        ({"sample": replace(GOOD_SAMPLE, first=[1])}, r"P's text: \[1\], must be \[7\]"),
    ],
)
def test_a_request_without_its_kv_is_refused(wrong: dict[str, Any], named: str) -> None:
    problem = check(**wrong)
    assert problem is not None
    assert re.match(named, problem)


def test_the_connectors_statistics() -> None:
    ours = moved(
        ARMS["kvpush-shm"],
        {"network_ops": 9, "failures": {"peer_lost": 1}},
        {"received": 1, "bytes_received": 64, "skipped": {"sibling": 2}, "network_ops": 4},
    )
    assert ours == Moved(transfers=1, bytes=64, network_ops=9, failures=3)
    counted = {"bytes_transferred": [64], "num_descriptors": [12], "num_failed_transfers": [1]}
    for prefill, decode in ((counted, {}), ({}, counted)):
        theirs = moved(ARMS["nixl-push"], prefill, decode)
        assert theirs == Moved(transfers=1, bytes=64, network_ops=12, failures=1)


def test_quantiles() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0], 0.9) == pytest.approx(2.8)
    assert quantile([5.0], 0.9) == 5.0


def test_ratios_are_to_kvpush_under_the_same_conditions() -> None:
    rows = [
        {
            "arm": arm,
            "shape": "s",
            "free_list": "sorted",
            "prompt_tokens": tokens,
            "hand_over_ms_p50": total,
            "hand_over_less_step_ms_p50": less,
        }
        for arm, tokens, total, less in (
            ("kvpush-shm", 512, 20.0, 10.0),
            ("nixl-push", 512, 40.0, 30.0),
            ("kvpush-shm", 2048, 20.0, -1.0),
            ("nixl-push", 2048, 80.0, 70.0),
        )
    ]
    add_ratios(rows)
    assert [row.get("ratio_hand_over") for row in rows] == [1.0, 2.0, 1.0, 4.0]
    assert [row.get("ratio_hand_over_less_step") for row in rows] == [1.0, 3.0, None, None]


def test_the_tables_fit_a_terminal() -> None:
    measures = ("hand_over_ms", "hand_over_less_step_ms", "kv_wait_ms", "ttft_ms", "tpot_ms")
    times = {f"{name}_{q}": value for name in measures for q, value in (("p50", 99.94), ("p90", 4321.0))}
    rows = [
        {"arm": arm, "shape": "many-small", "free_list": order, "prompt_tokens": 131072, "network_ops": 4096}
        | times
        | {"ratio_hand_over_less_step": 123.456}
        for order in ORDERS
        for arm in ARMS
    ]
    text = io.StringIO()
    shown = list(tables(rows))
    Console(file=text, width=80).print(*shown)
    assert len(shown) == 2
    assert all(len(re.findall(rf"{arm} +4096", text.getvalue())) == 2 for arm in ARMS)
    assert text.getvalue().count("99.9/4321") == len(measures) * len(rows)
    assert text.getvalue().count("123.46") == len(rows)


@pytest.mark.parametrize(
    "options",
    [
        {"arms": ("nope",)},
        {"arms": ()},
        {"shapes": ("nope",)},
        {"orders": ("nope",)},
        {"prompt_tokens": ()},
        {"prompt_tokens": (1,)},
        {"output_tokens": 2},
        {"requests": 5, "rounds": 2},
        {"chunk_tokens": 0},
    ],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        ServeOptions(**options)


def test_the_command_names_what_is_wrong() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--arms", "nope"])
    assert result.exit_code == 1
    assert "kvpush-shm, kvpush-nixl, nixl-push" in result.output


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.timeout(600)
def test_all_kinds_of_arms_answer_alike() -> None:
    pytest.importorskip("kvpush._core", reason="the native module is not built")
    pytest.importorskip("nixl_cu13", reason="the NIXL package is not installed")
    told: list[tuple[int, int]] = []
    options = ServeOptions(
        arms=("kvpush-shm", "nixl-push-slow", "nixl-pull-slow"),
        shapes=("few-large",),
        prompt_tokens=(200, 300),
        orders=("shuffled",),
        requests=2,
        rounds=2,
        output_tokens=3,
        chunk_tokens=128,
        progress=lambda text, done, total: told.append((done, total)),
    )
    rows = run_serve(options)  # raises if a text, a byte or a computed token is wrong
    assert [(row["prompt_tokens"], row["arm"]) for row in rows] == [
        (tokens, arm) for tokens in options.prompt_tokens for arm in options.arms
    ]
    for row in rows:
        json.dumps(row)
        assert row["requests"] == 2
        assert row["kv_bytes"] == -(-row["prompt_tokens"] // 128) * 128 * row["token_bytes"]
        assert row["hand_over_ms_p50"] > 0
        assert row["hand_over_ms_p50"] <= row["hand_over_ms_p90"]
        assert row["network_ops"] > 0
    assert told[-1][0] == told[-1][1]
