"""A save or load that fails at any step raises, publishes nothing, and harms no earlier checkpoint."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem

from dcp_nvcomp import errors
from tests.checkpoints import assert_holds, data_file, file_names, flip
from tests.distributed.launch import RankFailure, RankPool
from tests.states import assert_same_bits, opposite_of

from .plugins import ORACLE, OURS, Plugin, cause_of, on_every_plugin, on_every_reader, quiet_stock
from .sabotage import LOAD_STEPS, SAVE_STEPS, FailingLoadPlanner, FailingSavePlanner, Sabotage, Unsaveable
from .values import trained

pytestmark = quiet_stock


def _four_tensors(seed: str) -> dict[str, Any]:
    tensors: dict[str, Any] = {f"w{n}": trained(torch.float32, (200, 300 + n), seed) for n in range(4)}
    return {**tensors, "seed": seed}


@on_every_plugin
@pytest.mark.parametrize("step", SAVE_STEPS)
def test_failed_save_publishes_nothing(tmp_path: Path, plugin: Plugin, step: str) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path), planner=FailingSavePlanner(step))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert ".metadata" not in file_names(tmp_path)
    assert plugin != OURS or file_names(tmp_path) == set()
    with pytest.raises(dcp.CheckpointException):
        dcp.load({"seed": None}, storage_reader=plugin.reader(tmp_path))


@pytest.mark.parametrize(
    ("step", "thread_count", "single_file_per_rank"),
    [
        *((step, 2, True) for step in SAVE_STEPS),
        *(("resolve_data", *how) for how in [(1, True), (1, False), (3, False)]),
    ],
)
def test_failed_save_harms_nothing(tmp_path: Path, step: str, thread_count: int, single_file_per_rank: bool) -> None:
    """Stock DCP overwrites in place and can't promise this."""
    writer = OURS.writer(tmp_path, thread_count=thread_count, single_file_per_rank=single_file_per_rank)
    dcp.save(_four_tensors("one"), storage_writer=writer)
    before = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("two"), storage_writer=writer, planner=FailingSavePlanner(step))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)} == before
    assert_holds(OURS.reader(tmp_path), _four_tensors("one"))
    dcp.save(_four_tensors("three"), storage_writer=writer)
    assert_holds(OURS.reader(tmp_path), _four_tensors("three"))


@on_every_plugin
def test_object_that_can_not_be_pickled(tmp_path: Path, plugin: Plugin) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save({**_four_tensors("one"), "bad": Unsaveable()}, storage_writer=plugin.writer(tmp_path))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert ".metadata" not in file_names(tmp_path)


@pytest.mark.parametrize("plugin", [OURS], ids=str)
def test_last_save_stays_that_of_the_last_save_that_succeeded_or_none(tmp_path: Path, plugin: Plugin) -> None:
    told: list[Any] = []
    writer = plugin.writer(tmp_path, on_save=told.append)
    with pytest.raises(dcp.CheckpointException):
        dcp.save(_four_tensors("one"), storage_writer=writer, planner=FailingSavePlanner("resolve_data"))
    assert writer.last_save is None and told == []
    dcp.save(_four_tensors("two"), storage_writer=writer)
    succeeded = writer.last_save
    with pytest.raises(dcp.CheckpointException):
        dcp.save(_four_tensors("three"), storage_writer=writer, planner=FailingSavePlanner("resolve_data"))
    assert writer.last_save in (None, succeeded) and told == [succeeded]


@on_every_plugin
def test_target_that_can_not_be_written(tmp_path: Path, plugin: Plugin) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path / "file" / "c"))
    assert isinstance(cause_of(caught.value), OSError)
    assert (tmp_path / "file").read_text() == "in the way"
    if plugin == OURS:
        error = cause_of(caught.value)
        assert isinstance(error, errors.StorageError) and error.path is not None
        assert str(tmp_path / "file") in str(error)


class TightFileSystem(MemoryFileSystem):
    """In memory, and full once the data files of a path hold `room` bytes."""

    protocol = "tight"
    store: dict[str, Any] = {}
    pseudo_dirs: list[str] = [""]
    cachable = False
    room = 0

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        opened = super()._open(path, mode, *args, **kwargs)
        if "w" in mode and path.endswith(".distcp"):
            write, filesystem = opened.write, type(self)

            def write_where_there_is_room(data: Any) -> int:
                filesystem.room -= memoryview(data).nbytes
                if filesystem.room < 0:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(write(data))

            opened.write = write_where_there_is_room
        return opened


