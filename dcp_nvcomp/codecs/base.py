"""The codec contract: what the bytes of a block are, without IO, threads or DCP.

    block's bytes  --ArrayToBytes.layout-->  planes, stored or coded  --Coder-->  slices  -->  one encoded block

A `CodecChain` describes all of it and is what a footer names, as in Zarr v3: a list of `{"name", "configuration"}`. The
engines (engines/) run chains; `layout_block` tells them, and nobody else decides, where each piece of a block lies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dcp_nvcomp.errors import ConfigurationError

__all__ = [
    "ALIGNMENT_NBYTES",
    "FLAG_NEGATIVE",
    "FLAG_PACKED_REST",
    "MAX_SLICE_NBYTES",
    "ArrayToBytes",
    "CodecChain",
    "Coder",
    "Piece",
    "Plane",
    "SliceDecoder",
    "SliceEncoder",
    "check_slice_nbytes",
    "layout_block",
    "padded",
]

ALIGNMENT_NBYTES = 16
_LAYOUTS = 64  # of a chain that are remembered
_LAYOUT_PIECES = 1024  # of more pieces none is: a footer may have 65,536 in each of many blocks, all different
MAX_SLICE_NBYTES = 16 << 20

FLAG_PACKED_REST = 1
FLAG_NEGATIVE = 2

# Encodes one slice: its bytes in, a frame out, which may be memory that the next call uses again.
SliceEncoder = Callable[[memoryview], bytes | memoryview]
# Decodes one frame into a buffer that it must fill exactly; raises CorruptDataError otherwise.
SliceDecoder = Callable[[memoryview, memoryview], None]


def check_slice_nbytes(slice_nbytes: int) -> None:
    """Refuse a slice size that the format does not allow.

    Raises:
        ConfigurationError: it is not a multiple of 16 from 16 to 16 MiB.
    """
    if not isinstance(slice_nbytes, int) or not 0 < slice_nbytes <= MAX_SLICE_NBYTES or slice_nbytes % ALIGNMENT_NBYTES:
        raise ConfigurationError(f"slice_nbytes={slice_nbytes!r} must be a multiple of 16 from 16 to 16 MiB.")


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment of slices and planes in a block, in bytes."""
    return (nbytes + ALIGNMENT_NBYTES - 1) // ALIGNMENT_NBYTES * ALIGNMENT_NBYTES


@dataclass(frozen=True)
class Plane:
    """One plane of a block: its name, its length in bytes, and whether it is coded or stored."""

    name: str
    nbytes: int
    coded: bool


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a plane that lies together in the encoded block: a whole stored plane, or one slice.

    Attributes:
        plane: index of the plane.
        start: where in the plane the piece begins, in bytes.
        nbytes: its length when decoded.
        coded: whether a coder may have coded it (its encoded size is then in the slice table).
    """

    plane: int
    start: int
    nbytes: int
    coded: bool


class ArrayToBytes(ABC):
    """An array -> bytes codec: the planes of a block."""

    name: ClassVar[str]

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """What a decoder must know, as JSON values."""

    @abstractmethod
    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        """The planes of a block of `nbytes` decoded bytes with these `flags`, in stored order."""

    @abstractmethod
    def check_flags(self, flags: int) -> bool:
        """Whether `flags` is a value that this codec can have written."""


class Coder(ABC):
    """A bytes -> bytes codec: the entropy coder of slices.

    Attributes:
        slice_nbytes: how many bytes of a plane one slice covers, a multiple of 16.
    """

    name: ClassVar[str]
    slice_nbytes: int

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """What a decoder must know, as JSON values."""

    @abstractmethod
    def encoder(self) -> SliceEncoder:
        """A function that encodes slices on the CPU; it keeps its context, so each thread takes its own.

        Raises:
            CodecUnavailableError: this coder does not run on the CPU.
        """

    @abstractmethod
    def decoder(self) -> SliceDecoder:
        """A function that decodes slices on the CPU; each thread takes its own.

        Raises:
            CodecUnavailableError: this coder does not run on the CPU.
        """


@dataclass(frozen=True)
class CodecChain:
    """What is done to the blocks of a record: planes, then perhaps an entropy coder.

    Example:
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

    def to_json(self) -> list[dict[str, Any]]:
        """The chain as the footer names it."""
        codecs: list[ArrayToBytes | Coder] = [self.array_to_bytes]
        if self.coder is not None:
            codecs.append(self.coder)
        return [{"name": codec.name, "configuration": codec.configuration()} for codec in codecs]

    @property
    def label(self) -> str:
        """A short name for people: `planes-zstd`, `zstd`, `none`."""
        names = [codec["name"] for codec in self.to_json() if codec["name"] != "bytes"]
        return "-".join(names) or "none"

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
        """An upper bound of the encoded size of a block of `nbytes`: no piece is ever stored longer than it is."""
        return sum(padded(piece.nbytes) for piece in self.layout(nbytes, 0))


def layout_block(chain: CodecChain, nbytes: int, flags: int) -> tuple[Piece, ...]:
    """The pieces of a block, in the order in which they are stored.

    Args:
        chain: the record's codec chain.
        nbytes: the block's decoded length in bytes.
        flags: the block's flags.

    Returns:
        One piece per stored plane and one per slice of each coded plane. Each is stored padded to 16 bytes.
    """
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
