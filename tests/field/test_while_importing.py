"""Saves by a module that is still being imported, as a script is that another one imports.

A pickle imports the modules of its classes, and waits for the lock of one that is being imported: whose thread must not
be the one that waits for the save.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.staging import staged_by
from dcp_nvcomp import async_save, load
from dcp_nvcomp.errors import CheckpointError

SCRIPT = """
import collections, sys, torch
from benchmarks.staging import staged_by
from dcp_nvcomp import CheckpointManager, async_save, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

Pair = collections.namedtuple("Pair", "a b")


class Own(DefaultSavePlanner):
    pass


state = {{"pair": Pair(torch.ones(2), 3), "n": {{"pair": Pair(1, 2)}}}}
for number in range(3):
    path = f"{path}/{{number}}"
    {save}
"""
SAVES = {
    "async": "async_save(state, path, no_dist=True).upload_completion.result()",
    "nothing": (
        "saving = async_save(state, path, no_dist=True, wait='nothing'); saving.staging_completion.result(); "
        "saving.upload_completion.result()"
    ),
    "copied": "with staged_by('copy'): async_save(state, path, no_dist=True).upload_completion.result()",
    "planner": "async_save(state, path, no_dist=True, planner=Own()).upload_completion.result()",
    "manager": (
        "manager = CheckpointManager(path, every=1, preemption_signals=()); manager.save(1, state); manager.close()"
    ),
}


@pytest.mark.parametrize("how", SAVES)
def test_a_save_does_not_wait_for_its_own_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    name = f"script_{how}"
    (tmp_path / f"{name}.py").write_text(SCRIPT.format(path=tmp_path, save=SAVES[how]))
    monkeypatch.syspath_prepend(str(tmp_path))  # type: ignore[no-untyped-call]
    thread = threading.Thread(target=importlib.import_module, args=(name,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    found: dict[str, Any] = {"pair": None, "n": {"pair": None}}
    load(found, tmp_path / "2" / ("step-1" if how == "manager" else ""), no_dist=True)
    assert found["pair"].b == 3 and torch.equal(found["pair"].a, torch.ones(2)) and found["n"]["pair"] == (1, 2)


class Changing:
    """An object that says which thread pickles it."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.error: BaseException | None = None

    def __reduce__(self) -> Any:
        self.threads.append(threading.get_ident())
        if self.error is not None:
            raise self.error
        return Changing, ()


@pytest.mark.parametrize("wait", ["staged", "nothing"])
@pytest.mark.parametrize("staging", ["encode", "copy"])
def test_objects_are_pickled_by_the_caller(tmp_path: Path, wait: Any, staging: Any) -> None:
    value = Changing()
    with staged_by(staging):
        for number in range(3):
            async_save({"x": value}, tmp_path / f"{number}", no_dist=True, wait=wait).upload_completion.result()
        assert set(value.threads) == {threading.get_ident()}
        value.error = ValueError("not today")
        saving = async_save({"x": value}, tmp_path / "4", no_dist=True, wait=wait)
    with pytest.raises(CheckpointError, match=r"can't be pickled.*ValueError: not today.*'x'"):
        saving.upload_completion.result()


def test_an_interrupt_while_an_object_is_pickled_fails_the_save(tmp_path: Path) -> None:
    value = Changing()
    value.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        async_save({"x": value, "y": Changing()}, tmp_path, no_dist=True)
    value.error = None
    with pytest.raises(CheckpointError):  # an earlier save failed
        async_save({"x": value}, tmp_path, no_dist=True)
    assert not (tmp_path / ".metadata").exists()
    async_save({"x": value}, tmp_path, no_dist=True).upload_completion.result()
