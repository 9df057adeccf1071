"""The CUDA kernels without a GPU: in torch operations (`ReferenceKernels`), and blocks.cu itself compiled as C++."""

from __future__ import annotations

import ctypes
import zlib
from pathlib import Path

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

from dcp_nvcomp.codecs.transforms import PLANE_NAMES, Planes
from dcp_nvcomp.engines.cuda.batches import THREADS, RowTable
from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, Launch, LaunchedKernels, kernel_source
from dcp_nvcomp.engines.cuda.literals import LITERALS_OPTIONS, LITERALS_SOURCES
from tests.codecs import planes_reference

from .emulation.build import build_library


def compile_for_cpu(folder: Path) -> ctypes.CDLL:
    """blocks.cu as a library. Undefined behaviour, a misaligned load too, ends the process."""
    return build_library(folder, kernel_source("blocks.cu"), KERNEL_OPTIONS)


def compile_literals_for_cpu(folder: Path) -> ctypes.CDLL:
    """The same of literals*.cu."""
    return build_library(folder, kernel_source(*LITERALS_SOURCES), LITERALS_OPTIONS)


def emulated_launch(library: ctypes.CDLL, threads: int = THREADS, order: int | None = None) -> Launch:
    """Return what starts the kernels of a library that tests/engines/emulation built, in the place of CuPy.

    Args:
        library: the library.
        threads: of a thread block.
        order: the seed of the order in which threads run; by default it differs from case to case, and not from one
            run of a case to the next. 0 is the quickest.
    """

    def launch(name: str, tiles: int, addresses: tuple[int, ...]) -> None:
        seed = zlib.crc32(f"{name} {tiles}".encode()) if order is None else order
        arguments = (ctypes.c_uint64 * len(addresses))(*addresses)
        error = ctypes.create_string_buffer(256)
        library.emulation_launch(
            name.encode(), tiles, threads, ctypes.c_uint32(seed), arguments, len(addresses), error, len(error)
        )
        assert not error.value, error.value.decode()

    return launch


def compiled_kernels(library: ctypes.CDLL) -> LaunchedKernels:
    """The engine's own launching code, with the CPU in place of CuPy."""
    return LaunchedKernels(torch.device("cpu"), emulated_launch(library))


def _memory(address: int, nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _signed(value: int) -> int:
    return int(np.uint32(value).astype(np.int32))


class ReferenceKernels:
    """What the kernels do, row by row, with planes_reference and the crc32c package."""

    def inspect(self, blocks: RowTable, crc: Tensor, seen: Tensor) -> None:
        for index, (data, nbytes, width, *_) in enumerate(blocks.rows.tolist()):
            block = _memory(data, nbytes)
            crc[index] = _signed(crc32c(block.numpy().tobytes()))
            if width > 1:
                signs = block[width - 1 :: width] & 0x80
                seen[index] = int((signs == 0).any()) | int((signs != 0).any()) << 1

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        for index in np.unique(blocks.tiles).tolist():
            data, nbytes, width, may_pack, _, *addresses = blocks.rows[index].tolist()
            found, planes = planes_reference.split(_memory(data, nbytes), Planes(width), pack=bool(may_pack))
            flags[index] = found
            for name, address in zip(PLANE_NAMES, addresses, strict=True):
                if name in planes:
                    assert address % 16 == 0
                    _memory(address, planes[name].numel()).copy_(planes[name])

    def merge(self, blocks: RowTable) -> None:
        for data, nbytes, width, flags, _, *addresses in blocks.rows.tolist():
            codec = Planes(width)
            layout = {plane.name: plane.nbytes for plane in codec.layout(nbytes, flags, True)}
            planes = {
                name: _memory(address, layout[name])
                for name, address in zip(PLANE_NAMES, addresses, strict=True)
                if name in layout
            }
            _memory(data, nbytes).copy_(planes_reference.merge(planes, flags, codec))

    def copy(self, pieces: RowTable) -> None:
        for source, target, nbytes, zeros, _ in pieces.rows.tolist():
            _memory(target, nbytes).copy_(_memory(source, nbytes))
            _memory(target + nbytes, zeros).zero_()
