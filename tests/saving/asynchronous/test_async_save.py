"""async_save in one process: what it returns, when, and what reaches the checkpoint, the caller and the next save."""

from __future__ import annotations

import gc
import logging
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from benchmarks.staging import Staged, staged_by
from dcp_nvcomp import AsyncSave, NvcompWriter, SaveStats, async_save, errors
from dcp_nvcomp.saving import process_state as keeping
from dcp_nvcomp.saving.data_files import DataFileWriter
from dcp_nvcomp.saving.encode import sources
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.storage.local.output import PosixOutput
from tests.checkpoints import assert_loads, file_names, save
from tests.conformance.sabotage import FailingSavePlanner, Sabotage
from tests.states import State, constant_state

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.usefixtures("on_its_own")]


PATIENCE_SECONDS = 120.0  # on a busy machine


@pytest.fixture
def on_its_own() -> Iterator[None]:
    """Each test begins like a process of its own, and leaves no save under way."""
    keeping.forget_all()
    yield
    keeping.forget_all()  # a background process, where there are cores to spare
    patience = time.monotonic() + PATIENCE_SECONDS
    while names := [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp-")]:
        assert time.monotonic() < patience, names
        time.sleep(0.01)


class Gate:
    """Holds the write threads of saves until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        write = PosixOutput.write

        def gated(output: Any, *arguments: Any) -> Any:
            self.reached.set()
            assert self._open.wait(PATIENCE_SECONDS)
            return write(output, *arguments)

        monkeypatch.setattr(PosixOutput, "write", gated)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


def large_state(seed: int = 0, count: int = 12) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(300, 1000 + number, generator=generator) for number in range(count)}


def clones(state: State) -> State:
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def begin(state: State, path: Path, **options: Any) -> AsyncSave:
    return async_save(state, path, no_dist=True, **options)


# --- what is saved ---------------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.parametrize(("how", "again"), [("encode", 1), ("encode", 2), ("encode", 3), ("copy", 1)])
def test_a_state_that_changes_at_once_does_not_show(tmp_path: Path, how: Staged, again: int) -> None:
    """Thousands of changes, by a thread that begins when the call returns, as training would."""
    state = large_state(count=4)
    stop, changes = threading.Event(), list[int]()

    def change() -> None:
        while not stop.is_set():
            for value in state.values():
                value.add_(1.0)
            changes.append(1)

    for number in range(6):
        expected = clones(state)
        with staged_by(how):
            saving = begin(state, tmp_path / str(number))
        stop.clear()
        thread = threading.Thread(target=change)
        thread.start()
        saving.upload_completion.result(PATIENCE_SECONDS)
        stop.set()
        thread.join()
        assert_loads(tmp_path / str(number), expected)
    assert len(changes) > 20
    keeping.forget_all()  # ends the process that encodes copies


def test_stateful_values_are_asked_on_the_callers_thread(tmp_path: Path) -> None:
    class Model:
        asked: list[threading.Thread] = []

        def state_dict(self) -> State:
            self.asked.append(threading.current_thread())
            return {"w": torch.ones(5)}

        def load_state_dict(self, state: State) -> None:
            raise AssertionError

    begin({"model": Model(), "step": 3}, tmp_path).upload_completion.result(PATIENCE_SECONDS)
    assert Model.asked == [threading.current_thread()]
    assert_loads(tmp_path, {"model": {"w": torch.ones(5)}, "step": 3})


def test_objects_are_those_of_the_moment_of_the_call(tmp_path: Path) -> None:
    state: State = {"w": torch.ones(5), "object": {"step": [1, 2, 3]}}
    saving = begin(state, tmp_path)
    state["object"]["step"].append(4)
    saving.upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, {"w": torch.ones(5), "object": {"step": [1, 2, 3]}})


@pytest.mark.parametrize("how", ["argument", "writer", "both"])
def test_where_it_goes(tmp_path: Path, how: str) -> None:
    state, place = constant_state(), tmp_path / "there"
    if how == "argument":
        saving = async_save(state, str(place), no_dist=True, thread_count=1)
    else:
        writer = NvcompWriter(place if how == "writer" else tmp_path / "elsewhere")
        saving = async_save(state, None if how == "writer" else place, storage_writer=writer, no_dist=True)
    saving.upload_completion.result(PATIENCE_SECONDS)
    assert_loads(place, state)
    assert file_names(tmp_path / "elsewhere") == set()


def test_a_planner_of_the_users_own(tmp_path: Path) -> None:
    class Doubles(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            assert isinstance(data, torch.Tensor)
            return data * 2

    begin({"w": torch.ones(7)}, tmp_path, planner=Doubles()).upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, {"w": torch.full((7,), 2.0)})


# --- when it returns -------------------------------------------------------------------------------------------------


def test_it_returns_when_all_is_staged_and_nothing_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, gate: Gate
) -> None:
    """Without waiting for room, though what is reserved for tasks that are not encoded yet is more than the state."""
    state = large_state()
    saving = begin(state, tmp_path)
    assert saving.staging_completion.done() and not saving.upload_completion.done()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    saving.staging_completion.result()
    gate.open()
    saving.upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, state)


def test_waiting_for_nothing_returns_before_the_state_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    slowly(monkeypatch, lambda: go_on.wait(PATIENCE_SECONDS))
    state = large_state(count=2)
    saving = begin(state, tmp_path, wait="nothing")
    assert not saving.staging_completion.done()
    go_on.set()
    saving.staging_completion.result(PATIENCE_SECONDS)
    for value in state.values():
        value.zero_()
    saving.upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, large_state(count=2))


def slowly(monkeypatch: pytest.MonkeyPatch, before: Callable[[], Any]) -> None:
    """Call `before` before each task is encoded."""
    from dcp_nvcomp.saving import job

    def encode(*arguments: Any) -> Any:
        before()
        return sources.encode_parts(*arguments)

    monkeypatch.setattr(job, "encode_parts", encode)


def test_the_next_save_is_staged_while_this_one_is_written_and_the_third_waits(tmp_path: Path, gate: Gate) -> None:
    savings = [begin(large_state(number, 2), tmp_path / str(number)) for number in range(2)]
    assert gate.reached.wait(PATIENCE_SECONDS)
    third: list[AsyncSave] = []
    thread = threading.Thread(target=lambda: third.append(begin(large_state(2, 2), tmp_path / "2")))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "two are under way"
    gate.open()
    thread.join(PATIENCE_SECONDS)
    for number, saving in enumerate([*savings, *third]):
        saving.upload_completion.result(PATIENCE_SECONDS)
        assert_loads(tmp_path / str(number), large_state(number, 2))


def test_saves_are_published_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one path, so that the last one is what is left, though it could be ready first."""
    write, first = PosixOutput.write, threading.Event()

    def slow(output: Any, *arguments: Any) -> Any:
        if not first.is_set():
            first.set()
            time.sleep(0.5)
        return write(output, *arguments)

    monkeypatch.setattr(PosixOutput, "write", slow)
    order: list[str] = []
    writer = NvcompWriter(tmp_path, on_save=lambda stats: order.append(stats.save_id))
    savings = [async_save(constant_state(seed), storage_writer=writer, no_dist=True) for seed in range(4)]
    stats = [SaveStats.of(saving.upload_completion.result(PATIENCE_SECONDS)) for saving in savings]
    assert order == [one.save_id for one in stats if one is not None] and len(order) == 4
    assert_loads(tmp_path, constant_state(3))
    assert len(file_names(tmp_path)) == 3, "nothing is left of the ones before"


def test_a_small_budget_holds_training_back_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = large_state()
    with caplog.at_level(logging.WARNING):
        saving = begin(state, tmp_path, staging_budget_nbytes=1)
        saving.upload_completion.result(PATIENCE_SECONDS)
    assert ["staging_budget_nbytes" in record.getMessage() for record in caplog.records] == [True]
    assert_loads(tmp_path, state)


# --- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_a_small_state_does_not_wait_for_a_large_one(tmp_path: Path, gate: Gate) -> None:
    """As of a data loader beside a model: its save would be staged when that of the model is written."""
    model = begin({"w": torch.randn(20 << 20)}, tmp_path / "model")
    with ThreadPoolExecutor(1) as pool:
        try:
            loader = pool.submit(begin, {"position": torch.arange(1000)}, tmp_path / "loader").result(PATIENCE_SECONDS)
            assert loader.staging_completion.exception() is None
            assert not model.upload_completion.done()
        finally:
            gate.open()
    for saving in (model, loader):
        saving.upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path / "loader", {"position": torch.arange(1000)})


