"""DTensors as tests/properties does not draw them: views, sub-meshes, and process groups of some ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.conformance.plugins import Plugin, on_every_plugin, quiet_stock
from tests.conformance.values import random_bits, trained
from tests.states import assert_same_bits, opposite_of

from .launch import RankPool

pytestmark = quiet_stock


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _strided_hold(value: torch.Tensor) -> DTensor:
    """Column shards that are views of the whole tensor on each rank, and transposed as well."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = value.shape[1] // dist.get_world_size()
    local = value[:, dist.get_rank() * columns :][:, :columns]
    return DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=value.shape, stride=value.stride())


def _strided() -> dict[str, torch.Tensor]:
    return {
        "columns": trained(torch.float32, (400, 600)),
        "transposed": trained(torch.bfloat16, (600, 400)).t(),
        "conj": random_bits(torch.complex64, (40, 60)).conj(),
    }


def _save_strided(plugin: Plugin, path: Path) -> None:
    dcp.save({key: _strided_hold(value) for key, value in _strided().items()}, storage_writer=plugin.writer(path))


def _load_strided(plugin: Plugin, path: Path) -> None:
    state = {key: _strided_hold(opposite_of(value)) for key, value in _strided().items()}
    dcp.load(state, storage_reader=plugin.reader(path))
    for key, value in _strided().items():
        assert_same_bits(_local(state[key]), _local(_strided_hold(value)), key)


@pytest.mark.ci
@on_every_plugin
@pytest.mark.parametrize(("saving_ranks", "loading_ranks"), [(4, 2), (2, 4)])
def test_local_tensors_that_are_views(
    ranks: RankPool, tmp_path: Path, plugin: Plugin, saving_ranks: int, loading_ranks: int
) -> None:
    ranks.run(_save_strided, plugin, tmp_path, world_size=saving_ranks)
    ranks.run(_load_strided, plugin, tmp_path, world_size=loading_ranks)


def _on_submesh(value: torch.Tensor, members: list[int]) -> DTensor:
    return distribute_tensor(value, DeviceMesh("cpu", members), [Shard(0)], src_data_rank=None)


def _save_on_submeshes(plugin: Plugin, path: Path) -> None:
    """As in pipeline parallelism: each stage's weights live on some of the ranks only."""
    state = {
        "first": _on_submesh(trained(torch.float32, (33, 5), "first"), [0, 1]),
        "second": _on_submesh(trained(torch.float32, (33, 5), "second"), [2, 3]),
        "odd": _on_submesh(trained(torch.float32, (33, 5), "odd"), [1, 3]),
        "all": _on_submesh(trained(torch.float32, (33, 5), "all"), [0, 1, 2, 3]),
    }
    dcp.save(state, storage_writer=plugin.writer(path))


def _load_on_submeshes(plugin: Plugin, path: Path, members: list[int]) -> None:
    values = {name: trained(torch.float32, (33, 5), name) for name in ("first", "second", "odd", "all")}
    state = {name: _on_submesh(opposite_of(value), members) for name, value in values.items()}
    dcp.load(state, storage_reader=plugin.reader(path))
    if dist.get_rank() in members:
        for name, value in values.items():
            assert_same_bits(_local(state[name]), _local(_on_submesh(value, members)), name)


@pytest.mark.ci
@on_every_plugin
@pytest.mark.parametrize(("loading_ranks", "members"), [(4, [1, 3]), (3, [2]), (2, [0, 1])], ids=str)
def test_submeshes(ranks: RankPool, tmp_path: Path, plugin: Plugin, loading_ranks: int, members: list[int]) -> None:
    ranks.run(_save_on_submeshes, plugin, tmp_path, world_size=4)
    ranks.run(_load_on_submeshes, plugin, tmp_path, members, world_size=loading_ranks)


def _save_in_a_subgroup(plugin: Plugin, path: Path, members: list[int]) -> None:
    """Only the members call; the coordinator is their first, which is not rank 0 of the job."""
    group = dist.new_group(members)
    if dist.get_rank() in members:
        value = trained(torch.float32, (33, 5), "group")
        dcp.save(
            {"w": _on_mesh_of(group, value), "plain": value}, storage_writer=plugin.writer(path), process_group=group
        )
        state = {"w": _on_mesh_of(group, opposite_of(value)), "plain": opposite_of(value)}
        dcp.load(state, storage_reader=plugin.reader(path), process_group=group)
        assert_same_bits(_local(state["w"]), _local(_on_mesh_of(group, value)))
        assert_same_bits(state["plain"], value)
    dist.barrier()


def _on_mesh_of(group: dist.ProcessGroup, value: torch.Tensor) -> DTensor:
    return distribute_tensor(value, DeviceMesh.from_group(group, "cpu"), [Shard(0)], src_data_rank=None)


@on_every_plugin
@pytest.mark.parametrize("members", [[0, 1], [1, 2, 3], [2]], ids=str)
def test_process_group_of_some_ranks(ranks: RankPool, tmp_path: Path, plugin: Plugin, members: list[int]) -> None:
    ranks.run(_save_in_a_subgroup, plugin, tmp_path, members, world_size=4)
    state = {"w": torch.zeros(33, 5)}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same_bits(state["w"], trained(torch.float32, (33, 5), "group"))
