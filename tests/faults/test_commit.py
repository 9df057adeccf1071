"""The commit protocol, step by step: what is published is whole, and what it replaced goes in the right order."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.format.metadata.roots import read_root
from dcp_nvcomp.saving.commit import LastPublished, WrittenSave, commit_files, data_files, to_publish
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, failure_of, save
from tests.states import constant_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _remove(path: Path) -> None:
    path.unlink()


def _truncate(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize(("harm", "told"), [(_remove, "is not there"), (_truncate, "is shorter than the")])
def test_a_data_file_that_is_gone_before_the_commit(
    tmp_path: Path, harm: Callable[[Path], None], told: str, overwrite: bool
) -> None:
    """As after a clean-up script, or where a rank wrote to a disk of its own: nothing is published."""

    class Harmed(NvcompWriter):
        def finish(self, metadata: Any, results: Any) -> None:
            files = {result.storage_data[0][0] for rank in results for result in rank}
            (file,) = (one for one in files if "__0_1_" in one)
            harm(tmp_path / file)
            super().finish(metadata, results)

    if overwrite:
        save(tmp_path, constant_state(1))
    before = sorted(os.listdir(tmp_path))
    writer = Harmed(tmp_path, single_file_per_rank=False, overwrite=overwrite)
    error = failure_of(lambda: dcp.save(constant_state(2), storage_writer=writer, no_dist=True))
    assert isinstance(error, errors.StorageError) and error.errno == errno.ENOENT
    assert told in str(error) and "cannot see 1 of its 3" in str(error) and "__0_1_" in str(error.path)
    assert sorted(os.listdir(tmp_path)) == before
    if overwrite:
        assert_loads(tmp_path, constant_state(1))
    save(tmp_path, constant_state(3))
    assert_loads(tmp_path, constant_state(3))


def test_a_stale_listing_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may show a directory and sizes as they were a minute ago; a file that is opened is seen as it is."""
    with monkeypatch.context() as patch:
        patch.setattr(PosixFilesystem, "list_files", lambda self: [])
        patch.setattr(PosixFilesystem, "file_nbytes", lambda self, name: 0)
        save(tmp_path, constant_state(1))
        save(tmp_path, constant_state(2))
    assert_loads(tmp_path, constant_state(2))


def test_what_was_replaced_goes_metadata_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in between must not leave metadata that names files which are gone."""
    order: list[str] = []
    real = PosixFilesystem.remove

    def remove(self: PosixFilesystem, names: Iterable[str]) -> None:
        names = list(names)
        order.extend(names)
        real(self, names)

    save(tmp_path, constant_state(1), single_file_per_rank=False)
    old = {name for name in os.listdir(tmp_path) if name != ".metadata"}
    monkeypatch.setattr(PosixFilesystem, "remove", remove)
    save(tmp_path, constant_state(2))
    assert set(order) == old and len(order) == len(old) == 4
    assert order[0].endswith(".metadata")
    assert all(name.endswith(".distcp") for name in order[1:])


def test_an_old_checkpoint_that_names_the_same_files(tmp_path: Path) -> None:
    """What the new one names is never removed, whatever the old one says."""
    save(tmp_path, constant_state(1))
    before = set(os.listdir(tmp_path))
    filesystem = open_filesystem(tmp_path)
    metadata = read_root(filesystem, ".metadata").metadata
    assert metadata.storage_meta is not None
    data, save_id = to_publish(metadata, str(tmp_path), None), str(metadata.storage_meta.save_id)
    written = WrittenSave(data, save_id, data_files(metadata), ())
    commit_files(filesystem, written, LastPublished(), overwrite=True)
    assert set(os.listdir(tmp_path)) == before
    assert_loads(tmp_path, constant_state(1))


def test_a_save_without_collectives_is_replaced_too(tmp_path: Path) -> None:
    """Were `.metadata` lost one day, the older save would else be loaded in its place, without a word."""
    writer = NvcompWriter(tmp_path)
    dcp.save(constant_state(1), storage_writer=writer, no_dist=True, use_collectives=False)
    save(tmp_path, constant_state(2))
    assert_loads(tmp_path, constant_state(2))
    assert len([name for name in os.listdir(tmp_path) if name.endswith(".distcp")]) == 1
    (tmp_path / ".metadata").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match="recover"):
        NvcompReader(tmp_path).read_metadata()


def test_a_publish_that_lands_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage did not answer, and does it later: then the files of that save must still be there."""
    url = f"memory://{tmp_path.name}/run"
    save(url, constant_state(1))
    store = fsspec.filesystem("memory")
    real, late = type(store).pipe_file, []

    def pipe_file(self: Any, path: str, value: bytes, **options: Any) -> None:
        if path.endswith("/.metadata"):
            late.append((path, value))
            raise TimeoutError(errno.ETIMEDOUT, "no answer")
        real(self, path, value, **options)

    writer = NvcompWriter(url)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "pipe_file", pipe_file)
        for _ in range(2):  # and the next save of the same writer leaves them as well
            error = failure_of(lambda: dcp.save(constant_state(2), storage_writer=writer, no_dist=True))
            assert isinstance(error, errors.StorageError) and error.outcome_unknown
    assert_loads(url, constant_state(1))
    for path, value in late:
        real(store, path, value)
        assert_loads(url, constant_state(2))
    store.rm(f"/{tmp_path.name}", recursive=True)


def test_an_old_metadata_that_was_flipped_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read once more, so that what the save replaced does not stay for ever."""
    real, reads = PosixFilesystem.read_all, []

    def read_all(self: PosixFilesystem, name: str, *, limit_nbytes: int) -> bytes:
        data = real(self, name, limit_nbytes=limit_nbytes)
        reads.append(name)
        return bytes([data[0] ^ 1]) + data[1:] if len(reads) == 1 else data

    save(tmp_path, constant_state(1))
    old = set(os.listdir(tmp_path)) - {".metadata"}
    monkeypatch.setattr(PosixFilesystem, "read_all", read_all)
    save(tmp_path, constant_state(2))
    assert reads[:2] == [".metadata"] * 2
    assert not old & set(os.listdir(tmp_path))
    assert_loads(tmp_path, constant_state(2))


def test_files_that_no_metadata_names_stay(tmp_path: Path) -> None:
    """What an unreadable `.metadata` names is unknown, so nothing is removed: orphans do no harm."""
    save(tmp_path, constant_state(1))
    old = set(os.listdir(tmp_path))
    (tmp_path / ".metadata").write_bytes(b"not a pickle")
    save(tmp_path, constant_state(2))
    assert old <= set(os.listdir(tmp_path))
    assert_loads(tmp_path, constant_state(2))
