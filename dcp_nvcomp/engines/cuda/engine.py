"""The CUDA engine: nvCOMP and the kernels, for blocks that are on a GPU. Makes the same open bytes as the CPU engine.

CudaEngine   batches under a budget, what happens when the GPU fails or is wrong
encode       a batch of blocks --> encoded blocks        decode     and back, of what decode_jobs has checked
slice_coders slices --> frames --> slices, by nvCOMP (coders) or our own kernels (literals)
batches      where everything of a batch lies            device     memory, stream, kernels
fallback     what saves and loads ask of an engine, and the CPU engine in its place
pool         the engines of a process, tested            support    what is installed
health       what was seen of a GPU                      arena      device memory

Nothing that a GPU makes is believed. A batch that was encoded is decoded again and its CRCs compared, a decoded block's
CRC is compared with the one in the file; what differs is left to the CPU engine, as is what fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain, EncodedBlock, checksum
from dcp_nvcomp.codecs.encoded_run import EncodedRun, encoded_nbytes
from dcp_nvcomp.engines.cuda.batches import padded_nbytes, part_of, starts_of
from dcp_nvcomp.engines.cuda.coders import DECODE, ENCODE
from dcp_nvcomp.engines.cuda.decode import BatchDecoder, Doubt
from dcp_nvcomp.engines.cuda.decode_jobs import Columns, DecodeJob, DecodeRun, JobChecks, Work, singles_of
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device
from dcp_nvcomp.engines.cuda.encode import BatchEncoder, EncodeJob, arrived_wrong
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine, EnginePolicy, FallBack
from dcp_nvcomp.engines.cuda.health import DeviceHealth
from dcp_nvcomp.engines.cuda.slice_coders import DeviceCoders
from dcp_nvcomp.errors import CheckpointError, CorruptDataError

T = TypeVar("T")


class CudaEngine:
    """Encodes and decodes blocks in GPU memory. Not for several threads at once.

    If the GPU runs out of memory or anything fails, batches become smaller, and a block that fails alone is left to the
    CPU engine, with one warning. So is a block that came out wrong. Blocks of codecs that it does not know are always
    left to the CPU engine.
    """

    def __init__(
        self,
        device: torch.device,
        policy: EnginePolicy,
        *,
        health: DeviceHealth | None = None,
        backend: Device | None = None,
    ) -> None:
        self._device = CudaDevice(device) if backend is None else backend
        self.health = health or DeviceHealth(str(device))
        self.memory = self._device.arena
        self.coders = DeviceCoders(self._device, self.health)
        self.memory.set_keeper(weakref.WeakMethod(self._forget))
        self._decoder = BatchDecoder(self._device, self.coders)
        self._checks = JobChecks()
        self._copying = CopyingEngine()
        self._encoders: dict[bool, BatchEncoder] = {}
        self.set_policy(policy)

    def _forget(self) -> None:
        with self._device.current():
            self.coders.forget()

    def set_policy(self, policy: EnginePolicy) -> None:
        """Work for another save or load."""
        self._policy = policy
        self._fall_back = FallBack(self.health, policy)
        self.memory.set_limit(policy.device_memory_budget)
        # each keeps what it has worked out of batches, which the next task and the next save have again
        if policy.check_encodes not in self._encoders:
            decoder = self._decoder if policy.check_encodes else None
            self._encoders[policy.check_encodes] = BatchEncoder(self._device, self.coders, decoder)
        self._encoder = self._encoders[policy.check_encodes]

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> Sequence[EncodedBlock]:
        """Encode blocks; what comes out is right, or an error is raised."""
        return self.put_right(jobs, self.encode_checked(jobs, out), out, self._policy)

    def encode_checked(self, jobs: Sequence[EncodeJob], out: memoryview) -> Sequence[EncodedBlock]:
        """Encode blocks, of which not all may have arrived as they were checked on the GPU: see `put_right`."""
        served = _served([job.chain for job in jobs], self.coders.encodes)
        if len(served) == len(jobs):
            return self._encode_served(jobs, out)
        mine = [jobs[at] for at in served]
        encoded = self.put_right(mine, self._encode_served(mine, out), out, self._policy)
        position = encoded_nbytes(encoded)
        blocks, found = iter(encoded), list[EncodedBlock]()
        for at, job in enumerate(jobs):
            if at in served:
                found += [next(blocks) for _ in range(job.count)]
                continue
            self._fall_back.of_chain(job.chain, ENCODE)
            found += self._copying.encode([job], out[position:])
            position += sum(block.data.nbytes for block in found[-job.count :])
        return found

    def put_right(
        self, jobs: Sequence[EncodeJob], encoded: Sequence[EncodedBlock], out: memoryview, policy: EnginePolicy
    ) -> Sequence[EncodedBlock]:
        """Compare what arrived in host memory with what was checked, and have the CPU encode what is wrong.

        Any thread may, also when the engine already works for another save, whose policy may be another one.
        """
        if not isinstance(encoded, EncodedRun):
            return encoded
        wrong = arrived_wrong(encoded) if policy.check_encodes else []
        if wrong:
            return self._encoded_again(jobs, encoded, wrong, out, FallBack(self.health, policy), CopyingEngine())
        self.health.succeeded()
        return encoded

    def _encode_served(self, jobs: Sequence[EncodeJob], out: memoryview) -> Sequence[EncodedBlock]:
        count = sum(job.count for job in jobs)
        costs = self._costs(lambda: self._encoder.costs_nbytes(jobs), count)
        encoded: list[EncodedBlock] = []
        position, most = 0, count
        while len(encoded) < count:
            fitting = self._fitting(costs, len(encoded), most)
            batch, room = part_of(jobs, len(encoded), len(encoded) + fitting), out[position:]
            done = self._encode_batch(batch, room)
            if done is None:
                if fitting > 1:
                    most = fitting // 2
                    continue
                self._fall_back.of_block(batch[0].chain, self._copying.reason)
                done = self._copying.encode(batch, room)
            if fitting == count:
                return done
            if isinstance(done, EncodedRun):
                done = self.put_right(batch, done, room, self._policy)
            encoded += done
            position += sum(block.data.nbytes for block in done)
        return encoded

    def _encode_batch(self, batch: Sequence[EncodeJob], room: memoryview) -> Sequence[EncodedBlock] | None:
        """Return the encoded blocks of a batch, those put right that do not decode; None if the GPU failed."""
        if (reason := self.health.unusable) is not None:
            self._fall_back.of_everything(reason)
            return self._copying.encode(batch, room)
        done = self._attempt(lambda: self._encoder.encode(batch, room))
        if done is None:
            return None
        if not done.wrong:  # whether it succeeded is known once it has arrived
            return done.run
        wrong = sorted({*done.wrong, *arrived_wrong(done.run)})
        return self._encoded_again(batch, done.run, wrong, room, self._fall_back, self._copying)

    def _encoded_again(
        self,
        jobs: Sequence[EncodeJob],
        run: EncodedRun,
        wrong: Sequence[int],
        room: memoryview,
        fall_back: FallBack,
        cpu: CopyingEngine,
    ) -> list[EncodedBlock]:
        singles, blocks = [job.single(at) for job in jobs for at in range(job.count)], list(run)
        for at in wrong:
            fall_back.of_wrong_block(singles[at].chain)
        self.health.was_wrong(len(wrong), "encoded")
        kept = {at: bytes(block.data) for at, block in enumerate(blocks) if at not in wrong}
        position = 0
        for at, job in enumerate(singles):
            target = room[position:]
            if at in kept:
                target[: len(kept[at])] = kept[at]
                blocks[at] = replace(blocks[at], data=target[: len(kept[at])])
            else:
                blocks[at] = replace(cpu.encode_block(job, target), was_wrong=True)
            position += blocks[at].data.nbytes
        return blocks

    def decode(self, works: Sequence[Work], *, verify: str) -> None:
        """Decode blocks; returns once all of them are complete."""
        passed: list[Work] = []
        for work in works:
            if isinstance(work, DecodeRun) and self._checks.columns_of([work]) is not None:
                passed.append(work)
                continue
            for job in singles_of([work]):
                self._checks.check(job)
                passed.append(job)
        self.decode_checked(passed, verify=verify)

    def decode_checked(self, works: Sequence[Work], *, verify: str, columns: Columns | None = None) -> None:
        """`decode`, of what passed the checks of `JobChecks`, which may have returned all blocks as columns."""
        served = _served([work.chain for work in works], self.coders.decodes)
        others = sorted({*range(len(works))} - {*served})
        for at in others:
            self._fall_back.of_chain(works[at].chain, DECODE)
        self._copying.decode_checked([works[at] for at in others], verify=verify)
        self._decode_served([works[at] for at in served], verify, None if others else columns)

    def _decode_served(self, works: Sequence[Work], verify: str, columns: Columns | None) -> None:
        for work in works:
            try:
                self.coders.check_decodable(work.chain.coder)
            except CheckpointError as error:
                error.path, error.fqn = work.path, work.fqn
                raise
        if not works:
            return
        columns = columns or Columns.of(works)
        total = columns.nbytes.size
        costs = self._costs(lambda: self._decoder.costs_nbytes(columns), total)
        position, most = 0, total
        while position < total:
            count = self._fitting(costs, position, most)
            batch = part_of(works, position, position + count)
            if not self._decode_batch(batch, columns if count == total else Columns.of(batch), verify):
                if count > 1:
                    most = count // 2
                    continue
                self._fall_back.of_block(batch[0].chain, self._copying.reason)
                self._copying.decode_checked(batch, verify=verify)
            position += count

    def _decode_batch(self, batch: Sequence[Work], columns: Columns, verify: str) -> bool:
        """Decode a batch, and have the CPU decode what came out wrong; False if the GPU failed."""
        if (reason := self.health.unusable) is not None:
            self._fall_back.of_everything(reason)
            self._copying.decode_checked(batch, verify=verify)
            return True
        doubts = self._attempt(lambda: self._decoder.decode(batch, columns))
        if doubts is None:
            return False
        singles = singles_of(batch) if doubts else []
        wrong = sum([self._was_wrong(singles[at], doubt, verify) for at, doubt in doubts.items()])
        if wrong:
            self.health.was_wrong(wrong, "decoded")
        else:
            self.health.succeeded()
        return True

    def _was_wrong(self, job: DecodeJob, doubt: Doubt, verify: str) -> bool:
        """Have the CPU decode a doubtful block; True if it comes to something else than the GPU did."""
        if job.chain.needs_gpu:
            raise CorruptDataError(doubt.what, path=job.path, fqn=job.fqn, byte_range=job.byte_range)
        host = self._copying.decoded(job, verify=verify)
        if checksum(host) == doubt.crc:  # only the row is wrong, which is what verify="full" is there to find
            return False
        self._copying.place(host, job)
        return doubt.is_known

    def encode_unaided(self, jobs: Sequence[EncodeJob], out: memoryview) -> Sequence[EncodedBlock]:
        """Encode a batch, and raise an error of any type if the GPU fails or is wrong."""
        with self._device.current():
            self.memory.grow(sum(self._encoder.costs_nbytes(jobs)))
        batch = self._encoder.encode(jobs, out)
        if batch.wrong or arrived_wrong(batch.run):
            raise RuntimeError("a block was encoded to wrong bytes")
        return batch.run

    def decode_unaided(self, works: Sequence[Work]) -> None:
        """Decode a batch, and raise an error of any type if the GPU fails or is wrong."""
        columns = Columns.of(works)
        with self._device.current():
            self.memory.grow(sum(self._decoder.costs_nbytes(columns)))
        if self._decoder.decode(works, columns):
            raise RuntimeError("a block was decoded to wrong bytes")

    @contextmanager
    def scratch(self, jobs: Sequence[DecodeJob]) -> Iterator[Sequence[DecodeJob] | None]:
        """Lend memory for decoded blocks, beside which they can be decoded within the budget."""
        starts = starts_of(padded_nbytes(np.array([job.out.numel() for job in jobs], np.int64))).tolist()
        memory, unusable = None, self.health.unusable
        if unusable is None:
            with self._device.current():
                take = self.memory.take_scratch
                memory = self._attempt(lambda: take(starts[-1], self._decode_costs(jobs)))
        if memory is not None:
            with self.memory.lending(memory):
                places = zip(jobs, starts[:-1], strict=True)
                yield [replace(job, out=memory[start : start + job.out.numel()]) for job, start in places]
            return
        if unusable is not None:
            self._fall_back.of_everything(unusable)
        elif len(jobs) == 1:
            self._fall_back.of_block(jobs[0].chain, self._copying.reason)
        yield None

    def _decode_costs(self, jobs: Sequence[DecodeJob]) -> list[int]:
        """Return the cost of each block; 0 for one that is left to the CPU engine."""
        costs, served = [0] * len(jobs), _served([job.chain for job in jobs], self.coders.decodes)
        for at, cost in zip(served, self._costs_of([jobs[at] for at in served]), strict=True):
            costs[at] = cost
        return costs

    def _costs_of(self, jobs: Sequence[DecodeJob]) -> list[int]:
        return self._decoder.costs_nbytes(Columns.of(jobs)) if jobs else []

    def session(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Copies between these tensors on the engine's own stream, complete at the end."""
        return self._device.session(tensors)

    def _costs(self, work: Callable[[], list[int]], count: int) -> list[int]:
        """Return the cost of each block; if nvCOMP can't even compute that, every block is a batch of its own."""
        if self.health.unusable is not None:
            return [0] * count
        with self._device.current():
            costs = self._attempt(work)
        return [self._policy.device_memory_budget] * count if costs is None else costs

    def _fitting(self, costs: Sequence[int], start: int, most: int) -> int:
        """Return how many blocks make the next batch."""
        if self.health.unusable is not None:
            return min(most, len(costs) - start)
        # without memory the next attempt fails too, and the CPU takes the block
        return self._attempt(lambda: self.memory.fitting(costs, start, most)) or 1

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Do some work; return None if the GPU failed. All that it held is free again by then."""
        try:
            return work()
        except CheckpointError:
            raise
        except Exception as error:  # nvCOMP, CuPy and torch raise errors of many types
            self._copying.reason = f"{type(error).__name__}: {error}"
            return None


# What saves and loads use: an engine, whether it works on the GPU or leaves everything to the CPU.
BlockEngine = CudaEngine | CopyingEngine


def _served(chains: Sequence[CodecChain], serves: Callable[[CodecChain], bool]) -> list[int]:
    """Return the numbers of the blocks whose chain is served; almost all of a batch share one of a few."""
    known: dict[int, bool] = {}
    for chain in chains:
        if id(chain) not in known:
            known[id(chain)] = serves(chain)
    return [at for at, chain in enumerate(chains) if known[id(chain)]]
