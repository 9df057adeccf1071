"""Unchanged shards by reference: what a checkpoint beside it has already, a save need not write.

    items, resolved -> hashed -> compared with the hashes of the reference -> written, each record with its hash
                                                                           -> named where they are: in the reference, or
                                                                              where that one has them from

So what is shared is never more than one step away. Hashes are those of the last saves of this process, or of the
footers of the reference. Whatever is not known of a reference costs size: a shard of which it is not certain that it is
there is written, as is one whose checkpoint is being removed, and what would be less than a tenth of a rank's state, as
the checkpoint that has it could not be removed any more. A shard is shared if its bytes, key, offsets, shape and dtype
are the same. Small ones, which are packed, and Python objects are always written. A hash is kept only of what can't
change until it is encoded.

Before `.metadata` is published, marks are left in the directories of what is shared (format/metadata/shares.py).
"""

from __future__ import annotations

import logging
import os
import posixpath
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.codecs.base import ScratchArrays
from dcp_nvcomp.engines.content_hash import ContentHash
from dcp_nvcomp.engines.tensors import (
    dtype_name,
    element_type,
    host_array,
    host_copy,
    host_values,
    is_transparent,
    without_lazy_bits,
)
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.block_grid import row_grid
from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.metadata.roots import read_current
from dcp_nvcomp.format.metadata.shards import ShardIndex, StoredAt
from dcp_nvcomp.format.metadata.shares import is_being_removed
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.format.record import KIND_TENSOR, Record
from dcp_nvcomp.options import fault_of_name
from dcp_nvcomp.saving.data_files import WrittenFile, distribute, planned_nbytes
from dcp_nvcomp.saving.encode.records import SMALL_NBYTES
from dcp_nvcomp.saving.encode.sources import block_bytes
from dcp_nvcomp.saving.rank_save import Resolve
from dcp_nvcomp.saving.stats import SHARED, Totals, component_of
from dcp_nvcomp.storage.base import BESIDE, Filesystem
from dcp_nvcomp.storage.open import real_place

logger = logging.getLogger(__name__)

_DEVICE_PIECE_NBYTES: Final = 16 << 20
_MOST_DIRECTORY_NBYTES: Final = 200  # of its name: the mark of one has to fit into a name, and what becomes that
_KEPT_CHECKPOINTS: Final = 4
_LEAST_PART: Final = 0.1  # of a rank's state, so that it shares files of ten others at most
_TOGETHER_NBYTES: Final = 256 << 20


class ShardKey(NamedTuple):
    """What a shard has in common with the one that it may be shared with, beside its bytes."""

    fqn: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: str


class StoredShard(NamedTuple):
    """Where a shard is stored, and its hash."""

    content_hash: str
    directory: str  # of the checkpoint that has it
    file: DataFileRef  # there
    record: int


Shards = Mapping[ShardKey, StoredShard]


class KnownShards:
    """The shards of the last checkpoints that this process has saved to be shared, by place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._shards: OrderedDict[str, Shards] = OrderedDict()

    def note(self, place: str, shards: Shards) -> None:
        with self._lock:
            self._shards[place] = shards
            self._shards.move_to_end(place)
            while len(self._shards) > _KEPT_CHECKPOINTS:
                self._shards.popitem(last=False)

    def forget(self, place: str) -> None:
        """Forget what is there: it is about to be replaced."""
        with self._lock:
            self._shards.pop(place, None)

    def of(self, place: str) -> Shards | None:
        with self._lock:
            return self._shards.get(place)


@dataclass(frozen=True)
class Compared:
    """The items of a rank's plan, after they were compared with a reference."""

    items: Sequence[WriteItem]  # those to write
    hashes: Mapping[MetadataIndex, str] = field(default_factory=dict)  # of those that can be shared later
    shared: Sequence[WrittenFile] = ()  # files beside the checkpoint, and what of them is in it
    by: Mapping[tuple[str, str, str], Totals] = field(default_factory=dict)  # of what is shared, as `RankTotals` has it
    keys: Mapping[MetadataIndex, ShardKey] = field(default_factory=dict)
    stored: Shards = field(default_factory=dict)  # of what is shared

    def shards(self, directory: str, written: Sequence[WrittenFile]) -> dict[ShardKey, StoredShard]:
        """Return all shards that can be shared with this save, once it has written its files."""
        found = dict(self.stored)
        for file in written:
            for index, _, record in file.items:
                if index in self.hashes:
                    found[self.keys[index]] = StoredShard(self.hashes[index], directory, file.file, record)
        return found


def check_references(place: str, references: Sequence[str]) -> None:
    """Raise ConfigurationError if a checkpoint at `place` can't share files with those at `references`."""
    if not references:
        return
    own = real_place(place)
    parent, directory = posixpath.split(own)
    fault = _fault_of_directory(directory)
    for reference in references:
        other_parent, other_directory = posixpath.split(real_place(reference))
        why = fault or _fault_of_directory(other_directory)
        if other_parent != parent or parent.endswith(":"):
            why = "both must be in the same directory"
        elif other_directory == directory:
            why = "it is the same checkpoint"
        if why:
            raise ConfigurationError(f"reference={reference!r} can't be that of a checkpoint at {place!r}: {why}.")


