"""Several save to one path at the same time, and others load: what is there is of one of them, whole."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp.errors import CheckpointError, CheckpointExistsError, CheckpointReplacedError, ConcurrentSaveError
from tests.distributed.launch import RankPool

from .children import run_two_writers
from .kinds import on
from .places import Place, error_of

BY_RANKS = on("disk", "moto", "ceph", "azure", "gcs")


@pytest.mark.ci
@pytest.mark.parametrize("rounds", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_the_survivor_is_one_of_the_two(place: Place, rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert place.save(1000) is None
    survivors = []

    def look(number: int, outcomes: list[Any]) -> None:
        pair = (2 * number, 2 * number + 1)
        survivor = place.loaded()
        assert survivor in pair, f"round {number}: {outcomes}"
        assert None in outcomes, f"round {number}: neither saved: {outcomes}"
        for saved, outcome in zip(pair, outcomes, strict=True):
            if outcome is not None:  # whose answer was lost, or that came second at the same moment
                name, unknown, text = outcome
                assert name == "ConcurrentSaveError" and unknown, f"round {number}: {text}"
                assert survivor != saved, f"round {number}: {text}"
        survivors.append(survivor - pair[0])

    run_two_writers(place, rounds, seed=rounds, look=look)
    assert len(survivors) == rounds
    assert rounds < 100 or set(survivors) == {0, 1}, "one of them always won: they never competed"
    place.clean(monkeypatch)
    assert place.left() == set() and place.loaded() == 2 * rounds - 2 + survivors[-1]


@pytest.mark.ci
def test_one_of_many_wins_without_overwriting(place: Place) -> None:
    """Each publishes on connections of its own, at the same moment."""
    filesystems = [place.filesystem() for _ in range(3)]
    filesystems[0].create_directory()
    start = threading.Barrier(len(filesystems))

    def publish(number: int, name: str) -> bool:
        filesystems[number].publish(f"{name}-{number}", b"a file of its own")  # it has logged in now
        start.wait(120)
        try:
            filesystems[number].publish(name, bytes([number]), overwrite=False)
        except ConcurrentSaveError:
            return False
        return True

    with ThreadPoolExecutor(len(filesystems)) as pool:
        for round_ in range(40):
            name = f"metadata-{round_}"
            won = list(pool.map(publish, range(len(filesystems)), [name] * len(filesystems)))
            assert sum(won) == 1, won
            assert filesystems[0].read_all(name, limit_nbytes=10) == bytes([won.index(True)])
    assert not {name for name in place.names() if not name.startswith("metadata-")}


def _publish_at_once(place: Place, rounds: int) -> list[CheckpointError | None]:
    outcomes = []
    for number in range(rounds):
        dist.barrier()
        one = place.below(f"step-{number}")
        outcomes.append(one.save(100 * number + dist.get_rank(), one.writer(overwrite=False)))
    return outcomes


@pytest.mark.ci
@pytest.mark.parametrize("rounds", [2, pytest.param(15, marks=pytest.mark.slow)])
@BY_RANKS
def test_without_overwriting_exactly_one_save_wins(place: Place, ranks: RankPool, rounds: int) -> None:
    place = place.with_nbytes(4 << 20)
    outcomes = ranks.run(_publish_at_once, place, rounds, world_size=3, timeout_s=240)
    for number in range(rounds):
        of_round = [of_rank[number] for of_rank in outcomes]
        assert of_round.count(None) == 1, of_round
        for outcome in of_round:  # some come later than others
            assert outcome is None or isinstance(outcome, ConcurrentSaveError | CheckpointExistsError), outcome
        one = place.below(f"step-{number}")
        assert one.loaded() == 100 * number + of_round.index(None)
        assert len(one.names()) == 3  # the others removed theirs, and only theirs


def _overwrite_and_read(place: Place, rounds: int) -> list[Any]:
    rank, seen = dist.get_rank(), list[Any]()
    for number in range(rounds):
        dist.barrier()
        if rank < 2:
            seen.append(place.save(100 * number + rank))
        else:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                try:
                    seen.append(place.loaded())
                except dcp.CheckpointException as error:
                    seen.append(error_of(error))
    return seen


@pytest.mark.ci
@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
@BY_RANKS
def test_overwriting_at_once_and_reading_meanwhile(place: Place, ranks: RankPool, rounds: int) -> None:
    place = place.with_nbytes(4 << 20)
    assert place.save(0) is None
    *writers, read = ranks.run(_overwrite_and_read, place, rounds, world_size=3, timeout_s=240)
    for of_round in zip(*writers, strict=True):
        assert None in of_round, of_round
        for outcome in of_round:
            # Ceph answers the slower of two of the same moment with 500, after which nobody knows what was done
            unsure = isinstance(outcome, ConcurrentSaveError) and outcome.outcome_unknown
            assert outcome is None or (unsure and place.url.startswith("s3://")), outcome
    numbers = {100 * number + rank for number in range(rounds) for rank in range(2)}
    for found in read:
        assert found in numbers if isinstance(found, int) else isinstance(found, CheckpointReplacedError), found
    assert any(isinstance(found, int) for found in read)
    assert place.loaded() in {100 * (rounds - 1), 100 * (rounds - 1) + 1}
