"""What counts as a complete step is one thing for lists, rules, restores, pins and uploads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, CheckpointNotFoundError, ConfigurationError, Keep, save
from dcp_nvcomp.runs import list_run, pin_step, prune_run
from tests.checkpoints import data_file, save_stock


def _state(step: int) -> dict[str, Any]:
    return {"w": torch.randn(2000, generator=torch.Generator().manual_seed(step)), "v": torch.arange(3000) * step}


def _saved(run: Path, *steps: int, **options: Any) -> Path:
    with CheckpointManager(run, every=10, run_id="job", **options) as manager:
        for step in steps:
            manager.save(step, _state(step))
    return run


def _complete(run: Path) -> list[int]:
    with CheckpointManager(run, run_id="job") as manager:
        return [saved.step for saved in manager.steps()]


def _restored(run: Path, step: int | None = None, **options: Any) -> int:
    """Restore, check that the values are those of the step, and return it."""
    state = _state(0)
    with CheckpointManager(run, run_id="job", **options) as manager:
        restored = manager.restore(state, step)
        assert restored is not None and torch.equal(state["w"], _state(restored.step)["w"])
        return restored.step


def _states(run: Path) -> dict[str, str]:
    return {step.name: step.state for step in list_run(run).steps}


def _cut(file: Path, part: float = 0.5) -> None:
    os.truncate(file, int(file.stat().st_size * part))


def _half_copied(step: Path) -> None:
    _cut(step / ".metadata")
    _cut(data_file(step))


def _cut_by_a_byte(step: Path) -> None:
    os.truncate(data_file(step), data_file(step).stat().st_size - 1)


def _grown(step: Path) -> None:
    data_file(step).write_bytes(data_file(step).read_bytes() + b"x")


def _of_two_saves(step: Path) -> None:
    """Give a step the metadata of another save of the same size, and the summary's text of its own."""
    data = (step / ".metadata").read_bytes()
    save_id = list_run(step).steps[0].save_id
    assert save_id is not None
    whole = data[: data.rindex(b"DCPNVsum")].replace(save_id.encode(), b"0" * 32) + data[data.rindex(b"DCPNVsum") :]
    (step / ".metadata").write_bytes(whole[:-12])  # without its CRC it is read as it is


