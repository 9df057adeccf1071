"""The CUDA engine: nvCOMP and the kernels, for blocks that are on a GPU. Makes the same open bytes as the CPU engine.

CudaEngine   batches under a budget, what happens when the GPU fails or is wrong
encode       a batch of blocks --> encoded blocks        decode     and back
slice_coders slices --> frames --> slices, by nvCOMP (coders) or our own kernels (literals)
batches      where everything of a batch lies            device     memory, stream, kernels
copying      blocks through the CPU engine               health     what was seen of a GPU
pool         the engines of a process                    support    what is installed

Nothing that a GPU makes is believed. A batch that was encoded is decoded again and its CRCs compared, a decoded block's
CRC is compared with the one in the file; what differs is left to the CPU engine, as is what fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.encoded import EncodedBlock, checksum
from dcp_nvcomp.engines.cuda.batches import fitting
from dcp_nvcomp.engines.cuda.coders import stamped_chain
from dcp_nvcomp.engines.cuda.copying import CopyingEngine
from dcp_nvcomp.engines.cuda.decode import BatchDecoder, DecodeJob, Doubt, JobChecks
from dcp_nvcomp.engines.cuda.device import CudaDevice, Device
from dcp_nvcomp.engines.cuda.encode import BatchEncoder, EncodeJob
from dcp_nvcomp.engines.cuda.health import DeviceHealth
from dcp_nvcomp.engines.cuda.slice_coders import DECODE, ENCODE, DeviceCoders, refusal_of
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.errors import CheckpointError, CodecUnavailableError, CorruptDataError

__all__ = [
    "DECODE",
    "ENCODE",
    "BlockEngine",
    "CudaEngine",
    "DecodeJob",
    "EncodeJob",
    "EnginePolicy",
    "JobChecks",
    "cuda_unavailable_reason",
    "refusal_of",
    "stamped_chain",
]


T = TypeVar("T")


@dataclass(frozen=True)
class EnginePolicy:
    """What a save or load asks of an engine.

    Attributes:
        device_memory_budget: bytes of device memory that a batch may take in addition to the blocks themselves. A block
            that alone takes more is a batch of its own.
        check_encodes: True if each batch that was encoded is decoded again.
        may_fall_back: True if the CPU may take what the GPU fails at; else that is an error.
        zstd: who codes Zstd, one of `options.CUDA_ZSTD`.
    """

    device_memory_budget: int
    check_encodes: bool = True
    may_fall_back: bool = True
    zstd: str = "auto"


class BlockEngine(Protocol):
    """What a save or load does with an engine for blocks of a GPU."""

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        """Encode blocks; see `CudaEngine.encode`."""

    def decode_checked(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """Decode blocks that passed `JobChecks`; see `CudaEngine.decode`."""

    def session(self, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Copies between these tensors, complete at the end."""


