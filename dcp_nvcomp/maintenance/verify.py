"""Verify a checkpoint: its metadata, its files, and every block's CRC. Needs no GPU, changes nothing.

What fails is read once more before it is judged, and nothing of it ends the verification. Stock DCP's checkpoints have
no checksums of their own: their items are read, decompressed, and checked as far as the archives that torch.save writes
have CRCs.
"""

from __future__ import annotations

import os
import posixpath
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReplacedError,
    CorruptDataError,
    FormatError,
    MetadataError,
    StorageError,
    UnsafeObjectError,
)
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.metadata.rank_metadata import merge_rank_metadata
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_current, read_root, read_roots
from dcp_nvcomp.format.metadata.shards import StockItem, StoredAt
from dcp_nvcomp.format.names import (
    METADATA_NAME,
    copy_name_of,
    mark_name,
    rank_of_metadata_name,
    shared_directories,
)
from dcp_nvcomp.loading.items import most_nbytes, read_stock_bytes, read_stock_tensor
from dcp_nvcomp.maintenance.checks import (
    ERROR,
    WARNING,
    BlockChecker,
    Checked,
    CheckedFile,
    Expected,
    Finding,
    Span,
    Verification,
    check_items,
    check_records,
    expectations,
    finding_of,
    open_file,
    spans_of,
)
from dcp_nvcomp.maintenance.inspection import LAYOUT_FILE, LAYOUT_OURS, LAYOUT_STOCK
from dcp_nvcomp.maintenance.lone_files import LoneFile, lone_file
from dcp_nvcomp.maintenance.opening import opened
from dcp_nvcomp.options import check_thread_count
from dcp_nvcomp.storage.base import BESIDE, Filesystem
from dcp_nvcomp.storage.open import real_place
from dcp_nvcomp.storage.reread import is_stored, retry_if_corrupt

T = TypeVar("T")
R = TypeVar("R")

# Called with how many bytes were checked and how many there are.
Progress = Callable[[int, int], None]
# Stock DCP's items are read whole, however large they are.
STOCK_THREADS = 2
# The most that a Python object may decode to here: nothing but its own stream holds its size.
STOCK_OBJECT_NBYTES = 1 << 30
TASKS_AHEAD = 2


