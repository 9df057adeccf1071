"""A whole save through the CUDA engine's batches, on the stand-in: what it wrote loads on the CPU engine."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda.device import Kernels
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.format.names import data_file_name
from dcp_nvcomp.saving import rank_save
from dcp_nvcomp.saving.data_files import DataFileWriter, PlannedFile
from dcp_nvcomp.saving.encode import choices
from dcp_nvcomp.saving.encode import tasks as buffers
from dcp_nvcomp.saving.encode.sources import PendingRecord
from dcp_nvcomp.saving.encode.tasks import BufferMemory, cuda_room_nbytes
from dcp_nvcomp.saving.process_state import forget_all
from tests.checkpoints import assert_loads, save

from .nvcomp_stand_in import NvcompStandIn
from .stand_in_pool import StandInPool, install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def on_the_engine(monkeypatch: pytest.MonkeyPatch, kernels: Kernels) -> StandInPool:
    """Host tensors take the way of CUDA tensors, to engines on the stand-in."""
    monkeypatch.setattr(buffers, "pinned_allocate", plain_allocate)
    return install_stand_ins(monkeypatch, kernels)


@pytest.mark.ci
@pytest.mark.parametrize("codec", ["auto", "planes-zstd", "planes-deflate", "zstd", "none"])
@pytest.mark.parametrize("single_file_per_rank", [True, False])
def test_save_through_the_engine(
    tmp_path: Path, on_the_engine: StandInPool, codec: str, single_file_per_rank: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    state: dict[str, Any] = {
        "w": torch.randn(300, 999, generator=generator),
        "h": torch.randn(100_001, generator=generator).bfloat16(),
        "v": torch.rand(200, 500, generator=generator).t(),
        "i": torch.arange(40_000),
        "z": torch.zeros(50_000, dtype=torch.complex64),
        "small": torch.ones(5),
        "small and strided": torch.randn(9, 4, generator=generator).t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "object": {"a": 1},
    }
    writer = NvcompWriter(tmp_path, codec=codec, single_file_per_rank=single_file_per_rank)
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert 1 <= len(on_the_engine.devices) <= 2, "at most two engines"
    assert_loads(tmp_path, state, engine="cpu", verify="full")


def many(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    """Shards of several kinds, so that neighbours have other chains, and empty ones among them."""
    generator = torch.Generator().manual_seed(4)
    state: dict[str, torch.Tensor] = {}
    for number in range(count):
        floats = torch.randn(nbytes // 4, generator=generator) / 50
        kinds = (floats, floats.repeat(2).bfloat16(), torch.randint(0, 9, (nbytes // 8,), generator=generator))
        state[f"{number:05}"] = kinds[number % 3]
    state["none"] = torch.zeros(0, 7)
    return state


@pytest.mark.ci
def test_many_shards_are_few_batches(tmp_path: Path, on_the_engine: StandInPool) -> None:
    """A shard of 100 KB is too little to fill a GPU: what lies next to each other goes together."""
    # what a GPU encodes; between others, which the CPU engine does, a batch ends
    state = {fqn: value for fqn, value in many(120, 100_000).items() if value.is_floating_point()}
    save(tmp_path, state, codec="planes-zstd")
    # buffers of 8 MiB hold 80 of them; two chains with coders, and slices in a few classes of length
    assert len(on_the_engine.calls("encode")) <= 16
    assert sum(on_the_engine.calls("encode")) >= 80
    assert_loads(tmp_path, state, engine="cpu", verify="full")


def test_a_thread_that_cannot_be_started_fails_the_save(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not leave a writer waiting for what nobody encodes."""
    start = threading.Thread.start

    def starting(self: threading.Thread) -> None:
        if self.name == "dcp-cuda":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", starting)
    with pytest.raises(CheckpointException, match="can't start new thread"):
        save(tmp_path, many(3, 100_000), codec="planes-zstd")
    assert not list(tmp_path.glob("*.distcp"))


def test_thousands_of_small_shards(tmp_path: Path, on_the_engine: StandInPool) -> None:
    state = many(1500, 96)
    save(tmp_path, state, codec="planes-zstd")
    assert len(on_the_engine.calls("encode")) <= 4
    assert_loads(tmp_path, state, engine="cpu", verify="full")


