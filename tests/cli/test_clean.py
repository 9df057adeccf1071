"""`dcp-nvcomp clean` removes exactly the orphans: what no root names, is ours by name, and is old."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

import dcp_nvcomp.maintenance.opening
from dcp_nvcomp import NvcompWriter, tools
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    FileMismatchError,
    IncompleteCheckpointError,
    MetadataError,
    StorageError,
)
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.maintenance.cleaning import Cleaning, clean_run
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import data_file, file_names, flip, save_stock
from tests.cli import checkpoints
from tests.cli.checkpoints import loaded_seed, make_old, model_state, new_id, run, save_model
from tests.conftest import S3Store
from tests.storage import plain  # noqa: F401  registers its protocols

HOUR = 3600.0

leave_save = partial(checkpoints.leave_save, single_file_per_rank=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint, all of whose files are old."""
    path = tmp_path / "step-1"
    save_model(path, seed=1)
    make_old(*path.iterdir())
    return path


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A directory for a first save."""
    (tmp_path / "step-1").mkdir()
    return tmp_path / "step-1"


def put(path: Path, *names: str, days: float = 2.0) -> list[Path]:
    files = [path / name for name in names]
    for file in files:
        file.write_bytes(b"12345")
        make_old(file, days=days)
    return files


def data_name(rank: int = 0, number: int = 0, file_id: str | None = None) -> str:
    return f"__{rank}_{number}_{file_id or new_id()}.distcp"


def leave_upload(filesystem: Filesystem, name: str) -> None:
    """Leave an upload of which one part is on its way, as if its process had been killed."""
    stream = filesystem.open_output(name)
    stream.write(bytes(17 << 20))
    object.__setattr__(stream, "_state", "aborted")


def removed(found: Cleaning) -> set[str]:
    return {orphan.name for orphan in found.orphans}


# ---- what goes and what stays ----


def test_orphans_go(path: Path) -> None:
    live = file_names(path)
    _, left = leave_save(path, seed=2)
    before = file_names(path)
    found = tools.clean(path, dry_run=True)
    assert removed(found) == left
    assert found.nbytes == sum((path / name).stat().st_size for name in left)
    assert file_names(path) == before
    found = tools.clean(path)
    assert removed(found) == left
    assert {orphan.kind for orphan in found.orphans} == {"data", "metadata"}
    assert all(orphan.age_seconds == pytest.approx(2 * 86400, abs=300) for orphan in found.orphans)
    assert (found.young, found.foreign, found.dry_run) == (0, (), False)
    assert file_names(path) == live
    assert loaded_seed(path) == 1
    assert [one.orphans for one in clean_run(path).checkpoints] == [()]


ORPHANS = [
    f"__0_0_{'a' * 32}.distcp",
    f"__12345_678_{'0123456789abcdef' * 2}.distcp",
    f"__{'b' * 32}.metadata",
    f"__{'1' * 32}.metadata",
    f".metadata.{'c' * 32}.tmp",
    f"__7.metadata.{'c' * 32}.tmp",
    f"__{'d' * 32}.metadata.{'c' * 32}.tmp",
    f".clock-{'e' * 32}",
]
NOT_OURS = [
    "notes.txt",
    f"__0_0_{'a' * 31}.distcp",
    f"__0_0_{'a' * 33}.distcp",
    f"__0_0_{'A' * 32}.distcp",
    f"__00_0_{'a' * 32}.distcp",
    f"__0_0_{'a' * 32}.distcp.bak",
    f"x__0_0_{'a' * 32}.distcp",
    f"__0_0_{'a' * 32}.distcp\n",
    f"__-1_0_{'a' * 32}.distcp",
    f"__{'b' * 31}.metadata",
    f"__{'b' * 32}.metadata.bak",
    f"{'b' * 32}.metadata",
    ".metadata.tmp",
    f".metadata.{'c' * 31}.tmp",
    f"other.{'c' * 32}.tmp",
    f"model.safetensors.{'c' * 32}.tmp",
    ".clock",
    "__0_0.distcp",
    "__3_1.distcp",
    ".metadata.bak",
]


def test_only_our_names_go(path: Path) -> None:
    live = file_names(path)
    put(path, *ORPHANS, *NOT_OURS)
    found = tools.clean(path)
    assert removed(found) == set(ORPHANS)
    assert file_names(path) == live | set(NOT_OURS)
    assert found.foreign == ("__0_0.distcp", "__3_1.distcp")


def test_directories_and_links_stay(path: Path, tmp_path: Path) -> None:
    folder, link = path / data_name(), path / data_name()
    folder.mkdir()
    (tmp_path / "elsewhere").write_bytes(b"x")
    link.symlink_to(tmp_path / "elsewhere")
    make_old(folder, tmp_path / "elsewhere")
    assert tools.clean(path).orphans == ()
    assert folder.exists()
    assert link.exists()


@pytest.mark.parametrize("hours", [1.0, 5.5, 24.0])
def test_age(path: Path, hours: float) -> None:
    (old,) = put(path, data_name(), days=(hours + 0.05) / 24)
    (young,) = put(path, data_name(), days=(hours - 0.05) / 24)
    found = tools.clean(path, older_than_seconds=hours * HOUR)
    assert (removed(found), found.young) == ({old.name}, 1)
    assert young.exists()
    assert not old.exists()


def test_age_is_by_the_storages_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = put(path, data_name(), days=0.5)
    monkeypatch.setattr(time, "time", lambda: 4e9)  # this machine's clock is far ahead
    assert tools.clean(path).young == 1
    monkeypatch.undo()
    now, listed = time.time(), PosixFilesystem.list_files
    monkeypatch.setattr(PosixFilesystem, "now_seconds", lambda self: now + 86400)
    with monkeypatch.context() as patch:  # storage that does not know when a file was written
        patch.setattr(
            PosixFilesystem,
            "list_files",
            lambda self: [type(one)(one.name, one.nbytes, None) for one in listed(self)],
        )
        assert tools.clean(path).orphans == ()
    assert removed(tools.clean(path)) == {file.name}


def _short(path: Path) -> None:
    file = next(path.glob("*.distcp"))
    file.write_bytes(b"short")
    make_old(file)


def _first_save(spoil: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """As of a first save that died: there is no root."""

    def spoilt(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        leave_save(path, seed=2)
        spoil(path)

    return spoilt


LOST = "run `dcp-nvcomp verify`; `recover` may need"


def test_a_rank_writes_for_long(path: Path) -> None:
    """Its first files are older than a day, its last one is new: all of them belong to a save under way."""
    file_id = new_id()
    put(path, *(data_name(3, number, file_id) for number in range(3)))
    put(path, data_name(3, 3, file_id), days=0)
    (dead,) = put(path, data_name(3, 0))
    found = tools.clean(path)
    assert (removed(found), found.young) == ({dead.name}, 4)


def test_a_save_about_to_publish_protects_the_files_of_all_ranks(path: Path) -> None:
    """Its data files are old, whatever their ids; only its immutable metadata is new."""
    save_id, left = leave_save(path, seed=2)
    make_old(path / f"__{save_id}.metadata", days=0)
    other_id = new_id()  # as files of rank 1 have
    for name in left:
        if name.endswith(".distcp"):
            assert name.count(save_id) == 1
            (path / name).rename(path / name.replace(save_id, other_id))
    metadata = parse_metadata((path / f"__{save_id}.metadata").read_bytes(), path="")
    for index, ((name, *rest), number) in list(metadata.storage_data.items()):
        metadata.storage_data[index] = ((name.replace(save_id, other_id), *rest), number)
    (path / f"__{save_id}.metadata").write_bytes(serialize_metadata(metadata))
    found = tools.clean(path)
    assert (found.orphans, found.young) == ((), len(left))
    make_old(path / f"__{save_id}.metadata")
    assert len(tools.clean(path).orphans) == len(left)


# ---- roots ----


def refused(path: Path, error: type[Exception], message: str | None = None) -> None:
    put(path, data_name())
    before = file_names(path)
    with pytest.raises(error, match=message):
        tools.clean(path)
    status, output, errors = run("clean", str(path))
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("Error: ")
    assert file_names(path) == before


@pytest.mark.usefixtures("later")
def test_metadata_was_lost(path: Path) -> None:
    """What `recover` could bring back stays, and is named; the rest goes."""
    (path / ".metadata").unlink()
    live = file_names(path)
    (save_id,) = [name[2:-9] for name in live if name.endswith(".metadata")]
    put(path, data_name())
    status, output, errors = run("clean", str(path))
    assert (status, errors) == (0, "")
    assert "removed 1 orphan," in output
    assert f"Kept save {save_id}: there is no `.metadata`, but `dcp-nvcomp recover` can bring it back." in output
    assert file_names(path) == live
    assert tools.clean(path).recoverable == (save_id,)
    assert tools.recover(path).outcome == "recovered"
    assert loaded_seed(path) == 1
    assert tools.clean(path).recoverable == ()


@pytest.mark.usefixtures("later")
def test_a_young_save_without_a_root_stays(empty: Path) -> None:
    file_id = new_id()
    put(empty, data_name(0, 0, file_id), data_name(1, 0, file_id))
    put(empty, data_name(1, 1, file_id), f".metadata.{new_id()}.tmp", days=-9.5)
    before = file_names(empty)
    found = tools.clean(empty)
    assert (found.orphans, found.young) == ((), 4)
    assert file_names(empty) == before


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.usefixtures("later")
def test_the_first_save_died(empty: Path, files: int) -> None:
    """The usual layout, a directory for each step: no root was ever there."""
    left = put(empty, *(data_name(rank) for rank in range(files)))
    found = tools.clean(empty, dry_run=True)
    assert removed(found) == {file.name for file in left} == file_names(empty)
    status, output, errors = run("clean", str(empty))
    assert (status, errors) == (0, "")
    assert f"removed {files} orphan" in output
    assert file_names(empty) == set()
    with pytest.raises(CheckpointNotFoundError):
        tools.clean(empty)


@pytest.mark.usefixtures("later")
def test_a_young_copy_misses_a_file_and_no_root(empty: Path) -> None:
    """As while it is being copied there; other orphans are removed."""
    save_id, left = leave_save(empty, seed=2)
    make_old(empty / f"__{save_id}.metadata", days=-9.5)
    next(empty.glob("*.distcp")).unlink()
    (dead,) = put(empty, data_name())
    found = tools.clean(empty)
    assert (removed(found), found.young) == ({dead.name}, len(left) - 1)
    assert found.recoverable == ()


@pytest.mark.parametrize("first", ["data", "copy"])
def test_a_restore_in_progress(path: Path, tmp_path: Path, first: str) -> None:
    """`cp -a` keeps the times of writing, and `.metadata` may come last."""
    restored = tmp_path / "restored"
    restored.mkdir()
    copy = next(path.glob("__*.metadata"))
    for file in [data_file(path), copy] if first == "data" else [copy]:
        shutil.copy2(file, restored)
        before = file_names(restored)
        assert tools.clean(restored).orphans == ()
        assert [one.orphans for one in clean_run(restored).checkpoints] == [()]
        assert file_names(restored) == before
    shutil.copy2(data_file(path), restored)
    assert tools.recover(restored).outcome == "recovered"
    assert loaded_seed(restored) == 1


@pytest.mark.usefixtures("later")
def test_files_of_stock_dcp_without_a_root(empty: Path) -> None:
    """They may be anything."""
    put(empty, "__0_0.distcp")
    with pytest.raises(IncompleteCheckpointError):
        tools.clean(empty)
    (ours,) = put(empty, data_name())
    found = tools.clean(empty)
    assert (removed(found), found.foreign) == ({ours.name}, ("__0_0.distcp",))
    assert file_names(empty) == {"__0_0.distcp"}


SPOILT: dict[str, tuple[Callable[[Path], Any], type[Exception], str | None]] = {
    "unreadable metadata": (lambda path: (path / ".metadata").write_bytes(b"no pickle"), MetadataError, None),
    "of one rank": (lambda path: (path / "__5.metadata").write_bytes(b"no pickle"), MetadataError, None),
    "a live_file is missing": (lambda path: data_file(path).unlink(), StorageError, "names a file that is missing"),
    "a live_file has another size": (_short, FileMismatchError, "bytes; .* says"),
    # what it protects is not known
    "a young copy": (lambda path: put(path, f"__{new_id()}.metadata", days=-9.9), MetadataError, None),
    "a copy alone": (_first_save(lambda path: put(path, f"__{new_id()}.metadata")), MetadataError, None),
    # no save leaves that, it removes its copy first: so files were lost, and the others may be all there is
    "a copy misses a file": (_first_save(lambda path: next(path.glob("*.distcp")).unlink()), CheckpointError, LOST),
    "a copy's file is short": (_first_save(_short), CheckpointError, LOST),
}


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_checkpoint_is_left_alone(path: Path, how: str) -> None:
    """An orphan may be what is left to recover."""
    spoil, error, message = SPOILT[how]
    spoil(path)
    refused(path, error, message)


def test_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes(b"x")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint here"):
        tools.clean(tmp_path / "nothing")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(CheckpointNotFoundError, match="at or below"):
            clean_run(path)
        assert run("clean", str(path), "--recursive")[0] == 1
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize(
    ("method", "call", "before", "hidden"),
    [("list_files", 1, False, False), ("file_nbytes", 2, False, True)],
    ids=["during the first look", "after the roots were read"],
)
def test_an_overwrite_meanwhile(
    path: Path, monkeypatch: pytest.MonkeyPatch, method: str, call: int, before: bool, hidden: bool
) -> None:
    """What was listed, and what `.metadata` named when it was read, is gone: no damage, but to be looked at again."""
    (dead,) = put(path, data_name())
    if hidden:
        metadata = (path / ".metadata").read_bytes()
        (file,) = [one for one in path.glob("*.distcp") if one.name.encode() in metadata]
        shutil.move(file, path.parent / "hidden")
    between(monkeypatch, method, call, lambda: save_model(path, seed=5), before=before)
    assert removed(tools.clean(path)) == {dead.name}
    assert loaded_seed(path) == 5


@pytest.mark.parametrize("is_first", [True, False])
def test_a_copy_appears_meanwhile(
    path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Right before its files would go, as of a save that takes longer than the age; the first one publishes too."""
    if is_first:
        request.getfixturevalue("later")
        for file in path.iterdir():
            file.unlink()
    save_id, left = leave_save(path, seed=2)
    copy = path / f"__{save_id}.metadata"
    data = copy.read_bytes()
    copy.unlink()
    (dead,) = put(path, data_name())

    def appear() -> None:
        copy.write_bytes(data)
        if is_first:
            make_old(copy)
            publish_old(path, save_id)

    between(monkeypatch, "list_files", 2, appear, before=True)
    assert removed(tools.clean(path)) == {dead.name}
    assert left <= file_names(path)
    assert loaded_seed(path) == (2 if is_first else 1)


