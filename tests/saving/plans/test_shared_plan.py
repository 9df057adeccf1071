"""Plans that each rank computes are those that DCP's planner would make, for any meshes and placements."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_nvcomp.calls.values import flatten
from dcp_nvcomp.format.metadata.paths import merged_paths, paths_to_store, split_paths
from dcp_nvcomp.format.metadata.rows import serialize_arrays, unfolded
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.plans.array_plan import ArrayPlan
from dcp_nvcomp.saving.plans.balance import balanced
from dcp_nvcomp.saving.plans.global_plan import PlacedItems
from dcp_nvcomp.saving.plans.layouts import IrregularError
from dcp_nvcomp.saving.plans.shared_plan import SharedPlan, plan_all
from dcp_nvcomp.saving.plans.structure import Described, Part, described, structure_of
from tests.effort import examples

State = dict[str, Any]
Build = Callable[[int, int], State]  # of a rank, and of how many there are


@dataclass(frozen=True)
class Rank:
    """What one rank brings to a save, and what it would bring to DCP's."""

    described: Described | None
    flat: list[str]
    paths: dict[str, Any]
    plan: SavePlan


def on_rank(rank: int, world: int, build: Build) -> Rank:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        flat = flatten(build(rank, world))
        structure = structure_of(flat.values, flat.paths)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(flat.values, is_coordinator=rank == 0)
        found = None if structure is None else described(structure, flat.values)
        return Rank(found, list(flat.values), paths_to_store(flat.paths), planner.create_local_plan())
    finally:
        dist.destroy_process_group()


def computed(
    ranks: Sequence[Rank], *, lowest_rank: bool = False, derived: Mapping[str, str] = MappingProxyType({})
) -> SharedPlan:
    """Plan as every rank does, from what all of them have described and sent."""
    parts: dict[tuple[int, bytes], Part] = {}
    for rank in ranks:
        assert rank.described is not None
        for column, part in enumerate(rank.described.parts):
            sent = Part.unpacked(part.packed)
            assert (sent, sent.digest) == (part, part.digest)
            parts.setdefault((column, part.digest), sent)
    order = {key: number for number, key in enumerate(sorted(parts, key=lambda key: key[0]))}
    parts_of = np.array([[order[at, part.digest] for at, part in enumerate(_parts(rank))] for rank in ranks])
    places = [rank.described.places for rank in ranks if rank.described is not None]
    distinct = [parts[key] for key in order]
    members = [rank.described.members for rank in ranks if rank.described is not None]
    return plan_all(distinct, parts_of, places, members=members, lowest_rank=lowest_rank, derived=derived)


def _parts(rank: Rank) -> tuple[Part, ...]:
    assert rank.described is not None
    return rank.described.parts


def as_dcp(
    ranks: Sequence[Rank], *, lowest_rank: bool = False, derived: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[SavePlan], Metadata]:
    """What DCP's coordinator makes of the ranks' plans, with our rule of who writes what several have."""
    planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=lowest_rank)
    plans = [rank.plan for rank in ranks]
    return planner.create_global_plan(plans if lowest_rank else balanced(plans, derived))


def without_strides_of_shards(ranks: list[Rank]) -> list[Rank]:
    """Where the shards of ranks have different strides DCP notes, from torch 2.15 on, those of one rank; here none."""
    strides: dict[str, set[Any]] = {}
    for rank in ranks:
        for item in rank.plan.items:
            if item.tensor_data is not None:
                strides.setdefault(item.index.fqn, set()).add(getattr(item.tensor_data.properties, "strides", None))
    for rank in ranks:
        for item in rank.plan.items:
            if item.tensor_data is not None and len(strides[item.index.fqn]) > 1:
                item.tensor_data.properties.strides = None  # type: ignore[attr-defined, unused-ignore]
    return ranks


def assert_as_dcp(build: Build, world: int, derived: Mapping[str, str] = MappingProxyType({})) -> bool:
    """Fail unless both plan alike; return whether DCP can save such a state at all."""
    ranks = without_strides_of_shards([on_rank(rank, world, build) for rank in range(world)])
    can = True
    for lowest_rank in (False, True):
        try:
            theirs, metadata = as_dcp(ranks, lowest_rank=lowest_rank, derived=derived)
        except ValueError:
            with pytest.raises(IrregularError):
                computed(ranks, lowest_rank=lowest_rank)
            can = False
            continue
        ours = computed(ranks, lowest_rank=lowest_rank, derived=derived)
        for rank in range(world):
            mine, other = ours.save_plan(rank).items, theirs[rank].items
            by_index = {(item.index.fqn, item.index.offset): item for item in mine}
            assert len(by_index) == len(mine) == len(other)
            for item in other:
                assert by_index[item.index.fqn, item.index.offset] == item
                assert by_index[item.index.fqn, item.index.offset].index.index == item.index.index
        assert_published(ours, ranks, theirs, metadata)
    return can


