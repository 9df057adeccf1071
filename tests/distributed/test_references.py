"""Saves of several ranks with a reference: each rank shares its own shards, and any number of ranks loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcp_nvcomp import async_save, load, open_checkpoint, save, tools
from dcp_nvcomp.saving.process_state import forget_all
from dcp_nvcomp.saving.stats import SaveStats

from .launch import RankPool

FROZEN = 12


def _whole(number: int, of: int = 0) -> torch.Tensor:
    return torch.randn(256, 320, generator=torch.Generator().manual_seed(100 * of + number))


def _state(step: int, placement: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    frozen = {f"w{number}": _whole(number) for number in range(FROZEN)}
    values = {**frozen, "trained": _whole(step, of=1)}
    sharded = {key: distribute_tensor(value, mesh, [placement], src_data_rank=None) for key, value in values.items()}
    return {**sharded, "step": step}


def _save_thrice(path: str, asynchronous: bool, forgets: bool) -> list[tuple[int, int, int]]:
    found = []
    for step in range(3):
        reference = f"{path}/step-{step - 1}" if step else ()
        state = _state(step, Shard(0))
        if asynchronous:
            saving = async_save(state, f"{path}/step-{step}", reference=reference)
            stats = SaveStats.of(saving.upload_completion.result())
        else:
            stats = save(state, f"{path}/step-{step}", reference=reference)
        assert stats is not None
        shared = stats.by_codec.get("shared")
        found.append((0 if shared is None else shared.records, stats.stored_nbytes, stats.uncompressed_nbytes))
        if forgets:
            forget_all()
            dist.barrier()
    return found


def _load_all(path: str, placement: Any) -> None:
    for step in range(3):
        state = _state(9, placement)
        for value in state.values():
            if isinstance(value, DTensor):
                value.to_local().zero_()
        load(state, f"{path}/step-{step}")
        for key, expected in _state(step, placement).items():
            found = state[key]
            if isinstance(expected, DTensor):
                found, expected = found.to_local(), expected.to_local()
                assert torch.equal(found, expected), key
            else:
                assert found == expected


@pytest.mark.parametrize("forgets", [False, True], ids=["same processes", "other processes"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
def test_frozen_shards_of_each_rank_are_shared(
    ranks: RankPool, tmp_path: Path, asynchronous: bool, forgets: bool
) -> None:
    (first, second, third), *others = ranks.run(_save_thrice, str(tmp_path), asynchronous, forgets, world_size=3)
    assert all(other == [first, second, third] for other in others) or asynchronous
    assert (first[0], second[0], third[0]) == (0, 3 * FROZEN, 3 * FROZEN)
    assert second[1] < 0.12 * first[1] and third[1] < 0.12 * first[1]
    assert first[2] == second[2] == third[2]
    for world, placement in ((2, Shard(1)), (3, Shard(0)), (4, Replicate())):
        ranks.run(_load_all, str(tmp_path), placement, world_size=world)
    read = open_checkpoint(tmp_path / "step-2")
    assert torch.equal(read["w3"][:], _whole(3)) and torch.equal(read["trained"][:], _whole(2, of=1))
    assert tools.verify(tmp_path / "step-2").is_sound


def _save_with_others(path: str) -> int:
    save(_state(1, Shard(0)), f"{path}/a", reference=())
    forget_all()
    dist.barrier()
    stats = save(_state(2, Shard(0)), f"{path}/b", reference=f"{path}/a")
    return stats.by_codec["shared"].records if "shared" in stats.by_codec else 0


def _save_on_top(path: str) -> int:
    stats = save(_state(3, Shard(0)), f"{path}/c", reference=f"{path}/a")
    return stats.by_codec["shared"].records if "shared" in stats.by_codec else 0


def test_other_shards_are_written(ranks: RankPool, tmp_path: Path) -> None:
    """Two ranks have other shards than four had."""
    assert ranks.run(_save_with_others, str(tmp_path), world_size=4) == [4 * FROZEN] * 4
    assert ranks.run(_save_on_top, str(tmp_path), world_size=2) == [0, 0]
    assert torch.equal(open_checkpoint(tmp_path / "c")["w3"][:], _whole(3))
