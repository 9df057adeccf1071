"""A GPU as the CUDA engine needs it: memory, copies, a stream of its own, the kernels, nvCOMP.

`Device` is the seam: the engine's code above it knows no CUDA, so tests run all of it on a CPU. `CudaDevice` is the
real one.

The kernels compute CRC32C in parallel, with tables of what appending zero bytes does to a CRC register. A register is a
polynomial over GF(2) modulo the CRC's, its highest coefficient in bit 0; appending k zero bytes multiplies it by x^8k.
kernels/blocks.cu says how that is used.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dcp_nvcomp.engines.cuda.arena import Arena, NvcompMemory, installed_memory
from dcp_nvcomp.engines.cuda.batches import THREADS, TILE_NBYTES, RowTable
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason, load_cupy, load_nvcomp
from dcp_nvcomp.errors import CodecUnavailableError

KERNEL_OPTIONS = ("-std=c++17", f"-DTHREADS={THREADS}", f"-DTILE_NBYTES={TILE_NBYTES}")

# Starts a kernel on the device's stream: its name, how many thread blocks, the addresses and numbers that it is given.
Launch = Callable[[str, int, tuple[int, ...]], None]

U32 = npt.NDArray[np.uint32]
POLYNOMIAL = 0x82F63B78
_X8 = 1 << (31 - 8)

# CUDA takes so much of ordinary memory at once; before it takes more it may wait for the stream.
_AT_ONCE_NBYTES = 64 << 10


def kernel_source(*names: str) -> str:
    """Return the text of these files of kernels/, joined; messages of the compiler name the file and its line."""
    folder = importlib.resources.files("dcp_nvcomp.engines.cuda").joinpath("kernels")
    return "".join(f'#line 1 "{name}"\n{folder.joinpath(name).read_text(encoding="utf-8")}' for name in names)


def host_tensor(memory: memoryview) -> Tensor:
    """Host memory as a tensor, which must not outlive it. Read-only memory is fine if the tensor is only read."""
    array = np.frombuffer(memory, np.uint8)
    if array.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # torch.frombuffer itself warns of read-only memory, and the bytes that a reader fetched are read-only
    return torch.frombuffer((ctypes.c_uint8 * array.size).from_address(array.ctypes.data), dtype=torch.uint8)


def upload(table: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Start to copy a table to a device, through page-locked memory if CUDA might wait for the stream otherwise."""
    host = torch.from_numpy(table)
    if device.type == "cuda" and table.nbytes > _AT_ONCE_NBYTES:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Kernels(Protocol):
    """What kernels/blocks.cu does; the tables are those of batches.py. Only inside a device's session."""

    def inspect(self, blocks: RowTable, crc: Tensor, seen: Tensor) -> None:
        """Put each block's CRC32C into `crc`, and which signs occur in it into `seen`; int32, all zero before."""

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        """Split blocks into planes, and put each block's flags into `flags`."""

    def merge(self, blocks: RowTable) -> None:
        """Put blocks together from their planes."""

    def copy(self, pieces: RowTable) -> None:
        """Copy runs of bytes, each followed by zero bytes."""


class Device(Protocol):
    """A device on which batches are encoded and decoded."""

    torch_device: torch.device  # the device of the blocks' tensors
    name: str  # the kind of GPU, as its driver names it
    stream_handle: int  # the `cudaStream_t` of its stream
    kernels: Kernels  # the kernels, on that stream
    nvcomp: Any
    nvcomp_memory: NvcompMemory
    arena: Arena  # the device memory of all batches

    def session(
        self, tensors: Sequence[Tensor], after: Sequence[torch.cuda.Event] = ()
    ) -> AbstractContextManager[None]:
        """Work on the device's own stream.

        At its end, also by an exception, all work is complete: results are in host memory, and no kernel reads the
        caller's memory any more.
        """

    def current(self) -> AbstractContextManager[object]:
        """Have nvCOMP and torch take this device for granted; a session does that too."""

    def compile(self, sources: Sequence[str], options: Sequence[str], names: Sequence[str]) -> Launch:
        """Compile these files of kernels/ and return what starts these kernels of them on the device's stream."""

    def copy_in(self, host: memoryview, target: Tensor) -> None:
        """Start a copy from host memory."""

    def copy_out(self, source: Tensor, host: memoryview) -> None:
        """Start a copy to host memory, which is complete at the end of the session: hold the source until then."""