def _fault_of_directory(name: str) -> str | None:
    if len(os.fsencode(name)) > _MOST_DIRECTORY_NBYTES:
        return f"the name of its directory is longer than {_MOST_DIRECTORY_NBYTES} bytes"
    fault = fault_of_name(name)
    return None if fault is None else f"the name of its directory can't be one here: {fault}"


def compared(
    items: Sequence[WriteItem],
    resolve: Resolve,
    known: Callable[[Sequence[ShardKey]], Shards],
    thread_count: int,
    hash_on_device: Callable[[torch.Tensor], str | None],
) -> Compared:
    """Hash the shards of a rank, and compare them with those that are known of a reference.

    Args:
        items: the rank's plan.
        resolve: returns the data of an item.
        known: returns what the reference has of some shards, under names beside the checkpoint to save.
        thread_count: number of threads that hash.
        hash_on_device: returns the hash of a tensor on a GPU; None if it has to be copied to the host for that.
    """
    found = _hashed(items, resolve, thread_count, hash_on_device)
    keys = {index: key for index, (key, _) in found.items()}
    there = known(list(keys.values())) if found else {}
    equal = {index for index, (key, own) in found.items() if key in there and there[key].content_hash == own}
    same = _worthwhile(items, equal, {index: there[keys[index]].directory for index in equal})
    by_file: dict[DataFileRef, list[tuple[MetadataIndex, int, int]]] = {}
    by: dict[tuple[str, str, str], Totals] = {}
    for item in items:
        if item.index not in same:
            continue
        key = keys[item.index]
        stored, kind = there[key], (component_of(key.fqn), SHARED, key.dtype)
        file = stored.file._replace(name=f"{BESIDE}{stored.directory}/{stored.file.name}")
        by_file.setdefault(file, []).append((item.index, 0, stored.record))
        by[kind] = by.get(kind, Totals()) + Totals(1, planned_nbytes(item), 0)
    return Compared(
        [item for item in items if item.index not in same],
        {index: own for index, (_, own) in found.items() if index not in same},
        [WrittenFile(file, entries) for file, entries in by_file.items()],
        by,
        keys,
        {keys[index]: there[keys[index]] for index in same},
    )


def _worthwhile(
    items: Sequence[WriteItem], same: Set[MetadataIndex], directories: Mapping[MetadataIndex, str]
) -> Set[MetadataIndex]:
    """Return what to share: not little of a checkpoint, which then has to stay, as a whole."""
    of_directory: Counter[str] = Counter()
    total_nbytes = 0
    for item in items:
        nbytes = planned_nbytes(item)
        total_nbytes += nbytes
        if item.index in same:
            of_directory[directories[item.index]] += nbytes
    return {index for index in same if of_directory[directories[index]] >= _LEAST_PART * total_nbytes}


def _hashed(
    items: Sequence[WriteItem],
    resolve: Resolve,
    thread_count: int,
    hash_on_device: Callable[[torch.Tensor], str | None],
) -> dict[MetadataIndex, tuple[ShardKey, str]]:
    """Return key and hash of each shard that can be shared."""
    found: dict[MetadataIndex, tuple[ShardKey, str]] = {}
    large = [item for item in items if item.tensor_data is not None and planned_nbytes(item) >= SMALL_NBYTES]
    with ThreadPoolExecutor(thread_count, "dcp-hash") as pool:
        for some in _batches(large):
            hosted: list[_Hosted] = []
            for item in some:
                tensor = resolve(item)
                key = _key_of(item, tensor)
                if key is None:
                    continue
                if tensor.device.type == "cpu":
                    hosted.append((item.index, key, tensor))
                else:  # on this thread, whose stream what was queued for the tensor is on
                    tensor = without_lazy_bits(tensor)
                    found[item.index] = key, hash_on_device(tensor) or hash_of(tensor)
            sizes = [tensor.numel() * tensor.element_size() for _, _, tensor in hosted]
            # some for each thread at once: to hand one over takes as long as to hash a megabyte
            shares = [[hosted[at] for at in share] for share in distribute(sizes, thread_count)]
            for hashes in pool.map(_hash_all, shares):
                found.update(hashes)
    return found


_Hosted = tuple[MetadataIndex, ShardKey, torch.Tensor]


