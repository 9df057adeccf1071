"""The same promises on an object store: every value, overwriting, failures, several ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoints import assert_holds
from tests.distributed.launch import RankPool
from tests.states import assert_same_bits, opposite_of

from .plugins import OURS, OURS_FROM_STOCK, Plugin, quiet_stock
from .values import all_values, trained, trained_state

pytestmark = [pytest.mark.s3, pytest.mark.azure, pytest.mark.gcs, *quiet_stock]

Store = tuple[str, dict[str, Any]]


def _state_of_blocks(seed: str) -> dict[str, Any]:
    return {**trained_state(seed), "w": trained(torch.float32, (900, 700), seed)}


_FIXTURES = {"moto": "s3_store", "real S3": "real_s3_store", "azure": "azure_store", "gcs": "gcs_store"}


@pytest.fixture(params=list(_FIXTURES))
def object_store(request: pytest.FixtureRequest) -> Store:
    store: Store = request.getfixturevalue(_FIXTURES[request.param])
    return store


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # adlfs does, under stock's writer
@pytest.mark.parametrize("plugin", [OURS, OURS_FROM_STOCK], ids=str)
def test_every_value(object_store: Store, plugin: Plugin) -> None:
    url, options = object_store
    dcp.save(all_values(), storage_writer=plugin.writer(url, **options))
    assert_holds(plugin.reader(url, **options), all_values())


def _sharded(value: torch.Tensor, dim: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)


def _save_rows_and_load_columns(url: str, options: dict[str, Any]) -> None:
    value = _state_of_blocks("one")["w"]
    dcp.save({"w": _sharded(value, 0)}, storage_writer=OURS.writer(url, **options))
    state = {"w": _sharded(opposite_of(value), 1)}
    dcp.load(state, storage_reader=OURS.reader(url, **options))
    assert_same_bits(state["w"].to_local(), _sharded(value, 1).to_local())


@pytest.mark.slow
def test_reshard(object_store: Store, ranks: RankPool) -> None:
    url, options = object_store
    ranks.run(_save_rows_and_load_columns, url, options, world_size=2)
    assert_holds(OURS.reader(url, **options), {"w": _state_of_blocks("one")["w"]})
