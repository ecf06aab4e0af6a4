"""KV on a GPU, end to end: every byte, in the caller's order, in one process and in two."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_tools import DIGEST, Cache, connect, end_of, engine, move

import kvpush

SIDES = [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")]
SHAPES = [
    {},
    {"order": "BNHC"},
    {"order": "HBNC"},
    {"heads": 1, "tokens": 1, "content": 4096},
    {"heads": 1, "tokens": 16, "content": 576},
    {"content": 7, "tokens": 3},
    {"content": 24, "offset": 8},
    {"content": 48, "offset": 3, "order": "BNHC"},
    {"heads": 8, "tokens": 16, "content": 256, "blocks": 40},
]


def side(where: str, gpu: Any, **shape: Any) -> Cache:
    return Cache(gpu if where == "gpu" else None, **shape)


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_byte_arrives(gpu: Any, sides: tuple[str, str], shape: dict[str, Any]) -> None:
    source, target = side(sides[0], gpu, **shape), side(sides[1], gpu, **shape)
    source.fill(1)
    target.fill(None)
    rng = np.random.default_rng(2)
    with engine(source, slot_bytes=256 << 10) as p, engine(target, slot_bytes=256 << 10) as d:
        peer = connect(p, d)
        for i in range(3):
            count = int(rng.integers(1, source.num_blocks))
            ids = [rng.permutation(source.num_blocks)[:count].tolist() for _ in range(2)]
            untouched = [block for block in range(source.num_blocks) if block not in ids[1]]
            before = target.blocks(untouched)
            move(p, d, peer, f"k{i}", *ids)
            assert np.array_equal(target.blocks(ids[1]), source.blocks(ids[0]))
            assert np.array_equal(target.blocks(untouched), before)


@pytest.mark.parametrize("sides", SIDES, ids="-".join)
def test_long_rows_by_bulk_copies(gpu: Any, sides: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots in device memory, and in pinned host memory."""
    monkeypatch.setenv("KVPUSH_CUDA_BULK", "1")
    shape = {"heads": 2, "tokens": 2, "content": 2064, "order": "BNHC"}
    source, target = side(sides[0], gpu, **shape), side(sides[1], gpu, **shape)
    source.fill(8)
    target.fill(None)
    with engine(source) as p, engine(target) as d:
        move(p, d, connect(p, d), "k", [7, 0, 23], [1, 22, 2])
        assert np.array_equal(target.blocks([1, 22, 2]), source.blocks([7, 0, 23]))
        assert not target.blocks([0, 3]).any()
    if gpu.kind == "fake":
        assert gpu.count("kvpush_pack_bulk") == (sides[0] == "gpu")
        assert gpu.count("kvpush_unpack_bulk") == (sides[1] == "gpu")


def test_a_read_right_after_received_sees_it_all(gpu: Any) -> None:
    shape = {"planes": 1, "blocks": 4, "heads": 1, "tokens": 1, "content": 1024}
    source, target = Cache(gpu, **shape), Cache(gpu, **shape)
    source.fill(3)
    expected = {block: source.blocks([block]) for block in range(4)}
    with engine(source) as p, engine(target) as d:
        peer = connect(p, d)
        for i in range(gpu.reads):
            move(p, d, peer, f"k{i}", [i % 4], [0])
            assert np.array_equal(target.blocks([0]), expected[i % 4]), f"transfer {i}"


def test_nothing_is_packed_before_its_event(gpu: Any) -> None:
    source, target = Cache(gpu), Cache(gpu)
    source.fill(4)
    target.fill(None)
    with engine(source) as p, engine(target) as d:
        peer = connect(p, d)
        recv = d.receive(peer, "late", digest=DIGEST, blocks=[[1, 2]])
        before = source.blocks([3, 4])
        slow = gpu.slow_write(source, seed=5)
        push = p.push("late", digest=DIGEST)
        push.advance([[3, 4]], after=slow.handle)
        push.finish()
        # One that has nothing to wait for overtakes it.
        move(p, d, peer, "at once", [5], [6])
        if gpu.kind == "fake":
            assert p.stats()["boxes_sent"] == 1
        slow.end()
        assert end_of(d, recv.handle).status == "ok"
        assert np.array_equal(target.blocks([1, 2]), source.blocks([3, 4]))
        assert not np.array_equal(target.blocks([1, 2]), before)


