"""The power goes at any moment of a save: then the old checkpoint loads, or the new one; once saved, only the new one.

The trace of a real save is replayed on a model of a disk that keeps no more than POSIX promises; see disk_model.py.
Each state that the model allows is made in a directory, and loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import errors
from tests.states import small_state

from .disk_model import Recorder, Step, Tree, crash_states, make_tree, read_tree
from .intercept import intercept_system_calls
from .small import save_in_order, what_loads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD, NEW = small_state(1), small_state(2)


@dataclass(frozen=True)
class Case:
    """A save."""

    path: str  # the checkpoint, below the root of the disk
    old: bool  # whether there is a checkpoint already
    options: dict[str, Any] = field(default_factory=dict)  # of the writer


CASES = {
    "fresh path, new parents": Case("a/b/c", False),
    "overwriting": Case("c", True),
    "not replacing": Case("c", False, {"overwrite": False}),
    "two files": Case("c", True, {"single_file_per_rank": False}),
    "not synced": Case("c", True, {"sync_files": False}),
}


@dataclass
class Recorded:
    """A save that was recorded: what was certain before, and what it did."""

    before: Tree
    steps: list[Step]


def record(case: Case, root: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    root.mkdir()
    if case.old:
        save_in_order(root / case.path, OLD)
    before, recorder = read_tree(root), Recorder(root)
    with monkeypatch.context() as patch:
        intercept_system_calls(patch.setattr, recorder)
        save_in_order(root / case.path, NEW, **case.options)
    assert what_loads(root / case.path, OLD, NEW) == 1
    return Recorded(before, recorder.steps)


def outcome(path: Path) -> int | str | None:
    """0 or 1 for the old or new state, None where there is no checkpoint, "error" where one can't be loaded."""
    try:
        return what_loads(path, OLD, NEW)
    except (errors.CheckpointError, CheckpointException):
        return "error"


@pytest.mark.parametrize("name", CASES)
def test_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    recorded = record(case, tmp_path / "disk", monkeypatch)
    assert {"create", "write", "fsync", "unlink" if case.old else "create"} <= {step.name for step in recorded.steps}
    found: dict[int | str | None, int] = {}
    for taken, tree in crash_states(recorded.before, recorded.steps):
        make_tree(tmp_path / "after", tree)
        now = outcome(tmp_path / "after" / case.path)
        found[now] = found.get(now, 0) + 1
        saved = taken == len(recorded.steps)
        if name == "not synced":  # promises less: what was reported as saved may be lost, but never be wrong
            continue
        where = f"after {taken} steps, the last of them {recorded.steps[max(taken - 1, 0)]}"
        assert now in ((1,) if saved else (0, 1) if case.old else (None, 1)), f"{now} loads {where}: {sorted(tree)}"
    print(f"{name}: {len(recorded.steps)} steps, {found}")
    assert 1 in found and (0 if case.old else None) in found
    if name == "not synced":
        assert "error" in found, "the model loses what was not synced"