def three_lanes(
    units: Sequence[tuple[WriteItem, ...]], rank: int, file_id: str, **options: Any
) -> list[list[PlannedFile]]:
    """Two files in each, of items of all kinds."""
    names = [data_file_name(rank, number, file_id) for number in range(6)]
    files = [PlannedFile(name, tuple(itertools.chain(*units[number::6]))) for number, name in enumerate(names)]
    return [files[:2], files[2:4], files[4:]]


@pytest.mark.ci
@pytest.mark.parametrize("slow_file", [0, 1, 5])
def test_lanes_and_a_sink_that_is_slow(
    tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch, slow_file: int
) -> None:
    """More lanes than buffers, one of them slow, both engines: nobody waits for ever."""
    monkeypatch.setattr(buffers, "_MIN_CUDA_ROOM_NBYTES", 1 << 20)
    monkeypatch.setattr(rank_save, "plan_files", three_lanes)
    monkeypatch.setattr(EngineChoice, "on_cuda", lambda self, device: self.option != "cpu" and next(turn) % 5 != 0)
    turn, append = itertools.count(), DataFileWriter.append

    def slow(self: DataFileWriter, blocks: Sequence[EncodedBlock]) -> None:
        if blocks and self._name.startswith(f"__0_{slow_file}_"):
            time.sleep(0.01)
        append(self, blocks)

    monkeypatch.setattr(DataFileWriter, "append", slow)
    state = many(160, 200_000)
    options: dict[str, Any] = {"codec": "planes-zstd", "host_memory_budget": 1, "thread_count": 3}
    errors: list[BaseException] = []

    def save() -> None:
        try:
            dcp.save(state, storage_writer=NvcompWriter(tmp_path, **options), no_dist=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=save, daemon=True)
    thread.start()
    thread.join(600)
    assert not thread.is_alive(), "the save waits for ever"
    assert not errors
    assert_loads(tmp_path, state, engine="cpu", verify="full")


def test_one_batch_is_encoded_while_another_is_copied(tmp_path: Path, on_the_engine: StandInPool) -> None:
    """Two threads are inside their engines at the same time; the third has none of the two."""
    both, threads, alone = threading.Barrier(2), set[int](), list[str]()

    def meet(name: str, slices: int) -> None:
        if len(threads) == 2 or threading.get_ident() in threads:
            return
        threads.add(threading.get_ident())
        try:
            both.wait(timeout=20)
        except threading.BrokenBarrierError:
            alone.append(name)  # what is raised here is the GPU's failure, of which the engine makes the best

    on_the_engine.nvcomp = lambda: NvcompStandIn(meet)
    state = many(200, 100_000)
    save(tmp_path, state, codec="planes-zstd")
    assert len(threads) == 2 and not alone
    assert_loads(tmp_path, state, engine="cpu", verify="full")


@pytest.mark.ci
def test_engines_share_the_device_memory_budget(tmp_path: Path, on_the_engine: StandInPool) -> None:
    state = many(400, 100_000)
    budget = 8 << 20
    dcp.save(state, storage_writer=NvcompWriter(tmp_path, device_memory_budget=budget), no_dist=True)
    assert len(on_the_engine.devices) == 2
    assert sum(device.peak_nbytes for device in on_the_engine.devices) <= budget


@pytest.mark.parametrize("budget", [32 << 20, 64 << 20, 256 << 20, 1 << 30])
def test_all_buffers_together_keep_to_the_host_memory_budget(budget: int) -> None:
    for state_nbytes in (0, 100 << 20, 1 << 40):
        for threads in (1, 8, 64):
            memory = BufferMemory(budget, threads=threads + 4, state_nbytes=state_nbytes, may_use_cuda=True)
            assert memory.host_pool.limit_nbytes + memory.cuda_pool.limit_nbytes <= budget
            assert memory.cuda_pool.room_nbytes.bit_count() == 1, "torch would round it up"
            assert memory.cuda_pool.limit_nbytes >= 2 * memory.cuda_pool.room_nbytes


