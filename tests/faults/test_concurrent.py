"""Two writers on one path, and readers during overwrites, on disk and object stores: never a mixture."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, errors
from tests.checkpoints import load, save
from tests.distributed.launch import RankPool, ranks
from tests.states import State, assert_same

__all__ = ["ranks"]

Place = tuple[str, dict[str, Any]]


@pytest.fixture(
    params=[
        "disk",
        pytest.param("moto", marks=pytest.mark.s3),
        pytest.param("real", marks=pytest.mark.s3),
        pytest.param("azure", marks=pytest.mark.azure),
        pytest.param("gcs", marks=pytest.mark.gcs),
    ]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "disk":
        return str(tmp_path), {}
    fixtures = {"moto": "s3_store", "real": "real_s3_store", "azure": "azure_store", "gcs": "gcs_store"}
    found: Place = request.getfixturevalue(fixtures[request.param])
    return found


def large_state(seed: int) -> State:
    """Return tensors of several blocks, each filled with the seed, so that a mixture is detected."""
    return {f"w{number}": torch.full((1 << 19,), float(seed)) for number in range(2)} | {"seed": seed}


def seed_of(place: Place) -> int:
    """Load, and make sure that all is of one save."""
    found = load(place[0], large_state(-1), **place[1])
    seed = int(found["seed"])
    assert_same(found, large_state(seed))
    return seed


def _save(place: Place, seed: int, **options: Any) -> errors.CheckpointError | None:
    """Save, and return the error of this package that it failed with."""
    try:
        save(place[0], large_state(seed), thread_count=1, **options, **place[1])
    except dcp.CheckpointException as error:
        cause = error.failures[0][0]
        if not isinstance(cause, errors.CheckpointError):
            raise
        return cause
    return None


def _publish_at_once(place: Place, rounds: int) -> list[errors.CheckpointError | None]:
    outcomes = []
    for number in range(rounds):
        dist.barrier()
        where = (f"{place[0]}/step-{number}", place[1])
        outcomes.append(_save(where, 100 * number + dist.get_rank(), overwrite=False))
    return outcomes


@pytest.mark.ci
@pytest.mark.parametrize("rounds", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_without_overwriting_exactly_one_wins(place: Place, ranks: RankPool, rounds: int) -> None:
    outcomes = ranks.run(_publish_at_once, place, rounds, world_size=3, timeout_s=240)
    for number in range(rounds):
        of_round = [of_rank[number] for of_rank in outcomes]
        assert of_round.count(None) == 1, of_round
        for outcome in of_round:
            kinds = (errors.ConcurrentSaveError, errors.CheckpointExistsError)  # some come later than others
            assert outcome is None or isinstance(outcome, kinds), outcome
        where = (f"{place[0]}/step-{number}", place[1])
        assert seed_of(where) == 100 * number + of_round.index(None)
        filesystem = NvcompReader(where[0], **where[1]).open_storage()
        assert len(filesystem.list_names()) == 3  # the others removed theirs, and only theirs


def _overwrite_and_read(place: Place, rounds: int) -> list[Any]:
    rank, seen = dist.get_rank(), list[Any]()
    for number in range(rounds):
        dist.barrier()
        if rank < 2:
            seen.append(_save(place, 100 * number + rank))
        else:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                try:
                    seen.append(seed_of(place))
                except dcp.CheckpointException as error:
                    seen.append(error.failures[0][0])
    return seen


@pytest.mark.ci
@pytest.mark.parametrize("rounds", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_overwriting_at_once_and_reading_meanwhile(place: Place, ranks: RankPool, rounds: int) -> None:
    assert _save(place, 0) is None
    *writers, read = ranks.run(_overwrite_and_read, place, rounds, world_size=3, timeout_s=240)
    for of_round in zip(*writers, strict=True):
        assert None in of_round, of_round
        for outcome in of_round:
            # Ceph answers the slower of two of the same moment with 500, after which nobody knows what was done
            unsure = isinstance(outcome, errors.ConcurrentSaveError) and outcome.outcome_unknown
            assert outcome is None or (unsure and place[0].startswith("s3://")), outcome
    seeds = {100 * number + rank for number in range(rounds) for rank in range(2)}
    for found in read:
        assert found in seeds if isinstance(found, int) else isinstance(found, errors.CheckpointReplacedError), found
    assert any(isinstance(found, int) for found in read)
    assert seed_of(place) in {100 * (rounds - 1), 100 * (rounds - 1) + 1}
