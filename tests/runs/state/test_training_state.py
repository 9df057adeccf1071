"""TrainingState: a run that is restored goes on bit for bit as it would have."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointManager, ConfigurationError, TrainingState
from tests.distributed.launch import RankPool
from tests.runs.state import jobs


@pytest.mark.ci
@pytest.mark.parametrize(("world_size", "workers", "stop_at"), [(4, 1, 9), (2, 0, 12), (2, 0, 14)])
def test_resuming_is_bit_identical_to_not_stopping(
    ranks: RankPool, tmp_path: Path, world_size: int, workers: int, stop_at: int
) -> None:
    # an epoch has 24 / world_size steps: the stop is within one, or at its end
    options: dict[str, Any] = {"world_size": world_size, "workers": workers}
    whole = ranks.run(jobs.train, tmp_path / "whole", 20, **options)
    ranks.run(jobs.train, tmp_path / "parts", 20, stop_at=stop_at, **options)
    resumed = ranks.run(jobs.train, tmp_path / "parts", 20, **options)
    from_step = stop_at - stop_at % 3 + 1
    for one, other in zip(whole, resumed, strict=True):
        assert min(other["losses"]) == from_step
        assert {step: one["losses"][step] for step in other["losses"]} == other["losses"]
        assert one["samples"][-len(other["samples"]) :] == other["samples"]
        assert one["parameters"] == other["parameters"]


def _train_replicas(place: Path, stop_at: int | None = None) -> dict[str, Any]:
    node = dist.get_rank() // 2
    options = {"fast": place / f"node-{node}", "fast_every": 3, "copies": "replicas", "node": f"node {node}"}
    return jobs.train(place / "run", 12, stop_at=stop_at, replicas=2, every=1000, **options)


@pytest.mark.ci
@pytest.mark.parametrize("lost", [None, 1])
def test_resuming_from_the_other_replica_is_bit_identical_too(
    ranks: RankPool, tmp_path: Path, lost: int | None
) -> None:
    """HSDP: generators and data loaders of the ranks of the lost node come from the other one."""
    whole = ranks.run(_train_replicas, tmp_path / "whole")
    first = ranks.run(_train_replicas, tmp_path / "parts", 6)
    if lost is not None:
        shutil.rmtree(tmp_path / "parts" / f"node-{lost}")
    for before, after, wanted in zip(first, ranks.run(_train_replicas, tmp_path / "parts"), whole, strict=True):
        assert before["losses"] | after["losses"] == wanted["losses"] and min(after["losses"]) == 7
        assert after["parameters"] == wanted["parameters"]
    assert not list((tmp_path / "parts" / "run").glob("step-*")), "nothing of it came from there"


def test_on_another_number_of_ranks_training_goes_on(ranks: RankPool, tmp_path: Path) -> None:
    whole = ranks.run(jobs.train, tmp_path, 9, world_size=4)
    resumed = ranks.run(jobs.train, tmp_path, 12, world_size=2)
    assert sorted(resumed[0]["losses"]) == [10, 11, 12]
    assert all(loss > 0 for result in (*whole, *resumed) for loss in result["losses"].values())


def _drawn(own: torch.Generator) -> list[float]:
    values = [random.random(), float(np.random.rand()), random.gauss(0, 1), float(np.random.normal())]
    return [*values, float(torch.rand(())), float(torch.rand((), generator=own))]


class _Rank(TrainingState):
    def __init__(self, rank: int, own: torch.Generator) -> None:
        super().__init__(torch.nn.Linear(1, 1), generators={"own": own})
        self._rank = rank


def test_generators_are_those_of_the_rank_or_new_ones_that_come_again(tmp_path: Path) -> None:
    own = torch.Generator().manual_seed(1)
    _drawn(own)  # so that a second value of a Gaussian pair is waiting
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, {"train": _Rank(0, own)}).saved.result(60)
        expected = _drawn(own)
        drawn = {}
        for rank in (0, 1, 2, 1):
            manager.restore({"train": _Rank(rank, own)})
            found = _drawn(own)
            assert drawn.setdefault(rank, found) == found
    assert drawn[0] == expected
    assert len({tuple(values) for values in drawn.values()}) == 3


def test_several_optimizers_and_schedulers(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, list[torch.optim.Optimizer], list[Any]]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(model[0].parameters(), lr=0.1),
            torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9),
        ]
        return model, optimizers, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in optimizers]

    def step(model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], schedulers: list[Any]) -> None:
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for one in (*optimizers, *schedulers):
            one.step()

    first, second = build(), build()
    with CheckpointManager(tmp_path, every=1) as manager:
        step(*first)
        manager.save(1, {"train": TrainingState(first[0], first[1], scheduler=first[2])})
        step(*first)
        manager.wait()
        manager.restore({"train": TrainingState(second[0], second[1], scheduler=second[2])})
    step(*second)
    for one, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)
    assert [one.get_last_lr() for one in first[2]] == [one.get_last_lr() for one in second[2]]


def test_what_has_no_state_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"dataloader=DataLoader.*StatefulDataLoader"):
        TrainingState(torch.nn.Linear(1, 1), dataloader=torch.utils.data.DataLoader([1, 2]))
    with pytest.raises(ConfigurationError, match="scheduler=int"):
        TrainingState(torch.nn.Linear(1, 1), scheduler=3)