def test_the_state_is_let_go_once_it_is_staged(tmp_path: Path, gate: Gate) -> None:
    gc.collect()
    gc.disable()
    try:
        state = large_state(count=3)
        state["nested"] = {"w": torch.ones(1000)}
        alive = [weakref.ref(value) for value in (*list(state.values())[:3], state["nested"]["w"])]
        saving = begin(state, tmp_path)
        state.clear()
        patience = time.monotonic() + 10
        while any(value() is not None for value in alive) and time.monotonic() < patience:
            time.sleep(0.01)
        assert [value() for value in alive] == [None] * 4
    finally:
        gc.enable()
    assert not saving.upload_completion.done()
    gate.open()
    saving.upload_completion.result(PATIENCE_SECONDS)


def test_the_collector_is_on_while_a_save_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    was_on: list[bool] = []

    def look() -> None:
        time.sleep(0.01)
        was_on.append(gc.isenabled())

    slowly(monkeypatch, look)
    begin(large_state(), tmp_path).upload_completion.result(PATIENCE_SECONDS)
    assert sum(was_on) >= len(was_on) - 1, "all but what was handed out while records were made"


def test_segments_are_kept_until_close(tmp_path: Path) -> None:
    nbytes = []
    for number in range(3):
        writer = NvcompWriter(tmp_path / str(number), thread_count=1)  # each thread fills a segment, if it finds work
        async_save(large_state(count=2), storage_writer=writer, no_dist=True).upload_completion.result(PATIENCE_SECONDS)
        nbytes.append(process_state().stores.plain.nbytes)
    assert nbytes[0] > 0 and nbytes == nbytes[:1] * 3
    writer.close()
    assert process_state().stores.plain.nbytes == 0


