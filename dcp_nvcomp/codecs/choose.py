"""The codec chain for a tensor, chosen by dtype, size and what parts of it gain.

codec option  --parse_codec-->  CodecChooser  --choose(element, sample, nbytes)-->  CodecChain, one per record

saving/encode/choices.py asks for each record; remembered.py there has what was chosen for records like it.

`auto` takes the open chain that makes a record smallest, found in two steps:

look    a few thousand elements from all over the record, their exponents coded as literals: microseconds. Tells
        dense floats from zeros, constants, sparse tensors and floats of few values, but sees no repetition.
judge   slices, cut and coded as those of the record will be, by every chain that could win. A match search never sees
        more than one slice, as it never will in a block.

The smallest wins, unless it is a search for matches that gains less than a hundredth: it takes three times as long as
coding literals. Where planes win, and the floats are rows and columns, prediction is tried too. Of what is nothing but
repetition, as zeros are, whole floats win if they are about as small: splitting them would take longer than all else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, CodecChain, Coder, ElementType, ScratchArrays, SliceEncoder, padded
from dcp_nvcomp.codecs.coders import ANS_DATA_TYPES, DEFAULT_SLICE_NBYTES, Ans, Deflate, Zstd
from dcp_nvcomp.codecs.transforms import PLANE_NAMES, Bytes, Planes
from dcp_nvcomp.codecs.transforms.rowcol import RowCol
from dcp_nvcomp.errors import ConfigurationError

U8 = npt.NDArray[np.uint8]

LITERALS = Zstd(literals_only=True)
STORED = CodecChain(Bytes())
PLAIN = CodecChain(Bytes(), Zstd(level=3))

_MATCHES = Zstd(level=1)
_PLAIN_LITERALS = CodecChain(Bytes(), LITERALS)
_PLAIN_FAST = CodecChain(Bytes(), _MATCHES)

# Coding a plane costs time, in a load too: only a plane that gains as much is coded.
_WORTHWHILE = 0.98
# By how much a faster chain may be larger than the smallest, and by how much if it saves the search for matches.
_TOLERANCE = 1.0025
_LITERALS_TOLERANCE = 1.01
# By how much planes may be larger than predicted ones, one block of which takes a fifth longer to encode. So first
# moments of most models are not predicted: with 1.005 they are, for three thousandths of the size of a trained state,
# and its load takes 4 % longer than with planes alone, not 5 % less (docs/performance/tensors.md).
_PREDICTED_TOLERANCE = 1.02
# So many times as small is what repeats all over.
_REPETITIVE = 200

# Sampling runs on one thread for all records of a rank, so it must stay well below the time of encoding them.
_MIN_SAMPLE_NBYTES = 64 << 10
_MAX_SAMPLE_NBYTES = 256 << 10
_SAMPLED_PART = 32
TINY_NBYTES = 256


class Look(NamedTuple):
    coded: float  # coded size over size of their exponents, as literals; of their bytes where they are not split
    commonest: float  # how many of all other bytes are the commonest one; 0 where they are not split

    def resembles(self, other: Look) -> bool:
        """Return True if a chain that was chosen for one serves the other."""
        return abs(self.coded - other.coded) < 0.02 and abs(self.commonest - other.commonest) < 0.02

    @property
    def is_dense(self) -> bool:
        """True if these are floats of which only the exponents gain, as those of trained floats do."""
        return 0.15 < self.coded < 0.75 and 0 < self.commonest < 0.03


def judged_nbytes(element: ElementType) -> int:
    return DEFAULT_SLICE_NBYTES * (element.float_nbytes or 1)


def most_encoded_nbytes(nbytes: int) -> int:
    """Return an upper bound of the encoded size of a block, whatever chain is found for it."""
    pieces = nbytes // DEFAULT_SLICE_NBYTES + 2 * len(PLANE_NAMES)
    return nbytes + pieces * ALIGNMENT_NBYTES


@lru_cache
def literal_exponents(element: ElementType) -> CodecChain:
    """Return the chain of dense floats: one object, by which engines know layouts that they have worked out."""
    return CodecChain(Planes(element.float_nbytes), LITERALS)


@lru_cache
def predicted_exponents(element: ElementType, columns: int) -> CodecChain | None:
    """Return the chain of dense floats predicted from rows and columns; None for floats that can't be predicted so."""
    if not RowCol.predicts(element, columns):
        return None
    return CodecChain(RowCol(element.float_nbytes, columns), LITERALS)


def is_predicted(chain: CodecChain) -> bool:
    return isinstance(chain.array_to_bytes, RowCol)