HARMS: list[Callable[[Path], None]] = [
    _half_copied,
    lambda step: _cut(step / ".metadata", 0.0),
    lambda step: _cut(step / ".metadata", 0.9),
    lambda step: data_file(step).unlink(),
    _cut_by_a_byte,
    _grown,
    _of_two_saves,
]


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_not_whole_pushes_nothing_out(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    run = _saved(tmp_path, 10, 20, 30)
    harm(run / "step-30")
    assert _states(run) == {"step-10": "complete", "step-20": "complete", "step-30": "damaged"}
    assert list_run(run).steps[-1].problem
    assert _complete(run) == [10, 20]
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 30 to pin"):
        pin_step(run, 30)
    pruned = prune_run(run, Keep(last=1))
    assert [saved.step for saved in pruned.removed] == [10] and set(pruned.kept) == {20}
    _saved(run, 40, keep=Keep(last=2))
    assert sorted(_states(run)) == ["step-20", "step-30", "step-40"], "nor does it go itself: someone may want it"
    shutil.rmtree(run / "step-40")
    with pytest.warns(RuntimeWarning, match="Step 30 is damaged"):
        assert _restored(run) == 20


def test_a_renamed_step_is_not_the_step_that_its_name_says(tmp_path: Path) -> None:
    run = _saved(tmp_path, 10, 20, 30)
    (run / "step-10").rename(run / "step-60")
    assert _states(run)["step-60"] == "misnamed"
    assert next(step for step in list_run(run).steps if step.name == "step-60").problem == (
        "It holds step 10, and has the name of step 60."
    )
    assert _complete(run) == [20, 30] and _restored(run) == 30
    with pytest.raises(CheckpointNotFoundError):
        _restored(run, 60)
    with pytest.raises(CheckpointNotFoundError, match="holds step 10"):
        pin_step(run, 60)
    assert [saved.step for saved in prune_run(run, Keep(last=1)).removed] == [20]
    assert sorted(_states(run)) == ["step-30", "step-60"]


def test_a_renamed_step_of_the_fast_tier_is_passed_over(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    options: dict[str, Any] = {"fast": fast, "fast_every": 5}
    _saved(run, 5, 10, **options)
    (fast / "step-5").rename(fast / "step-60")
    assert _restored(run, **options) == 10


def test_a_run_with_names_of_its_own(tmp_path: Path) -> None:
    run = _saved(tmp_path, 10, 20, step_template="iter_{step}")
    (run / "iter_10").rename(run / "iter_30")
    with CheckpointManager(run, run_id="job", step_template="iter_{step}") as manager:
        assert [saved.step for saved in manager.steps()] == [20]


def test_steps_are_found_up_to_the_largest_that_can_be_saved(tmp_path: Path) -> None:
    """As `time.time_ns()` is one, of 19 digits."""
    state, largest = _state(1), 2**63 - 1
    steps = [10, 10**18 - 1, 10**18, 1_796_009_300_571_505_689, largest]
    with CheckpointManager(tmp_path / "run", every=1, fast=tmp_path / "fast", fast_every=1, fast_keep=9) as manager:
        for step in steps:
            manager.save(step, state)
        with pytest.raises(ConfigurationError, match="larger than any step"):
            manager.save(largest + 1, state)
        manager.wait()
        assert [saved.step for saved in manager.steps()] == steps
    assert [step.step for step in list_run(tmp_path / "run").steps] == steps
    pin_step(tmp_path / "run", steps[3])
    prune_run(tmp_path / "run", keep=Keep(last=1))
    assert _complete(tmp_path / "run") == [steps[3], largest]
    with CheckpointManager(tmp_path / "run") as manager:
        with pytest.raises(ConfigurationError, match="not newer"):
            manager.save(3, state)
        restored = manager.restore(state)
        assert restored is not None and restored.step == largest
    shutil.rmtree(tmp_path / "run" / f"step-{largest}")
    with CheckpointManager(tmp_path / "run", fast=tmp_path / "fast") as manager:
        restored = manager.restore(state)
        assert restored is not None and restored.step == largest, "in the fast tier"
    (tmp_path / "run" / f"step-{steps[3]}").rename(tmp_path / "run" / f"step-{largest + 1}")
    assert _complete(tmp_path / "run") == [largest], "uploaded again, and no step has a larger number"


def test_stock_checkpoints_count_by_what_they_hold(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_stock(tmp_path / f"step-{step}", _state(step))
    _cut(tmp_path / "step-30" / ".metadata")
    assert _states(tmp_path) == {"step-10": "complete", "step-20": "complete", "step-30": "damaged"}
    _cut_by_a_byte(tmp_path / "step-20")
    assert _states(tmp_path)["step-20"] == "damaged" and _complete(tmp_path) == [10]
    assert not prune_run(tmp_path, Keep(last=1)).removed


def test_what_was_seen_complete_is_opened_again_once_it_was_changed(tmp_path: Path) -> None:
    run = _saved(tmp_path, 10, 20, 30, keep=Keep(last=5))
    with CheckpointManager(run, run_id="job") as manager:
        assert [saved.step for saved in manager.steps()] == [10, 20, 30]
        metadata = run / "step-30" / ".metadata"
        before, data = metadata.stat(), bytearray(metadata.read_bytes())
        data[len(data) // 2] ^= 1
        metadata.write_bytes(data)
        os.utime(metadata, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert [saved.step for saved in manager.steps()] == [10, 20]
    assert _states(run)["step-30"] == "damaged"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"complete": [1]}', b"\xff" * 100, b"[" * 100_000])
def test_whatever_says_what_was_seen_is_not_believed_if_it_is_damaged(tmp_path: Path, text: bytes) -> None:
    run = _saved(tmp_path, 10, keep=Keep())
    (run / ".run" / "seen").write_bytes(text)
    assert _states(run) == {"step-10": "complete"} and _complete(run) == [10]


def test_without_a_rule_what_was_saved_is_written_down_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _saved(tmp_path, 10, 20)
    monkeypatch.setattr("dcp_nvcomp.maintenance.run_listing.look_into", None)
    assert _states(run) == {"step-10": "complete", "step-20": "complete"}


def test_what_is_plainly_whole_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"a": torch.zeros(100_000), "b": torch.ones(9)}, tmp_path / "step-1", no_dist=True, single_file_per_rank=False)
    save(_state(2), tmp_path / "step-2", no_dist=True)
    monkeypatch.setattr("dcp_nvcomp.format.metadata.roots.read_root", None)
    assert set(_states(tmp_path).values()) == {"complete"}
    monkeypatch.undo()
    shutil.copy(data_file(tmp_path / "step-2"), tmp_path / "step-1")
    assert set(_states(tmp_path).values()) == {"complete"}, "what is beside a checkpoint's own files does not matter"
    data_file(tmp_path / "step-2").rename(tmp_path / "step-2" / f"__0_0_{'0' * 32}.distcp")
    assert _states(tmp_path)["step-2"] == "damaged"


def test_a_durable_copy_that_is_not_whole_is_uploaded_again(tmp_path: Path) -> None:
    run, fast = tmp_path / "run", tmp_path / "fast"
    options: dict[str, Any] = {"every": 10, "fast": fast, "fast_every": 5, "run_id": "job"}
    with CheckpointManager(run, **options) as manager:
        for step in (10, 20):
            manager.save(step, _state(step))
    _cut(data_file(run / "step-20"))
    assert _complete(run) == [10]
    state = _state(0)
    with CheckpointManager(run, **options) as manager:
        restored = manager.restore(state)
        assert restored is not None and restored.step == 20 and torch.equal(state["w"], _state(20)["w"])
    assert _complete(run) == [10, 20]
    shutil.rmtree(fast)
    assert _restored(run) == 20
