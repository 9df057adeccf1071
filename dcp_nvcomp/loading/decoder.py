"""The work of one load thread: fetch a range of a file, check and decode its blocks, place them.

The engine that decodes a block compares its CRCs (engines/cpu.py, and for blocks of trained floats the compiled
kernel in codecs/registry.py; on a GPU engines/cuda/decode.py, and for blocks that go there alone decode_jobs.py). Here
a range with a block that fails is fetched once more, and the error gets the file, the key and the range of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.codecs.base import ScratchArrays
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda.batches import fitting
from dcp_nvcomp.engines.cuda.coders import DECODE
from dcp_nvcomp.engines.cuda.decode_jobs import Columns, DecodeJob, DecodeRun, JobChecks
from dcp_nvcomp.engines.cuda.engine import BlockEngine
from dcp_nvcomp.engines.cuda.fallback import EnginePolicy
from dcp_nvcomp.engines.cuda.pool import shared_pool
from dcp_nvcomp.engines.tensors import PinnedMemory, pinned_allocate, plain_allocate
from dcp_nvcomp.errors import CodecUnavailableError, CorruptDataError
from dcp_nvcomp.format.block_grid import Strip, alone, strips
from dcp_nvcomp.format.data_file import block_row, encoded_run
from dcp_nvcomp.format.framing import check_header
from dcp_nvcomp.loading.bases import LoadedBase, LoadedBases, located
from dcp_nvcomp.loading.read_plan import BlockRead, Read
from dcp_nvcomp.storage.reread import retry_if_corrupt

U8 = npt.NDArray[np.uint8]

_Pair = tuple[BlockRead, DecodeJob]


class GpuShare:
    def __init__(self, policy: EnginePolicy, read_nbytes: int, device: torch.device | None) -> None:
        self.read_nbytes = read_nbytes
        self.device = device
        self.pinned = PinnedMemory(pinned_allocate)
        self.scratch_nbytes = policy.device_memory_budget // 4
        self._policy = policy

    def engine(self, device: torch.device) -> AbstractContextManager[BlockEngine]:
        return shared_pool().lend(device, self._policy)


@dataclass(frozen=True)
class Fetched:
    read: Read
    data: memoryview  # its bytes, in the buffer of the thread that fetched it
    # for each block, the device whose engine decodes it; None for the CPU engine
    devices: Sequence[torch.device | None]

    def block(self, block: BlockRead) -> memoryview:
        return self.data[block.start - self.read.start : block.stop - self.read.start]


class ReadSource(Protocol):
    """Where a decoder gets its bytes."""

    def fetch(self, read: Read, buffer: memoryview) -> None:
        """Fill the whole buffer with the bytes of a read."""

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes `start` to `stop` of a file (half-open)."""


