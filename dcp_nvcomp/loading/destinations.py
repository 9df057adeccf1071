"""Destinations of decoded blocks: regions of tensors, members of packs, and runs of bytes."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.engines.tensors import HostArray, host_array, is_transparent
from dcp_nvcomp.format.blocks import Box, RowStrip, Strip, row_strip

U8 = npt.NDArray[np.uint8]


class Conversions:
    """Warns about the first destination whose dtype is not the saved one."""

    def __init__(self) -> None:
        self._warned = False

    def check(self, fqn: str, saved: torch.dtype, wanted: torch.dtype) -> None:
        """Warn if the dtypes of a key differ and no warning was issued before."""
        if saved == wanted or self._warned:
            return
        self._warned = True
        warnings.warn(
            f"Key {fqn!r} was saved as {saved} and is converted to {wanted}; other keys may be converted too.",
            UserWarning,
            stacklevel=2,
        )


def shares_elements(tensor: torch.Tensor) -> bool:
    """Return True for an expanded tensor."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return False
    return 0 in [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def part_of(tensor: torch.Tensor, region: Box) -> torch.Tensor | None:
    """Narrow a tensor to a region of it, by operations that every tensor subclass has; None if it is not inside."""
    inside = tensor.dim() == len(region.sizes) and all(
        offset + size <= limit for offset, size, limit in zip(region.offsets, region.sizes, tensor.shape, strict=True)
    )
    if not inside:
        return None
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def dense_part_of(tensor: torch.Tensor, region: Box) -> torch.Tensor | None:
    """Return a region of a tensor of another layout, such as a sparse one, as a strided one; None if it is outside."""
    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
    if tensor.dim() != len(region.sizes) or not whole.contains(region):
        return None
    if all(size == length for size, length in zip(region.sizes, tensor.shape, strict=True)):
        return tensor.to_dense()
    part = tensor if tensor.layout == torch.sparse_coo else tensor.to_sparse(layout=torch.sparse_coo)
    for dim, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        part = part.narrow_copy(dim, offset, size)
    return part.to_dense()


class Destination(ABC):
    """The place of a record's decoded blocks. Several threads place blocks, each block once."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def direct(self, strip: Strip) -> RowStrip | None:
        """Return the host memory of some blocks, as rows of bytes, to decode them there; None if there is none."""
        return None

    def direct_on_device(self, block: Box) -> torch.Tensor | None:
        """Return a block's memory as a uint8 tensor on the destination's device; None if it is not one run of bytes."""
        return None

    @abstractmethod
    def place(self, block: Box, data: torch.Tensor) -> None:
        """Copy the part of a decoded block that belongs here; `data` is 1-D, uint8, in C order."""

    def place_bytes(self, block: Box, data: U8) -> None:
        self.place(block, torch.from_numpy(data))


class Region(Destination):
    """The destination of a region of a tensor record."""

    def __init__(self, box: Box, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        self._box = box
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._dtype = dtype
        self._array: HostArray | None = None
        # elements that share memory cannot be loaded into: torch raises when it copies
        visible = tensor.dtype == dtype and is_transparent(tensor) and not shares_elements(tensor)
        if visible and tensor.device.type == "cpu":
            try:
                self._array = host_array(self._tensor)
            except RuntimeError:  # lazy bits
                visible = False
        self._visible = visible and not (self._array is None and (tensor.is_conj() or tensor.is_neg()))

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def direct(self, strip: Strip) -> RowStrip | None:
        if self._array is None or not self._box.contains(strip.box):
            return None
        if any(self._box.offsets):
            strip = strip._replace(box=strip.box.relative_to(self._box.offsets))
        return row_strip(self._array, strip)

    def direct_on_device(self, block: Box) -> torch.Tensor | None:
        if not self._visible or not self._box.contains(block):
            return None
        part = self._tensor[block.relative_to(self._box.offsets).index]
        return part.reshape(-1).view(torch.uint8) if part.is_contiguous() else None

    def place_bytes(self, block: Box, data: U8) -> None:
        # thousands of small tensors are wanted whole
        if self._array is not None and block == self._box:
            np.copyto(self._array, data.view(self._array.dtype).reshape(self._array.shape))
        else:
            self.place(block, torch.from_numpy(data))

    def place(self, block: Box, data: torch.Tensor) -> None:
        wanted = self._box.intersect(block)
        if wanted is None:
            return
        into, out_of = wanted.relative_to(self._box.offsets).index, wanted.relative_to(block.offsets).index
        if self._array is not None and data.device.type == "cpu":
            # numpy and not torch: its copies stay on this thread
            np.copyto(self._array[into], data.numpy().view(self._array.dtype).reshape(block.sizes)[out_of])
        else:
            self._tensor[into].copy_(data.view(self._dtype).reshape(block.sizes)[out_of])


class PackMember(Destination):
    """A shard packed with others into one block, copied from it on the device that decoded the block."""

    def __init__(self, start: int, shape: Sequence[int], nbytes: int, region: Region) -> None:
        self._start = start
        self._stop = start + nbytes
        self._whole = Box((0,) * len(shape), tuple(shape))
        self._region = region

    @property
    def device(self) -> torch.device:
        return self._region.device

    def place(self, block: Box, data: torch.Tensor) -> None:
        self._region.place(self._whole, data[self._start : self._stop])


class Run(Destination):
    """A run of elements of a one-dimensional record: a bytes item, or a member of a pack."""

    def __init__(self, start: int, nbytes: int, element_nbytes: int, complete: Callable[[U8], None]) -> None:
        self._start = start * element_nbytes
        self._nbytes = nbytes
        self._width = element_nbytes
        self._complete = complete
        self._lock = threading.Lock()
        self._gathered: U8 | None = None
        self._missing = nbytes

    def place(self, block: Box, data: torch.Tensor) -> None:
        self.place_bytes(block, data.cpu().numpy())

    def place_bytes(self, block: Box, data: U8) -> None:
        begin = block.offsets[0] * self._width
        first, last = max(begin, self._start), min(begin + data.size, self._start + self._nbytes)
        part = data[first - begin : last - begin]
        if part.size == self._nbytes:
            self._complete(part)
            return
        with self._lock:
            if self._gathered is None:
                self._gathered = np.empty(self._nbytes, np.uint8)
            self._gathered[first - self._start : last - self._start] = part
            self._missing -= part.size
            done = self._missing == 0
        if done:
            self._complete(self._gathered)
