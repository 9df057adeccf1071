"""NvcompAsyncWriter: the protocol of an asynchronous writer, without the frameworks that use it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp import ConfigurationError, NvcompReader, NvcompWriter, StorageError, open_checkpoint
from dcp_nvcomp.integrations.async_writer import NvcompAsyncWriter
from dcp_nvcomp.saving.process_state import process_state


def state() -> dict[str, Any]:
    return {"w": torch.arange(5000.0).reshape(50, 100), "t": torch.ones(3, 5).t(), "n": [3, "x"]}


def plan(writer: NvcompWriter, values: dict[str, Any]) -> tuple[Any, DefaultSavePlanner, Metadata]:
    """Plan a save of one rank, as `save_state_dict_async_plan` does."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(values, is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([local])
    (own,) = writer.prepare_global_plan(plans)
    return planner.finish_plan(own), planner, metadata


def run(where: str, write: Any, arguments: list[Any]) -> None:
    if where == "here":
        write(*arguments)
        return
    process = multiprocessing.get_context(where).Process(target=write, args=arguments)
    process.start()
    process.join(100)


@pytest.mark.parametrize("where", ["here", "fork", "spawn"])
def test_saves_what_was_there_when_it_was_copied(tmp_path: Path, where: str) -> None:
    values, before = state(), state()
    writer = NvcompAsyncWriter(tmp_path)
    own, planner, metadata = plan(writer, values)
    writer.prepare_write_data(own, planner)
    write, copy, arguments = writer.get_save_function_and_args()
    arguments[1] = copy()
    values["w"].zero_()  # training goes on
    run(where, write, arguments)
    results = writer.retrieve_write_results()
    assert isinstance(results, list) and not (tmp_path / ".metadata").exists()
    writer.finish(metadata, [results])
    loaded = {"w": torch.zeros(50, 100), "t": torch.zeros(5, 3), "n": None}
    dcp.load(loaded, storage_reader=NvcompReader(tmp_path), no_dist=True)
    assert torch.equal(loaded["w"], before["w"]) and torch.equal(loaded["t"], before["t"])  # type: ignore[arg-type]
    assert loaded["n"] == before["n"]
    assert writer.last_save is not None and writer.last_save.files


def test_two_saves_under_way(tmp_path: Path) -> None:
    saves = []
    for number in range(2):
        writer = NvcompAsyncWriter(tmp_path / str(number))
        own, planner, metadata = plan(writer, {"w": torch.full((10,), number)})
        writer.prepare_write_data(own, planner)
        saves.append((writer, metadata))
    for writer, _ in reversed(saves):
        write, copy, arguments = writer.get_save_function_and_args()
        write(arguments[0], copy(), arguments[2])
    for writer, metadata in saves:
        results = writer.retrieve_write_results()
        assert isinstance(results, list)
        writer.finish(metadata, [results])
    assert [open_checkpoint(tmp_path / str(number))["w"][0] for number in range(2)] == [0, 1]


def test_one_writer_prepares_several(tmp_path: Path) -> None:
    writer, saves = NvcompWriter(tmp_path), []
    for number in range(2):
        writer.reset(tmp_path / str(number))
        own, planner, metadata = plan(writer, {"w": torch.full((10,), number)})
        prepared = pickle.loads(pickle.dumps(writer.prepare(own)))
        resolve = {item.index: planner.resolve_data(item) for item in own.items}
        saves.append((prepared, metadata, resolve))
    for prepared, metadata, resolve in reversed(saves):
        results = prepared.write(lambda item, data=resolve: data[item.index], process_state().choices)
        writer.written(prepared, results)
        writer.finish_prepared(prepared, metadata, [results])
    assert [open_checkpoint(tmp_path / str(number))["w"][0] for number in range(2)] == [0, 1]


def _die(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_was_killed(tmp_path: Path) -> None:
    writer = NvcompAsyncWriter(tmp_path)
    own, planner, _ = plan(writer, state())
    writer.prepare_write_data(own, planner)
    _, _, arguments = writer.get_save_function_and_args()
    run("fork", _die, arguments)
    failure = writer.retrieve_write_results()
    assert isinstance(failure, tuple)
    assert isinstance(failure[0], StorageError) and "ended before it was done" in str(failure[0])
    assert not (tmp_path / ".metadata").exists()


def test_a_write_that_fails(tmp_path: Path) -> None:
    writer = NvcompAsyncWriter(tmp_path / "checkpoint")
    own, planner, _ = plan(writer, state())
    writer.prepare_write_data(own, planner)
    write, copy, arguments = writer.get_save_function_and_args()
    arguments[1] = copy()
    (tmp_path / "checkpoint").rmdir()
    (tmp_path / "checkpoint").touch()  # a file where the directory was
    run("fork", write, arguments)
    failure = writer.retrieve_write_results()
    assert isinstance(failure, tuple)
    assert isinstance(failure[0], StorageError) and "checkpoint" in str(failure[0])


def test_misuse_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="forked process"):
        NvcompAsyncWriter(tmp_path, engine="cuda")
    writer = NvcompAsyncWriter(tmp_path)
    assert writer.options.engine == "cpu"
    with pytest.raises(ConfigurationError, match="no save under way"):
        writer.get_save_function_and_args()
