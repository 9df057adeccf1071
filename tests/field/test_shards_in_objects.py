"""Tensors of all ranks in tuples, sets and other objects: of these a checkpoint keeps one rank's pickle."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_nvcomp import CheckpointManager, async_save, load, save
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.saving.encode.objects import serialized
from dcp_nvcomp.saving.plans.fingerprints import fingerprints
from tests.distributed.launch import RankPool

Make = Callable[[Any], Any]
of_shards = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")  # torch's, of ShardedTensor


@dataclass
class Setting:
    tensor: Any
    more: int = 1


class Opaque:
    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


HOLDERS: dict[str, Make] = {
    "tuple": lambda tensor: (tensor, 1),
    "deep": lambda tensor: ({"a": [(1, {"b": tensor})]},),
    "deque": lambda tensor: collections.deque([tensor]),
    "dataclass": Setting,
    "object": Opaque,
    "long": lambda tensor: (torch.zeros(5000)[:3], list(range(5000)), tensor),
}


@pytest.fixture(scope="module")
def first_of_two() -> Iterator[None]:
    """This process as rank 0 of two."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def dtensor(*placements: Placement, shape: tuple[int, ...] = (2,), value: float = 1.0) -> DTensor:
    return DTensor.from_local(torch.full((3,), value), init_device_mesh("cpu", shape), placements, run_check=False)


def cut(*ranks: int) -> Any:
    """A tensor of which rank 0 has the shards that are its own among those of some ranks."""
    shards = [
        sharded_tensor.Shard.from_tensor_and_offsets(torch.ones(2), [2 * number], rank)
        for number, rank in enumerate(ranks)
        if rank == 0
    ]
    placed = [
        sharded_tensor.ShardMetadata([2 * number], [2], f"rank:{rank}/cpu")  # type: ignore[attr-defined]
        for number, rank in enumerate(ranks)
    ]
    properties = sharded_tensor.TensorProperties(dtype=torch.float32)  # type: ignore[attr-defined]
    metadata = sharded_tensor.ShardedTensorMetadata(placed, torch.Size([2 * len(ranks)]), properties)  # type: ignore[attr-defined]
    return sharded_tensor.ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)


SHARDED: dict[str, Callable[[], Any]] = {
    "rows": lambda: dtensor(Shard(0)),
    "sum": lambda: dtensor(Partial()),
    "parameter": lambda: torch.nn.Parameter(dtensor(Shard(0))),
    "one dimension": lambda: dtensor(Replicate(), Shard(0), shape=(1, 2)),
    "of another rank": lambda: DTensor.from_local(torch.ones(0), DeviceMesh("cpu", [1]), [Replicate()]),
    "ShardedTensor": lambda: cut(0, 1),
}
WHOLE: dict[str, Callable[[], Any]] = {
    "replicated": lambda: dtensor(Replicate()),
    "mesh of one": lambda: DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [0]), [Shard(0)]),
    "dimension of one": lambda: dtensor(Shard(0), Replicate(), shape=(1, 2)),
    "ShardedTensor": lambda: cut(0, 0),
    "plain": lambda: torch.ones(3),
}


@pytest.mark.usefixtures("first_of_two")
@pytest.mark.parametrize("tensor", SHARDED.values(), ids=SHARDED)
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_one_rank_does_not_save_its_shard_for_all(
    tmp_path: Path, tensor: Callable[[], Any], holder: Callable[[Any], Any]
) -> None:
    with pytest.raises(ConfigurationError, match="lies in a tuple, a set or another object.*key 'opt.it'"):
        save({"opt": {"it": holder(tensor()), "beside": 1}}, tmp_path, no_dist=True)
    with pytest.raises(ConfigurationError, match="key 'it'"):
        async_save({"it": holder(tensor())}, tmp_path, no_dist=True).upload_completion.result(60)
    assert not list(tmp_path.glob("**/.metadata"))


@pytest.mark.usefixtures("first_of_two")
@of_shards
@pytest.mark.parametrize("tensor", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_what_a_rank_has_whole_is_saved_as_ever(tensor: Callable[[], Any], holder: Callable[[Any], Any]) -> None:
    value = holder(tensor())
    assert serialized(value, whole=True).getvalue() == serialized(value).getvalue()


@pytest.mark.usefixtures("first_of_two")
@of_shards
def test_looking_for_differences_runs_nothing_on_tensors_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (dtensor(Replicate(), value=value) for value in (1.0, 2.0))
    values = [one, other, *(make() for make in (*SHARDED.values(), *WHOLE.values()))]

    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a collective could begin here")

    monkeypatch.setattr(DTensor, "__torch_dispatch__", never)
    found = [fingerprints({"x": (value, 1)}) for value in values]
    assert found[0] != found[1]
    assert found[0] == fingerprints({"x": (one, 1)})


def _save_in_objects(place: Path, call: str) -> tuple[str, bool]:
    rank = dist.get_rank()
    shards, copies = dtensor(Shard(0), value=float(rank)), dtensor(Replicate(), value=7.0)

    def put(state: dict[str, Any], name: str) -> None:
        if call == "save":
            save(state, place / name)
        elif call == "async_save":
            async_save(state, place / name).upload_completion.result(60)
        else:
            with CheckpointManager(place / name, every=1, preemption_signals=()) as manager:
                manager.save(1, state).saved.result(60)

    with pytest.raises(CheckpointError) as caught:
        put({"opt": {"pair": (shards, 1)}, "w": shards}, "refused")
    put({"opt": {"pair": (copies, 1), "list": [shards, 1]}, "w": shards}, "taken")
    if call == "save":
        state = {"opt": {"pair": (None, 0), "list": [dtensor(Shard(0)), 0]}, "w": dtensor(Shard(0))}
        load(state, place / "taken")
        assert state["opt"]["pair"][0].to_local().tolist() == [7.0] * 3  # type: ignore[index]
        assert state["opt"]["list"][0].to_local().tolist() == [float(rank)] * 3  # type: ignore[index]
    return str(caught.value), bool(list((place / "refused").glob("**/.metadata")))


@pytest.mark.parametrize("call", ["save", "async_save", "manager"])
def test_a_shard_in_a_tuple_is_refused_on_all_ranks(ranks: RankPool, tmp_path: Path, call: str) -> None:
    for told, is_published in ranks.run(_save_in_objects, tmp_path, call, world_size=2):
        assert "DTensor of which this rank has a shard" in told and "opt.pair" in told, told
        assert not is_published
