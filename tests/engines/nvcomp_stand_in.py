"""A stand-in for nvCOMP's Python API on CPU memory, with zstandard and zlib underneath, and a device to run it on.

It takes and refuses what the docstrings of nvCOMP 6.0 say: keyword options by algorithm, batches carved out of one
buffer, alignment, fixed room in `out=`, sizes that are known only when they are asked for. What the docstrings leave
open it decides strictly. ANS here is a made-up bitstream: the real one is closed.

`NvcompStandIn` is the module, `StandInDevice` a `dcp_nvcomp.engines.cuda.device.Device`.
"""

from __future__ import annotations

import ctypes
import enum
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from dcp_nvcomp.engines.cuda.arena import Arena, Held, NvcompMemory, Piece
from dcp_nvcomp.engines.cuda.device import Kernels, Launch, host_tensor
from dcp_nvcomp.engines.cuda.literals import LITERALS_KERNELS

from .reference_literals import ReferenceLiterals

U8 = npt.NDArray[np.uint8]

_COMPRESSION_ALIGNMENT = {"Zstd": 4, "Deflate": 8, "ANS": 16}
_DECOMPRESSION_ALIGNMENT = {"Zstd": 8, "Deflate": 4, "ANS": 16}
_COMMON_OPTIONS = {
    "algorithm",
    "bitstream_kind",
    "checksum_policy",
    "cuda_stream",
    "decompress_backend",
    "device_id",
    "execution_policy",
    "uncomp_chunk_size",
    "use_de_sort",
}
_OPTIONS: dict[str, set[str]] = {
    "Zstd": set(),
    "Deflate": {"algorithm_type"},
    "ANS": {"data_type", "states_per_lane", "histogram_reduction_log2", "max_sub_chunk_count", "skip_validate"},
}
_ANS_DATA_TYPES = {"|u1": 1, "|i1": 1, "|f1": 1, "<f2": 2, "<f4": 4}


class BitstreamKind(enum.Enum):
    """As nvCOMP's."""

    NVCOMP_NATIVE = 0
    RAW = 1
    WITH_UNCOMPRESSED_SIZE = 2


def _bytes_of(source: Any) -> U8:
    array = source.numpy() if isinstance(source, Tensor) else np.asarray(source)
    if not array.flags.c_contiguous:
        raise ValueError("Cannot carve a BatchArray out of a non-contiguous buffer")
    return array.reshape(-1).view(np.uint8)


class CudaStream:
    """The stream, as an allocator gets it."""

    ptr = 77
    device = 0


class Array:
    """A buffer."""

    def __init__(self, source: Any) -> None:
        self.memory = _bytes_of(source)

    @property
    def buffer_size(self) -> int:
        return self.memory.size


class BatchArray:
    """Several buffers. `pending` is the work that fills them, done when somebody looks."""

    def __init__(self, arrays: list[U8]) -> None:
        self._arrays = arrays
        self.pending: Callable[[], list[U8]] | None = None

    def __len__(self) -> int:
        return len(self._arrays)

    def arrays(self) -> list[U8]:
        """The buffers, after the work."""
        if self.pending is not None:
            work, self.pending = self.pending, None
            self._arrays = work()
        return self._arrays

    def capacities(self) -> list[U8]:
        """The buffers, without waiting for work."""
        return self._arrays

    @property
    def buffer_sizes(self) -> list[int]:
        return [array.size for array in self.arrays()]


@dataclass(frozen=True)
class CompressConfig:
    """The uncompressed sizes of a batch."""

    codec: Codec
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class DecompressConfig:
    """The same, for decoding."""

    codec: Codec
    sizes: tuple[int, ...]


