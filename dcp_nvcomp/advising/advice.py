"""Advise on codec, threads and interval, from a bench of the storage and, if there is one, a checkpoint.

The interval, from the end of one save to the beginning of the next, is the one at which the least time is lost (Young
1974, Communications of the ACM 17; Daly 2006, Future Generation Computer Systems 22).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dcp_nvcomp.advising.bench import Bench, Prediction
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.codecs.choose import STORED, TINY_NBYTES
from dcp_nvcomp.format.names import data_file_rank
from dcp_nvcomp.maintenance.inspection import Inspection, Item, inspect
from dcp_nvcomp.options import check_seconds

# Of codecs whose saves take about as long, the one that stores least is taken.
_ABOUT_AS_FAST = 1.05
_EQUAL = 1 + 1e-9
# "The Llama 3 Herd of Models" (2024): 419 unexpected interruptions in 54 days on 16,384 GPUs.
_GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
_LIKE_AUTO = ("auto", "planes-zstd", "planes-deflate")


@dataclass(frozen=True)
class Workload:
    """What is to be saved.

    Attributes:
        state_nbytes: size of the whole state in memory.
        ranks: how many save it, each an equal part.
        ratio: what a checkpoint of it came to with `auto`; None if there is none that was compressed.
    """

    state_nbytes: int
    ranks: int = 1
    ratio: float | None = None

    @property
    def rank_nbytes(self) -> int:
        """What one rank saves."""
        return math.ceil(self.state_nbytes / self.ranks)


@dataclass(frozen=True)
class Advice:
    """What to do, and why.

    Attributes:
        workload: for what.
        codec: to be passed as `codec=`.
        thread_count: to be passed as `thread_count=`.
        interval_seconds: time between saves, by Daly.
        young_interval_seconds: the same by Young.
        mtbf_seconds: mean time between failures that was assumed.
        stall_seconds: what a save costs training.
        lost_part: which part of the time is lost with that interval.
        prediction: of a save and a load of one rank with this codec.
        plain: the same with codec `none`.
        sentence: the break-even rate in words.
    """

    workload: Workload
    codec: str
    thread_count: int
    interval_seconds: float
    young_interval_seconds: float
    mtbf_seconds: float
    stall_seconds: float
    lost_part: float
    prediction: Prediction
    plain: Prediction
    sentence: str

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        fields = asdict(self)
        workload = fields.pop("workload")
        return {"schema": 1, "state_nbytes": workload["state_nbytes"], "ranks": workload["ranks"], **fields}


def advise(
    workload: Workload, found: Bench, *, mtbf_seconds: float | None = None, stall_seconds: float | None = None
) -> Advice:
    """Return what to do.

    Args:
        workload: what is to be saved.
        found: a bench of the storage.
        mtbf_seconds: mean time between failures of the whole job; by default as `mtbf_of` has it for one GPU a rank.
        stall_seconds: what a save costs training; by default the time of a synchronous one. With `async_save` it is
            `SaveStats.stall_seconds`.

    Raises:
        ConfigurationError: a time is not positive.
    """
    mtbf = mtbf_of(workload.ranks) if mtbf_seconds is None else check_seconds("mtbf_seconds", mtbf_seconds)
    predictions = {
        codec: found.predict(workload.rank_nbytes, codec, ratio=_ratio(workload.ratio, found, codec))
        for codec in found.codecs
    }
    codec = _best(predictions)
    best = predictions[codec]
    stall = best.save_seconds if stall_seconds is None else check_seconds("stall_seconds", stall_seconds)
    in_background = max(0.0, best.save_seconds - stall)  # of an async save: until it is durable, the one before counts
    # saves can't overlap: the next one begins when the last is durable
    interval = max(daly_seconds(stall, mtbf), in_background)
    return Advice(
        workload,
        codec,
        _threads(workload, found, codec, best),
        interval,
        young_seconds(stall, mtbf),
        mtbf,
        stall,
        lost_part(interval, stall, best.load_seconds + in_background, mtbf),
        best,
        predictions["none"],
        found.sentence,
    )


def _ratio(ratio: float | None, found: Bench, codec: str) -> float | None:
    """Return the ratio of a codec where `auto` has this one; None for that of the sample."""
    if ratio is None or codec == "none":
        return None
    if codec in _LIKE_AUTO or ratio <= 1:
        return ratio
    of_sample = found.codecs["auto"].ratio
    # what the codec gained of the sample beside what `auto` gained of it
    share = (found.codecs[codec].ratio - 1) / (of_sample - 1) if of_sample > 1 else 1.0
    return 1 + share * (ratio - 1)


def _best(predictions: Mapping[str, Prediction]) -> str:
    least = min(one.save_seconds for one in predictions.values())
    fast = [one for one in predictions.values() if one.save_seconds <= _ABOUT_AS_FAST * least]
    # the order of the bench decides what is left: `auto` comes first
    return min(fast, key=lambda one: round(one.stored_nbytes / one.state_nbytes, 2)).codec


def _threads(workload: Workload, found: Bench, codec: str, best: Prediction) -> int:
    """Return the fewest threads with which encoding and writing take no longer than with all of them."""
    each = found.codecs[codec].encode_rate / found.threads

    def seconds(threads: int) -> float:
        written = best.stored_nbytes / found.storage.write_rate(workload.rank_nbytes, threads=threads)
        return max(best.state_nbytes / (each * threads), written)

    least = seconds(found.threads) * _EQUAL
    return next(threads for threads in range(1, found.threads + 1) if seconds(threads) <= least)


def young_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return Young's interval."""
    return math.sqrt(2 * stall_seconds * mtbf_seconds)


def daly_seconds(stall_seconds: float, mtbf_seconds: float) -> float:
    """Return Daly's interval."""
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    part = stall_seconds / (2 * mtbf_seconds)
    return young_seconds(stall_seconds, mtbf_seconds) * (1 + math.sqrt(part) / 3 + part / 9) - stall_seconds


def lost_part(interval_seconds: float, stall_seconds: float, restart_seconds: float, mtbf_seconds: float) -> float:
    """Return which part of the time is lost to stalls, repeated work and restarts, to the first order; at most 1."""
    period = interval_seconds + stall_seconds
    return min(1.0, stall_seconds / period + (period / 2 + restart_seconds) / mtbf_seconds)


def mtbf_of(gpus: int) -> float:
    """Return the mean seconds between failures of this many GPUs, if they fail as often as those of Llama 3."""
    return _GPU_HOURS_PER_FAILURE * 3600 / gpus


def workload_of_checkpoint(
    url: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Workload:
    """Return what the job that saved a checkpoint saves. Reads its metadata and footers only."""
    found = inspect(url, storage_options=storage_options)
    ranks = {data_file_rank(file.name) for file in found.files}
    return Workload(found.totals.uncompressed_nbytes, max(1, len(ranks)), found.ratio if _was_tried(found) else None)


def _was_tried(found: Inspection) -> bool:
    """Return True if the checkpoint shows how its state compresses: if not all was stored as it is without a look."""
    # exponents compress, so only codec="none" stores floats as they are, but for tiny ones
    is_plain = set(found.by_codec) == {STORED.label} and any(map(_has_exponents, found.items))
    return found.layout == "dcp_nvcomp" and not is_plain


def _has_exponents(item: Item) -> bool:
    element = ELEMENT_TYPES.get(item.dtype)
    is_tiny = item.totals.uncompressed_nbytes < TINY_NBYTES * item.totals.records
    return element is not None and element.float_nbytes > 0 and not is_tiny
