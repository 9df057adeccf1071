"""Which of a rank's items go into which data file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.format.framing import data_file_name
from dcp_nvcomp.storage.ranges import distribute, file_count

__all__ = ["PlannedFile", "plan_files", "planned_nbytes"]


@dataclass(frozen=True)
class PlannedFile:
    """A data file to write: its name and its items, the large ones first."""

    name: str
    items: tuple[WriteItem, ...]


def planned_nbytes(item: WriteItem) -> int:
    """Size of an item as planned, in bytes; 0 for bytes items, which are not known before they are resolved."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def plan_files(
    items: Sequence[WriteItem],
    rank: int,
    file_id: str,
    *,
    single_file_per_rank: bool,
    streams: int,
    file_nbytes: int,
) -> list[list[PlannedFile]]:
    """The data files of one rank.

    Args:
        items: what it saves.
        rank: the rank, for the names.
        file_id: the id in the names.
        single_file_per_rank: whether items share files; otherwise each gets its own.
        streams: how many output streams it may write at once.
        file_nbytes: from what size on a file is worth the opening and the syncing.

    Returns:
        Lanes, which are written at the same time: the files of each are written one after the other.
    """
    if not items:
        return []
    sizes = [planned_nbytes(item) for item in items]
    if single_file_per_rank:
        count = file_count(sum(sizes), streams, file_nbytes)
        bins = distribute(sizes, count)
        return [
            [PlannedFile(data_file_name(rank, number, file_id), tuple(items[i] for i in chosen))]
            for number, chosen in enumerate(bins)
        ]
    lanes = distribute(sizes, min(streams, len(items)))
    return [[PlannedFile(data_file_name(rank, i, file_id), (items[i],)) for i in lane] for lane in lanes]