def assert_published(plan: SharedPlan, ranks: Sequence[Rank], plans: Sequence[SavePlan], metadata: Metadata) -> None:
    """Fail unless `.metadata` of arrays is DCP's, by pickle and by the safe reader."""
    of_all = ArrayPlan(plan, ranks[0].flat, has_paths=True)
    files = [(f"__{rank}_0_{rank:032x}.distcp", 10_000, 100, 7) for rank in range(len(plans))]
    placed = []
    for rank in range(len(plans)):
        count = len(plan.save_plan(rank).items)
        backwards = array("I", reversed(range(count)))
        placed.append(PlacedItems((files[rank],) if count else (), (count,) if count else (), backwards, backwards))
    arrays = of_all.arrays(of_all.placed(placed), StorageMeta("here", "0" * 32), "1.0.0")
    data = serialize_arrays(arrays)
    fqns = metadata.state_dict_metadata
    paths = merged_paths([split_paths(rank.paths, fqns) for rank in ranks], fqns)
    owners = {item.index: rank for rank, one in enumerate(plans) for item in one.items}
    read = pickle.loads(data)
    for found in (read, parse_metadata(data, path="here"), unfolded(arrays)):
        assert found.state_dict_metadata == metadata.state_dict_metadata
        assert list(found.state_dict_metadata)[: len(ranks[0].flat)] == ranks[0].flat
        assert found.planner_data == paths
        assert found.storage_data.keys() == owners.keys()
        for rank in range(len(plans)):
            for number, item in enumerate(plan.save_plan(rank).items):
                file, record = found.storage_data[item.index]
                assert (tuple(file), record) == (files[rank], number)
        assert (found.storage_meta, found.version) == (arrays.storage_meta, "1.0.0")
    hints = {(index.fqn, index.offset): index.index for index in read.storage_data}
    assert hints == {(index.fqn, index.offset): index.index for index in owners}


# --- states ----------------------------------------------------------------------------------------------------------

SHAPES = ((16, 8), (7, 3), (2, 5), (1, 4), (13,), (64, 3, 2), (0, 4), (31, 17))


