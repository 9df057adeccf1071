"""A save to storage that has only what fsspec asks of it, every call of which fails in turn, or is the last one.

After each: the earlier checkpoint loads, or the new one does. If the storage can't replace a file in one step, a load
may say `recover` instead, which brings one of the two back.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp import NvcompReader, errors, tools
from dcp_nvcomp.maintenance.recovery import AMBIGUOUS, RECOVERED
from dcp_nvcomp.storage import open as storage_open
from tests.checkpoints import file_names, save_stock
from tests.states import same, small_state
from tests.storage.plain import ATOMIC, PROTOCOLS, VagueError, carry_out, hooked

from .intercept import Counted
from .small import Failure, failure_of, load_in_order, nothing_leaks, save_in_order, what_loads

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.*can't replace a file in one step"),
]

OLD, NEW = small_state(1), small_state(2)


@dataclass(frozen=True)
class Fault:
    """A fault of one call."""

    at: int  # which one, counted from 0
    number: int = errno.EIO  # the errno of the error that it raises; 0 for an exception that is no OSError
    done: bool = False  # whether it takes effect nevertheless
    halfway: bool = False  # whether a write does half of it
    lasting: bool = False


class Faulty(Counted):
    """A hook under which one call fails, or all from one on."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self._fault = fault

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        fault = self._fault
        if fault is None or not (at == fault.at or (fault.lasting and at > fault.at)):
            return call(*arguments)
        if fault.halfway and name == "write" and at == fault.at:
            call(arguments[0][: len(arguments[0]) // 2])
        elif name == "close" or (fault.done and at == fault.at):
            made = call(*arguments)
            if name in ("create", "open to read"):
                made.forget()
        raise OSError(fault.number, os.strerror(fault.number)) if fault.number else VagueError("broken")


FAULTS = {
    "not done": Fault(0),
    "done": Fault(0, done=True),
    "full": Fault(0, errno.ENOSPC, halfway=True),
    "no errno": Fault(0, 0),
    "no errno, done": Fault(0, 0, done=True),
    "gone": Fault(0, halfway=True, lasting=True),
    "gone, done": Fault(0, done=True, lasting=True),
}


def begin(folder: Path, url: str, *, old: bool) -> None:
    if folder.exists():
        for file in folder.iterdir():
            file.unlink()
    if old:
        save_in_order(url, OLD)


def reading_fails_with(url: str) -> str:
    with pytest.raises(errors.CheckpointError) as caught:
        NvcompReader(url).read_metadata()
    return str(caught.value)


def check(url: str, *, old: bool, where: str, lasting: bool = True) -> int | None:
    """Which checkpoint loads, if need be after a recovery."""
    try:
        found = what_loads(url, OLD, NEW)
        if found is not None or not old:
            return found
        problem = reading_fails_with(url)
    except errors.CheckpointError as error:
        problem = str(error)
    whole = (
        (*ATOMIC, "plain-object")
        if lasting
        else (*ATOMIC, "plain-object", "plain-refusing", "plain-silent", "plain-vague")
    )
    assert not url.startswith(tuple(f"{protocol}://" for protocol in whole)), f"{where}: {problem}"
    assert "dcp-nvcomp recover" in problem, f"{where}: {problem}"
    done = tools.recover(url)
    if done.outcome == AMBIGUOUS:
        complete = [one.save_id for one in done.candidates if one.is_complete]
        assert len(complete) == 2, f"{where}: {done}"
        done = tools.recover(url, save_id=complete[-1])
    assert done.outcome == RECOVERED, f"{where}: {done}"
    found = what_loads(url, OLD, NEW)
    assert found is not None, where
    return found


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's handlers would keep the errors that are logged, and with them all that their tracebacks hold
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])


CASES = {"overwriting": (True, True), "fresh": (False, True), "not replacing": (False, False)}
# In the others nothing can be lost, or the same things are said by another exception.
FAST = {*(("overwriting", kind) for kind in ("not done", "done", "full", "gone")), ("not replacing", "gone")}
TRIALS = [
    pytest.param(*CASES[case], kind, id=f"{case}-{kind}", marks=[] if (case, kind) in FAST else pytest.mark.slow)
    for case in CASES
    for kind in FAULTS
]


