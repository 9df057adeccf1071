"""The codec contract: the stored bytes of a block, without IO, threads, torch or DCP.

    block's bytes  --ArrayToBytes.split-->  planes, stored or coded  --Coder-->  slices  -->  one encoded block

A `CodecChain` describes all of it and is what a footer names, as in Zarr v3: a list of `{"name", "configuration"}`. The
engines (engines/) run chains; `layout_block` decides where each piece of a block lies, and what is compiled for a
whole chain (registry.py) follows it. They make and take `EncodedBlock`s, which may outlive the tensor.

Codecs carry their behaviour: the format and a save or load know these classes only, never a particular codec, and the
engines need no more. registry.py lists the codecs there are. `integer`, `text` and `slice_nbytes` check what a footer
says of a codec.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from dcp_nvcomp.errors import ConfigurationError, FormatError

U8 = npt.NDArray[np.uint8]

ALIGNMENT_NBYTES = 16
# A trade: larger blocks cost less per block, smaller ones let a resharded load fetch less that it does not need.
BLOCK_NBYTES = 1 << 20
_LAYOUTS = 64  # of a chain that are remembered
_LAYOUT_PIECES = 1024  # of more pieces none is: a footer may have 65,536 in each of many blocks, all different
MAX_SLICE_NBYTES = 16 << 20

FLAG_PACKED_REST = 1
FLAG_NEGATIVE = 2

# Encodes one slice: its bytes in, a frame out, which may be memory that the next call uses again.
SliceEncoder = Callable[[memoryview], bytes | memoryview]
# Decodes one frame into a buffer that it must fill exactly; raises CorruptDataError otherwise.
SliceDecoder = Callable[[memoryview, memoryview], None]

_RELEASE_GIL = 1


@dataclass(frozen=True)
class ElementType:
    name: str  # PyTorch's name of the dtype, without `torch.`
    nbytes: int  # bytes of one element
    float_nbytes: int = 0  # bytes of each float in it; 0 if it has no float of two bytes or more to split


ELEMENT_TYPES: dict[str, ElementType] = {
    kind.name: kind
    for kind in (
        ElementType("bool", 1),
        ElementType("uint8", 1),
        ElementType("int8", 1),
        ElementType("uint16", 2),
        ElementType("int16", 2),
        ElementType("uint32", 4),
        ElementType("int32", 4),
        ElementType("uint64", 8),
        ElementType("int64", 8),
        ElementType("float4_e2m1fn_x2", 1),
        ElementType("float8_e4m3fn", 1),
        ElementType("float8_e4m3fnuz", 1),
        ElementType("float8_e5m2", 1),
        ElementType("float8_e5m2fnuz", 1),
        ElementType("float8_e8m0fnu", 1),
        ElementType("float16", 2, 2),
        ElementType("bfloat16", 2, 2),
        ElementType("float32", 4, 4),
        ElementType("float64", 8, 8),
        ElementType("complex32", 4, 2),
        ElementType("complex64", 8, 4),
        ElementType("complex128", 16, 8),
    )
}


class ScratchArrays:
    """Arrays that are reused from block to block; one of these per thread, grown as needed."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str, count: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
        """An uninitialised array of `count` elements that the next call with the same name overwrites."""
        held = self._arrays.get(name)
        if held is None or held.size < count or held.dtype != dtype:
            held = self._arrays[name] = np.empty(count, dtype)
        return held[:count]


def check_slice_nbytes(slice_nbytes: int) -> None:
    if not isinstance(slice_nbytes, int) or not 0 < slice_nbytes <= MAX_SLICE_NBYTES or slice_nbytes % ALIGNMENT_NBYTES:
        raise ConfigurationError(f"slice_nbytes={slice_nbytes!r} must be a multiple of 16 from 16 to 16 MiB.")


def integer(configuration: dict[str, Any], key: str, codec: str) -> int:
    value = configuration.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"Codec {codec!r} has {key}={shown(value)}, which must be an integer.")
    return value


def text(configuration: dict[str, Any], key: str, codec: str) -> str:
    value = configuration.get(key)
    if not isinstance(value, str):
        raise FormatError(f"Codec {codec!r} has {key}={shown(value)}, which must be text.")
    return value


