"""Every system call of a small save and of a small load fails once: ENOSPC, EIO, EDQUOT, and everything after it too.

After each: the old checkpoint or the new one loads bit for bit, the error is one of ours, and nothing is left behind.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp import errors
from tests.checkpoints import file_names
from tests.states import same, small_state

from .intercept import POSIX_CALLS, WRITING, Fault, FaultyCalls, intercept_system_calls
from .small import Failure, failure_of, load_in_order, nothing_leaks, save_in_order, what_loads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD, NEW = small_state(1), small_state(2)
EVERYTHING = frozenset(POSIX_CALLS | {"create"})


@dataclass(frozen=True)
class Case:
    """One way to save."""

    old: bool  # whether there is a checkpoint already
    options: dict[str, Any]  # of the writer


CASES = {
    "fresh": Case(False, {}),
    "fresh, not replacing": Case(False, {"overwrite": False}),
    "overwriting": Case(True, {}),
    "two files": Case(True, {"single_file_per_rank": False}),
}

FAULTS: dict[str, Fault] = {
    "EIO": Fault(0, errno.EIO),
    "ENOSPC": Fault(0, errno.ENOSPC),
    "EDQUOT": Fault(0, errno.EDQUOT),
    "EIO though done": Fault(0, errno.EIO, done=True),
    "full from then on": Fault(0, errno.ENOSPC, lasting=WRITING),
    "dead from then on": Fault(0, errno.EIO, lasting=EVERYTHING),
    "cut short": Fault(0, 0),
}


class Warnings(logging.Handler):
    """Keeps what we said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith("dcp_nvcomp"):
            self.lines.append(record.getMessage())


class Trials:
    """Saves and loads over and over, each with a fault at another call."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.warnings = monkeypatch, Warnings()
        self.path = folder / "runs" / "c"
        self._old = folder / "old"
        save_in_order(self._old, OLD)

    def begin(self, *, old: bool) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)
        if old:
            shutil.copytree(self._old, self.path)
        self.warnings.lines.clear()

    def save(self, fault: Fault | None, options: dict[str, Any]) -> tuple[FaultyCalls, Failure | None]:
        return self._run(fault, lambda: save_in_order(self.path, NEW, **options))

    def load(self, fault: Fault | None) -> tuple[FaultyCalls, Failure | None]:
        return self._run(fault, self._load)

    def _load(self) -> None:
        assert same(load_in_order(self.path, OLD), OLD), "a load returned what was never saved"

    def _run(self, fault: Fault | None, work: Any) -> tuple[FaultyCalls, Failure | None]:
        calls = FaultyCalls(fault)
        with self._monkeypatch.context() as patch, nothing_leaks():
            # pytest's handlers would keep the errors that are logged, and with them all that their tracebacks hold
            patch.setattr(logging.getLogger(), "handlers", [self.warnings])
            intercept_system_calls(patch.setattr, calls)
            return calls, failure_of(work)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(tmp_path, monkeypatch)


def faults_of(name: str, count: int) -> Iterator[Fault]:
    model = FAULTS[name]
    for at in range(count):
        yield Fault(at, model.number, model.done, model.lasting)


# The rest differ in the number of the error, or in how often a step comes.
FAST = {
    *((case, "EIO") for case in CASES if case != "two files"),
    *(("overwriting", kind) for kind in list(FAULTS)[3:]),
}
SAVES = [
    pytest.param(CASES[case], kind, id=f"{case}-{kind}", marks=[] if (case, kind) in FAST else pytest.mark.slow)
    for case in CASES
    for kind in FAULTS
]


@pytest.mark.ci
@pytest.mark.parametrize(("case", "kind"), SAVES)
def test_save(trials: Trials, case: Case, kind: str) -> None:
    trials.begin(old=case.old)
    old_files = file_names(trials.path)
    calls, error = trials.save(None, case.options)
    assert error is None and what_loads(trials.path, OLD, NEW) == 1
    assert {"create", "write", "fsync", "makedirs" if not case.old else "unlink"} <= set(calls.names)
    for fault in faults_of(kind, len(calls.names)):
        trials.begin(old=case.old)
        made, error = trials.save(fault, case.options)
        where = f"{kind} at call {fault.at}, {made.names[fault.at]}"
        found = what_loads(trials.path, OLD, NEW)
        names = file_names(trials.path)
        if error is None:
            assert found == 1, where
            harmless = kind == "cut short" or made.names[fault.at] in ("close", *(["unlink"] if fault.done else []))
            assert trials.warnings.lines or harmless, f"{where}: nobody was told"
            left = (names & old_files) - {".metadata"}
            assert not left or trials.warnings.lines, f"{where}: {left} left without a word"
            continue
        assert kind != "cut short", where
        assert error.kind is errors.StorageError and error.number == fault.number, f"{where}: {error}"
        assert error.path is not None and str(trials.path.parent) in error.path, f"{where}: {error}"
        if kind == "dead from then on":
            assert found in ((0, 1) if case.old else (None, 1)), where
        else:
            assert found == (0 if case.old else None), where
            # whether a network file system did what it did not confirm is not known, so the new files stay
            unsure = fault.number == errno.EIO and calls.names[fault.at] in ("rename", "link")
            assert names == old_files or (unsure and fault.at == _last(calls.names, "rename", "link")), (
                f"{where}: left behind"
            )


def _last(names: list[str], *wanted: str) -> int:
    return max(at for at, name in enumerate(names) if name in wanted)


@pytest.mark.parametrize("kind", FAULTS)
def test_load(trials: Trials, kind: str) -> None:
    trials.begin(old=True)
    calls, error = trials.load(None)
    assert error is None and {"open", "preadv", "pread", "stat", "fstat", "close"} <= set(calls.names)
    for fault in faults_of(kind, len(calls.names)):
        calls, error = trials.load(fault)
        where = f"{kind} at call {fault.at}, {calls.names[fault.at]}"
        if kind == "cut short":
            assert error is None, f"{where}: {error}"
        elif error is not None:
            assert os.strerror(fault.number) in error.text and str(trials.path) in error.text, f"{where}: {error}"
            assert error.kind is errors.StorageError, f"{where}: {error}"
        else:  # of what was only read
            assert calls.names[fault.at] == "close", where
        assert what_loads(trials.path, OLD, NEW) == 0, where


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE, errno.EACCES])
def test_load_from_files_that_vanish(trials: Trials, error: int) -> None:
    """An answer that also has a meaning of its own is never taken for an empty checkpoint."""
    trials.begin(old=True)
    calls, _ = trials.load(None)
    for at in range(len(calls.names)):
        calls, raised = trials.load(Fault(at, error))
        where = f"call {at}, {calls.names[at]}: {raised}"
        assert raised is None or issubclass(raised.kind, errors.CheckpointError), where
