"""Our own coder of literals-only zstd frames on a GPU: the kernels of kernels/literals*.cu.

It encodes for `Zstd(literals_only=True)` with slices of at most 128 KiB, and decodes what it or the compiled CPU
encoder wrote. Whatever a frame says, its decoder reads and writes only what it is given, and reports what is not
exactly a frame of literals.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import Coder
from dcp_nvcomp.codecs.coders import Zstd
from dcp_nvcomp.engines.cuda.batches import I64, padded_nbytes
from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, Device, Launch, upload

# What is compiled, and the kernels that are in it.
LITERALS_SOURCES: Final = (
    "literals.cu",
    "literals_encode.cu",
    "literals_weights.cu",
    "literals_measure.cu",
    "literals_write.cu",
    "literals_parse.cu",
    "literals_decode.cu",
)
LITERALS_KERNELS: Final = ("measure_slices", "write_slices", "decode_slices")

PLAN_NBYTES: Final = 1220  # literals_encode.cu does not compile with any other
LITERALS_OPTIONS: Final = (*KERNEL_OPTIONS, f"-DPLAN_NBYTES={PLAN_NBYTES}")

MAX_SLICE_NBYTES: Final = 128 << 10  # a block of zstd's, and a frame is one
_SLICES_PER_BLOCK = 4  # of decode_slices


class LiteralKernels:
    """The kernels, given their tables in device memory. Only inside a device's session."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def measure(self, slices: Tensor, plans: Tensor, frame_nbytes: Tensor) -> None:
        """Plan the frames of slices, whose addresses and lengths are the rows of `slices` (int64)."""
        self._run("measure_slices", len(slices), slices, plans, frame_nbytes)

    def write(self, slices: Tensor, plans: Tensor, frames: Tensor) -> None:
        """Write each frame, and zeros after it up to a multiple of 16; frames: address and length of each (int64)."""
        self._run("write_slices", len(slices), slices, plans, frames)

    def decode(self, rows: Tensor, corrupt: Tensor) -> None:
        """Decode frames; rows: address and length of the frame, address and length of the slice (int64)."""
        self._run("decode_slices", -(-len(rows) // _SLICES_PER_BLOCK), rows, len(rows), corrupt)

    def _run(self, name: str, blocks: int, *arguments: Tensor | int) -> None:
        numbers = (item.data_ptr() if isinstance(item, Tensor) else item for item in arguments)
        self._launch(name, blocks, tuple(numbers))


class LiteralFrames:
    """Frames of slices, which are measured, but not written yet."""

    def __init__(
        self, device: Device, kernels: LiteralKernels, lengths: I64, slices: Tensor, plans: Tensor, frame_nbytes: Tensor
    ) -> None:
        self._device = device
        self._kernels = kernels
        self.addresses = np.zeros_like(lengths)
        self._lengths = lengths
        self._slices = slices
        self._plans = plans
        self._frame_nbytes = frame_nbytes
        self._reported: I64 | None = None

    def nbytes(self) -> I64:
        """Wait, and return the length of each frame; the slice's own length if a frame would not be shorter."""
        if self._reported is None:
            nbytes = self._frame_nbytes.cpu().numpy().astype(np.int64)
            if (nbytes < 1).any() or (nbytes > self._lengths).any():
                raise RuntimeError(f"The GPU reports impossible lengths of frames for {nbytes.size} slices.")
            self._reported = nbytes
        return self._reported

    def write(self, addresses: I64) -> None:
        """Start to write the frames, each to its address; what is given for a slice without a frame is not used."""
        assert (addresses % 16 == 0).all()
        frames = np.stack([addresses, self.nbytes()], axis=1)
        self._kernels.write(self._slices, self._plans, _upload(self._device, frames))


class LiteralDecoding:
    """Slices while they are decoded."""

    def __init__(self, corrupt: Tensor) -> None:
        self._corrupt = corrupt
        self._good: npt.NDArray[np.bool_] | None = None

    def good(self) -> npt.NDArray[np.bool_]:
        """Wait, and return for each slice True if it was decoded; False if its frame is corrupt or another coder's."""
        if self._good is None:
            self._good = self._corrupt.cpu().numpy() == 0
        return self._good

    def known(self) -> npt.NDArray[np.bool_]:
        """Return for each slice True if it was decoded: another frame may be right, but not literals-only."""
        return self.good()


class LiteralCoders:
    """Encodes and decodes literals-only frames on a device's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kernels = LiteralKernels(device.compile(LITERALS_SOURCES, LITERALS_OPTIONS, LITERALS_KERNELS))

    @staticmethod
    def encodes(coder: Coder | None) -> bool:
        """Return True if it can encode for this coder."""
        return isinstance(coder, Zstd) and coder.literals_only and coder.slice_nbytes <= MAX_SLICE_NBYTES

    def encode_nbytes(self, coder: Coder, lengths: I64) -> int:
        return lengths.size * (PLAN_NBYTES + 4 + 8 + 2 * 8)

    def decode_nbytes(self, coder: Coder, lengths: I64) -> int:
        return lengths.size * (4 * 8 + 4)

    def encode(self, coder: Coder, scratch: Tensor, places: I64, lengths: I64) -> LiteralFrames:
        assert self.encodes(coder) and (places % 16 == 0).all() and (lengths >= 1).all()
        assert int(lengths.max()) <= MAX_SLICE_NBYTES
        assert int((places + padded_nbytes(lengths)).max()) <= scratch.numel()
        count = lengths.size
        slices = self._upload(places + scratch.data_ptr(), lengths)
        plans = self._device.arena.empty(count * PLAN_NBYTES)
        frame_nbytes = torch.empty(count, dtype=torch.int32, device=self._device.torch_device)
        self._kernels.measure(slices, plans, frame_nbytes)
        return LiteralFrames(self._device, self._kernels, lengths, slices, plans, frame_nbytes)

    def decode(
        self, coder: Coder, encoded: Tensor, at: I64, nbytes: I64, scratch: Tensor, places: I64, lengths: I64
    ) -> LiteralDecoding:
        assert isinstance(coder, Zstd) and (places % 16 == 0).all() and encoded.numel() % 4 == 0
        assert int((places + lengths).max()) <= scratch.numel() and int((at + nbytes).max()) <= encoded.numel()
        rows = self._upload(at + encoded.data_ptr(), nbytes, places + scratch.data_ptr(), lengths)
        corrupt = torch.zeros(lengths.size, dtype=torch.int32, device=self._device.torch_device)
        self._kernels.decode(rows, corrupt)
        return LiteralDecoding(corrupt)

    def _upload(self, *columns: I64) -> Tensor:
        return _upload(self._device, np.stack(columns, axis=1))


def _upload(device: Device, table: I64) -> Tensor:
    return upload(table, device.torch_device)
