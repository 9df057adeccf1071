"""What a review found that replicas made possible: each of these was wrong once."""

from __future__ import annotations

import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.staging import staged_by
from dcp_nvcomp import ConfigurationError, NvcompReader, async_save, tools
from dcp_nvcomp.saving.asynchronous.staging import CopiedWrite
from tests.checkpoints import damage
from tests.distributed.launch import RankPool
from tests.runs import jobs
from tests.runs.replicas import test_replicas as replicas
from tests.runs.replicas.test_replicas import TIERS, fast_step, save_steps, state_of, wanted

NODES = (0, 1)


def _uploaded_node(place: Path, step: int) -> int:
    """Return the node whose version is in the durable tier."""
    name = next((place / "run" / f"step-{step}").glob("*.distcp")).name
    return next(node for node in NODES if (fast_step(place, node, step) / name).exists())


def _restored(place: Path, **options: Any) -> tuple[int, tuple[int, ...]]:
    state = wanted(0)
    with jobs.manager_of(place, **{**TIERS, **options}) as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        restored = manager.restore(state)
        assert restored is not None
        replicas.assert_state_of(restored.step, state)
        manager.wait()
    return restored.step, restored.damaged


@pytest.mark.ci
@pytest.mark.parametrize("which", ["first", "last"])
def test_an_upload_that_goes_on_is_of_the_version_that_was_restored(
    ranks: RankPool, tmp_path: Path, which: str
) -> None:
    """Not of another one, of which a file is damaged, under the metadata of this one."""
    ranks.run(replicas._upload_fails, tmp_path)
    ids = {NvcompReader(fast_step(tmp_path, node, 20)).read_metadata().storage_meta.save_id: node for node in NODES}
    damage(fast_step(tmp_path, ids[sorted(ids)[0 if which == "first" else -1]], 20))
    assert ranks.run(_restored, tmp_path) == [(20, ())] * 4
    durable = tmp_path / "run" / "step-20"
    assert tools.verify(durable, full=True).findings == ()
    assert len(list(durable.glob("*.distcp"))) == 2, "one replica went up"
    for node in NODES:
        shutil.rmtree(jobs.fast_of(tmp_path, node))
    assert ranks.run(_restored, tmp_path) == [(20, ())] * 4


@pytest.mark.ci
def test_the_durable_version_is_found_if_its_node_is_lost_and_the_other_one_is_damaged(
    ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save_steps, tmp_path, [10, 20])
    lost = _uploaded_node(tmp_path, 20)
    shutil.rmtree(jobs.fast_of(tmp_path, lost))
    damage(fast_step(tmp_path, 1 - lost, 20))
    assert ranks.run(_restored, tmp_path) == [(20, ())] * 4


@pytest.mark.ci
def test_the_durable_version_is_found_if_all_others_are_damaged(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, tmp_path, [10, 20])
    for node in NODES:
        damage(fast_step(tmp_path, node, 20))
    assert ranks.run(_restored, tmp_path) == [(20, ())] * 4


def _save_after_going_back(place: Path, back_to: int, step: int) -> None:
    with jobs.manager_of(place, **{**TIERS, "copies": 0, "fast_keep": 5}) as manager:
        state = wanted(back_to)
        state["ranks"] = {str(dist.get_rank()): state["ranks"][str(dist.get_rank())]}
        restored = manager.restore(state, back_to)
        assert restored is not None and restored.step == back_to
        manager.save(step, state_of(step)).saved.result(100)


@pytest.mark.ci
def test_a_version_that_was_away_is_left_behind_like_those_that_were_there(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_steps, tmp_path, [20, 30, 50], fast_keep=5)
    shutil.move(jobs.fast_of(tmp_path, 1), tmp_path / "away")
    ranks.run(_save_after_going_back, tmp_path, 20, 25, world_size=2)
    shutil.move(tmp_path / "away", jobs.fast_of(tmp_path, 1))
    assert ranks.run(_step_of_restore, tmp_path) == [25] * 4


def _step_of_restore(place: Path) -> int:
    state = wanted(0)
    # two ranks saved it: the others have nothing of their own in it
    state["ranks"] = {str(dist.get_rank() % 2): {"rng": torch.zeros(5), "seen": ()}}
    with jobs.manager_of(place, **TIERS) as manager:
        restored = manager.restore(state)
        assert restored is not None
        return restored.step


def _with_a_group_of_leaders(place: Path) -> None:
    dist.new_group([0, 2])  # which torch registers on these two ranks only
    with jobs.manager_of(place, **TIERS) as manager:
        manager.save(10, state_of(10)).saved.result(100)


def test_other_groups_of_the_user(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_with_a_group_of_leaders, tmp_path)


