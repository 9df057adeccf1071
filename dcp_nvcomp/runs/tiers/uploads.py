"""Files of the fast tier go to the durable tier as they are, and their blocks are checked on the way.

What a disk or a memory has changed since the save must not be taken for a safe copy, which lets others go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.errors import CheckpointError, CorruptDataError, StorageError
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.framing import TRAILER_NBYTES, check_header, decode_footer, decode_trailer
from dcp_nvcomp.storage.base import FileInfo, Filesystem

_PIECE_NBYTES: Final = 16 << 20
_OLD_SECONDS: Final = 12 * 3600.0  # half of what `clean` takes for old, if it is not told otherwise


class SourceError(StorageError):
    """A file that is to be uploaded can't be read, or is damaged."""


def upload_files(source: Filesystem, target: Filesystem, names: Collection[str], sizes: Mapping[str, int]) -> int:
    """Copy data files to a directory, but for those that are there and the same; return how many bytes were sent."""
    target.refuse_link()
    target.create_directory()
    there = {file.name: file for file in target.list_files()}
    sized = {name for name in names if name in there and there[name].nbytes == sizes[name]}
    kept = sized - _old(target, [there[name] for name in sized])
    missing = [name for name in sorted(names) if name not in kept or not _is_same(source, target, name, sizes[name])]
    for name in sized.intersection(missing):  # which of the two is damaged? It must not be replaced by a damaged one
        for _ in _read_checked(source, name, sizes[name]):
            pass
    target.remove([name for name in missing if name in there])
    for name in missing:
        _upload(source, target, name, sizes[name])
    return sum(sizes[name] for name in missing)


def _old(target: Filesystem, files: Sequence[FileInfo]) -> set[str]:
    """Return what was sent so long ago that `clean` may soon take it for what a dead save has left."""
    times = {file.name: file.modified_seconds for file in files if file.modified_seconds is not None}
    if not times:
        return set()
    try:
        now_seconds = target.now_seconds()
    except CheckpointError:  # of credentials that may not ask for the time, say
        return set()
    return {name for name, seconds in times.items() if now_seconds - seconds > _OLD_SECONDS}


def _is_same(source: Filesystem, target: Filesystem, name: str, nbytes: int) -> bool:
    """Compare the bytes: a disk may have changed them, and what is uploaded is reported to be safe."""
    there = memoryview(bytearray(min(nbytes, _PIECE_NBYTES)))
    for start, piece in _read_checked(source, name, nbytes):
        try:
            target.read_into(name, start, there[: len(piece)])
        except CheckpointError:
            return False
        if not np.array_equal(piece, there[: len(piece)]):
            return False
    return True


def _upload(source: Filesystem, target: Filesystem, name: str, nbytes: int) -> None:
    with target.open_output(name) as output:
        for _, piece in _read_checked(source, name, nbytes):
            output.write(piece)


def _read_checked(source: Filesystem, name: str, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the pieces of a data file, each with its start, in one buffer.

    Raises:
        SourceError: it can't be read, or what ends in the next piece is damaged.
    """
    buffer = memoryview(bytearray(min(nbytes, _PIECE_NBYTES)))
    try:
        file = find_data_file(source, name, nbytes)
        sums = _Sums(file, read_footer(source, file))
        for start in range(0, nbytes, _PIECE_NBYTES):
            piece = buffer[: nbytes - start]
            source.read_into(name, start, piece)
            sums.add(start, piece)
            yield start, piece
    except SourceError:
        raise
    except CheckpointError as error:
        raise SourceError(error.message, path=source.location(name), byte_range=error.byte_range) from error


class _Sums:
    """Compares the CRCs of a file's blocks and of its footer while the file passes by."""

    def __init__(self, file: DataFileRef, footer: Footer) -> None:
        self._file, self._path = file, footer.path
        self._offsets = footer.block_offsets.tolist()
        self._crcs = footer.tables.encoded_crc.tolist()
        self._block, self._crc = 0, 0
        self._header = self._tail = b""

    def add(self, start: int, piece: memoryview) -> None:
        """Take the next bytes of the file.

        Raises:
            CheckpointError: what ends in them is damaged.
        """
        at, stop = start, min(start + len(piece), self._offsets[-1])
        if at < self._offsets[0]:
            self._header += piece[: self._offsets[0] - start]
            at += min(len(piece), self._offsets[0] - start)
            if at == self._offsets[0]:
                check_header(self._header, path=self._path)
        while at < stop:
            begin, end = self._offsets[self._block : self._block + 2]
            until = min(end, stop)
            self._crc = checksum(piece[at - start : until - start], self._crc)
            at = until
            if until == end:
                if self._crc != self._crcs[self._block]:
                    raise CorruptDataError(
                        "The stored bytes fail their CRC: the file is corrupt.",
                        path=self._path,
                        byte_range=(begin, end),
                    )
                self._block, self._crc = self._block + 1, 0
        self._tail += piece[at - start :]
        if start + len(piece) == self._file.nbytes:
            text, end = self._tail[:-TRAILER_NBYTES], self._tail[-TRAILER_NBYTES:]
            trailer = decode_trailer(end, path=self._path, file_nbytes=self._file.nbytes)
            decode_footer(memoryview(text), memoryview(end), trailer, path=self._path)
