"""One rank's part of a save as a value, for those who run the phases of a save at times and places of their own.

    prepared = writer.prepare(plan)                        on the thread that planned
    results = prepared.write(data)                         anywhere: on any thread, or in another process
    writer.finish_prepared(prepared, metadata, results)    on the coordinator, with the results of all ranks

`NvcompWriter.write_data` and `finish` are the same for DCP, which runs all of a save on one thread.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.saving.encode.buffers import BufferMemory
from dcp_nvcomp.saving.file_plan import planned_nbytes
from dcp_nvcomp.saving.kept import process_state
from dcp_nvcomp.saving.rank_write import RankWrite
from dcp_nvcomp.saving.results import RankResults, write_results
from dcp_nvcomp.saving.saves import Save


@dataclass(frozen=True)
class PreparedWrite:
    """What one rank has to write in one save; it can be pickled if the codec and the storage options can.

    Attributes:
        save: which save this is.
        items: what to write.
        planned_seconds: how long planning took.
        rank_write: how and where to.
        engine: of the process that prepared it.
        process_id: of that process.
    """

    save: Save
    items: tuple[WriteItem, ...]
    planned_seconds: float
    rank_write: RankWrite
    engine: EngineChoice
    process_id: int

    def write(self, resolve: Callable[[WriteItem], Any]) -> RankResults:
        """Encode and write the items.

        In another process than that which prepared it, the CPU engine encodes: a forked one cannot use CUDA.
        """
        write = self.rank_write
        engine = self.engine if os.getpid() == self.process_id else EngineChoice("cpu")
        with contextlib.closing(write.open()) as filesystem:
            lanes = write.lanes(self.items, filesystem)
            memory = BufferMemory(
                write.host_memory_budget,
                threads=write.thread_count + len(lanes),
                state_nbytes=sum(map(planned_nbytes, self.items)),
                may_use_cuda=engine.may_use_cuda(),
            )
            job = write.job(
                filesystem,
                lanes,
                resolve,
                memory,
                engine=engine,
                remembered=process_state().choices,
                progress=lambda nbytes: None,
            )
            files = job.run()
        job.totals.rank, job.totals.seconds["plan"] = self.save.rank, self.planned_seconds
        return RankResults(write_results(files), job.totals)
