"""The CUDA kernels without a GPU: in torch operations (`ReferenceKernels`), and blocks.cu itself compiled as C++."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from crc32c import crc32c
from torch import Tensor

import dcp_nvcomp.engines.cuda
from dcp_nvcomp.codecs.transforms.planes import PLANE_NAMES, Planes
from dcp_nvcomp.engines.cuda.batches import THREADS, TILE_NBYTES, RowTable
from dcp_nvcomp.engines.cuda.device import LaunchedKernels
from tests.codecs import planes_reference

# What stands for blockIdx and threadIdx is global, and engines of several threads share the library.
_ONE_AT_A_TIME = threading.Lock()

_CPU_SOURCE = Path(__file__).with_name("cuda_on_cpu.cpp")


def compiler() -> str | None:
    """A C++ compiler, or None."""
    if sys.platform != "linux":  # elsewhere there are no fibers in the C library
        return None
    return shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def compile_for_cpu(folder: Path) -> ctypes.CDLL:
    """blocks.cu as a library of C functions. Undefined behaviour, a misaligned load too, ends the process."""
    path = compiler()
    assert path is not None
    library = folder / "kernels.so"
    options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-fno-strict-aliasing"]
    options += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    options += [f"-DTHREADS={THREADS}", f"-DTILE_NBYTES={TILE_NBYTES}"]
    include = Path(dcp_nvcomp.engines.cuda.__file__).with_name("kernels")
    subprocess.run([path, *options, "-I", str(include), str(_CPU_SOURCE), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def compiled_kernels(library: ctypes.CDLL) -> LaunchedKernels:
    """The engine's own launching code, with the CPU in place of CuPy."""

    def launch(name: str, tiles: int, addresses: tuple[int, ...]) -> None:
        with _ONE_AT_A_TIME:
            failed = library[f"cpu_{name}"](ctypes.c_uint(tiles), *map(ctypes.c_uint64, addresses))
        assert not failed, f"{name}: only some threads of a thread block came to a barrier"

    return LaunchedKernels(torch.device("cpu"), launch)


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
        for index, (data, nbytes, width, may_pack, _, *addresses) in enumerate(blocks.rows.tolist()):
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