def test_what_waits_for_an_event_can_be_taken_back(gpu: Any) -> None:
    source, target = Cache(gpu), Cache(gpu)
    with engine(source) as p, engine(target) as d:
        peer = connect(p, d)
        recv = d.receive(peer, "k", digest=DIGEST, blocks=[[1, 2]])
        slow = gpu.slow_write(source, seed=6)
        push = p.push("k", digest=DIGEST)
        push.advance([[3, 4]], after=slow.handle)
        assert push.retract() == [0], "nothing of it was packed, and nobody waited for the event"
        push.advance([[5, 6]])
        push.finish()
        assert end_of(d, recv.handle).status == "ok"
        slow.end()


def test_one_launch_per_box(gpu: Any) -> None:
    if gpu.kind != "fake":
        pytest.skip("launches are counted by the fake driver only")
    source, target = Cache(gpu), Cache(gpu)
    with engine(source) as p, engine(target) as d:
        peer = connect(p, d)
        before = gpu.count("cuLaunchKernel")
        move(p, d, peer, "k", list(range(20)), list(range(20)))
        boxes = p.stats()["boxes_sent"] + d.stats()["boxes_received"]
        assert gpu.count("cuLaunchKernel") - before == boxes
        steady = {
            name: gpu.count(name)
            for name in ("cuMemAlloc_v2", "cuMemHostAlloc", "cuStreamCreateWithPriority")
        }
        for i in range(10):
            move(p, d, peer, f"k{i}", list(range(20)), list(range(20)))
        assert steady == {name: gpu.count(name) for name in steady}, "no allocation in the steady state"


def test_a_device_that_is_lost_fails_its_transfers(gpu: Any) -> None:
    if gpu.kind != "fake":
        pytest.skip("a real device cannot be lost on purpose")
    source, target = Cache(gpu), Cache(None)
    with engine(source) as p, engine(target) as d:
        peer = connect(p, d)
        gpu.library.fake_cuda_fail(b"cuEventQuery", 1, 719)
        recv = d.receive(peer, "k", digest=DIGEST, blocks=[[1]])
        push = p.push("k", digest=DIGEST)
        push.advance([[1]])
        push.finish()
        assert end_of(p, push.handle).kind == "failed"
        assert end_of(d, recv.handle).kind == "failed"
        gpu.library.fake_cuda_reset()


@pytest.mark.parametrize("transport", ["shm", "nixl"])
@pytest.mark.parametrize("sides", SIDES, ids="-".join)
def test_two_processes(gpu: Any, sides: tuple[str, str], transport: str) -> None:
    if kvpush.transports().get(transport):
        pytest.skip(f"{transport}: {kvpush.transports()[transport]}")
    reference, target = Cache(None), side(sides[1], gpu)
    reference.fill(7)
    target.fill(None)
    command = [sys.executable, str(Path(__file__).with_name("gpu_tools.py")), sides[0], transport, "7"]
    config = kvpush.Config.from_env(transport=transport)
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as p,
        kvpush.Engine(target.cache, config) as d,
    ):
        assert p.stdin is not None
        assert p.stdout is not None
        try:
            print(json.dumps({"offer": d.offer().hex()}), file=p.stdin)
            peer = d.establish(bytes.fromhex(json.loads(p.stdout.readline())["answer"]))
            recv = d.receive(peer, "k", digest=DIGEST, blocks=[[9, 1, 4]])
            print(json.dumps({"sources": [2, 0, 8]}), file=p.stdin)
            event = end_of(d, recv.handle)
            assert event.status == "ok", event
            assert json.loads(p.stdout.readline())["kind"] == "sent"
            assert np.array_equal(target.blocks([9, 1, 4]), reference.blocks([2, 0, 8]))
            print(file=p.stdin)
            assert p.wait(30) == 0
        finally:
            p.kill()


def test_planes_on_two_devices_are_refused(gpu: Any) -> None:
    on_gpu, on_host = Cache(gpu), Cache(None)
    planes = [*on_gpu.cache.groups[0].planes, *on_host.cache.groups[0].planes]
    with pytest.raises(kvpush.InvalidArgument, match="device"):
        kvpush.Cache([kvpush.Group(4, planes)])
