"""The KV cache of one worker as strided memory: planes in groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpush.errors import InvalidArgument, Unsupported


@dataclass(frozen=True)
class Plane:
    """One strided array of KV, shape [B, H, N, C].

    B blocks, H KV heads, N tokens per block, C contiguous content bytes per head and token. Usually made by
    :meth:`from_array`.

    Parameters
    ----------
    base : int
        Address of block 0, head 0, token 0.
    num_blocks, num_heads, num_tokens, content_bytes : int
        The shape.
    block_stride_bytes, head_stride_bytes, token_stride_bytes : int
        Bytes from one block, head, token to the next.
    name : str
        Global layer name. Both engines must agree on it.
    head_begin : int
        Global index of the first KV head. Both engines must agree on it.
    device : int
        Where the array is: -1 in host memory, else the index of a CUDA device of this process.
    owner : object
        Kept alive until the engine is closed.
    """

    base: int
    num_blocks: int
    num_heads: int
    num_tokens: int
    content_bytes: int
    block_stride_bytes: int
    head_stride_bytes: int
    token_stride_bytes: int
    name: str = ""
    head_begin: int = 0
    device: int = -1
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def from_array(cls, array: Any, name: str = "", head_range: tuple[int, int] | None = None) -> "Plane":
        """Describe an array in host memory or on a CUDA device, without copying it.

        Parameters
        ----------
        array : array, shape [B, H, N, C], any dtype
            A torch tensor, or anything with ``__array_interface__`` (numpy) or ``__cuda_array_interface__``
            (cupy; without ``device.id`` it counts as on device 0). The last axis must be contiguous, the
            others may have any stride as long as no two elements share a byte.
        name : str
            Global layer name.
        head_range : (int, int), optional
            Global indices [begin, end) of the H heads; (0, H) if not given.

        Raises
        ------
        InvalidArgument
            Wrong number of axes, an empty axis, a last axis that is not contiguous, or a read-only array.
        Unsupported
            The array is neither in host memory nor on a CUDA device.
        """
        device, address, shape, strides, item_bytes = _describe(array, name)
        if len(shape) != 4:
            raise InvalidArgument(
                f"{_label(name)} has shape {list(shape)}: expected 4 axes, [blocks, heads, tokens, content]"
            )
        if min(shape) < 1:
            raise InvalidArgument(f"{_label(name)} has shape {list(shape)}: every axis must have at least 1")
        if shape[3] > 1 and strides[3] != item_bytes:
            raise InvalidArgument(
                f"{_label(name)}: the last axis has a stride of {strides[3]} bytes, but its elements have "
                f"{item_bytes}; it must be contiguous"
            )
        begin, end = (0, shape[1]) if head_range is None else head_range
        if end - begin != shape[1]:
            raise InvalidArgument(
                f"{_label(name)}: head_range ({begin}, {end}) is not the {shape[1]} heads of its shape"
            )
        return cls(
            base=address,
            num_blocks=shape[0],
            num_heads=shape[1],
            num_tokens=shape[2],
            content_bytes=shape[3] * item_bytes,
            block_stride_bytes=strides[0],
            head_stride_bytes=strides[1],
            token_stride_bytes=strides[2],
            name=name,
            head_begin=begin,
            device=device,
            owner=array,
        )

    @property
    def unit_bytes(self) -> int:
        """Bytes of this plane at one position: H * N * C."""
        return self.num_heads * self.num_tokens * self.content_bytes

    def to_core(self) -> dict[str, Any]:
        """Return what the native engine takes."""
        return {
            "base": self.base,
            "num_blocks": self.num_blocks,
            "num_heads": self.num_heads,
            "num_tokens": self.num_tokens,
            "content_bytes": self.content_bytes,
            "block_stride_bytes": self.block_stride_bytes,
            "head_stride_bytes": self.head_stride_bytes,
            "token_stride_bytes": self.token_stride_bytes,
            "name": self.name,
            "head_begin": self.head_begin,
        }


@dataclass(frozen=True)
class Group:
    """Planes that share one block table (a vLLM KV cache group).

    Parameters
    ----------
    block_size : int
        Tokens per block.
    planes : sequence of Plane
        All with the same number of blocks, and on one device.
    """

    block_size: int
    planes: Sequence[Plane]

    def __post_init__(self) -> None:
        object.__setattr__(self, "planes", tuple(self.planes))
        if not self.planes:
            raise InvalidArgument("a group needs at least one plane")
        _one_device(self.planes)

    @property
    def device(self) -> int:
        """Where its planes are: -1 in host memory, else the CUDA index."""
        return self.planes[0].device


@dataclass(frozen=True)
class Cache:
    """All groups of one worker, and what names the model that they belong to.

    Parameters
    ----------
    groups : sequence of Group
        In the order in which block ids are given to the engine. All on one device.
    fingerprint : mapping of str to str
        Whatever both sides must have in common: weights, KV dtype, content order. Compared when two
        engines meet, together with the shapes; the first difference is named with both values.
    """

    groups: Sequence[Group]
    fingerprint: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "fingerprint", dict(self.fingerprint))
        for name, value in self.fingerprint.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise InvalidArgument(f"fingerprint: {name!r}: {value!r} must both be str")
        _one_device([plane for group in self.groups for plane in group.planes])

    @property
    def device(self) -> int:
        """Where its arrays are: -1 in host memory, else the CUDA index."""
        return self.groups[0].device if self.groups else -1

    def to_core(self) -> dict[str, Any]:
        """Return what the native engine takes. The arrays must stay alive: keep this object."""
        return {
            "groups": [
                {"block_size": group.block_size, "planes": [plane.to_core() for plane in group.planes]}
                for group in self.groups
            ],
            "fingerprint": dict(self.fingerprint),
            "device": self.device,
        }


def _label(name: str) -> str:
    return f"plane {name!r}" if name else "the array"


def _place(device: int) -> str:
    return "in host memory" if device < 0 else f"on cuda:{device}"


def _one_device(planes: Sequence[Plane]) -> None:
    for plane in planes:
        first = planes[0]
        if plane.device != first.device:
            raise InvalidArgument(
                f"{_label(first.name)} is {_place(first.device)}, "
                f"{_label(plane.name)} {_place(plane.device)}: all planes of a cache must be on one device"
            )


_Array = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


def _describe(array: Any, name: str) -> _Array:
    """Return device, address, shape, strides in bytes and bytes per element of a writable array."""
    where = getattr(array, "device", None)
    if all(hasattr(array, member) for member in ("data_ptr", "stride", "element_size")):
        item_bytes = int(array.element_size())
        strides = tuple(int(stride) * item_bytes for stride in array.stride())
        return (
            _torch_device(where, name),
            int(array.data_ptr()),
            tuple(map(int, array.shape)),
            strides,
            item_bytes,
        )
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _read_interface(interface, int(getattr(where, "id", 0)), name)
    interface = getattr(array, "__array_interface__", None)
    if interface is not None:
        return _read_interface(interface, -1, name)
    raise InvalidArgument(
        f"{_label(name)} is a {type(array).__name__}: expected a torch tensor, or an object with "
        "__array_interface__ (numpy) or __cuda_array_interface__ (cupy)"
    )


def _torch_device(device: Any, name: str) -> int:
    kind = getattr(device, "type", "cpu")
    if kind == "cpu":
        return -1
    if kind != "cuda":
        raise Unsupported(
            f"{_label(name)} is on {kind!r}: kvpush moves KV in host memory and on CUDA devices"
        )
    return int(getattr(device, "index", None) or 0)


def _read_interface(interface: Mapping[str, Any], device: int, name: str) -> _Array:
    """Both array interfaces have these fields in common."""
    address, read_only = interface["data"]
    if read_only:
        raise InvalidArgument(f"{_label(name)} is read-only: received KV could not be written to it")
    shape = tuple(interface["shape"])
    item_bytes = int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is None:  # C order
        dense = [item_bytes]
        for size in reversed(shape[1:]):
            dense.append(dense[-1] * size)
        strides = tuple(reversed(dense[: len(shape)]))
    return device, int(address), shape, tuple(strides), item_bytes