class Decoder:
    """The buffers and engines of one thread, reused from read to read."""

    def __init__(self, source: ReadSource, verify: str, engine: EngineChoice, gpu: GpuShare) -> None:
        self._source = source
        self._verify = verify
        self._choice = engine
        self._gpu = gpu
        self._buffer = memoryview(b"")
        self._pinned = False
        self._scratch = ScratchArrays()
        self._cpu = CpuEngine()
        self._checks = JobChecks()
        self.bases = LoadedBases(self._cpu, verify, source.read)

    def fetch(self, read: Read) -> Fetched:
        """Read a range into this thread's buffer. The result is valid until the next call."""
        nbytes = read.stop - read.start
        devices = [self._gpu_of(block) for block in read.blocks]
        data = self._buffer_of(nbytes, pinned=self._pinned or any(devices))
        self._source.fetch(read, data)
        return Fetched(read, data, devices)

    def _buffer_of(self, nbytes: int, *, pinned: bool) -> memoryview:
        if len(self._buffer) < nbytes or pinned != self._pinned:
            self._buffer = memoryview(b"")
            longest = max(nbytes, self._gpu.read_nbytes)
            self._buffer = self._gpu.pinned.allocate(longest) if pinned else plain_allocate(nbytes)
            self._pinned = pinned
        return self._buffer[:nbytes]

    def decode(self, fetched: Fetched) -> None:
        read = fetched.read
        if read.start == 0:
            self._check_header(fetched)
        on_gpu: dict[torch.device, list[BlockRead]] = {}
        on_cpu: list[BlockRead] = []
        for block, device in zip(read.blocks, fetched.devices, strict=True):
            (on_cpu if device is None else on_gpu.setdefault(device, [])).append(block)
        for _, of_one in groupby(on_cpu, _only_target):
            self._decode_strips(list(of_one), fetched)
        for device, blocks in on_gpu.items():
            self._decode_on_gpu(device, blocks, fetched)
        self.bases.forget()

    def _check_header(self, fetched: Fetched) -> None:
        read = fetched.read
        path, data_offset = read.footer.path, int(read.footer.block_offsets[0])
        retry_if_corrupt(
            lambda: check_header(fetched.data[:data_offset], path=path),
            lambda: check_header(self._source.read(read.name, 0, data_offset), path=path),
        )

    def _decode_strips(self, blocks: list[BlockRead], fetched: Fetched) -> None:
        """Decode blocks that one target wants, or a single block: together where they follow each other in memory."""
        at = 0
        for strip in strips([block.box for block in blocks], blocks[0].record.element.nbytes):
            these = blocks[at : at + len(strip.sizes)]
            at += len(these)
            if not self._decode_together(these, strip, fetched):
                for block in these:
                    base = self.bases.of(block, fetched.read, fetched.data)
                    self._decode_on_cpu(block, fetched.block(block), fetched.read, base)

    def _decode_together(self, blocks: list[BlockRead], strip: Strip, fetched: Fetched) -> bool:
        """Return True if all are decoded; otherwise the caller decodes each alone, which identifies the corrupt one."""
        chain, footer, targets = blocks[0].record.chain, fetched.read.footer, blocks[0].targets
        assert chain is not None
        if len(targets) > 1 or not self._cpu.decodes_whole(chain):
            return False
        direct = targets[0].destination.direct(strip)
        if direct is None:
            return False
        encoded = [(fetched.block(block), block_row(footer, block.number)) for block in blocks]
        return self._cpu.decode_beside(encoded, direct.widths, chain, direct.rows, verify=self._verify)

    def _decode_on_cpu(self, block: BlockRead, data: memoryview, read: Read, base: LoadedBase | None = None) -> None:
        with located_block(block, read):
            retry_if_corrupt(
                partial(self._decode_block, block, data, read, base), partial(self._decode_again, block, read, base)
            )

    def _decode_block(self, block: BlockRead, data: memoryview, read: Read, base: LoadedBase | None) -> None:
        chain, nbytes = block.record.chain, int(read.footer.block_nbytes[block.number])
        assert chain is not None
        destinations = [target.destination for target in block.targets]
        direct = destinations[0].direct(alone(block.box)) if len(destinations) == 1 else None
        out = direct.rows if direct is not None else self._scratch.array("decoded", nbytes, np.uint8)
        verify, of_base = (self._verify, None) if base is None else (base.verify, base.data)
        self._cpu.decode(data, block_row(read.footer, block.number), chain, out, verify=verify, base=of_base)
        if direct is None:
            for destination in destinations:
                destination.place_bytes(block.box, out)

    def _decode_again(self, block: BlockRead, read: Read, base: LoadedBase | None) -> None:
        data = self._source.read(read.name, block.start, block.stop)
        self._decode_block(block, memoryview(data), read, base)

    def _gpu_of(self, block: BlockRead) -> torch.device | None:
        """Return the device whose engine decodes this block; None for the CPU engine."""
        assert block.record.chain is not None
        devices = {target.destination.device for target in block.targets}
        device = next(iter(devices))
        if len(devices) == 1 and self._choice.on_cuda(device):
            return device if self._choice.serves(device, block.record.chain, DECODE) else None
        if block.record.chain.needs_gpu and torch.cuda.is_available():
            # only a GPU can decode it, whatever its destination
            device = self._gpu.device or torch.device("cuda", torch.cuda.current_device())
            return device if self._choice.on_cuda(device) else None
        return None

    def _decode_on_gpu(self, device: torch.device, blocks: list[BlockRead], fetched: Fetched) -> None:
        """Decode blocks with an engine; one that turns out to be corrupt is read once more."""
        runs, columns, others = self._runs(blocks, fetched, device)
        if runs:
            try:
                with self._gpu.engine(device) as engine:
                    engine.decode_checked(runs, verify=self._verify, columns=columns)
            except CorruptDataError:  # each alone, which finds out which it is
                others = blocks
        self._decode_alone(device, others, fetched)

    def _runs(
        self, blocks: list[BlockRead], fetched: Fetched, device: torch.device
    ) -> tuple[list[DecodeRun], Columns | None, list[BlockRead]]:
        """Return what follows each other in the file and in memory, with rows that make sense, and the other blocks."""
        runs, others = list[tuple[DecodeRun, list[BlockRead]]](), list[BlockRead]()
        for _, same in groupby(enumerate(blocks), lambda one: (one[1].number - one[0], _only_target(one[1]))):
            these = [block for _, block in same]
            run = self._run(these, fetched, device) if len(these) > 1 else None
            if run is None:
                others += these
            else:
                runs.append((run, these))
        found = [run for run, _ in runs]
        columns = self._checks.columns_of(found) if found else None
        if columns is not None or not found:
            return found, columns, others
        passing = [self._checks.columns_of([run]) is not None for run in found]
        others += [block for (_, these), passes in zip(runs, passing, strict=True) if not passes for block in these]
        return [run for run, passes in zip(found, passing, strict=True) if passes], None, others

    def _run(self, blocks: list[BlockRead], fetched: Fetched, device: torch.device) -> DecodeRun | None:
        read, first, last = fetched.read, blocks[0], blocks[-1]
        target, chain = first.targets[0], first.record.chain
        assert chain is not None
        if target.destination.device != device:
            return None
        out = target.destination.direct_run_on_device([block.box for block in blocks])
        if out is None:
            return None
        data = fetched.data[first.start - read.start : last.stop - read.start]
        return DecodeRun(
            encoded_run(read.footer, first.number, last.number + 1, data),
            chain,
            out,
            path=read.footer.path,
            fqn=first.record.fqn or target.record.fqn,
            offset=first.start,
        )

    def _decode_alone(self, device: torch.device, blocks: list[BlockRead], fetched: Fetched) -> None:
        read, again, for_cpu = fetched.read, set[object](), list[_Pair]()
        todo = [(block, self._checked(block, fetched, device)) for block in blocks]
        while todo:
            try:
                with self._gpu.engine(device) as engine:
                    self._decode_with(engine, todo, for_cpu, device)
            except CorruptDataError as error:
                at = next((at for at, (_, job) in enumerate(todo) if job.byte_range == error.byte_range), None)
                if at is None or error.byte_range in again:
                    raise
                again.add(error.byte_range)
            else:
                break
            # only now: no other thread should wait for the storage, and the engine's memory is free again
            block, job = todo[at]
            todo[at] = block, self._check(self._read_again(job, read))
        for block, job in for_cpu:
            self._decode_on_cpu(block, job.data, read)

    def _decode_with(self, engine: BlockEngine, todo: list[_Pair], for_cpu: list[_Pair], device: torch.device) -> None:
        """Decode blocks and take them out of `todo`; those that there is no scratch memory for go to `for_cpu`."""
        direct = [job for _, job in todo if not job.out.is_meta]
        if direct:
            engine.decode_checked(direct, verify=self._verify)
        todo[:] = [(block, job) for block, job in todo if job.out.is_meta]
        most = len(todo)
        while todo:
            count = fitting([job.out.numel() for _, job in todo], 0, most, self._gpu.scratch_nbytes)
            if self._through_scratch(engine, todo[:count]):
                del todo[:count]
            elif count > 1:
                most = count // 2
            else:
                for_cpu.append(_decodable_on_cpu(todo[0], device))
                del todo[0]

    def _checked(self, block: BlockRead, fetched: Fetched, device: torch.device) -> DecodeJob:
        """Return the engine's job for a block, after checking the stored bytes."""
        job, read = self._gpu_job(block, fetched, device), fetched.read
        with located_block(block, read):
            return retry_if_corrupt(partial(self._check, job), lambda: self._check(self._read_again(job, read)))

    def _check(self, job: DecodeJob) -> DecodeJob:
        self._checks.check(job)
        return job

    def _gpu_job(self, block: BlockRead, fetched: Fetched, device: torch.device) -> DecodeJob:
        assert block.record.chain is not None
        read = fetched.read
        destinations = [target.destination for target in block.targets]
        out = None
        if len(destinations) == 1 and destinations[0].device == device:
            out = destinations[0].direct_on_device(block.box)
        if out is None:  # memory is allocated when it is this block's turn
            out = torch.empty(int(read.footer.block_nbytes[block.number]), dtype=torch.uint8, device="meta")
        return DecodeJob(
            fetched.block(block),
            block_row(read.footer, block.number),
            block.record.chain,
            out,
            path=read.footer.path,
            fqn=block.record.fqn or block.targets[0].record.fqn,
            byte_range=(block.start, block.stop),
        )

    def _read_again(self, job: DecodeJob, read: Read) -> DecodeJob:
        assert job.byte_range is not None
        return replace(job, data=memoryview(self._source.read(read.name, *job.byte_range)))

    def _through_scratch(self, engine: BlockEngine, pairs: Sequence[_Pair]) -> bool:
        """Decode blocks to scratch memory, and place them; False if there is not so much."""
        with engine.scratch([job for _, job in pairs]) as jobs:
            if jobs is None:
                return False
            engine.decode_checked(jobs, verify=self._verify)
            with engine.session([job.out for job in jobs]):
                for (block, _), job in zip(pairs, jobs, strict=True):
                    self._place(block, job.out)
        return True

    def _place(self, block: BlockRead, decoded: torch.Tensor) -> None:
        host: torch.Tensor | None = None
        for target in block.targets:
            destination = target.destination
            if destination.device == decoded.device:
                destination.place(block.box, decoded)
                continue
            host = decoded.cpu() if host is None else host
            destination.place(block.box, host)


def _only_target(block: BlockRead) -> int:
    """Return the identity of the target that wants a block, or of the block if there are several."""
    return id(block.targets[0] if len(block.targets) == 1 else block)


def _decodable_on_cpu(pair: _Pair, device: torch.device) -> _Pair:
    _, job = pair
    if job.chain.needs_gpu:
        raise CodecUnavailableError(
            f"{job.out.numel()} bytes of scratch memory are not left on {device}, and only a GPU decodes ANS.",
            path=job.path,
            fqn=job.fqn,
        )
    return pair


def located_block(block: BlockRead, read: Read) -> AbstractContextManager[None]:
    return located(block.record.fqn or block.targets[0].record.fqn, block.start, block.stop, read.footer.path)
