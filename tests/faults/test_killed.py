"""SIGKILL of each rank at each stage of a save. `python -m tests.faults.kill_matrix` does the same to stock DCP.

On the same path the checkpoint that was there before is there afterwards, or the new one is; on a fresh path the new
one is there, or a load says that nothing is, and the earlier checkpoint elsewhere is untouched. The rank that was not
killed is told, and the next save at that path works.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.format.metadata.roots import read_root
from dcp_nvcomp.format.names import save_id_of_copy
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import file_names

from .killing import (
    Case,
    Killed,
    cases,
    expected_outcome,
    may_succeed,
    outcome,
    run_case,
    save_earlier,
)
from .saves import loaded, save_next

ALL = [case for how in ("sync", "thread", "process", "staged") for case in cases("ours", how)]
FAST = {
    Case("ours", "sync", "overwrite", "local plan", 1),
    Case("ours", "sync", "overwrite", "encode, item 3", 0),
    Case("ours", "sync", "overwrite", "half of a block written", 1),
    Case("ours", "sync", "overwrite", "after all of the rank's files", 1),
    Case("ours", "sync", "fresh", "immutable copy published", 0),
    Case("ours", "sync", "overwrite", "before the rename", 0),
    Case("ours", "sync", "overwrite", "before the rename", 1),
    Case("ours", "sync", "fresh", "after the rename", 0),
    Case("ours", "sync", "overwrite", "`.metadata` published", 0),
    Case("ours", "sync", "overwrite", "one old file removed", 0),
    Case("ours", "thread", "overwrite", "after file 1", 1),
    Case("ours", "process", "overwrite", "before the fsync of file 2", 1),
    Case("ours", "staged", "overwrite", "encode, item 3", 1),
    Case("ours", "staged", "overwrite", "all staged, nothing written", 0),
    Case("ours", "staged", "fresh", "half of a block written", 1),
    Case("ours", "process", "overwrite", "one old file removed", 0),
}
assert FAST.issubset(ALL)


def _case(case: Case) -> Any:
    return pytest.param(case, id=str(case), marks=[] if case in FAST else [pytest.mark.slow])


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An earlier checkpoint of two ranks."""
    return save_earlier("ours", tmp_path_factory.mktemp("earlier"))


@pytest.mark.ci
@pytest.mark.parametrize("case", [_case(case) for case in ALL])
def test_killed(case: Case, earlier: Path, tmp_path: Path) -> None:
    killed = run_case(case, earlier, tmp_path)
    assert outcome(case, killed) == expected_outcome(case)
    _assert_told(case, killed)
    _assert_copies_whole(killed.checkpoint)
    if expected_outcome(case) == "old" and case.path == "fresh":
        replaced = set()
    else:
        replaced = read_root(open_filesystem(killed.checkpoint), ".metadata").names() - {".metadata"}
    save_next("ours", killed.checkpoint)
    assert loaded("ours", killed.checkpoint) == "next"
    assert not replaced & file_names(killed.checkpoint)


def _assert_copies_whole(path: Path) -> None:
    """Immutable copies are what `recover` goes by: none of them names a file that is gone."""
    names = file_names(path)
    for name in names:
        if save_id_of_copy(name) is not None:
            assert read_root(open_filesystem(path), name).names() <= names, name


def _assert_told(case: Case, killed: Killed) -> None:
    """The rank that was not killed, and with the process checkpointer both, raised; by what gloo, DCP or we say."""
    for rank, error in killed.errors.items():
        if not error:
            assert rank != case.victim and may_succeed(case), f"rank {rank} heard of nothing"
        else:
            last = [line for line in error.splitlines() if re.match(r"\S+(Error|Exception)\b", line)][-1]
            if rank != case.victim and may_succeed(case) and case.how == "process" and last.endswith("TimeoutError"):
                continue  # a broadcast of gloo's to the dead rank can hang; this group's limit is half an hour
            of_rank = r"(RuntimeError|dcp_nvcomp\.errors\.RankFailedError|torch\.distributed\.\S+(Error|Exception))\b"
            assert re.match(of_rank, last), error


def test_every_stage_is_there_for_every_rank() -> None:
    """No stage or rank is left out of the matrix but those that a fresh path does not have."""
    by_path = {path: [case for case in cases("ours", "sync") if case.path == path] for path in ("fresh", "overwrite")}
    assert {case.victim for case in by_path["fresh"]} == {0, 1}
    left_out = {case.stage for case in by_path["overwrite"]} - {case.stage for case in by_path["fresh"]}
    assert left_out == {"old immutable copy removed", "one old file removed"}
    assert len(by_path["overwrite"]) == 2 * len({case.stage for case in by_path["overwrite"]})
