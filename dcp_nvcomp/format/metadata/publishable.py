"""Makes the bytes of a `.metadata` to publish, and refuses what a load would refuse, before the commit.

Planners and tensors may put into the metadata what stock DCP pickles and this package's reader does not take. What has
an equivalent is replaced by it. Then the reader reads the result, or a sample if there are many shards: each shard is
looked at here, and what is not plainly readable, and one item of each kind that is, goes into the sample.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import operator
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.errors import CheckpointError, MetadataError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.allowed_globals import LIMIT, MAX_DIMS, TRUST_ADVICE
from dcp_nvcomp.format.metadata.rows import MetadataArrays, sample_of, serialize_arrays, unfolded
from dcp_nvcomp.format.metadata.serialization import (
    fits_earlier_readers,
    parse_metadata,
    serialize_metadata,
    share_equal,
)
from dcp_nvcomp.format.metadata.summary import Summary

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Metadata of no more shards than this is read back as a whole, in a few milliseconds.
_FEW_SHARDS: Final = 100
# How many times its size genuine metadata takes in memory; a load gives it three times its limit.
_MOST_UNFOLDED: Final = 10
# An offset is an attribute only if it is given.
_INDEX_FIELDS: Final = ({"fqn", "index", "offset"}, {"fqn", "index"})


class Publication(NamedTuple):
    """Metadata to publish."""

    data: bytes  # the bytes of the file
    settled: Metadata | None


def publication(metadata: Metadata, *, path: str, summary: Summary | None = None) -> Publication:
    """Serialize the metadata of a save, and make sure that a load can read it."""
    with _as_refusals(path), collector_paused():
        normal, doubtful = _normalized(metadata)
        data, shared = _shortest(normal, doubtful, summary)
        _check_length(data, path)
        _check_readable(normal, doubtful, data, path=path)
        is_settled = not doubtful and shared is not None and _fits(normal, len(data) // 2)
        return Publication(data, shared if is_settled else None)


def metadata_to_publish(metadata: Metadata, *, path: str, summary: Summary | None = None) -> bytes:
    """Return the bytes alone; arguments and errors are those of `publication`."""
    return publication(metadata, path=path, summary=summary).data


def settled_to_publish(metadata: Metadata, *, path: str, summary: Summary | None = None) -> bytes:
    """Serialize metadata that is settled but for where its shards are stored; arguments and errors as above."""
    with _as_refusals(path), collector_paused():
        data = _serialize(metadata, summary)
        _check_length(data, path)
        places = sample(metadata, ()).storage_data
        items = {index.fqn: metadata.state_dict_metadata[index.fqn] for index in places}
        few = dataclasses.replace(metadata, state_dict_metadata=items, storage_data=places, planner_data=None)
        parse_metadata(_serialize(few), path=path)
        return data


def arrays_to_publish(
    metadata: MetadataArrays, *, path: str, summary: Summary | None = None, is_settled: bool = False
) -> tuple[bytes, bool]:
    """Serialize the metadata of a save.

    `is_settled` says that all but its files and records is that of an earlier call, which returned True beside the
    bytes: then a load reads it too.
    """
    with _as_refusals(path), collector_paused():
        data = serialize_arrays(metadata, summary)
        if not is_settled and not _are_readable(metadata, data, path=path):
            return metadata_to_publish(unfolded(metadata), path=path, summary=summary), False
        _check_length(data, path)
        return data, True


def _are_readable(metadata: MetadataArrays, data: bytes, *, path: str) -> bool:
    shard_count = sum(map(len, metadata.hints))
    if not fits_earlier_readers(metadata.planner_data, shard_count, len(data)):
        return False
    try:
        parse_metadata(data if shard_count <= _FEW_SHARDS else serialize_arrays(sample_of(metadata)), path=path)
    except Exception as error:  # what a planner's names may be
        logger.debug("The metadata's arrays are refused: %s", error)
        return False
    return True


@contextmanager
def _as_refusals(path: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        reason = error.message.removesuffix(TRUST_ADVICE)  # a writer has no such option
        raise MetadataError(
            f"The save is not published, because no load could read its metadata: {reason} If a planner or a "
            "tensor subclass of yours made this: planner_data takes plain containers of text and numbers, all else "
            "DCP's own classes.",
            path=path,
            fqn=error.fqn,
        ) from error


def _check_length(data: bytes, path: str) -> None:
    if len(data) > MAX_METADATA_NBYTES:
        raise MetadataError(f"It has {len(data)} bytes; a load accepts {MAX_METADATA_NBYTES}.")
    if _MOST_UNFOLDED * len(data) > 3 * MAX_METADATA_NBYTES:
        logger.warning(
            "%s has %d bytes, and may take more memory than a load allows it by default: load it with "
            "metadata_limit_nbytes=%d.",
            path,
            len(data),
            -(-_MOST_UNFOLDED * len(data) // 3),
        )


def _normalized(metadata: Metadata) -> tuple[Metadata, set[str | MetadataIndex]]:
    try:
        return normalize(metadata)
    except Exception as error:  # a planner's objects may lack what DCP's have, and raise whatever they like
        raise MetadataError(f"It does not have the form of DCP's metadata: {type(error).__name__}: {error}.") from error


def _shortest(
    normal: Metadata, doubtful: set[str | MetadataIndex], summary: Summary | None
) -> tuple[bytes, Metadata | None]:
    try:
        shared = share_equal(normal, doubtful)
        data = _serialize(shared, summary)
        if _fits(normal, len(data)):
            return data, shared
    except Exception as error:  # a planner's objects may do anything when they are looked at
        logger.debug("The metadata's equal parts can't be shared: %s", error)
    return _serialize(normal, summary), None


def _fits(metadata: Metadata, nbytes: int) -> bool:
    shard_count = sum(len(getattr(item, "chunks", ())) for item in metadata.state_dict_metadata.values())
    return fits_earlier_readers(metadata.planner_data, shard_count, nbytes)


def _check_readable(normal: Metadata, doubtful: set[str | MetadataIndex], data: bytes, *, path: str) -> None:
    if len(normal.storage_data) > _FEW_SHARDS:
        try:
            parse_metadata(_serialize(sample(normal, doubtful)), path=path)
            return
        except Exception as error:  # the whole decides: what it may ask for grows with its size
            logger.debug("A sample of the metadata is refused: %s", error)
    parse_metadata(data, path=path)


def _serialize(metadata: Metadata, summary: Summary | None = None) -> bytes:
    try:
        return serialize_metadata(metadata, summary)
    except Exception as error:  # pickle lets through whatever an object's own methods raise
        raise MetadataError(f"It can't be pickled: {type(error).__name__}: {error}.") from error


# ---- 1: equivalents


def normalize(metadata: Metadata) -> tuple[Metadata, set[str | MetadataIndex]]:
    """Replace, in place, what stock DCP accepts by what the reader takes."""
    items: dict[str, Any] = metadata.state_dict_metadata
    if type(items) is not dict:
        items = metadata.state_dict_metadata = dict(items)
    doubtful = {fqn for fqn, item in items.items() if not _is_readable_item(fqn, item)}
    for fqn in doubtful:
        items[fqn] = _normal_item(items[fqn])
    indices = {index for index in metadata.storage_data if not _is_readable_index(index)}
    if indices:
        metadata.storage_data = {
            _normal_index(index) if index in indices else index: place for index, place in metadata.storage_data.items()
        }
    return _as(Metadata, metadata), doubtful | indices


def _as(kind: type[T], value: Any) -> T:
    """Return a value of one of DCP's dataclasses; of a subclass's value, the fields that DCP knows."""
    if type(value) is kind or not isinstance(value, kind):
        return value  # what is something else is the reader's to refuse
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return kind(**{field.name: getattr(value, field.name) for field in fields})


def _normal_item(item: Any) -> Any:
    if isinstance(item, BytesStorageMetadata):
        return dataclasses.replace(_as(BytesStorageMetadata, item))
    if not isinstance(item, TensorStorageMetadata):
        return item
    chunks: Any = item.chunks
    if isinstance(chunks, tuple | list):
        chunks = [_normal_shard(shard) for shard in chunks]
    normal = _as(TensorStorageMetadata, item)
    return dataclasses.replace(
        normal, properties=_normal_properties(item.properties), size=_size(item.size), chunks=chunks
    )


def _normal_shard(shard: Any) -> Any:
    if not isinstance(shard, ChunkStorageMetadata):
        return shard
    normal = _as(ChunkStorageMetadata, shard)
    return dataclasses.replace(normal, offsets=_size(shard.offsets), sizes=_size(shard.sizes))


def _normal_index(index: MetadataIndex) -> MetadataIndex:
    offset = _size(index.offset)
    if offset is not None and not isinstance(offset, torch.Size):
        return index
    return MetadataIndex(index.fqn, offset, index.index)


def _normal_properties(properties: Any) -> Any:
    """Return today's TensorProperties; in older releases they were a class of sharded tensors with the same fields."""
    if type(properties) is TensorProperties or not hasattr(properties, "memory_format"):
        return properties
    names = [field.name for field in dataclasses.fields(TensorProperties)]
    return TensorProperties(**{name: getattr(properties, name) for name in names if hasattr(properties, name)})