# nothing is known of this file system, so the writer assumes that its moves copy
@pytest.mark.filterwarnings("ignore:tight.*in one step:RuntimeWarning")
@pytest.mark.parametrize("single_file_per_rank", [True, False], ids=["one-file", "many-files"])
def test_full_disk(single_file_per_rank: bool) -> None:
    """Whichever thread meets it; stock DCP loses what its second writer thread raises."""
    fsspec.register_implementation("tight", TightFileSystem, clobber=True)
    writer = OURS.writer("tight://run/c", thread_count=4, single_file_per_rank=single_file_per_rank)
    TightFileSystem.room = 10 << 20
    dcp.save(_four_tensors("one"), storage_writer=writer)
    before = dict(TightFileSystem.store)
    TightFileSystem.room = 500_000
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(_four_tensors("two"), storage_writer=writer)
    error = cause_of(caught.value)
    assert isinstance(error, errors.StorageError) and error.errno == errno.ENOSPC
    assert "full" in str(error) and error.path is not None and "run/c" in error.path
    assert TightFileSystem.store == before
    assert_holds(OURS.reader("tight://run/c"), _four_tensors("one"))
    TightFileSystem.room = 10 << 20
    dcp.save(_four_tensors("three"), storage_writer=writer)
    assert_holds(OURS.reader("tight://run/c"), _four_tensors("three"))


class _KilledPlanner(FailingSavePlanner):
    """Ends the process on the spot, as an out-of-memory killer does, where its parent would raise."""

    def _fail_at(self, step: str) -> None:
        try:
            super()._fail_at(step)
        except Sabotage:
            os.kill(os.getpid(), signal.SIGKILL)


def _save_and_die(path: Path) -> None:
    dcp.save(
        _four_tensors("two"), storage_writer=OURS.writer(path), planner=_KilledPlanner("resolve_data", survivors=3)
    )


def test_killed_save_harms_nothing(tmp_path: Path, single_rank: RankPool) -> None:
    writer = OURS.writer(tmp_path, single_file_per_rank=False)
    dcp.save(_four_tensors("one"), storage_writer=writer)
    with pytest.raises(RankFailure, match="died"):
        single_rank.run(_save_and_die, tmp_path)
    assert_holds(OURS.reader(tmp_path), _four_tensors("one"))
    dcp.save(_four_tensors("three"), storage_writer=writer)
    assert_holds(OURS.reader(tmp_path), _four_tensors("three"))


@on_every_reader
@pytest.mark.parametrize("step", LOAD_STEPS)
def test_failed_load_raises_and_changes_nothing_on_disk(tmp_path: Path, plugin: Plugin, step: str) -> None:
    dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)}
    reader = plugin.reader(tmp_path)
    state = {key: opposite_of(value) if key != "seed" else None for key, value in _four_tensors("one").items()}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(state, storage_reader=reader, planner=FailingLoadPlanner(step))
    assert isinstance(cause_of(caught.value), Sabotage)
    assert {name: (tmp_path / name).read_bytes() for name in file_names(tmp_path)} == before
    assert_holds(reader, _four_tensors("one"))


@pytest.mark.parametrize("step", ["read_metadata", "dcp.load"])
def test_missing_checkpoint(tmp_path: Path, step: str) -> None:
    reader = OURS.reader(tmp_path / "nothing")
    if step == "read_metadata":
        with pytest.raises(errors.CheckpointNotFoundError) as caught:
            reader.read_metadata()
        assert not isinstance(caught.value, errors.IncompleteCheckpointError)
    else:
        with pytest.raises(dcp.CheckpointException) as caught:  # type: ignore[assignment]
            dcp.load({"seed": None}, storage_reader=reader)
    assert str(tmp_path / "nothing") in str(caught.value)
    assert not (tmp_path / "nothing").exists()


def test_incomplete_checkpoint(tmp_path: Path) -> None:
    dcp.save(_four_tensors("one"), storage_writer=OURS.writer(tmp_path))
    (tmp_path / ".metadata").unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match="(?i)never finished|incomplete|did not finish"):
        OURS.reader(tmp_path).read_metadata()
    with pytest.raises(dcp.CheckpointException, match="(?i)never finished|incomplete|did not finish"):
        dcp.load({"seed": None}, storage_reader=OURS.reader(tmp_path))


