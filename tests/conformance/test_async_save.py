"""`dcp.async_save`: thread and process checkpointers, the stock stagers, and errors that reach the future."""

from __future__ import annotations

import functools
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from dcp_nvcomp import SaveStats, errors
from tests.checkpoints import assert_holds, file_names
from tests.distributed.launch import RankPool

from .plugins import OURS, Plugin, cause_of, on_every_plugin, quiet_stock
from .sabotage import FailingSavePlanner, Sabotage
from .values import trained

pytestmark = quiet_stock


def _nested_state(seed: str) -> dict[str, Any]:
    return {
        "w": trained(torch.float32, (300, 500), seed),
        "view": trained(torch.bfloat16, (100, 100), seed).t()[3:, ::2],
        "nested": {"list": [trained(torch.float32, (5,), seed), 6]},
        "seed": seed,
    }


def _default_stager(*, asynchronous: bool) -> DefaultStager:
    return DefaultStager(StagingOptions(False, False, asynchronous, False))


STAGERS: dict[str, Any] = {
    "none-given": lambda: None,
    "blocking": BlockingAsyncStager,
    "default": functools.partial(_default_stager, asynchronous=False),
    "default-in-background": functools.partial(_default_stager, asynchronous=True),
}


def _upload_of(response: Future[Any] | AsyncSaveResponse) -> Future[Any]:
    if isinstance(response, AsyncSaveResponse):
        response.staging_completion.result(timeout=180)
        return response.upload_completion
    return response


def _spoil(state: dict[str, Any]) -> None:
    state["w"].fill_(-1)
    state["view"].fill_(-1)
    state["nested"]["list"][0].fill_(-1)


@on_every_plugin
@pytest.mark.parametrize("stager_name", STAGERS)
def test_training_goes_on_while_the_save_runs(tmp_path: Path, plugin: Plugin, stager_name: str) -> None:
    """What is saved is the state at the call, whatever training does to it afterwards; over several saves."""
    stager: AsyncStager | None = STAGERS[stager_name]()
    writer = plugin.writer(tmp_path / "default")
    for seed in ("one", "two"):
        state = _nested_state(seed)
        upload = _upload_of(
            dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / seed, async_stager=stager)
        )
        _spoil(state)
        upload.result(timeout=180)
        assert_holds(plugin.reader(tmp_path / seed), _nested_state(seed))
    if stager is not None:
        stager.close()


@on_every_plugin
@pytest.mark.parametrize("stager_name", STAGERS)
def test_error_reaches_the_future(tmp_path: Path, plugin: Plugin, stager_name: str) -> None:
    stager: AsyncStager | None = STAGERS[stager_name]()
    response = dcp.async_save(
        _nested_state("one"),
        storage_writer=plugin.writer(tmp_path),
        planner=FailingSavePlanner("resolve_data"),
        async_stager=stager,
    )
    error = _upload_of(response).exception(timeout=180)
    assert isinstance(error, dcp.CheckpointException) and isinstance(cause_of(error), Sabotage)
    assert ".metadata" not in file_names(tmp_path)
    if plugin == OURS:
        assert file_names(tmp_path) == set()
    if stager is not None:
        stager.close()


@on_every_plugin
@pytest.mark.usefixtures("process_group")
def test_async_save_with_a_process_group(tmp_path: Path, plugin: Plugin) -> None:
    dcp.async_save(_nested_state("one"), storage_writer=plugin.writer(tmp_path / "c")).result(timeout=180)
    assert_holds(plugin.reader(tmp_path / "c"), _nested_state("one"))


