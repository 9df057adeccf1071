"""`dcp-nvcomp recover` brings a checkpoint back bit for bit, and never replaces a good one."""

from __future__ import annotations

import errno
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

import dcp_nvcomp.maintenance.recovery
from dcp_nvcomp import NvcompReader, NvcompWriter, tools
from dcp_nvcomp.errors import CheckpointNotFoundError, ConcurrentSaveError, ConfigurationError, StorageError
from dcp_nvcomp.maintenance.recovery import AMBIGUOUS, IMPOSSIBLE, INTACT, RECOVERED, Recovery
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import data_file, file_names, flip, save_stock
from tests.cli.checkpoints import leave_save, loaded_seed, make_old, model_state, new_id, run, save_model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step-1"


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in file_names(path)}


def refused(path: Path, outcome: str, save_id: str | None = None) -> Recovery:
    """Nothing is changed, and the command says so with status 1."""
    before = contents(path)
    found = tools.recover(path, save_id=save_id)
    assert found.outcome == outcome
    status, output, errors = run("recover", str(path), *(["--save-id", save_id] if save_id else []))
    assert (status, errors) == (1, "")
    assert output.splitlines()[0] == found.reason
    assert contents(path) == before
    return found


def move_aside(path: Path) -> str:
    """Move `.metadata` aside, as a save does that is then killed, or fails; return its new name."""
    name = f".metadata.{new_id()}.tmp"
    (path / ".metadata").rename(path / name)
    make_old(*path.iterdir())
    return name


# ---- it brings back ----


def test_lost_metadata(path: Path) -> None:
    stats = save_model(path, seed=3)
    before = contents(path)
    (path / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError):
        NvcompReader(path).read_metadata()
    status, output, errors = run("recover", str(path))
    assert (status, errors) == (0, "")
    assert stats.save_id in output
    assert contents(path) == before
    assert loaded_seed(path) == 3


