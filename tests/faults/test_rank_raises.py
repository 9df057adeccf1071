"""One rank raises at any step: every rank gets a CheckpointException that names it, soon, and nothing else is harmed.

After the failure the process group still works, the earlier checkpoint loads, and the same writer saves again; of the
failed save nothing is left then but what docs/reliability.md says. The steps of DCP's planners are in
tests/distributed/test_rank_failures.py.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.format.metadata.roots import read_root
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import file_names
from tests.conformance.sabotage import Sabotage

from . import forked
from .failpoints import Seam, in_a_file, of_metadata, of_the_copy
from .saves import loaded, new_writer, sharded

LIMIT_SECONDS = 120.0


@dataclass(frozen=True)
class Step:
    """A step of a save or a load, and what one rank raises there."""

    name: str  # in the test's id
    seam: Seam  # where
    error: Callable[[], BaseException]  # makes what is raised there
    told: tuple[type[BaseException], str]  # the type of what the other ranks are told, and a word of its message
    ranks: tuple[int, ...] = (0, 1)  # which ranks come there
    files_complete: bool = False


def _sabotage() -> BaseException:
    return Sabotage("raised on purpose")


def _io_error() -> BaseException:
    return OSError(errno.EIO, "raised on purpose")


def _storage_error() -> BaseException:
    return errors.StorageError("raised on purpose", path="somewhere", errno=errno.EIO)


_WRITER, _READER = "dcp_nvcomp.saving.writer:NvcompWriter", "dcp_nvcomp.loading.reader:NvcompReader"
_POSIX, _OUTPUT = "dcp_nvcomp.storage.local.filesystem:PosixFilesystem", "dcp_nvcomp.storage.local.output:PosixOutput"
_ENGINE, _SAVE_PLANNER = (
    "dcp_nvcomp.engines.cpu:CpuEngine",
    "torch.distributed.checkpoint.default_planner:DefaultSavePlanner",
)
_LOAD_PLANNER = "torch.distributed.checkpoint.default_planner:DefaultLoadPlanner"
_PLAIN = (_sabotage, (Sabotage, "on purpose"))
_EIO = (_io_error, (errors.StorageError, "on purpose"))
_STORAGE = (_storage_error, (errors.StorageError, "on purpose"))

SAVE_STEPS = (
    Step("set_up", Seam(_WRITER, "set_up_storage_writer", "before"), *_PLAIN),
    Step("local_plan", Seam(_WRITER, "prepare_local_plan", "before"), *_PLAIN),
    Step("directory", Seam(_POSIX, "create_directory", "before"), *_STORAGE),
    Step("global_plan", Seam(_WRITER, "prepare_global_plan", "before"), *_PLAIN, ranks=(0,)),
    Step("resolve_data", Seam(_SAVE_PLANNER, "resolve_data", "before", nth=3), *_PLAIN),
    Step("encode", Seam(_ENGINE, "encode_beside", "before", nth=3), *_PLAIN),
    Step("open", Seam(_POSIX, "open_output", "before", nth=2), *_STORAGE),
    Step("write", Seam("dcp_nvcomp.storage.local.output", "write_all", "before", nth=5), *_EIO),
    Step("fsync", Seam("os", "fsync", "before", 2, in_a_file), *_EIO),
    Step("close", Seam(_OUTPUT, "close", "before", nth=3), *_STORAGE),  # two are written at once: one is complete
    Step("written", Seam(_WRITER, "write_data", "after"), *_PLAIN, files_complete=True),
    Step("finish", Seam(_WRITER, "finish", "before"), *_PLAIN, ranks=(0,), files_complete=True),
    Step("copy", Seam(_POSIX, "publish", "before", counts=of_the_copy), *_STORAGE, ranks=(0,)),
    Step("publish", Seam(_POSIX, "publish", "before", counts=of_metadata), *_STORAGE, ranks=(0,)),
)
LOAD_STEPS = (
    Step("read_metadata", Seam(_POSIX, "read_all", "before"), *_STORAGE),
    Step("local_plan", Seam(_READER, "prepare_local_plan", "before"), *_PLAIN),
    Step("global_plan", Seam(_READER, "prepare_global_plan", "before"), *_PLAIN, ranks=(0,)),
    Step("resolve_tensor", Seam(_LOAD_PLANNER, "resolve_tensor", "before", nth=2), *_PLAIN),
    Step("footer", Seam(_POSIX, "read", "before"), *_STORAGE),
    Step("fetch", Seam(_POSIX, "read_into", "before", nth=2), *_STORAGE),
    Step("decode", Seam(_ENGINE, "decode", "before", nth=2), *_PLAIN),
    Step("commit", Seam(_LOAD_PLANNER, "commit_tensor", "before", nth=2), *_PLAIN),
)
STEPS = {("save", step.name): step for step in SAVE_STEPS} | {("load", step.name): step for step in LOAD_STEPS}


class RaisingPlanner(DefaultSavePlanner):
    """A default planner that has one rank raise once, in whatever process the save runs in."""

    def __init__(self, step: str, rank: int) -> None:
        super().__init__()
        self._step, self._rank = step, rank

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        if dist.get_rank() == self._rank:
            _arm(STEPS["save", self._step])
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


def _arm(step: Step) -> None:
    def strike() -> None:
        put_back()
        raise step.error()

    put_back = step.seam.arm(strike)


# --- on the ranks -----------------------------------------------------------------------------------------------------


def _save(how: str, seed: str, writer: NvcompWriter, planner: DefaultSavePlanner | None = None) -> None:
    if how == "sync":
        dcp.save(sharded(seed), storage_writer=writer, planner=planner)
        return
    kind = AsyncCheckpointerType.THREAD if how == "thread" else AsyncCheckpointerType.PROCESS
    upload: Any = dcp.async_save(sharded(seed), storage_writer=writer, planner=planner, async_checkpointer_type=kind)
    upload.result(timeout=LIMIT_SECONDS)


def _assert_told(run: Callable[[], None], step: Step, rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(dcp.CheckpointException) as caught:
        run()
    told, word = step.told
    assert caught.value.failures.keys() == {rank} and f"(RANK {rank})" in str(caught.value)
    cause = caught.value.failures[rank][0]
    assert isinstance(cause, told) and word in str(cause), repr(cause)
    assert time.monotonic() - start < LIMIT_SECONDS
    total = torch.tensor([1])
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()
    dist.barrier()


def _assert_loads(path: Path, seed: str) -> None:
    expected = sharded(seed)
    state = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else "" for name, value in expected.items()
    }
    dcp.load(state, storage_reader=NvcompReader(path, thread_count=1))
    assert state["seed"] == seed
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name].to_local(), value.to_local()), name


def _fail_a_save(how: str, path: Path, step: str, rank: int) -> tuple[set[str], set[str]]:
    """Return the files after the failure, and after the next save."""
    writer = new_writer("ours", path)
    _save(how, "old", writer)
    planner = RaisingPlanner(step, rank)
    _assert_told(lambda: _save(how, "new", writer, planner), STEPS["save", step], rank)
    _assert_loads(path, "old")
    dist.barrier()
    after_failure = file_names(path)
    dist.barrier()
    _save(how, "next", writer)
    _assert_loads(path, "next")
    return after_failure, file_names(path)


def _fail_a_load(path: Path, step: str, rank: int) -> None:
    dcp.save(sharded("old"), storage_writer=new_writer("ours", path))
    state, reader = sharded("new"), NvcompReader(path, thread_count=1)
    if dist.get_rank() == rank:
        _arm(STEPS["load", step])
    _assert_told(
        lambda: dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner()), STEPS["load", step], rank
    )
    dcp.load(state, storage_reader=reader)
    assert state["seed"] == "old"
    _assert_loads(path, "old")
    dcp.save(sharded("next"), storage_writer=new_writer("ours", path))
    _assert_loads(path, "next")


# --- the tests --------------------------------------------------------------------------------------------------------


def _cases(steps: tuple[Step, ...], fast: set[tuple[str, int]]) -> list[Any]:
    return [
        pytest.param(step.name, rank, marks=[] if (step.name, rank) in fast else [pytest.mark.slow])
        for step in steps
        for rank in step.ranks
    ]


def _values_of(ends: list[forked.End]) -> list[Any]:
    for rank, end in enumerate(ends):
        assert end.exit_code == 0 and end.error == "", f"rank {rank}: {end.error or 'hung'}\n{end.log}"
    return [end.value for end in ends]


FAST = {
    "sync": {("local_plan", 1), ("resolve_data", 0), ("encode", 1), ("fsync", 1), ("publish", 0)},
    "thread": {("encode", 0)},
    "process": {("write", 1)},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "step", "rank"),
    [pytest.param(how, *one.values, marks=one.marks) for how, fast in FAST.items() for one in _cases(SAVE_STEPS, fast)],
)
def test_save(tmp_path: Path, how: str, step: str, rank: int) -> None:
    """Synchronous, and by DCP's thread or process.

    The failing rank removes its files at once where it was writing them; else they go at the writer's next save.
    """
    path = tmp_path / "c"
    ends = forked.run(_fail_a_save, how, path, step, rank, directory=tmp_path, checkpointer=how == "process")
    after_failure, last = _values_of(ends)[0]
    named = read_root(open_filesystem(path), ".metadata").names()
    leftovers = last - named
    assert named <= last
    if how != "process":
        assert not leftovers
    elif not STEPS["save", step].files_complete:
        # the process checkpointer gets a new copy of the writer for each save: what it wrote before is not known there
        assert not {name for name in leftovers if not name.startswith(f"__{1 - rank}_")}, leftovers
    assert not {name for name in after_failure if name.endswith(".tmp")}
    assert loaded("ours", path) == "next"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("step", "rank"), _cases(LOAD_STEPS, {("read_metadata", 1), ("resolve_tensor", 0), ("fetch", 1), ("decode", 0)})
)
def test_load(tmp_path: Path, step: str, rank: int) -> None:
    _values_of(forked.run(_fail_a_load, tmp_path / "c", step, rank, directory=tmp_path))


def _keep_what_was_replaced(path: Path) -> set[str]:
    writer = new_writer("ours", path)
    dcp.save(sharded("old"), storage_writer=writer)
    dist.barrier()
    before = file_names(path)
    dist.barrier()
    if dist.get_rank() == 0:
        _arm(Step("remove", Seam(_POSIX, "remove", "before"), *_STORAGE))
    dcp.save(sharded("new"), storage_writer=writer)
    _assert_loads(path, "new")
    return before


def test_old_files_that_can_not_be_removed_fail_no_save(tmp_path: Path) -> None:
    """The new checkpoint is published by then: the old one's files stay as orphans, and a line in the log."""
    ends = forked.run(_keep_what_was_replaced, tmp_path / "c", directory=tmp_path)
    before = _values_of(ends)[0]
    assert before <= file_names(tmp_path / "c")
    assert "could not be removed" in ends[0].log


