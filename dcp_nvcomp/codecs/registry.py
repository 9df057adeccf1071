"""All codecs by name, the way from a footer's description to a codec chain, and what is compiled for a whole chain.

`PlanesLiterals` codes whole blocks of `planes` or `rowcol` with `zstd` of literals, the chains of trained floats,
without the GIL. The bytes are those that the engine makes in steps; what is declined here, it does in steps. Several
blocks that lie beside each other in a matrix are coded at once: memory is read and written in longer runs then, and a
call costs as much for one block as for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any, NamedTuple

from dcp_nvcomp.codecs.base import U8, ArrayToBytes, BlockRow, Codec, CodecChain, Coder, ElementType, EncodedBlock
from dcp_nvcomp.codecs.coders import Ans, Deflate, Zstd
from dcp_nvcomp.codecs.transforms import Bytes, Planes
from dcp_nvcomp.codecs.transforms.derived import Derived
from dcp_nvcomp.codecs.transforms.rowcol import RowCol
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, FormatError, UnknownCodecError

# All codecs there are, by name.
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Bytes, Planes, RowCol, Derived, Zstd, Deflate, Ans)}

# All additions to the format that a reader has to know, as files name them.
FEATURES = frozenset(codec.feature for codec in CODECS.values() if codec.feature is not None)


def _codec(description: Any) -> Codec:
    if not isinstance(description, dict) or not isinstance(description.get("configuration"), dict):
        raise FormatError("A codec must be an object with a name and a configuration.")
    name = description.get("name")
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        raise UnknownCodecError(
            f"The codec {shown(name)} is unknown here. A newer version wrote the file: update dcp-nvcomp."
        )
    return codec.from_configuration(description["configuration"])


def chain_from_json(description: Any) -> CodecChain:
    if not isinstance(description, list) or not 1 <= len(description) <= 2:
        raise FormatError("A codec chain must be a list of one or two codecs.")
    codecs = [_codec(codec) for codec in description]
    first, coder = codecs[0], codecs[1] if len(codecs) == 2 else None
    if not isinstance(first, ArrayToBytes) or not isinstance(coder, Coder | None):
        raise FormatError("A codec chain must be an array -> bytes codec and then at most one bytes -> bytes codec.")
    if coder is None and any(plane.coded for plane in first.layout(0, 0, False)):
        raise FormatError("Planes are to be coded, but the chain has no coder.")
    if coder is not None and coder.needs_plain and not first.is_plain:
        raise FormatError(f"Codec {coder.name!r} must follow codec 'bytes'.")
    if coder is not None and first.has_base:
        raise FormatError(f"No coder follows codec {first.name!r}.")
    return CodecChain(first, coder)


def check_chain(chain: CodecChain, element: ElementType) -> None:
    try:
        again = chain_from_json(chain.to_json())
        fits = chain.array_to_bytes.fits(element) and again.layout(4096, 0) == chain.layout(4096, 0)
        hash(chain)  # a writer looks chains up
    except (CheckpointError, AttributeError, AssertionError, TypeError) as error:
        raise ConfigurationError(f"codec= chose {chain!r}, which no reader could decode: {error}") from error
    if not fits:
        raise ConfigurationError(f"codec= chose {chain!r} for {element.name}, which it can't be applied to.")


try:
    from dcp_nvcomp.codecs import _planes_literals as kernels
except ImportError:  # not compiled, or not for this processor
    kernels = None  # type: ignore[assignment]


class Outcome(NamedTuple):
    decoded: bool  # whether all of them were decoded
    is_foreign: bool = False  # whether one was not, as it has frames or flags that are not written here
    # what is wrong with one of them, for an error message; None if the kernel declined the block
    problem: str | None = None


@dataclass(frozen=True)
class PlanesLiterals:
    """Encodes and decodes blocks of one chain. Any thread may use it."""

    float_nbytes: int  # bytes of a float, 2, 4 or 8
    slice_nbytes: int  # bytes of an exponent plane in one slice
    columns: int = 0  # of `rowcol`; 0 for `planes`

    def encode(self, rows: U8, widths: tuple[int, ...], out: memoryview) -> tuple[list[EncodedBlock], int] | None:
        found = kernels.encode_rows(rows, widths, self.float_nbytes, self.slice_nbytes, self.columns, out)
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
            given,
            widths,
            rows,
            self.float_nbytes,
            self.slice_nbytes,
            self.columns,
            verify != "off",
            verify == "full",
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
    if kernels is None or type(coder) is not Zstd or not (decoding or coder.literals_only):
        return None
    if type(codec) is Planes and codec.coded == ("exponent",):
        return PlanesLiterals(codec.float_nbytes, coder.slice_nbytes)
    return PlanesLiterals(codec.float_nbytes, coder.slice_nbytes, codec.columns) if type(codec) is RowCol else None
