"""From the names in a footer to codecs. A name is a promise: what it once decoded, it decodes for ever."""

from __future__ import annotations

from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any

from dcp_nvcomp.codecs.base import ALIGNMENT_NBYTES, MAX_SLICE_NBYTES, ArrayToBytes, CodecChain, Coder
from dcp_nvcomp.codecs.coders.ans import Ans
from dcp_nvcomp.codecs.coders.deflate import Deflate
from dcp_nvcomp.codecs.coders.zstd import Zstd
from dcp_nvcomp.codecs.dtypes import ElementType
from dcp_nvcomp.codecs.transforms.planes import PLANE_NAMES, Planes
from dcp_nvcomp.codecs.transforms.stored import Bytes
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, FormatError, UnknownCodecError

__all__ = ["chain_from_json", "check_chain", "check_chain_fits"]


def _integer(configuration: dict[str, Any], key: str, codec: str) -> int:
    value = configuration.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"Codec {codec!r} has {key}={shown(value)}, which must be an integer.")
    return value


def _text(configuration: dict[str, Any], key: str, codec: str) -> str:
    value = configuration.get(key)
    if not isinstance(value, str):
        raise FormatError(f"Codec {codec!r} has {key}={shown(value)}, which must be text.")
    return value


def _slice_nbytes(configuration: dict[str, Any], codec: str) -> int:
    value = _integer(configuration, "slice_nbytes", codec)
    if not 0 < value <= MAX_SLICE_NBYTES or value % ALIGNMENT_NBYTES:
        raise FormatError(f"Codec {codec!r} has slice_nbytes={shown(value)}, not a multiple of 16 from 16 to 16 MiB.")
    return value


def _planes(configuration: dict[str, Any]) -> Planes:
    width = _integer(configuration, "float_nbytes", "planes")
    coded = configuration.get("coded")
    if width not in (2, 4, 8):
        raise FormatError(f"Codec 'planes' has float_nbytes={shown(width)}; it must be 2, 4 or 8.")
    names = Planes(width).plane_names
    if not isinstance(coded, list) or not all(isinstance(name, str) and name in PLANE_NAMES for name in coded):
        raise FormatError(f"Codec 'planes' has coded={shown(coded)}; it must list some of {', '.join(names)}.")
    return Planes(width, tuple(name for name in names if name in coded))


def _codec(description: Any) -> ArrayToBytes | Coder:
    if not isinstance(description, dict) or not isinstance(description.get("configuration"), dict):
        raise FormatError("A codec must be an object with a name and a configuration.")
    name, configuration = description.get("name"), description["configuration"]
    if name == "bytes":
        return Bytes()
    if name == "planes":
        return _planes(configuration)
    if name == "zstd":
        return Zstd(_slice_nbytes(configuration, "zstd"))
    if name == "deflate":
        return Deflate(_slice_nbytes(configuration, "deflate"))
    if name == "ans":
        return Ans(
            _slice_nbytes(configuration, "ans"),
            _text(configuration, "data_type", "ans"),
            _text(configuration, "nvcomp_version", "ans"),
        )
    raise UnknownCodecError(
        f"The codec {shown(name)} is unknown here. A newer version wrote the file: update dcp-nvcomp."
    )


def chain_from_json(description: Any) -> CodecChain:
    """The chain that a footer describes.

    Args:
        description: a JSON list of `{"name", "configuration"}`.

    Returns:
        The chain.

    Raises:
        UnknownCodecError: it names a codec that is not known here.
        FormatError: it is not a list of codecs, a configuration is wrong, or their order makes no sense.
    """
    if not isinstance(description, list) or not 1 <= len(description) <= 2:
        raise FormatError("A codec chain must be a list of one or two codecs.")
    codecs = [_codec(codec) for codec in description]
    first, coder = codecs[0], codecs[1] if len(codecs) == 2 else None
    if not isinstance(first, ArrayToBytes) or isinstance(coder, ArrayToBytes):
        raise FormatError("A codec chain must be an array -> bytes codec and then at most one bytes -> bytes codec.")
    if isinstance(first, Planes) and first.coded and coder is None:
        raise FormatError("Planes are to be coded, but the chain has no coder.")
    if isinstance(coder, Ans) and not isinstance(first, Bytes):
        raise FormatError("ans must follow bytes.")
    return CodecChain(first, coder)


def check_chain(chain: CodecChain, element: ElementType) -> None:
    """Refuse a chain that a reader could not decode again.

    Args:
        chain: from the user's chooser.
        element: the element type that it was chosen for.

    Raises:
        ConfigurationError: its codecs are not those of the format, or do not apply to the element type.
    """
    try:
        again = chain_from_json(chain.to_json())
        fits = check_chain_fits(chain, element) and again.layout(4096, 0) == chain.layout(4096, 0)
    except (CheckpointError, AttributeError, AssertionError) as error:
        raise ConfigurationError(f"codec= chose {chain!r}, which no reader could decode: {error}") from error
    if not fits:
        raise ConfigurationError(f"codec= chose {chain!r} for {element.name}, which it can't be applied to.")


def check_chain_fits(chain: CodecChain, element: ElementType) -> bool:
    """Whether `chain` can apply to elements of this type: planes need floats of their width."""
    first = chain.array_to_bytes
    return not isinstance(first, Planes) or first.float_nbytes == element.float_nbytes
