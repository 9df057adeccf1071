"""What saves of a run leave that failed on another rank: it goes with the next save, and nothing else does."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointError, CheckpointManager, Keep, StorageError, save, tools
from dcp_nvcomp.runs import list_run
from dcp_nvcomp.runs.background import unpublished as unpublished_files
from dcp_nvcomp.runs.background.unpublished import Unpublished
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import file_names
from tests.distributed.launch import RankPool
from tests.runs import jobs
from tests.runs.jobs import steps_in


def _files(run: Path, step: int) -> set[str]:
    path = run / f"step-{step}"
    return file_names(path) if path.exists() else set()


@contextmanager
def _full(is_full: bool) -> Iterator[None]:
    """Let this rank find the disk full when it opens a file to write."""

    def fails(*arguments: Any) -> Any:
        raise StorageError("No space left", path="somewhere", errno=errno.ENOSPC)

    with pytest.MonkeyPatch.context() as patch:
        if is_full:
            patch.setattr(PosixFilesystem, "open_output", fails)
        yield


def _save(manager: CheckpointManager, step: int, *, full: int | None = None) -> None:
    """Save a step, perhaps with the disk of one rank full, and wait for it; an earlier failure is raised before."""
    with _full(full == dist.get_rank()):
        try:
            saving = manager.save(step, jobs.state_of(step))
        except CheckpointError:
            saving = manager.save(step, jobs.state_of(step))
        error = saving.saved.exception(100)
    dist.barrier()
    assert (error is None) == (full is None)


def _save_and_fail(place: Path, full: int) -> dict[int, list[set[str]]]:
    """Save steps of which two fail; return the files of these after each save."""
    seen: dict[int, list[set[str]]] = {20: [], 30: []}
    with jobs.manager_of(place, every=10, keep=Keep(last=2)) as manager:
        for step in (10, 20, 30, 40, 50):
            _save(manager, step, full=full if step in seen else None)
            for failed, files in seen.items():
                files.append(_files(place / "run", failed))
            dist.barrier()
        manager.wait()
    return seen


@pytest.mark.parametrize("full", [0, 1])
def test_what_other_ranks_had_written_goes_with_the_next_save(ranks: RankPool, tmp_path: Path, full: int) -> None:
    for seen in ranks.run(_save_and_fail, tmp_path, full, world_size=2):
        assert [len(files) for files in seen[20]] == [0, 1, 0, 0, 0], "the other rank's"
        assert [len(files) for files in seen[30]] == [0, 0, 1, 0, 0]
    assert steps_in(tmp_path / "run") == [40, 50]
    assert file_names(tmp_path / "run" / "step-50") - {".metadata"}
    assert tools.verify(tmp_path / "run" / "step-50", full=True).is_sound


def _save_again(place: Path) -> None:
    with jobs.manager_of(place, every=10) as manager:
        _save(manager, 10)
        _save(manager, 10, full=1)
        before = _files(place / "run", 10)
        dist.barrier()
        _save(manager, 20)
        after = _files(place / "run", 10)
        assert after < before and len(before - after) == 1, "the rank's whose disk was not full"
        assert tools.verify(place / "run" / "step-10", full=True).is_sound
        dist.barrier()
        _save(manager, 20, full=0)
        _save(manager, 20)
        assert tools.verify(place / "run" / "step-20", full=True).is_sound


def test_what_the_checkpoint_at_that_place_has_stays(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_save_again, tmp_path, world_size=2)
    assert len(_files(tmp_path / "run", 20)) == len(_files(tmp_path / "run", 10))
    assert steps_in(tmp_path / "run") == [10, 20]


def _complete(run: Path) -> list[int | None]:
    return [step.step for step in list_run(run).steps if step.state == "complete"]


def _saves_of_one(path: Path, steps: list[int]) -> None:
    with CheckpointManager(path, every=1, preemption_signals=(), asynchronous=False) as manager:
        for step in steps:
            with suppress(CheckpointError):
                manager.save(step, {"w": torch.full((9,), float(step))})


def test_what_may_yet_be_published_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, late = PosixFilesystem.publish, []

    def lands_later(filesystem: PosixFilesystem, name: str, data: bytes, **options: Any) -> None:
        if name == ".metadata" and filesystem.path.endswith("step-2"):
            late.append(lambda: publish(filesystem, name, data, **options))
            error = StorageError("No answer", path=filesystem.path)
            error.outcome_unknown = True
            raise error
        publish(filesystem, name, data, **options)

    monkeypatch.setattr(PosixFilesystem, "publish", lands_later)
    _saves_of_one(tmp_path, [1, 2, 3, 4])
    assert _complete(tmp_path) == [1, 3, 4]
    late[0]()
    assert _complete(tmp_path) == [1, 2, 3, 4]
    assert tools.verify(tmp_path / "step-2", full=True).is_sound


def test_what_is_published_stays_if_the_save_failed_after_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = NvcompWriter.finish

    def finish_and_fail(writer: NvcompWriter, *arguments: Any, **options: Any) -> None:
        finish(writer, *arguments, **options)
        if writer.path.endswith("step-2"):
            raise StorageError("on purpose", path="somewhere")

    monkeypatch.setattr(NvcompWriter, "finish", finish_and_fail)
    _saves_of_one(tmp_path, [1, 2, 3, 4])
    assert _complete(tmp_path) == [1, 2, 3, 4]
    assert tools.verify(tmp_path / "step-2", full=True).is_sound


class _Writer:
    """Stands for a writer whose save failed."""

    def __init__(self, *, is_unpublished: bool = False, error: CheckpointError | None = None) -> None:
        self.is_unpublished, self.removed, self.is_readable = is_unpublished, 0, True
        self._error = error

    def remove_unpublished(self) -> bool:
        self.removed += 1
        if self._error is not None:
            raise self._error
        return self.is_readable


def test_only_what_the_coordinator_names_goes_and_once_the_save_is_over_here() -> None:
    unpublished, under_way, over, other = Unpublished(), _Writer(), _Writer(), _Writer()
    unpublished.failed(1, over)  # type: ignore[arg-type]
    unpublished.failed(2, other)  # type: ignore[arg-type]
    assert unpublished.certain == 0, "this rank is not the coordinator"
    unpublished.remove(1)
    unpublished.remove(3)
    assert (over.removed, other.removed, under_way.removed) == (1, 0, 0)
    unpublished.failed(3, under_way)  # type: ignore[arg-type]
    unpublished._thread.wait_for()
    unpublished.remove(0)
    assert (over.removed, other.removed, under_way.removed) == (1, 0, 1)


def test_what_can_not_be_removed_fails_no_save(caplog: pytest.LogCaptureFixture) -> None:
    unpublished, writer = Unpublished(), _Writer(is_unpublished=True, error=StorageError("no answer", path="there"))
    unpublished.failed(4, writer)  # type: ignore[arg-type]
    assert unpublished.certain == 4
    unpublished.remove(4)
    assert unpublished.certain == 0 and "could not be removed" in caplog.text
    writer._error, writer.is_readable = None, False
    unpublished.remove(0)
    writer.is_readable = True
    unpublished.remove(0)
    unpublished.remove(0)
    assert writer.removed == 3, "until it is gone, with each save that follows"


def test_files_that_can_not_be_removed_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = NvcompWriter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PosixFilesystem, "publish", _no_answer)
        patch.setattr(PosixFilesystem, "remove", _no_answer)
        with pytest.raises(CheckpointError):
            save({"w": torch.arange(9)}, storage_writer=writer, no_dist=True)
    left = file_names(tmp_path)
    assert left
    with monkeypatch.context() as patch:
        patch.setattr(PosixFilesystem, "remove", _no_answer)
        assert not writer.remove_unpublished()
    assert file_names(tmp_path) == left
    assert writer.remove_unpublished() and not file_names(tmp_path)
    assert writer.remove_unpublished()


def _no_answer(*_: Any, **__: Any) -> None:
    raise StorageError("no answer", path="there", errno=errno.EIO)


def test_training_does_not_wait_for_a_store_that_is_out_of_order(monkeypatch: pytest.MonkeyPatch) -> None:
    unpublished, writer, answers = Unpublished(), _Writer(is_unpublished=True), threading.Event()
    monkeypatch.setattr(unpublished_files, "_ROOM_SECONDS", 0.1)
    monkeypatch.setattr(writer, "remove_unpublished", lambda: answers.wait(60))
    unpublished.failed(4, writer)  # type: ignore[arg-type]
    unpublished.remove(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unpublished._thread, "do", None)
        unpublished.remove(0)  # the first one is still under way
    answers.set()
    unpublished._thread.wait_for()
    assert not unpublished._writers and not unpublished._named


def test_what_the_checkpoint_names_after_all_stays(tmp_path: Path) -> None:
    """Whatever is believed of a save: what is there counts."""
    writer = NvcompWriter(tmp_path)
    save({"w": torch.arange(9)}, storage_writer=writer, no_dist=True)
    before = file_names(tmp_path)
    assert not writer.is_unpublished
    writer.remove_unpublished()
    assert file_names(tmp_path) == before
    assert tools.verify(tmp_path, full=True).is_sound