def _size(value: Any) -> Any:
    """Return a torch.Size of Python's ints; what is not made of integers is returned as it is."""
    if not isinstance(value, tuple | list):
        return value
    try:
        return torch.Size([operator.index(length) for length in value])
    except TypeError:
        return value


# ---- 2: what the reader has to see


def sample(metadata: Metadata, doubtful: Container[str | MetadataIndex]) -> Metadata:
    """Return metadata with few of the shards, which the reader refuses if it refuses the whole."""
    items: dict[str, Any] = {}
    kinds = set()
    for fqn, item in metadata.state_dict_metadata.items():
        if fqn in doubtful:
            items[fqn] = item
        elif (kind := _kind(item)) not in kinds:
            items[fqn] = item
            kinds.add(kind)
    places: dict[MetadataIndex, Any] = {}
    files = set()
    for index, (file, record) in metadata.storage_data.items():
        if id(file) not in files or type(record) is not int or not 0 <= record < 1 << 32 or index in doubtful:
            places[index] = (file, record)
            files.add(id(file))
    return dataclasses.replace(metadata, state_dict_metadata=items, storage_data=places)


def _kind(item: Any) -> str:
    """Return what the reader's view of a readable item depends on; as text, in which 1 and True differ."""
    if not isinstance(item, TensorStorageMetadata):
        return ""
    return f"{len(item.size)} {vars(item.properties)!r}"


