"""The fast tier, copies and the durable tier: four ranks on two simulated nodes."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointError, StorageError, tools
from dcp_nvcomp.runs import StepFailed, list_run
from dcp_nvcomp.runs.background import stages
from tests.checkpoints import flip
from tests.distributed.launch import RankPool
from tests.runs import jobs

STEPS = [10, 20, 30]
TIERS = {"every": 20, "fast_every": 10}


def _total(results: list[dict[str, int]], key: str) -> int:
    return sum(result.get(key, 0) for result in results)


def test_a_step_is_on_each_node_and_in_the_durable_tier_when_it_is_due(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(jobs.save_steps, tmp_path, STEPS, **TIERS)
    assert results[0]["tiers"] == {10: {"fast"}, 20: {"fast", "durable"}, 30: {"fast"}}
    for node in (0, 1):
        assert sorted(path.name for path in jobs.fast_of(tmp_path, node).glob("step-*")) == ["step-20", "step-30"]
    assert [step.name for step in list_run(tmp_path / "run").steps] == ["step-20"]
    durable = tmp_path / "run" / "step-20"
    tools.verify(durable, full=True)
    assert _total(results, "uploaded") == sum(file.stat().st_size for file in durable.glob("*.distcp"))
    for file in durable.glob("*.distcp"):
        copies = [jobs.fast_of(tmp_path, node) / "step-20" / file.name for node in (0, 1)]
        assert [copy.read_bytes() for copy in copies if copy.exists()] == [file.read_bytes()]
    assert tools.inspect(durable).path.endswith("run/step-20")


@pytest.mark.ci
def test_restores_from_the_nodes_own_tier(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, **TIERS)
    results = ranks.run(jobs.restore, tmp_path, 30, per_node=1, world_size=2, **TIERS)
    assert _total(results, "durable") == 0
    assert _total(results, "own") > 0


def test_what_a_peer_sends_is_not_written_through_a_link(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, [10], world_size=2, per_node=1, copies=1, **TIERS)
    step, elsewhere = jobs.fast_of(tmp_path, 1) / "step-10", tmp_path / "elsewhere"
    shutil.rmtree(step)
    elsewhere.mkdir()
    step.symlink_to(elsewhere)
    results = ranks.run(jobs.restore, tmp_path, 10, world_size=2, per_node=1, copies=1, **TIERS)
    assert _total(results[1:], "peer") > 0, "they are kept in memory"
    assert not list(elsewhere.iterdir())


def test_one_node_alone_has_no_copies_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = jobs.save_steps(tmp_path, STEPS, copies=1, **TIERS)
    assert result["tiers"] == {10: {"fast"}, 20: {"fast", "durable"}, 30: {"fast"}}
    assert any("copies=1, but only 0 can be made" in record.getMessage() for record in caplog.records)


def test_a_sparse_tensor_is_saved_through_the_fast_tier(tmp_path: Path) -> None:
    with jobs.manager_of(tmp_path, copies=0, **TIERS) as manager:
        manager.save(20, {"w": torch.eye(30).to_sparse()})
    into = {"w": torch.zeros(30, 30).to_sparse()}
    with jobs.manager_of(tmp_path, copies=0, **TIERS) as manager:
        restored = manager.restore(into)
    assert restored is not None and restored.step == 20
    assert torch.equal(into["w"].to_dense(), torch.eye(30))


def _restore_counted(place: Path, step: int, **options: Any) -> tuple[dict[str, Any], list[str]]:
    with jobs.durable_reads(place) as read:
        return jobs.restore(place, step, **options), read


@pytest.mark.ci
def test_from_a_peer_nothing_is_read_of_the_durable_tier(ranks: RankPool, tmp_path: Path) -> None:
    step = 40  # which is in the durable tier too, beside step 20
    ranks.run(jobs.save_steps, tmp_path, [20, 30, step], copies=1, **TIERS)
    shutil.rmtree(jobs.fast_of(tmp_path, 1))
    results = ranks.run(_restore_counted, tmp_path, step, copies=1, **TIERS)
    assert _total([result for result, _ in results][2:], "peer") > 0
    assert not [file for _, files in results for file in files if file.endswith(".distcp")]
    listed = {f"{tmp_path}/run/{path.name}/.metadata" for path in (tmp_path / "run").glob("step-*")}
    assert {file for _, files in results for file in files} <= listed
    for node in (0, 1):
        shutil.rmtree(jobs.fast_of(tmp_path, node))
    without = ranks.run(_restore_counted, tmp_path, step, copies=1, **TIERS)
    assert [file for _, files in without for file in files if file.endswith(".distcp")], "they are counted"


@pytest.mark.ci
@pytest.mark.parametrize(("saved_by", "restored_by"), [(2, 4), (4, 1)])
def test_other_numbers_of_ranks_and_nodes(ranks: RankPool, tmp_path: Path, saved_by: int, restored_by: int) -> None:
    options = {**TIERS, "copies": 1}
    ranks.run(jobs.save_steps, tmp_path, STEPS, world_size=saved_by, per_node=saved_by // 2, **options)
    results = ranks.run(
        jobs.restore, tmp_path, 30, world_size=restored_by, per_node=max(restored_by // 2, 1), **options
    )
    assert _total(results, "durable") == 0


@pytest.mark.ci
def test_a_damaged_copy_is_replaced_by_another_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, copies=1, **TIERS)
    for file in (jobs.fast_of(tmp_path, 1) / "step-30").glob("__[23]_*.distcp"):
        flip(file, file.stat().st_size // 3, 255)
    results = ranks.run(jobs.restore, tmp_path, 30, copies=1, **TIERS)
    assert _total(results[2:], "peer") > 0
    again = ranks.run(jobs.restore, tmp_path, 30, copies=1, **TIERS)
    assert _total(again, "peer") == 0, "the good copy stays"


@pytest.mark.ci
def test_what_peers_hold_that_is_older_does_not_win(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, [10], **TIERS)
    ranks.run(jobs.save_steps, tmp_path, [20, 40], every=20)
    ranks.run(jobs.restore, tmp_path, 40, **TIERS)


class _Counted:
    """A Stateful value that counts how often it is asked for its state, all ranks together, and may fail on one."""

    def __init__(self, failing: int | None = None) -> None:
        self.asked, self.failing = 0, failing

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        dist.barrier()
        if self.failing == dist.get_rank():
            raise ValueError("no state today")
        return {"w": torch.zeros(1000)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _save_counted(place: Path) -> tuple[int, str, int]:
    value, broken = _Counted(), _Counted(failing=1)
    with jobs.manager_of(place, every=20, fast_every=10, copies=1) as manager:
        for step in (10, 20, 30):
            if dist.get_rank() == 1:
                time.sleep(0.2)  # so that the other ranks have saved, and this one has not
            manager.save(step, {"value": value})
        try:
            manager.save(40, {"value": broken})
        except CheckpointError as error:
            failure = f"{type(error).__name__}: {error}"
        manager.save(50, {"value": value})
        manager.wait()
        return value.asked, failure, manager.report().saved


@pytest.mark.ci
def test_values_are_asked_once_for_their_state_and_who_fails_fails_all(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(_save_counted, tmp_path)
    assert [asked for asked, _, _ in found] == [4] * 4
    assert "no state today" in found[1][1]
    assert all("another rank" in failure for _, failure, _ in (found[0], *found[2:]))
    assert [saved for _, _, saved in found] == [4] * 4


def _copy_fails_after_the_upload(place: Path) -> dict[str, Any]:
    events: list[Any] = []
    options = {"every": 10, "fast_every": 10, "copies": 1, "on_event": events.append}
    with pytest.MonkeyPatch.context() as patch, jobs.manager_of(place, **options) as manager:
        move = stages.move_files

        def late(*args: Any, **kwargs: Any) -> None:
            manager._pipeline._durable_thread.wait_for(0)
            move(*args, **kwargs)
            raise StorageError("no copy today")

        patch.setattr(stages, "move_files", late)
        save = manager.save(10, jobs.state_of(10))
        save.saved.result(60)
        patch.undo()
        manager.wait()
        manager.save(20, jobs.state_of(20)).saved.result(60)
        last = manager.report().saves[-1]
        return {
            "failed": [str(event) for event in events if isinstance(event, StepFailed)],
            "tiers": save.tiers,
            "last": last.tiers,
            "copied": last.copied_nbytes,
        }


def test_a_copy_that_fails_after_the_upload_is_told(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(_copy_fails_after_the_upload, tmp_path):
        assert len(found["failed"]) == 1 and "no copy today" in found["failed"][0]
        assert found["tiers"] == ("fast", "durable")
        assert set(found["last"]) == {"fast", "copies", "durable"} and found["copied"] > 0


@pytest.mark.ci
def test_what_a_step_takes_on_a_node_is_known(ranks: RankPool, tmp_path: Path) -> None:
    for rank, nbytes in enumerate(ranks.run(_fast_nbytes, tmp_path, 1)):
        step = jobs.fast_of(tmp_path, rank // 2) / "step-10"
        assert nbytes == sum(file.stat().st_size for file in step.glob("*.distcp"))


@pytest.mark.ci
@pytest.mark.parametrize("on_backlog", ["wait", "skip"])
def test_one_rank_is_enough_to_ask_for_a_durable_step(ranks: RankPool, tmp_path: Path, on_backlog: str) -> None:
    assert ranks.run(_save_durable_on_rank_1, tmp_path, on_backlog) == [("fast", "durable")] * 4
    assert [step.name for step in list_run(tmp_path / "run").steps] == ["step-7"]


def _save_durable_on_rank_1(place: Path, on_backlog: Any) -> tuple[str, ...]:
    with jobs.manager_of(place, every=10, fast_every=10, on_backlog=on_backlog) as manager:
        save = manager.save(7, jobs.state_of(7), durable=dist.get_rank() == 1)
        save.saved.result(60)
        return save.tiers


def _fast_nbytes(place: Path, copies: int) -> int:
    with jobs.manager_of(place, fast_every=10, copies=copies) as manager:
        manager.save(10, jobs.state_of(10))
        manager.wait()
        return manager._pipeline._fast_stage.step_nbytes