class _Gate(FailingSavePlanner):
    """Holds the save up until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__("nothing")
        self.reached, self.open = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.reached.set()
        assert self.open.wait(timeout=180)
        return super().resolve_data(write_item)


@on_every_plugin
def test_earlier_checkpoint_loads_while_a_save_to_another_path_runs(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save(_nested_state("one"), storage_writer=plugin.writer(tmp_path / "one"))
    gate = _Gate()
    upload = _upload_of(
        dcp.async_save(_nested_state("two"), storage_writer=plugin.writer(tmp_path / "two"), planner=gate)
    )
    assert gate.reached.wait(timeout=180)
    assert_holds(plugin.reader(tmp_path / "one"), _nested_state("one"))
    assert ".metadata" not in file_names(tmp_path / "two")
    gate.open.set()
    upload.result(timeout=180)
    assert_holds(plugin.reader(tmp_path / "two"), _nested_state("two"))


def test_earlier_checkpoint_loads_while_it_is_overwritten(tmp_path: Path) -> None:
    """The stock writer writes over the files that are being read."""
    dcp.save(_nested_state("one"), storage_writer=OURS.writer(tmp_path))
    gate = _Gate()
    upload = _upload_of(dcp.async_save(_nested_state("two"), storage_writer=OURS.writer(tmp_path), planner=gate))
    assert gate.reached.wait(timeout=180)
    assert_holds(OURS.reader(tmp_path), _nested_state("one"))
    gate.open.set()
    upload.result(timeout=180)
    assert_holds(OURS.reader(tmp_path), _nested_state("two"))


@pytest.mark.parametrize("overwrite", [True, False])
def test_two_saves_to_one_path_at_once(tmp_path: Path, overwrite: bool) -> None:
    """The one that began first ends last: one of them holds afterwards, whole."""
    gate = _Gate()
    first = OURS.writer(tmp_path, overwrite=overwrite)
    upload = _upload_of(dcp.async_save(_nested_state("first"), storage_writer=first, planner=gate))
    assert gate.reached.wait(timeout=180)
    dcp.save(_nested_state("second"), storage_writer=OURS.writer(tmp_path, overwrite=overwrite))
    assert_holds(OURS.reader(tmp_path), _nested_state("second"))
    gate.open.set()
    error = upload.exception(timeout=180)
    if error is None:
        assert overwrite
        assert_holds(OURS.reader(tmp_path), _nested_state("first"))
    else:
        assert isinstance(cause_of(error), (errors.ConcurrentSaveError, errors.CheckpointExistsError)), error
        assert_holds(OURS.reader(tmp_path), _nested_state("second"))


def _note_save(path: Path, stats: Any) -> None:
    path.write_bytes(pickle.dumps(stats))


def _save_in_a_process(path: Path, plugin: Plugin) -> None:
    """Runs as the only rank: the checkpoint process stays with the process that started it."""
    from_child = path / "told-by-child"
    options = {"on_save": functools.partial(_note_save, from_child)} if plugin == OURS else {}
    writer = plugin.writer(path / "default", **options)
    save = functools.partial(
        dcp.async_save, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    for seed in ("one", "two"):
        state = _nested_state(seed)
        response = save(state, checkpoint_id=path / seed)
        _spoil(state)
        metadata = _upload_of(response).result(timeout=180)
        assert set(metadata.state_dict_metadata) == {"w", "view", "nested.list.0", "nested.list.1", "seed"}
        assert_holds(plugin.reader(path / seed), _nested_state(seed))
        if plugin == OURS:
            stats = pickle.loads(from_child.read_bytes())
            assert SaveStats.of(metadata) == stats, "and so it is known in this process too"
            assert stats.checkpoint_id == str(path / seed) and stats.uncompressed_nbytes >= 300 * 500 * 4
            assert stats.save_id == plugin.reader(path / seed).read_metadata().storage_meta.save_id

    response = save(_nested_state("three"), checkpoint_id=path / "three", planner=FailingSavePlanner("resolve_data"))
    error = _upload_of(response).exception(timeout=180)
    assert isinstance(error, dcp.CheckpointException) and isinstance(cause_of(error), Sabotage), repr(error)
    assert ".metadata" not in file_names(path / "three")

    response = save(_nested_state("four"), checkpoint_id=path / "four")
    _upload_of(response).result(timeout=180)
    assert_holds(plugin.reader(path / "four"), _nested_state("four"))


@pytest.mark.ci
@on_every_plugin
def test_process_checkpointer(tmp_path: Path, plugin: Plugin, single_rank: RankPool) -> None:
    single_rank.run(_save_in_a_process, tmp_path, plugin, timeout_s=500)


@on_every_plugin
def test_writer_and_reader_are_picklable_before_and_after_use(tmp_path: Path, plugin: Plugin) -> None:
    writer, reader = plugin.writer(tmp_path), plugin.reader(tmp_path)
    for seed in ("one", "two"):
        writer, reader = pickle.loads(pickle.dumps((writer, reader)))
        dcp.save(_nested_state(seed), storage_writer=writer)
        assert_holds(reader, _nested_state(seed))
