"""Which ranks were slow, and at what: from seconds by rank and stage to a sentence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a rank takes longer than the others matters from here on.
_WORTH_SAYING_PART = 0.1
_WORTH_SAYING_SECONDS = 0.01


@dataclass(frozen=True)
class RankTimes:
    """One rank's times.

    Attributes:
        rank: the rank.
        seconds: by stage.
        nbytes: size in memory of what it saved or loaded.
        stored_nbytes: size of what it wrote or read.
        total_seconds: of all stages, some of which overlap.
    """

    rank: int
    seconds: Mapping[str, float]
    nbytes: int
    stored_nbytes: int
    total_seconds: float


@dataclass(frozen=True)
class Slowness:
    """The slowest rank beside the others.

    Attributes:
        rank: the rank.
        total_seconds: its time.
        excess_seconds: how much more that is than the median of all ranks.
        stage: in which stage it lost most.
        stage_excess_seconds: how much there.
        nbytes_factor: how much more it had to do than the median.
    """

    rank: int
    total_seconds: float
    excess_seconds: float
    stage: str
    stage_excess_seconds: float
    nbytes_factor: float

    def __str__(self) -> str:
        more = f", with {self.nbytes_factor:.1f} times as many bytes" if self.nbytes_factor > 1.2 else ""
        return (
            f"Rank {self.rank} was the slowest: {self.total_seconds:.2f} s, {self.excess_seconds:.2f} s more than the "
            f"median rank{more}; it lost most in {self.stage} ({self.stage_excess_seconds:.2f} s more than the median)."
        )


def slowest_of(ranks: Sequence[RankTimes]) -> Slowness | None:
    """Return the slowest rank; None if there is only one, or if it was about as fast as the others."""
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.total_seconds)
    excess = slowest.total_seconds - statistics.median(rank.total_seconds for rank in ranks)
    if excess < max(_WORTH_SAYING_SECONDS, _WORTH_SAYING_PART * slowest.total_seconds):
        return None
    by_stage = {
        stage: seconds - statistics.median(rank.seconds.get(stage, 0.0) for rank in ranks)
        for stage, seconds in slowest.seconds.items()
    }
    stage = max(by_stage, key=by_stage.__getitem__)
    usual_nbytes = statistics.median(rank.nbytes for rank in ranks)
    factor = slowest.nbytes / usual_nbytes if usual_nbytes else 1.0
    return Slowness(slowest.rank, slowest.total_seconds, excess, stage, by_stage[stage], factor)
