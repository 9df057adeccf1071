"""A fast tier that is full, read-only, gone or unreadable costs speed and a warning, and never a start or a restore.

Nor a save that is due in the durable tier.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointManager, StorageError
from dcp_nvcomp.runs import StepFailed, StepSaved, StepsRemoved
from dcp_nvcomp.runs.restoring.restore import Restoring
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.local.output import PosixOutput
from tests.checkpoints import damage, flip
from tests.distributed.launch import RankPool, logged
from tests.runs import jobs
from tests.small_disk import SmallDisk, small_disk

ELEMENTS = 250_000  # of four bytes, which do not become smaller: a step of 1 MB


def _state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"p{i}": torch.randint(0, 1 << 31, (ELEMENTS // 4,), generator=generator).to(torch.int32) for i in range(4)}


def _holds(state: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(value, state[key]) for key, value in _state(step).items())


def _manager(place: Path, fast: Path, **options: Any) -> CheckpointManager:
    usual = {"every": 20, "fast_every": 10, "fast_keep": 1, "run_id": "job", "preemption_signals": ()}
    return CheckpointManager(place / "run", fast=fast, **{**usual, **options})


def _steps(path: Path) -> list[int]:
    return sorted(int(one.name[5:]) for one in path.glob("step-*") if (one / ".metadata").exists())


def _restored(manager: CheckpointManager) -> int | None:
    state = _state(0)
    event = manager.restore(state)
    assert event is None or _holds(state, event.step)
    return None if event is None else event.step


def _wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 60
    while text not in caplog.text:
        assert time.monotonic() < deadline, f"nothing is said of {text!r}"
        time.sleep(0.01)


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk("size=10m") as disk:
        yield disk


def _fill(disk: SmallDisk) -> Path:
    """Fill a disk to its last byte."""
    filler = disk.path / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    return filler


def test_a_disk_that_is_full_from_the_beginning_and_then_is_not(
    disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filler = _fill(disk)
    with _manager(tmp_path, disk.path) as manager:
        assert "No space left" in caplog.text and manager.restore(_state(0)) is None
        manager.save(10, _state(10))
        manager.wait()
        assert _steps(tmp_path / "run") == [10], "it goes to the durable tier"
        filler.unlink()
        manager.save(30, _state(30))
    assert _steps(tmp_path / "run") == [10] and _steps(disk.path) == [30]


@pytest.mark.parametrize("trouble", ["full", "read-only", "gone"])
def test_trouble_between_jobs(disk: SmallDisk, tmp_path: Path, trouble: str) -> None:
    with _manager(tmp_path, disk.path) as manager:
        for step in (10, 20, 30):
            manager.save(step, _state(step))
    fast = disk.path
    if trouble == "full":
        _fill(disk)
    elif trouble == "read-only":
        disk.resize("ro")
    else:
        fast = tmp_path / "gone" / "fast"
        fast.parent.write_bytes(b"")  # a file in the way: nothing can be made there
    with _manager(tmp_path, fast) as manager:
        assert _restored(manager) == (20 if trouble == "gone" else 30)
        manager.save(50, _state(50))
    assert 50 in [*_steps(tmp_path / "run"), *_steps(disk.path)]
    if trouble == "full":
        assert 30 in _steps(disk.path), "nothing else had it"
    else:
        assert 50 in _steps(tmp_path / "run")
    with _manager(tmp_path, tmp_path / "other") as manager:
        assert _restored(manager) in (50, 20)


def test_a_node_that_cannot_be_read_is_restored_from_the_durable_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _manager(tmp_path, tmp_path / "fast") as manager:
        for step in (10, 20):
            manager.save(step, _state(step))
    _break(monkeypatch, "fast/step")
    with _manager(tmp_path, tmp_path / "fast") as manager:
        assert _restored(manager) == 20


def test_a_durable_tier_that_is_out_of_order_has_not_lost_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older step would be restored, and the newest one left behind by the next save."""
    with _manager(tmp_path, tmp_path / "fast", fast_keep=2) as manager:
        for step in (20, 40):
            manager.save(step, _state(step))
    for file in (tmp_path / "fast" / "step-40").glob("*.distcp"):
        file.unlink()
    with _manager(tmp_path, tmp_path / "fast") as manager:
        with pytest.MonkeyPatch.context() as patch:
            _break(patch, "run/step-40")
            with pytest.raises(StorageError, match="the disk is broken"):
                _restored(manager)
        assert _restored(manager) == 40


