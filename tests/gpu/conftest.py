"""A GPU for the tests: the real one (``-m gpu``), and a driver without one (tests/cuda), so that all but the
kernels' machine code runs everywhere."""

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_tools import KERNELS_VARIABLE, FakeGpu, RealGpu, use_kernels_of_test

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "build" / "debug" / "libfake_cuda.so"


@functools.cache
def real_reason() -> str:
    """Why no real GPU can be used, or "". In a process of its own: a CUDA context is never forked."""
    code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch finds no CUDA device')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    if request.param == "real":
        if reason := real_reason():
            pytest.skip(f"needs a GPU: {reason}")
        yield RealGpu()
        return
    if not FAKE.exists():
        pytest.skip("the fake CUDA driver is not built: make ctest")
    # Loaded once per process: the core keeps a driver for the process's life.
    monkeypatch.setenv("KVPUSH_CUDA_LIBRARY", str(FAKE))
    kernels = tmp_path / "kernels.fatbin"
    kernels.write_bytes(b"fake kernels: the driver plays them")
    monkeypatch.setenv(KERNELS_VARIABLE, str(kernels))
    use_kernels_of_test(monkeypatch.setattr)
    fake = FakeGpu(ctypes.CDLL(str(FAKE)))
    fake.library.fake_cuda_reset()
    yield fake
    assert fake.library.fake_cuda_leaks() == 0, "something of the device was not given back"
    assert os.environ["KVPUSH_CUDA_LIBRARY"] == str(FAKE)
