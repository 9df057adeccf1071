"""Data loaders that go on with other numbers of ranks: each sample of the epoch once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies

from dcp_nvcomp import CheckpointError, CheckpointManager, ConfigurationError, MissingKeyError, TrainingState, load
from dcp_nvcomp.runs import ElasticSampler, LoaderPart
from tests.distributed.launch import RankFailure, RankPool
from tests.runs.state import jobs

COUNT = 96


def _samples(results: list[list[list[int]]]) -> Counter[int]:
    return Counter(sample for taken in results for batch in taken for sample in batch)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("worlds", "options", "last"),
    [
        ((1, 3), {}, {}),
        ((4, 3, 2, 4), {}, {}),
        ((4, 3), {"workers": 2, "every": 3}, {}),
        ((4, 2), {"elastic": False}, {}),
        ((2, 2), {}, {"workers": 2}),
        ((2, 2), {"workers": 2}, {"workers": 0}),
        ((2, 2), {"workers": 2}, {"workers": 1}),
        ((4, 2), {"workers": 1, "every": 3}, {"workers": 0, "every": 1, "batch_size": 4}),
    ],
    ids=str,
)
def test_killed_in_the_middle_of_an_epoch_each_sample_comes_once(
    ranks: RankPool, tmp_path: Path, worlds: Sequence[int], options: dict[str, Any], last: dict[str, Any]
) -> None:
    """With other numbers of ranks, of workers, and of samples in a batch than before."""
    seen: Counter[int] = Counter()
    options = {"count": COUNT, "batch_size": 2, **options}
    for world_size in worlds[:-1]:
        batches = 24 // (world_size * 2)  # so that each number of ranks divides the rest
        seen += _samples(ranks.run(jobs.consume, tmp_path, batches, saves=True, world_size=world_size, **options))
    seen += _samples(ranks.run(jobs.consume, tmp_path, -1, saves=True, world_size=worlds[-1], **{**options, **last}))
    assert seen == Counter(range(COUNT))
    if not options.get("elastic", True):
        return  # torchdata's sampler has nothing more to give
    # a finished epoch is followed by a whole one
    more = ranks.run(jobs.consume, tmp_path, -1, saves=False, world_size=worlds[-1], **{**options, **last})
    assert _samples(more) == Counter(range(COUNT))


def test_what_a_distributed_sampler_cant_express_is_said(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(jobs.consume, tmp_path, 2, count=COUNT, batch_size=2, saves=True, world_size=4, elastic=False)
    with pytest.raises(RankFailure, match="consumed 16 samples, which 3 ranks.*ElasticSampler"):
        ranks.run(jobs.consume, tmp_path, -1, count=COUNT, batch_size=2, saves=False, world_size=3, elastic=False)


class _Stream:
    """A loader of the user's own, which counts."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": torch.arange(3) + self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = state["at"]


class _Ranks(TrainingState):
    """One that says it is some rank of several, in one process."""

    def __init__(self, rank: int, count: int, **options: Any) -> None:
        super().__init__(torch.nn.Linear(1, 1), **options)
        self._rank = self._data_rank = rank
        self._count = self._data_count = count


def _save_as_two(path: Path) -> None:
    streams = (_Stream(), _Stream())
    streams[0].at, streams[1].at = 7, 5
    states = [_Ranks(rank, 2, dataloader=stream).state_dict() for rank, stream in enumerate(streams)]
    joined = states[0]
    joined["data"] |= states[1]["data"]
    joined["generators"] |= states[1]["generators"]
    with CheckpointManager(path, every=1) as manager:
        manager.save(1, {"train": joined}).saved.result(60)


