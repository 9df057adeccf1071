"""A whole load through the CUDA engine's batches, on the stand-in: what the CPU engine wrote."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp.engines.cuda.decode_jobs import Columns, DecodeRun, JobChecks, singles_of
from dcp_nvcomp.engines.cuda.engine import CudaEngine
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE, shared_pool
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.errors import CorruptDataError
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.loading import job as loading
from dcp_nvcomp.loading.job import LoadJob, LoadOptions
from dcp_nvcomp.loading.read_plan import Region
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import load_into, save
from tests.states import assert_same

from .kernels_on_cpu import ReferenceKernels
from .nvcomp_stand_in import NvcompStandIn
from .stand_in_pool import StandInPool, install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def pinned_nbytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the page-locked buffers that loads make."""
    made: list[int] = []

    def pinned(nbytes: int) -> memoryview:
        made.append(nbytes)
        return plain_allocate(nbytes)

    monkeypatch.setattr(decoding, "pinned_allocate", pinned)
    return made


@pytest.fixture
def on_the_engine(monkeypatch: pytest.MonkeyPatch, pinned_nbytes: list[int]) -> StandInPool:
    """Host tensors take the way of CUDA tensors, to engines on the stand-in."""
    return install_stand_ins(monkeypatch, ReferenceKernels())


def every_kind() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    state: dict[str, Any] = {
        "w": torch.randn(4500, 200, generator=generator),  # narrow: blocks are runs of memory
        "h": torch.randn(1_000_001, generator=generator).bfloat16(),
        "boxes": torch.randn(600, 700, generator=generator),
        "v": torch.rand(200, 500, generator=generator).t(),
        "i": torch.arange(40_000),
        "z": torch.zeros(50_000, dtype=torch.complex64),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "object": {"a": 1},
    }
    return state | {f"small.{number}": torch.randn(5, number, generator=generator) for number in range(1, 40)}


def destination(state: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.full_like(v, 7) if isinstance(v, torch.Tensor) else {"a": 0} for k, v in state.items()}


def save_on_cpu(path: Path, state: dict[str, Any], codec: str = "planes-zstd") -> None:
    save(path, state, codec=codec, engine="cpu")


@pytest.mark.ci
@pytest.mark.parametrize("codec", ["auto", "planes-zstd", "planes-deflate", "zstd", "none"])
@pytest.mark.parametrize("verify", ["stored", "full"])
def test_load_through_the_engine(tmp_path: Path, on_the_engine: StandInPool, codec: str, verify: str) -> None:
    state = every_kind()
    save_on_cpu(tmp_path, state, codec)
    into = destination(state)
    load_into(tmp_path, into, verify=verify)
    assert on_the_engine.devices
    assert_same(into, state)


def test_into_tensors_of_another_shape_in_memory(tmp_path: Path, on_the_engine: StandInPool) -> None:
    """Strided, of another dtype, conjugate: through scratch memory."""
    state = every_kind()
    save_on_cpu(tmp_path, state)
    into: dict[str, Any] = {
        "w": torch.zeros(200, 4500).t(),
        "h": torch.zeros(1_000_001),
        "v": torch.zeros(500, 200),
        "z": torch.zeros(50_000, dtype=torch.complex64).conj(),
        "small.7": torch.zeros(7, 5).t(),
        "small.9": torch.zeros(5, 9, dtype=torch.float64),
    }
    with pytest.warns(UserWarning, match="converted"):
        load_into(tmp_path, into)
    for key, value in into.items():
        assert torch.equal(value, state[key].to(value.dtype)), key


def test_blocks_are_decoded_where_they_belong(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(15_000, 200), "t": torch.randn(200, 5000).t()}
    save_on_cpu(tmp_path, state)
    into = destination(state)
    first, last = into["w"].data_ptr(), into["w"].data_ptr() + into["w"].nbytes
    places: list[int] = []
    decode = CudaEngine.decode_checked

    def watched(self: CudaEngine, jobs: Any, **options: Any) -> None:
        places.extend(job.out.data_ptr() for job in singles_of(jobs) if job.out.numel())
        decode(self, jobs, **options)

    monkeypatch.setattr(CudaEngine, "decode_checked", watched)
    load_into(tmp_path, into)
    assert_same(into, state)
    inside = [first <= place < last for place in places]
    assert inside.count(True) == 12 and inside.count(False) == 4


