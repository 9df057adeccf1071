"""The files of `.run` as people and accidents leave them: an error says what to do, or they count as not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_nvcomp import CheckpointManager, Keep, StorageError, save
from dcp_nvcomp.errors import CheckpointNotFoundError, UnsafePathError
from dcp_nvcomp.runs import prune_run
from dcp_nvcomp.runs.own_files import is_pinned, pin, read_abandoned, read_kept, unpin, write_kept
from dcp_nvcomp.storage.open import open_filesystem

BAD = {
    "empty": b"",
    "no JSON": b"\0\1",
    "not UTF-8": b'{"saves": "\xff"}',
    "deep": b"[" * 100_000,
    "deep and closed": b'{"saves": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "infinite": b'{"schema": 1, "saves": {}, "steps": 1e400, "damaged": [1e400]}',
    "infinite by name": b'{"schema": 1, "saves": {}, "steps": {"1": Infinity}, "damaged": [NaN]}',
    "a long number": b'{"schema": 1, "saves": {}, "steps": ' + b"1" * 5000 + b', "damaged": []}',
    "a long key": b'{"schema": 1, "saves": {"' + b"1" * 5000 + b'": []}, "steps": {"' + b"1" * 5000 + b'": []}}',
    "a list": b"[]",
    "null": b'{"saves": null, "steps": null}',
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_damaged_files(tmp_path: Path, data: bytes) -> None:
    own = open_filesystem(tmp_path)
    (tmp_path / "abandoned").write_bytes(data)
    with pytest.raises(StorageError, match="which steps the run has left behind, and is damaged: remove it"):
        read_abandoned(own)
    (tmp_path / "kept").write_bytes(data)
    assert read_kept(own) == {}


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for step in (1, 2):
        save({"w": torch.zeros(3)}, run / f"step-{step}", no_dist=True)
    (run / ".run").symlink_to(elsewhere)
    with pytest.raises(UnsafePathError):
        write_kept(open_filesystem(run / ".run"), {2: ("last 1",)})
    assert [saved.step for saved in prune_run(run, Keep(last=1)).removed] == [1]
    assert list(elsewhere.iterdir()) == []


def test_a_pin_goes_again_if_the_step_cannot_be_looked_at(tmp_path: Path) -> None:
    own = open_filesystem(tmp_path / ".run")

    def find_problem() -> str:
        assert is_pinned(own, 1)
        raise StorageError("gone")

    with pytest.raises(StorageError, match="gone"):
        pin(own, open_filesystem(tmp_path / "step-1"), 1, find_problem)
    assert not is_pinned(own, 1)
    pin(own, open_filesystem(tmp_path / "step-1"), 1, str)
    with pytest.raises(StorageError, match="gone"):
        pin(own, open_filesystem(tmp_path / "step-1"), 1, find_problem)
    assert is_pinned(own, 1), "someone needs it"
    with pytest.raises(CheckpointNotFoundError, match="can't be read now"):
        pin(own, open_filesystem(tmp_path / "step-1"), 1, lambda: "It can't be read now.")
    assert is_pinned(own, 1)
    unpin(own, 1)
    with pytest.raises(CheckpointNotFoundError):
        pin(own, open_filesystem(tmp_path / "step-1"), 1, lambda: "It can't be read now.")
    assert not is_pinned(own, 1)


def test_a_manager_says_which_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / ".run").mkdir()
    (tmp_path / ".run" / "abandoned").write_bytes(BAD["deep"])
    with pytest.raises(StorageError, match=r"abandoned'\)$"):
        CheckpointManager(tmp_path)
    (tmp_path / ".run" / "abandoned").unlink()
    CheckpointManager(tmp_path).close()
