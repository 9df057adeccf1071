"""Jobs of many blocks: the same bytes as of jobs of one block each, and no work of Python for a block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_host import NullDevice
from dcp_nvcomp.codecs import Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.encoded_run import EncodedRun, encoded_nbytes, recoded, uncompressed_nbytes
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EncodeJob, EnginePolicy

from .cases import BUDGET, CHAIN, OWN, decoded, engine_on, tensor, weights
from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import StandInDevice

CHAINS = (CHAIN, OWN, CodecChain(Bytes()))
BLOCK = 4096


def jobs_of(chains: Sequence[CodecChain], counts: Sequence[int]) -> list[EncodeJob]:
    """Return a job of several blocks for each chain; the last block of each is short."""
    found = []
    for seed, (chain, count) in enumerate(zip(chains, counts, strict=True)):
        block = weights(4, count * BLOCK // 4 - 300, seed=seed)
        bounds = np.array([*range(0, block.size, BLOCK), block.size])
        found.append(EncodeJob((tensor(block),), chain, bounds=bounds))
    return found


def singles_of(jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
    return [job.single(at) for job in jobs for at in range(job.count)]


def room_for(jobs: Sequence[EncodeJob]) -> memoryview:
    return memoryview(bytearray(sum(job.chain.max_encoded_nbytes(job.nbytes) for job in singles_of(jobs))))


def assert_right(jobs: Sequence[EncodeJob], encoded: Sequence[Any]) -> None:
    singles = singles_of(jobs)
    assert len(encoded) == len(singles)
    for one, job in zip(encoded, singles, strict=True):
        assert decoded(one, job.chain) == job.tensors[0].numpy().tobytes()


@pytest.mark.parametrize("budget", [BUDGET, 60_000, 1])
@pytest.mark.parametrize("check", [True, False])
def test_many_blocks_are_encoded_as_one_by_one(budget: int, check: bool) -> None:
    jobs = jobs_of(CHAINS, (5, 9, 3))
    singles = singles_of(jobs)
    engine = engine_on(StandInDevice(ReferenceKernels()), budget, check_encodes=check)
    encoded, alone = engine.encode(jobs, room_for(jobs)), engine.encode(singles, room_for(jobs))
    assert_right(jobs, encoded)
    assert [(bytes(one.data), one.row) for one in encoded] == [(bytes(one.data), one.row) for one in alone]
    assert isinstance(encoded, EncodedRun) == (budget == BUDGET), "in one batch there is no object for a block"
    assert uncompressed_nbytes(encoded) == sum(job.nbytes for job in jobs) and not recoded(encoded)
    assert encoded_nbytes(encoded) == sum(len(one.data) for one in encoded)


@pytest.mark.parametrize("count", [1, 4, 7])
def test_part_of_a_run(count: int) -> None:
    jobs = jobs_of((OWN, CHAIN), (count, 3))
    run = engine_on(StandInDevice(ReferenceKernels())).encode(jobs, room_for(jobs))
    assert isinstance(run, EncodedRun)
    first, rest = run[:count], run[count:]
    assert isinstance(first, EncodedRun) and (len(first), len(rest)) == (count, 3)
    assert first[-1].row == run[count - 1].row and [one.row for one in rest] == [one.row for one in [*run][count:]]
    assert bytes(first.data) + bytes(rest.data) == bytes(run.data)
    assert not len(run[2:2]) and not len(run[2:2].data)
    with pytest.raises(IndexError):
        run[len(run)]


def test_a_block_that_arrives_wrong_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_out = StandInDevice.copy_out

    def flips(device: StandInDevice, source: torch.Tensor, host: memoryview) -> None:
        flipped = source.clone()
        flipped[flipped.numel() // 2] ^= 1
        copy_out(device, flipped, host)

    monkeypatch.setattr(StandInDevice, "copy_out", flips)
    jobs = jobs_of((OWN, CHAIN), (6, 5))
    engine = engine_on(StandInDevice(ReferenceKernels()))
    with pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        encoded = engine.encode(jobs, room_for(jobs))
    assert_right(jobs, encoded)
    assert recoded(encoded) == 1 == engine.health.wrong_blocks


def test_a_run_whose_batch_fails_is_encoded_in_smaller_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = jobs_of((OWN,), (9,))
    engine = engine_on(StandInDevice(ReferenceKernels()))
    encode = type(engine._encoder).encode

    def fails(self: Any, some: Sequence[EncodeJob], out: memoryview) -> Any:
        if sum(job.count for job in some) > 2:
            raise RuntimeError("too many")
        return encode(self, some, out)

    monkeypatch.setattr(type(engine._encoder), "encode", fails)
    assert_right(jobs, engine.encode(jobs, room_for(jobs)))


def test_a_run_of_a_codec_that_no_gpu_knows() -> None:
    jobs = jobs_of((CodecChain(Planes(4), Zstd()), OWN, CodecChain(Bytes(), Zstd())), (3, 4, 2))
    encoded = engine_on(StandInDevice(ReferenceKernels())).encode(jobs, room_for(jobs))
    assert_right(jobs, encoded)


class Arriving(CudaEngine):
    def put_right(self, jobs: Any, encoded: Any, out: memoryview) -> Any:
        return encoded  # nothing arrives from a null device


def calls_of(work: Callable[[], object]) -> int:
    """Return how many functions were called, those of numpy and torch included."""
    count = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_no_function_is_called_for_a_block() -> None:
    engine = Arriving(torch.device("cpu"), EnginePolicy(8 << 30), backend=NullDevice())
    chain = CodecChain(Planes(2), Zstd(literals_only=True))

    def encode(blocks: int) -> Callable[[], object]:
        bounds = np.arange(blocks + 1) * chain.block_nbytes
        job = EncodeJob((torch.empty(int(bounds[-1]), dtype=torch.uint8),), chain, bounds=bounds)
        room = torch.empty(2 * job.nbytes, dtype=torch.uint8).numpy().data
        return lambda: engine.encode([job], room)

    few, many = encode(8), encode(256)
    few(), many()  # layouts are worked out once
    assert calls_of(many) <= calls_of(few) + 4
