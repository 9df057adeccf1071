"""The same as test_every_call.py for storage that fsspec reaches: every call of its client fails once."""

from __future__ import annotations

import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

from dcp_nvcomp import errors
from dcp_nvcomp.loading import reader
from dcp_nvcomp.saving import rank_save
from dcp_nvcomp.storage.fsspec_files import FsspecFilesystem
from tests.states import same, small_state

from .intercept import Counted, Intercepted
from .small import Failure, failure_of, load_in_order, nothing_leaks, save_in_order, what_loads

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

OLD, NEW = small_state(1), small_state(2)

# What a save and a load ask of fsspec's client, and of the files that it opens.
CLIENT_CALLS = frozenset({"open", "pipe_file", "cat_file", "info", "ls", "rm_file", "makedirs"})
FILE_CALLS = frozenset({"write", "close"})
# Carried out, and then the reply is lost: what can't be taken back.
WITH_REPLIES = frozenset({"pipe_file", "rm_file", "close", "write"})


class FaultyClient(Counted):
    """A hook that lets one call of a client fail: before it is done, or after, as if its reply was lost."""

    def __init__(self, at: int | None = None, *, done: bool = False) -> None:
        super().__init__()
        self._at, self._done = at, done

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if at == self._at:
            if self._done and name in WITH_REPLIES:
                call(*args, **kwargs)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        result = call(*args, **kwargs)
        return Intercepted(result, FILE_CALLS, self) if name == "open" else result


@dataclass(frozen=True)
class Place:
    """The place of a checkpoint: a path or URL, and how its filesystem is opened."""

    path: str
    opened: Callable[[str], FsspecFilesystem]

    def names(self) -> list[str]:
        return self.opened(self.path).list_names()


def _open(path: str) -> FsspecFilesystem:
    fs, root = fsspec.url_to_fs(path)
    return FsspecFilesystem(path, fs, root, options={}, part_nbytes=16 << 20, is_object_store="://" in path)


@pytest.fixture(params=["memory", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":  # a path would take the other implementation
        yield Place(str(tmp_path / "run"), _open)
        return
    name = uuid.uuid4().hex
    yield Place(f"memory://{name}/c", _open)
    store = fsspec.filesystem("memory")
    if store.exists(f"/{name}"):
        store.rm(f"/{name}", recursive=True)


class Trials:
    """Saves and loads with a client that fails at a chosen call."""

    def __init__(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._monkeypatch = place, monkeypatch
        self._hook: FaultyClient | None = None
        for module in (rank_save, reader):
            monkeypatch.setattr(module, "open_filesystem", self._open)

    def _open(self, path: str, **_: Any) -> FsspecFilesystem:
        filesystem = self.place.opened(path)
        if self._hook is not None:
            filesystem._fs = Intercepted(filesystem._fs, CLIENT_CALLS, self._hook)
        return filesystem

    def run(self, hook: FaultyClient, work: Callable[[], object]) -> Failure | None:
        self._hook = hook
        try:
            with self._monkeypatch.context() as patch, nothing_leaks():
                patch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
                return failure_of(work)
        finally:
            self._hook = None

    def begin(self, *, old: bool) -> None:
        filesystem = self.place.opened(self.place.path)
        filesystem.remove(filesystem.list_names())
        if old:
            save_in_order(self.place.path, OLD)


@pytest.fixture
def trials(place: Place, monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(place, monkeypatch)


@pytest.mark.parametrize("done", [False, True], ids=["not done", "reply lost"])
@pytest.mark.parametrize(
    ("old", "overwrite"), [(True, True), (False, True), (False, False)], ids=["overwriting", "fresh", "not replacing"]
)
def test_save(trials: Trials, old: bool, overwrite: bool, done: bool) -> None:
    path = trials.place.path
    trials.begin(old=old)
    hook = FaultyClient()
    assert trials.run(hook, lambda: save_in_order(path, NEW, overwrite=overwrite)) is None
    assert {"open", "pipe_file", "info", "write", "close"} <= set(hook.names)
    for at in range(len(hook.names)):
        trials.begin(old=old)
        before = set(trials.place.names())
        hook = FaultyClient(at, done=done)
        failure = trials.run(hook, lambda: save_in_order(path, NEW, overwrite=overwrite))
        where = f"call {at}, {hook.names[at]}"
        found = what_loads(path, OLD, NEW)
        if failure is None:
            assert found == 1, where
            continue
        assert failure.kind is errors.StorageError and failure.number == errno.EIO, f"{where}: {failure}"
        assert failure.path is not None and path.rstrip("/") in failure.path, f"{where}: {failure}"
        assert found == (0 if old else None), where
        # whether the store did what it did not confirm is not known, so the new files stay
        unsure = hook.names[at] == "pipe_file" and hook.names.count("pipe_file") == 2
        assert set(trials.place.names()) == before or unsure, f"{where}: left behind"


def test_load(trials: Trials) -> None:
    path = trials.place.path
    trials.begin(old=True)
    hook = FaultyClient()

    def load() -> None:
        assert same(load_in_order(path, OLD), OLD), "a load returned what was never saved"

    assert trials.run(hook, load) is None and {"info", "cat_file"} <= set(hook.names)
    raised = 0
    for at in range(len(hook.names)):
        hook = FaultyClient(at)
        failure = trials.run(hook, load)
        assert failure is not None, f"call {at}"
        raised += 1
        if "metadata read failed" in failure.text:  # DCP's words around ours
            assert os.strerror(errno.EIO) in failure.text and path in failure.text, f"call {at}: {failure}"
        else:
            assert failure.kind is errors.StorageError and failure.number == errno.EIO, f"call {at}: {failure}"
            assert failure.path is not None and path in failure.path
        assert what_loads(path, OLD, NEW) == 0
    assert raised