def verify(
    path: str | os.PathLike[str],
    *,
    full: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    thread_count: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Look for everything that is wrong with a checkpoint.

    Each thread holds one read of 8 MiB or one block, and with `full` a decoded block.

    Args:
        path: a local path or any fsspec URL: of a checkpoint, or of a file that `load_compressed_checkpoint` reads.
        full: whether every block is decoded too, on the CPU, and its decoded bytes checked. What only a GPU can decode
            is counted in `undecoded_blocks`; its stored bytes are checked.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.
        thread_count: threads that check; by default one per CPU core, at most 8, and more if storage is remote.
        progress: called now and then, on this thread.

    Returns:
        All that was found.

    Raises:
        ConfigurationError: an option is unknown.
        CheckpointNotFoundError: there is no checkpoint.
        MetadataError: `.metadata` can't be read, so nothing is known of what must be there.
        CheckpointReplacedError: another save replaced it in the meantime.
        StorageError: the storage fails.
    """
    threads = check_thread_count(thread_count)
    with opened(path, storage_options) as filesystem:
        threads = max(threads, filesystem.parallel_reads)
        try:
            roots = _roots(filesystem)
        except CheckpointNotFoundError:
            with lone_file(filesystem) as alone:
                if alone is None:
                    raise
                found = _verify_alone(alone, full, threads, progress)
                return replace(found, path=filesystem.path, layout=LAYOUT_FILE)
        try:
            return _verify(filesystem, roots, full, threads, progress)
        finally:
            _check_not_replaced(filesystem, roots)


def _roots(filesystem: Filesystem) -> list[Root]:
    """Return what a load reads: `.metadata`; only without it, that of the ranks."""
    if filesystem.file_nbytes(METADATA_NAME) is not None:
        return [read_current(filesystem)]
    return read_roots(filesystem, filesystem.list_names())


def _verify_alone(alone: LoneFile, full: bool, threads: int, progress: Progress | None) -> Verification:
    path = alone.filesystem.location(alone.name)
    try:
        file, metadata = alone.read_metadata()
    except (FormatError, CorruptDataError) as error:
        return Verification(path, LAYOUT_FILE, None, full, 1, alone.nbytes, 0, 0, (finding_of(error, alone.name),))
    try:
        return _verify(alone.filesystem, [Root(alone.name, b"", metadata)], full, threads, progress)
    finally:
        if not alone.is_still(file):
            raise CheckpointReplacedError("The file was replaced while it was verified: verify again.", path=path)


def _check_not_replaced(filesystem: Filesystem, roots: Sequence[Root]) -> None:
    """A checkpoint that was replaced looks damaged, as its files were removed."""
    for root in roots:
        try:
            now = filesystem.read_all(root.name, limit_nbytes=len(root.data))
        except CheckpointError as error:
            if isinstance(error, StorageError) and not is_missing(error):
                continue
            now = b""  # deleted, or longer
        if now != root.data:
            message = "The checkpoint was replaced while it was verified: verify again."
            raise CheckpointReplacedError(message, path=filesystem.location(root.name))


@dataclass
class _Tally:
    total_nbytes: int
    progress: Progress | None
    nbytes: int = 0
    blocks: int = 0
    undecoded_blocks: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, checked: Checked) -> None:
        self.nbytes += checked.nbytes
        self.blocks += checked.blocks
        self.undecoded_blocks += checked.undecoded_blocks
        self.findings += checked.findings
        if self.progress is not None:
            self.progress(self.nbytes, self.total_nbytes)


def _verify(
    filesystem: Filesystem, roots: Sequence[Root], full: bool, threads: int, progress: Progress | None
) -> Verification:
    if any(root.metadata.storage_data is None for root in roots):
        raise MetadataError("`.metadata` does not say where anything is stored.", path=filesystem.path)
    ours: dict[DataFileRef, list[Expected]] = {}
    stock: list[tuple[StockItem, Expected]] = []
    for root in roots:
        for stored, expected in expectations(root.metadata):
            if isinstance(stored, StoredAt):
                ours.setdefault(stored.file, []).append(expected)
            else:
                stock.append((stored, expected))
    tally = _Tally(sum(file.nbytes for file in ours) + sum(item.length for item, _ in stock), progress)
    tally.findings += _check_copies(filesystem, roots)
    tally.findings += _check_whole(filesystem, roots)
    tally.findings += _check_marks(filesystem, roots)
    with ThreadPoolExecutor(threads, "dcp-verify") as pool:
        try:
            checker = BlockChecker(filesystem, full=full)
            spans = _spans(filesystem, pool, threads, ours, tally)
            for checked in _in_order(pool, checker.check, spans, TASKS_AHEAD * threads):
                tally.add(checked)
        except BaseException:  # KeyboardInterrupt too: what waits in the pool need not run
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    with ThreadPoolExecutor(STOCK_THREADS, "dcp-verify") as pool:
        check = partial(_check_stock_item, filesystem, full)
        for checked in _in_order(pool, check, stock, TASKS_AHEAD * STOCK_THREADS):
            tally.add(checked)
    return Verification(
        filesystem.path,
        LAYOUT_STOCK if stock else LAYOUT_OURS,
        roots[0].save_id,
        full,
        len(ours) + len({item.relative_path for item, _ in stock}),
        tally.nbytes,
        tally.blocks,
        tally.undecoded_blocks,
        tuple(sorted(tally.findings, key=lambda one: (one.severity, one.file or "", one.byte_range or (0, 0)))),
    )


def _in_order(pool: Executor, work: Callable[[T], R], items: Iterable[T], ahead: int) -> Iterator[R]:
    """The results of all items in turn; no more than `ahead` of them are under way or waiting."""
    pending: deque[Future[R]] = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _spans(
    filesystem: Filesystem, pool: Executor, threads: int, ours: Mapping[DataFileRef, Sequence[Expected]], tally: _Tally
) -> Iterator[Span]:
    """The reads of all files, whose footers are read some at a time; adds what is wrong with them."""
    files = list(ours)
    for first in range(0, len(files), threads):
        some = files[first : first + threads]
        for file, found in zip(some, pool.map(partial(_try_open, filesystem), some), strict=True):
            if isinstance(found, Finding):
                tally.findings.append(found)
                tally.nbytes += file.nbytes
                continue
            tally.findings += check_records(found, ours[file])
            covered = int(found.footer.block_offsets[-1] - found.footer.block_offsets[0])
            tally.nbytes += file.nbytes - covered
            yield from spans_of(found)


def _try_open(filesystem: Filesystem, file: DataFileRef) -> CheckedFile | Finding:
    try:
        return open_file(filesystem, file)
    except CheckpointError as error:
        return finding_of(error, file.name)


def _check_whole(filesystem: Filesystem, roots: Sequence[Root]) -> list[Finding]:
    """Check that every shard is stored, and all of every tensor."""
    metadata: Metadata = roots[0].metadata
    if rank_of_metadata_name(roots[0].name) is not None:
        parts = {rank: root.metadata for root in roots if (rank := rank_of_metadata_name(root.name)) is not None}
        try:
            metadata = merge_rank_metadata(parts, path=filesystem.path)
        except CheckpointError as error:
            return [finding_of(error, None)]
    return check_items(metadata, roots[0].name)


def _check_copies(filesystem: Filesystem, roots: Sequence[Root]) -> list[Finding]:
    """`.metadata` against its immutable copy. Stock DCP's has none, and neither has a rank's."""
    (root, *_) = roots
    files = root.files().values()
    if root.name != METADATA_NAME or not files or None in files:
        return []
    copy = copy_name_of(root.save_id)
    if copy is None:
        return [Finding(WARNING, f"`.metadata` names a save {root.save_id!r}, which is not a save id.", root.name)]
    unread: CheckpointError | None = None
    try:
        if is_stored(lambda: filesystem.read_all(copy, limit_nbytes=len(root.data) + 1), root.data):
            return []
    except CheckpointError as error:
        if is_missing(error):
            what = "The immutable copy of `.metadata` is missing: `dcp-nvcomp recover` writes it again."
            return [Finding(WARNING, what, copy)]
        unread = error
    if _is_of_save(filesystem, copy, root.save_id):
        what = "It is sound, but not the copy of `.metadata`: `dcp-nvcomp recover` writes it again."
        return [Finding(WARNING, what, copy)]
    if unread is not None:
        return [finding_of(unread, copy)]
    data = filesystem.read_all(copy, limit_nbytes=len(root.data) + 1)
    pairs = enumerate(zip(data, root.data, strict=False))
    at = next((at for at, (one, other) in pairs if one != other), min(len(data), len(root.data)))
    what = "It differs from `.metadata` from here on; the two were written with the same bytes, so one is corrupt."
    return [Finding(ERROR, what, copy, (), (at, at + 1))]


def _is_of_save(filesystem: Filesystem, copy: str, save_id: str | None) -> bool:
    """Return True if a copy can be read and is of this save, as a `consolidate` leaves it that was cut short."""
    try:
        return read_root(filesystem, copy).save_id == save_id
    except CheckpointError:
        return False


def _check_marks(filesystem: Filesystem, roots: Sequence[Root]) -> list[Finding]:
    """Check that the checkpoints whose files this one shares have its marks, without which their files may go."""
    directory = posixpath.basename(real_place(filesystem.path))
    found = []
    for shared in shared_directories(name for root in roots for name in root.files()):
        if filesystem.file_nbytes(f"{BESIDE}{shared}/{mark_name(directory)}") is None:
            what = (
                f"It shares files of {shared!r}, which has no mark of {directory!r}: this is a copy, or was renamed, "
                "and what it needs may be removed. `dcp-nvcomp consolidate` makes it whole."
            )
            found.append(Finding(WARNING, what, f"{BESIDE}{shared}"))
    return found


def _check_stock_item(filesystem: Filesystem, full: bool, stored: tuple[StockItem, Expected]) -> Checked:
    """Check that an item of stock DCP lies inside its file and decodes; with `full` to a tensor of the right shape."""
    item, expected = stored
    findings = []
    try:
        sizes = None if expected.shard is None else expected.shard.sizes
        if full and sizes is not None:
            retry_if_corrupt(lambda: read_stock_tensor(filesystem, item, sizes=sizes))
        else:
            limit_nbytes = STOCK_OBJECT_NBYTES if sizes is None else most_nbytes(sizes)
            retry_if_corrupt(lambda: read_stock_bytes(filesystem, item, limit_nbytes=limit_nbytes))
    except UnsafeObjectError as error:
        # a subclass of tensors, which must not be imported; its bytes have been checked
        findings.append(Finding(WARNING, f"Its shape was not checked: {error.message}", None, (expected.fqn,)))
    except CheckpointError as error:
        error.byte_range = error.byte_range or (item.offset, item.offset + item.length)
        findings.append(finding_of(error, item.relative_path, (expected.fqn,)))
    return Checked(item.length, 1, 0, tuple(findings))