def test_a_writer_that_saved_can_be_pickled(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path, staging_budget_nbytes=1 << 24)
    async_save(constant_state(1), storage_writer=writer, no_dist=True).upload_completion.result(PATIENCE_SECONDS)
    copied = pickle.loads(pickle.dumps(writer))
    assert copied.options.staging_budget_nbytes == 1 << 24
    async_save(constant_state(2), storage_writer=copied, no_dist=True).upload_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, constant_state(2))


def test_last_save(tmp_path: Path, gate: Gate) -> None:
    writer = NvcompWriter(tmp_path)
    saving = async_save(large_state(count=2), storage_writer=writer, no_dist=True)
    gate.open()
    stats = SaveStats.of(saving.upload_completion.result(PATIENCE_SECONDS))
    assert writer.last_save == stats and stats is not None
    assert 0 < stats.stall_seconds <= stats.total_seconds
    assert 0 < stats.staged_nbytes <= sum(stats.file_nbytes.values())
    save(tmp_path / "plain", constant_state())
    save_stats = save(tmp_path / "plain", constant_state()).last_save
    assert save_stats is not None and (save_stats.stall_seconds, save_stats.staged_nbytes) == (0.0, 0)


# --- failures --------------------------------------------------------------------------------------------------------


def fail(*_: Any) -> Any:
    raise Sabotage("on purpose")


def assert_the_next_one_works(path: Path) -> None:
    begin(constant_state(5), path).upload_completion.result(PATIENCE_SECONDS)
    assert_loads(path, constant_state(5))
    assert len(file_names(path)) == 3, "something is left of the save that failed"


def test_staging_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        slowly(patch, fail)
        saving = begin(large_state(), tmp_path)
        assert isinstance(saving.staging_completion.exception(), BaseException)
        with pytest.raises(BaseException, match="on purpose"):
            saving.upload_completion.result(PATIENCE_SECONDS)
    assert file_names(tmp_path) == set()
    assert process_state().stores.budget._in_use_nbytes == 0
    assert_the_next_one_works(tmp_path)


def test_the_system_has_no_thread_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save must not wait for one that never began."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "dcp-async-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    begin(large_state(), tmp_path / "first").upload_completion.result(PATIENCE_SECONDS)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            begin(large_state(), tmp_path / "second")
    assert process_state().stores.budget._in_use_nbytes == 0
    assert_the_next_one_works(tmp_path / "third")


def test_planning_fails(tmp_path: Path) -> None:
    saving = begin(large_state(), tmp_path, planner=FailingSavePlanner("create_local_plan"))
    for future in (saving.staging_completion, saving.upload_completion):
        with pytest.raises(BaseException, match="create_local_plan"):
            future.result(PATIENCE_SECONDS)
    assert_the_next_one_works(tmp_path)


def test_writing_fails_after_the_state_was_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(DataFileWriter, "append", fail)
        saving = begin(large_state(), tmp_path)
        saving.staging_completion.result(PATIENCE_SECONDS)
        with pytest.raises(BaseException, match="on purpose"):
            saving.upload_completion.result(PATIENCE_SECONDS)
    assert process_state().stores.budget._in_use_nbytes == 0, "leases of tasks that were never written"
    assert_the_next_one_works(tmp_path)