class CudaEngine:
    """Encodes and decodes blocks in GPU memory. Not for several threads at once.

    If the GPU runs out of memory or anything fails, batches become smaller, and a block that fails alone is left to the
    CPU engine, with one warning. So is a block that came out wrong. Blocks of codecs that it does not know are always
    left to the CPU engine.

    Args:
        device: the CUDA device of the blocks.
        policy: see `EnginePolicy`.
        health: what is known of the device.
        backend: what the engine runs on; by default CuPy and nvCOMP on `device`.

    Attributes:
        health: what is known of the device.
        coders: the device's coders.

    Raises:
        CodecUnavailableError: there is no such device, or a package is missing.
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
        self.coders = DeviceCoders(self._device, self.health)
        self._decoder = BatchDecoder(self._device, self.coders)
        self._checks = JobChecks()
        self._copying = CopyingEngine()
        self.set_policy(policy)

    def set_policy(self, policy: EnginePolicy) -> None:
        """Work for another save or load."""
        assert policy.device_memory_budget > 0
        self._policy = policy
        self._device.arena.set_limit(policy.device_memory_budget)
        self.coders.prefer(policy.zstd)
        self._encoder = BatchEncoder(self._device, self.coders, self._decoder if policy.check_encodes else None)

    def encode(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        """Encode blocks.

        Args:
            jobs: the blocks, of any chains.
            out: host memory, pinned if it is to be fast; at least the sum of `chain.max_encoded_nbytes` of the blocks.

        Returns:
            The encoded blocks, all there; they fill `out` from its start without gaps, in any order.

        Raises:
            CodecUnavailableError: the GPU can't encode a block with ANS, which only it can; or it fails, and the CPU
                may not take over.
        """
        served = _served([job.chain for job in jobs], self.coders.encodes)
        encoded = dict(zip(served, self._encode_served([jobs[at] for at in served], out), strict=True))
        position = sum(block.data.nbytes for block in encoded.values())
        for at in range(len(jobs)):
            if at not in encoded:
                self._leave_out(jobs[at].chain, ENCODE)
                encoded[at] = self._copying.encode_block(jobs[at], out[position:])
                position += encoded[at].data.nbytes
        return [encoded[at] for at in range(len(jobs))]

    def _encode_served(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        costs = self._costs(lambda: self._encoder.costs_nbytes(jobs), len(jobs))
        encoded: list[EncodedBlock] = []
        position, most = 0, len(jobs)
        while len(encoded) < len(jobs):
            count = self._fitting(costs, len(encoded), most)
            batch, room = jobs[len(encoded) : len(encoded) + count], out[position:]
            done = self._encode_batch(batch, room)
            if done is None:
                if count > 1:
                    most = count // 2
                    continue
                self._fall_back(batch[0].chain)
                done = [self._copying.encode_block(batch[0], room)]
            encoded += done
            position += sum(block.data.nbytes for block in done)
        return encoded

    def _encode_batch(self, batch: Sequence[EncodeJob], room: memoryview) -> list[EncodedBlock] | None:
        """Return the encoded blocks of a batch, checked and put right; None if the GPU failed."""
        if (reason := self.health.unusable) is not None:
            self._leave_to_cpu(reason)
            return self._copying.encode(batch, room)
        done = self._attempt(lambda: self._encoder.encode(batch, room))
        if done is None:
            return None
        if not done.wrong:
            self.health.succeeded()
            return done.blocks
        self.health.was_wrong(len(done.wrong), "encoded")
        self._copying.reason = "it encoded a block to wrong bytes"
        wrong = set(done.wrong)
        kept = {at: bytes(block.data) for at, block in enumerate(done.blocks) if at not in wrong}
        position = 0
        for at, job in enumerate(batch):
            target = room[position:]
            if at in wrong:
                done.blocks[at] = replace(self._copying.encode_block(job, target), was_wrong=True)
            else:
                target[: len(kept[at])] = kept[at]
                done.blocks[at] = replace(done.blocks[at], data=target[: len(kept[at])])
            position += done.blocks[at].data.nbytes
        return done.blocks

    def decode(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """Decode blocks; returns once all of them are complete.

        Args:
            jobs: the blocks.
            verify: `"stored"`, `"full"` or `"off"`, which is as `"stored"` here.

        Raises:
            CorruptDataError: a CRC does not match, or bytes do not decode to exactly the block's size.
            UnsupportedVersionError: a block's ANS is of another version of nvCOMP.
            CodecUnavailableError: the GPU can't decode a block of ANS, which only it can; or it fails, and the CPU may
                not take over.
        """
        for job in jobs:
            self._checks.check(job)
        self.decode_checked(jobs, verify=verify)

    def decode_checked(self, jobs: Sequence[DecodeJob], *, verify: str) -> None:
        """`decode`, of blocks that passed `JobChecks.check`.

        One with a frame that is no frame, or an odd one, is left to the CPU engine, which refuses it or decodes it.
        """
        served = _served([job.chain for job in jobs], self.coders.decodes)
        if self.health.unusable is None:
            faults = self._checks.frame_faults([jobs[at] for at in served])
            served = [at for number, at in enumerate(served) if number not in faults]
        others = sorted({*range(len(jobs))} - {*served})
        for at in others:
            self._leave_out(jobs[at].chain, DECODE)
        self._copying.decode_checked([jobs[at] for at in others], verify=verify)
        self._decode_served([jobs[at] for at in served], verify)

    def _decode_served(self, jobs: Sequence[DecodeJob], verify: str) -> None:
        for job in jobs:
            try:
                self.coders.check_decodable(job.chain.coder)
            except CheckpointError as error:
                error.path, error.fqn = job.path, job.fqn
                raise
        costs = self._costs(lambda: self._decoder.costs_nbytes(jobs), len(jobs))
        position, most = 0, len(jobs)
        while position < len(jobs):
            count = self._fitting(costs, position, most)
            batch = jobs[position : position + count]
            if not self._decode_batch(batch, verify):
                if count > 1:
                    most = count // 2
                    continue
                self._fall_back(batch[0].chain)
                self._copying.decode_checked(batch, verify=verify)
            position += count

    def _decode_batch(self, batch: Sequence[DecodeJob], verify: str) -> bool:
        """Decode a batch, and have the CPU decode what came out wrong; False if the GPU failed."""
        if (reason := self.health.unusable) is not None:
            self._leave_to_cpu(reason)
            self._copying.decode_checked(batch, verify=verify)
            return True
        doubts = self._attempt(lambda: self._decoder.decode(batch))
        if doubts is None:
            return False
        wrong = sum([self._was_wrong(batch[at], doubt, verify) for at, doubt in doubts.items()])
        if wrong:
            self.health.was_wrong(wrong, "decoded")
        else:
            self.health.succeeded()
        return True

    def _was_wrong(self, job: DecodeJob, doubt: Doubt, verify: str) -> bool:
        """Have the CPU decode a doubtful block; True if it comes to something else than the GPU did.

        Raises:
            CorruptDataError: it is the block that is corrupt.
        """
        if job.chain.needs_gpu:
            raise CorruptDataError(doubt.what, path=job.path, fqn=job.fqn, byte_range=job.byte_range)
        host = self._copying.decoded(job, verify=verify)
        if checksum(host) == doubt.crc:  # only the row is wrong, which is what verify="full" is there to find
            return False
        self._copying.place(host, job)
        return doubt.is_known

    def encode_unaided(self, jobs: Sequence[EncodeJob], out: memoryview) -> list[EncodedBlock]:
        """Encode a batch, and raise an error of any type if the GPU fails or is wrong."""
        with self._device.current():
            self._device.arena.grow(sum(self._encoder.costs_nbytes(jobs)))
        batch = self._encoder.encode(jobs, out)
        if batch.wrong:
            raise RuntimeError("a block was encoded to wrong bytes")
        return batch.blocks

    def decode_unaided(self, jobs: Sequence[DecodeJob]) -> None:
        """Decode a batch, and raise an error of any type if the GPU fails or is wrong."""
        with self._device.current():
            self._device.arena.grow(sum(self._decoder.costs_nbytes(jobs)))
        if self._decoder.decode(jobs):
            raise RuntimeError("a block was decoded to wrong bytes")

    def release_memory(self) -> None:
        """Give back the device memory that is kept for the next batch."""
        self._device.arena.release()

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
        """Return how many blocks make the next batch; the arena grows for one that alone is too large."""
        if self.health.unusable is not None:
            return min(most, len(costs) - start)
        arena = self._device.arena

        def make_room() -> int:
            count = fitting(costs, start, most, min(arena.capacity_nbytes, self._policy.device_memory_budget))
            if count == 1:
                arena.grow(costs[start])
            return count

        return self._attempt(make_room) or 1  # without memory the next attempt fails too, and the CPU takes the block

    def _attempt(self, work: Callable[[], T]) -> T | None:
        """Do some work; return None if the GPU failed. All that it held is free again by then."""
        try:
            return work()
        except CheckpointError:
            raise
        except Exception as error:  # nvCOMP, CuPy and torch raise errors of many types
            self._copying.reason = f"{type(error).__name__}: {error}"
            return None

    def _leave_to_cpu(self, reason: str) -> None:
        """Before the CPU engine takes a batch because the GPU is not used any more."""
        if not self._policy.may_fall_back:
            raise CodecUnavailableError(f"engine='cuda' can't go on: {reason}. Use engine='auto' or 'cpu'.")
        self.health.fell_back(reason)

    def _leave_out(self, chain: CodecChain, direction: str) -> None:
        """Before the CPU engine takes a block: does it because the coder failed the self-test?"""
        refusal = refusal_of(self.health, chain, self._policy.zstd, direction)
        if refusal is not None:
            if not self._policy.may_fall_back:
                raise CodecUnavailableError(f"engine='cuda' can't run here: {refusal}. Use engine='auto' or 'cpu'.")
            self.health.left_out(chain, refusal)

    def _fall_back(self, chain: CodecChain) -> None:
        """Before the CPU engine takes a block that failed alone."""
        reason = self._copying.reason
        if not self._policy.may_fall_back and not chain.needs_gpu:
            raise CodecUnavailableError(
                f"The GPU failed on a block ({reason}), and engine='cuda' rules the CPU engine out."
            )
        if not chain.needs_gpu:
            self.health.failed(reason)


def _served(chains: Sequence[CodecChain], serves: Callable[[CodecChain], bool]) -> list[int]:
    """Return the numbers of the blocks whose chain is served; almost all of a batch share one of a few."""
    known: dict[int, bool] = {}
    for chain in chains:
        if id(chain) not in known:
            known[id(chain)] = serves(chain)
    return [at for at, chain in enumerate(chains) if known[id(chain)]]
