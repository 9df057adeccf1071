"""The fast tier, copies and the durable tier: four ranks on two simulated nodes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp import inspect_checkpoint, list_run, verify_checkpoint
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.distributed.launch import RankPool
from tests.runs import jobs

STEPS = [10, 20, 30]
TIERS = {"every": 20, "fast_every": 10}


def _total(results: list[dict[str, int]], key: str) -> int:
    return sum(result.get(key, 0) for result in results)


def test_a_step_is_on_each_node_and_in_the_durable_tier_when_it_is_due(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(jobs.save_steps, tmp_path, STEPS, **TIERS)
    assert results[0]["tiers"] == {10: ("fast",), 20: ("fast", "durable"), 30: ("fast",)}
    for node in (0, 1):
        assert sorted(path.name for path in jobs.fast_of(tmp_path, node).glob("step-*")) == ["step-20", "step-30"]
    assert [step.name for step in list_run(tmp_path / "run").steps] == ["step-20"]
    durable = tmp_path / "run" / "step-20"
    verify_checkpoint(durable, full=True)
    assert _total(results, "uploaded") == sum(file.stat().st_size for file in durable.glob("*.distcp"))
    for file in durable.glob("*.distcp"):
        copies = [jobs.fast_of(tmp_path, node) / "step-20" / file.name for node in (0, 1)]
        assert [copy.read_bytes() for copy in copies if copy.exists()] == [file.read_bytes()]
    assert inspect_checkpoint(durable).path.endswith("run/step-20")


@pytest.mark.parametrize("world_size", [4, 2])
def test_restores_from_the_nodes_own_tier(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, **TIERS)
    per_node = world_size // 2
    results = ranks.run(jobs.restore, tmp_path, 30, per_node=per_node, world_size=world_size, **TIERS)
    assert _total(results, "durable") == 0
    assert _total(results, "own") > 0


def test_a_lost_node_is_restored_from_its_peer(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, copies=1, **TIERS)
    shutil.rmtree(jobs.fast_of(tmp_path, 1))
    results = ranks.run(jobs.restore, tmp_path, 30, copies=1, **TIERS)
    assert _total(results, "durable") == 0
    assert _total(results[2:], "peer") > 0


def test_one_node_alone_has_no_copies_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = jobs.save_steps(tmp_path, STEPS, copies=1, **TIERS)
    assert result["tiers"] == {10: ("fast",), 20: ("fast", "durable"), 30: ("fast",)}
    assert any("copies=1, but only 0 can be made" in record.getMessage() for record in caplog.records)


def _restore_counted(place: Path, step: int, **options: Any) -> tuple[dict[str, Any], list[str]]:
    """Restore, and return the files below the durable tier that were read, but for what a listing reads."""
    read: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "read_into", "read_all"):
            call = getattr(PosixFilesystem, name)

            def counted(filesystem: PosixFilesystem, file: str, *args: Any, call: Any = call, **kwargs: Any) -> Any:
                if f"{place}/run/step-" in filesystem.location(file):
                    read.append(filesystem.location(file))
                return call(filesystem, file, *args, **kwargs)

            patch.setattr(PosixFilesystem, name, counted)
        return jobs.restore(place, step, **options), read


@pytest.mark.parametrize("step", [20, 40])
def test_from_a_peer_nothing_is_read_of_the_durable_tier(ranks: RankPool, tmp_path: Path, step: int) -> None:
    # step 40 is in the durable tier too, step 20 alone would be
    ranks.run(jobs.save_steps, tmp_path, [20, 30, step] if step == 40 else [step], copies=1, **TIERS)
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


def test_copies_are_on_the_other_node(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(jobs.save_steps, tmp_path, STEPS, copies=1, **TIERS)
    assert results[0]["tiers"][30] == ("fast", "copies")
    both = [{file.name for file in (jobs.fast_of(tmp_path, node) / "step-30").glob("*.distcp")} for node in (0, 1)]
    assert both[0] == both[1] and len(both[0]) == 4
    assert _total(results, "copied") > 0


def test_with_both_copies_gone_the_durable_tier_serves(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, copies=1, **TIERS)
    for node in (0, 1):
        shutil.rmtree(jobs.fast_of(tmp_path, node))
    results = ranks.run(jobs.restore, tmp_path, 20, copies=1, **TIERS)
    assert _total(results, "durable") > 0 and _total(results, "own") == _total(results, "peer") == 0


def test_a_lost_node_without_copies_leaves_the_durable_step(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, **TIERS)
    shutil.rmtree(jobs.fast_of(tmp_path, 0))
    ranks.run(jobs.restore, tmp_path, 20, **TIERS)


@pytest.mark.parametrize(("saved_by", "restored_by"), [(4, 2), (2, 4), (4, 1)])
def test_other_numbers_of_ranks_and_nodes(ranks: RankPool, tmp_path: Path, saved_by: int, restored_by: int) -> None:
    options = {**TIERS, "copies": 1}
    ranks.run(jobs.save_steps, tmp_path, STEPS, world_size=saved_by, per_node=saved_by // 2, **options)
    results = ranks.run(
        jobs.restore, tmp_path, 30, world_size=restored_by, per_node=max(restored_by // 2, 1), **options
    )
    assert _total(results, "durable") == 0


def test_a_damaged_copy_is_replaced_by_another_one(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, copies=1, **TIERS)
    for file in (jobs.fast_of(tmp_path, 1) / "step-30").glob("__[23]_*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 3] ^= 255
        file.write_bytes(data)
    results = ranks.run(jobs.restore, tmp_path, 30, copies=1, **TIERS)
    assert _total(results[2:], "peer") > 0
    again = ranks.run(jobs.restore, tmp_path, 30, copies=1, **TIERS)
    assert _total(again, "peer") == 0, "the good copy stays"


def test_what_peers_hold_that_is_older_does_not_win(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, [10], **TIERS)
    ranks.run(jobs.save_steps, tmp_path, [20, 40], every=20)
    ranks.run(jobs.restore, tmp_path, 40, **TIERS)


def test_an_upload_that_did_not_happen_is_made_by_the_next_job(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, every=1000, fast_every=10)
    assert not list((tmp_path / "run").glob("step-*"))
    ranks.run(jobs.restore, tmp_path, 30, every=30, fast_every=10)
    assert [step.name for step in list_run(tmp_path / "run").steps] == ["step-30"]
    verify_checkpoint(tmp_path / "run" / "step-30", full=True)


def test_a_fast_tier_of_another_run_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.save_steps, tmp_path, STEPS, **TIERS)
    with pytest.raises(AssertionError, match="holds steps of another run"):
        ranks.run(jobs.restore, tmp_path, None, root=str(tmp_path / "other"), **TIERS)