def test_metadata_of_ranks_counts_as_roots(tmp_path: Path) -> None:
    path = tmp_path / "c"
    dcp.save(model_state(1), storage_writer=NvcompWriter(path, engine="cpu"), use_collectives=False)
    live = file_names(path)
    _, left = leave_save(path, seed=2)
    make_old(*path.iterdir())
    assert removed(tools.clean(path)) == left
    assert file_names(path) == live
    # and beside `.metadata`: both stay
    save_model(path, seed=3)
    make_old(*path.iterdir())
    live = file_names(path)
    assert tools.clean(path).orphans == ()
    assert file_names(path) == live


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_stock_checkpoint_is_a_root(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save_model(path, seed=1)
    save_stock(path, model_state(2))
    put(path, "__9_9.distcp")
    ours = {name for name in file_names(path) if re.search("[0-9a-f]{32}", name)}
    assert len(ours) == 2
    make_old(*path.iterdir())
    live = file_names(path) - ours
    found = tools.clean(path)
    assert removed(found) == ours
    assert found.foreign == ("__9_9.distcp",)
    assert file_names(path) == live


# ---- races, one step at a time ----


def between(monkeypatch: pytest.MonkeyPatch, method: str, call: int, act: Callable[[], Any], *, before: bool) -> None:
    """Let something happen right before or after the `call`-th call of a method of the cleaning's filesystem."""
    real, calls = getattr(PosixFilesystem, method), [0]

    def patched(self: PosixFilesystem, *arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        now = calls[0] == call
        if now and before:
            act()
        result = real(self, *arguments, **options)
        if now and not before:
            act()
        return result

    def open_patched(*arguments: Any, **options: Any) -> Any:
        filesystem = open_filesystem(*arguments, **options)
        setattr(filesystem, method, patched.__get__(filesystem))
        return filesystem

    monkeypatch.setattr(dcp_nvcomp.maintenance.opening, "open_filesystem", open_patched)


def publish_old(path: Path, save_id: str) -> None:
    """A save with old files is published, by a save or by `recover`."""
    filesystem = open_filesystem(path)
    filesystem.publish(".metadata", (path / f"__{save_id}.metadata").read_bytes())


@pytest.mark.ci
@pytest.mark.parametrize(
    ("method", "call", "before"),
    [("list_files", 1, False), ("now_seconds", 1, False), ("list_files", 2, True), ("list_files", 2, False)],
)
def test_a_publish_between_two_steps(
    path: Path, monkeypatch: pytest.MonkeyPatch, method: str, call: int, before: bool
) -> None:
    """What was an orphan when it was listed is live by now."""
    save_id, left = leave_save(path, seed=2)
    (dead,) = put(path, data_name())
    between(monkeypatch, method, call, lambda: publish_old(path, save_id), before=before)
    found = tools.clean(path)
    assert dead.name in removed(found)
    assert not left & removed(found)
    assert loaded_seed(path) == 2


def data_file_of(path: Path) -> Path:
    metadata = (path / ".metadata").read_bytes()
    (found,) = [file for file in path.glob("*.distcp") if file.name.encode() in metadata]
    return found


def test_the_checkpoint_breaks_before_removing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (dead,) = put(path, data_name())
    between(monkeypatch, "list_files", 2, lambda: flip(path / ".metadata", 0, 0xFF), before=True)
    with pytest.raises(MetadataError):
        tools.clean(path)
    assert dead.exists()


def test_metadata_goes_before_the_files_that_it_names(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleaning that is killed leaves no `__<save_id>.metadata` whose files are gone."""
    leave_save(path, seed=2)
    order: list[str] = []
    real = PosixFilesystem.remove

    def remove(self: PosixFilesystem, gone: Any) -> None:
        gone = list(gone)
        order.extend(gone)
        real(self, gone)

    monkeypatch.setattr(PosixFilesystem, "remove", remove)
    tools.clean(path)
    kinds = [name.rpartition(".")[2] for name in order]
    assert kinds == sorted(kinds, reverse=True)
    assert set(kinds) == {"metadata", "distcp"}


# ---- object stores ----


@pytest.mark.ci
def test_uploads_on_s3(any_s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfinished uploads of dead saves are aborted; those of other files, and of files with a young one, are not."""
    url, options = any_s3_store
    save_model(url, seed=1, **options)
    filesystem = open_filesystem(url, storage_options=options)
    file_id, foreign = new_id(), "backup.tar"
    dead = [data_name(), data_name(), ".metadata", f"__{new_id()}.metadata"]
    young = [data_name(0, 0, file_id), data_name(0, 1, file_id)]
    for name in (*dead, *young, foreign):
        leave_upload(filesystem, name)
    assert {upload.name for upload in filesystem.list_uploads()} == {*dead, *young, foreign}
    real, now = type(filesystem).list_uploads, filesystem.now_seconds()
    seconds = dict.fromkeys((*dead, young[0], foreign), now - 2e5) | {young[1]: now}

    def aged(self: Any) -> list[Any]:
        """Begun two days ago, but for one of them. Moto itself says 2010 of every upload."""
        return [type(upload)(upload.name, upload.upload_id, seconds[upload.name]) for upload in real(self)]

    monkeypatch.setattr(type(filesystem), "list_uploads", aged)
    found = tools.clean(url, storage_options=options)
    assert {(orphan.kind, orphan.name) for orphan in found.orphans} == {("upload", name) for name in dead}
    assert found.young == 2
    assert {upload.name for upload in filesystem.list_uploads()} == {*young, foreign}
    assert loaded_seed(url, **options) == 1


@pytest.mark.ci
def test_the_first_save_died_on_s3(any_s3_store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file and an unfinished upload, or that alone, in a place where nothing was ever published; one of several."""
    root, options = any_s3_store
    url = f"{root}/step-2"
    save_model(f"{root}/step-1", seed=1, **options)
    filesystem = open_filesystem(url, storage_options=options)
    leave_upload(filesystem, data_name())
    later = filesystem.now_seconds() + 2e5
    monkeypatch.setattr(type(filesystem), "now_seconds", lambda self: later)
    filesystem.publish(data_name(), b"12345")
    found = tools.clean(url, storage_options=options)
    assert sorted(orphan.kind for orphan in found.orphans) == ["data", "upload"]
    assert (filesystem.list_names(), filesystem.list_uploads()) == ([], [])
    leave_upload(filesystem, data_name())
    cleaned = clean_run(root, storage_options=options).checkpoints
    assert [(one.path, len(one.orphans)) for one in cleaned] == [(f"{root}/step-1", 0), (url, 1)]
    with pytest.raises(CheckpointNotFoundError):
        tools.clean(url, storage_options=options)
    assert loaded_seed(f"{root}/step-1", **options) == 1


@pytest.mark.parametrize(
    ("age", "hours"),
    [("60m", 1), ("1.5h", 1.5), ("3600s", 1), ("2d", 48)]
    + [(age, None) for age in ("", "1", "d", "1w", "-1d", "1 d", "59m", "0.9h", "3599s", "nan", "1d1h")],
)
def test_ages(path: Path, age: str, hours: float | None) -> None:
    """Invalid ones are refused, and nothing is removed."""
    (file,) = put(path, data_name())
    status, output, errors = run("clean", str(path), "--json", "--dry-run", f"--older-than={age}")
    if hours is None:
        assert (status, output) == (2, "")
    else:
        document, found = json.loads(output), tools.clean(path, dry_run=True, older_than_seconds=hours * HOUR)
        assert (status, errors) == (0, "")
        assert document["older_than_seconds"] == hours * HOUR
        assert {one["name"] for one in document["orphans"]} == removed(found)
        assert (document["schema"], document["dry_run"], document["foreign"]) == (1, True, [])
    assert file.exists()


def test_uploads_that_may_not_be_listed(
    s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url, options = s3_store
    save_model(url, seed=1, **options)
    filesystem = open_filesystem(url, storage_options=options)

    def refuse(self: Any) -> list[Any]:
        error = StorageError("Access Denied", path=url)
        error.attempts = 1
        raise error

    monkeypatch.setattr(type(filesystem), "list_uploads", refuse)
    assert tools.clean(url, storage_options=options).orphans == ()
    assert "Unfinished uploads were not looked for" in caplog.text


def test_who_may_not_write_may_look(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orphan = path / data_name()
    orphan.write_bytes(b"x")
    make_old(orphan)

    def refuse(**_: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert [one.name for one in tools.clean(path, dry_run=True).orphans] == [orphan.name]


# ---- a run: many checkpoints ----


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A good checkpoint, a first save that died, a corrupt checkpoint, one to recover, and folders of others."""
    run_path = tmp_path / "run"
    for step in (1, 3, 4):
        save_model(run_path / f"step-{step}", seed=step)
    leave_save(run_path / "step-1", seed=7)
    (run_path / "more" / "step-2").mkdir(parents=True)
    put(run_path / "more" / "step-2", data_name())
    (run_path / "step-3" / ".metadata").write_bytes(b"torn")
    (run_path / "step-4" / ".metadata").unlink()
    (run_path / "logs").mkdir()
    put(run_path / "logs", "log.txt", "__0_0.distcp")
    (run_path / "link").symlink_to(run_path / "step-1")
    make_old(*(file for file in run_path.rglob("*") if file.is_file()))
    return run_path


@pytest.mark.usefixtures("later")
def test_recursive(steps: Path) -> None:
    corrupt, kept = file_names(steps / "step-3"), file_names(steps / "step-4")
    status, output, errors = run("clean", str(steps), "--recursive", "--dry-run", "--json")
    document = json.loads(output)
    assert (status, errors) == (1, "")
    assert (document["schema"], document["run"], document["dry_run"]) == (1, str(steps), True)
    assert [len(one["orphans"]) for one in document["checkpoints"]] == [1, 6, 0]
    assert [one["checkpoint"] for one in document["refused"]] == [f"{steps}/step-3"]
    status, output, errors = run("clean", str(steps), "--recursive", "--dry-run")
    assert (status, errors, len(output.splitlines())) == (1, "", 6)
    assert f"{steps}: would remove 7 orphans" in output
    dry = clean_run(steps, dry_run=True)
    found = clean_run(steps)
    assert [(one.path, len(one.orphans), len(one.recoverable)) for one in found.checkpoints] == [
        (f"{steps}/more/step-2", 1, 0),
        (f"{steps}/step-1", 6, 0),
        (f"{steps}/step-4", 0, 1),
    ]
    assert [one.nbytes for one in dry.checkpoints] == [one.nbytes for one in found.checkpoints]
    assert found.nbytes == sum(one.nbytes for one in found.checkpoints) > 0
    ((path, error),) = [(one.path, one.error) for one in found.refused]
    assert path == f"{steps}/step-3" and "recover" in error
    assert file_names(steps / "more" / "step-2") == set()
    assert (file_names(steps / "step-3"), file_names(steps / "step-4")) == (corrupt, kept)
    assert file_names(steps / "logs") == {"log.txt", "__0_0.distcp"}
    assert loaded_seed(steps / "step-1") == 1
    shutil.rmtree(steps / "step-3")
    assert run("clean", str(steps), "--recursive")[0] == 0


@pytest.mark.usefixtures("later")
def test_recursive_past_a_folder_that_can_not_be_listed(steps: Path) -> None:
    """The others are cleaned all the same. Its path is too long, as root may list everything else."""
    folder = os.open(steps / "logs", os.O_RDONLY)
    for _ in range(25):
        os.mkdir("n" * 200, dir_fd=folder)
        inner = os.open("n" * 200, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    found = clean_run(steps)
    assert sum(len(one.orphans) for one in found.checkpoints) == 7
    assert [Path(one.path).name for one in found.refused] == ["n" * 200, "step-3"]
    assert "File name too long" in found.refused[0].error
    assert run("clean", str(steps), "--recursive")[0] == 1


def test_recursive_elsewhere(tmp_path: Path) -> None:
    url = f"plain-moving://{tmp_path}"
    save_model(f"{url}/step-1", seed=1)
    leave_save(tmp_path / "step-1", seed=2)
    make_old(*(tmp_path / "step-1").iterdir())
    (found,) = clean_run(url).checkpoints
    assert (found.path, len(found.orphans)) == (f"{url}/step-1", 6)


# ---- the command ----


def test_command(path: Path) -> None:
    _, left = leave_save(path, seed=2)
    put(path, data_name(), "__9_9.distcp", days=0.5)
    status, output, errors = run("clean", str(path), "--dry-run")
    assert (status, errors) == (0, "")
    assert {line.split()[3].rstrip(",") for line in output.splitlines() if line.startswith("would remove")} == left
    assert left <= file_names(path)
    status, output, errors = run("clean", str(path))
    assert (status, errors) == (0, "")
    assert {line.split()[2].rstrip(",") for line in output.splitlines() if line.startswith("removed")} == left
    assert re.search(rf"removed {len(left)} orphans, .*; 1 too young to remove\.", output)
    assert "1 unused files of stock DCP kept: __9_9.distcp" in output
    assert not left & file_names(path)


@pytest.mark.parametrize("seconds", [3599.9, 0, -1, float("nan"), "1d", None])
def test_an_hour_is_the_least(path: Path, seconds: Any) -> None:
    (file,) = put(path, data_name())
    with pytest.raises(ConfigurationError, match="at least 3600"):
        tools.clean(path, older_than_seconds=seconds)
    assert file.exists()