class LaunchedKernels:
    """The kernels, given their tables in device memory."""

    def __init__(self, torch_device: torch.device, launch: Launch) -> None:
        self._device = torch_device
        self._launch = launch
        self._crc_tables: tuple[Tensor, Tensor] | None = None

    def _upload(self, table: npt.NDArray[Any]) -> Tensor:
        # torch has few operations for unsigned types, but bytes it can always move
        return upload(table.reshape(-1).view(np.uint8), self._device)

    def _run(self, name: str, table: RowTable, *more: Tensor) -> None:
        if table.tiles.size:
            both = self._upload(np.concatenate([table.rows.reshape(-1).view(np.uint8), table.tiles.view(np.uint8)]))
            address = both.data_ptr()
            addresses = [tensor.data_ptr() for tensor in more]
            self._launch(name, table.tiles.size, (address, address + table.rows.nbytes, *addresses))

    def inspect(self, blocks: RowTable, crc: Tensor, seen: Tensor) -> None:
        if self._crc_tables is None:
            self._crc_tables = self._upload(stride_table(4 * THREADS)), self._upload(power_table())
        self._run("inspect_blocks", blocks, *self._crc_tables, crc, seen)

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        self._run("split_blocks", blocks, seen, flags)

    def merge(self, blocks: RowTable) -> None:
        self._run("merge_blocks", blocks)

    def copy(self, pieces: RowTable) -> None:
        self._run("copy_pieces", pieces)


def current_device() -> torch.device:
    """Return the GPU on which this thread works, of a process that has used CUDA."""
    return torch.device("cuda", torch.cuda.current_device())


class FreeMemory(NamedTuple):
    """What is free of a device's memory."""

    unreserved_nbytes: int  # what torch has not taken from the driver
    cached_nbytes: int  # what torch has taken and keeps, mostly for training

    @property
    def nbytes(self) -> int:
        return self.unreserved_nbytes + self.cached_nbytes


