"""What stall, delay and restore come to in training: ETTR, the effective training time ratio.

ETTR is the share of wall-clock time that is training that counts, as in ByteCheckpoint (Wan et al., NSDI 2025,
https://arxiv.org/abs/2407.20143). What does not count is as in Gemini (Wang et al., SOSP 2023), on average for each
failure half an interval of training, what was trained until the newest checkpoint was safe, and the restore; and for
each checkpoint the training that its save takes.

    T  training between two saves      s  training lost to a save    d  from the call until the checkpoint is safe
    M  mean time between failures      r  restore                    P = T + s, the period

The k-th save since a restore counts if no failure comes within kP - s + d. Failures come at random (exponentially), at
any time, also during a save or a restore, so the expected training that is kept from one failure to the next,
over the expected time from one to the next, is

    ETTR = T sum_k exp(-(kP - s + d) / M) / (M exp(r / M)) = T / M exp(-(d - s + r) / M) / (exp(P / M) - 1)

For a save that is safe when it returns (d = s) this is Daly's complete model (Future Generation Computer Systems 22,
2006). Where failures are rare it is T / P (1 - (P / 2 + d - s + r) / M), which is Gemini's sum.

Each way of saving is given the interval at which it does best, but none in which a save would begin before the one
before it is safe. What is the same for all, finding out that something failed and starting processes, is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Costs", "best_interval", "ettr"]


@dataclass(frozen=True)
class Costs:
    """What a way of saving and restoring takes.

    Attributes:
        lost_seconds: training that a save takes.
        safe_seconds: from the call until what was saved survives a failure.
        restore_seconds: of a restart, until the state is loaded.
    """

    lost_seconds: float
    safe_seconds: float
    restore_seconds: float

    def scaled(self, factor: float) -> Costs:
        """Return the costs of a state that is `factor` times as large, at the same rates."""
        return Costs(self.lost_seconds * factor, self.safe_seconds * factor, self.restore_seconds * factor)


def ettr(costs: Costs, interval_seconds: float, failure_seconds: float) -> float:
    """Return the share of time that is training that counts.

    Args:
        costs: of the saves and restores.
        interval_seconds: training between two saves.
        failure_seconds: mean time between failures.
    """
    period = (interval_seconds + costs.lost_seconds) / failure_seconds
    behind = max(0.0, costs.safe_seconds - costs.lost_seconds) + costs.restore_seconds
    return interval_seconds / failure_seconds * math.exp(-behind / failure_seconds) / math.expm1(period)


def best_interval(costs: Costs, failure_seconds: float) -> float:
    """Return the training between two saves, in seconds, at which `ettr` is largest."""
    shortest = max(0.0, costs.safe_seconds - costs.lost_seconds)
    low, high = 0.0, failure_seconds  # the derivative is positive at the one, negative at the other
    for _ in range(60):
        middle = (low + high) / 2
        if -math.expm1(-(middle + costs.lost_seconds) / failure_seconds) > middle / failure_seconds:
            low = middle
        else:
            high = middle
    return max(low, shortest)
