"""ElasticSampler: ranks share an epoch, and its rest after a restart with any number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from dcp_nvcomp import ConfigurationError, ElasticSampler


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
