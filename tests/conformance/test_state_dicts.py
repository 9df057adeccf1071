"""State dicts as jobs have them: nested, with Statefuls, with Python objects, with an optimizer."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.checkpoints import assert_holds
from tests.states import assert_same, assert_same_bits, opposite_of

from .plugins import OURS, STOCK, Plugin, cause_of, on_every_plugin, on_every_reader, quiet_stock
from .values import trained

pytestmark = quiet_stock


def _nested(seed: str) -> dict[str, Any]:
    return {
        "model": {
            "layer.0.weight": trained(torch.bfloat16, (70, 30), seed),
            "deep": {"er": {"bias": trained(torch.float32, (30,), seed)}},
        },
        "list": [trained(torch.float32, (5, 6), seed), {"inside": trained(torch.float16, (7,), seed), "number": 3}],
        "tuple": (trained(torch.float32, (2,), seed), seed),
        "step": len(seed),
        "lr": 1e-3 / 3,
        "none": None,
        "empty": {},
        "text": f"naïve ✓ {seed}",
    }


@on_every_reader
def test_nested_state(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save(_nested("first"), storage_writer=plugin.writer(tmp_path))
    assert_holds(plugin.reader(tmp_path), _nested("first"))


@on_every_plugin
def test_state_that_is_not_flattened(tmp_path: Path, plugin: Plugin) -> None:
    state = {"w": trained(torch.float32, (30, 40)), "config": {"depth": 3, "names": ["a", "b"]}}
    flat: dict[str, bool] = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
    dcp.save(state, storage_writer=plugin.writer(tmp_path), planner=DefaultSavePlanner(**flat))
    loaded = {"w": opposite_of(state["w"]), "config": {}}
    dcp.load(loaded, storage_reader=plugin.reader(tmp_path), planner=DefaultLoadPlanner(**flat))
    assert_same(loaded, state)


@on_every_reader
def test_empty_state(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save({}, storage_writer=plugin.writer(tmp_path))
    state: dict[str, Any] = {}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert state == {}


@on_every_plugin
@pytest.mark.parametrize("key", ["", ".", "a/b", "../up", "a b\n", "ключ", "x" * 3000, "__0_0.distcp", ".metadata"])
def test_any_string_is_a_key(tmp_path: Path, plugin: Plugin, key: str) -> None:
    saved = {key: trained(torch.float32, (3, 4))}
    dcp.save(saved, storage_writer=plugin.writer(tmp_path / "c"))
    state = {key: opposite_of(saved[key])}
    dcp.load(state, storage_reader=plugin.reader(tmp_path / "c"))
    assert_same_bits(state[key], saved[key])
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


class Counter:
    """A Stateful that is no tensor and no module."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.table = torch.full((count,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "table": self.table}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        self.table = state_dict["table"].clone()


@on_every_plugin
def test_stateful(tmp_path: Path, plugin: Plugin) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    dcp.save({"counter": Counter(7), "module": module}, storage_writer=plugin.writer(tmp_path))
    counter = Counter(7)
    counter.count, counter.table = 0, torch.zeros(7)
    other = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30))
    dcp.load({"counter": counter, "module": other}, storage_reader=plugin.reader(tmp_path))
    assert counter.count == 7
    assert_same_bits(counter.table, torch.full((7,), 7.0))
    assert_same(dict(other.state_dict()), dict(module.state_dict()))


class _Point:
    def __init__(self, x: float) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Point) and math.copysign(1, self.x) == math.copysign(1, other.x) and self.x == other.x


OBJECTS: dict[str, Any] = {
    "int": 2**100,
    "float": -0.0,
    "bool": True,
    "none": None,
    "str": "ß" * 1000,
    "bytes": bytes(range(256)) * 9000,
    "list": [1, "two", [3.0]],
    "set": {1, 2, 3},
    "object": _Point(-0.0),
    "random-state": random.Random(5).getstate(),
    "dtype": torch.bfloat16,
    "torch-size": torch.Size([1, 2]),
    "device": torch.device("cpu"),
    "empty-bytes": b"",
    "range": range(7),
}


@on_every_reader
def test_python_objects(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save(dict(OBJECTS), storage_writer=plugin.writer(tmp_path))
    state = dict.fromkeys(OBJECTS)
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same(state, OBJECTS)


@on_every_reader
def test_generator_state_goes_on_where_it_was(tmp_path: Path, plugin: Plugin) -> None:
    generator = torch.Generator().manual_seed(11)
    torch.rand(5, generator=generator)
    dcp.save({"rng": generator.get_state()}, storage_writer=plugin.writer(tmp_path))
    expected = torch.rand(5, generator=generator)
    state = {"rng": torch.zeros_like(generator.get_state())}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    other = torch.Generator()
    other.set_state(state["rng"])
    assert_same_bits(torch.rand(5, generator=other), expected)


def _trained_model(seed: int, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)).bfloat16()
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters(), "lr": 0.1 + seed}, {"params": model[2].parameters(), "weight_decay": 0.5}]
    )
    for _ in range(steps):
        model(torch.randn(4, 16, dtype=torch.bfloat16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@on_every_reader
def test_optimizer_state(tmp_path: Path, plugin: Plugin) -> None:
    model, optimizer = _trained_model(seed=1, steps=3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, storage_writer=plugin.writer(tmp_path))

    other, other_optimizer = _trained_model(seed=2, steps=1)
    other_state, other_optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": other_state, "optimizer": other_optimizer_state}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert other_optimizer.param_groups[0]["lr"] == 1.1


@on_every_plugin
def test_tensor_where_an_object_was_saved_and_the_other_way_round(tmp_path: Path, plugin: Plugin) -> None:
    dcp.save({"a": 5, "b": torch.ones(3)}, storage_writer=plugin.writer(tmp_path))
    state: dict[str, Any] = {"a": torch.zeros(2)}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert state["a"] == 5
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load({"b": 5}, storage_reader=plugin.reader(tmp_path))
    assert isinstance(cause_of(caught.value), ValueError)


def test_metadata_is_what_stock_would_have_written(tmp_path: Path) -> None:
    """Keys, shapes, shards and planner data are there for tools that know stock DCP only."""
    of_save = {}
    for plugin in (STOCK, OURS):
        of_save[plugin] = dcp.save(_nested("x"), storage_writer=plugin.writer(tmp_path / plugin.name))
    stock, ours = (FileSystemReader(tmp_path / plugin.name).read_metadata() for plugin in (STOCK, OURS))
    assert ours.state_dict_metadata == stock.state_dict_metadata == of_save[OURS].state_dict_metadata
    assert ours.planner_data == stock.planner_data
    assert set(ours.storage_data) == set(stock.storage_data)
    assert ours.version == stock.version == "1.0.0"
    assert of_save[OURS].storage_data == ours.storage_data
    assert str(ours.storage_meta.checkpoint_id) == str(tmp_path / "ours")
