"""Masters of mixed precision on several ranks: derived whoever writes them, and loaded by any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from dcp_nvcomp import NvcompWriter, errors, load, save
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.tools import verify
from tests.format.footers import footers_of
from tests.states import assert_same

from .launch import RankPool

DERIVED = {"master.*": "model.*"}
LAYERS = 6


def _mesh(kind: str) -> tuple[DeviceMesh, Sequence[Placement]]:
    world = dist.get_world_size()
    if kind == "HSDP":
        return init_device_mesh("cpu", (2, world // 2)), [Replicate(), Shard(0)]
    return init_device_mesh("cpu", (world,)), [Replicate() if kind == "DDP" else Shard(int(kind == "columns"))]


def _state(kind: str) -> dict[str, Any]:
    mesh, placements = _mesh(kind)
    state: dict[str, Any] = {}
    for number in range(LAYERS):
        whole = 0.02 * torch.randn(300, 512 + 8 * number, generator=torch.Generator().manual_seed(number))
        for name, tensor in (("model", whole.bfloat16()), ("master", whole), ("exp_avg", whole * 2)):
            state[f"{name}.{number}"] = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return state


def _saves(path: Path, kind: str) -> None:
    forget_all()
    for number in range(2):  # by a plan that is computed, and one that is kept
        save(_state(kind), path / str(number), derived=DERIVED)
    if kind == "FSDP":
        dcp_save(_state(kind), storage_writer=NvcompWriter(path / "2", derived=DERIVED))


def _loads(path: Path, kind: str) -> None:
    expected, state = _state(kind), _state(kind)
    for keys in (list(state), [key for key in state if key.startswith("master")]):
        for key in keys:
            state[key].to_local().zero_()
        load({key: state[key] for key in keys}, path)
        assert_same({key: state[key].to_local() for key in keys}, {key: expected[key].to_local() for key in keys})


@pytest.mark.parametrize("kind", ["FSDP", "HSDP", "DDP"])
def test_saved_and_loaded_on_other_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ranks.run(_saves, tmp_path, kind, world_size=4 if kind == "HSDP" else 2)
    for path in sorted(tmp_path.iterdir()):
        records = [record for footer in footers_of(path) for record in footer.records]
        masters = [record for record in records if record.fqn.startswith("master")]
        assert masters and all(record.base is not None for record in masters)
        assert verify(path, full=True).is_sound
        for other, world in (("columns", 3), ("FSDP", 1)):
            ranks.run(_loads, path, other, world_size=world)


def _say_differently(path: Path) -> str:
    with pytest.raises(errors.RanksDifferError) as caught:
        save({"model.a": torch.ones(3)}, path, derived=DERIVED if dist.get_rank() else None)
    return str(caught.value)


def test_ranks_that_map_other_keys(ranks: RankPool, tmp_path: Path) -> None:
    (said, _) = ranks.run(_say_differently, tmp_path, world_size=2)
    assert "derived" in said and not list(tmp_path.iterdir())