def _is_readable_item(fqn: str, item: Any) -> bool:
    """True if this is plainly an item that the reader takes, provided that it takes another of its kind."""
    if type(fqn) is not str:
        return False
    if type(item) is BytesStorageMetadata:
        return not vars(item)
    if type(item) is not TensorStorageMetadata or len(vars(item)) != 3:
        return False
    properties, size, shards = item.properties, item.size, item.chunks
    if type(properties) is not TensorProperties or type(size) is not torch.Size or type(shards) is not list:
        return False
    if not _are_lengths(size) or not shards:
        return False
    width = getattr(properties.dtype, "itemsize", LIMIT)
    return math.prod([length or 1 for length in size]) * width < LIMIT and _are_inside(shards, size)


def _are_lengths(size: torch.Size) -> bool:
    for length in size:
        if type(length) is not int or not 0 <= length < LIMIT:
            return False
    return len(size) <= MAX_DIMS


def _are_inside(shards: list[Any], size: torch.Size) -> bool:
    """True if all shards are DCP's, of ints, and inside the tensor. Each takes a microsecond: there are many."""
    dims = len(size)
    for shard in shards:
        if type(shard) is not ChunkStorageMetadata or len(shard.__dict__) != 2:
            return False
        offsets, sizes = shard.offsets, shard.sizes
        if type(offsets) is not torch.Size or type(sizes) is not torch.Size or not len(offsets) == len(sizes) == dims:
            return False
        for start, length, stop in zip(offsets, sizes, size, strict=True):
            if type(start) is not int or type(length) is not int or start < 0 or length < 0 or start + length > stop:
                return False
    return True


def _is_readable_index(index: Any) -> bool:
    if type(index) is not MetadataIndex or vars(index).keys() not in _INDEX_FIELDS:
        return False
    if type(index.fqn) is not str:
        return False
    hint, offset = index.index, index.offset
    if hint is not None and (type(hint) is not int or not 0 <= hint < LIMIT):
        return False
    return offset is None or (type(offset) is torch.Size and _are_lengths(offset))
