"""Jobs of many blocks: the same bytes as of jobs of one block each, and no work of Python for a block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_host import NullDevice
from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.codecs.encoded_run import EncodedRun, encoded_nbytes, recoded, uncompressed_nbytes
from dcp_nvcomp.engines.cuda import literals
from dcp_nvcomp.engines.cuda.batches import RowTable
from dcp_nvcomp.engines.cuda.decode_jobs import DecodeJob, DecodeRun, JobChecks
from dcp_nvcomp.engines.cuda.device import upload
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EncodeJob, EnginePolicy
from dcp_nvcomp.errors import CorruptDataError

from .cases import BUDGET, CHAIN, OWN, decoded, engine_on, tensor, weights
from .kernels_on_cpu import ReferenceKernels, _memory
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


_COPY_OUT = StandInDevice.copy_out


def flips(device: StandInDevice, source: torch.Tensor, host: memoryview) -> None:
    flipped = source.clone()
    flipped[flipped.numel() // 2] ^= 1
    _COPY_OUT(device, flipped, host)


def test_a_block_that_arrives_wrong_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInDevice, "copy_out", flips)
    jobs = jobs_of((OWN, CHAIN), (6, 5))
    engine = engine_on(StandInDevice(ReferenceKernels()))
    with pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        encoded = engine.encode(jobs, room_for(jobs))
    assert_right(jobs, encoded)
    assert recoded(encoded) == 1 == engine.health.wrong_blocks
    for _ in range(3):  # after the third time the CPU has all of it
        encoded = engine.encode(jobs, room_for(jobs))
    assert_right(jobs, encoded)
    assert engine.health.wrong_blocks == 3 and not recoded(encoded)


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


@pytest.mark.parametrize("arrives", [True, False])
def test_a_run_of_a_codec_that_no_gpu_knows(monkeypatch: pytest.MonkeyPatch, arrives: bool) -> None:
    if not arrives:
        monkeypatch.setattr(StandInDevice, "copy_out", flips)
    jobs = jobs_of((CodecChain(Planes(4), Zstd()), OWN, CodecChain(Bytes(), Zstd())), (3, 4, 2))
    engine = engine_on(StandInDevice(ReferenceKernels()))
    with nullcontext() if arrives else pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        encoded = engine.encode(jobs, room_for(jobs))
    assert_right(jobs, encoded)
    assert recoded(encoded) == (not arrives) == engine.health.wrong_blocks


# --- and back ---------------------------------------------------------------------------------------------------------


def runs_of(jobs: Sequence[EncodeJob]) -> list[DecodeRun]:
    """Return the blocks of each job as they would be in a file, to be decoded."""
    encoded = engine_on(StandInDevice(ReferenceKernels())).encode(jobs, room_for(jobs))
    assert isinstance(encoded, EncodedRun)
    runs, at = [], 0
    for job in jobs:
        out = tensor(np.full(job.nbytes, 0xEE, np.uint8))
        offset = 64 + int(encoded.bounds[at])
        runs.append(DecodeRun(encoded[at : at + job.count], job.chain, out, "run/x.distcp", "w", offset))
        at += job.count
    return runs


def assert_decoded(jobs: Sequence[EncodeJob], works: Sequence[DecodeRun | DecodeJob]) -> None:
    assert b"".join(work.out.numpy().tobytes() for work in works) == b"".join(
        job.tensors[0].numpy().tobytes() for job in jobs
    )


@pytest.mark.parametrize("budget", [BUDGET, 60_000])
def test_runs_are_decoded(budget: int) -> None:
    jobs = jobs_of(CHAINS, (5, 9, 3))
    first, second, third = runs_of(jobs)
    works: list[DecodeRun | DecodeJob] = [first, *(second.single(at) for at in range(9)), third]
    engine_on(StandInDevice(ReferenceKernels()), budget).decode(works, verify="full")
    assert_decoded(jobs, works)


@pytest.mark.parametrize("how", ["together", "in parts", "some by the CPU"])
def test_runs_are_decoded_as_the_checks_have_laid_them_out(how: str) -> None:
    jobs = jobs_of(CHAINS, (5, 9, 3))
    runs = runs_of(jobs)
    columns = JobChecks().columns_of(runs)
    assert columns is not None and columns.layout is not None and _pass(*runs)
    engine = engine_on(StandInDevice(ReferenceKernels()), 60_000 if how == "in parts" else BUDGET)
    if how == "some by the CPU":
        engine.health.refuse("deflate", RuntimeError("on purpose"))
    with pytest.warns(RuntimeWarning, match="on purpose") if how == "some by the CPU" else nullcontext():
        engine.decode_checked(runs, verify="stored", columns=columns)
    assert_decoded(jobs, runs)


def test_runs_that_the_gpu_does_not_decode() -> None:
    jobs = jobs_of(CHAINS, (5, 9, 3))
    device = StandInDevice(ReferenceKernels())
    engine = engine_on(device)
    engine.health.broken = "on purpose"
    with pytest.warns(RuntimeWarning, match="on purpose"):
        engine.decode(runs := runs_of(jobs), verify="full")
    assert_decoded(jobs, runs)


def test_a_block_of_a_run_that_comes_out_wrong_is_decoded_again() -> None:
    class Flips(ReferenceKernels):
        def merge(self, blocks: RowTable) -> None:
            super().merge(blocks)
            _memory(int(blocks.rows[3, 0]), 1).bitwise_xor_(1)

    jobs = jobs_of((OWN,), (7,))
    engine = engine_on(StandInDevice(Flips()))
    with pytest.warns(RuntimeWarning, match="decoded blocks to wrong bytes"):
        engine.decode(runs := runs_of(jobs), verify="full")
    assert_decoded(jobs, runs)
    assert engine.health.wrong_blocks == 1


def changed(run: DecodeRun, at: int, what: str) -> DecodeRun:
    """Return a run of which one block is not as its rows say, or has rows that make no sense."""
    encoded = run.encoded
    columns = {name: getattr(encoded, name).copy() for name in ("flags", "encoded_crcs", "nbytes", "slice_nbytes")}
    data = bytearray(encoded.data)
    if what == "byte":
        data[int(encoded.bounds[at]) + 5] ^= 1
    elif what == "flags":
        columns["flags"][at] = 77
    elif what == "length":
        columns["nbytes"][at] -= 2
    elif what == "slice of no byte":
        columns["slice_nbytes"][int(encoded.slice_bounds[at])] = 0
    elif what == "slice too long":
        columns["slice_nbytes"][int(encoded.slice_bounds[at])] = 1 << 20
    elif what == "whole floats":  # of two blocks, but not of each
        columns["nbytes"][at - 1 : at + 1] += [1, -1]
    elif what == "slices together":
        columns["slice_nbytes"][int(encoded.slice_bounds[at])] = BLOCK // 4
    elif what == "slices":
        columns["slice_bounds"] = encoded.slice_bounds.copy()
        columns["slice_bounds"][at] -= 1
    return replace(run, encoded=replace(encoded, data=memoryview(bytes(data)), **columns))


def _pass(*runs: DecodeRun) -> bool:
    return JobChecks().columns_of(runs) is not None


ONLY_ON_A_GPU = CodecChain(Bytes(), Ans(1024, "|u1", "6.0.0"))
FAULTS = ["flags", "length", "whole floats", "slice of no byte", "slice too long", "slices together", "slices"]


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize(("chain", "what"), [*((OWN, what) for what in ["byte", *FAULTS]), (ONLY_ON_A_GPU, "byte")])
def test_a_run_with_a_block_that_is_not_what_its_rows_say(chain: CodecChain, what: str, at: int) -> None:
    (run,) = runs_of(jobs_of((chain,), (5,)))
    bad, device = changed(run, at, what), StandInDevice(ReferenceKernels())
    assert _pass(run, run) and _pass(run, bad) == (what == "byte")
    with pytest.raises(CorruptDataError) as caught:
        engine_on(device).decode([run, bad], verify="off")
    assert caught.value.path == "run/x.distcp" and caught.value.fqn == "w"
    start, stop = (run.encoded.bounds[at : at + 2] + run.offset).tolist()
    before = int(run.encoded.bounds[at - 1]) + run.offset
    together = [(before, start)] if what in ("slices", "whole floats") else []
    assert caught.value.byte_range in [(start, stop), *together]
    assert bool(device.copies_in) == (what == "byte"), "only the CRC of the stored bytes is compared on the GPU"


@pytest.mark.parametrize("fault", ["given up", "fails", "knows no such codec"])
@pytest.mark.filterwarnings(
    "ignore:.* are handled by the slower CPU engine:RuntimeWarning", "ignore:The GPU failed on a block:RuntimeWarning"
)
def test_a_corrupt_run_that_a_gpu_can_not_decode(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (run,) = runs_of(jobs_of((OWN,), (5,)))
    engine = engine_on(StandInDevice(ReferenceKernels()))
    if fault == "given up":
        engine.health.broken = "on purpose"
    elif fault == "fails":
        monkeypatch.setattr(StandInDevice, "copy_in", lambda *_: 1 / 0)
    else:
        engine.health.refused.update({"zstd": "on purpose", "literals": "on purpose"})
    with pytest.raises(CorruptDataError):
        engine.decode([changed(run, 3, "byte")], verify="off")


def test_stored_bytes_that_reach_the_gpu_wrong_are_decoded_from_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_in = StandInDevice.copy_in

    def flips_in(device: StandInDevice, host: memoryview, target: torch.Tensor) -> None:
        copy_in(device, host, target)
        target[target.numel() // 2] ^= device.copies_in == 1

    jobs = jobs_of((OWN, ONLY_ON_A_GPU), (7, 2))
    sound, device = StandInDevice(ReferenceKernels()), StandInDevice(ReferenceKernels())
    engine_on(sound).decode(runs_of(jobs), verify="off")
    monkeypatch.setattr(StandInDevice, "copy_in", flips_in)
    engine, runs = engine_on(device), runs_of(jobs)
    with pytest.warns(RuntimeWarning, match="decoded blocks to wrong bytes"):
        engine.decode(runs, verify="off")
    assert_decoded(jobs, runs)
    assert engine.health.wrong_blocks == 1, "those beside it are not wrong"
    ((_, slices),) = sound.nvcomp.kernel_calls
    assert device.nvcomp.kernel_calls == [("decode", slices - 1)], "the wrong block is no decoder's"


def padded_run(run: DecodeRun, nbytes: int) -> DecodeRun:
    """Return a run whose first block has more padding."""
    encoded = run.encoded
    at = int(encoded.bounds[1])
    data = memoryview(bytes(encoded.data[:at]) + bytes(nbytes) + bytes(encoded.data[at:]))
    bounds, crcs = encoded.bounds.copy(), encoded.encoded_crcs.copy()
    bounds[1:] += nbytes
    crcs[0] = checksum(data[: at + nbytes])
    return replace(run, encoded=replace(encoded, data=data, bounds=bounds, encoded_crcs=crcs))


def test_a_run_goes_to_a_gpu_as_it_is() -> None:
    """Blocks begin at multiples of 16 there; of a file that has them elsewhere each goes alone."""
    jobs = jobs_of((OWN,), (3,))
    (run,) = runs_of(jobs)
    short = replace(run, out=run.out[:-4])
    assert not _pass(short) and not _pass(run, short), "kernels write as much as the rows say"
    assert _pass(run) and _pass(padded_run(run, 16)) and not _pass(padded_run(run, 8))
    for nbytes in (16, 8):
        run.out.fill_(0xEE)
        engine_on(StandInDevice(ReferenceKernels())).decode([padded_run(run, nbytes)], verify="full")
        assert_decoded(jobs, [run])


class Arriving(CudaEngine):
    def put_right(self, jobs: Any, encoded: Any, out: memoryview, policy: EnginePolicy) -> Any:
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

    def decode(blocks: int) -> Callable[[], object]:
        encoded = encode(blocks)()
        assert isinstance(encoded, EncodedRun)
        run = DecodeRun(encoded, chain, torch.empty(blocks * chain.block_nbytes, dtype=torch.uint8))
        return lambda: engine.decode_checked([run], verify="stored")

    few, many = decode(8), decode(256)
    few(), many()
    assert calls_of(many) <= calls_of(few) + 4 + 2 * 248, "id and append"


def test_tables_are_short_enough_to_be_copied_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA takes up to 64 KiB of ordinary memory at once; before it takes more it may wait for the stream."""
    sizes, upload = list[int](), literals._upload

    class Noting:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda table, *_: sizes.append(table.rows.nbytes + table.tiles.nbytes)

    def noted(device: Any, table: Any) -> torch.Tensor:
        sizes.append(table.nbytes)
        return upload(device, table)

    monkeypatch.setattr(literals, "_upload", noted)
    device = NullDevice()
    device.kernels = Noting()  # type: ignore[assignment]
    engine = Arriving(torch.device("cpu"), EnginePolicy(8 << 30), backend=device)
    chain = CodecChain(Planes(2), Zstd(literals_only=True))
    bounds = np.arange(257) * chain.block_nbytes  # as much as a task of a save has
    job = EncodeJob((torch.empty(int(bounds[-1]), dtype=torch.uint8),), chain, bounds=bounds)
    encoded = engine.encode([job], torch.empty(2 * job.nbytes, dtype=torch.uint8).numpy().data)
    assert isinstance(encoded, EncodedRun) and len(encoded) == 256
    engine.decode([DecodeRun(encoded, chain, job.tensors[0])], verify="stored")
    assert len(sizes) == 13 and max(sizes) <= 64 << 10


def test_longer_tables_go_through_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a batch of many small tensors."""
    pinned = list[int]()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.nbytes) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    for count in (8192, 8193):
        for device in (torch.device("cuda", 0), torch.device("cpu")):
            upload(np.zeros(count, np.int64), device)
    assert pinned == [8 * 8193]
