"""Tensors as elements in host memory, and memory for their bytes."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.codecs.base import ELEMENT_TYPES, ElementType
from dcp_nvcomp.engines.notices import warn
from dcp_nvcomp.errors import CheckpointError

HostArray = npt.NDArray[Any]

# Integers of the same width: a view through them keeps every bit and never meets float arithmetic.
_SAME_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_KNOWN_TO_NUMPY = frozenset(
    [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
    + ["bool", "float16", "float32", "float64", "complex64", "complex128"]
)
_NUMPY_SAME_WIDTH = {width: torch.empty(0, dtype=dtype).numpy().dtype for width, dtype in _SAME_WIDTH.items()}

_ALIGNMENT_NBYTES = 4096


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as the format has it, without "torch."."""
    return str(dtype).removeprefix("torch.")


@cache
def element_type(dtype: torch.dtype) -> ElementType | None:
    """Return the format's element type for a torch dtype; None if it has none."""
    return ELEMENT_TYPES.get(dtype_name(dtype))


def torch_dtype(element: ElementType) -> torch.dtype:
    """Return the torch dtype of an element type."""
    dtype = getattr(torch, element.name, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"The dtype {element.name} is unknown to torch {torch.__version__}. Update torch.")
    return dtype


def is_transparent(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's elements lie in memory: strided, a dtype of the format, no wrapper subclass."""
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return (
        plain and tensor.layout == torch.strided and not tensor.is_quantized and element_type(tensor.dtype) is not None
    )


def without_lazy_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, with its value in memory: conjugate and negative views are flags over other bits."""
    # thousands of small tensors: what is nothing to do costs more than asking
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return what two tensors have in common if and only if they are the same elements of the same memory."""
    storage = tensor.untyped_storage()
    if not storage.nbytes() or storage.device.type == "meta":
        return id(tensor)
    view = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (storage.device, storage.data_ptr(), tensor.dtype, *view)


def host_array(tensor: torch.Tensor) -> HostArray:
    """Return a numpy view of a CPU tensor as integers of its width (complex128 as itself), with its strides."""
    array: HostArray
    if dtype_name(tensor.dtype) not in _KNOWN_TO_NUMPY:
        array = tensor.view(_SAME_WIDTH[tensor.element_size()]).numpy()
        return array
    # Torch's own operations let go of the GIL, and on a thread that prepares work for busy ones each of them waits
    # longer than it takes to have it back; numpy's do not.
    array = tensor.numpy()
    same_width = _NUMPY_SAME_WIDTH.get(array.itemsize)
    return array if same_width is None else array.view(same_width)


def host_values(tensor: torch.Tensor) -> HostArray:
    """Return the values of a CPU tensor as `host_array` does: of a copy, if they are not in memory as they are."""
    try:
        return host_array(tensor)
    except RuntimeError:
        return host_array(without_lazy_bits(tensor))


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy in host memory, of a tensor whose elements lie in memory.

    A strided tensor is made contiguous on its device first, which takes memory there. If there is none left, its runs
    are copied one by one.
    """
    try:
        return tensor.contiguous().cpu()
    except torch.OutOfMemoryError:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        strides = tensor.stride()
        by_stride = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
        _copy_runs(tensor.permute(by_stride), copy.permute(by_stride))
        return copy


def _copy_runs(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_contiguous():
        target.copy_(source)
        return
    for part, to in zip(source, target, strict=True):
        _copy_runs(part, to)


def plain_allocate(nbytes: int) -> memoryview:
    """Host memory whose address is a multiple of 4096, for direct IO: the allocator's, which has some that was used."""
    raw = np.empty(nbytes + _ALIGNMENT_NBYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_NBYTES
    return raw[start : start + nbytes].data


def fresh_allocate(nbytes: int) -> memoryview:
    """The same of fresh memory, for much of it that is kept.

    Not from numpy, which asks for huge pages: then the kernel may move other memory about to make room for one, and
    fresh memory takes several times as long to touch.
    """
    whole = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return memoryview(whole)[:nbytes]


def pinned_allocate(nbytes: int) -> memoryview:
    """Page-locked host memory, which a GPU copies to at full speed."""
    view: memoryview = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data
    return view


class PinnedMemory:
    """Page-locked memory of one save or load, or pageable memory once there is none, for whatever reason."""

    def __init__(self, allocate: Callable[[int], memoryview]) -> None:
        self._allocate = allocate
        self._lock = threading.Lock()
        self._has_failed = False

    def allocate(self, nbytes: int) -> memoryview:
        """Return memory. Any thread may call this; the first that fails warns."""
        if not self._has_failed:
            try:
                return self._allocate(nbytes)
            except Exception as error:
                with self._lock:
                    is_first, self._has_failed = not self._has_failed, True
                if is_first:
                    warn(
                        f"{nbytes} bytes of page-locked memory can't be had ({type(error).__name__}: {error}): copies "
                        "between GPU and host are slower. A lower host_memory_budget needs less of it."
                    )
        return plain_allocate(nbytes)