def columns_of(block_shape: Sequence[int]) -> int:
    """Return the columns of the matrix, among those that a block is, that has the fewest rows and columns together.

    Returns:
        0 if it is a single row or column.

    Examples:
        >>> columns_of((1, 128, 256)), columns_of((64, 32, 3, 3)), columns_of((4096,))
        (256, 288, 0)
    """
    matrices = ((math.prod(block_shape[:dim]), math.prod(block_shape[dim:])) for dim in range(1, len(block_shape)))
    return min(((sum(one), one[1]) for one in matrices if 1 not in one), default=(0, 0))[1]


class Judge:
    """Finds the chain of a record. Not for several threads at once: it keeps its encoders."""

    def __init__(self) -> None:
        self._encoders: dict[Coder, SliceEncoder] = {}
        self._scratch = ScratchArrays()

    def look(self, element: ElementType, sample: U8) -> Look:
        """Look at a sample: some elements, at least one, contiguous."""
        width = element.float_nbytes
        if not width:
            return Look(self._coded_nbytes(sample, LITERALS) / sample.size, 0.0)
        count = sample.size // width
        planes = self._scratch.array("planes", sample.size, np.uint8)
        others, exponents = planes[:-count], planes[-count:]
        low = [others[:-count]] if width > 2 else []
        Planes(width, PLANE_NAMES).split(sample, [*low, others[-count:], exponents])
        commonest = int(np.bincount(others).max()) / others.size
        return Look(self._coded_nbytes(exponents, LITERALS) / count, commonest)

    def judge(self, element: ElementType, slices: Sequence[U8], columns: int = 0) -> CodecChain:
        """Return the chain for some slices; of whole rows of `columns` elements, if that is not 0."""
        if not any(part.size for part in slices):
            return STORED
        if element.float_nbytes:
            return self._judge_floats(element, slices, columns)
        sizes = {
            STORED: sum(part.size for part in slices),
            _PLAIN_LITERALS: self._total_nbytes(slices, LITERALS),
        }
        faster = _smallest(sizes)
        for chain in (_PLAIN_FAST, PLAIN):  # of integers, either can be the smaller one
            sizes[chain] = self._total_nbytes(slices, chain.coder)
        return _chosen(sizes, faster)

    def _judge_floats(self, element: ElementType, slices: Sequence[U8], columns: int) -> CodecChain:
        width = element.float_nbytes
        split = [_split(part, width) for part in slices]
        names = Planes(width).plane_names
        pieces = {name: [piece for planes, _ in split for piece in _cut(planes[name])] for name in names}
        stored = {name: sum(plane.size for plane in pieces[name]) for name in names}
        stored["rest"] -= sum(planes["rest"].size // 8 for planes, same_sign in split if same_sign)
        total = sum(part.size for part in slices)
        sizes = {STORED: total}
        for coder in (LITERALS, _MATCHES):
            coded = {name: self._total_nbytes(pieces[name], coder) for name in names}
            worthwhile = [name for name in names if name == "exponent" or coded[name] < _WORTHWHILE * stored[name]]
            for chosen in {("exponent",), tuple(worthwhile)}:
                nbytes = sum(coded[name] if name in chosen else stored[name] for name in names)
                sizes[CodecChain(Planes(width, chosen), coder)] = nbytes
            if coder is LITERALS:
                faster = _smallest(sizes)
        smallest = _smallest(sizes)
        # more than the exponents compresses, or they repeat, so perhaps whole floats do
        if smallest.array_to_bytes != Planes(width) or smallest.coder != LITERALS:
            sizes[PLAIN] = self._total_nbytes([piece for part in slices for piece in _cut(part)], PLAIN.coder)
        least = sizes[_smallest(sizes)]
        if total > _REPETITIVE * least:
            sizes[_PLAIN_LITERALS] = self._total_nbytes([piece for part in slices for piece in _cut(part)], LITERALS)
            for chain in (_PLAIN_LITERALS, PLAIN):
                if sizes.get(chain, math.inf) <= _TOLERANCE * least:
                    return chain
        best = _chosen(sizes, faster)
        predicted = predicted_exponents(element, columns) if isinstance(best.array_to_bytes, Planes) else None
        if predicted is None:
            return best
        nbytes = sum(self._split_nbytes(part, predicted) for part in slices)
        return predicted if _PREDICTED_TOLERANCE * nbytes < sizes[best] else best

    def _split_nbytes(self, part: U8, chain: CodecChain) -> int:
        """Return the size of a part as if it was a block."""
        codec, nbytes = chain.array_to_bytes, 0
        arrays = [self._scratch.array(one.name, one.nbytes, np.uint8) for one in codec.layout(part.size, 0, True)]
        flags = codec.split(part, arrays)
        for plane, array in zip(codec.layout(part.size, flags, True), arrays, strict=True):
            nbytes += self._total_nbytes(_cut(array), chain.coder) if plane.coded else plane.nbytes
        return nbytes

    def _total_nbytes(self, slices: Sequence[U8], coder: Coder | None) -> int:
        assert coder is not None
        return sum(self._coded_nbytes(part, coder) for part in slices)

    def _coded_nbytes(self, data: U8, coder: Coder) -> int:
        encode = self._encoders.get(coder)
        if encode is None:
            encode = self._encoders[coder] = coder.encoder()
        return min(padded(len(encode(data.data))), data.size)


def _split(data: U8, width: int) -> tuple[dict[str, U8], bool]:
    codec = Planes(width, PLANE_NAMES)
    planes = {plane.name: np.empty(plane.nbytes, np.uint8) for plane in codec.layout(data.size, 0, True)}
    codec.split(data, list(planes.values()))
    rest = planes["rest"]
    return planes, bool(rest.max() < 0x80 or rest.min() >= 0x80)


def _cut(part: U8) -> list[U8]:
    return [part[at : at + DEFAULT_SLICE_NBYTES] for at in range(0, part.size, DEFAULT_SLICE_NBYTES)]


def _smallest(sizes: dict[CodecChain, int]) -> CodecChain:
    return min(sizes, key=sizes.__getitem__)


def _chosen(sizes: dict[CodecChain, int], faster: CodecChain) -> CodecChain:
    """Return the smallest, or a faster one that is about as small; `faster` is the best without matches."""
    least = min(sizes.values())
    for chain, tolerance in ((STORED, _TOLERANCE), (faster, _LITERALS_TOLERANCE), (_PLAIN_FAST, _TOLERANCE)):
        if sizes.get(chain, math.inf) <= tolerance * least:
            return chain
    return _smallest(sizes)


@runtime_checkable
class CodecChooser(Protocol):
    """An object that picks codec chains: `codec=` takes one instead of a name or a `CodecChain`."""

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        """Return the chain for one record."""


@dataclass(frozen=True)
class _Always:
    coder: Coder | None
    plain: CodecChain
    split_floats: bool

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        if self.split_floats and element.float_nbytes:
            return CodecChain(Planes(element.float_nbytes), self.coder)
        return self.plain


@dataclass(frozen=True)
class _WhereItFits:
    """A chain given as an object: used for every record that it can apply to, `auto` for the others."""

    chain: CodecChain

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        return self.chain if self.chain.array_to_bytes.fits(element) else Auto().choose(element, sample, nbytes)

    @property
    def needs_gpu(self) -> bool:
        return self.chain.needs_gpu


@dataclass(frozen=True)
class _AnsChooser:
    """nvCOMP's ANS, with the symbol width of each element type. The engine fills in nvCOMP's version."""

    needs_gpu = True

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        return CodecChain(Bytes(), Ans(data_type=ANS_DATA_TYPES.get(element.name, "|u1")))


@dataclass(frozen=True)
class Auto:
    """Open bytes, by what a sample gains."""

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        return self.choose_from(element, [sample], nbytes)

    def choose_from(self, element: ElementType, pieces: Sequence[U8], nbytes: int) -> CodecChain:
        """Return the chain for one record, from several places of it: what repeats between them is out of reach."""
        if nbytes < TINY_NBYTES:
            return STORED
        step = judged_nbytes(element)
        return Judge().judge(element, [part[at : at + step] for part in pieces for at in range(0, part.size, step)])


def sample_nbytes(nbytes: int) -> int:
    wanted = max(_MIN_SAMPLE_NBYTES, min(_MAX_SAMPLE_NBYTES, nbytes // _SAMPLED_PART))
    return wanted // 16 * 16  # whole elements of any type


_NAMED: dict[str, CodecChooser] = {
    "auto": Auto(),
    "planes-zstd": _Always(Zstd(literals_only=True), PLAIN, True),
    "planes-deflate": _Always(Deflate(literals_only=True), CodecChain(Bytes(), Deflate()), True),
    "zstd": _Always(None, PLAIN, False),
    "ans": _AnsChooser(),
    "none": _Always(None, STORED, False),
}
CODEC_NAMES = tuple(_NAMED)


def needs_gpu(chooser: CodecChooser) -> bool:
    """Return True if the codec was asked for by name or as a chain, and only a GPU can run it."""
    return bool(getattr(chooser, "needs_gpu", False))


def parse_codec(codec: str | CodecChain | CodecChooser) -> CodecChooser:
    """Return the chooser for the value of `codec=`."""
    if isinstance(codec, str):
        if codec in _NAMED:
            return _NAMED[codec]
        close = get_close_matches(codec, CODEC_NAMES, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigurationError(f"codec={codec!r} is unknown; it can be one of {', '.join(CODEC_NAMES)}.{hint}")
    if isinstance(codec, CodecChain):
        return _WhereItFits(codec)
    if isinstance(codec, CodecChooser):
        return codec
    raise ConfigurationError(f"codec={codec!r} is neither a name, nor a CodecChain, nor an object with choose().")
