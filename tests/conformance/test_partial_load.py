"""Loading some of the keys, other keys, other shapes and other dtypes than were saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from dcp_nvcomp import errors
from tests.saving.test_sizes import Rows
from tests.states import assert_same_bits, opposite_of

from .plugins import ORACLE, OURS, OURS_FROM_STOCK, Plugin, cause_of, on_every_reader, quiet_stock
from .values import random_bits, trained

pytestmark = quiet_stock


def _model_and_optimizer() -> dict[str, Any]:
    return {
        "model": {"a": trained(torch.float32, (700, 500)), "b": trained(torch.bfloat16, (33,)), "c": {"d": [1, 2]}},
        "optimizer": {"a": trained(torch.float32, (700, 500), "exp_avg"), "step": torch.tensor(9.0)},
        "epoch": 3,
    }


@pytest.fixture
def checkpoint(tmp_path: Path, plugin: Plugin) -> Path:
    dcp.save(_model_and_optimizer(), storage_writer=plugin.writer(tmp_path / "c"))
    return tmp_path / "c"


@on_every_reader
def test_some_keys(checkpoint: Path, plugin: Plugin) -> None:
    state: dict[str, Any] = {"model": {"b": opposite_of(_model_and_optimizer()["model"]["b"])}, "epoch": None}
    dcp.load(state, storage_reader=plugin.reader(checkpoint))
    assert state["epoch"] == 3
    assert_same_bits(state["model"]["b"], _model_and_optimizer()["model"]["b"])
    assert set(state["model"]) == {"b"}


@on_every_reader
def test_no_keys(checkpoint: Path, plugin: Plugin) -> None:
    dcp.load({}, storage_reader=plugin.reader(checkpoint))


@on_every_reader
def test_key_that_is_not_there(checkpoint: Path, plugin: Plugin) -> None:
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: model.x"):
        dcp.load({"model": {"x": torch.zeros(3)}}, storage_reader=plugin.reader(checkpoint))


@on_every_reader
def test_partial_load_leaves_the_missing_alone(checkpoint: Path, plugin: Plugin) -> None:
    state = {"model": {"x": torch.full((3,), 7.0), "a": opposite_of(_model_and_optimizer()["model"]["a"])}, "y": "mine"}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, storage_reader=plugin.reader(checkpoint), planner=planner)
    assert_same_bits(state["model"]["x"], torch.full((3,), 7.0))
    assert_same_bits(state["model"]["a"], _model_and_optimizer()["model"]["a"])
    assert state["y"] == "mine"


@on_every_reader
def test_keys_without_a_state_dict(checkpoint: Path, plugin: Plugin) -> None:
    loaded = _load_state_dict_from_keys({"model", "epoch"}, storage_reader=plugin.reader(checkpoint))
    expected = _model_and_optimizer()
    assert set(loaded) == {"model", "epoch"} and loaded["epoch"] == 3 and loaded["model"]["c"] == {"d": [1, 2]}
    for name in ("a", "b"):
        assert_same_bits(loaded["model"][name], expected["model"][name], name)
    only = _load_state_dict_from_keys("optimizer.a", storage_reader=plugin.reader(checkpoint))
    assert set(only) == {"optimizer"} and set(only["optimizer"]) == {"a"}
    assert_same_bits(only["optimizer"]["a"], expected["optimizer"]["a"])


@on_every_reader
def test_whole_checkpoint_without_a_state_dict(checkpoint: Path, plugin: Plugin) -> None:
    loaded = _load_state_dict_from_keys(checkpoint_id=checkpoint, storage_reader=plugin.reader("elsewhere"))
    assert set(loaded) == {"model", "optimizer", "epoch"}
    assert_same_bits(loaded["optimizer"]["step"], torch.tensor(9.0))


@on_every_reader
@pytest.mark.parametrize("shape", [(500, 700), (700, 501), (350_000,), (700, 500, 1)], ids=str)
def test_other_shape_is_refused(checkpoint: Path, plugin: Plugin, shape: tuple[int, ...]) -> None:
    with pytest.raises(dcp.CheckpointException, match="model.a") as caught:
        dcp.load({"model": {"a": torch.zeros(shape)}}, storage_reader=plugin.reader(checkpoint))
    assert isinstance(cause_of(caught.value), ValueError)


class _ShortPlanner(DefaultLoadPlanner):
    """Gives a place that is too small for what it asked for."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return super().resolve_tensor(read_item)[:-1]


@on_every_reader
def test_destination_smaller_than_the_request_is_refused(checkpoint: Path, plugin: Plugin) -> None:
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(
            {"model": {"a": torch.zeros(700, 500)}}, storage_reader=plugin.reader(checkpoint), planner=_ShortPlanner()
        )
    if plugin.reads == "ours":
        error = cause_of(caught.value)
        assert isinstance(error, errors.ShapeMismatchError) and error.fqn == "model.a"


CONVERSIONS = [
    (torch.float32, torch.float64),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.int32),
    (torch.int64, torch.float32),
    (torch.bool, torch.float16),
    (torch.float32, torch.complex64),
    (torch.float8_e4m3fn, torch.float32),
]


@on_every_reader
@pytest.mark.parametrize(("saved", "wanted"), CONVERSIONS, ids=str)
def test_other_dtype_is_converted_with_one_warning(
    tmp_path: Path, plugin: Plugin, saved: torch.dtype, wanted: torch.dtype
) -> None:
    # Large enough for several blocks; conversion must not depend on how they are cut.
    values = {"a": trained(torch.float32, (900, 800)).mul(1e4).to(saved), "b": trained(torch.float32, (7,)).to(saved)}
    same = random_bits(torch.bfloat16, (9,))
    dcp.save({**values, "same": same}, storage_writer=plugin.writer(tmp_path))
    state = {name: torch.zeros(value.shape, dtype=wanted) for name, value in values.items()}
    state["same"] = opposite_of(same)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.load(state, storage_reader=plugin.reader(tmp_path))
    ours = [warning for warning in caught if not str(warning.message).startswith("torch.distributed is")]
    assert len(ours) == (1 if plugin.reads == "ours" else 0), [str(warning.message) for warning in ours]
    assert all("converted" in str(warning.message) and str(saved) in str(warning.message) for warning in ours)
    for name, value in values.items():
        expected = torch.zeros(value.shape, dtype=wanted)
        expected.copy_(value)
        assert_same_bits(state[name], expected, name)
    assert_same_bits(state["same"], same)


@pytest.mark.parametrize("plugin", [ORACLE, OURS, OURS_FROM_STOCK], ids=str)
@pytest.mark.parametrize("rows", [(0, 1), (699, 700), (123, 456)], ids=str)
def test_some_rows(tmp_path: Path, plugin: Plugin, rows: tuple[int, int]) -> None:
    """What a rank of a larger job asks for: a part of the tensor, here asked for by a planner of its own."""
    expected = _model_and_optimizer()["model"]["a"]
    dcp.save({"a": expected}, storage_writer=plugin.writer(tmp_path))
    state = {"a": opposite_of(expected)}
    dcp.load(state, storage_reader=plugin.reader(tmp_path), planner=Rows(*rows))
    assert_same_bits(state["a"][slice(*rows)], expected[slice(*rows)])