def free_memory(device: torch.device | None = None) -> FreeMemory | None:
    """Return how much of a device's memory torch could allocate; None if CUDA was not used, or fails.

    Args:
        device: the device; the current one by default.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    try:
        unreserved_nbytes, _ = torch.cuda.mem_get_info(device)
        return FreeMemory(unreserved_nbytes, torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    except RuntimeError:  # a GPU that is broken is found out where it is used, and costs no more than its own work
        return None


def free_memory_nbytes(device: torch.device) -> int | None:
    """Return how much memory of a device torch could allocate; None if that is not known."""
    free = free_memory(device)
    return None if free is None else free.nbytes


# The streams of each device that no `CudaDevice` uses. None is ever destroyed: what is freed later than its stream,
# such as nvCOMP's codecs, still uses it, which on a destroyed one ends the process (nvCOMP 6.0.0.12 on an H100).
_STREAMS: defaultdict[int, list[Any]] = defaultdict(list)
_LENDING_STREAMS = threading.Lock()


def lent_stream(cupy: Any, index: int) -> Any:
    """Return a stream of a device that nothing else uses."""
    with _LENDING_STREAMS:
        if _STREAMS[index]:
            return _STREAMS[index].pop()
    with torch.cuda.device(index):
        # not one of torch's, which has 32 for each device and gives each of them to several owners
        stream = cupy.cuda.Stream(non_blocking=True)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(stream))  # not when Python ends either
    return stream


class CudaDevice:
    """An NVIDIA GPU through torch, CuPy and nvCOMP."""

    def __init__(self, device: torch.device) -> None:
        reason = cuda_unavailable_reason()
        if reason is not None:
            raise CodecUnavailableError(f"The CUDA engine can't run here: {reason}.")
        index = current_device().index if device.index is None else device.index
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)
        self.nvcomp = load_nvcomp()
        self.nvcomp_memory = installed_memory()
        self._cupy = load_cupy()
        self._own_stream, copy_stream = lent_stream(self._cupy, index), lent_stream(self._cupy, index)
        weakref.finalize(self, _STREAMS[index].extend, [self._own_stream, copy_stream]).atexit = False
        self.stream_handle = int(self._own_stream.ptr)
        self._stream = of_torch(self._own_stream, self.torch_device)
        self._copy_stream = of_torch(copy_stream, self.torch_device)
        # no method of this object, which would then live until the garbage collector runs, and its memory with it
        self.arena = Arena(
            partial(_reserve, self.torch_device, self._stream),
            partial(_return_memory, self.torch_device),
            partial(free_memory_nbytes, self.torch_device),
        )
        self.nvcomp_memory.attach(self.stream_handle, self.arena)
        names = ("inspect_blocks", "split_blocks", "merge_blocks", "copy_pieces")
        self.kernels: Kernels = LaunchedKernels(self.torch_device, self.compile(("blocks.cu",), KERNEL_OPTIONS, names))

    def compile(self, sources: Sequence[str], options: Sequence[str], names: Sequence[str]) -> Launch:
        try:
            with torch.cuda.device(self.torch_device):
                module = self._cupy.RawModule(code=kernel_source(*sources), options=tuple(options))
                functions = {name: module.get_function(name) for name in names}
        except Exception as error:  # CuPy's own compile error is a plain Exception
            raise CodecUnavailableError(
                f"The CUDA engine's kernels do not compile here ({type(error).__name__}: {error}). Check that the "
                "installed CuPy fits the CUDA driver."
            ) from error

        def launch(name: str, tiles: int, addresses: tuple[int, ...]) -> None:
            functions[name]((tiles,), (THREADS,), tuple(np.uint64(address) for address in addresses))

        return launch

    @contextmanager
    def session(self, tensors: Sequence[Tensor], after: Sequence[torch.cuda.Event] = ()) -> Iterator[None]:
        with torch.cuda.device(self.torch_device):
            for event in after:
                self._stream.wait_event(event)
            if not after:
                self._stream.wait_stream(torch.cuda.current_stream(self.torch_device))
            # no `record_stream` of the tensors, as the session ends with a wait: they are free to go then
            with torch.cuda.stream(self._stream), self._own_stream:
                try:
                    yield
                finally:
                    try:
                        self._stream.synchronize()
                    finally:
                        self._copy_stream.synchronize()

    def current(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.torch_device)

    def copy_in(self, host: memoryview, target: Tensor) -> None:
        target.copy_(host_tensor(host), non_blocking=True)

    def copy_out(self, source: Tensor, host: memoryview) -> None:
        # beside what is computed next: the bus and the multiprocessors have nothing to wait for each other
        self._copy_stream.wait_stream(self._stream)
        with torch.cuda.stream(self._copy_stream):
            host_tensor(host).copy_(source, non_blocking=True)


def of_torch(stream: Any, device: torch.device) -> torch.cuda.Stream:
    """Return a stream of CuPy's as one of torch's."""
    return torch.cuda.ExternalStream(int(stream.ptr), device=device)  # type: ignore[no-untyped-call]


def _reserve(device: torch.device, stream: torch.cuda.Stream, nbytes: int) -> Tensor:
    with torch.cuda.device(device), torch.cuda.stream(stream):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _return_memory(device: torch.device) -> None:
    with torch.cuda.device(device):  # on another one torch would make a context
        torch.cuda.empty_cache()


def _multiply(a: int, b: U32) -> U32:
    """The product of a polynomial with each of many."""
    product, b = np.zeros_like(b), b.copy()
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> np.uint32(1)) ^ np.where(b & np.uint32(1), np.uint32(POLYNOMIAL), np.uint32(0))
    return product


def power_table() -> U32:
    """x^(8 d 256^k) for k from 0 to 3 and d from 0 to 255, so that any 32-bit count of zero bytes is four products."""
    table = np.empty((4, 256), np.uint32)
    base = _X8
    for row in table:
        row[0] = 1 << 31
        filled = 1
        power = base  # base^filled
        while filled < 256:
            row[filled : 2 * filled] = _multiply(power, row[:filled])
            power = int(_multiply(power, np.array([power], np.uint32))[0])
            filled *= 2
        base = power
    return table


def stride_table(nbytes: int) -> U32:
    """For each of a register's four bytes, what its 256 values become once `nbytes` zero bytes are appended."""
    powers = power_table()
    factor = np.array([1 << 31], np.uint32)
    for k in range(4):
        factor = _multiply(int(powers[k, nbytes >> 8 * k & 0xFF]), factor)
    values = np.arange(256, dtype=np.uint32)
    return np.stack([_multiply(int(factor[0]), values << np.uint32(8 * k)) for k in range(4)])
