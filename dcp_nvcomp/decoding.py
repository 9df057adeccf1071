"""What one load thread does: fetch a range of a file, check and decode its blocks, place them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.codecs.ans import Ans
from dcp_nvcomp.codecs.planes import SplitScratch
from dcp_nvcomp.datafile import block_row
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.engines.cuda import CudaEngine, DecodeJob
from dcp_nvcomp.errors import CheckpointError, CorruptDataError
from dcp_nvcomp.fetching import BlockRead, Read
from dcp_nvcomp.filesystem import Filesystem
from dcp_nvcomp.format import check_header
from dcp_nvcomp.placement import Destination
from dcp_nvcomp.records import EngineChoice
from dcp_nvcomp.staging import plain_allocate

__all__ = ["Decoder"]

U8 = npt.NDArray[np.uint8]


class Decoder:
    """One thread's buffers and engines, reused from read to read.

    Args:
        filesystem: the checkpoint.
        verify: `"stored"`, `"full"` or `"off"`.
        engine: the `engine` option; shared, so that it warns once.
        device_memory_budget: bytes that CUDA engines may take on a device.
    """

    def __init__(self, filesystem: Filesystem, verify: str, engine: EngineChoice, device_memory_budget: int) -> None:
        self._filesystem = filesystem
        self._verify = verify
        self._choice = engine
        self._device_memory_budget = device_memory_budget
        self._buffer = memoryview(b"")
        self._scratch = SplitScratch()
        self._cpu = CpuEngine()
        self._cuda: dict[torch.device, CudaEngine] = {}

    def fetch(self, read: Read) -> None:
        """Read the range into this thread's buffer."""
        nbytes = read.stop - read.start
        if len(self._buffer) < nbytes:
            self._buffer = plain_allocate(nbytes)
        self._filesystem.read_into(read.name, read.start, self._buffer[:nbytes])

    def decode(self, read: Read) -> None:
        """Check, decode and place the blocks of the range that was fetched.

        Raises:
            CorruptDataError: a block is damaged, also when read a second time.
        """
        if read.start == 0:
            data_offset = int(read.footer.block_offsets[0])
            check_header(self._buffer[:data_offset], path=read.footer.path)
        on_gpu: dict[torch.device, list[BlockRead]] = {}
        for block in read.blocks:
            device = self._gpu_of(block)
            if device is not None:
                on_gpu.setdefault(device, []).append(block)
                continue
            data = self._buffer[block.start - read.start : block.stop - read.start]
            with located(block, read):
                try:
                    self._decode_block(block, data, read)
                except CorruptDataError:
                    # bits flip on the way too: what is damaged in the file is damaged the second time as well
                    again = self._filesystem.read(read.name, block.start, block.stop)
                    self._decode_block(block, memoryview(again), read)
        for device, blocks in on_gpu.items():
            self._decode_on_gpu(device, blocks, read)

    def _decode_block(self, block: BlockRead, data: memoryview, read: Read) -> None:
        chain, nbytes = block.record.chain, int(read.footer.block_nbytes[block.number])
        assert chain is not None
        destinations = [_destination(target.destination) for target in block.targets]
        direct = destinations[0].direct(block.box) if len(destinations) == 1 else None
        out = direct if direct is not None else self._scratch.array("decoded", nbytes, np.uint8)
        self._cpu.decode(data, block_row(read.footer, block.number), chain, out, verify=self._verify)
        if direct is None:
            decoded = torch.from_numpy(out)
            for destination in destinations:
                destination.place(block.box, decoded)

    def _gpu_of(self, block: BlockRead) -> torch.device | None:
        """The device whose engine decodes this block; None for the CPU engine."""
        assert block.record.chain is not None
        devices = {_destination(target.destination).device for target in block.targets}
        if len(devices) == 1 and next(iter(devices)).type == "cuda":
            device = next(iter(devices))
            return device if self._choice.on_cuda(device) else None
        if isinstance(block.record.chain.coder, Ans) and torch.cuda.is_available():
            # only a GPU can decode it, wherever it goes then
            device = torch.device("cuda", torch.cuda.current_device())
            return device if self._choice.on_cuda(device) else None
        return None

    def _decode_on_gpu(self, device: torch.device, blocks: list[BlockRead], read: Read) -> None:
        engine = self._cuda.get(device)
        if engine is None:
            engine = self._cuda[device] = CudaEngine(device, device_memory_budget=self._device_memory_budget)
        with torch.cuda.device(device):
            jobs = [self._gpu_job(block, read, device) for block in blocks]
            engine.decode(jobs, verify=self._verify)
            for block, job in zip(blocks, jobs, strict=True):
                for target in block.targets:
                    destination = _destination(target.destination)
                    destination.place(block.box, job.out if destination.device.type == "cuda" else job.out.cpu())
            torch.cuda.current_stream(device).synchronize()

    def _gpu_job(self, block: BlockRead, read: Read, device: torch.device) -> DecodeJob:
        assert block.record.chain is not None
        return DecodeJob(
            self._buffer[block.start - read.start : block.stop - read.start],
            block_row(read.footer, block.number),
            block.record.chain,
            torch.empty(int(read.footer.block_nbytes[block.number]), dtype=torch.uint8, device=device),
            path=read.footer.path,
            fqn=block.record.fqn or block.targets[0].record.fqn,
            byte_range=(block.start, block.stop),
        )


@contextmanager
def located(block: BlockRead, read: Read) -> Iterator[None]:
    """Adds to an error where it happened."""
    try:
        yield
    except CheckpointError as error:
        error.path, error.byte_range = read.footer.path, (block.start, block.stop)
        error.fqn = block.record.fqn or block.targets[0].record.fqn
        raise


def _destination(destination: Destination | None) -> Destination:
    assert destination is not None, "resolved before its first block is fetched"
    return destination
