"""The format of safetensors files: 8 bytes with the length of a JSON header, the header, then the tensors' bytes.

Keys are flat there. Where they came from nested state, `dcp_nvcomp.paths` in the header's `__metadata__` has their
places: a JSON object of lists, in which text is a key of a dict, a number a position in a list, and a list of one text
a key that was no text, as a Python literal.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.calls.values import Key, Path, is_key
from dcp_nvcomp.errors import ConfigurationError, CorruptDataError

SINGLE_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
# What a conversion that is not complete is of.
PROGRESS_NAME: Final = ".dcp_nvcomp_conversion.json"
_SHARD_NAME: Final = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
# The library's own limit.
MAX_HEADER_NBYTES: Final = 100_000_000
_METADATA_KEY: Final = "__metadata__"
_PATHS_KEY: Final = "dcp_nvcomp.paths"
_LENGTH_NBYTES: Final = 8
_MAX_KEY_LENGTH: Final = 1000  # of text that is parsed as a literal
_MAX_SIZE: Final = (1 << 63) - 1

DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_BY_NAME: Final = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class StoredPart:
    """Where a tensor's bytes are in a file, from `start` to `stop`."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int
    path: Path  # its place in the nested state


def shard_name(number: int, count: int) -> str:
    """Return the name of one of several files, counted from 1."""
    return f"model-{number:05}-of-{count:05}.safetensors"


def is_name_of_model(name: str) -> bool:
    """True for the names that a model's files have in a directory, whether it is one file or several."""
    return name in (SINGLE_NAME, INDEX_NAME) or _SHARD_NAME.fullmatch(name) is not None


def header_of(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]], paths: Mapping[str, Path]) -> bytes:
    """Return the beginning of a file with these tensors in this order: length and header, padded to 8 bytes."""
    nested = {key: _path_to_store(key, paths[key]) for key, _, _ in tensors if paths.get(key, (key,)) != (key,)}
    places = {_PATHS_KEY: json.dumps(nested, separators=(",", ":"))} if nested else {}
    described: dict[str, Any] = {_METADATA_KEY: {"format": "pt", **places}}
    end = 0
    for key, shape, dtype in tensors:
        if key == _METADATA_KEY or not _is_unicode(key):
            raise ConfigurationError("safetensors can't have this key: rename it, or leave it out by prefix=.", fqn=key)
        start, end = end, end + math.prod(shape) * dtype.itemsize
        described[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_NBYTES, "little") + text


def _path_to_store(key: str, path: Path) -> list[Any]:
    found: list[Any] = []
    for part in path:
        if isinstance(part, Key):
            text = repr(part.value)
            if _literal(text) != (part.value,):
                raise ConfigurationError(f"safetensors can't have a key of {text}: leave it out by prefix=.", fqn=key)
            found.append([text])
        else:
            found.append(part)
    return found


def _literal(text: Any) -> tuple[Any, ...]:
    """Return the value of a Python literal, in a tuple; nothing if no key can have it."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ()
    return (value,) if is_key(value) else ()


def _stored_paths(described: Mapping[str, Any]) -> dict[str, Path]:
    """Return the places of keys, as far as they are there and say what the keys do."""
    try:
        stored = parse_json(described[_METADATA_KEY][_PATHS_KEY])
        paths = {key: _stored_path(parts) for key, parts in stored.items()}
    except (ValueError, KeyError, TypeError, AttributeError):  # not ours
        return {}
    return {key: path for key, path in paths.items() if path}


def _stored_path(parts: Any) -> Path:
    found: list[Any] = []
    for part in parts:
        if type(part) is str or (type(part) is int and 0 <= part < 1 << 32 and found):
            found.append(part)
        elif type(part) is list and len(part) == 1 and type(part[0]) is str and len(part[0]) <= _MAX_KEY_LENGTH:
            found += map(Key, _literal(part[0]))
        else:
            return ()
    return tuple(found) if len(found) == len(parts) else ()


def _is_unicode(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def parse_header(text: bytes, *, path: str, file_nbytes: int) -> list[StoredPart]:
    """Return the tensors of a file."""
    found = []
    try:
        described = parse_json(text)
        begin = _LENGTH_NBYTES + len(text)
        paths = _stored_paths(described)
        for key, one in described.items():
            if key == _METADATA_KEY:
                continue
            start, stop = map(_size, one["data_offsets"])
            shape, dtype = tuple(map(_size, one["shape"])), _dtype(one["dtype"])
            if not 0 <= start <= stop <= file_nbytes - begin or stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{key!r} has bytes {start} to {stop}")
            found.append(StoredPart(key, shape, dtype, begin + start, begin + stop, paths.get(key, (key,))))
        found.sort(key=lambda part: (part.start, part.stop))
        _check_seamless(found, begin, file_nbytes)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"This is not a safetensors file, or not of a kind known here: {type(error).__name__}: {error}", path=path
        ) from error
    return found


def _check_seamless(parts: Sequence[StoredPart], begin: int, end: int) -> None:
    """Raise ValueError if tensors share bytes, or bytes belong to none: a way to hide or to copy data."""
    for part in parts:
        if part.start != begin:
            what = "overlaps the tensor before it" if part.start < begin else "leaves a gap before it"
            raise ValueError(f"{part.key!r} begins at byte {part.start} of the file and {what}, which ends at {begin}")
        begin = part.stop
    if begin != end:
        raise ValueError(f"the file has {end} bytes, and the last tensor ends at {begin}")


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise ValueError(f"{value!r} is not a size")
    return value


def _dtype(name: Any) -> torch.dtype:
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is no dtype that can be read here, which are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]
