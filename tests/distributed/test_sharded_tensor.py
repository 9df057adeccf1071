"""ShardedTensor: FSDP1's sharded and flattened state, and shards cut by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from tests.conformance.plugins import Plugin, on_every_plugin, quiet_stock
from tests.conformance.values import trained
from tests.states import assert_same, assert_same_bits, opposite_of

from .jobs import Model, whole
from .launch import RankPool

pytestmark = quiet_stock

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def _rows(starts: list[int], stop: int, width: int) -> list[Box]:
    return [((start, 0), (end - start, width)) for start, end in zip(starts, [*starts[1:], stop], strict=True)]


# For each number of ranks the boxes of a 60 x 50 tensor on each rank: uneven, several on one, none on another.
CUTS: dict[int, list[list[Box]]] = {
    4: [
        _rows([0, 1], 7, 50),
        [],
        [((7, 0), (53, 13)), ((7, 40), (20, 10))],
        [((7, 13), (53, 27)), ((27, 40), (33, 10))],
    ],
    3: [_rows([0], 20, 50), _rows([20], 30, 50), _rows([30, 40], 60, 50)],
    2: [[((0, 0), (60, 25))], [((0, 25), (60, 25))]],
    1: [_rows([0, 59], 60, 50)],
}


def _cut(value: torch.Tensor, boxes: list[Box]) -> ShardedTensor:
    rank = dist.get_rank()
    shards = []
    for offsets, sizes in boxes:
        part = value[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
        shards.append(Shard.from_tensor_and_offsets(part.contiguous(), list(offsets), rank))
    return sharded_tensor.init_from_local_shards(shards, *value.shape)


def _values() -> dict[str, torch.Tensor]:
    return {"float32": trained(torch.float32, (60, 50)), "bfloat16": trained(torch.bfloat16, (60, 50))}


def _flat(value: torch.Tensor) -> ShardedTensor:
    """As FSDP1 flattens: one long vector, in equal parts, the last one short."""
    vector, rank = value.reshape(-1), dist.get_rank()
    step = math.ceil(len(vector) / dist.get_world_size())
    part = vector[rank * step : (rank + 1) * step]
    shard = Shard.from_tensor_and_offsets(part.clone(), [rank * step], rank)
    return sharded_tensor.init_from_local_shards([shard], len(vector))


def _save_cut(plugin: Plugin, path: Path) -> None:
    boxes = CUTS[dist.get_world_size()][dist.get_rank()]
    state = {name: _cut(value, boxes) for name, value in _values().items()}
    dcp.save({"cut": state, "flat": _flat(_values()["float32"])}, storage_writer=plugin.writer(path))


def _load_cut(plugin: Plugin, path: Path) -> None:
    boxes = CUTS[dist.get_world_size()][dist.get_rank()]
    cut = {name: _cut(opposite_of(value), boxes) for name, value in _values().items()}
    state = {"cut": cut, "flat": _flat(opposite_of(_values()["float32"]))}
    dcp.load(state, storage_reader=plugin.reader(path))
    expected = _values()
    for name, value in expected.items():
        assert_same_bits(whole(state["cut"][name]), value, name)
    assert_same_bits(whole(state["flat"]), expected["float32"].reshape(-1), "flat")


@pytest.mark.ci
@on_every_plugin
@pytest.mark.parametrize(("saving_ranks", "loading_ranks"), [(4, 2), (4, 3), (2, 4), (3, 1), (1, 4)])
def test_shards_cut_by_hand(
    ranks: RankPool, tmp_path: Path, plugin: Plugin, saving_ranks: int, loading_ranks: int
) -> None:
    ranks.run(_save_cut, plugin, tmp_path, world_size=saving_ranks)
    ranks.run(_load_cut, plugin, tmp_path, world_size=loading_ranks)


@on_every_plugin
def test_sharded_tensor_as_plain_tensor(ranks: RankPool, tmp_path: Path, plugin: Plugin) -> None:
    ranks.run(_save_cut, plugin, tmp_path, world_size=4)
    state: dict[str, Any] = {"cut": {name: opposite_of(value) for name, value in _values().items()}}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same(state["cut"], _values())


def _fsdp1(seed: int) -> tuple[FullyShardedDataParallel, torch.optim.Optimizer]:
    model = Model(seed, torch.device("cpu")).float()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, inputs: tuple(x.float() for x in inputs))
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, foreach=False)
    wrapped(torch.arange(8)).square().sum().backward()
    optimizer.step()
    return wrapped, optimizer


def _fsdp1_state(kind: StateDictType, model: FullyShardedDataParallel, optimizer: Any) -> dict[str, Any]:
    with FullyShardedDataParallel.state_dict_type(model, kind):
        if kind == StateDictType.LOCAL_STATE_DICT:
            local = model.state_dict()
            return {"model": {key: value for key, value in local.items() if isinstance(value, ShardedTensor)}}
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}


def _save_fsdp1(plugin: Plugin, path: Path, kind: StateDictType) -> Any:
    state = _fsdp1_state(kind, *_fsdp1(1))
    kinds = {type(value) for value in state["model"].values()}
    assert ShardedTensor in kinds, kinds
    dcp.save(state, storage_writer=plugin.writer(path))
    return whole(state)


def _load_fsdp1(plugin: Plugin, path: Path, kind: StateDictType) -> Any:
    model, optimizer = _fsdp1(2)
    state = _fsdp1_state(kind, model, optimizer)
    dcp.load(state, storage_reader=plugin.reader(path))
    return whole(state)


@on_every_plugin
@pytest.mark.parametrize(
    ("kind", "saving_ranks", "loading_ranks"),
    [
        (StateDictType.SHARDED_STATE_DICT, 4, 2),
        (StateDictType.SHARDED_STATE_DICT, 2, 3),
        # A flat parameter's length depends on the number of ranks.
        (StateDictType.LOCAL_STATE_DICT, 4, 4),
    ],
    ids=["sharded-4-2", "sharded-2-3", "flattened-4-4"],
)
def test_fsdp1(
    ranks: RankPool, tmp_path: Path, plugin: Plugin, kind: StateDictType, saving_ranks: int, loading_ranks: int
) -> None:
    saved = ranks.run(_save_fsdp1, plugin, tmp_path, kind, world_size=saving_ranks)
    for state in ranks.run(_load_fsdp1, plugin, tmp_path, kind, world_size=loading_ranks):
        assert_same(state, saved[0])
