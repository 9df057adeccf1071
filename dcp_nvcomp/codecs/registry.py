"""All codecs by name, and the way from a footer's description to a codec chain."""

from __future__ import annotations

from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any

from dcp_nvcomp.codecs.base import ArrayToBytes, Codec, CodecChain, Coder, ElementType
from dcp_nvcomp.codecs.coders import Ans, Deflate, Zstd
from dcp_nvcomp.codecs.transforms import Bytes, Planes
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, FormatError, UnknownCodecError

# All codecs there are, by name.
CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Bytes, Planes, Zstd, Deflate, Ans)}


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
    """Return the chain that a footer describes."""
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
    return CodecChain(first, coder)


def check_chain(chain: CodecChain, element: ElementType) -> None:
    """Refuse a chain that a reader could not decode again."""
    try:
        again = chain_from_json(chain.to_json())
        fits = chain.array_to_bytes.fits(element) and again.layout(4096, 0) == chain.layout(4096, 0)
        hash(chain)  # a writer looks chains up
    except (CheckpointError, AttributeError, AssertionError, TypeError) as error:
        raise ConfigurationError(f"codec= chose {chain!r}, which no reader could decode: {error}") from error
    if not fits:
        raise ConfigurationError(f"codec= chose {chain!r} for {element.name}, which it can't be applied to.")
