"""Tensor subclasses: with a storage they are tensors like others, without they travel as `torch.save` payloads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils._pytree import tree_map_only

from tests.states import assert_same_bits, opposite_of

from .plugins import OURS, Plugin, on_every_reader, quiet_stock
from .values import trained

pytestmark = quiet_stock


class Named(torch.Tensor):
    """A subclass that keeps its elements in its own storage."""


class HighLow(torch.Tensor):
    """A float32 tensor kept as the sum of two others; it has no storage of its own."""

    high: torch.Tensor
    low: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> HighLow:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, high.shape, strides=high.stride(), dtype=high.dtype, device=high.device
        )

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __repr__(self, **_: Any) -> str:
        return f"HighLow({self.high}, {self.low})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation is one on each half; that is enough for copies and views."""
        halves = []
        for half in ("high", "low"):
            of_half = tree_map_only(HighLow, lambda tensor, half=half: getattr(tensor, half), (args, kwargs or {}))
            halves.append(function(*of_half[0], **of_half[1]))
        if function is torch.ops.aten.copy_.default:
            return args[0]
        if isinstance(halves[0], torch.Tensor):
            return cls(*halves)
        return halves[0]


@pytest.fixture(autouse=True)
def trusted_classes() -> Iterator[None]:
    with torch.serialization.safe_globals([HighLow, Named]):
        yield


def _high_low(seed: str, shape: tuple[int, ...] = (120, 70)) -> HighLow:
    return HighLow(trained(torch.float32, shape, seed), trained(torch.float32, shape, seed + "low") * 1e-8)


def test_the_subclass_hides_its_storage() -> None:
    assert _high_low("x").untyped_storage().nbytes() == 0 or _high_low("x").data_ptr() == 0


@on_every_reader
def test_subclass_that_hides_its_storage(tmp_path: Path, plugin: Plugin) -> None:
    saved = {"hidden": _high_low("one"), "plain": trained(torch.float32, (40,))}
    dcp.save(saved, storage_writer=plugin.writer(tmp_path))
    state = {"hidden": _high_low("other"), "plain": opposite_of(saved["plain"])}
    destination = state["hidden"]
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert state["hidden"] is destination
    assert_same_bits(destination.high, saved["hidden"].high, "high")
    assert_same_bits(destination.low, saved["hidden"].low, "low")
    assert_same_bits(state["plain"], saved["plain"], "plain")


@on_every_reader
def test_subclass_with_a_storage(tmp_path: Path, plugin: Plugin) -> None:
    values = {name: trained(torch.float32, (120, 70), name) for name in ("named", "view")}
    saved = {"named": values["named"].as_subclass(Named), "view": values["view"].as_subclass(Named).t()}
    dcp.save(saved, storage_writer=plugin.writer(tmp_path))
    state = {"named": opposite_of(values["named"]), "view": opposite_of(values["view"].t()).as_subclass(Named)}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same_bits(state["named"].as_subclass(torch.Tensor), values["named"], "named")
    assert_same_bits(state["view"].as_subclass(torch.Tensor), values["view"].t(), "view")


def test_class_that_is_not_trusted_is_refused(tmp_path: Path) -> None:
    dcp.save({"hidden": _high_low("one")}, storage_writer=OURS.writer(tmp_path))
    torch.serialization.clear_safe_globals()
    with pytest.raises(dcp.CheckpointException, match="HighLow"):
        dcp.load({"hidden": _high_low("other")}, storage_reader=OURS.reader(tmp_path))
