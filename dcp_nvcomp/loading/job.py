"""The load of one rank's items: fetch, decode and place at the same time.

    calling thread   reads footers, plans reads, resolves destinations just before they are needed, commits items
    load threads     fetch a range, check and decode its blocks, place them

Each load thread has one buffer for encoded bytes and one for a decoded block, so their number bounds the memory. On
slow storage there are more threads than cores, of which `thread_count` decode at a time. On a GPU two do, each with an
engine and a stream of its own: one copies in while the other decodes. Where replicas may share reads (sharing/), there
are two more buffers of encoded bytes for each thread.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.tensors import torch_dtype
from dcp_nvcomp.engines.threads import WorkerGroup
from dcp_nvcomp.errors import CheckpointError, CorruptDataError, ShapeMismatchError
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.data_file import DataFileRef, read_footers
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.record import KIND_BYTES, KIND_TENSOR, KIND_TORCH_SAVE
from dcp_nvcomp.loading.decoder import Decoder, GpuShare
from dcp_nvcomp.loading.read_plan import (
    Conversions,
    Destination,
    PackMember,
    Read,
    Region,
    Run,
    Target,
    Wanted,
    dense_part_of,
    locate,
    part_of,
    refuse_shared_elements,
)
from dcp_nvcomp.loading.safe_objects import SafeLoader
from dcp_nvcomp.loading.sharing.replicas import Replicas, WantedOfFile, plan_shared
from dcp_nvcomp.loading.sharing.shared_files import SharedFiles
from dcp_nvcomp.storage.base import Filesystem

MIN_CUDA_READ_NBYTES, CUDA_READ_NBYTES = 8 << 20, 256 << 20
READS_AHEAD = 2
# Threads beyond those that decode, so that a GPU need not wait for the next read.
CUDA_FETCHERS = 2


class ItemPlanner(Protocol):
    """What a load needs of DCP's `LoadPlanner`, all of it on the calling thread."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that an item goes into."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take note that an item is there."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object's bytes."""


@dataclass(frozen=True)
class LoadOptions:
    """A reader's options, as far as a load job needs them."""

    thread_count: int  # threads that decode at the same time
    host_memory_budget: int  # bytes that fetched ranges may take on the host
    device_memory_budget: int | None  # bytes that CUDA engines may take on a device; None for the default
    verify: str  # `"stored"`, `"full"` or `"off"`
    engine: str  # `"auto"`, `"cpu"` or `"cuda"`
    safe: SafeLoader  # loads stored Python objects


class Loaded(NamedTuple):
    """What a job loaded: sizes of what was wanted, decoded, of what was read and received for it; seconds by stage."""

    nbytes: int
    fetched_nbytes: int
    received_nbytes: int
    stage_seconds: dict[str, float]


