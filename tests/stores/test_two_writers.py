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

from .kinds import on
from .places import Place, error_of

BY_RANKS = on("disk", "moto", "ceph", "azure", "gcs")


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
    """Two ranks save in each round; the third returns what it loaded meanwhile, and what is there in the end."""
    rank, seen = dist.get_rank(), list[Any]()
    for number in range(rounds):
        dist.barrier()
        if rank < 2:
            seen.append(place.save(100 * number + rank))
        else:
            end, found = time.monotonic() + 1, set[int]()
            while time.monotonic() < end:
                try:
                    found.add(place.loaded())
                except dcp.CheckpointException as failure:
                    if not isinstance(error_of(failure), CheckpointReplacedError):
                        raise
        dist.barrier()
        if rank == 2:
            seen.append((found, place.loaded()))
    return seen


@pytest.mark.ci
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_survivor_is_one_of_the_two(
    place: Place, ranks: RankPool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads meanwhile finds the one before or one of the two, whole, or that it was replaced."""
    assert place.save(0) is None
    *writers, read = ranks.run(_overwrite_and_read, place, rounds, world_size=3, timeout_s=240)
    last, survivors = 0, set()
    for number, (outcomes, (found, survivor)) in enumerate(zip(zip(*writers, strict=True), read, strict=True)):
        pair = (100 * number, 100 * number + 1)
        assert survivor in pair, f"round {number}: {outcomes}"
        assert None in outcomes, f"round {number}: neither saved: {outcomes}"
        for saved, outcome in zip(pair, outcomes, strict=True):
            if outcome is not None:  # whose answer was lost, or that came second at the same moment
                assert isinstance(outcome, ConcurrentSaveError) and outcome.outcome_unknown, (
                    f"round {number}: {outcome}"
                )
                assert survivor != saved, f"round {number}: {outcome}"
        assert found <= {last, *pair}
        last = survivor
        survivors.add(survivor - pair[0])
    assert rounds < 20 or survivors == {0, 1}, "one of them always won: they never competed"
    place.clean(monkeypatch)
    assert place.left() == set() and place.loaded() == last