def _fail_without_collectives(path: Path, step: str, rank: int) -> str:
    """The failing rank raises what it met; the other is told nothing, publishes its part, and waits in a barrier."""
    planner, writer = RaisingPlanner(step, rank), new_writer("ours", path)
    try:
        dcp.save(sharded("new"), storage_writer=writer, planner=planner, use_collectives=False)
    except BaseException as error:
        dist.barrier()  # that of the other rank's save
        return type(error).__name__
    return ""


@pytest.mark.parametrize(
    ("step", "rank"),
    [
        ("encode", 1),
        pytest.param("resolve_data", 0, marks=pytest.mark.slow),
        pytest.param("fsync", 0, marks=pytest.mark.slow),
        pytest.param("finish", 1, marks=pytest.mark.slow),
    ],
)
def test_without_collectives(tmp_path: Path, step: str, rank: int) -> None:
    """Nobody tells the others, but what is there can't be taken for a checkpoint, and its path can't be saved to."""
    path = tmp_path / "c"
    ends = forked.run(_fail_without_collectives, path, step, rank, directory=tmp_path)
    raised = _values_of(ends)
    assert raised[1 - rank] == "" and raised[rank] in ("Sabotage", "StorageError")
    assert f"__{rank}.metadata" not in file_names(path) and f"__{1 - rank}.metadata" in file_names(path)
    with pytest.raises(errors.CheckpointError):
        NvcompReader(path).read_metadata()
    before = {name: (path / name).read_bytes() for name in file_names(path)}
    refused = _values_of(forked.run(_save_again, path, rank, directory=tmp_path / "again"))
    assert refused[1 - rank] == "CheckpointExistsError"
    assert {name: (path / name).read_bytes() for name in before} == before


def _save_again(path: Path, rank: int) -> str:
    """The same save over what the failed one left: the rank that had published is refused."""
    if dist.get_rank() == rank:
        return ""
    with pytest.raises(errors.CheckpointExistsError) as caught:
        dcp.save(sharded("next"), storage_writer=new_writer("ours", path), use_collectives=False)
    return type(caught.value).__name__