@pytest.fixture(autouse=True)
def object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """`plain-object://` is opened like memory:// and other object stores."""
    monkeypatch.setattr(storage_open, "_OBJECT_STORES", (*storage_open._OBJECT_STORES, "plain-object"))


@pytest.mark.ci
@pytest.mark.parametrize(("old", "overwrite", "kind"), TRIALS)
@pytest.mark.parametrize("protocol", [*PROTOCOLS, "plain-object"])
def test_every_call_fails(protocol: str, old: bool, overwrite: bool, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    url = f"{protocol}://{folder}"

    def trial(fault: Fault | None) -> tuple[list[str], Failure | None]:
        begin(folder, url, old=old)
        hook = Faulty(fault)
        with nothing_leaks(), hooked(hook):
            return hook.names, failure_of(lambda: save_in_order(url, NEW, overwrite=overwrite))

    names, failure = trial(None)
    assert failure is None and what_loads(url, OLD, NEW) == 1
    model = FAULTS[kind]
    for at in range(len(names)):
        made, failure = trial(Fault(at, model.number, model.done, model.halfway, model.lasting))
        where = f"{kind} at call {at}, {made[at]}: {failure}"
        found = check(url, old=old, where=where, lasting=model.lasting)
        if failure is None:
            assert found == 1, where
        else:
            assert issubclass(failure.kind, errors.CheckpointError), where
            assert old <= (found is not None), where
            if protocol == "plain-object" and kind == "not done":
                assert failure.kind is errors.StorageError and failure.number == errno.EIO, where
                assert failure.path is not None and url in failure.path, where
                assert found == (0 if old else None), where


def test_every_call_of_a_load_fails(tmp_path: Path) -> None:
    url = f"plain-object://{tmp_path}/c"
    save_in_order(url, OLD)
    hook = Faulty()

    def load() -> None:
        assert same(load_in_order(url, OLD), OLD), "a load returned what was never saved"

    with hooked(hook):
        load()
    for at in range(len(hook.names)):
        with nothing_leaks(), hooked(Faulty(Fault(at))):
            failure = failure_of(load)
        where = f"call {at}, {hook.names[at]}: {failure}"
        assert failure is not None or hook.names[at] == "close", where
        if failure is not None:
            assert os.strerror(errno.EIO) in failure.text and url in failure.text, where
            assert failure.kind is errors.StorageError and failure.number == errno.EIO, where
        assert what_loads(url, OLD, NEW) == 0


class Killing(Counted):
    """A hook under which the process kills itself at a call, halfway if that is a write."""

    def __init__(self, fatal: int) -> None:
        super().__init__()
        self._fatal = fatal

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        if at == self._fatal:
            if name == "write":
                call(arguments[0][: len(arguments[0]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)


def _save_until_killed(url: str, at: int) -> None:
    warnings.simplefilter("ignore")
    with hooked(Killing(at)):
        save_in_order(url, NEW)


_KILLED_IN_CI = ("plain", "plain-vague", "plain-moving")


@pytest.mark.ci
@pytest.mark.parametrize(
    "protocol", [pytest.param(one, marks=() if one in _KILLED_IN_CI else pytest.mark.slow) for one in PROTOCOLS]
)
def test_killed_while_it_publishes(protocol: str, tmp_path: Path) -> None:
    """A process that is really killed: at each call from the first one for metadata on."""
    folder = tmp_path / "c"
    url = f"{protocol}://{folder}"
    begin(folder, url, old=True)
    hook = Faulty()
    with hooked(hook):
        save_in_order(url, NEW)
    first = hook.names.index("close")  # of the data file
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.checkpoint", "fsspec.implementations.local", __name__])
    found = set()
    for at in range(first, len(hook.names)):
        begin(folder, url, old=True)
        child = context.Process(target=_save_until_killed, args=(url, at))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, f"call {at}, {hook.names[at]}"
        found.add(check(url, old=True, where=f"killed at call {at}, {hook.names[at]}"))
    assert found == {0, 1}


MOVES = ("mv", "rename", "replace", "posix_rename")
CAN_MOVE = [protocol for protocol in PROTOCOLS if protocol != "plain"]


class Unmovable:
    """A hook under which moves fail by an error without errno, and without any effect."""

    def __init__(self, target: str, *, times: int = 1_000_000) -> None:
        self._target, self._left = target, times

    def __call__(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if name in MOVES and arguments[1].endswith(self._target) and self._left:
            self._left -= 1
            raise VagueError("connection reset")
        return carry_out(name, call, *arguments)


@pytest.mark.parametrize("times", [1, 2, 3, 1_000_000])
@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("protocol", [protocol for protocol in CAN_MOVE if protocol != "plain-vague"])
def test_an_error_of_unknown_cause_moves_nothing_aside(protocol: str, stock: bool, times: int, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    url = f"{protocol}://{folder}"
    save_stock(folder, OLD) if stock else save_in_order(url, OLD)
    refuses = protocol in ("plain-refusing", "plain-silent")
    with warnings.catch_warnings(record=True) as caught, hooked(Unmovable("/.metadata", times=times)):
        warnings.simplefilter("always")
        failure = failure_of(lambda: save_in_order(url, NEW))
    warned = any("can't replace a file in one step" in str(one.message) for one in caught)
    assert what_loads(url, OLD, NEW) == (1 if failure is None else 0)
    assert (failure is None) == (times == 1)
    assert warned == (refuses and times == 1)
    assert [name for name in file_names(folder) if name.endswith(".tmp")] == []


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_refusal_without_a_reason_and_errors_of_unknown_cause(times: int, tmp_path: Path) -> None:
    """Moves onto `.metadata` fail also after the old one was moved aside: it is moved back."""
    url = f"plain-vague://{tmp_path}/c"
    save_in_order(url, OLD)
    with hooked(Unmovable("/.metadata", times=2 + times)):
        failure = failure_of(lambda: save_in_order(url, NEW))
    assert failure is not None
    assert what_loads(url, OLD, NEW) == 0


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("protocol", ["plain-refusing", "plain-silent", "plain-vague"])
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint of stock DCP:UserWarning")
def test_what_was_moved_aside_can_not_be_moved_back(protocol: str, stock: bool, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    url = f"{protocol}://{folder}"
    save_stock(folder, OLD) if stock else save_in_order(url, OLD)
    old = file_names(folder)

    def hook(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if name == "mv" and arguments[1].endswith("/.metadata") and not (folder / ".metadata").exists():
            raise FileExistsError(errno.EEXIST, "the server is confused")
        return carry_out(name, call, *arguments)

    with hooked(hook):
        failure = failure_of(lambda: save_in_order(url, NEW))
    (aside,) = [name for name in file_names(folder) if name.endswith(".tmp")]
    assert failure is not None
    assert aside in failure.text and "dcp-nvcomp recover" in failure.text
    new = file_names(folder) - old - {aside}
    assert len(new) == 2, "the new save's data file and its copy are kept"
    assert old - {".metadata"} <= file_names(folder)
    (folder / aside).rename(folder / ".metadata")
    assert what_loads(url, OLD, NEW) == 0


@pytest.mark.parametrize("protocol", CAN_MOVE)
def test_a_server_that_can_not_move(protocol: str, tmp_path: Path) -> None:
    """As SFTP without posix-rename: the client has a method, but no move ever works."""
    url = f"{protocol}://{tmp_path}/c"
    with warnings.catch_warnings(record=True) as caught, hooked(Unmovable("")):
        warnings.simplefilter("always")
        save_in_order(url, OLD)
        assert what_loads(url, OLD, NEW) == 0
        assert not any("can't replace a file" in str(one.message) for one in caught)
        save_in_order(url, NEW)
        assert what_loads(url, OLD, NEW) == 1
    assert sum("can't replace a file" in str(one.message) for one in caught) == 1
    assert [name for name in file_names(tmp_path / "c") if name.endswith(".tmp")] == []


@pytest.mark.parametrize("nbytes", [0, 1, 100, -1])
def test_a_torn_metadata_file_says_recover(nbytes: int, tmp_path: Path) -> None:
    save_in_order(tmp_path, OLD)
    torn = (tmp_path / ".metadata").read_bytes()[:nbytes]
    (tmp_path / ".metadata").write_bytes(torn)
    with pytest.raises(errors.MetadataError, match="left a copy of its metadata here: try `dcp-nvcomp recover`"):
        NvcompReader(tmp_path).read_metadata()
    assert tools.recover(tmp_path).outcome == RECOVERED
    assert what_loads(tmp_path, OLD, NEW) == 0
