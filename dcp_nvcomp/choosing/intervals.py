"""How often to save: the interval at which the least time is lost, and how much that is.

Saving often costs a stall each time, saving rarely costs the work since the last save at each failure. With a stall of
`s` seconds and a mean time `M` between failures:

    Young 1974 ("A first order approximation to the optimum checkpoint interval", Communications of the ACM 17):
        interval = sqrt(2 s M)
    Daly 2006 ("A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
    Computer Systems 22): for s < 2 M
        interval = sqrt(2 s M) (1 + sqrt(s / 2M) / 3 + (s / 2M) / 9) - s
        else interval = M

The interval is from the end of one save to the beginning of the next.
"""

from __future__ import annotations

import math

# "The Llama 3 Herd of Models" (2024): 419 unexpected interruptions in 54 days on 16,384 GPUs.
GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419


def young_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return Young's interval."""
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


def daly_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's interval; the arguments are those of `young_seconds`."""
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = stall_seconds / (2 * mtbf_seconds)
    return young_seconds(stall_seconds, mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - stall_seconds


def lost_part(interval_seconds: float, stall_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Return which part of the time is lost to stalls, repeated work and restarts, to the first order; at most 1."""
    period = interval_seconds + stall_seconds
    return min(1.0, stall_seconds / period + (period / 2 + restart_seconds) / mtbf_seconds)