def _break(patch: pytest.MonkeyPatch, where: str) -> None:
    """Let data files not be read where a path has this in it."""
    read_into = PosixFilesystem.read_into

    def broken(filesystem: PosixFilesystem, name: str, *rest: Any) -> None:
        if where in filesystem.path and name.endswith(".distcp"):
            raise StorageError("the disk is broken", path=filesystem.location(name), errno=errno.EIO)
        read_into(filesystem, name, *rest)

    patch.setattr(PosixFilesystem, "read_into", broken)


def _failing(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let the fast tier be full in the middle of a step's file."""
    write = PosixOutput.write

    def full(output: PosixOutput, data: Any) -> None:
        if f"fast/step-{step}" in output._full:
            raise StorageError("no room", path=output._full, errno=errno.ENOSPC)
        write(output, data)

    patch.setattr(PosixOutput, "write", full)


@pytest.mark.parametrize("how", ["asynchronous", "synchronous", "last"])
def test_a_due_save_that_the_fast_tier_lost_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    _failing(monkeypatch, 20)
    with _manager(tmp_path, tmp_path / "fast", asynchronous=how != "synchronous") as manager:
        for step in range(5, 31 if how != "last" else 21):
            if manager.should_save(step):
                manager.save(step, _state(step), durable=how == "last" and step == 20)
            if how == "asynchronous" and step == 20:  # else the loop may end before the failure is known
                _wait_for("lost step 20", caplog)
    made_up = _steps(tmp_path / "run")
    assert "lost step 20" in caplog.text and "no room" in caplog.text
    if how == "asynchronous":
        assert len(made_up) == 1 and 20 < made_up[0] <= 30
    else:
        assert made_up == [20]


def test_the_last_save_makes_up_for_one_that_is_lost_meanwhile_and_is_saved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go_back, begun = PosixOutput.write, Restoring.go_back, threading.Event()

    def full(output: PosixOutput, data: Any) -> None:
        if "fast/step-20" in output._full:
            assert begun.wait(60)
            raise StorageError("no room", path=output._full, errno=errno.ENOSPC)
        write(output, data)

    def go_back_of_the_last(restoring: Restoring) -> None:
        go_back(restoring)
        if manager._progress.step == 30:  # the ranks have agreed on this save, when nothing was lost
            begun.set()

    monkeypatch.setattr(PosixOutput, "write", full)
    monkeypatch.setattr(Restoring, "go_back", go_back_of_the_last)
    events: list[Any] = []
    with _manager(tmp_path, tmp_path / "fast", on_event=events.append) as manager:
        manager.save(20, _state(20))
        manager.save(30, _state(30), durable=True)
        assert not manager.should_save(31), "nothing is owed"
    assert [(one.step, one.tiers) for one in events if isinstance(one, StepSaved)] == [(30, ("fast", "durable"))]
    assert _steps(tmp_path / "run") == [30]


def test_a_step_that_is_only_due_in_the_fast_tier_is_lost_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _failing(monkeypatch, 10)
    with _manager(tmp_path, tmp_path / "fast") as manager:
        assert isinstance(manager.save(10, _state(10)).saved.exception(60), StorageError)
        manager.save(20, _state(20))
    assert "lost step 10" in caplog.text and _steps(tmp_path / "run") == [20]


def test_a_due_save_that_nothing_makes_up_for_is_an_error_of_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing(monkeypatch, 20)
    with pytest.raises(StorageError, match="no room"), _manager(tmp_path, tmp_path / "fast") as manager:
        manager.save(20, _state(20))


@pytest.mark.parametrize("asks", [True, False])
def test_a_file_that_the_upload_cannot_read_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    _break(monkeypatch, "fast/step-20")
    with _manager(tmp_path, tmp_path / "fast") as manager:
        manager.save(20, _state(20)).saved.exception(60)
        for step in range(21, 31):
            if manager.should_save(step) if asks else step == 30:
                manager.save(step, _state(step))
                manager.wait()
    assert len(_steps(tmp_path / "run")) == 1


# --- two nodes -------------------------------------------------------------------------------------------------------


def _on_two_nodes(place: Path, disks: list[Path], steps: list[int], **options: Any) -> tuple[int | None, str]:
    """Restore and save steps, on two nodes of one rank each; return the restored step, and what was logged."""
    rank = dist.get_rank()
    with logged(logging.WARNING) as lines, _manager(place, disks[rank], node=f"node {rank}", **options) as manager:
        found = _restored(manager)
        for step in steps:
            manager.save(step, _state(step))
            manager.wait()
    return found, "\n".join(lines)


@pytest.fixture
def disks() -> Iterator[list[SmallDisk]]:
    with small_disk("size=1400k") as first, small_disk("size=1400k") as second:
        yield [first, second]


def _torso(disk: SmallDisk, step: int) -> None:
    """Leave what a kill -9 in the middle of a save leaves: the rank's file, and no `.metadata`."""
    (whole,) = disk.path.glob("step-*")
    (disk.path / f"step-{step}").mkdir(mode=0o700)
    for file in whole.glob("*.distcp"):
        shutil.copy(file, disk.path / f"step-{step}" / f"__0_0_{'f' * 32}.distcp")


@pytest.mark.ci
def test_torsos_make_room_for_what_a_restore_fetches(ranks: RankPool, tmp_path: Path, disks: list[SmallDisk]) -> None:
    places = [disk.path for disk in disks]
    ranks.run(_on_two_nodes, tmp_path, places, [20], world_size=2)
    for disk in disks:
        _torso(disk, 30)
    for found, said in ranks.run(_on_two_nodes, tmp_path, places, [], world_size=2):
        assert found == 20 and "step 30 went: it is complete nowhere" in said
    for found, _ in ranks.run(_on_two_nodes, tmp_path, places, [30, 40, 50], world_size=2):
        assert found == 20
    assert all(50 in _steps(place) for place in places), "what was fetched, and is durable, made room for saves"


@pytest.mark.ci
@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_node_where_nothing_can_be_written_reads_what_its_peer_has(
    ranks: RankPool, tmp_path: Path, disks: list[SmallDisk], is_durable: bool, trouble: str
) -> None:
    places = [disk.path for disk in disks]
    step = 20 if is_durable else 10
    ranks.run(_on_two_nodes, tmp_path, places, [step], world_size=2)
    for disk in disks[1:]:
        if trouble == "full":
            _fill(disk)
        else:
            disk.resize("ro")
    (found, said), (other, _) = ranks.run(_on_two_nodes, tmp_path, places, [40], world_size=2)
    assert found == other == step and "node 1 can't be written" in said
    assert 40 in _steps(tmp_path / "run")


@pytest.mark.ci
@pytest.mark.parametrize("harm", ["cut", "flipped", "removed"])
def test_a_durable_copy_that_is_damaged_is_replaced_by_a_peers(
    ranks: RankPool, tmp_path: Path, disks: list[SmallDisk], harm: str
) -> None:
    places = [disk.path for disk in disks]
    ranks.run(_on_two_nodes, tmp_path, places, [20], world_size=2)
    disks[1].resize("ro")  # so that its rank would read the durable tier's copies
    for file in (tmp_path / "run" / "step-20").glob("*.distcp"):
        if harm == "flipped":
            flip(file, 100)
        elif harm == "cut":
            os.truncate(file, file.stat().st_size // 2)
        else:
            file.unlink()
    for found, _ in ranks.run(_on_two_nodes, tmp_path, places, [], world_size=2):
        assert found == 20


def _on_swapped_nodes(place: Path, *, swapped: bool, trouble: str = "") -> dict[str, int] | None:
    """Save a sharded state, or restore it where each rank's shard is on the other node."""
    rank = dist.get_rank()
    fast = place / f"node-{1 - rank if swapped else rank}"
    with pytest.MonkeyPatch.context() as patch, _manager(place, fast, node=f"node {rank}") as manager:
        if not swapped:
            manager.save(20, jobs.state_of(20))
            return None
        if trouble == "unreadable":
            _break(patch, "node-0/step")
        state = jobs.state_of(0)
        event = manager.restore(state)
        assert event is not None and event.step == 20
        jobs.assert_state_of(20, state)
        return dict(event.files)


@pytest.mark.ci
@pytest.mark.parametrize("trouble", ["flipped", "unreadable"])
def test_a_peers_copy_that_is_damaged_is_replaced_by_the_durable_one(
    ranks: RankPool, tmp_path: Path, trouble: str
) -> None:
    ranks.run(_on_swapped_nodes, tmp_path, swapped=False, world_size=2)
    (file,) = (tmp_path / "node-0").glob("step-20/*.distcp")
    if trouble == "flipped":
        flip(file, 100)
    first, second = ranks.run(_on_swapped_nodes, tmp_path, swapped=True, trouble=trouble, world_size=2)
    assert {**first, **second}.get("durable")


# --- what may go -----------------------------------------------------------------------------------------------------


def test_a_step_that_is_saved_again_is_no_torso(disk: SmallDisk, tmp_path: Path) -> None:
    with _manager(tmp_path, disk.path) as manager:
        manager.save(20, _state(20))
    _torso(disk, 30)
    with _manager(tmp_path, disk.path) as manager:
        assert _restored(manager) == 20
        manager.save(30, _state(30))
        manager.wait()
        _fill(disk)
        manager.save(50, _state(50))  # for which there is no room
        manager.wait()
        assert 30 in _steps(disk.path)
    assert 50 in _steps(tmp_path / "run")


def test_a_durable_step_that_a_restore_found_damaged_lets_nothing_go(disk: SmallDisk, tmp_path: Path) -> None:
    with _manager(tmp_path, disk.path, fast_keep=3) as manager:
        for step in (10, 20):
            manager.save(step, _state(step))
    damage(tmp_path / "run" / "step-20")
    shutil.rmtree(disk.path / "step-20")
    _fill(disk)
    with _manager(tmp_path, disk.path, fast_keep=3) as manager:
        with pytest.warns(RuntimeWarning, match="Step 20 is damaged"):
            assert _restored(manager) == 10
        assert not manager._pipeline.has_room(_state(30))
        assert _steps(disk.path) == [10]


def test_what_goes_to_make_room_is_told(disk: SmallDisk, tmp_path: Path) -> None:
    events: list[Any] = []
    with _manager(tmp_path, disk.path, every=10, on_event=events.append) as manager:
        manager.save(10, _state(10))
        manager.wait()
        _fill(disk)
        manager.save(20, _state(20))
    assert StepsRemoved((10,), "fast") in events


def _no_copies(place: Path, disks: list[Path]) -> dict[str, Any]:
    """Save where a node can't read what it is to send."""
    rank = dist.get_rank()
    events: list[Any] = []
    options = {"node": f"node {rank}", "copies": 1, "on_event": events.append}
    with pytest.MonkeyPatch.context() as patch, _manager(place, disks[rank], **options) as manager:
        if rank == 0:
            _break(patch, f"{disks[0]}/step-10")
        save = manager.save(10, _state(10))
        error = save.saved.exception(60)
        manager.wait()
        return {"error": error, "failed": [event.step for event in events if isinstance(event, StepFailed)]}


def test_a_copy_that_cannot_be_read_where_it_is_sent_is_told_alike_on_all_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    found = ranks.run(_no_copies, tmp_path, [tmp_path / "a", tmp_path / "b"], world_size=2)
    assert found == [{"error": None, "failed": [10]}] * 2


def _two_ranks_a_node(place: Path, *, restores: bool) -> None:
    with jobs.manager_of(place, every=1000, fast_every=10) as manager:
        if not restores:
            manager.save(10, jobs.state_of(10))
            return
        state = jobs.state_of(0)
        event = manager.restore(state)
        assert event is not None and event.step == 10
        jobs.assert_state_of(10, state)
        assert dist.get_rank() < 2 or event.files.get("peer")


@pytest.mark.ci
def test_two_ranks_of_a_node_where_nothing_can_be_written(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_two_ranks_a_node, tmp_path, restores=False)
    for file in jobs.fast_of(tmp_path, 1).glob("step-10/*.distcp"):
        file.rename(jobs.fast_of(tmp_path, 0) / "step-10" / file.name)
    shutil.rmtree(jobs.fast_of(tmp_path, 1))
    jobs.fast_of(tmp_path, 1).write_bytes(b"")  # a file in the way
    ranks.run(_two_ranks_a_node, tmp_path, restores=True)