def test_large_states_get_batches_that_fill_a_gpu() -> None:
    assert cuda_room_nbytes(200 << 20, 16 << 30) == 64 << 20
    assert cuda_room_nbytes(768 << 20, 16 << 30) == 256 << 20, "the default"
    assert cuda_room_nbytes(1 << 40, 16 << 30) == 256 << 20
    assert cuda_room_nbytes(1 << 40, 100 << 20) == 16 << 20, "a small state is encoded, copied and written at once"


@pytest.mark.ci
def test_what_is_encoded_is_let_go(tmp_path: Path, on_the_engine: StandInPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that only the save knows, as planners make them, is gone before its blocks are written."""
    alive: list[weakref.ref[np.ndarray]] = []
    left: list[int] = []

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            data = super().resolve_data(write_item)
            if isinstance(data, torch.Tensor) and data.numel():
                memory = data.reshape(-1).view(torch.uint8).numpy().copy()
                alive.append(weakref.ref(memory))  # which lives as long as the storage made of it
                data = torch.from_numpy(memory).view(data.dtype).reshape(data.shape)
            return data

    begin = DataFileWriter.begin

    def slow_begin(self: DataFileWriter, record: PendingRecord) -> None:
        begin(self, record)
        if record.record.fqn == "00000":
            patience = time.monotonic() + 120
            while sum(memory() is not None for memory in alive) > 6 and time.monotonic() < patience:
                time.sleep(0.05)
            time.sleep(0.3)
            left.append(sum(memory() is not None for memory in alive))

    monkeypatch.setattr(DataFileWriter, "begin", slow_begin)
    monkeypatch.setattr(buffers, "_MIN_CUDA_ROOM_NBYTES", 1 << 20)
    state = many(60, 400_000)
    planner = Planner()
    dcp.save(state, storage_writer=NvcompWriter(tmp_path, host_memory_budget=8 << 20), planner=planner, no_dist=True)
    # all buffers are full by then, of blocks whose tensors are gone; some are gathered for the next task
    assert len(left) == 1 and left[0] <= 6, left
    assert_loads(tmp_path, state, engine="cpu", verify="full")


def test_with_engine_cuda_a_failing_gpu_fails_the_save_and_leaves_nothing(
    tmp_path: Path, on_the_engine: StandInPool
) -> None:
    def fail(name: str, slices: int) -> None:
        raise KeyError("broken")

    on_the_engine.nvcomp = lambda: NvcompStandIn(fail)
    writer = NvcompWriter(tmp_path, codec="planes-zstd", engine="cuda")
    with pytest.raises(CheckpointException, match=r"broken.*engine='cuda'"):
        dcp.save(many(200, 100_000), storage_writer=writer, no_dist=True)
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp-")]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `auto` copied to the host, or judged, to choose."""
    found: list[str] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: (found.append(name), function(*arguments, **options))[1]

    for name in ("_device_sample", "spread_sample"):
        monkeypatch.setattr(choices, name, noting(name, getattr(choices, name)))
    return found


def test_auto_copies_nothing_to_the_host_in_a_second_save(
    tmp_path: Path, on_the_engine: StandInPool, looks: list[str]
) -> None:
    """A kind of tensors is judged once; what is no longer as it was is judged anew in the save after."""
    forget_all()

    def saved(step: int, state: dict[str, torch.Tensor]) -> list[str]:
        looks.clear()
        dcp.save(state, storage_writer=NvcompWriter(tmp_path / str(step)), no_dist=True)
        assert_loads(tmp_path / str(step), state, engine="cpu", verify="full")
        return sorted(looks)

    def layers(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {f"layers.{number}": torch.randn(300, 999, generator=generator).bfloat16() for number in range(5)}

    assert saved(0, layers(0)) == ["_device_sample"] * 5 + ["spread_sample"]
    assert saved(1, layers(1)) == []
    otherwise = {**layers(2), "layers.3": torch.zeros(300, 999, dtype=torch.bfloat16)}
    assert saved(2, otherwise) == []
    assert saved(3, otherwise) == ["_device_sample", "spread_sample"], "its size was a surprise"
    assert saved(4, otherwise) == ["_device_sample"], "zeros are looked at each time"
