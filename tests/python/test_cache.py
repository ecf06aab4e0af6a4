"""Plane, Group and Cache: how arrays are read, and what is refused."""

import gc
import weakref

import numpy as np
import pytest

from kvpush.cache import Cache, Group, Plane
from kvpush.errors import InvalidArgument, Unsupported


def test_a_dense_array():
    array = np.zeros((5, 2, 3, 7), np.float32)
    plane = Plane.from_array(array, name="layers.0")
    assert plane.to_core() == {
        "base": array.ctypes.data,
        "num_blocks": 5,
        "num_heads": 2,
        "num_tokens": 3,
        "content_bytes": 28,
        "block_stride_bytes": 168,
        "head_stride_bytes": 84,
        "token_stride_bytes": 28,
        "name": "layers.0",
        "head_begin": 0,
    }
    assert plane.unit_bytes == 168


def test_strides_are_the_views_own():
    storage = np.zeros((5, 3, 2, 16), np.uint8)  # tokens before heads
    view = storage.transpose(0, 2, 1, 3)[1:, :, :, 4:12]
    plane = Plane.from_array(view, head_range=(6, 8))
    assert plane.base == storage.ctypes.data + 96 + 4
    assert (plane.num_blocks, plane.num_heads, plane.num_tokens, plane.content_bytes) == (4, 2, 3, 8)
    assert (plane.block_stride_bytes, plane.head_stride_bytes, plane.token_stride_bytes) == (96, 16, 32)
    assert plane.head_begin == 6


def test_interface_without_strides_is_c_order():
    class Bare:
        __array_interface__ = {"shape": (2, 3, 4, 5), "typestr": "<f2", "data": (4096, False), "version": 3}

    plane = Plane.from_array(Bare())
    assert (plane.block_stride_bytes, plane.head_stride_bytes, plane.token_stride_bytes) == (120, 40, 10)


class _Tensor:
    """What is used of a torch tensor."""

    def __init__(self, device="cpu", stride=(60, 20, 5, 1), index=None):
        self.shape = (2, 3, 4, 5)
        self.device = type("device", (), {"type": device, "index": index})
        self._stride = stride

    def data_ptr(self):
        return 8192

    def stride(self):
        return self._stride

    def element_size(self):
        return 2


def test_a_tensor():
    plane = Plane.from_array(_Tensor())
    assert (plane.base, plane.content_bytes, plane.block_stride_bytes, plane.token_stride_bytes) == (
        8192,
        10,
        120,
        10,
    )


def test_a_real_tensor():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 4, 3, 5), dtype=torch.bfloat16).transpose(1, 2)
    plane = Plane.from_array(tensor)
    assert plane.base == tensor.data_ptr()
    assert (plane.num_heads, plane.num_tokens, plane.content_bytes) == (3, 4, 10)
    assert (plane.head_stride_bytes, plane.token_stride_bytes) == (10, 30)
    with pytest.raises(Unsupported, match="'meta'"):
        Plane.from_array(torch.zeros((1, 1, 1, 1), device="meta"))


class _Cupy:
    """What is used of a cupy array: version 3 of the interface."""

    def __init__(self, index=None, read_only=False, strides=None):
        self.__cuda_array_interface__ = {
            "shape": (2, 3, 4, 5),
            "typestr": "<f2",
            "data": (1 << 40, read_only),
            "strides": strides,
            "stream": 1,
            "version": 3,
        }
        if index is not None:
            self.device = type("Device", (), {"id": index})


def test_tensors_on_a_cuda_device():
    plane = Plane.from_array(_Tensor(device="cuda", index=3))
    assert (plane.device, plane.base, plane.content_bytes) == (3, 8192, 10)
    assert Plane.from_array(_Tensor(device="cuda")).device == 0
    assert Cache([Group(4, [plane])]).to_core()["device"] == 3


def test_arrays_with_the_cuda_interface():
    plane = Plane.from_array(_Cupy(index=2))
    assert (plane.device, plane.base, plane.content_bytes) == (2, 1 << 40, 10)
    assert (plane.block_stride_bytes, plane.head_stride_bytes, plane.token_stride_bytes) == (120, 40, 10)
    plane = Plane.from_array(_Cupy(strides=(240, 80, 20, 2)))
    assert (plane.device, plane.block_stride_bytes, plane.token_stride_bytes) == (0, 240, 20)
    with pytest.raises(InvalidArgument, match="read-only"):
        Plane.from_array(_Cupy(read_only=True))


@pytest.mark.parametrize("kind", ["xpu", "mps", "meta"])
def test_other_devices_are_refused(kind):
    with pytest.raises(
        Unsupported, match=f"plane 'l' is on '{kind}': kvpush moves KV in host memory and on CUDA"
    ):
        Plane.from_array(_Tensor(device=kind), name="l")


def test_a_cache_is_on_one_device():
    host = Plane.from_array(_Tensor(), name="a")
    first, second = (Plane.from_array(_Tensor(device="cuda", index=i), name=f"c{i}") for i in range(2))
    with pytest.raises(InvalidArgument, match="plane 'a' is in host memory, plane 'c1' on cuda:1"):
        Cache([Group(4, [host]), Group(4, [second])])
    with pytest.raises(InvalidArgument, match="plane 'c0' is on cuda:0, plane 'c1' on cuda:1"):
        Group(4, [first, second])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3, 4)), "expected 4 axes"),
        (np.zeros((0, 3, 4, 5)), "every axis"),
        (np.zeros((2, 3, 4, 5))[..., ::2], "last axis has a stride of 16 bytes"),
        (np.broadcast_to(np.zeros(5), (2, 3, 4, 5)), "read-only"),
        (_Tensor(stride=(60, 20, 1, 4)), "must be contiguous"),
        ([1, 2], "is a list: expected a torch tensor"),
    ],
)
def test_bad_arrays(array, message):
    with pytest.raises(InvalidArgument, match=message):
        Plane.from_array(array)


def test_a_last_axis_of_one_is_contiguous_whatever_its_stride():
    assert Plane.from_array(np.zeros((2, 3, 4, 9))[..., ::9]).content_bytes == 8


def test_head_range_must_match():
    with pytest.raises(InvalidArgument, match=r"head_range \(4, 8\) is not the 3 heads"):
        Plane.from_array(np.zeros((2, 3, 4, 5)), head_range=(4, 8))


def test_cache_describes_its_groups_in_order():
    planes = [Plane.from_array(np.zeros((2, 1, 4, 5)), name=str(i)) for i in range(3)]
    cache = Cache([Group(4, planes[:2]), Group(8, planes[2:])], fingerprint={"model": "m"})
    core = cache.to_core()
    assert [group["block_size"] for group in core["groups"]] == [4, 8]
    assert [[plane["name"] for plane in group["planes"]] for group in core["groups"]] == [["0", "1"], ["2"]]
    assert core["fingerprint"] == {"model": "m"}
    assert core["device"] == cache.device == cache.groups[1].device == -1
    with pytest.raises(InvalidArgument, match="at least one plane"):
        Group(4, [])
    with pytest.raises(InvalidArgument, match="must both be str"):
        Cache([Group(4, planes)], fingerprint={"layers": 3})


def test_arrays_live_as_long_as_their_plane():
    array = np.zeros((2, 1, 4, 5))
    reference = weakref.ref(array)
    cache = Cache([Group(4, [Plane.from_array(array)])])
    del array
    gc.collect()
    assert reference() is not None
    del cache
    gc.collect()
    assert reference() is None
