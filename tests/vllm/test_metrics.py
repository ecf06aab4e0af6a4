"""Statistics: deltas, merging, vLLM's log line, Prometheus; and the record of transfers."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
from harness import Pair, tokens
from tiny import free_port

from kvpush.vllm.connector import KVPushConnector
from kvpush.vllm.metrics import COUNTERS, GAUGES, LABELLED, TIMES, KVPushStats


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("KVPUSH_TRACE_FILE", str(tmp_path / "trace"))
    pair = Pair(free_port())
    yield pair
    pair.close()


def test_bytes_moved_are_bytes_expected(pair: Pair, tmp_path: Path) -> None:
    prompt = tokens(10)
    p = pair.p_request(prompt, "k", ([1, 2, 3],))
    d = pair.d_request(prompt, "k", ([20, 21, 22],))
    pair.load(d, 4)
    pair.p.step({p: 10})
    pair.p.finish(p)
    pair.d.step_until(lambda: bool(pair.d.received))
    pair.p.step()
    data = pair.d.worker.take_stats().data
    # 2 blocks of 2 planes of 4 tokens of 4 floats
    assert data["bytes_received"] == data["bytes_expected"] == 2 * 2 * 4 * 4 * 4
    assert data["received"] == 1
    assert len(data["receive_seconds"]) == len(data["handshake_seconds"]) == 1
    assert pair.d.worker.take_stats() is None
    sent = pair.p.worker.take_stats().data
    assert sent["bytes_sent"] == data["bytes_received"]
    assert sent["network_ops"] == 1
    lines = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    receive, push = sorted(lines, key=lambda line: line["side"], reverse=True)
    assert receive["per_block_descriptors"] == push["per_block_descriptors"] == 4
    assert receive["bytes"] == receive["bytes_expected"] == push["bytes"]
    assert (receive["kind"], receive["key"], receive["request_id"]) == ("received", "k", d.request_id)
    assert (push["kind"], push["key"], push["request_id"]) == ("sent", "k", p.request_id)
    assert push["opened_at"] <= push["finished_at"] <= push["ended_at"]


def test_a_failure_before_any_transfer_is_recorded(pair: Pair, tmp_path: Path) -> None:
    d = pair.d_request(tokens(8), "k", ([20, 21],))
    pair.d.engine.raises["offer"] = [MemoryError("no landing")]
    pair.load(d)
    pair.d.step_until(lambda: bool(pair.d.failed))
    (line,) = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    assert (line["kind"], line["status"], line["bytes"]) == ("failed", "handshake_failed", 0)
    assert "no landing" in line["detail"]


def sample() -> KVPushStats:
    stats = KVPushStats(data={})
    for name in COUNTERS:
        stats.count(name, 2)
    for name in TIMES:
        stats.observe(name, 0.25)
    for name in LABELLED:
        stats.label(name, "x", 3)
    for name in GAUGES:
        stats.gauge(name, 4)
    return stats


def test_merging_and_the_log_line() -> None:
    merged = KVPushConnector.build_kv_connector_stats(sample().to_dict()).aggregate(sample())
    assert merged.data["received"] == 4
    assert merged.data["receive_seconds"] == [0.25, 0.25]
    assert merged.data["failures"] == {"x": 6}
    assert merged.data["waiting"] == 4
    line = merged.reduce()
    assert line["KV received"] == 4
    assert line["Failed x"] == 6
    assert line["Skipped x"] == 6
    assert line["P90 receive (ms)"] == 250.0
    assert KVPushStats(data={}).reduce()["KV received"] == 0
    assert json.loads(json.dumps(merged.to_dict())) == merged.to_dict()
    merged.reset()
    assert merged.is_empty()


def test_building_stats_does_not_share_the_payload() -> None:
    payload = sample().to_dict()
    KVPushConnector.build_kv_connector_stats(payload).aggregate(sample())
    assert payload == sample().to_dict()


def test_prometheus() -> None:
    kinds = (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    config = SimpleNamespace(kv_transfer_config=None)
    labels = {0: ["m", "0"], 1: ["m", "1"]}
    prom = KVPushConnector.build_prom_metrics(config, {k: k for k in kinds}, ["model_name", "engine"], labels)
    prom.observe(sample().to_dict(), 1)
    prom.observe({"failures": {"y": 1}}, 0)

    def value(name: str, engine: str, **more: str) -> float | None:
        return prometheus_client.REGISTRY.get_sample_value(
            f"vllm:kvpush_{name}", {"model_name": "m", "engine": engine, **more}
        )

    assert value("bytes_received_total", "1") == 2
    assert value("bytes_received_total", "0") == 0
    assert value("failures_total", "1", code="x") == 3
    assert value("failures_total", "0", code="y") == 1
    assert value("skipped_total", "1", reason="x") == 3
    assert value("receive_seconds_count", "1") == 1
    assert value("waiting", "1") == 4
