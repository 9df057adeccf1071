"""The data files of a rank: how many, and which items each of them holds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.format.names import data_file_name

_TOGETHER_NBYTES = 1 << 20


@dataclass(frozen=True)
class PlannedFile:
    """A data file to write: its name and its items, the largest first."""

    name: str
    items: tuple[WriteItem, ...]


def planned_nbytes(item: WriteItem) -> int:
    """Return the planned size of an item; 0 for bytes items, whose size is unknown until they are resolved."""
    if item.tensor_data is None:
        return 0
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def small_together(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    """Yield items in their order, as many at once as come to 1 MiB; bytes items, of unknown size, count as that."""
    together, nbytes = list[WriteItem](), 0
    for item in items:
        size = _TOGETHER_NBYTES if item.tensor_data is None else planned_nbytes(item)
        if together and nbytes + size > _TOGETHER_NBYTES:
            yield together
            together, nbytes = [], 0
        together.append(item)
        nbytes += size
    if together:
        yield together


def plan_files(
    items: Sequence[WriteItem],
    rank: int,
    file_id: str,
    *,
    single_file_per_rank: bool,
    streams: int,
    file_nbytes: int,
) -> list[list[PlannedFile]]:
    """Plan the data files of one rank."""
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


def file_count(total_nbytes: int, streams: int, file_nbytes: int) -> int:
    """Return the number of data files of a rank: one for each stream unless they would be tiny, and at least one."""
    return max(1, min(streams, total_nbytes // file_nbytes))


def distribute(sizes: Sequence[int], bins: int) -> list[list[int]]:
    """Distribute items over bins of about equal size."""
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    if bins == 1:
        return [order]
    filled: list[list[int]] = [[] for _ in range(bins)]
    heap = [(0, number) for number in range(bins)]
    for index in order:
        nbytes, number = heapq.heappop(heap)
        filled[number].append(index)
        heapq.heappush(heap, (nbytes + sizes[index], number))
    return filled
