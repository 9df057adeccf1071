"""What a rank tells the coordinator of the items that it wrote.

DCP's way is a `WriteResult` for each item. If all ranks keep the plan, positions in it are enough (`PlacedItems`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.saving.plans.global_plan import PlacedItems, PlannedMetadata
from dcp_nvcomp.saving.stats import RankTotals


@dataclass(frozen=True)
class WrittenFile:
    """A data file and the items in it.

    Attributes:
        file: how `.metadata` names it.
        items: of each item the index of DCP, its encoded size, and the number of its record.
    """

    file: DataFileRef
    items: Sequence[tuple[MetadataIndex, int, int]]


class RankResults(list[WriteResult]):
    """The write results of one rank with its measurements. DCP sends the list to the coordinator as it is."""

    def __init__(self, results: Iterable[WriteResult], totals: RankTotals, placed: PlacedItems | None = None) -> None:
        super().__init__(results)
        self.totals = totals
        self.placed = placed


def write_results(files: Iterable[WrittenFile]) -> list[WriteResult]:
    """Return what `.metadata` needs to know of each item; a file is one plain tuple for all of its items."""
    found: list[WriteResult] = []
    with collector_paused():
        for written in files:
            shared = tuple(written.file)
            found += [WriteResult(index, nbytes, (shared, record)) for index, nbytes, record in written.items]
    return found


def placed_items(files: Sequence[WrittenFile], plan: SavePlan) -> PlacedItems:
    """Return the same in terms of the plan."""
    position_of = {id(item.index): position for position, item in enumerate(plan.items)}
    return PlacedItems(
        tuple(tuple(written.file) for written in files),
        tuple(len(written.items) for written in files),
        array("L", [position_of[id(index)] for written in files for index, _, _ in written.items]),
        array("L", [record for written in files for _, _, record in written.items]),
    )


def storage_data(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> dict[MetadataIndex, Any]:
    """Return where each item is stored."""
    if isinstance(metadata, PlannedMetadata):
        placed = [rank.placed for rank in results if isinstance(rank, RankResults) and rank.placed is not None]
        return metadata.plan.storage_data(placed)
    return {result.index: result.storage_data for rank in results for result in rank}
