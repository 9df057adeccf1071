"""Steps that share files, in random histories: saved, saved again, pruned, cleaned, made whole, lost, and killed.

Whatever happens, each checkpoint that is there has the values that were saved. A model knows only these. `python -m
tests.runs.test_shared_histories 10000` runs as many histories, each with a seed that it names if it fails.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointNotFoundError, Keep, load, save
from dcp_nvcomp.errors import CheckpointReplacedError
from dcp_nvcomp.format.metadata.roots import read_current
from dcp_nvcomp.format.names import METADATA_NAME, REMOVING
from dcp_nvcomp.runs import prune_run
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.storage.open import open_filesystem
from dcp_nvcomp.tools import clean, consolidate, recover
from tests.effort import THOROUGH
from tests.faults.intercept import POSIX_CALLS, intercept_system_calls

Values = dict[str, int]

KEYS = ("base", "head", "moment")
OPERATIONS = ("save", "save", "save", "save", "save again", "prune", "clean", "consolidate", "lose", "time", "restart")


class Killed(BaseException):
    """The process ends here."""


def _state(values: Values) -> dict[str, torch.Tensor]:
    return {key: torch.full((130, 128), value, dtype=torch.int32) for key, value in values.items()}


class History:
    def __init__(self, run: Path, seed: int) -> None:
        self.run, self.random = run, random.Random(seed)
        self.values: Values = dict.fromkeys(KEYS, 0)
        self.saved: dict[str, Values] = {}  # by directory
        self.said: list[str] = []
        self.shared = self.killed = 0
        self._count = 0

    def go(self, length: int) -> None:
        for _ in range(length):
            operation = self.random.choice(OPERATIONS)
            self.said.append(operation)
            getattr(self, "_" + operation.replace(" ", "_"))()
            self._check()

    @property
    def _there(self) -> list[str]:
        """The checkpoints that are there, the oldest first."""
        names = [path.name for path in self.run.iterdir() if (path / METADATA_NAME).exists()]
        return sorted(names, key=lambda name: int(name.removeprefix("step-")))

    @contextlib.contextmanager
    def _perhaps_killed(self) -> Iterator[None]:
        """Let the process die at one of the next calls, in some of the histories; nothing happens after that one."""
        at = self.random.randrange(1, 90) if self.random.random() < 0.45 else sys.maxsize
        count, done = 0, self.random.random() < 0.5

        def hook(name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if name == "close" or count < at:
                return call(*args, **kwargs)
            if count == at and done and name in ("rename", "unlink", "link", "makedirs", "write"):
                call(*args, **kwargs)
            raise Killed

        with pytest.MonkeyPatch.context() as patch:
            intercept_system_calls(patch.setattr, hook, POSIX_CALLS | {"rmdir"})
            try:
                yield
            except (Killed, AssertionError) as error:
                if count < at:
                    raise
                self.killed += 1
                self.said[-1] += f" killed at {at} ({type(error).__name__})"
                forget_all()

    def _save(self) -> None:
        self._count += 1
        self._save_to(f"step-{self._count}")

    def _save_again(self) -> None:
        folders = sorted(path.name for path in self.run.glob("step-*"))  # also what a removal left
        if folders:
            self._save_to(self.random.choice(folders))

    def _save_to(self, name: str) -> None:
        for key in KEYS[1:] if self.random.random() < 0.8 else KEYS:
            if self.random.random() < 0.5:
                self.values[key] = self.random.randrange(4)  # perhaps one that it had before
        others = [one for one in self._there if one != name]
        choices: list[Any] = [(), others[-1:], others[-1:], self.random.sample(others, len(others))]
        reference = [str(self.run / one) for one in self.random.choice(choices)]
        before = self.saved[name] if name in self._there else None
        self.said[-1] += f" to {name} with {[Path(one).name for one in reference]}"
        self.saved[name] = {}
        with self._perhaps_killed():
            stats = save(_state(self.values), self.run / name, no_dist=True, reference=reference, **_QUICK)
            self.saved[name] = dict(self.values)
            self.shared += "shared" in stats.by_codec
            assert not (self.run / name / REMOVING).exists(), "the next start would remove it"
        if not self.saved[name]:  # killed: it is there, or what was before
            found = _loaded(self.run / name)
            assert found in (None, before, self.values) and (found is not None or before is None)
            self.saved[name] = found or {}

    def _prune(self) -> None:
        last = self.random.choice((1, 2, 3))
        there = [one for one in self._there if not (self.run / one / REMOVING).exists()]
        self.said[-1] += f" last {last}"
        with self._perhaps_killed(), contextlib.suppress(CheckpointNotFoundError):
            prune_run(self.run, Keep(last=last))
        assert set(self._there) >= set(there[-last:])

    def _clean(self) -> None:
        folders = sorted(path for path in self.run.iterdir() if path.is_dir() and not path.name.startswith("."))
        if folders:
            with self._perhaps_killed(), contextlib.suppress(CheckpointNotFoundError):
                clean(self.random.choice(folders), older_than_seconds=3600.0)

    def _consolidate(self) -> None:
        if self._there:
            with self._perhaps_killed():
                consolidate(self.run / self.random.choice(self._there))

    def _lose(self) -> None:
        """Lose the metadata of one, go on, and recover it."""
        there = [one for one in self._there if not (self.run / one / REMOVING).exists()]
        if not there:
            return
        path = self.run / self.random.choice(there)
        save_id = read_current(open_filesystem(path)).save_id
        self.said[-1] += f" {path.name}"
        (path / METADATA_NAME).unlink()
        for do in self.random.sample([self._time, self._prune, self._clean], self.random.randrange(4)):
            do()
        try:
            found = recover(path, save_id=save_id)
        except CheckpointReplacedError:
            prune_run(self.run, Keep(last=99))
            found = recover(path, save_id=save_id)
        assert found.outcome == "recovered", found
        forget_all()

    def _time(self) -> None:
        """Let two hours pass."""
        then = time.time() - 7200.0
        for path in self.run.rglob("*"):
            os.utime(path, (then, then))

    def _restart(self) -> None:
        forget_all()

    def _check(self) -> None:
        for name in self._there:
            assert _loaded(self.run / name) == self.saved[name], name


_QUICK: dict[str, Any] = {"thread_count": 1, "sync_files": False, "codec": "none"}


def _loaded(path: Path) -> Values | None:
    found = _state(dict.fromkeys(KEYS, -1))
    try:
        load(found, path, no_dist=True, thread_count=1)
    except CheckpointNotFoundError:
        return None
    assert all((tensor == tensor[0, 0]).all() for tensor in found.values())
    return {key: int(tensor[0, 0]) for key, tensor in found.items()}


def _run(seed: int, where: Path) -> History:
    run = where / f"run-{seed}"
    run.mkdir()
    history = History(run, seed)
    try:
        history.go(14)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error!r} after {'; '.join(history.said)}") from error
    finally:
        shutil.rmtree(run)
        forget_all()
    return history


@pytest.mark.parametrize("part", range(4))
def test_each_checkpoint_keeps_its_values_whatever_happens(tmp_path: Path, part: int) -> None:
    count = 300 if THOROUGH else 6
    histories = [_run(seed, tmp_path) for seed in range(part * count, (part + 1) * count)]
    assert sum(history.shared for history in histories) > count
    assert sum(history.killed for history in histories) > count / 2


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for number in range(int(sys.argv[1])):
            _run(int(time.time() * 1e6), Path(made))
            if number % 100 == 99:
                print(number + 1, "histories", flush=True)
