"""Caches on a CUDA device: what is needed, and what is said when it is missing."""

import json
import os
import subprocess
import sys

import pytest

import kvpush
from kvpush import _core
from kvpush.config import cuda_kernels_path


def device_cache(index=0):
    plane = kvpush.Plane(
        base=1 << 20,
        num_blocks=4,
        num_heads=1,
        num_tokens=1,
        content_bytes=64,
        block_stride_bytes=64,
        head_stride_bytes=64,
        token_stride_bytes=64,
        name="l",
        device=index,
    )
    return kvpush.Cache([kvpush.Group(1, [plane])])


def in_process(code, **env):
    """The last line that it prints; in a process of its own: a driver that is loaded once stays."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_without_a_driver():
    with pytest.raises(kvpush.Unsupported, match="no CUDA driver: .*/nowhere/libcuda"):
        kvpush.Engine(device_cache(), kvpush.Config(cuda_library="/nowhere/libcuda.so.1"))
    with pytest.raises(kvpush.Unsupported, match="no CUDA driver"):
        _core.cuda_devices("/nowhere/libcuda.so.1")


REFUSED = """
import sys; sys.path.insert(0, {tests!r})
import kvpush, test_cuda
kvpush.config.cuda_kernels_path = lambda: {kernels!r}
try:
    kvpush.Engine(test_cuda.device_cache({index}))
except kvpush.Unsupported as error:
    print(error)
"""


def test_without_kernels_or_device(fake_cuda):
    tests = os.path.dirname(__file__)
    env = {"KVPUSH_CUDA_LIBRARY": str(fake_cuda), "FAKE_CUDA_DEVICES": "1"}
    said = in_process(REFUSED.format(tests=tests, kernels="/nowhere/k.fatbin", index=0), **env)
    assert "built without CUDA kernels (no /nowhere/k.fatbin): build with nvcc on PATH (KVPUSH_NVCC)" in said
    said = in_process(REFUSED.format(tests=tests, kernels="/nowhere/k.fatbin", index=1), **env)
    assert "CUDA device 1 does not exist" in said


def test_devices(fake_cuda):
    code = "import json, os; from kvpush import _core; "
    code += "print(json.dumps(_core.cuda_devices(os.environ['KVPUSH_CUDA_LIBRARY'])))"
    devices = json.loads(in_process(code, KVPUSH_CUDA_LIBRARY=str(fake_cuda), FAKE_CUDA_DEVICES="2"))
    assert [device["index"] for device in devices] == [0, 1]
    assert set(devices[0]) == {"index", "name", "uuid", "compute", "num_sms", "driver"}
    assert len(devices[0]["uuid"]) == 32


def test_kernels_lie_in_the_package():
    assert cuda_kernels_path() == os.path.join(os.path.dirname(kvpush.__file__), "kvpush_kernels.fatbin")
    assert kvpush.Config().to_core()["cuda_kernels"] == cuda_kernels_path()


TRANSFER = """
import ctypes, os, sys, tempfile
import numpy as np, kvpush
from kvpush.errors import KvpushError

cuda = ctypes.CDLL(os.environ["KVPUSH_CUDA_LIBRARY"])
def call(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)
def made(name, *args):
    out = ctypes.c_void_p()
    call(name, ctypes.byref(out), *args)
    return out
call("cuInit", 0)
context = made("cuDevicePrimaryCtxRetain", 0)
call("cuCtxPushCurrent_v2", context)

SHAPE = (32, 2, 4, 64)
class Array:
    def __init__(self):
        size = int(np.prod(SHAPE))
        self.memory = made("cuMemAlloc_v2", ctypes.c_size_t(size))
        self.__cuda_array_interface__ = {
            "shape": SHAPE, "typestr": "|u1", "data": (self.memory.value, False), "version": 3}
        # The fake's device memory is memory of this process.
        raw = (ctypes.c_uint8 * size).from_address(self.memory.value)
        self.host = np.frombuffer(raw, np.uint8).reshape(SHAPE)

def engine(arrays):
    planes = [kvpush.Plane.from_array(a, name=f"l{i}") for i, a in enumerate(arrays)]
    return kvpush.Engine(kvpush.Cache([kvpush.Group(4, planes)]))
def end(engine):
    while True:
        for event in engine.poll(timeout=30):
            return event.kind

kernels = tempfile.NamedTemporaryFile()
kernels.write(b"fake kernels"); kernels.flush()
kvpush.config.cuda_kernels_path = lambda: kernels.name
source, target = [[Array() for _ in range(3)] for _ in range(2)]
for a in target: a.host[:] = 7
stream = made("cuStreamCreateWithPriority", 1, 0)
event = made("cuEventCreate", 2)
def forward():
    cuda.fake_cuda_hold(stream)
    call("cuEventRecord", event, stream)

with engine(source) as p, engine(target) as d:
    peer = d.establish(p.answer(d.offer()))
    push = p.push("k", digest=b"d")
    forward()
    recv = d.receive(peer, "k", digest=b"d", blocks=[[1, 2, 3, 4]], after=event.value)
    push.advance([[9, 8]], after=event.value)
    assert push.retract() == [0]
    push.advance([[20, 10, 21, 11]], after=event.value)
    push.finish()
    call("cuEventDestroy_v2", event)  # what it stood for was taken down
    for _ in range(20):
        assert p.stats()["boxes_sent"] == d.stats()["boxes_received"] == 0
    rng = np.random.default_rng(1)
    for a in source: a.host[:] = rng.integers(0, 255, SHAPE)
    cuda.fake_cuda_release(stream)
    kinds = end(d), end(p)
    assert kinds == ("received", "sent"), kinds
    for a, b in zip(source, target):
        assert (b.host[[1, 2, 3, 4]] == a.host[[20, 10, 21, 11]]).all()
        assert (b.host[5:] == 7).all() and (b.host[0] == 7).all()
    push = p.push("k2", digest=b"d")
    cuda.fake_cuda_fail(b"cuEventRecord", -1, 400)
    try:
        push.advance([[1]], after=12345)
        sys.exit("a bad event was taken")
    except KvpushError as error:
        print(type(error).__name__, error)
    cuda.fake_cuda_reset()
"""


def test_a_transfer_between_caches_on_a_device_waits_for_its_events(fake_cuda):
    said = in_process(TRANSFER, KVPUSH_CUDA_LIBRARY=str(fake_cuda), FAKE_CUDA_DEVICES="1")
    assert "TransportError" in said


def test_the_doctor_moves_kv_in_device_memory(fake_cuda):
    if not os.path.exists(cuda_kernels_path()):
        pytest.skip("this installation has no CUDA kernels: it was built without nvcc")
    code = "from kvpush.cli.main import app; app(['doctor', '--json'], standalone_mode=False)"
    env = {**os.environ, "KVPUSH_CUDA_LIBRARY": str(fake_cuda), "FAKE_CUDA_DEVICES": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = [
        row for row in json.loads(done.stdout)["transports"] if (row["name"], row["memory"]) == ("shm", "GPU")
    ]
    assert (row["ok"], row["detail"]) == (True, "slots in GPU memory"), row
    assert row["network_ops_per_round"] == 4