def test_error_of_a_load_says_that_the_destinations_are_undefined(tmp_path: Path) -> None:
    dcp.save(_four_tensors("one"), storage_writer=OURS.writer(tmp_path))
    position = data_file(tmp_path).stat().st_size // 3
    flip(data_file(tmp_path), position)
    state = {key: torch.zeros_like(value) for key, value in _four_tensors("one").items() if key != "seed"}
    with pytest.raises(dcp.CheckpointException, match="undefined") as caught:
        dcp.load(state, storage_reader=OURS.reader(tmp_path))
    error = cause_of(caught.value)
    assert isinstance(error, errors.CorruptDataError)
    assert error.path is not None and error.path.endswith(".distcp") and error.fqn is not None
    assert error.byte_range is not None and error.byte_range[0] <= position < error.byte_range[1]


def test_missing_data_file(tmp_path: Path) -> None:
    dcp.save(_four_tensors("one"), storage_writer=OURS.writer(tmp_path))
    missing = data_file(tmp_path)
    missing.unlink()
    with pytest.raises(dcp.CheckpointException, match=missing.name) as caught:
        dcp.load({"w0": torch.zeros(200, 300)}, storage_reader=OURS.reader(tmp_path))
    assert isinstance(cause_of(caught.value), errors.CheckpointError)


def test_data_file_of_another_save(tmp_path: Path) -> None:
    """The same layout, the same sizes, other values: found out before a tensor is touched."""
    for seed in ("one", "two"):
        dcp.save(_four_tensors(seed), storage_writer=OURS.writer(tmp_path / seed, codec="none"))
    data_file(tmp_path / "one").write_bytes(data_file(tmp_path / "two").read_bytes())
    destination = torch.full((200, 300), 5.0)
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"w0": destination}, storage_reader=OURS.reader(tmp_path / "one"))
    assert isinstance(cause_of(caught.value), errors.FileMismatchError)
    assert (destination == 5.0).all()


BAD_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown-codec": ("writer", {"codec": "zip"}),
    "codec-of-wrong-type": ("writer", {"codec": 7}),
    "no-host-memory-on-save": ("writer", {"host_memory_budget": 0}),
    "negative-device-memory-on-save": ("writer", {"device_memory_budget": -1}),
    "no-threads-on-save": ("writer", {"thread_count": 0}),
    "unknown-engine-on-save": ("writer", {"engine": "gpu"}),
    "mistyped-option-on-save": ("writer", {"codek": "zstd"}),
    "no-host-memory-on-load": ("reader", {"host_memory_budget": 0}),
    "negative-device-memory-on-load": ("reader", {"device_memory_budget": -1}),
    "no-threads-on-load": ("reader", {"thread_count": 0}),
    "unknown-engine-on-load": ("reader", {"engine": "gpu"}),
    "unknown-verify": ("reader", {"verify": "sometimes"}),
    "mistyped-option-on-load": ("reader", {"verfy": "full"}),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_option_is_refused_before_anything_happens(tmp_path: Path, case: str) -> None:
    side, options = BAD_OPTIONS[case]
    make = OURS.writer if side == "writer" else OURS.reader
    with pytest.raises(errors.ConfigurationError) as caught:
        make(tmp_path / "c", **options)
    assert str(next(iter(options))) in str(caught.value) or str(next(iter(options.values()))) in str(caught.value)
    assert file_names(tmp_path) == set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_ans_without_a_gpu_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises((errors.CodecUnavailableError, dcp.CheckpointException), match="(?i)ans") as caught:
        dcp.save(_four_tensors("one"), storage_writer=OURS.writer(tmp_path, codec="ans"))
    error = caught.value if isinstance(caught.value, Exception) else cause_of(caught.value)
    assert isinstance(error, errors.CodecUnavailableError)
    assert "CUDA" in str(error)
    assert file_names(tmp_path) == set()


@pytest.mark.parametrize("plugin", [ORACLE], ids=str)
def test_the_sabotage_is_what_fails(tmp_path: Path, plugin: Plugin) -> None:
    """Without a step to fail at, the failing planners are the default ones."""
    dcp.save(_four_tensors("one"), storage_writer=plugin.writer(tmp_path), planner=FailingSavePlanner("nothing"))
    state = {key: opposite_of(value) if key != "seed" else None for key, value in _four_tensors("one").items()}
    dcp.load(state, storage_reader=plugin.reader(tmp_path), planner=FailingLoadPlanner("nothing"))
    assert_same_bits(state["w3"], _four_tensors("one")["w3"])