def test_damaged_metadata(path: Path) -> None:
    stats = save_model(path, seed=4)
    before = contents(path)
    data = before[".metadata"]
    at = data.index(b"storage_data")
    for spoiled in (b"", data[: len(data) // 2], data[:at] + b"S" + data[at + 1 :], bytes(range(256))):
        (path / ".metadata").write_bytes(spoiled)
        with pytest.raises(CheckpointException):
            loaded_seed(path)
        found = tools.recover(path)
        assert (found.outcome, found.save_id) == (RECOVERED, stats.save_id)
        assert contents(path) == before
        assert loaded_seed(path) == 4


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("cleaned", [False, True])
def test_a_stock_checkpoint_that_was_moved_aside(path: Path, cleaned: bool) -> None:
    save_stock(path, model_state(3))
    before = contents(path)
    aside = move_aside(path)
    torn = f".metadata.{new_id()}.tmp"
    (path / torn).write_bytes(before[".metadata"][:100])
    make_old(path / torn)
    if cleaned:
        found = tools.clean(path)
        assert ([one.name for one in found.orphans], found.recoverable) == ([torn], (aside,))
        assert found.foreign == ()
        status, output, errors = run("clean", str(path))
        assert (status, errors) == (0, "")
        assert f"Kept {aside}: " in output
    status, output, errors = run("recover", str(path))
    assert (status, errors) == (0, "")
    assert "Published the checkpoint of stock DCP as .metadata again." in output
    assert loaded_seed(path) == 3
    make_old(*path.iterdir())
    tools.clean(path)
    assert contents(path) == before


@pytest.mark.usefixtures("later")
def test_a_killed_save_over_a_stock_checkpoint(path: Path) -> None:
    """Both are complete: either may be named, and `clean` keeps both."""
    save_stock(path, model_state(1))
    stock = file_names(path) - {".metadata"}
    new = leave_save(path, seed=2)[0]
    aside = move_aside(path)
    shutil.copy(path / f"__{new}.metadata", path / f".metadata.{new_id()}.tmp")  # it was to become `.metadata`
    make_old(*path.iterdir())
    found = tools.clean(path)
    assert set(found.recoverable) == {new, aside}
    assert [one.kind for one in found.orphans] == ["temporary"]
    assert file_names(path) > stock | {aside, f"__{new}.metadata"}
    listed = refused(path, AMBIGUOUS)
    assert {one.save_id for one in listed.candidates} == {new, aside}
    for save_id, seed in ((aside, 1), (new, 2)):
        done = tools.recover(path, save_id=save_id)
        assert (done.outcome, done.save_id) == (RECOVERED, None if save_id == aside else new)
        assert loaded_seed(path) == seed
        (path / ".metadata").unlink()


@pytest.mark.usefixtures("later")
def test_a_save_of_ours_whose_copy_is_gone_was_moved_aside(path: Path) -> None:
    save_id = save_model(path, seed=3).save_id
    (path / f"__{save_id}.metadata").unlink()
    before = file_names(path)
    move_aside(path)
    assert tools.clean(path).recoverable == (save_id,)
    found = tools.recover(path, save_id=save_id)
    assert (found.outcome, found.save_id) == (RECOVERED, save_id)
    assert before <= file_names(path)
    assert loaded_seed(path) == 3


@pytest.mark.parametrize("broken", ["data", "copy"])
def test_the_only_complete_save_is_taken(path: Path, broken: str) -> None:
    stats = save_model(path, seed=1)
    other = leave_save(path, seed=2)[0]
    (path / ".metadata").unlink()
    if broken == "data":
        next(path.glob(f"*_{other}.distcp")).unlink()
    else:
        flip(path / f"__{other}.metadata", 30)
    found = tools.recover(path)
    assert (found.outcome, found.save_id) == (RECOVERED, stats.save_id)
    assert {one.save_id: one.is_complete for one in found.candidates} == {stats.save_id: True, other: False}
    assert loaded_seed(path) == 1


# ---- several saves ----


@pytest.mark.parametrize("lost", [True, False])
def test_several_complete_saves(path: Path, lost: bool) -> None:
    stats = save_model(path, seed=1)
    other, _ = leave_save(path, seed=2)
    make_old(path / f"__{other}.metadata", days=365)
    (path / ".metadata").write_bytes(b"no pickle")
    if lost:
        (path / ".metadata").unlink()
    found = refused(path, AMBIGUOUS)
    assert [one.save_id for one in found.candidates] == [stats.save_id, other]
    assert all(one.is_complete and one.keys == len(model_state()) for one in found.candidates)
    assert {one.nbytes for one in found.candidates} == {file.stat().st_size for file in path.glob("*.distcp")}
    _, output, _ = run("recover", str(path))
    row = next(line for line in output.splitlines() if line.startswith(other))
    assert re.search(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +5 .* complete$", row)
    assert run("recover", str(path), "--save-id", other)[0] == 0
    assert loaded_seed(path) == 2


def test_a_named_save_that_is_not_complete(path: Path) -> None:
    save_model(path, seed=1)
    other = leave_save(path, seed=2)[0]
    (path / ".metadata").unlink()
    file = next(path.glob(f"*_{other}.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    refused(path, IMPOSSIBLE, other)
    refused(path, IMPOSSIBLE, new_id())


# ---- nothing is complete ----


@pytest.mark.parametrize("how", ["missing", "truncated", "footer", "swapped"])
def test_no_complete_save(path: Path, how: str) -> None:
    save_model(path)
    (path / ".metadata").unlink()
    file = data_file(path)
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
    elif how == "footer":
        flip(file, -100)
    else:
        save_model(path.parent / "other")
        shutil.copy(data_file(path.parent / "other"), file)
    (candidate,) = refused(path, IMPOSSIBLE).candidates
    (problem,) = candidate.problems
    assert problem.startswith(file.name)
    assert file.name in run("recover", str(path))[1]


def test_every_missing_file_is_listed(path: Path) -> None:
    save_model(path, single_file_per_rank=False)
    (path / ".metadata").unlink()
    files = sorted(path.glob("*.distcp"))
    for file in files:
        file.unlink()
    (candidate,) = refused(path, IMPOSSIBLE).candidates
    assert [problem.partition(":")[0] for problem in candidate.problems] == [file.name for file in files]


def test_a_copy_under_another_name(path: Path) -> None:
    save_model(path)
    (path / ".metadata").unlink()
    (copy,) = path.glob("__*.metadata")
    copy.rename(path / f"__{new_id()}.metadata")
    (candidate,) = refused(path, IMPOSSIBLE).candidates
    assert "is of another save" in candidate.problems[0]


@pytest.mark.parametrize("save_id", ["x", "0" * 31, "G" * 32, "../" + "0" * 29])
def test_an_invalid_save_id(path: Path, save_id: str) -> None:
    with pytest.raises(CheckpointNotFoundError):
        tools.recover(path)
    status, output, errors = run("recover", str(path))
    assert (status, output, errors.count("\n")) == (1, "", 1)
    save_model(path)
    with pytest.raises(ConfigurationError, match="32 hexadecimal digits"):
        tools.recover(path, save_id=save_id)
    assert run("recover", str(path), "--save-id", save_id)[0] == 2


# ---- what is good stays ----


def test_a_good_checkpoint_is_left_alone(path: Path) -> None:
    stats = save_model(path, seed=1)
    before = contents(path)
    for save_id in (None, stats.save_id):
        found = tools.recover(path, save_id=save_id)
        assert (found.outcome, found.save_id, found.candidates) == (INTACT, stats.save_id, ())
    status, output, _ = run("recover", str(path))
    assert (status, contents(path)) == (0, before)
    assert "nothing to recover" in output


def test_a_good_checkpoint_is_not_replaced_by_a_named_one(path: Path) -> None:
    save_model(path, seed=1)
    other = leave_save(path, seed=2)[0]
    assert "good checkpoint is not replaced" in refused(path, IMPOSSIBLE, other).reason
    assert loaded_seed(path) == 1


def _misses_files(path: Path) -> str:
    stats = save_model(path, seed=1)
    other = leave_save(path, seed=2)[0]
    next(path.glob(f"*_{stats.save_id}.distcp")).unlink()
    return other


def _asks_for_a_global(path: Path) -> str:
    """It may be good, and need `trusted_globals`."""
    save_id = save_model(path, seed=2).save_id
    (path / ".metadata").write_bytes(b"\x80\x04c__main__\nPlannerData\n.")
    return save_id


def _names_another_place(path: Path) -> str:
    """It may be good but for a byte: stock DCP's has no CRC."""
    save_stock(path, model_state(1))
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"/_0_0.distcp"))
    return leave_save(path, seed=2)[0]


def _of_ranks(path: Path) -> str:
    dcp.save(model_state(1), storage_writer=NvcompWriter(path, engine="cpu"), use_collectives=False)
    assert loaded_seed(path) == 1
    return leave_save(path, seed=2)[0]


@pytest.mark.parametrize("make", [_misses_files, _asks_for_a_global, _names_another_place, _of_ranks])
def test_what_may_be_good_is_replaced_only_by_name(path: Path, make: Callable[[Path], str]) -> None:
    save_id = make(path)
    refused(path, AMBIGUOUS)
    assert tools.recover(path, save_id=save_id).outcome == RECOVERED
    assert loaded_seed(path) == 2


def test_a_stock_checkpoint_whose_metadata_was_flipped_on_the_way(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no CRC, and the flip can make a path of a name."""
    save_stock(path, model_state(1))
    leave_save(path, seed=2, days=0)
    before, (real, flips) = contents(path), (PosixFilesystem.read_all, [])

    def read_all(self: PosixFilesystem, name: str, **options: Any) -> bytes:
        data = real(self, name, **options)
        if flips or name != ".metadata":
            return data
        flips.append(name)
        flipped = data.replace(b"__0_0.distcp", b"\x1f_0_0.distcp")
        assert flipped != data
        return flipped

    monkeypatch.setattr(PosixFilesystem, "read_all", read_all)
    for look in (
        lambda: tools.recover(path).outcome == INTACT,
        lambda: tools.verify(path).is_sound,
        lambda: tools.clean(path).orphans == (),
        lambda: loaded_seed(path) == 1,
    ):
        flips.clear()
        assert look()
        assert contents(path) == before


def test_stock(path: Path) -> None:
    save_stock(path, model_state(1))
    assert tools.recover(path).outcome == INTACT
    data_file(path).unlink()
    assert "is missing" in refused(path, IMPOSSIBLE).reason


def test_trouble_with_the_storage_is_not_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if it passes by: what could not be read once is not replaced by what can be read."""
    stats = save_model(path, seed=1)
    leave_save(path, seed=2)
    next(path.glob(f"*_{stats.save_id}.distcp")).rename(path / "hidden")
    before = contents(path)

    def read_all(self: PosixFilesystem, name: str, **options: Any) -> bytes:
        monkeypatch.undo()
        raise StorageError("the network is down")

    monkeypatch.setattr(PosixFilesystem, "read_all", read_all)
    with pytest.raises(StorageError, match="network is down"):
        tools.recover(path)
    assert contents(path) == before


def test_a_save_that_could_not_be_read_is_not_passed_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage fails in passing while the newest of two complete saves is looked at."""
    stats = save_model(path, seed=1)
    older, _ = leave_save(path, seed=2)
    make_old(path / f"__{older}.metadata", days=365)
    (path / ".metadata").unlink()
    read = PosixFilesystem.read

    def failing(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        if stats.save_id in name:
            raise StorageError("connection reset", path=name, errno=errno.ECONNRESET)
        return read(self, name, start, stop)

    with monkeypatch.context() as patch:
        patch.setattr(PosixFilesystem, "read", failing)
        found = tools.recover(path)
    assert found.outcome == AMBIGUOUS and [one.is_unread for one in found.candidates] == [True, False]
    assert not (path / ".metadata").exists()
    assert tools.recover(path, save_id=older).outcome == RECOVERED


def test_the_copy_of_a_good_checkpoint_is_written_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = path / f"__{save_model(path, seed=1).save_id}.metadata"
    before = copy.read_bytes()
    for left in (None, before[:-1], before + b"x"):
        copy.unlink() if left is None else copy.write_bytes(left)
        with monkeypatch.context() as patch:
            patch.setattr(PosixFilesystem, "publish", _read_only)
            assert "can't be: read-only" in tools.recover(path).reason
        found = tools.recover(path)
        assert found.outcome == INTACT and f"{copy.name}, from which" in found.reason
        assert copy.read_bytes() == before
    assert tools.recover(path).reason.endswith("There is nothing to recover.")


def _read_only(self: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
    raise StorageError("read-only", path=name, errno=errno.EROFS)


@pytest.mark.parametrize("lost", [True, False])
def test_a_save_publishes_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    """Whether `.metadata` was lost or damaged: the save wins."""
    save_model(path, seed=1)
    (path / ".metadata").write_bytes(b"no pickle")
    if lost:
        (path / ".metadata").unlink()
    real = dcp_nvcomp.maintenance.recovery._publish
    monkeypatch.setattr(
        dcp_nvcomp.maintenance.recovery, "_publish", lambda *given: (save_model(path, seed=2), real(*given))
    )
    with pytest.raises(ConcurrentSaveError):
        tools.recover(path)
    assert loaded_seed(path) == 2


@pytest.mark.usefixtures("later")
@pytest.mark.parametrize("how", ["a file is missing", "it asks for a global"])
def test_what_was_moved_aside_is_not_whole(path: Path, how: str) -> None:
    """It may be good, or what the rest is recovered from, so `clean` keeps it."""
    save_stock(path, model_state(3))
    aside, gone = move_aside(path), data_file(path)
    if how == "a file is missing":
        gone.unlink()
    else:
        (path / aside).write_bytes(pickle.dumps(print))
        make_old(path / aside)
    (candidate,) = refused(path, IMPOSSIBLE).candidates
    assert candidate.save_id == aside
    assert (candidate.problems == (f"{gone.name} is missing.",)) == (how == "a file is missing")
    assert tools.clean(path).orphans == () and aside in file_names(path)
