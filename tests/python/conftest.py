"""Fixtures of several files."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake_cuda() -> Path:
    """A CUDA driver without a GPU (tests/cuda/fake_cuda.hpp), as the C++ tests use it."""
    built = [ROOT / "build" / preset / "libfake_cuda.so" for preset in ("release", "debug")]
    there = sorted((p for p in built if p.exists()), key=lambda p: p.stat().st_mtime)
    if not there:
        pytest.skip("libfake_cuda.so is not built: make ctest")
    return there[-1]