class Codec:
    """A codec. Only what a RAW codec with an algorithm does."""

    def __init__(self, module: NvcompStandIn, **options: Any) -> None:
        self._module = module
        self._algorithm = options.get("algorithm", "")
        if self._algorithm not in _OPTIONS:
            raise ValueError(f'Unknown algorithm: "{self._algorithm}".')
        for name in options.keys() - _COMMON_OPTIONS - _OPTIONS[self._algorithm]:
            raise ValueError(f'Unsupported argument: "{name}".')
        assert options.get("bitstream_kind") is BitstreamKind.RAW, "the engine makes bare streams only"
        self._literals_only = options.get("algorithm_type", 1) == 0
        self._matches = self._algorithm == "Deflate" and not self._literals_only
        self._data_type = options.get("data_type", "|u1")
        if self._data_type not in _ANS_DATA_TYPES:
            raise ValueError(f'Unsupported data type: "{self._data_type}".')
        self._scratch: list[Any] = []
        self._scratch_nbytes = -1

    def _take_scratch(self, nbytes: int) -> None:
        """Take scratch memory for a call, and keep it for the next ones, as nvCOMP 6.0.0.12 does on an H100."""
        if nbytes > self._scratch_nbytes:
            self._scratch, self._scratch_nbytes = self._module.allocate(nbytes), nbytes

    def get_max_comp_buffer_size(self, source: Array) -> int:
        # the bounds that nvCOMP 6.0.0.12 answers without a GPU, roughly; Deflate's for 64 KiB is 148,256
        nbytes = source.buffer_size
        return {"Zstd": nbytes + nbytes // 4096 + 16, "Deflate": nbytes * 9 // 4 + 800, "ANS": nbytes * 3 // 2 + 3600}[
            self._algorithm
        ]

    def encode(self, srcs: BatchArray, out: BatchArray, compression_config: None = None) -> BatchArray:
        assert self._algorithm != "Zstd", "it ends in an illegal instruction"
        self._module.called("encode", len(srcs))
        if len(srcs) != len(out):
            raise ValueError(f"Output buffer count ({len(out)}) does not match input buffer count ({len(srcs)})")
        sources, rooms = srcs.arrays(), out.capacities()
        self._check_alignment(sources + rooms, _COMPRESSION_ALIGNMENT[self._algorithm])
        bound = max(self.get_max_comp_buffer_size(Array(source)) for source in sources)
        for room in rooms:
            if room.size < bound:
                raise ValueError(f"Buffer of {room.size} bytes is too small to hold the data, {bound} bytes")
        for source in sources:
            if source.size % _ANS_DATA_TYPES[self._data_type]:
                raise RuntimeError("Buffer size not aligned with size of data type")
        self._take_scratch(3 * sum(source.size for source in sources) if self._matches else 0)
        given = weakref.ref(srcs)

        def work() -> list[U8]:
            assert given() is not None, "the batch's tables are gone, and the work is not done"
            filled = []
            for source, room in zip(sources, rooms, strict=True):
                frame = np.frombuffer(self._encode_slice(source), np.uint8)
                room[: frame.size] = frame
                filled.append(room[: frame.size])
            return filled

        out.pending = work
        return out

    def compression_config(self, uncompressed_sizes: list[int]) -> CompressConfig:
        if not uncompressed_sizes or min(uncompressed_sizes) < 1:
            raise ValueError("Uncompressed sizes must be greater than zero")
        assert all(isinstance(size, int) for size in uncompressed_sizes)
        return CompressConfig(self, tuple(uncompressed_sizes))

    def decompression_config(self, source: CompressConfig) -> DecompressConfig:
        assert isinstance(source, CompressConfig), "made from a batch it would synchronise"
        assert source.codec is self, "of another Codec object"
        self._module.configurations += 1
        return DecompressConfig(self, source.sizes)

    def decode(
        self,
        srcs: BatchArray,
        data_type: str = "",
        out: BatchArray | None = None,
        decompression_config: DecompressConfig | None = None,
    ) -> BatchArray:
        assert out is not None
        assert decompression_config is not None, "decode would synchronise"
        assert decompression_config.codec is self
        self._module.called("decode", len(srcs))
        sources, rooms = srcs.arrays(), out.capacities()
        if decompression_config.sizes != tuple(room.size for room in rooms):
            raise ValueError("The configuration is of another uncompressed shape")
        self._check_alignment(sources + rooms, _DECOMPRESSION_ALIGNMENT[self._algorithm])
        self._take_scratch(3 * sum(room.size for room in rooms) if self._algorithm == "Zstd" else 0)
        filled = []
        for source, room in zip(sources, rooms, strict=True):
            decoded = np.frombuffer(self._decode_slice(source), np.uint8)
            if decoded.size > room.size:
                raise ValueError(f"Buffer of {room.size} bytes is too small to hold the data, {decoded.size} bytes")
            room[: decoded.size] = decoded
            filled.append(room[: decoded.size])
        given = weakref.ref(srcs)

        def finish() -> list[U8]:
            assert given() is not None, "the batch's tables are gone, and the work is not done"
            return filled

        out.pending = finish
        return out

    def _check_alignment(self, arrays: list[U8], alignment: int) -> None:
        if any(array.ctypes.data % alignment for array in arrays):
            raise RuntimeError(f"nvCOMP error: a buffer is not aligned to {alignment} bytes")

    def _encode_slice(self, source: U8) -> bytes:
        strategy = zlib.Z_HUFFMAN_ONLY if self._literals_only else zlib.Z_DEFAULT_STRATEGY
        compressor = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
        stream = compressor.compress(source.tobytes()) + compressor.flush()
        return stream if self._algorithm == "Deflate" else b"ANS " + self._data_type.encode() + b" " + stream

    def _decode_slice(self, frame: U8) -> bytes:
        data = frame.tobytes()
        if self._algorithm == "ANS":
            head = b"ANS " + self._data_type.encode() + b" "
            if not data.startswith(head):
                raise RuntimeError("nvCOMP error: cannot decompress")
            data = data[len(head) :]
        try:
            if self._algorithm == "Zstd":
                return zstandard.ZstdDecompressor().decompress(data)
            return zlib.decompress(data, wbits=-15)
        except (zstandard.ZstdError, zlib.error) as error:
            raise RuntimeError(f"nvCOMP error: cannot decompress: {error}") from error