def test_a_function_of_the_users_own_moves_other_loaders(tmp_path: Path) -> None:
    _save_as_two(tmp_path)

    def reshard(parts: Sequence[LoaderPart], world_size: int) -> list[dict[str, Any]]:
        assert [part.state["buffer"].tolist() for part in parts] == [[7, 8, 9], [5, 6, 7]]
        return [{"at": sum(part.state["at"] for part in parts) // world_size}] * world_size

    stream = _Stream()
    with CheckpointManager(tmp_path) as manager:
        manager.restore({"train": _Ranks(2, 3, dataloader=stream, reshard=reshard)})
    assert stream.at == 4


def test_other_loaders_without_such_a_function_are_refused(tmp_path: Path) -> None:
    _save_as_two(tmp_path)
    with CheckpointManager(tmp_path) as manager, pytest.raises(CheckpointError, match=r"reshard= to TrainingState"):
        manager.restore({"train": _Ranks(0, 3, dataloader=_Stream())})


def test_plain_load_knows_what_is_there(tmp_path: Path) -> None:
    _save_as_two(tmp_path)
    stream = _Stream()
    load({"train": _Ranks(1, 2, dataloader=stream)}, tmp_path / "step-1", no_dist=True)
    assert stream.at == 5


def test_a_checkpoint_without_a_data_loader_is_named(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, {"train": TrainingState(torch.nn.Linear(1, 1))}).saved.result(60)
        with pytest.raises(MissingKeyError, match="data"):
            manager.restore({"train": TrainingState(torch.nn.Linear(1, 1), dataloader=_Stream())})


def _samplers(count: int, ranks: int, **options: bool | int) -> list[ElasticSampler]:
    return [ElasticSampler(range(count), ranks, rank, seed=5, **options) for rank in range(ranks)]  # type: ignore[arg-type]


def _take(samplers: list[ElasticSampler], rounds: int) -> list[int]:
    iterators = [iter(sampler) for sampler in samplers]
    return [next(iterator) for _ in range(rounds) for iterator in iterators]


@given(
    count=strategies.integers(1, 60),
    worlds=strategies.lists(strategies.tuples(strategies.integers(1, 5), strategies.integers(0, 4)), max_size=4),
    last=strategies.integers(1, 5),
    drop_last=strategies.booleans(),
)
def test_each_sample_comes_once_whatever_the_numbers_of_ranks(
    count: int, worlds: list[tuple[int, int]], last: int, drop_last: bool
) -> None:
    begin, seen = 0, []
    for ranks, rounds in worlds:
        samplers = _samplers(count, ranks, drop_last=drop_last)
        for sampler in samplers:
            sampler.load_state_dict({"epoch": 0, "begin": begin, "yielded": 0})
        rounds = min(rounds, (count - begin) // ranks)
        seen += _take(samplers, rounds)
        begin += rounds * ranks
    samplers = _samplers(count, last, drop_last=drop_last)
    for sampler in samplers:
        sampler.load_state_dict({"epoch": 0, "begin": begin, "yielded": 0})
    left = len(samplers[0])
    assert [len(list(sampler)) for sampler in samplers] == [left] * last, "no rank waits for another at the end"
    for sampler in samplers:
        sampler.load_state_dict({"epoch": 0, "begin": begin, "yielded": 0})
    seen += _take(samplers, left)
    whole = _take(_samplers(count, 1), count)
    assert seen[:count] == whole[: len(seen)], "in the order of one rank alone"
    if drop_last:
        assert count - last < len(seen) <= count
    else:
        assert count <= len(seen) < count + last and set(seen) == set(range(count))


def test_epochs_are_permuted_differently_and_the_same_on_all_ranks() -> None:
    one, two = _samplers(40, 2)
    first = set(one), set(two)
    assert not first[0] & first[1] and first[0] | first[1] == set(range(40))
    for sampler in (one, two):
        sampler.set_epoch(1)
    second = list(one)
    assert set(second) != first[0] and set(second) | set(two) == set(range(40))


def test_the_loaded_epoch_stays_in_its_place_and_another_one_begins_anew() -> None:
    sampler = ElasticSampler(range(10), 1, 0, shuffle=False)
    for epoch, expected in ((3, [6, 7, 8, 9]), (4, list(range(10)))):
        sampler.load_state_dict({"epoch": 3, "begin": 4, "yielded": 2})
        assert sampler.state_dict() == {"epoch": 3, "begin": 4, "yielded": 2}
        sampler.set_epoch(epoch)
        assert list(sampler) == expected
        assert list(sampler) == list(range(10)) and len(sampler) == 10


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigurationError, match="rank=2"):
        ElasticSampler(range(3), 2, 2)
    with pytest.raises(ConfigurationError, match="empty"):
        ElasticSampler([], 1, 0)
