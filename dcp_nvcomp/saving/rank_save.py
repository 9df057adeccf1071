"""One rank's part of a save, as a value: `RankSave.run` writes its files, `RankResults` name what is there."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.saving.data_files import PlannedFile, WrittenFile, plan_files, planned_nbytes
from dcp_nvcomp.saving.derived import pairs, together
from dcp_nvcomp.saving.encode.remembered import RememberedChoices
from dcp_nvcomp.saving.encode.tasks import BufferMemory, JobMemory
from dcp_nvcomp.saving.job import BackgroundThrottle, SaveJob
from dcp_nvcomp.saving.plans.global_plan import PlacedItems, PlannedMetadata
from dcp_nvcomp.saving.save_options import SaveOptions
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.version import VERSION

Resolve: TypeAlias = Callable[[WriteItem], Any]
Written: TypeAlias = tuple[list[WrittenFile], RankTotals]


@dataclass(frozen=True)
class RankSave:
    path: str
    save_id: str
    rank: int
    items: Sequence[WriteItem]
    options: SaveOptions
    hashes: Mapping[MetadataIndex, str] = field(default_factory=dict)  # of shards that can be shared later

    @property
    def nbytes(self) -> int:
        return sum(map(planned_nbytes, self.items))

    @cached_property
    def derived(self) -> Mapping[MetadataIndex, MetadataIndex]:
        """The shards that may be derived from others, and from which."""
        return pairs(self.items, self.options.derived)

    @property
    def identity(self) -> FileIdentity:
        return FileIdentity(self.save_id, self.save_id, self.rank, {"dcp_nvcomp": VERSION, "torch": torch.__version__})

    def open(self) -> contextlib.closing[Filesystem]:
        return contextlib.closing(self.options.open(self.path))

    def lanes(self, filesystem: Filesystem) -> list[list[PlannedFile]]:
        """Plan the data files: those of one lane are written one after the other."""
        options = self.options
        return plan_files(
            together(self.items, self.derived),
            self.rank,
            self.save_id,
            single_file_per_rank=options.single_file_per_rank,
            streams=filesystem.output_streams(options.thread_count, options.host_memory_budget),
            file_nbytes=filesystem.file_nbytes_worthwhile,
        )

    def run(
        self,
        resolve: Resolve,
        *,
        engine: EngineChoice,
        remembered: RememberedChoices,
        filesystem: Filesystem | None = None,
        lanes: Sequence[Sequence[PlannedFile]] | None = None,
        memory: JobMemory | None = None,
        progress: Callable[[int], None] = lambda nbytes: None,
        on_staged: Callable[[], None] | None = None,
        throttle: BackgroundThrottle | None = None,
    ) -> Written:
        options = self.options
        with contextlib.ExitStack() as stack:
            if filesystem is None:
                filesystem = stack.enter_context(self.open())
            if lanes is None:
                lanes = self.lanes(filesystem)
            if memory is None:
                memory = BufferMemory(
                    options.host_memory_budget,
                    threads=options.thread_count * (1 if throttle is None else 2) + len(lanes),
                    state_nbytes=self.nbytes,
                    may_use_cuda=engine.may_use_cuda(),
                )
            job = SaveJob(
                options,
                self.identity,
                filesystem,
                lanes,
                resolve,
                hashes=self.hashes,
                derived=self.derived,
                engine=engine,
                remembered=remembered,
                memory=memory,
                progress=progress,
                on_staged=on_staged,
                throttle=throttle,
            )
            return job.run(), job.totals


class RankResults(list[WriteResult]):
    """DCP's list of one rank's write results, with its measurements; if all ranks keep the plan, `placed` is enough."""

    def __init__(self, results: Iterable[WriteResult], totals: RankTotals, placed: PlacedItems | None = None) -> None:
        super().__init__(results)
        self.totals = totals
        self.placed = placed

    @classmethod
    def of(cls, files: Sequence[WrittenFile], totals: RankTotals, plan: SavePlan | None = None) -> RankResults:
        """Return what `.metadata` needs to know of each item, in terms of `plan` if the ranks keep it."""
        if plan is not None:
            return cls((), totals, placed_items(files, plan))
        found: list[WriteResult] = []
        with collector_paused():
            for written in files:
                shared = tuple(written.file)  # one plain tuple for all items of a file
                found += [WriteResult(index, nbytes, (shared, record)) for index, nbytes, record in written.items]
        return cls(found, totals)


def placed_items(files: Sequence[WrittenFile], plan: SavePlan) -> PlacedItems:
    position_of = {id(item.index): position for position, item in enumerate(plan.items)}
    return PlacedItems(
        tuple(tuple(written.file) for written in files),
        tuple(len(written.items) for written in files),
        _compact([position_of[id(index)] for written in files for index, _, _ in written.items]),
        _compact([record for written in files for _, _, record in written.items]),
    )


def _compact(numbers: Sequence[int]) -> array[int]:
    """Return numbers in as few bytes each as is plain; records are more than items, as packs are records too."""
    code = "H" if max(numbers, default=0) < 1 << 16 else "I"
    return array(code, numbers)


def place(metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    """Note in the metadata of a save where its shards are."""
    if isinstance(metadata, PlannedMetadata):
        metadata.place([rank.placed for rank in results if isinstance(rank, RankResults) and rank.placed is not None])
    else:
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
