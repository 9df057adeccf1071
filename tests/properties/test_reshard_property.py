"""Twenty tensors of every kind, saved on four ranks, come back bit for bit on any number of ranks in any placement."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.conformance.plugins import OURS, STOCK, Plugin
from tests.conformance.values import VALUES, random_bits, trained
from tests.distributed.launch import RankPool, ranks
from tests.effort import examples
from tests.states import assert_same_bits, opposite_of

__all__ = ["ranks"]

SAVING_RANKS = 4
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1)]}


def _tensors() -> dict[str, torch.Tensor]:
    """The twenty, of which the ranks shard those that are not views of a special kind."""
    sharded = {
        "bf16": trained(torch.bfloat16, (101, 64)),
        "fp16": trained(torch.float16, (64, 33, 3)),
        "fp32": trained(torch.float32, (257, 1100)),
        "fp64": trained(torch.float64, (7, 31)),
        "fp8": trained(torch.float8_e4m3fn, (400, 51)),
        "second-moment": trained(torch.float32, (257, 300)) ** 2,
        "complex": random_bits(torch.complex64, (12, 9)),
        "int": torch.arange(1000).reshape(20, 50),
        "uint16": random_bits(torch.uint16, (15, 16)),
        "bool": random_bits(torch.bool, (50, 31)),
        "few-rows": trained(torch.float32, (3, 500)),
        "one-row": trained(torch.bfloat16, (1, 77)),
        "vector": trained(torch.float32, (1003,)),
        "scalar": torch.tensor(-0.0),
        "empty": torch.empty(0, 5),
        "nans": VALUES["specials-float32"]().reshape(-1, 10),
        "transposed": trained(torch.float32, (90, 110)).t(),
        "channels-last": VALUES["channels-last"](),
    }
    return {**sharded, "plain-conj": VALUES["conj-complex64"](), "plain-view": VALUES["view-of-larger-storage"]()}


FULL = _tensors()
SHAPES = {name: tuple(value.shape) for name, value in FULL.items()}
assert len(FULL) == 20


@dataclass(frozen=True)
class Layout:
    """The layout of the tensors on the ranks of one job.

    Args:
        mesh_shape: their device mesh.
        dims: for each tensor and each mesh dimension the dimension that it is sharded along, or None.
    """

    mesh_shape: tuple[int, ...]
    dims: dict[str, tuple[int | None, ...]]

    def hold(self, mesh: DeviceMesh, name: str, value: torch.Tensor) -> torch.Tensor:
        if name.startswith("plain"):
            return value
        placements: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in self.dims[name]]
        # Without a source rank nothing is sent: every rank has the whole value and cuts its part.
        return distribute_tensor(value, mesh, placements, src_data_rank=None)


@st.composite
def layouts(draw: st.DrawFn, world_size: int) -> Layout:
    mesh_shape = draw(st.sampled_from(MESHES[world_size]))
    dims = {}
    for name, shape in SHAPES.items():
        choices = st.sampled_from([None, *range(len(shape))])
        dims[name] = tuple(draw(choices) for _ in mesh_shape)
    return Layout(mesh_shape, dims)


def _mesh(layout: Layout) -> DeviceMesh:
    return init_device_mesh("cpu", layout.mesh_shape)


def _save(plugin: Plugin, path: Path, layout: Layout, options: dict[str, Any]) -> None:
    mesh = _mesh(layout)
    state = {name: layout.hold(mesh, name, value) for name, value in FULL.items()}
    dcp.save(state, storage_writer=plugin.writer(path, **options))


def _load(plugin: Plugin, path: Path, layout: Layout, names: list[str], options: dict[str, Any]) -> None:
    mesh = _mesh(layout)
    state = {name: layout.hold(mesh, name, opposite_of(FULL[name])) for name in names}
    dcp.load(state, storage_reader=plugin.reader(path, **options))
    for name in names:
        expected = layout.hold(mesh, name, FULL[name])
        actual = state[name]
        if isinstance(actual, DTensor):
            actual, expected = actual.to_local(), expected.to_local()
        assert_same_bits(actual, expected, f"{name} on rank {dist.get_rank()}")


def _check(ranks: RankPool, plugin: Plugin, data: st.DataObject) -> None:
    before = data.draw(layouts(SAVING_RANKS))
    world_size = data.draw(st.sampled_from([1, 2, 3, 4]))
    after = data.draw(layouts(world_size))
    names = data.draw(st.just(sorted(FULL)) | st.lists(st.sampled_from(sorted(FULL)), min_size=1, unique=True))
    writer_options: dict[str, Any] = {"thread_count": data.draw(st.sampled_from([1, 2]))}
    reader_options: dict[str, Any] = {}
    if plugin == OURS:
        writer_options["codec"] = data.draw(st.sampled_from(["auto", "auto", "planes-zstd", "planes-deflate", "zstd"]))
        reader_options["verify"] = data.draw(st.sampled_from(["stored", "full", "off"]))
    with tempfile.TemporaryDirectory(prefix="reshard-") as directory:
        ranks.run(_save, plugin, Path(directory), before, writer_options, world_size=SAVING_RANKS)
        ranks.run(_load, plugin, Path(directory), after, names, reader_options, world_size=world_size)


def _settings(case_count: int) -> Any:
    return settings(
        max_examples=examples(case_count),
        deadline=None,
        database=None,
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.mark.ci
@pytest.mark.timeout(1200)
@_settings(120)
@given(data=st.data())
def test_any_placement_on_any_number_of_ranks(ranks: RankPool, data: st.DataObject) -> None:
    _check(ranks, OURS, data)


@pytest.mark.oracle
@_settings(10)
@given(data=st.data())
def test_stock_passes_the_same_test(ranks: RankPool, data: st.DataObject) -> None:
    """Says that the test above asks for what DCP does."""
    _check(ranks, STOCK, data)
