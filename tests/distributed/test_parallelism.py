"""Real model and optimizer state under FSDP2, tensor parallelism, both, and HSDP: saved on N ranks, loaded on M."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import set_state_dict

from tests.checkpoints import file_names
from tests.conformance.plugins import OURS, STOCK, Plugin, on_every_plugin, quiet_stock
from tests.states import assert_same

from .jobs import JOBS, plain, state_of, whole
from .launch import RankPool

pytestmark = quiet_stock

CPU = torch.device("cpu")


def _train_and_save(plugin: Plugin, path: Path, job: str) -> Any:
    model, optimizer = JOBS[job](1, CPU)
    state = state_of(model, optimizer)
    dcp.save(state, storage_writer=plugin.writer(path))
    return whole(state)


def _load_into_another(plugin: Plugin, path: Path, job: str) -> Any:
    """Loads over a model of another seed, and returns what the model and the optimizer have then."""
    model, optimizer = JOBS[job](2, CPU)
    state = state_of(model, optimizer)
    dcp.load(state, storage_reader=plugin.reader(path))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return {**whole(state_of(model, optimizer)), "seen": state["seen"]}


RESHARDINGS = [
    ("fsdp2", 3, "fsdp2", 4),
    ("fsdp2", 2, "plain", 1),
    ("plain", 1, "fsdp2", 3),
    ("tp", 2, "fsdp2+tp", 4),
    ("fsdp2+tp", 4, "fsdp2", 3),
    ("hsdp", 4, "tp", 2),
    ("plain", 4, "hsdp", 4),
]


@pytest.mark.ci
@on_every_plugin
@pytest.mark.parametrize(
    ("saving", "saving_ranks", "loading", "loading_ranks"),
    RESHARDINGS,
    ids=[f"{before}@{n}-{after}@{m}" for before, n, after, m in RESHARDINGS],
)
def test_reshard(
    ranks: RankPool, tmp_path: Path, plugin: Plugin, saving: str, saving_ranks: int, loading: str, loading_ranks: int
) -> None:
    saved = ranks.run(_train_and_save, plugin, tmp_path, saving, world_size=saving_ranks)
    for state in ranks.run(_load_into_another, plugin, tmp_path, loading, world_size=loading_ranks):
        assert_same(state, saved[0])


@on_every_plugin
def test_load_without_a_process_group(ranks: RankPool, tmp_path: Path, plugin: Plugin) -> None:
    saved = ranks.run(_train_and_save, plugin, tmp_path, "fsdp2+tp")[0]
    state = state_of(*plain(2, CPU))
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same(state, saved)


def _save_replicas(plugin: Plugin, path: Path, job: str) -> int:
    state = state_of(*JOBS[job](1, CPU))
    dcp.save(state, storage_writer=plugin.writer(path, **({"codec": "none"} if plugin == OURS else {})))
    tensors = [*state["model"].values()]
    tensors += [value for moments in state["optimizer"]["state"].values() for value in moments.values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@on_every_plugin
@pytest.mark.parametrize("job", ["hsdp", "plain"])
def test_replicas_are_saved_once(ranks: RankPool, tmp_path: Path, plugin: Plugin, job: str) -> None:
    state_nbytes = ranks.run(_save_replicas, plugin, tmp_path, job)[0]
    on_disk = sum((tmp_path / name).stat().st_size for name in file_names(tmp_path) if name.endswith(".distcp"))
    # Stock pays some 1.5 KB for each of the about 150 shards.
    assert state_nbytes < on_disk < state_nbytes + (400_000 if plugin == STOCK else 60_000)
