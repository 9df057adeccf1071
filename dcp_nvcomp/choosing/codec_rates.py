"""How fast this machine encodes and decodes, by codec: whole save and load jobs of one rank, without any storage.

A job is that of `dcp_nvcomp.save` and `load`, with all its threads, its memory and its choice of codecs. Only planning
and commit are left out, and where the bytes would go to the storage, they are dropped (encoding) or are in memory
already (decoding).
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.format.metadata.shards import ShardIndex
from dcp_nvcomp.format.metadata.stored import StoredAt
from dcp_nvcomp.loading.items import load_items
from dcp_nvcomp.loading.read_plan import Wanted
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.saving.encode.buffers import BufferMemory
from dcp_nvcomp.saving.encode.choices import RememberedChoices
from dcp_nvcomp.saving.results import WrittenFile
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.in_memory import MemoryFilesystem

State = Mapping[str, torch.Tensor]

_REPEATS = 3


@dataclass(frozen=True)
class CodecRates:
    """What a codec does with the sample state on this machine.

    Attributes:
        codec: its name, as `codec=` takes it.
        threads: how many encode and decode.
        ratio: uncompressed over encoded size.
        encode_rate: bytes of state a second.
        decode_rate: bytes of state a second.
    """

    codec: str
    threads: int
    ratio: float
    encode_rate: float
    decode_rate: float

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return dict(vars(self))


def measure_codec(state: State, codec: str, *, threads: int, seconds: float) -> CodecRates:
    """Measure a codec."""
    job = _Job(state, codec, threads)
    nbytes = sum(tensor.nbytes for tensor in state.values())
    encode_seconds = repeated_seconds(lambda: job.encode(MemoryFilesystem(keeps=False)), seconds / 2)
    kept = MemoryFilesystem(keeps=True)
    files = job.encode(kept)
    decode_seconds = repeated_seconds(lambda: job.decode(kept, files), seconds / 2)
    encoded_nbytes = sum(written.file.nbytes for written in files)
    return CodecRates(codec, threads, nbytes / encoded_nbytes, nbytes / encode_seconds, nbytes / decode_seconds)


def _nothing() -> None:
    pass


def repeated_seconds(
    work: Callable[[], object], budget_seconds: float, *, before: Callable[[], object] = _nothing
) -> float:
    """Return the median time of some work, after one run that is not measured."""
    spent: list[float] = []
    for number in itertools.count():
        before()
        start = time.perf_counter()
        work()
        if number:
            spent.append(time.perf_counter() - start)
        if spent and sum(spent) >= budget_seconds * (3 if len(spent) < _REPEATS else 1):
            break
    return sorted(spent)[len(spent) // 2]


class _Job:
    """One rank's save and load of a state, planned once."""

    def __init__(self, state: State, codec: str, threads: int) -> None:
        self._state = state
        self._writer = NvcompWriter(".", codec=codec, thread_count=threads)  # for its options
        self._reader = NvcompReader(".", thread_count=threads)
        self._engine = EngineChoice("auto")
        self._engine.check_codec(self._writer.rank_write(".", "", rank=0).chooser)
        self._engine.begin(None)
        self._remembered = RememberedChoices()
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=True)
        plans, self._metadata = planner.create_global_plan([planner.create_local_plan()])
        self._plan, self._planner = planner.finish_plan(plans[0]), planner
        self._into = {name: torch.empty_like(tensor).fill_(0) for name, tensor in state.items()}

    def encode(self, filesystem: MemoryFilesystem) -> list[WrittenFile]:
        writer = self._writer
        write = writer.rank_write(".", uuid.uuid4().hex, rank=0)
        lanes = write.lanes(self._plan.items, filesystem)
        memory = BufferMemory(
            writer.host_memory_budget,
            threads=writer.thread_count + len(lanes),
            state_nbytes=sum(tensor.nbytes for tensor in self._state.values()),
            may_use_cuda=self._engine.may_use_cuda(),
        )
        job = write.job(
            filesystem,
            lanes,
            self._planner.resolve_data,
            memory,
            engine=self._engine,
            remembered=self._remembered,
            progress=lambda nbytes: None,
        )
        return job.run()

    def decode(self, filesystem: MemoryFilesystem, files: list[WrittenFile]) -> None:
        stored = {index: StoredAt(written.file, record) for written in files for index, _, record in written.items}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(self._into, _with(self._metadata, stored), is_coordinator=True)
        shards = ShardIndex(self._metadata.state_dict_metadata)
        wanted = [Wanted.of(item, stored[item.storage_index], shards) for item in planner.create_local_plan().items]
        load_items(filesystem, wanted, planner, self._reader.load_options)


def _with(metadata: Metadata, storage_data: Any) -> Metadata:
    return Metadata(metadata.state_dict_metadata, metadata.planner_data, storage_data)