class NvcompStandIn:
    """The module `nvidia.nvcomp`.

    Attributes:
        on_call: told of each `encode` and `decode`, by our kernels too, with the number of slices; may raise.
        calls: what was called.
        kernel_calls: the same of our kernels.
        configurations: how many configurations for decoding were made.
    """

    __version__ = "6.0.0"
    BitstreamKind = BitstreamKind

    def __init__(self, on_call: Callable[[str, int], None] = lambda name, slices: None) -> None:
        self._on_call = on_call
        self._allocator: Callable[[int, Any], Any] | None = None
        self.calls: list[tuple[str, int]] = []
        self.kernel_calls: list[tuple[str, int]] = []
        self.configurations = 0

    def called(self, name: str, slices: int, *, by_kernels: bool = False) -> None:
        (self.kernel_calls if by_kernels else self.calls).append((name, slices))
        self._on_call(name, slices)

    def allocate(self, nbytes: int) -> list[Any]:
        return [] if self._allocator is None else [self._allocator(nbytes, CudaStream())]

    def set_device_allocator(self, allocator: Callable[[int, Any], Any] | None = None) -> None:
        self._allocator = allocator

    def Codec(self, **options: Any) -> Codec:  # noqa: N802
        return Codec(self, **options)

    def as_array(self, source: Any, cuda_stream: int = 0) -> Array:
        return Array(source)

    def as_arrays(self, buffer: Any, offsets: list[int], sizes: list[int], cuda_stream: int = 0) -> BatchArray:
        memory = _bytes_of(buffer)
        if len(offsets) != len(sizes):
            raise ValueError(f"offsets and sizes must have the same length, got {len(offsets)} and {len(sizes)}")
        if not sizes:
            raise ValueError("Cannot create a BatchArray from an empty sizes table")
        for offset, size in zip(offsets, sizes, strict=True):
            assert isinstance(offset, int) and isinstance(size, int)
            if size < 1 or offset < 0 or offset + size > memory.size:
                raise ValueError(f"{size} bytes at {offset} exceed the {memory.size}-byte buffer it is carved from")
        return BatchArray([memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)])