def test_a_run_that_can_not_go_to_a_gpu_as_it_is(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were read together with it do."""
    state = {name: torch.randn(4500, 200) for name in "abc"}
    save_on_cpu(tmp_path, state)
    columns_of, decode, seen = JobChecks.columns_of, CudaEngine.decode_checked, list[tuple[bool, str | None]]()

    def none_of_b(self: JobChecks, runs: Sequence[DecodeRun]) -> Columns | None:
        return None if "b" in {run.fqn for run in runs} else columns_of(self, runs)

    def watched(self: CudaEngine, works: Any, **options: Any) -> None:
        seen.extend((isinstance(work, DecodeRun), work.fqn) for work in works)
        decode(self, works, **options)

    monkeypatch.setattr(JobChecks, "columns_of", none_of_b)
    monkeypatch.setattr(CudaEngine, "decode_checked", watched)
    into = destination(state)
    load_into(tmp_path, into, thread_count=1)
    assert_same(into, state)
    assert {(True, "a"), (False, "b"), (True, "c")} <= {*seen} and (True, "b") not in seen


def test_reads_are_longer_and_page_locked(tmp_path: Path, on_the_engine: StandInPool, pinned_nbytes: list[int]) -> None:
    state = {f"{number:03}": torch.randn(500_000) for number in range(70)}
    save_on_cpu(tmp_path, state, "none")
    into = destination(state)
    load_into(tmp_path, into, thread_count=1)
    assert_same(into, state)
    # 140 MB for three threads: 16 MiB each, in buffers made once
    assert set(pinned_nbytes) == {16 << 20}
    assert len(pinned_nbytes) <= 3
    pinned_nbytes.clear()
    load_into(tmp_path, into, thread_count=1, engine="cpu")
    assert pinned_nbytes == []


class Storage:
    def __init__(self, parallel_reads: int, read_copies: int) -> None:
        self.parallel_reads = parallel_reads
        self.read_copies = read_copies
        self.read_nbytes = 4 << 20


@pytest.mark.parametrize("budget", [8 << 20, 64 << 20, 1 << 30, 8 << 30])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_what_is_fetched_keeps_to_the_host_memory_budget(on_the_engine: StandInPool, budget: int, threads: int) -> None:
    for parallel_reads, copies in ((4, 3), (1, 1)):
        options = LoadOptions(threads, budget, budget, "stored", "auto", None)  # type: ignore[arg-type]
        job = LoadJob(Storage(parallel_reads, copies), None, options, conversions=None)  # type: ignore[arg-type]
        assert job._threads >= threads + 2, "some fetch while others decode"
        for wanted_nbytes in (0, 1 << 30, 1 << 40):
            read_nbytes = job._longest_read(wanted_nbytes)
            assert read_nbytes.bit_count() == 1, "torch would round it up"
            assert read_nbytes * copies * job._threads <= max(budget, copies * job._threads << 20)
    if budget >= 8 << 30 and threads < 8:
        assert job._longest_read(1 << 40) == 256 << 20


@pytest.mark.ci
@pytest.mark.parametrize("threads", [1, 4])
def test_threads_share_the_device_memory_budget(tmp_path: Path, on_the_engine: StandInPool, threads: int) -> None:
    state = {f"{number:03}": torch.randn(200_000) for number in range(60)}
    save_on_cpu(tmp_path, state)
    budget = 8 << 20
    active, most, lock = 0, 0, threading.Lock()

    class Watched(NvcompStandIn):
        def called(self, name: str, slices: int, *, by_kernels: bool = False) -> None:
            nonlocal active, most
            with lock:
                active += 1
                most = max(most, active)
            time.sleep(0.002)
            with lock:
                active -= 1
            super().called(name, slices, by_kernels=by_kernels)

    on_the_engine.nvcomp = Watched
    into = destination(state)
    load_into(tmp_path, into, thread_count=threads, device_memory_budget=budget)
    assert_same(into, state)
    at_once = min(2, threads)
    assert most <= at_once
    assert len(on_the_engine.devices) <= at_once, "each engine keeps memory for its stream"
    assert sum(device.peak_nbytes for device in on_the_engine.devices) <= budget


def test_blocks_that_lie_together_are_copied_together(tmp_path: Path, on_the_engine: StandInPool) -> None:
    save_on_cpu(tmp_path, state := {"w": torch.randn(4 << 20)})
    load_into(tmp_path, into := {"w": torch.zeros(4 << 20)}, thread_count=1)
    assert_same(into, state)
    assert sum(device.copies_in for device in on_the_engine.devices) < 4, "16 blocks in one read"


def test_a_turn_is_larger_than_a_threads_share(tmp_path: Path, on_the_engine: StandInPool) -> None:
    """Two decode at once, however many fetch: the budget is theirs alone."""
    state = {f"{number:03}": torch.randn(200_000) for number in range(60)}
    save_on_cpu(tmp_path, state)
    load_into(tmp_path, destination(state), thread_count=8, device_memory_budget=64 << 20)
    assert all(device.peak_nbytes == 32 << 20 for device in on_the_engine.devices), "scratch memory included"


@pytest.mark.ci
def test_others_fetch_while_one_decodes(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"{number:03}": torch.randn(500_000) for number in range(70)}
    save_on_cpu(tmp_path, state)
    fetched = threading.Semaphore(0)
    read_into = PosixFilesystem.read_into

    def counted(self: Filesystem, name: str, start: int, target: memoryview) -> None:
        read_into(self, name, start, target)
        fetched.release()

    met = threading.Event()

    def wait_for_two_more(name: str, slices: int) -> None:
        if not met.is_set():
            assert all(fetched.acquire(timeout=120) for _ in range(3)), "nobody fetches the next reads"
            met.set()

    monkeypatch.setattr(PosixFilesystem, "read_into", counted)
    on_the_engine.nvcomp = lambda: NvcompStandIn(wait_for_two_more)
    into = destination(state)
    load_into(tmp_path, into, thread_count=1)
    assert met.is_set()
    assert_same(into, state)


# ---- damage ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Flips a bit of what is fetched, in the middle of each of these reads, counted from 0."""
    numbers: list[int] = []
    counted = 0
    read_into = PosixFilesystem.read_into

    def flipping(self: Filesystem, name: str, start: int, target: memoryview) -> None:
        nonlocal counted
        read_into(self, name, start, target)
        if counted in numbers:
            target[len(target) // 2] ^= 4
        counted += 1

    monkeypatch.setattr(PosixFilesystem, "read_into", flipping)
    return numbers


def reads_of_blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    again: list[tuple[int, int]] = []
    read = PosixFilesystem.read

    def watched(self: Filesystem, name: str, start: int, stop: int) -> bytes:
        again.append((start, stop))
        return read(self, name, start, stop)

    monkeypatch.setattr(PosixFilesystem, "read", watched)
    return again


@pytest.mark.parametrize("strided", [False, True])
def test_a_block_that_was_damaged_on_the_way_is_read_again(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch, flips: list[int], strided: bool
) -> None:
    state = {"w": torch.randn(12_500, 200)}
    save_on_cpu(tmp_path, state)
    flips.append(0)
    again = reads_of_blocks(monkeypatch)
    into = {"w": torch.zeros(200, 12_500).t() if strided else torch.zeros(12_500, 200)}
    load_into(tmp_path, into)
    assert_same(into, state)
    blocks = [span for span in again if span[0] > 0 and span[1] - span[0] > 500_000]
    assert len(blocks) == 1 and blocks[0][1] - blocks[0][0] < 1 << 20, "that block alone"


@pytest.mark.parametrize("wrong", ["the CRC of the stored bytes", "the CRC of the decoded bytes"])
def test_a_block_that_is_damaged_in_the_file_is_named(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    state = {"a": torch.randn(1500, 200), "w": torch.randn(3000, 200)}
    save_on_cpu(tmp_path, state)
    (path,) = tmp_path.glob("*.distcp")
    if wrong == "the CRC of the stored bytes":
        content = bytearray(path.read_bytes())
        content[1_000_000] ^= 1
        path.write_bytes(content)
    else:
        row = decoding.block_row

        def damaged(footer: Any, number: int) -> Any:
            found = row(footer, number)
            return type(found)(found.flags, found.slice_nbytes, found.encoded_crc, found.uncompressed_crc ^ 1)

        monkeypatch.setattr(decoding, "block_row", damaged)
        run = decoding.encoded_run
        monkeypatch.setattr(decoding, "encoded_run", lambda *given: replace(run(*given), crcs=run(*given).crcs ^ 1))
    again = reads_of_blocks(monkeypatch)
    with pytest.raises(CheckpointException, match=r"CRC.*distcp.*'[aw]'"):
        load_into(tmp_path, destination(state), verify="full")
    assert len([span for span in again if span[1] - span[0] > 500_000]) == 1, "once more, and no more"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-")]


def test_without_a_gpu_nothing_changes(on_the_engine: StandInPool) -> None:
    options = LoadOptions(4, 1 << 30, 1 << 30, "stored", "cpu", None)  # type: ignore[arg-type]
    job = LoadJob(Storage(1, 1), None, options, conversions=None)  # type: ignore[arg-type]
    assert job._threads == 4
    assert job._longest_read(1 << 40) == 4 << 20


def test_small_shards_never_go_through_the_host(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"{number:04}": torch.full((30,), float(number)) for number in range(500)}
    save_on_cpu(tmp_path, state)
    into = destination(state)
    monkeypatch.setattr(loading, "Run", None)
    load_into(tmp_path, into)
    assert_same(into, state)
    assert len(on_the_engine.calls("decode")) <= 1


# ---- a corrupt block is read again after the engine was given back ---------------------------------------------------


STATE = {"a": torch.randn(3000, 200), "w": torch.randn(3000, 200)}  # narrow: blocks are runs of memory


@pytest.mark.parametrize("strided", [False, True], ids=["in place", "through scratch memory"])
def test_others_may_use_the_engine_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strided: bool) -> None:
    save(tmp_path, STATE, codec="planes-zstd", engine="cpu")
    monkeypatch.setattr(decoding, "pinned_allocate", plain_allocate)
    install_stand_ins(monkeypatch, ReferenceKernels())
    decode, read, place = CudaEngine.decode_checked, PosixFilesystem.read, Region.place
    found: list[object] = []
    free: list[int] = []
    placed: Counter[object] = Counter()

    def finds_the_last_corrupt(self: CudaEngine, jobs: Any, **options: Any) -> None:
        decode(self, jobs, **options)
        if isinstance(jobs[-1], DecodeRun):
            raise CorruptDataError("It looks corrupt.")  # then each goes alone
        last = jobs[-1].byte_range
        if len(found) < 2 and last not in found and (not strided or sum(placed.values())):
            found.append(last)
            raise CorruptDataError("It looks corrupt.", byte_range=last)

    def watched(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        if (start, stop) in found:
            free.append(shared_pool()._engines(torch.device("cpu")).free.qsize())
        return read(self, name, start, stop)

    def counted(self: Region, block: Any, data: torch.Tensor) -> None:
        placed[id(self), block] += 1
        place(self, block, data)

    monkeypatch.setattr(CudaEngine, "decode_checked", finds_the_last_corrupt)
    monkeypatch.setattr(PosixFilesystem, "read", watched)
    monkeypatch.setattr(Region, "place", counted)
    into = {key: torch.zeros(200, 3000).t() if strided else torch.zeros(3000, 200) for key in STATE}
    load_into(tmp_path, into, thread_count=1, device_memory_budget=16 << 20)
    assert_same(into, STATE)
    assert len(found) == (2 if strided else 1) and free == [ENGINES_PER_DEVICE] * len(found)
    assert set(placed.values()) <= {1}, "each block once"
