"""``kvpush bench``: small real runs of every command, the check of the bytes, and what is refused."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import kvpush
from kvpush.bench import transfer
from kvpush.bench.arm_memcpy import MemcpyEnd
from kvpush.bench.arms import PairSpec, Variant
from kvpush.bench.cases import MODEL_SHAPES, Case, default_sweep, parse_sizes, sweep, with_cache
from kvpush.bench.pair import BenchError
from kvpush.bench.rows import quantile
from kvpush.bench.tables import block_spans, compare, fill_source, make_batches, poison
from kvpush.cli.main import app
from kvpush.config import fabric_libraries

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"})
TINY = ("--num-layers", "2", "--total-bytes", "64KiB", "--cache-bytes", "1MiB", "--rounds", "2")
# What docs and the tools that read results rely on.
FIELDS = {
    *("arm", "transport", "block_bytes", "run_blocks", "num_layers", "total_bytes", "concurrency"),
    *("gb_per_s", "gb_per_s_per_layer", "p50_us", "p90_us", "p99_us", "network_ops", "cpu_s_per_gb"),
    *("ucx_tls", "rounds", "idle_ms", "ratio_to_nixl_per_block", "share_of_ceiling", "share_of_memcpy"),
    *("target", "share_of_fi_writedata"),
}


def bench(*args: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvpush", "bench", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0]["kind"] == "environment"
    assert {"commit", "command", "cpu", "kvpush", "numpy"} <= set(lines[0])
    return lines[1:]


# ---- transfer


def test_transfer_rows() -> None:
    args = ("--block-bytes", "1KiB", "--run-blocks", "0,1", "--concurrency", "1,3")
    rows = rows_of(bench("transfer", *args, *TINY, "--arms", "kvpush-shm,memcpy", "--json"))
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert set(row) >= FIELDS
        assert row["gb_per_s"] > 0
        assert row["p50_us"] <= row["p90_us"] <= row["p99_us"]
        assert row["gb_per_s_per_layer"] == pytest.approx(row["gb_per_s"] / 2, rel=1e-3)
        assert row["rounds"] == 2
        assert row["ratio_to_nixl_per_block"] is None
    for row in rows:
        assert row["network_ops"] == (1 if row["arm"] == "kvpush" else 0)
        assert (row["share_of_memcpy"] == 1.0) == (row["arm"] == "memcpy")


@pytest.mark.nixl
def test_transfer_beside_nixl() -> None:
    if why := kvpush.transports()["nixl"]:
        pytest.skip(why)
    rows = rows_of(bench("transfer", "--block-bytes", "1KiB", *TINY, "--ucx-tls", "tcp,self", "--json"))
    by_arm = {(row["arm"], row["transport"]): row for row in rows}
    assert set(by_arm) == {
        ("nixl-per-block", "ucx"),
        ("nixl-one-descriptor", "ucx"),
        ("kvpush", "shm"),
        ("kvpush", "nixl"),
        ("memcpy", "none"),
        *(
            (("fi-writedata", "fabric"), ("kvpush", "fabric"))
            if not kvpush.transports().get("fabric")
            else ()
        ),
    }
    per_block = by_arm["nixl-per-block", "ucx"]
    assert per_block["network_ops"] == 64  # scattered: as many as blocks in all layers
    assert per_block["target"] in ("poll", "sleep")
    assert per_block["other_target"]["target"] in {"poll", "sleep"} - {per_block["target"]}
    assert by_arm["nixl-one-descriptor", "ucx"]["network_ops"] == 1
    assert per_block["ratio_to_nixl_per_block"] == 1.0
    assert {row["ucx_tls"] for row in rows} == {"tcp,self"}


def fabric_provider() -> str:
    """One that the engine would choose, and that reaches other hosts; skips where there is none."""
    if why := kvpush.transports().get("fabric", "not in this build"):
        pytest.skip(why)
    found = kvpush._core.fabric_providers(fabric_libraries(kvpush.Config.from_env().fabric_library))
    names = [each["name"] for each in found["providers"] if not each["reason"]]
    return next(name for name in ("tcp", "tcp;ofi_rxm", *names) if name in names)


def test_transfer_over_libfabric() -> None:
    provider = fabric_provider()
    args = ("--block-bytes", "1KiB", "--concurrency", "1,2", "--fabric-provider", provider)
    done = bench("transfer", *args, *TINY, "--arms", "fi-writedata,kvpush-fabric", "--json")
    rows = rows_of(done)
    assert [(row["arm"], row["transport"]) for row in rows] == [
        ("fi-writedata", "fabric"),
        ("kvpush", "fabric"),
    ] * 2
    for row in rows:
        assert row["target"] == provider
        assert row["network_ops"] == 1
        assert (row["share_of_fi_writedata"] == 1.0) == (row["arm"] == "fi-writedata")


def test_plain_writes_stay_within_the_memory() -> None:
    fabric_provider()
    memory = np.zeros(4096, np.uint8)
    libraries = fabric_libraries(kvpush.Config.from_env().fabric_library)
    writes = kvpush._core.BenchWrites(memory.ctypes.data, len(memory), libraries, "")
    writes.connect(*writes.address())
    for piece in ((1, 0, 4096), (0, 1, 4096), (0, 0, 0), (0, 1 << 63, 1 << 63)):
        with pytest.raises(kvpush.InvalidArgument, match="do not lie within the memory"):
            writes.write([piece], 4096, 1)
    with pytest.raises(kvpush.InvalidArgument, match="0 writes of 4096 bytes"):
        writes.write([(0, 0, 4096)], 4096, 0)


def test_transfer_latency_as_a_table() -> None:
    done = bench(
        "transfer", "--idle-ms", "0,1", "--cache-bytes", "1MiB", "--rounds", "1", "--arms", "kvpush-shm"
    )
    assert "in a stream" in done.stdout
    assert "after 1 ms idle" in done.stdout


def test_transfer_of_a_models_shape() -> None:
    args = ("--model-shape", "smollm2", "--total-bytes", "1MiB", "--cache-bytes", "2MiB", "--rounds", "1")
    (row,) = rows_of(bench("transfer", *args, "--arms", "kvpush-shm", "--json"))
    assert (row["block_bytes"], row["num_layers"], row["model_shape"]) == (12288, 30, "smollm2")
    assert row["total_bytes"] == 2 * 30 * 12288  # whole blocks only


def test_transfer_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plot.png"
    bench("transfer", "--block-bytes", "1KiB", *TINY, "--arms", "memcpy", "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


# ---- two hosts: the other one is played by a process that knows the secret

SECRET = "of two hosts in a test"


@pytest.fixture
def peer_port() -> Iterator[int]:
    command = [sys.executable, "-m", "kvpush", "bench", "peer", "--host", "127.0.0.1", "--port", "0"]
    env = {**os.environ, "KVPUSH_SECRET": SECRET}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as peer:
        assert peer.stderr is not None
        try:
            yield int(peer.stderr.readline().rsplit(":", 1)[1])
        finally:
            peer.kill()


def test_transfer_to_another_host(peer_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPUSH_SECRET", SECRET)
    args = ("transfer", "--block-bytes", "1KiB", "--concurrency", "1,2", *TINY, "--arms", "kvpush-shm,memcpy")
    for _ in range(2):
        rows = rows_of(bench(*args, "--peer", f"127.0.0.1:{peer_port}", "--json"))
        assert [row["arm"] for row in rows] == ["kvpush", "memcpy"] * 2
        assert all(row["gb_per_s"] > 0 and row["cpu_s_per_gb_d"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("secret", "message"),
    [("", "needs the same KVPUSH_SECRET on both"), ("another one, just as long", "with this KVPUSH_SECRET")],
)
def test_another_host_wants_the_secret(
    peer_port: int, secret: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPUSH_SECRET", secret)
    args = ("--arms", "kvpush-shm", "--peer", f"127.0.0.1:{peer_port}")
    result = runner.invoke(app, ["bench", "transfer", "--block-bytes", "1KiB", *TINY, *args])
    assert result.exit_code == 1
    assert message in result.output


# ---- the check of the bytes


CASE = Case(
    block_bytes=1024, run_blocks=2, num_layers=2, total_bytes=32 << 10, concurrency=2, cache_bytes=1 << 20
)


def moved() -> tuple[Any, Any]:
    """A cache into which one batch was copied correctly, and its spans."""
    source, target = np.empty(CASE.cache_bytes, np.uint8), np.empty(CASE.cache_bytes, np.uint8)
    fill_source(source)
    poison(target, None)
    spans = block_spans(CASE, make_batches(CASE, 0, 0, 1)[:1])
    for a, b in zip(spans.sources, spans.targets, strict=True):
        target[b : b + spans.length] = source[a : a + spans.length]
    return target, spans


def test_compare_finds_one_wrong_byte() -> None:
    target, spans = moved()
    assert compare(target, spans, everywhere=True) == ""
    at = int(spans.targets[5])
    target[at + 700] ^= 1
    assert f"is at {at}" in compare(target, spans, everywhere=False)


def test_compare_finds_a_stray_byte() -> None:
    target, spans = moved()
    outside = np.ones(len(target), dtype=bool)
    for at in spans.targets:
        outside[at : at + spans.length] = False
    target[np.nonzero(outside)[0][-1]] ^= 1
    assert compare(target, spans, everywhere=False) == ""
    assert "outside" in compare(target, spans, everywhere=True)


class FlippingEnd(MemcpyEnd):
    """Copies all but one bit."""

    def wait(self, batch: Any) -> Any:
        times = super().wait(batch)
        with self._target.edit() as content:
            content[int(self.spans([batch]).targets[0])] ^= 1
        return times


class DyingEnd(MemcpyEnd):
    def wait(self, batch: Any) -> Any:
        os._exit(7)


@pytest.mark.parametrize(
    ("end", "message"),
    [(FlippingEnd, "flipping over none moved wrong bytes"), (DyingEnd, "D died with code 7")],
)
def test_an_arm_that_fails_is_reported(end: Any, message: str) -> None:
    spec = PairSpec("bad", end, (Variant("flipping", "none"),))
    with pytest.raises(BenchError, match=message):
        list(transfer.run(with_cache([CASE], 1 << 20), [spec], rounds=1))


def test_processes_end_with_a_parent_that_was_killed() -> None:
    """Stopped processes with a large cache each, which nobody would ever resume."""
    args = ("transfer", "--arms", "kvpush-shm,memcpy", "--idle-ms", "100", "--rounds", "1000", "--json")
    parent = subprocess.Popen([sys.executable, "-m", "kvpush", "bench", *args], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    try:
        found = eventually(lambda: pids if len(pids := children.read_text().split()) > 4 else [])
    finally:
        parent.kill()
        parent.wait(30)
    eventually(lambda: not any(is_alive(pid) for pid in found))


def eventually(condition: Any) -> Any:
    until = time.monotonic() + 60.0
    while not (value := condition()):
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.02)
    return value


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_block_tables() -> None:
    for run in (0, 1, 4):
        case = Case(1024, run, 2, 64 << 10, 2, cache_bytes=1 << 20)
        batches = make_batches(case, 0, 0, 1)
        assert len(batches) == case.num_tables == 8
        first = batches[0]
        ids = np.concatenate([one.targets for batch in batches for one in batch.transfers])
        assert len(set(ids.tolist())) == len(ids) == 16 * case.num_positions, "a block in two open receives"
        breaks = int((np.diff(first.transfers[0].sources) != 1).sum())
        # Two runs may happen to be neighbours.
        assert {0: breaks == 0, 1: 20 < breaks <= 31, 4: 4 <= breaks <= 7}[run]


# ---- what is refused


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--block-bytes", "100"], "--block-bytes 100: expected 1024 to"),
        (["--block-bytes", "1500"], "multiples of 64"),
        (["--block-bytes", "4KB"], "expected numbers such as"),
        (["--num-layers", "129"], "--num-layers 129"),
        (["--total-bytes", "4KiB"], "less than one block in each layer"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--idle-ms", "1", "--concurrency", "8"], "one transfer at a time"),
        (["--model-shape", "gpt-5"], "there are llama-70b-tp8"),
        (["--model-shape", "smollm2", "--num-layers", "2"], "leave those options out"),
        (["--cache-bytes", "1MiB"], "is less than the"),
        (["--total-bytes", "1GiB", "--concurrency", "64"], "are free"),
        (["--arms", "nccl"], "arm 'nccl': there are nixl-per-block"),
        (["--peer", "host:x", "--arms", "memcpy"], "--peer 'host:x': expected HOST or HOST:PORT"),
    ],
)
def test_bad_sizes(args: list[str], message: str) -> None:
    result = runner.invoke(app, ["bench", "transfer", *args])
    assert result.exit_code == 1
    assert message in result.output


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    found = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in modules else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.parametrize("command", ["transfer", "pack", "engine"])
def test_without_numpy(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    without(monkeypatch, "numpy")
    result = runner.invoke(app, ["bench", command])
    assert result.exit_code == 1
    assert "pip install 'kvpush[bench]'" in result.output


def test_without_matplotlib_only_plot_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without(monkeypatch, "matplotlib")
    result = runner.invoke(app, ["bench", "transfer", "--plot", str(tmp_path / "x.png")])
    assert result.exit_code == 1
    assert "matplotlib is not installed" in result.output


def test_without_nixl_its_arms_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "nixl", "nixl_cu13", "nixl_cu12")
    monkeypatch.setattr(kvpush, "transports", lambda: {"shm": "", "nixl": "no library"})
    result = runner.invoke(
        app, ["bench", "transfer", "--block-bytes", "1KiB", *TINY, "--cache-bytes", "64KiB", "--json"]
    )
    assert result.exit_code == 0, result.output
    assert "nixl-per-block left out: NIXL's Python package is not installed" in result.stderr
    assert "kvpush-nixl left out: no library" in result.stderr
    arms = [json.loads(line).get("arm") for line in result.stdout.splitlines()]
    assert arms == [None, "kvpush", "memcpy"]
    named = runner.invoke(app, ["bench", "transfer", "--arms", "kvpush-shm,nixl-per-block"])
    assert named.exit_code == 1
    assert "arm nixl-per-block cannot run here" in named.output


# ---- sizes


def test_model_shapes() -> None:
    blocks = {name: (shape.block_bytes, shape.num_layers) for name, shape in MODEL_SHAPES.items()}
    assert blocks == {
        "llama-70b-tp8": (8192, 80),
        "qwen3-32b-tp4": (16384, 64),
        "deepseek-v3": (18432, 61),
        "smollm2": (12288, 30),
    }


def test_sizes_and_quantiles() -> None:
    assert parse_sizes("x", "4096, 16KiB,1MiB,1GiB") == [4096, 16384, 1 << 20, 1 << 30]
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([5.0], 0.99) == 5.0
    for quick in (False, True):
        cases = with_cache(default_sweep(quick), 0)
        assert len({case.cache_bytes for case in cases}) == 1
    (case,) = with_cache(sweep([4096], [1], [16], [64 << 20], [1], []), 0)
    assert case.cache_bytes == 512 << 20


# ---- pack and engine


def test_pack() -> None:
    args = ("--block-bytes", "1KiB,4KiB", "--num-layers", "3", "--total-bytes", "1MiB", "--rounds", "2")
    rows = rows_of(bench("pack", *args, "--threads", "0,1", "--json"))
    assert [row["arm"] for row in rows[:3]] == ["memcpy", "pack", "unpack"]
    assert len(rows) == 3 * 2 * 2 * 2
    assert all(row["gb_per_s"] > 0 and row["share_of_memcpy"] > 0 for row in rows)
    assert "8 x 1 MiB" in bench("pack", *args).stdout


def test_pack_with_boxes_of_several_sizes() -> None:
    args = ("--block-bytes", "4KiB", "--run-blocks", "1", "--num-layers", "3", "--total-bytes", "3MiB")
    boxes = ("--box-bytes", "1KiB,64KiB,2MiB", "--in-flight", "1,3", "--threads", "2", "--rounds", "1")
    rows = rows_of(bench("pack", *args, *boxes, "--json"))
    shapes = [(row["box_bytes"], row["in_flight"]) for row in rows if row["arm"] == "pack"]
    assert shapes == list(itertools.product((1024, 65536, 2 << 20), (1, 3)))


def test_pack_refuses_what_is_not_in_the_cache() -> None:
    array = np.zeros((4, 1, 16, 64), np.uint8)
    cache = kvpush.Cache([kvpush.Group(16, [kvpush.Plane.from_array(array, name="a")])])
    packer = kvpush._core.BenchPacker(cache.to_core(), kvpush.Config().to_core())
    dense = np.zeros(4096, np.uint8)
    with pytest.raises(kvpush.InvalidArgument, match="block id 4"):
        packer.run(False, [(0, 1, [4], dense.ctypes.data)], 1)
    with pytest.raises(kvpush.InvalidArgument, match="in_flight is 0"):
        packer.run(False, [], 0)


@pytest.mark.parametrize("name", ["pack", "transfer"])
def test_caches_on_a_gpu(name: str, fake_cuda: Path, tmp_path: Path) -> None:
    """Over a driver without a GPU, which plays the kernels whatever the file of kernels holds."""
    kernels = tmp_path / "kernels"
    kernels.write_bytes(b"fake kernels")
    script = tmp_path / "bench.py"
    script.write_text(
        "import kvpush.config\n"
        f"kvpush.config.cuda_kernels_path = lambda: {str(kernels)!r}\n"
        "from kvpush.cli.main import app\n"
        "if __name__ == '__main__': app()\n"
    )
    sizes = ["--block-bytes", "4KiB", "--run-blocks", "1", "--total-bytes", "64KiB", "--cache-bytes", "1MiB"]
    arms = ["--arms", "kvpush-shm,memcpy"] if name == "transfer" else []
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            "bench",
            name,
            "--device",
            "cuda",
            *sizes,
            *arms,
            "--rounds",
            "2",
            "--json",
        ],
        env={**os.environ, "KVPUSH_CUDA_LIBRARY": str(fake_cuda)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()][1:]
    assert {row["device"] for row in rows} == {"cuda"}
    assert len(rows) == {"pack": 3, "transfer": 2}[name]


def test_an_unknown_device_is_refused() -> None:
    result = runner.invoke(app, ["bench", "pack", "--device", "tpu"])
    assert result.exit_code == 1
    assert "--device 'tpu': expected one of cpu, cuda" in result.output


def test_engine_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "vllm")
    result = runner.invoke(app, ["bench", "engine", "--rounds", "10", "--json"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in result.stdout.splitlines()][1:]
    whats = ["push_calls", "receive_call", "submit_to_sent", "submit_to_received", "per_box"]
    assert [row["arm"] for row in rows] == whats
    assert "the connector is left out: vLLM is not installed" in result.stderr


@pytest.mark.vllm
@pytest.mark.slow
def test_engine_with_the_connector() -> None:
    pytest.importorskip("vllm")
    rows = rows_of(bench("engine", "--rounds", "10", "--requests", "1,4", "--json"))
    connector = [(row["arm"], row["requests"]) for row in rows if row["requests"]]
    whats = ["step_per_request", "idle_step", "new_request", "request_finished"]
    assert connector == [(what, count) for count in (1, 4) for what in whats]
    assert all(row["p50_us"] > 0 for row in rows if row["requests"])


# ---- bench/report.py


def report(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / "report.py"), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def record(path: Path, rate: float, p50: float) -> str:
    base = {
        "kind": "transfer",
        "arm": "kvpush",
        "transport": "shm",
        "block_bytes": 4096,
        "ucx_tls": "default",
    }
    rows = [
        {"kind": "environment", "commit": path.stem},
        {**base, "idle_ms": None, "gb_per_s": rate, "p50_us": 1.0},
        {**base, "idle_ms": 50, "gb_per_s": 1.0, "p50_us": p50},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_report(tmp_path: Path) -> None:
    before, after = record(tmp_path / "a.jsonl", 2.0, 100.0), record(tmp_path / "b.jsonl", 1.5, 50.0)
    done = report(before, after)
    assert done.returncode == 0, done.stderr
    assert "0.750" in done.stdout, "the rate fell"
    assert "2.000" in done.stdout, "the time halved"
    assert report(before, after, "--fail-below", "0.7").returncode == 0
    failed = report(before, after, "--fail-below", "0.9")
    assert failed.returncode == 1
    assert "1 of 2 rows are below 0.9" in failed.stderr


def test_report_of_hand_overs(tmp_path: Path) -> None:
    base = {"kind": "serve", "arm": "kvpush-shm", "transport": "shm", "shape": "many-small", "requests": 12}
    paths = []
    for name, scale in (("a.jsonl", 1.0), ("b.jsonl", 0.5)):
        rows = [{**base, "prompt_tokens": n, "hand_over_less_step_ms_p50": scale * n} for n in (512, 2048)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        paths.append(str(tmp_path / name))
    done = report(*paths)
    assert done.returncode == 0, done.stderr
    assert "prompt_tokens=2048" in done.stdout
    assert done.stdout.count("2.000") == 2


def test_report_of_what_is_no_result(tmp_path: Path) -> None:
    good, bad = record(tmp_path / "a.jsonl", 2.0, 100.0), tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert "bad.jsonl:1: no row" in report(good, str(bad)).stderr
    assert report(good, str(tmp_path / "missing")).returncode == 2