@pytest.mark.ci
@pytest.mark.parametrize("budget", [None, 1])
@pytest.mark.parametrize("at", [1, 2, 5, 20])
def test_a_save_that_fails_at_any_block_never_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, budget: int | None
) -> None:
    """With no room but for two tasks, threads wait for each other wherever they can."""
    count = [0]

    def sometimes(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] >= at:
            raise Sabotage("on purpose")
        return sources.encode_parts(*arguments)

    from dcp_nvcomp.saving import job

    with monkeypatch.context() as patch:
        patch.setattr(job, "encode_parts", sometimes)
        saving = begin(large_state(count=30), tmp_path, staging_budget_nbytes=budget)
        with pytest.raises(BaseException, match="on purpose"):
            saving.upload_completion.result(PATIENCE_SECONDS)
    assert_the_next_one_works(tmp_path)


def fails_unseen(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncSave:
    """Make a save that fails while it writes, and wait for it without looking at its outcome."""
    with monkeypatch.context() as patch:
        patch.setattr(DataFileWriter, "append", fail)
        saving = begin(large_state(), path)
        while not saving.upload_completion.done():
            time.sleep(0.01)
    return saving


def test_an_error_that_nobody_looked_at_is_raised_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saving = fails_unseen(tmp_path, monkeypatch)
    with pytest.raises(errors.EarlierSaveError, match="on purpose") as caught:
        begin(constant_state(), tmp_path)
    assert caught.value.__cause__ is saving.upload_completion.exception()
    assert "An asynchronous save failed" in caplog.text
    assert file_names(tmp_path) == set(), "that save was not made"
    assert_the_next_one_works(tmp_path)  # it has been said


def test_with_wait_nothing_it_is_in_the_futures_and_raised_by_the_one_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_unseen(tmp_path, monkeypatch)
    second = begin(constant_state(), tmp_path, wait="nothing")
    with pytest.raises(errors.EarlierSaveError):
        begin(constant_state(), tmp_path)
    assert isinstance(second.upload_completion.exception(PATIENCE_SECONDS), errors.EarlierSaveError)
    assert_the_next_one_works(tmp_path)


def test_our_errors_are_raised_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, constant_state(1))
    saving = begin(constant_state(2), tmp_path, overwrite=False)
    with pytest.raises(errors.CheckpointExistsError):
        saving.upload_completion.result(PATIENCE_SECONDS)
    with pytest.raises(errors.CheckpointExistsError):
        saving.staging_completion.result(PATIENCE_SECONDS)
    assert_loads(tmp_path, constant_state(1))


def test_an_interrupt_before_the_wait_leaves_no_save_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcp_nvcomp.saving.process_state import SaveSequence

    really_begin, uploads = SaveSequence.begin, []

    def begin_and_interrupt(*arguments: Any) -> Any:
        uploads.append(really_begin(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(SaveSequence, "begin", begin_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        begin({"w": torch.zeros(100), "name": "pickled by the caller, if it waits"}, tmp_path)
    monkeypatch.undo()
    assert isinstance(uploads[0].exception(PATIENCE_SECONDS), KeyboardInterrupt)
    assert file_names(tmp_path) == set()
    assert_the_next_one_works(tmp_path)


def test_an_interrupted_wait_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may change the state after Ctrl-C, so what is read from then on must not be published."""
    from dcp_nvcomp.saving.asynchronous.staging import Staging

    waiting, interrupted = Staging.wait, threading.Event()

    def interrupt() -> None:
        raise KeyboardInterrupt

    def interrupt_caller(staging: Staging) -> None:
        with pytest.raises(KeyboardInterrupt):
            staging.on_caller(interrupt)

    def wait(staging: Staging) -> Any:
        threading.Thread(target=interrupt_caller, args=(staging,)).start()
        try:
            return waiting(staging)
        finally:
            interrupted.set()

    monkeypatch.setattr(Staging, "wait", wait)
    slowly(monkeypatch, lambda: interrupted.wait(PATIENCE_SECONDS))
    with pytest.raises(KeyboardInterrupt):
        begin(large_state(), tmp_path)
    monkeypatch.undo()
    with pytest.raises(errors.EarlierSaveError, match="KeyboardInterrupt"):
        begin(constant_state(), tmp_path)
    assert file_names(tmp_path) == set()
    assert_the_next_one_works(tmp_path)


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs a checkpoint_id or a storage_writer"),
        ({"checkpoint_id": "x", "wait": "all"}, "wait"),
        ({"storage_writer": object()}, "dcp.async_save"),
        ({"checkpoint_id": "x", "codec": "best"}, "codec"),
        ({"checkpoint_id": "x", "staging_budget_nbytes": 0}, "staging_budget_nbytes"),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        async_save({"w": torch.ones(1)}, no_dist=True, **arguments)


def test_options_belong_to_the_writer_if_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigurationError, match="codec, overwrite"):
        async_save({}, storage_writer=NvcompWriter(tmp_path), no_dist=True, codec="zstd", overwrite=False)