def _batches(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield items, as many at once as are resolved and hashed together: a planner may make tensors when it is asked."""
    batch, nbytes = list[WriteItem](), 0
    for item in items:
        batch.append(item)
        nbytes += planned_nbytes(item)
        if nbytes >= _TOGETHER_NBYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def _hash_all(hosted: Sequence[_Hosted]) -> dict[MetadataIndex, tuple[ShardKey, str]]:
    return {index: (key, hash_of(tensor)) for index, key, tensor in hosted}


def _key_of(item: WriteItem, tensor: torch.Tensor) -> ShardKey | None:
    planned = item.tensor_data
    assert planned is not None
    if tensor.is_meta or element_type(tensor.dtype) is None or not is_transparent(tensor):
        return None
    sizes = tuple(planned.chunk.sizes)
    if tuple(tensor.shape) != sizes:  # to write it says what is wrong
        return None
    return ShardKey(item.index.fqn, tuple(planned.chunk.offsets), sizes, tuple(planned.size), dtype_name(tensor.dtype))


def hash_of(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor's elements in C order."""
    content = ContentHash()
    for piece in _pieces(tensor):
        content.update(piece)
    return content.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    shape, nbytes = tuple(tensor.shape), tensor.element_size()
    if tensor.device.type != "cpu":
        tensor, grid = without_lazy_bits(tensor), row_grid(shape, nbytes, _DEVICE_PIECE_NBYTES)
        for number in range(grid.block_count):
            part = host_copy(tensor[grid.box(number).index])
            yield host_array(part).reshape(-1).view(np.uint8).data
        return
    array = host_values(tensor)
    if array.flags.c_contiguous:
        yield array.reshape(-1).view(np.uint8).data
        return
    grid, scratch = row_grid(shape, nbytes), ScratchArrays()
    for number in range(grid.block_count):
        yield block_bytes(array, grid.box(number), scratch).data


def known_shards(
    filesystem: Filesystem,
    place: str,
    references: Sequence[str],
    keys: Sequence[ShardKey],
    remembered: KnownShards,
    open_at: Callable[[str], Filesystem],
) -> Shards:
    """Return what is known, and there, of the shards that a checkpoint at `place` can share with a reference.

    Args:
        filesystem: where the checkpoint is saved.
        place: the same, as a path or URL.
        references: paths or URLs, of which the first is taken at which there is a checkpoint.
        keys: the shards.
        remembered: what this process has saved.
        open_at: opens a place.
    """
    own = posixpath.basename(real_place(place))
    try:
        for reference in references:
            there = real_place(reference)
            directory = posixpath.basename(there)
            if filesystem.file_nbytes(f"{BESIDE}{directory}/{METADATA_NAME}") is None:
                continue
            shards = remembered.of(there)
            if shards is None:
                shards = _read(open_at(reference), directory, keys)
            wanted = {key: shards[key] for key in keys if key in shards and shards[key].directory != own}
            going = {one for one in {shard.directory for shard in wanted.values()} if is_being_removed(filesystem, one)}
            wanted = {key: shard for key, shard in wanted.items() if shard.directory not in going}
            files = sorted({(shard.directory, shard.file) for shard in wanted.values()})
            found = dict(zip(files, filesystem.map(lambda file: _is_there(filesystem, *file), files), strict=True))
            return {key: shard for key, shard in wanted.items() if found[shard.directory, shard.file]}
    except CheckpointError as error:
        logger.warning("Nothing is shared with the reference, and all of the state is written: %s", error)
        return {}
    if references:
        logger.info("There is no checkpoint at %s yet, and all of the state is written.", " or ".join(references))
    return {}


def _is_there(filesystem: Filesystem, directory: str, file: DataFileRef) -> bool:
    return filesystem.file_nbytes(f"{BESIDE}{directory}/{file.name}") == file.nbytes


def _read(filesystem: Filesystem, directory: str, keys: Sequence[ShardKey]) -> Shards:
    """Return the shards of a checkpoint that have a hash, as its metadata and footers say."""
    try:
        metadata = read_current(filesystem).metadata
        indices, places = ShardIndex(metadata.state_dict_metadata), metadata.storage_data or {}
        by_file: dict[DataFileRef, list[tuple[ShardKey, int]]] = {}
        for key in keys:
            index = MetadataIndex(key.fqn, torch.Size(key.offsets))
            shard, stored = indices.find(index), places.get(index)
            if shard is not None and isinstance(stored, StoredAt) and shard.sizes == key.sizes:
                by_file.setdefault(stored.file, []).append((key, stored.record))
        found: dict[ShardKey, StoredShard] = {}
        for file, footer in zip(by_file, read_footers(filesystem, by_file), strict=True):
            shared, slash, name = file.name.removeprefix(BESIDE).rpartition("/")
            where = shared if slash else directory
            for key, number in by_file[file]:
                record = footer.records[number] if number < len(footer.records) else None
                if record is not None and record.content_hash and _is(record, key):
                    found[key] = StoredShard(record.content_hash, where, file._replace(name=name), number)
        return found
    finally:
        filesystem.close()


def _is(record: Record, key: ShardKey) -> bool:
    own = ShardKey(record.fqn, record.offsets, record.shape, record.global_shape, record.element.name)
    return record.kind == KIND_TENSOR and own == key
