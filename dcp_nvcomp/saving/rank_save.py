"""One rank's part of one save: `RankSave.run` encodes and writes its files, and `RankResults` say what is in them."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.choose import CodecChooser, parse_codec
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.options import CheckEncodes, Engine, check_budget, check_choice, check_flag, check_seconds
from dcp_nvcomp.saving.data_files import PlannedFile, WrittenFile, plan_files, planned_nbytes
from dcp_nvcomp.saving.encode.buffers import BufferMemory, JobMemory
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.job import Patience, SaveJob
from dcp_nvcomp.saving.plans.global_plan import PlacedItems, PlannedMetadata
from dcp_nvcomp.saving.stats import RankTotals
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from dcp_nvcomp.version import VERSION

Resolve: TypeAlias = Callable[[WriteItem], Any]
Written: TypeAlias = tuple[list[WrittenFile], RankTotals]


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """Options of an `NvcompWriter`, with the names that they have there. They are checked when this is made."""

    codec: str | CodecChain | CodecChooser
    thread_count: int
    single_file_per_rank: bool
    overwrite: bool
    sync_files: bool
    host_memory_budget: int
    device_memory_budget: int | None
    engine: str
    check_encodes: str
    storage_deadline_seconds: float
    staging_budget_nbytes: int | None
    finish_within_seconds: float
    storage_options: Mapping[str, Any] = field(repr=False)  # with credentials
    known_options: tuple[str, ...]  # the names of all options, to tell a mistyped one from a storage option

    def __post_init__(self) -> None:
        parse_codec(self.codec)
        for name in ("single_file_per_rank", "overwrite", "sync_files"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        for name in ("storage_deadline_seconds", "finish_within_seconds"):
            object.__setattr__(self, name, check_seconds(name, getattr(self, name)))
        check_budget("host_memory_budget", self.host_memory_budget)
        for name in ("device_memory_budget", "staging_budget_nbytes"):
            if getattr(self, name) is not None:
                check_budget(name, getattr(self, name))
        check_choice("engine", self.engine, Engine)
        check_choice("check_encodes", self.check_encodes, CheckEncodes)

    @property
    def chooser(self) -> CodecChooser:
        return parse_codec(self.codec)

    def open(self, path: str) -> Filesystem:
        """Open a checkpoint: for each use, as connections are neither pickled nor shared between processes."""
        return open_filesystem(
            path,
            sync_files=self.sync_files,
            deadline_seconds=self.storage_deadline_seconds,
            storage_options=self.storage_options,
            known_options=self.known_options,
        )


@dataclass(frozen=True)
class RankSave:
    """What one rank writes in one save, and where to."""

    path: str
    save_id: str
    rank: int
    items: Sequence[WriteItem]
    options: SaveOptions

    @property
    def nbytes(self) -> int:
        return sum(map(planned_nbytes, self.items))

    def open(self) -> contextlib.closing[Filesystem]:
        return contextlib.closing(self.options.open(self.path))

    def lanes(self, filesystem: Filesystem) -> list[list[PlannedFile]]:
        """Plan the data files: those of one lane are written one after the other."""
        options = self.options
        return plan_files(
            self.items,
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
        patience: Patience | None = None,
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
                    threads=options.thread_count * (1 if patience is None else 2) + len(lanes),
                    state_nbytes=self.nbytes,
                    may_use_cuda=engine.may_use_cuda(),
                )
            chooser = options.chooser
            job = SaveJob(
                filesystem,
                lanes,
                lambda: RecordMaker(chooser, engine, remembered, pack=options.single_file_per_rank),
                resolve,
                thread_count=options.thread_count,
                policy=engine.policy(options.device_memory_budget, check_encodes=options.check_encodes == "all"),
                patience=patience,
                identity=FileIdentity(
                    self.save_id, self.save_id, self.rank, {"dcp_nvcomp": VERSION, "torch": torch.__version__}
                ),
                progress=progress,
                memory=memory,
                on_staged=on_staged,
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
    """Return where items are, by their positions in the plan."""
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
