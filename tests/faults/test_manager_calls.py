"""Every call that changes a disk in a manager's life fails: ENOSPC, EROFS, EIO, once and from then on, in either tier.

The life: make a manager, restore, save in both tiers, prune, close. After each fault training goes on, or stops with an
error of ours; and the next job starts, and restores what the saves that were confirmed come to, bit for bit.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointError, CheckpointManager, Keep

from .intercept import WRITING, intercept_system_calls

STEPS = (10, 20, 30, 40)
NAMES = frozenset({"open", "write", "fsync", "makedirs", "link", "rename", "unlink"})
NUMBERS = {"ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EIO": errno.EIO}


def _state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(300, generator=generator), "step": step}


class Calls:
    """Counts the calls that change what is below a directory, and lets one of them fail, or all from it on."""

    def __init__(self, below: Path, at: int | None = None, number: int = 0, *, lasting: bool = False) -> None:
        self._below, self._at, self._number, self._lasting = f"{below}/", at, number, lasting
        self._lock = threading.Lock()
        self.count = 0

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "open" and args[1] & os.O_CREAT:
            name = "create"
        if name in WRITING | {"unlink"} and self._is_below(args[0]):
            with self._lock:
                at, self.count = self.count, self.count + 1
            if self._at is not None and (at == self._at or (self._lasting and at > self._at)):
                raise OSError(self._number, os.strerror(self._number))
        return None if name == "fsync" else call(*args, **kwargs)

    def _is_below(self, target: str | int) -> bool:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else target
        return f"{path}/".startswith(self._below)


@dataclass
class Life:
    """What became of a manager."""

    confirmed: int = 0  # the newest step whose save returned without an error, and whose future has none
    durable: int = 0  # the newest of these that it says are in the durable tier
    error: BaseException | None = None  # what ended training, if anything did
    began: bool = False  # whether it could be made, and restored
    refused: list[str] = field(default_factory=list)


def _live(place: Path) -> Life:
    life = Life()
    try:
        with _manager(place) as manager:
            manager.restore(_state(0))
            life.began = True
            for step in STEPS:
                save = manager.save(step, _state(step))
                if save.saved.exception() is None:
                    life.confirmed = step
                    life.durable = step if "durable" in save.tiers else life.durable
    except CheckpointError as error:
        life.error = error
    return life


def _manager(place: Path) -> CheckpointManager:
    return CheckpointManager(
        place / "run",
        every=20,
        fast=place / "fast",
        fast_every=10,
        fast_keep=1,
        keep=Keep(last=1),
        asynchronous=False,
        run_id="job",
        preemption_signals=(),
        thread_count=1,
    )


def _restored(place: Path) -> int:
    state = _state(0)
    with _manager(place) as manager:
        found = manager.restore(state)
    if found is None:
        return 0
    wanted = _state(found.step)
    assert torch.equal(state["w"], wanted["w"]) and state["step"] == found.step
    return found.step


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A run with a step in both tiers."""
    place = tmp_path / "place"
    with _manager(place) as manager:
        manager.save(5, _state(5), durable=True)
    shutil.copytree(place, tmp_path / "before")
    return place


def _trials(place: Path, tier: str, every: int) -> Iterator[int]:
    """Begin anew from the run that is there, for each call of a life."""
    before = place.parent / "before"
    _begin(before, place)
    counted = Calls(place / tier)
    with pytest.MonkeyPatch.context() as patch:
        intercept_system_calls(patch.setattr, counted, NAMES)
        life = _live(place)
    assert life.error is None and life.confirmed == STEPS[-1] and life.durable == STEPS[-1]
    assert counted.count > 30
    for at in range(0, counted.count, every):
        _begin(before, place)
        yield at


def _begin(before: Path, place: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(place)
    shutil.copytree(before, place)


CASES = [
    pytest.param(
        tier, kind, lasting, every, id=f"{tier}-{kind}-{'from then on' if lasting else 'once'}-{every}", marks=marks
    )
    for tier in ("fast", "run")
    for kind in NUMBERS
    for lasting in (False, True)
    for every, marks in ((1, [pytest.mark.slow]), *([(9, [])] if kind == "ENOSPC" else []))
]


@pytest.mark.ci
@pytest.mark.parametrize(("tier", "kind", "lasting", "every"), CASES)
def test_each_call(place: Path, tier: str, kind: str, lasting: bool, every: int) -> None:
    for at in _trials(place, tier, every):
        where = f"{kind} at call {at} in {tier}"
        calls = Calls(place / tier, at, NUMBERS[kind], lasting=lasting)
        with pytest.MonkeyPatch.context() as patch:
            intercept_system_calls(patch.setattr, calls, NAMES)
            life = _live(place)
        if tier == "fast":
            assert life.error is None, f"{where}: {life.error}"
            assert life.durable >= 40, f"{where}: a durable save was lost"
        found = _restored(place)
        assert found >= max(life.confirmed, 5), f"{where}: step {life.confirmed} was lost, {found} came back"
