"""Make a checkpoint that shares files with others whole again: what it shares is copied into it, as it was encoded.

    shared records -> read, CRCs checked -> written to data files of its own -> `.metadata` is published again

Until then nothing has changed; a copy of the metadata (`__<save_id>.metadata`) is written right before. The save stays
the same one, with the id that it had.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import posixpath
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.filesize import decimal
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_nvcomp.calls.tables import Shown, counted
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.errors import CheckpointError, CheckpointReplacedError, CorruptDataError
from dcp_nvcomp.format.data_file import DataFileRef, encoded_run, read_footer
from dcp_nvcomp.format.footer import FileIdentity, Footer
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.format.metadata.publishable import metadata_to_publish
from dcp_nvcomp.format.metadata.roots import Root, may_be_named, nothing_there, read_current
from dcp_nvcomp.format.metadata.shards import StoredAt
from dcp_nvcomp.format.metadata.shares import is_being_removed, remove_marks
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES, Summary, summary_at_end
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    copy_name_of,
    data_file_name,
    rank_of_metadata_name,
    shared_directories,
)
from dcp_nvcomp.format.record import Record
from dcp_nvcomp.maintenance.opening import document, opened
from dcp_nvcomp.saving.commit import remove_files
from dcp_nvcomp.saving.data_files import DataFileWriter, WrittenFile
from dcp_nvcomp.saving.encode.sources import Member, PendingRecord
from dcp_nvcomp.storage.base import BESIDE, Filesystem
from dcp_nvcomp.storage.open import real_place
from dcp_nvcomp.version import VERSION

_READ_NBYTES: Final = 8 << 20
_NOT_WHOLE: Final = "a checkpoint that could not be made whole"

_Places = dict[DataFileRef, list[tuple[MetadataIndex, int]]]  # of the files that are shared


@dataclass(frozen=True)
class Consolidation(Shown):
    """Result of `consolidate`.

    Attributes:
        path: the checkpoint.
        shared_with: the directories beside it whose files it needed.
        shards: how many shards were copied.
        nbytes: size of the data files that were written.
    """

    path: str
    shared_with: tuple[str, ...]
    shards: int
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return document(self, "checkpoint")

    def shown(self) -> Iterator[str]:
        """Return what it prints."""
        if not self.shared_with:
            yield f"{self.path} shares nothing with other checkpoints."
            return
        yield (
            f"{self.path} is whole: {counted(self.shards, 'shard')} of {', '.join(self.shared_with)}, "
            f"{decimal(self.nbytes)}, are in it now."
        )


def consolidate(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Consolidation:
    """Copy into a checkpoint what it shares with others, so that it needs them no more.

    Args:
        path: a local path or any fsspec URL.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Returns:
        What was copied.

    Raises:
        CheckpointNotFoundError: there is no checkpoint.
        ConfigurationError: an option is unknown.
        CorruptDataError: what it shares is damaged; nothing has changed.
        CheckpointReplacedError: a save has replaced it since, or a run is removing it.
        StorageError: the storage fails, or what it shares is gone; nothing has changed.

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> run, state = tempfile.mkdtemp(), {"w": torch.randn(256, 256)}
        >>> _ = dcp_nvcomp.save(state, f"{run}/a", no_dist=True, reference=())
        >>> _ = dcp_nvcomp.save(state, f"{run}/b", no_dist=True, reference=f"{run}/a")
        >>> dcp_nvcomp.tools.consolidate(f"{run}/b").shared_with
        ('a',)
    """
    with opened(path, storage_options) as filesystem:
        if filesystem.file_nbytes(METADATA_NAME) is None:
            there = filesystem.list_names()
            if not any(rank_of_metadata_name(name) is not None for name in there):
                raise nothing_there(filesystem, there)
            return Consolidation(filesystem.path, (), 0, 0)  # ranks that save on their own share nothing
        root = read_current(filesystem)
        shared: _Places = {}
        for index, stored in (root.metadata.storage_data or {}).items():
            if isinstance(stored, StoredAt) and stored.file.name.startswith(BESIDE):
                shared.setdefault(stored.file, []).append((index, stored.record))
        directories = shared_directories(file.name for file in shared)
        if not shared:
            return Consolidation(filesystem.path, (), 0, 0)
        file_id, names = uuid.uuid4().hex, list[str]()
        try:
            written = [
                _copied(filesystem, file, records, root, number, file_id, names)
                for number, (file, records) in enumerate(shared.items())
            ]
        except BaseException:
            remove_files(filesystem, names, _NOT_WHOLE)
            raise
        data = _publish(filesystem, root, written)
        if filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES) == data:  # else another save has some
            remove_marks(filesystem, posixpath.basename(real_place(path)), directories)
        return Consolidation(
            filesystem.path,
            tuple(directories),
            sum(map(len, shared.values())),
            sum(file.file.nbytes for file in written),
        )


def _copied(
    filesystem: Filesystem,
    file: DataFileRef,
    places: Sequence[tuple[MetadataIndex, int]],
    root: Root,
    number: int,
    file_id: str,
    opened_names: list[str],
) -> WrittenFile:
    """Copy records of a file to a new one, as they are."""
    footer = read_footer(filesystem, file)
    by_record: dict[int, list[MetadataIndex]] = {}
    for index, own_number in places:
        record = footer.records[own_number] if own_number < len(footer.records) else None
        if record is None or record.grid is None or record.fqn != index.fqn:
            raise CorruptDataError(
                "It shares what is no record of its own there, so it can't be copied: `dcp-nvcomp convert` makes "
                "another checkpoint of what can be read.",
                path=footer.path,
                fqn=index.fqn,
            )
        by_record.setdefault(own_number, []).append(index)
    name = data_file_name(footer.rank, number, file_id)
    identity = FileIdentity(root.save_id or "", file_id, footer.rank, {"dcp_nvcomp": VERSION})
    stream = filesystem.open_output(name)
    opened_names.append(name)
    try:
        writer = DataFileWriter(stream, name, identity, lambda nbytes: None)
        for own_number in _with_bases(footer, by_record):
            record = footer.records[own_number]
            index = by_record[own_number][0] if own_number in by_record else MetadataIndex(record.fqn, record.offsets)
            writer.begin(
                PendingRecord(record, record.element.name, (Member(index, record, record.uncompressed_nbytes),))
            )
            for first, stop in _runs(footer, record):
                writer.append(encoded_run(footer, first, stop, _checked(filesystem, file.name, footer, first, stop)))
        found = writer.finish()
    finally:
        stream.abort()  # does nothing once it is closed
    number_of = {index: new for index, _, new in found.items}
    return WrittenFile(
        found.file, [(index, 0, number_of[indices[0]]) for indices in by_record.values() for index in indices]
    )


def _with_bases(footer: Footer, numbers: Iterable[int]) -> Iterator[int]:
    """Yield records in their order, right before each the one that it is derived from."""
    bases = {footer.records[number].base for number in numbers}
    for number in sorted(numbers):
        base = footer.records[number].base
        if base is not None:
            yield base
        if number not in bases:
            yield number


def _runs(footer: Footer, record: Record) -> Iterator[tuple[int, int]]:
    """Yield the blocks of a record, as many at once as are read together."""
    first, end = record.first_block, record.first_block + record.block_count
    while first < end:
        stop = first + 1
        while stop < end and footer.block_offsets[stop + 1] - footer.block_offsets[first] <= _READ_NBYTES:
            stop += 1
        yield first, stop
        first = stop


def _checked(filesystem: Filesystem, name: str, footer: Footer, first: int, stop: int) -> memoryview:
    """Read encoded blocks, and check their CRCs."""
    offsets = footer.block_offsets[first : stop + 1].tolist()
    data = memoryview(filesystem.read(name, offsets[0], offsets[-1]))
    for number, (start, end) in enumerate(itertools.pairwise(offsets), first):
        if checksum(data[start - offsets[0] : end - offsets[0]]) != int(footer.tables.encoded_crc[number]):
            raise CorruptDataError(
                "The stored bytes fail their CRC: the file is corrupt.", path=footer.path, byte_range=(start, end)
            )
    return data


def _publish(filesystem: Filesystem, root: Root, written: Sequence[WrittenFile]) -> bytes:
    names = [file.file.name for file in written]
    try:
        data = _metadata(filesystem, root, written)
        # another save may have replaced it since, or a run may be removing it
        now = filesystem.read_all(METADATA_NAME, limit_nbytes=MAX_METADATA_NBYTES)
        if now != root.data or is_being_removed(filesystem):
            raise CheckpointReplacedError(
                "The checkpoint was replaced, or is being removed, while it was made whole: nothing has changed in it.",
                path=filesystem.path,
            )
    except BaseException:
        remove_files(filesystem, names, _NOT_WHOLE)
        raise
    copy = copy_name_of(root.save_id)
    try:
        if copy is not None:
            filesystem.publish(copy, data)
        filesystem.publish(METADATA_NAME, data)
    except BaseException as error:
        # what may be named stays, for `clean`; and so does what the copy names, if it can't be made what it was
        if not may_be_named(filesystem, names, error):
            with contextlib.suppress(CheckpointError):
                if copy is not None:
                    filesystem.publish(copy, root.data)
                remove_files(filesystem, names, _NOT_WHOLE)
        raise
    return data


def _metadata(filesystem: Filesystem, root: Root, written: Sequence[WrittenFile]) -> bytes:
    places: dict[MetadataIndex, Any] = dict(root.metadata.storage_data or {})
    for file in written:
        places.update({index: StoredAt(file.file, record) for index, _, record in file.items})
    metadata = dataclasses.replace(root.metadata, storage_data=places)
    summary = _summary(root, sum(file.file.nbytes for file in written))
    return metadata_to_publish(metadata, path=filesystem.location(METADATA_NAME), summary=summary)


def _summary(root: Root, more_nbytes: int) -> Summary | None:
    found = summary_at_end(root.data[-SUMMARY_NBYTES:])
    if found is None:
        return None
    return dataclasses.replace(found, stored_nbytes=found.stored_nbytes + more_nbytes).sharing_with((), 0)
