"""Named failpoints: the places in a save where a test ends a process, ours and stock DCP's side by side.

A stage names a moment of a save. Each of the two writers has a seam for it, a function that the test process wraps:
before, after or in the middle of its n-th call the process is killed. Where a writer has no such moment there is no
seam. `KillingPlanner` arms a stage in whatever process the save runs in, a checkpointer's child process too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import signal
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

Counts = Callable[[tuple[Any, ...]], bool]


def _every(arguments: tuple[Any, ...]) -> bool:
    return True


def in_a_file(arguments: tuple[Any, ...]) -> bool:
    """A call of `os.fsync` for a plain file, not for a directory."""
    return stat.S_ISREG(os.fstat(arguments[0]).st_mode)


def _of_a_directory(arguments: tuple[Any, ...]) -> bool:
    return stat.S_ISDIR(os.fstat(arguments[0]).st_mode)


def of_metadata(arguments: tuple[Any, ...]) -> bool:
    """A call of `publish` for `.metadata`."""
    return os.path.basename(arguments[1]) == ".metadata"


def of_the_copy(arguments: tuple[Any, ...]) -> bool:
    """A call of `publish` for the immutable copy of `.metadata`."""
    return arguments[1].startswith("__") and arguments[1].endswith(".metadata")


def _of_a_block(arguments: tuple[Any, ...]) -> bool:
    return memoryview(arguments[1]).nbytes >= 1000


def _of_a_data_file(arguments: tuple[Any, ...]) -> bool:
    return str(arguments[0]).endswith(".distcp")


def _of_an_immutable_copy(arguments: tuple[Any, ...]) -> bool:
    name = os.path.basename(arguments[0])
    return name.startswith("__") and name.endswith(".metadata")


def _of_the_temporary(arguments: tuple[Any, ...]) -> bool:
    return str(arguments[0]).endswith(".metadata.tmp")


@dataclass(frozen=True)
class Seam:
    """A function of the writer, and when the process ends in it."""

    owner: str  # a module, or `module:class`
    name: str  # the function's name in its owner
    when: str  # "before", "after", or "halfway": when it has had half of the bytes that are its last argument
    nth: int = 1  # the how manyeth call that counts
    counts: Counts = _every  # which calls count, by their positional arguments
    since: Seam | None = None  # a call before which none counts; its `when` and `nth` mean nothing

    def arm(self, strike: Callable[[], None]) -> Callable[[], None]:
        """Let the n-th call from now on strike; return what puts the function back."""
        if self.since is not None:
            later = Seam(self.owner, self.name, self.when, self.nth, self.counts)
            begin = Seam(self.since.owner, self.since.name, "before", 1, self.since.counts)
            undo = contextlib.ExitStack()

            def begin_to_count() -> None:
                undo.callback(later.arm(strike))

            undo.callback(begin.arm(begin_to_count))
            return undo.close
        module, _, class_name = self.owner.partition(":")
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, class_name) if class_name else owner
        real = getattr(owner, self.name)
        lock, calls = threading.Lock(), [0]

        @functools.wraps(real)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            with lock:
                calls[0] += self.counts(arguments)
                strikes = self.counts(arguments) and calls[0] == self.nth
            if strikes and self.when == "before":
                strike()
            if strikes and self.when == "halfway":
                data = memoryview(arguments[-1]).cast("B")
                real(*arguments[:-1], data[: len(data) // 2])
                strike()  # where it was the other rank that was killed, this one goes on
                return real(*arguments[:-1], data[len(data) // 2 :])
            result = real(*arguments, **options)
            if strikes and self.when == "after":
                strike()
            return result

        setattr(owner, self.name, wrapped)
        return lambda: setattr(owner, self.name, real)


@dataclass(frozen=True)
class Stage:
    """A moment of a save."""

    name: str  # what the tables call it
    ours: Seam | None  # where `NvcompWriter` is then
    stock: Seam | None  # where `FileSystemWriter` is then; None where it has no such moment
    # Otherwise rank 0 alone comes there; where rank 1 is to die, rank 0 kills it and goes on.
    on_every_rank: bool = False
    published: bool = False  # whether our checkpoint is there by then
    fresh: bool = True  # whether there is such a moment where no checkpoint is replaced
    staged: bool = False  # whether only the saves of `async_save` come there


_WRITER, _POSIX = "dcp_nvcomp.saving.writer:NvcompWriter", "dcp_nvcomp.storage.local.filesystem:PosixFilesystem"
_OUTPUT = "dcp_nvcomp.storage.local.output:PosixOutput"
_STAGING = "dcp_nvcomp.saving.asynchronous.staging:Staging"
_STOCK = "torch.distributed.checkpoint.filesystem:FileSystemWriter"
_STOCK_FILES = "torch.distributed.checkpoint.filesystem:FileSystem"
_PLANNER = "torch.distributed.checkpoint.default_planner:DefaultSavePlanner"

_COPY = Seam(_POSIX, "publish", "before", counts=of_the_copy)
_METADATA = Seam(_POSIX, "publish", "before", counts=of_metadata)
_STOCK_FINISH = Seam(_STOCK, "finish", "before")


def _both(name: str, function: str, when: str, **options: bool) -> Stage:
    """A stage at a function that both writers have."""
    return Stage(name, Seam(_WRITER, function, when), Seam(_STOCK, function, when), **options)


def _fsync(when: str, nth: int, since: Seam | None = None) -> Seam:
    return Seam("os", "fsync", when, nth, in_a_file, since)


_EVERY = {"on_every_rank": True}
_STAGED = {"on_every_rank": True, "staged": True}
_OVER = {"published": True, "fresh": False}
_LOCAL = "dcp_nvcomp.storage.local.filesystem"
_ENCODED = Seam("dcp_nvcomp.engines.cpu:CpuEngine", "encode_beside", "before", nth=3)
_OPENED = Seam("pathlib:Path", "open", "after", nth=2, counts=_of_a_data_file)
_DIRECTORY_SYNCED = Seam("os", "fsync", "before", 1, _of_a_directory, since=Seam(_POSIX, "open_output", "before"))
_TEMPORARY = Seam("pathlib:Path", "open", "after", counts=_of_the_temporary)

STAGES = (
    _both("local plan", "prepare_local_plan", "before", **_EVERY),
    _both("directory made", "prepare_local_plan", "after", **_EVERY),
    _both("global plan", "prepare_global_plan", "before"),
    _both("before the first file", "write_data", "before", **_EVERY),
    Stage("encode, item 3", _ENCODED, Seam(_PLANNER, "resolve_data", "before", nth=3), **_EVERY),
    Stage("staging ends", Seam(_STAGING, "staged", "before"), None, **_STAGED),
    Stage("all staged, nothing written", Seam(_STAGING, "staged", "after"), None, **_STAGED),
    Stage("file 2 opened", Seam(_POSIX, "open_output", "after", nth=2), _OPENED, **_EVERY),
    Stage("half of a block written", Seam(_OUTPUT, "write", "halfway", 2, _of_a_block), None, **_EVERY),
    Stage("before the fsync of file 2", _fsync("before", 2), _fsync("before", 2), **_EVERY),
    Stage("before an fsync of the directory", _DIRECTORY_SYNCED, None, **_EVERY),
    Stage("after file 1", Seam(_OUTPUT, "close", "after", nth=1), _fsync("after", 1), **_EVERY),
    Stage("after file 3", Seam(_OUTPUT, "close", "after", nth=3), _fsync("after", 3), **_EVERY),
    _both("after all of the rank's files", "write_data", "after", **_EVERY),
    _both("commit begins", "finish", "before"),
    Stage("half of the immutable copy written", Seam(_LOCAL, "write_all", "halfway", since=_COPY), None),
    Stage("immutable copy published", Seam(_POSIX, "publish", "after", counts=of_the_copy), None),
    Stage(
        "`.metadata` as an empty or half-written temporary",
        Seam(_LOCAL, "write_all", "halfway", since=_METADATA),
        _TEMPORARY,
    ),
    Stage("before the fsync of the temporary", _fsync("before", 1, _METADATA), _fsync("before", 1, _STOCK_FINISH)),
    Stage("temporary durable", _fsync("after", 1, _METADATA), _fsync("after", 1, _STOCK_FINISH)),
    Stage("before the rename", Seam("os", "rename", "before", since=_METADATA), Seam(_STOCK_FILES, "rename", "before")),
    Stage(
        "after the rename",
        Seam("os", "rename", "after", since=_METADATA),
        Seam(_STOCK_FILES, "rename", "after"),
        published=True,
    ),
    Stage("`.metadata` published", Seam(_POSIX, "publish", "after", counts=of_metadata), None, published=True),
    Stage(
        "old immutable copy removed",
        Seam("os", "unlink", "after", 1, _of_an_immutable_copy, since=_METADATA),
        None,
        **_OVER,
    ),
    Stage("one old file removed", Seam("os", "unlink", "after", 1, _of_a_data_file, since=_METADATA), None, **_OVER),
    _both("commit ends", "finish", "after", published=True),
)
BY_NAME = {stage.name: stage for stage in STAGES}


class KillingPlanner(DefaultSavePlanner):
    """A default planner that arms a stage when the save begins, in the process that saves."""

    def __init__(self, stage: str, writer: str, victim: int, directory: Path) -> None:
        super().__init__()
        self._stage, self._writer, self._victim, self._directory = stage, writer, victim, directory

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        rank, stage = dist.get_rank(), BY_NAME[self._stage]
        (self._directory / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == (self._victim if stage.on_every_rank else 0):
            seam: Seam | None = getattr(stage, self._writer)
            assert seam is not None, f"{self._writer} has no stage {self._stage!r}"
            seam.arm(self._strike)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def _strike(self) -> None:
        victim = int((self._directory / f"pid-{self._victim}").read_text())
        with (self._directory / "fired").open("x") as file:
            file.write(f"{self._stage}\n{victim}")
        os.kill(victim, signal.SIGKILL)
