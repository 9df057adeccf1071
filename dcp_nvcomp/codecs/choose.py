"""The codec chain for a tensor, chosen by dtype, size and a measured sample.

codec option  --parse_codec-->  CodecChooser  --choose(element, sample, nbytes)-->  CodecChain, one per record

`auto` itself is in auto.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dcp_nvcomp.codecs.auto import PLAIN, STORED, Judge, judged_nbytes
from dcp_nvcomp.codecs.base import CodecChain, Coder, ElementType
from dcp_nvcomp.codecs.coders import ANS_DATA_TYPES, Ans, Deflate, Zstd
from dcp_nvcomp.codecs.transforms import Bytes, Planes
from dcp_nvcomp.errors import ConfigurationError

U8 = npt.NDArray[np.uint8]

# Sampling runs on one thread for all records of a rank, so it must stay well below the time of encoding them.
_MIN_SAMPLE_NBYTES = 64 << 10
_MAX_SAMPLE_NBYTES = 256 << 10
_SAMPLED_PART = 32
TINY_NBYTES = 256


@runtime_checkable
class CodecChooser(Protocol):
    """An object that picks codec chains: `codec=` takes one instead of a name or a `CodecChain`."""

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        """Return the chain for one record."""


@dataclass(frozen=True)
class _Always:
    """The named codecs: one chain for floats, one for everything else."""

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
    """Return the size of a sample of a record of `nbytes`."""
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