def slice_nbytes(configuration: dict[str, Any], codec: str) -> int:
    value = integer(configuration, "slice_nbytes", codec)
    if not 0 < value <= MAX_SLICE_NBYTES or value % ALIGNMENT_NBYTES:
        raise FormatError(f"Codec {codec!r} has slice_nbytes={shown(value)}, not a multiple of 16 from 16 to 16 MiB.")
    return value


def padded(nbytes: int) -> int:
    return (nbytes + ALIGNMENT_NBYTES - 1) // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES


@dataclass(frozen=True)
class Plane:
    """One plane of a block: its name, its length in bytes, and whether it is coded or stored."""

    name: str
    nbytes: int
    coded: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous run of a plane in the encoded block: a whole stored plane, or one slice."""

    plane: int  # index of the plane
    start: int  # first byte of the piece in the plane
    nbytes: int  # its length when decoded
    coded: bool  # whether a coder may have coded it (its encoded size is then in the slice table)


class BlockRow(NamedTuple):
    """One block's rows of the footer's tables."""

    flags: int
    slice_nbytes: tuple[int, ...]  # encoded size of each of its slices
    encoded_crc: int  # CRC32C of the encoded block
    uncompressed_crc: int  # CRC32C of the decoded block


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    data: memoryview  # its bytes on the host, a multiple of 16 long, valid as long as the buffer it was encoded into
    row: BlockRow  # its rows of the footer's tables
    uncompressed_nbytes: int
    base_crc: int | None = None  # CRC32C that the base's block must have, if it needs one
    was_wrong: bool = False  # True if a GPU encoded it to wrong bytes before; these are the CPU engine's


def checksum(data: U8 | memoryview | bytes, value: int = 0) -> int:
    """Return the CRC32C of `data`, without holding the GIL. `value` is the CRC of the bytes before it."""
    return crc32c(data.data if isinstance(data, np.ndarray) else data, value, _RELEASE_GIL)


class Codec(ABC):
    """A codec as a footer describes it."""

    name: ClassVar[str]  # its name in a footer, a promise: what it once decoded, it always will
    feature: ClassVar[str | None] = None  # an addition to the format that files with it name, for older readers

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """Return what a decoder must know, as JSON values."""

    @classmethod
    @abstractmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Codec:
        """Return the codec that a footer's configuration describes.

        Args:
            configuration: JSON values from a file, which can be anything; `integer`, `text` and `slice_nbytes` check.

        Raises:
            FormatError: it does not describe this codec.
        """


class Split(NamedTuple):
    """What a block that has a base was split into."""

    flags: int
    crc: int  # of the block
    base_crc: int  # of what was taken for its base's block


class ArrayToBytes(Codec):
    """An array -> bytes codec: the planes of a block, and the way there and back."""

    is_plain: ClassVar[bool] = False
    has_base: ClassVar[bool] = False  # True if blocks may need those of another record, their base

    @abstractmethod
    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        """Return the planes of a block of `nbytes` decoded bytes with these `flags`, in stored order.

        Flags that `split` returns make no plane longer, and leave coded planes as they are. Those of a file may say
        anything that `check_flags` allows; a plane that they make longer than it can be is refused by `merge`.
        """

    @abstractmethod
    def check_flags(self, flags: int) -> bool:
        """Return True if `flags` is a value that this codec can have written."""

    @abstractmethod
    def split(self, block: U8, planes: Sequence[U8]) -> int:
        """Split one block into its planes.

        Args:
            block: the block's bytes, contiguous, whole elements.
            planes: receive the planes in stored order; arrays of the sizes of `layout` without flags.

        Returns:
            The block's flags. The planes of `layout` with these flags lie at the starts of the arrays.
        """

    @abstractmethod
    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        """Put the planes of one block together again, the inverse of `split`.

        Args:
            planes: the planes of `layout` with these flags, in stored order.
            flags: the block's flags.
            block: receives the block's bytes, contiguous.
            scratch: reused between calls.
        """

    def needs_base(self, flags: int) -> bool:
        """Return True if a block with these flags was split by `split_from`."""
        return False

    def split_from(self, base: U8, rows: U8, planes: Sequence[U8]) -> Split:
        """Split one block into planes that are all stored, given what its base has in its place.

        Args:
            base: bytes of the base's block, a matrix; those of a row are next to each other.
            rows: bytes of the block, likewise.
            planes: as for `split`.
        """
        raise AssertionError(f"{self.name} has no base")

    def merge_from(self, base: U8, planes: Sequence[U8], flags: int, rows: U8) -> int:
        """Put a block together again whose flags need the base, contiguous here, and return the CRC of its bytes."""
        raise AssertionError(f"{self.name} has no base")

    def fits(self, element: ElementType) -> bool:
        """Return True if the codec can be applied to elements of this type."""
        return True


class Coder(Codec):
    """A bytes -> bytes codec: the entropy coder of slices."""

    slice_nbytes: int  # how many bytes of a plane one slice covers, a multiple of 16
    block_nbytes: ClassVar[int] = BLOCK_NBYTES  # preferred size of blocks
    needs_gpu: ClassVar[bool] = False  # True if only the CUDA engine runs it
    needs_plain: ClassVar[bool] = False  # True if it must follow an array -> bytes codec that is plain

    @abstractmethod
    def encoder(self) -> SliceEncoder:
        """Return a function that encodes slices on the CPU; it keeps its context, so each thread takes its own.

        Raises:
            CodecUnavailableError: this coder does not run on the CPU.
        """

    @abstractmethod
    def decoder(self) -> SliceDecoder:
        """Return a function that decodes slices on the CPU; each thread takes its own.

        Raises:
            CodecUnavailableError: this coder does not run on the CPU.
        """


@dataclass(frozen=True)
class CodecChain:
    """The codecs of a record's blocks: planes, then perhaps an entropy coder.

    Examples:
        >>> from dcp_nvcomp.codecs import Planes, Zstd
        >>> chain = CodecChain(Planes(float_nbytes=2), Zstd())
        >>> [codec["name"] for codec in chain.to_json()]
        ['planes', 'zstd']
    """

    array_to_bytes: ArrayToBytes
    coder: Coder | None = None
    _layouts: dict[tuple[int, int], tuple[Piece, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _most_encoded: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False, hash=False)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the chain as a footer describes it."""
        codecs: list[Codec] = [self.array_to_bytes] if self.coder is None else [self.array_to_bytes, self.coder]
        return [{"name": codec.name, "configuration": codec.configuration()} for codec in codecs]

    @property
    def label(self) -> str:
        """A short name for people: `planes-zstd`, `zstd`, `none`."""
        names = [codec["name"] for codec in self.to_json() if codec["name"] != "bytes"]
        return "-".join(names) or "none"

    @property
    def needs_gpu(self) -> bool:
        """True if only the CUDA engine runs it."""
        return self.coder is not None and self.coder.needs_gpu

    @property
    def block_nbytes(self) -> int:
        """Preferred size of blocks."""
        return BLOCK_NBYTES if self.coder is None else self.coder.block_nbytes

    def layout(self, nbytes: int, flags: int) -> tuple[Piece, ...]:
        """`layout_block` of this chain, remembered: almost all blocks of a record have one of two layouts."""
        key = (nbytes, flags)
        pieces = self._layouts.get(key)
        if pieces is None:
            pieces = layout_block(self, nbytes, flags)
            if len(self._layouts) >= _LAYOUTS:
                self._layouts.clear()
            if len(pieces) <= _LAYOUT_PIECES:
                self._layouts[key] = pieces
        return pieces

    def max_encoded_nbytes(self, nbytes: int) -> int:
        """Return an upper bound of the encoded size of a block: no piece is ever stored longer than it is."""
        most = self._most_encoded.get(nbytes)
        if most is None:
            # as the sum over all pieces: slices that are full need no padding
            planes = self.array_to_bytes.layout(nbytes, 0, self.coder is not None)
            if len(self._most_encoded) >= _LAYOUTS:
                self._most_encoded.clear()
            most = self._most_encoded[nbytes] = sum(padded(plane.nbytes) for plane in planes)
        return most


def layout_block(chain: CodecChain, nbytes: int, flags: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    planes: Sequence[Plane] = chain.array_to_bytes.layout(nbytes, flags, chain.coder is not None)
    for index, plane in enumerate(planes):
        if not plane.coded:
            pieces.append(Piece(index, 0, plane.nbytes, False))
            continue
        assert chain.coder is not None
        step = chain.coder.slice_nbytes
        for start in range(0, plane.nbytes, step):
            pieces.append(Piece(index, start, min(step, plane.nbytes - start), True))
    return tuple(pieces)


# verify: "stored" checks each block's encoded CRC before a decoder sees it, "full" the decoded block's CRC too.
