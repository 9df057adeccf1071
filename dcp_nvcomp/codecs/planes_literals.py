"""Whole blocks of `planes` with `zstd` of literals, the chain of trained floats, in one compiled call.

rows of floats  --PlanesLiterals.encode-->  encoded blocks    checked, split and coded without the GIL
encoded blocks  --PlanesLiterals.decode-->  rows of floats

The bytes are those that the engine makes in steps; what is declined here, it does in steps. Several blocks that lie
beside each other in a matrix are coded at once: memory is read and written in longer runs then, and a call costs as
much for one block as for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dcp_nvcomp.codecs.base import U8, BlockRow, CodecChain, EncodedBlock
from dcp_nvcomp.codecs.coders import Zstd
from dcp_nvcomp.codecs.transforms import Planes

try:
    from dcp_nvcomp.codecs import _planes_literals as kernels
except ImportError:  # not compiled, or not for this processor
    kernels = None  # type: ignore[assignment]


class Outcome(NamedTuple):
    """The result of decoding some blocks."""

    decoded: bool  # whether all of them were decoded
    is_foreign: bool = False  # whether one was not, as it has frames or flags that are not written here
    # what is wrong with one of them, for an error message; None if the kernel declined the block
    problem: str | None = None


@dataclass(frozen=True)
class PlanesLiterals:
    """Encodes and decodes blocks of one chain. Any thread may use it."""

    float_nbytes: int  # bytes of a float, 2, 4 or 8
    slice_nbytes: int  # bytes of an exponent plane in one slice

    def encode(self, rows: U8, widths: tuple[int, ...], out: memoryview) -> tuple[list[EncodedBlock], int] | None:
        found = kernels.encode_rows(rows, widths, self.float_nbytes, self.slice_nbytes, out)
        if found is None:
            return None
        count = len(rows)
        encoded = [
            EncodedBlock(out[start:stop], BlockRow(flags, slices, encoded_crc, crc), count * width)
            for (start, stop, flags, slices, encoded_crc, crc), width in zip(found, widths, strict=True)
        ]
        return encoded, found[-1][1]

    def decode(
        self, blocks: Sequence[tuple[memoryview, BlockRow]], widths: tuple[int, ...], rows: U8, *, verify: str
    ) -> Outcome:
        given = [(data, row.flags, row.slice_nbytes, row.encoded_crc, row.uncompressed_crc) for data, row in blocks]
        outcome = kernels.decode_rows(
            given, widths, rows, self.float_nbytes, self.slice_nbytes, verify != "off", verify == "full"
        )
        return _OUTCOMES[outcome]


_OUTCOMES = (
    {}
    if kernels is None
    else {
        kernels.DECODED: Outcome(True),
        kernels.SHORT: Outcome(False),
        kernels.FOREIGN: Outcome(False, is_foreign=True),
        kernels.STORED_CRC: Outcome(False, problem="The stored bytes fail their CRC: the file is corrupt."),
        kernels.DECODED_CRC: Outcome(
            False, problem="The decoded bytes fail their CRC, though the stored ones match theirs."
        ),
    }
)


def planes_literals(chain: CodecChain, *, decoding: bool = False) -> PlanesLiterals | None:
    """Return the kernel for whole blocks of a chain; None if the engine has to code them in steps."""
    codec, coder = chain.array_to_bytes, chain.coder
    if kernels is None or type(codec) is not Planes or type(coder) is not Zstd or codec.coded != ("exponent",):
        return None
    return PlanesLiterals(codec.float_nbytes, coder.slice_nbytes) if decoding or coder.literals_only else None
