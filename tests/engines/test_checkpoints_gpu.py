"""Whole saves and loads on a GPU: what the stand-in can't show, as it has no streams and no memory of its own."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.engines.cuda.pool import release_device_memory
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.format.block_grid import Box
from dcp_nvcomp.loading.read_plan import Region
from dcp_nvcomp.saving.encode import choices, records

REASON = cuda_unavailable_reason()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.usefixtures("nothing_falls_back"),
]

State = dict[str, torch.Tensor]

LONG = 1_000_000_000  # clock cycles, about half a second
MIB = 1 << 20


def a_state(nbytes: int = 64 * MIB) -> State:
    """Large and small tensors of several dtypes, strided ones among them, on the GPU."""
    generator = torch.Generator().manual_seed(5)
    rows = nbytes // 4 // 2 // 1024
    state = {
        "w": torch.randn(rows, 1024, generator=generator) / 50,
        "h": (torch.randn(rows, 1024, generator=generator) / 50).bfloat16(),
        "t": (torch.randn(1024, rows // 4, generator=generator) / 50).t(),
        "i": torch.randint(0, 100, (rows, 64), generator=generator),
    }
    small = {f"norm.{number}": torch.randn(number + 1, generator=generator) for number in range(300)}
    return {name: tensor.cuda() for name, tensor in (state | small).items()}


def save(path: Path, state: State, **options: object) -> None:
    writer = NvcompWriter(path, sync_files=False, **({"engine": "cuda"} | options))  # type: ignore[arg-type]
    dcp.save(state, storage_writer=writer, no_dist=True)


def load(path: Path, into: State, **options: object) -> None:
    reader = NvcompReader(path, **options)  # type: ignore[arg-type]
    dcp.load(into, storage_reader=reader, no_dist=True)


def assert_saved(path: Path, state: State) -> None:
    """What is on disk, as the CPU engine reads it."""
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    load(path, into, engine="cpu", verify="full")
    assert_same(into, state)


def assert_same(found: State, state: State) -> None:
    for name, tensor in state.items():
        assert torch.equal(found[name].cpu(), tensor.cpu()), name


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking a sample waits for the caller's stream, and would hide that nothing else does."""

    def sample(tensor: torch.Tensor, nbytes: int) -> np.ndarray:
        return np.zeros(nbytes, np.uint8)

    for module in (choices, records):
        monkeypatch.setattr(module, "spread_sample", sample)


@pytest.mark.usefixtures("no_samples")
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("codec", ["planes-zstd", "none"])
def test_a_save_waits_for_what_the_caller_has_under_way(tmp_path: Path, side: bool, codec: str) -> None:
    state = a_state()
    late = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    save(tmp_path / "warm-up", late, codec=codec)  # compiles the kernels, which would take as long as the sleep
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        torch.cuda._sleep(LONG)
        for name, tensor in state.items():
            late[name].copy_(tensor)
        save(tmp_path / "late", late, codec=codec)
    assert_saved(tmp_path / "late", state)


@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_a_load_waits_too_and_is_complete_when_it_returns(tmp_path: Path, side: bool) -> None:
    state = a_state()
    save(tmp_path, state)
    into = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load(tmp_path, into)  # compiles
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.current_stream()):
        torch.cuda._sleep(LONG)
        for tensor in into.values():
            tensor.fill_(3)  # must not come after the loaded bytes
        load(tmp_path, into)
    with torch.cuda.stream(torch.cuda.Stream()):  # no stream needs to wait any more
        assert_same(into, state)


def test_a_load_into_tensors_with_gaps_is_complete_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are filled by copies within the GPU, which torch queues on a stream that the caller's does not wait for."""
    place = Region.place

    def late(self: Region, block: Box, data: torch.Tensor) -> None:
        on_gpu = data.cuda()
        torch.cuda._sleep(LONG)
        place(self, block, on_gpu)

    state = {"weight": torch.randn(512, 512, device="cuda")}  # one block
    save(tmp_path, state)
    monkeypatch.setattr(Region, "place", late)
    into = {"weight": torch.zeros(512, 512, device="cuda").t()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        load(tmp_path, into, engine="cpu")
        assert_same(into, state)


def test_memory_that_is_freed_while_a_save_uses_it(tmp_path: Path) -> None:
    """Conjugate tensors are resolved to copies, which only the save knows; nothing may write over them."""
    value = torch.randn(3 * MIB, dtype=torch.complex64, device="cuda")
    state = {str(number): (value + number).conj() for number in range(8)}
    save(tmp_path, state, host_memory_budget=64 * MIB)
    assert_saved(tmp_path, state)


# ---- memory ----------------------------------------------------------------------------------------------------------


def peak_of(work: Callable[[], None]) -> int:
    """Of what torch reserves: what it keeps for the stream that had it, nobody else can use."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    work()
    return torch.cuda.max_memory_reserved() - before


@pytest.mark.parametrize("codec", ["auto", "planes-deflate", "ans", "none"])
def test_device_memory_keeps_to_the_budget(tmp_path: Path, codec: str) -> None:
    """What nvCOMP holds is torch's, so it is counted; strided tensors and packs are copied on the device."""
    state, budget = a_state(512 * MIB), 128 * MIB
    save(tmp_path / "0", state, codec=codec, device_memory_budget=budget)
    saving = peak_of(lambda: save(tmp_path / "1", state, codec=codec, device_memory_budget=budget))
    assert saving <= 1.15 * budget
    strided = {
        name: torch.zeros(tensor.shape[::-1], device="cuda").mT for name, tensor in state.items() if "." not in name
    }
    direct = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    for into in (direct, {name: tensor.to(state[name].dtype) for name, tensor in strided.items()}):
        load(tmp_path / "1", into, device_memory_budget=budget)
        loading = peak_of(lambda: load(tmp_path / "1", into, device_memory_budget=budget))
        assert loading <= 1.15 * budget
        assert_same(into, {name: state[name] for name in into})


@pytest.fixture
def little_memory() -> Iterator[Callable[[int], None]]:
    """Leaves the process so much device memory beyond what it has."""

    def leave(nbytes: int) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / total)

    yield leave
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_out_of_memory_makes_batches_smaller(tmp_path: Path, little_memory: Callable[[int], None]) -> None:
    state = a_state(256 * MIB)
    save(tmp_path / "warm-up", state)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    little_memory(160 * MIB)  # of the 512 that the budget allows
    with warnings.catch_warnings():
        # while one engine has nearly all of it, the other may not find enough for a single block
        warnings.simplefilter("ignore", RuntimeWarning)
        save(tmp_path / "1", state, device_memory_budget=512 * MIB)
        load(tmp_path / "1", into, device_memory_budget=512 * MIB)
    assert_same(into, state)
    assert_saved(tmp_path / "1", state)


def test_without_memory_the_cpu_engine_takes_what_is_left(tmp_path: Path, little_memory: Callable[[int], None]) -> None:
    state = {"w": a_state()["w"], "i": a_state()["i"]}
    save(tmp_path / "warm-up", state)
    release_device_memory()
    little_memory(1 * MIB)
    with pytest.warns(RuntimeWarning, match="CPU engine"):
        save(tmp_path / "1", state, engine="auto")
    assert_saved(tmp_path / "1", state)