def dtensor(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: Any = torch.float32
) -> DTensor:
    whole = torch.empty(shape, dtype=dtype, device="meta")
    local = torch.empty(_local_shape(mesh, placements, shape), dtype=dtype)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _local_shape(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[int, ...]:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if mesh.get_coordinate() is None:
        return (0,)
    return compute_local_shape_and_global_offset(shape, mesh, placements)[0]


def common() -> State:
    return {"bias": torch.empty(5), "scalar": torch.tensor(1.0), "nested": {"b": [torch.empty(2, 3)]}, "step": 3}


def fsdp(rank: int, world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    made = {f"w{number}": dtensor(mesh, [Shard(0)], shape) for number, shape in enumerate(SHAPES)}
    return {"model": made, "columns": dtensor(mesh, [Shard(1)], (6, 22), torch.bfloat16), **common()}


def hsdp(rank: int, world: int) -> State:
    mesh = init_device_mesh("cpu", (2, world // 2))
    made = {f"w{number}": dtensor(mesh, [Replicate(), Shard(0)], shape) for number, shape in enumerate(SHAPES)}
    return {"model": made, "whole": dtensor(mesh, [Replicate(), Replicate()], (9, 2)), **common()}


def fsdp_and_tp(rank: int, world: int) -> State:
    mesh, rows = init_device_mesh("cpu", (world // 2, 2)), 2 * world
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    made = {"columns": dtensor(mesh, strided, (rows, 6)), "rows": dtensor(mesh, [Shard(0), Shard(1)], (rows, 7))}
    return {"model": {**made, "norm": dtensor(mesh, [Shard(0), Replicate()], (13,))}, **common()}


def hsdp_and_tp(rank: int, world: int) -> State:
    mesh, rows = init_device_mesh("cpu", (2, world // 4, 2)), 2 * world
    strided = [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]
    made = {"columns": dtensor(mesh, strided, (rows, 6))}
    return {"model": {**made, "norm": dtensor(mesh, [Replicate(), Shard(0), Replicate()], (13,))}, **common()}


def parts_of_the_mesh(rank: int, world: int) -> State:
    """Meshes that differ from rank to rank, and one that half of the ranks are in."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    made = {f"w{number}": dtensor(mesh["tp"], [Shard(0)], shape) for number, shape in enumerate(SHAPES)}
    return {"tp": made, **common()}


def pipeline(rank: int, world: int) -> State:
    """Two stages of other keys, and some on both."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    stage = 0 if rank < world // 2 else 1
    made = {f"layers.{2 * n + stage}": dtensor(mesh["dp"], [Shard(0)], shape) for n, shape in enumerate(SHAPES)}
    return {"model": made, **common(), f"norm{stage}": torch.empty(6), f"object{stage}": [1]}


def of_each_rank(rank: int, world: int) -> State:
    """What a TrainingState has of each rank, and keys that are no text."""
    own = {"generators": {str(rank): (1,)}, "data": {rank: {"loader": (2,)}}, "all": {7: (3,), "7.5": 1}}
    return {**hsdp(rank, world), "train": own}


BUILDS = (fsdp, hsdp, fsdp_and_tp, hsdp_and_tp, parts_of_the_mesh, pipeline, of_each_rank)


@pytest.mark.parametrize("world", [4, 8, 12])
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.__name__)
def test_layouts_of_training_are_planned_as_dcp_does(build: Build, world: int) -> None:
    assert assert_as_dcp(build, world)


def stages_alike(rank: int, world: int) -> State:
    """Two stages, each on a mesh of its own, which call their first layer the same; one has another layer as well."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("pp", "dp"))
    stage = 0 if rank < world // 2 else 1
    made = {"first": dtensor(mesh["dp"], [Shard(0)], (16, 8)), f"w{stage}": dtensor(mesh["dp"], [Shard(0)], (16, 8))}
    return {"model": made, "embedding": dtensor(mesh, [Replicate(), Shard(0)], (16, 8)), **common()}


def test_shards_of_several_meshes_are_compared_and_no_others() -> None:
    for build in (fsdp, hsdp, fsdp_and_tp, hsdp_and_tp, pipeline, of_each_rank):
        plan = computed([on_rank(rank, 8, build) for rank in range(8)])
        assert not any(plan.compared_shards(rank).keys for rank in range(8)), build
        assert plan.differing_shards([array("I")] * 8) == {}
    plan = computed([on_rank(rank, 8, parts_of_the_mesh) for rank in range(8)])
    assert len(plan.compared_shards(5).keys) == len(SHAPES)
    plan = computed([on_rank(rank, 8, stages_alike) for rank in range(8)])
    assert [plan.compared_shards(rank).keys for rank in range(8)] == [("model.first",)] * 8
    for values, found in {
        (1, 2, 3, 4, 1, 2, 3, 4): {},
        (1, 2, 3, 4, 1, 2, 3, 5): {"model.first": [3, 7]},
        (1, 2, 3, 4, 5, 6, 7, 8): {"model.first": [0, 4]},
        (1, None, 3, 4, 1, 2, 9, 4): {"model.first": [2, 6]},  # a rank that could not look
    }.items():
        assert plan.differing_shards([array("I") if one is None else array("I", [one]) for one in values]) == found


def masters(rank: int, world: int) -> State:
    """HSDP in mixed precision, of layers of several sizes, one of them with its master sharded in another way."""
    mesh, both = init_device_mesh("cpu", (2, world // 2)), [Replicate(), Shard(0)]
    shapes = [(4 * world + 3 * number, 5 + number) for number in range(7)]
    state: State = {"model": {}, "master": {}, "m": {}, "ema": {}}
    for number, shape in enumerate(shapes):
        placements = [Replicate(), Shard(1)] if number == 3 else both
        state["model"][f"w{number}"] = dtensor(mesh, both, shape, torch.bfloat16)
        state["master"][f"w{number}"] = dtensor(mesh, placements, shape)
        state["m"][f"w{number}"] = dtensor(mesh, both, shape)
    state["model"]["norm"], state["master"]["norm"] = torch.ones(9, dtype=torch.bfloat16), torch.ones(9)
    state["ema"]["w1"] = dtensor(mesh, both, shapes[1])
    return {**state, **common()}


DERIVED = {"master.*": "model.*", "ema.*": "model.*", "m.w6": "m.w5", "m.w5": "m.w6"}


@pytest.mark.parametrize("world", [4, 8])
def test_masters_are_planned_with_their_weights(world: int) -> None:
    assert assert_as_dcp(masters, world, DERIVED)
    plan = computed([on_rank(rank, world, masters) for rank in range(world)], derived=DERIVED)
    owners = dict(zip(plan.keys, plan.owners, strict=True))
    for name in ("w0", "w1", "w2", "w4", "w5", "w6", "norm"):
        assert owners[f"master.{name}"].tolist() == owners[f"model.{name}"].tolist(), name
    assert owners["ema.w1"].tolist() == owners["model.w1"].tolist()
    written = [sum(map(planned_nbytes, plan.save_plan(rank).items)) for rank in range(world)]
    assert max(written) < 2 * sum(written) / world, "and still shared out"


def test_one_rank_alone() -> None:
    assert assert_as_dcp(lambda rank, world: common(), 1)
    assert assert_as_dcp(fsdp, 1)


# --- any meshes ------------------------------------------------------------------------------------------------------


@st.composite
def _tensors(draw: st.DrawFn, mesh_shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[Placement]]:
    shape = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    placements: list[Placement] = []
    for at in range(len(mesh_shape)):
        dim = draw(st.none() | st.integers(0, len(shape) - 1))
        placements.append(Replicate() if dim is None else Shard(dim))
        if dim is not None and at and isinstance(placements[-2], Shard) and draw(st.booleans()):
            # as FSDP2 makes them: what is cut last is cut first
            placements[-2:] = [_StridedShard(dim, split_factor=mesh_shape[at]), Shard(dim)]
            if draw(st.booleans()):
                shape[dim] = mesh_shape[at] * mesh_shape[at - 1] * draw(st.integers(0, 2))
    return tuple(shape), placements


@st.composite
def _builds(draw: st.DrawFn) -> tuple[Build, int]:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    world = int(np.prod(mesh_shape))
    tensors = draw(st.lists(_tensors(mesh_shape), max_size=4))
    missing = draw(st.sets(st.tuples(st.integers(0, world - 1), st.integers(0, 3)), max_size=3))
    plain = draw(st.lists(st.lists(st.integers(0, 4), max_size=2), max_size=3))
    objects = draw(st.lists(st.sampled_from(["all", "some", "own"]), max_size=3))

    def build(rank: int, _: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape)
        state: State = {
            f"d{n}": dtensor(mesh, placements, shape)
            for n, (shape, placements) in enumerate(tensors)
            if (rank, n) not in missing
        }
        state |= {f"p{n}": torch.empty(shape) for n, shape in enumerate(plain) if (rank, n) not in missing}
        for n, kind in enumerate(objects):
            if kind == "all" or (kind == "some" and rank % 2):
                state[f"o{n}"] = n
            elif kind == "own":
                state[f"o{n}.{rank}"] = n
        return state

    return build, world


@given(_builds())
@settings(max_examples=examples(600))
@pytest.mark.timeout(900)
def test_any_meshes_and_placements_are_planned_as_dcp_does(drawn: tuple[Build, int]) -> None:
    assert_as_dcp(*drawn)


# --- what is left to DCP ---------------------------------------------------------------------------------------------


def _ragged(rank: int, world: int) -> State:
    mesh = init_device_mesh("cpu", (world,))
    rows = world * (world + 1) // 2
    local = torch.empty(1 + rank, 2)
    return {
        "w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([rows, 2]), stride=(2, 1))
    }


class _Sub(torch.Tensor):
    pass


def _without_a_corner(rank: int, world: int) -> State:
    mesh = init_device_mesh("cpu", (2, 2))
    return {} if rank == 3 else {"w": dtensor(mesh, [Shard(0), Shard(1)], (4, 6))}


IRREGULAR: dict[str, Build] = {
    "a shard that no rank has": _without_a_corner,
    "a plain tensor of another shape": lambda rank, world: {"b": torch.empty(3 + (rank == 1))},
    "of another dtype": lambda rank, world: {"b": torch.empty(3, dtype=torch.float64 if rank else torch.float32)},
    "a tensor here, an object there": lambda rank, world: {"b": torch.empty(3) if rank else 1},
    "a DTensor here, a tensor there": lambda rank, world: (
        {"w7": torch.empty(31, 17)} if rank else fsdp(0, world)["model"]
    ),
}
UNDESCRIBED: dict[str, Build] = {
    "ragged": _ragged,
    "a subclass": lambda rank, world: {"b": torch.empty(3).as_subclass(_Sub)},
}


@pytest.mark.parametrize("build", IRREGULAR.values(), ids=IRREGULAR)
def test_what_ranks_have_differently_is_left_to_dcp(build: Build) -> None:
    with pytest.raises(IrregularError):
        computed([on_rank(rank, 4, build) for rank in range(4)])


@pytest.mark.parametrize("build", UNDESCRIBED.values(), ids=UNDESCRIBED)
def test_what_is_not_as_its_placements_say_is_not_described(build: Build) -> None:
    assert any(on_rank(rank, 4, build).described is None for rank in range(4))