def _several_managers(place: Path) -> list[int]:
    states = {step: (wanted(step), state_of(step)) for step in (10, 30, 50)}  # their meshes have groups too
    counts = []  # the first one makes groups, which later ones use
    for step, (empty, state) in states.items():
        with jobs.manager_of(place, **TIERS) as manager:
            if step > 10:
                manager.restore(empty)
            manager.save(step, state).saved.result(100)
        counts.append(len(dist.distributed_c10d._world.pg_names))
    return counts


def test_several_managers_in_one_process_leave_no_groups(ranks: RankPool, tmp_path: Path) -> None:
    for counts in ranks.run(_several_managers, tmp_path):
        assert len(set(counts)) == 1, counts


class _Stubborn:
    def __reduce__(self) -> Any:
        raise RuntimeError("on purpose")


def _refused(place: Path, kind: str) -> str:
    rank = dist.get_rank()
    state = state_of(10)
    if kind == "sharded over all":
        state = jobs.state_of(10)
    if kind == "stages":
        state = {"w" if rank < 2 else "v": state["model"]["w"]}
    if kind == "pickle" and rank == 3:
        state["own"] = _Stubborn()
    if kind == "dict":
        state["loader"] = None if rank < 2 else {"left": 1}
    if kind == "empty":
        state["loader"] = {} if rank < 2 else {"left": 1}
    with jobs.manager_of(place, **TIERS) as manager:
        with pytest.raises(ConfigurationError) as caught:
            manager.save(10, state)
        manager.save(30, state_of(30)).saved.result(100)
    return str(caught.value)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("sharded over all", "has no replicas"),
        ("stages", "replicas that hold the same tensors"),
        ("pickle", "on purpose"),
        ("dict", "is an entry on some ranks"),
        ("empty", "is an entry on some ranks"),
    ],
)
def test_a_state_that_replicas_cannot_save_is_refused_on_all_ranks(
    ranks: RankPool, tmp_path: Path, kind: str, message: str
) -> None:
    assert all(message in text for text in ranks.run(_refused, tmp_path, kind))
    ranks.run(replicas.restore, tmp_path, 30)


def _diverged(place: Path, bad: tuple[int, ...]) -> tuple[int, ...]:
    with jobs.manager_of(place, **TIERS) as manager:
        for step in (10, 30, 50, 70):
            state = state_of(step)
            if step in bad and dist.get_rank() >= 2:
                state["model"]["w"].to_local().add_(1)
            manager.save(step, state).saved.result(100)
        return manager.report().differing


def _weights(place: Path, rows: int) -> tuple[int, float]:
    state = wanted(0)
    with jobs.manager_of(place, **TIERS) as manager:
        restored = manager.restore(state)
        assert restored is not None
    expected = state_of(restored.step)["model"]["w"].to_local()
    return restored.step, float((state["model"]["w"].to_local() - expected)[:rows].mean())


@pytest.mark.ci
def test_of_replicas_that_differ_all_ranks_read_one_and_the_equal_ones_stay(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_diverged, tmp_path, (30, 50, 70)) == [(30, 50, 70)] * 4
    for node in NODES:
        assert sorted(path.name for path in jobs.fast_of(tmp_path, node).glob("step-*")) == [
            "step-10",
            "step-50",
            "step-70",
        ]
    found = ranks.run(_weights, tmp_path, 10)
    assert [step for step, _ in found] == [70] * 4
    assert len({round(moved) for _, moved in found}) == 1, found


def _two_groups(place: Path) -> str:
    """Each rank copies the other save first, and there is memory for one copy."""
    groups, rank = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank()
    states = [{f"{name}{rank}": torch.randn(1 << 18)} for name in "ab"]
    options: dict[str, Any] = {"staging_budget_nbytes": 3 << 19}
    with staged_by("copy"):
        for at, group in enumerate(groups):
            async_save(states[at], place / f"{at}-0", process_group=group, **options).upload_completion.result(100)
    copy = CopiedWrite.copy

    def slowly(write: CopiedWrite, items: Any, *arguments: Any, **more: Any) -> Any:
        if items and items[0].index.fqn[0] == ("a" if rank else "b"):
            time.sleep(1)
        return copy(write, items, *arguments, **more)

    with pytest.MonkeyPatch.context() as patch, staged_by("copy"):
        patch.setattr(CopiedWrite, "copy", slowly)
        savings = [
            async_save(states[at], place / f"{at}-1", process_group=group, wait="nothing", **options)
            for at, group in enumerate(groups)
        ]
        for saving in savings:
            saving.upload_completion.result(60)
    return "both saved"


def test_two_saves_that_want_each_others_memory(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_two_groups, tmp_path, world_size=2) == ["both saved"] * 2