class LoadJob:
    def __init__(
        self,
        filesystem: Filesystem,
        planner: ItemPlanner,
        options: LoadOptions,
        *,
        conversions: Conversions,
        footers: Callable[[Filesystem, Sequence[DataFileRef]], Sequence[Footer]] = read_footers,
        progress: Callable[[int], None] | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._progress = progress
        self._replicas = replicas
        self._filesystem = filesystem
        self._footers = footers
        self._planner = planner
        self._options = options
        self._conversions = conversions
        self._engine = EngineChoice(options.engine)
        self._may_use_cuda = self._engine.may_use_cuda()
        fetchers = CUDA_FETCHERS if self._may_use_cuda else 0
        self._threads = max(options.thread_count + fetchers, filesystem.parallel_reads)
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._finished: SimpleQueue[Target] = SimpleQueue()
        self._decode_slots = threading.BoundedSemaphore(options.thread_count)
        self._workers = WorkerGroup([self._reads])
        self._device = _current_device()
        self._filled: dict[torch.device, None] = {}  # GPUs that destinations are on
        self._committed = 0
        self._busy: dict[str, list[float]] = {"fetch": [], "decode": []}
        self._more_nbytes: list[int] = []  # fetched by each thread for what it derives

    def run(self, items: Sequence[Wanted]) -> Loaded:
        by_file: dict[DataFileRef, list[Wanted]] = {}
        for item in items:
            by_file.setdefault(item.stored.file, []).append(item)
        footers = self._footers(self._filesystem, list(by_file))
        with collector_paused():
            targets = [
                [locate(item, footer) for item in wanted]
                for wanted, footer in zip(by_file.values(), footers, strict=True)
            ]
            files = list(map(WantedOfFile, by_file, footers, targets))
            wanted_nbytes = sum(target.nbytes for of_file in targets for target in of_file)
        read_nbytes = self._longest_read(wanted_nbytes)
        shared_nbytes = self._longest_read(wanted_nbytes, copies=2)
        shared = plan_shared(files, read_nbytes, shared_nbytes, self._threads, self._replicas)
        decoders = self._options.thread_count
        self._source = SharedFiles(self._filesystem, shared, self._replicas, self._threads, decoders)
        self._workers = WorkerGroup([self._reads], self._source.give_up)
        reads = [read for one in shared for read in one.reads]
        with self._source.exchanging():
            for of_file in targets:
                for target in of_file:
                    if not target.blocks:
                        self._finish_empty(target)
            self._workers.run(lambda: self._feed(reads, read_nbytes))
        self._commit_finished()
        count = sum(map(len, targets))
        if self._committed != count:
            raise RuntimeError(
                f"{count - self._committed} of {count} items were not loaded, and no error was reported."
            )
        stages = {stage: max(spent, default=0.0) for stage, spent in self._busy.items()}
        received_nbytes = self._source.received_nbytes
        fetched_nbytes = sum(read.stop - read.start for read in reads) - received_nbytes + sum(self._more_nbytes)
        return Loaded(wanted_nbytes, fetched_nbytes, received_nbytes, stages)

    def _longest_read(self, wanted_nbytes: int, *, copies: int = 0) -> int:
        """Return the maximum length of a read, such that the buffers of all threads are within the budget.

        `copies` are those of each thread's read beside what storage takes.
        """
        # an eighth is for everything else that a load needs
        copies += self._filesystem.read_copies
        budget_nbytes = self._options.host_memory_budget // self._threads // copies * 7 // 8
        if not self._may_use_cuda:
            return max(1 << 20, min(self._filesystem.read_nbytes, budget_nbytes))
        # longer only if every thread still gets work; which blocks go to the GPU is not known yet
        fair_nbytes = max(MIN_CUDA_READ_NBYTES, wanted_nbytes // (2 * self._threads))
        longest = max(1 << 20, min(CUDA_READ_NBYTES, budget_nbytes, fair_nbytes))
        return 1 << (longest.bit_length() - 1)  # torch rounds page-locked memory up to a power of two

    # --- calling thread ---------------------------------------------------------------------------------------------

    def _feed(self, reads: Iterable[Read], read_nbytes: int) -> None:
        gpu = GpuShare(self._engine.policy(self._options.device_memory_budget), read_nbytes, self._device)
        ahead = threading.Semaphore(READS_AHEAD * self._threads)
        for number, read in enumerate(reads):
            self._resolve_targets(read)
            while self._workers.error is None and not ahead.acquire(timeout=0.05):
                self._commit_finished()
            if self._workers.error is not None:
                return
            if number < self._threads:
                self._workers.start("dcp-load", self._load, ahead, gpu)
            self._reads.put(read)
            self._commit_finished()

    def _resolve_targets(self, read: Read) -> None:
        # this may wait for a GPU's stream, and nothing should wait while the collector is paused
        with nullcontext() if self._may_use_cuda else collector_paused():
            for block in read.blocks:
                for target in block.targets:
                    if not target.is_resolved:
                        target.resolve(self._destination(target))

    def _destination(self, target: Target) -> Destination:
        """Return where the blocks of an item go, which the planner decides."""
        record = target.record
        if record.kind != KIND_TENSOR:
            start = 0 if record.pack is None else record.pack[1]
            return Run(start, record.elements, 1, target.keep)
        tensor = target.payload = self._resolve_tensor(target.item)
        dtype = torch_dtype(record.element)
        self._conversions.check(target.item.dest_index.fqn, dtype, tensor.dtype)
        region = Region(target.region, tensor, dtype)
        if record.pack is None:
            return region
        assert target.holder.grid is not None
        if target.holder.grid.block_count == 1 and self._engine.on_cuda(tensor.device):
            start = record.pack[1] * record.element.nbytes
            return PackMember(start, record.shape, record.uncompressed_nbytes, region)
        whole = Box((0,) * len(record.shape), record.shape)
        return Run(
            record.pack[1], record.uncompressed_nbytes, record.element.nbytes, partial(region.place_bytes, whole)
        )

    def _resolve_tensor(self, item: ReadItem) -> torch.Tensor:
        """Return the tensor that an item goes into, ready to be written by other threads."""
        tensor = self._planner.resolve_tensor(item)
        if tensor.requires_grad:
            tensor = tensor.detach()
        if tuple(tensor.shape) != tuple(item.lengths):
            raise ShapeMismatchError(
                f"The destination has shape {tuple(tensor.shape)}, but {tuple(item.lengths)} was planned for it.",
                fqn=item.dest_index.fqn,
            )
        refuse_shared_elements(tensor, item.dest_index.fqn)
        if tensor.device.type == "cuda":
            self._engine.on_cuda(tensor.device)  # emit its fallback warning on the caller's thread
            # load threads write on streams of their own: first finish what the caller has queued for this tensor
            torch.cuda.current_stream(tensor.device).synchronize()
            self._filled[tensor.device] = None
        return tensor

    def _commit_finished(self) -> None:
        """Hand complete items to the planner, on the calling thread as planners expect."""
        while self._workers.error is None:
            try:
                target = self._finished.get_nowait()
            except Empty:
                return
            self._commit(target)

    def _commit(self, target: Target) -> None:
        item, fqn, payload = target.item, target.record.fqn, target.payload
        target.payload = None
        self._committed += 1
        if target.record.kind == KIND_BYTES:
            self._planner.load_bytes(item, self._options.safe.checked(io.BytesIO(payload), fqn))
            return
        if target.record.kind == KIND_TORCH_SAVE:
            saved = self._options.safe.load_tensor(io.BytesIO(payload), fqn)
            payload = self._resolve_tensor(item)
            self._conversions.check(item.dest_index.fqn, saved.dtype, payload.dtype)
            _copy_payload(saved, target, payload)
        self._planner.commit_tensor(item, payload)

    def _finish_empty(self, target: Target) -> None:
        """Commit an item without elements: there is nothing to fetch, but the planner expects it."""
        target.payload = self._resolve_tensor(target.item) if target.record.kind == KIND_TENSOR else b""
        self._commit(target)

    # --- load threads -----------------------------------------------------------------------------------------------

    def _load(self, ahead: threading.Semaphore, gpu: GpuShare) -> None:
        decoder: Decoder | None = None
        fetching = decoding = 0.0
        while (read := self._reads.get()) is not None:
            try:
                if self._workers.error is None:
                    decoder = decoder or Decoder(self._source, self._options.verify, self._engine, gpu)
                    start = time.perf_counter()
                    fetched = decoder.fetch(read)
                    fetching += time.perf_counter() - start
                    with self._decode_slots:
                        start = time.perf_counter()
                        try:
                            decoder.decode(fetched)
                        except BaseException:
                            with suppress(RuntimeError):  # of a GPU that is broken: the reason is the error above
                                self._wait_for_copies()
                            raise
                        self._wait_for_copies()
                        spent = time.perf_counter() - start
                    decoding += spent
                    self._source.decoded(read, spent)
                    if self._progress is not None:
                        self._progress(read.stop - read.start)
                    for block in read.blocks:
                        for target in block.targets:
                            if target.block_placed():
                                self._finished.put(target)
            except BaseException as error:
                self._workers.fail(error)
            ahead.release()
        self._reads.put(None)
        self._busy["fetch"].append(fetching)
        self._busy["decode"].append(decoding)
        self._more_nbytes.append(decoder.bases.fetched_nbytes if decoder is not None else 0)

    def _wait_for_copies(self) -> None:
        """Wait for copies that this thread has started: torch only queues those within a GPU, and from one to another.

        A copy from the host is one of them where the destination has gaps: it goes through memory of the GPU that has
        none. The caller may work on a stream that does not wait for this thread's.
        """
        for device in tuple(self._filled):
            torch.cuda.current_stream(device).synchronize()


def _current_device() -> torch.device | None:
    """Return the calling thread's CUDA device, which other threads do not share; None if CUDA was not used yet."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def _copy_payload(saved: torch.Tensor, target: Target, destination: torch.Tensor) -> None:
    """Copy from a tensor whose storage is hidden, with its own operations only."""
    is_hidden = saved.layout != torch.strided and destination.layout == torch.strided
    try:
        part = dense_part_of(saved, target.region) if is_hidden else part_of(saved, target.region)
        if part is not None:
            destination.copy_(part)
            return
    except RuntimeError as error:
        raise CheckpointError(
            f"The stored tensor ({saved.layout}, {saved.dtype}) can't be read into the destination "
            f"({destination.layout}, {destination.dtype}): {error}",
            fqn=target.record.fqn,
        ) from error
    raise CorruptDataError(
        f"The stored tensor has shape {tuple(saved.shape)}, which does not contain {target.region}.",
        fqn=target.record.fqn,
    )


@dataclass(frozen=True)
class LoadStats:
    """Statistics of one rank's part of a load.

    Attributes:
        checkpoint_id: where the checkpoint is; without a password, if its URL has one.
        items: how many tensors, parts of tensors and objects were loaded.
        nbytes: size of the tensors that were filled, in memory; of a checkpoint of stock DCP 0.
        fetched_nbytes: what was read of data files, without footers; of a checkpoint of stock DCP 0.
        received_nbytes: what other ranks read of them for this one too.
        seconds: time for reading, decoding and placing.
        rank: the rank.
        stage_seconds: time in `fetch` and `decode`, of the busiest thread; both overlap, and of a checkpoint of stock
            DCP there are none.
    """

    checkpoint_id: str
    items: int
    nbytes: int
    fetched_nbytes: int
    seconds: float
    rank: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    received_nbytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return {"schema": 1, **asdict(self)}

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e6 if self.seconds else 0.0
        received = f" and {self.received_nbytes / 1e6:.2f} MB came from other ranks" if self.received_nbytes else ""
        return (
            f"loaded {self.nbytes / 1e6:.2f} MB in {self.items} items in {self.seconds:.2f} s ({rate:.0f} MB/s), of "
            f"which {self.fetched_nbytes / 1e6:.2f} MB were read{received}, from {self.checkpoint_id}"
        )
