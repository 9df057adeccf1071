"""What one rank writes in one save: all that the job has to know, but for the data.

It can be pickled if the codec and the storage options can: asynchronous saves send it to a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.codecs.choose import CodecChooser
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.format.footer import FileIdentity
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.encode.memory import JobMemory
from dcp_nvcomp.saving.encode.records import RecordMaker
from dcp_nvcomp.saving.file_plan import PlannedFile, plan_files
from dcp_nvcomp.saving.job import SaveJob, SaveOptions
from dcp_nvcomp.saving.patience import Patience
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from dcp_nvcomp.version import VERSION


@dataclass(frozen=True)
class RankWrite:
    """One rank's part of one save.

    Attributes:
        path: the checkpoint.
        save_id: id of the save.
        rank: the rank.
        chooser: picks the codec chain.
        thread_count: encoding threads.
        single_file_per_rank: option of the writer.
        host_memory_budget: option of the writer.
        device_memory_budget: option of the writer.
        check_encodes: True if what a GPU encodes is checked.
        sync_files: option of the writer.
        storage_deadline_seconds: option of the writer.
        storage_options: for the fsspec filesystem.
        known_options: names of the writer's own options.
    """

    path: str
    save_id: str
    rank: int
    chooser: CodecChooser
    thread_count: int
    single_file_per_rank: bool
    host_memory_budget: int
    device_memory_budget: int | None
    check_encodes: bool
    sync_files: bool
    storage_deadline_seconds: float
    storage_options: Mapping[str, Any]
    known_options: tuple[str, ...]

    def open(self) -> Filesystem:
        """Open the checkpoint: for each use, as connections are neither pickled nor shared between processes."""
        return open_filesystem(
            self.path,
            sync_files=self.sync_files,
            deadline_seconds=self.storage_deadline_seconds,
            storage_options=self.storage_options,
            known_options=self.known_options,
        )

    def lanes(self, items: Sequence[WriteItem], filesystem: Filesystem) -> list[list[PlannedFile]]:
        """Plan the data files of the rank's items."""
        return plan_files(
            items,
            self.rank,
            self.save_id,
            single_file_per_rank=self.single_file_per_rank,
            streams=filesystem.output_streams(self.thread_count, self.host_memory_budget),
            file_nbytes=filesystem.file_nbytes_worthwhile,
        )

    def job(
        self,
        filesystem: Filesystem,
        lanes: Sequence[Sequence[PlannedFile]],
        resolve: Callable[[WriteItem], Any],
        memory: JobMemory,
        *,
        engine: EngineChoice,
        remembered: RememberedChoices,
        progress: Callable[[int], None],
        on_staged: Callable[[], None] | None = None,
        patience: Patience | None = None,
    ) -> SaveJob:
        """Return the job that writes these files; the arguments are those of `SaveJob`."""
        return SaveJob(
            filesystem,
            lanes,
            lambda: RecordMaker(self.chooser, engine, remembered, pack=self.single_file_per_rank),
            resolve,
            SaveOptions(
                thread_count=self.thread_count,
                policy=engine.policy(self.device_memory_budget, check_encodes=self.check_encodes),
                patience=patience,
            ),
            identity=FileIdentity(
                self.save_id, self.save_id, self.rank, {"dcp_nvcomp": VERSION, "torch": torch.__version__}
            ),
            progress=progress,
            memory=memory,
            on_staged=on_staged,
        )