class NvcompWithout(NvcompStandIn):
    """nvCOMP that can't make codecs of an algorithm."""

    def __init__(self, algorithm: str = "Deflate") -> None:
        super().__init__()
        self._without = algorithm

    def Codec(self, **options: Any) -> Codec:  # noqa: N802
        if options["algorithm"] == self._without:
            raise RuntimeError("nvCOMP error: unsupported")
        return super().Codec(**options)


def _no_other_stream(nbytes: int, stream: Any) -> Held:
    raise AssertionError("nvCOMP works on the engine's stream only")


class PoisoningArena(Arena):
    """Fills what it gives out with garbage.

    So whatever is read before it is written shows, and whatever is used after it was given back and given out again.
    """

    def take(self, nbytes: int) -> Piece:
        return self._poisoned(super().take(nbytes), nbytes)

    def take_kept(self, nbytes: int) -> Piece:
        return self._poisoned(super().take_kept(nbytes), nbytes)

    @staticmethod
    def _poisoned(piece: Piece, nbytes: int) -> Piece:
        ctypes.memset(piece.ptr, 0xA5, max(nbytes, 1))
        return piece


class StandInDevice:
    """A device that is the CPU. Copies to the host happen only at the end of a session, as they may on a GPU.

    Args:
        kernels: what runs the kernels.
        nvcomp: the stand-in for nvCOMP.
        capacity_nbytes: the arena raises torch.OutOfMemoryError where more than this would be held.
        literals: what starts the kernels of literals*.cu; by default the reference.
    """

    torch_device = torch.device("cpu")
    name = "stand-in"
    stream_handle = CudaStream.ptr

    def __init__(
        self,
        kernels: Kernels,
        nvcomp: NvcompStandIn | None = None,
        capacity_nbytes: int = 1 << 40,
        literals: Launch | None = None,
    ) -> None:
        self.kernels = kernels
        self._literals = literals or ReferenceLiterals()
        self.nvcomp = nvcomp or NvcompStandIn()
        self.arena: Arena = PoisoningArena(self._reserve)
        self.nvcomp_memory = NvcompMemory(_no_other_stream)
        self.nvcomp_memory.attach(self.stream_handle, self.arena)
        self.nvcomp.set_device_allocator(self.nvcomp_memory)
        self.capacity_nbytes = capacity_nbytes
        self.held_nbytes = 0
        self.peak_nbytes = 0
        self.copies_in = 0
        self._copies: list[tuple[Tensor, memoryview]] = []
        self._in_session = False

    def _hold(self, nbytes: int) -> None:
        if self.held_nbytes + nbytes > self.capacity_nbytes:
            raise torch.OutOfMemoryError(f"Tried to allocate {nbytes} bytes")
        self.held_nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes)

    def _drop(self, nbytes: int) -> None:
        self.held_nbytes -= nbytes

    @contextmanager
    def session(self, tensors: Sequence[Tensor], after: Sequence[Any] = ()) -> Iterator[None]:
        assert not self._in_session
        assert not after, "a CPU has no events"
        self._in_session = True
        try:
            yield
        finally:
            for source, host in self._copies:
                host_tensor(host).copy_(source)
            self._copies.clear()
            self._in_session = False

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _reserve(self, nbytes: int) -> Tensor:
        self._hold(nbytes)
        # untouched, so that most of a large arena takes no memory; the arena puts garbage into what it gives out
        memory = np.empty(nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        weakref.finalize(memory, self._drop, nbytes)
        return torch.from_numpy(memory[start : start + nbytes])

    def compile(self, sources: Sequence[str], options: Sequence[str], names: Sequence[str]) -> Launch:
        assert tuple(names) == LITERALS_KERNELS
        return self._launch

    def _launch(self, name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        if name == "measure_slices":
            self.nvcomp.called("encode", blocks, by_kernels=True)
        elif name == "decode_slices":
            self.nvcomp.called("decode", arguments[1], by_kernels=True)
        self._literals(name, blocks, arguments)

    def copy_in(self, host: memoryview, target: Tensor) -> None:
        assert self._in_session
        self.copies_in += 1
        target.copy_(host_tensor(host))

    def copy_out(self, source: Tensor, host: memoryview) -> None:
        assert self._in_session
        self._copies.append((source, host))
