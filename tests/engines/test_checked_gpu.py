"""A GPU that is wrong, or can't be used: nothing wrong is written or loaded, and `engine="auto"` never fails for it."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompWriter, SaveStats
from dcp_nvcomp.codecs import Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.engines.cuda.arena import Arena
from dcp_nvcomp.engines.cuda.batches import RowTable
from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.fallback import CopyingEngine
from dcp_nvcomp.engines.cuda.health import FAILURES_IN_A_ROW
from dcp_nvcomp.engines.cuda.pool import EnginePool, release_device_memory, run_self_test
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.errors import CodecUnavailableError, CorruptDataError
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import load_into
from tests.states import assert_same, blank

from .cases import BUDGET, CHAIN, OWN, cpu_encode, decoded, encode, engine_on, job, tensor, weights
from .kernels_on_cpu import ReferenceKernels, _memory
from .nvcomp_stand_in import Codec, NvcompStandIn, NvcompWithout, StandInDevice
from .stand_in_pool import StandInPool, install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

CPU = torch.device("cpu")
BLOCKS = [weights(4, 2500, seed=seed) for seed in range(6)]


class Wrong(NvcompStandIn):
    """nvCOMP that codes every `period`-th slice to something else, in one direction.

    Args:
        direction: `"encode"` or `"decode"`.
        change: what becomes of the right bytes.
        period: which slices.
    """

    def __init__(self, direction: str, change: Callable[[bytes], bytes], period: int = 4) -> None:
        super().__init__()
        self._direction = direction
        self._change = change
        self._period = period
        self._count = 0

    def Codec(self, **options: Any) -> Codec:  # noqa: N802
        made = super().Codec(**options)
        name = f"_{self._direction}_slice"
        right = getattr(made, name)

        def changed(data: np.ndarray) -> bytes:
            self._count += 1
            found = right(data)
            return self._change(found) if self._count % self._period == 0 else found

        setattr(made, name, changed)
        return made


def other_content(frame: bytes) -> bytes:
    """A good frame of as many other bytes."""
    content = bytearray(zlib.decompress(frame, wbits=-15))
    content[len(content) // 2] ^= 1
    return zlib.compress(bytes(content), wbits=-15)


def garbage(frame: bytes) -> bytes:
    return bytes(len(frame))


def truncated(frame: bytes) -> bytes:
    return frame[: len(frame) // 2]


# ---- encodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [other_content])
def test_a_wrong_encode_is_done_again_by_the_cpu(change: Callable[[bytes], bytes]) -> None:
    device = StandInDevice(ReferenceKernels(), Wrong("encode", change, period=7))
    engine = engine_on(device)
    with pytest.warns(RuntimeWarning, match=r"encoded blocks to wrong bytes.*CPU engine"):
        first = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    again = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)  # a second warning would be an error
    for encoded in (first, again):
        assert [decoded(one) for one in encoded] == [block.tobytes() for block in BLOCKS]
        assert 0 < sum(one.was_wrong for one in encoded) < len(encoded)
    assert engine.health.wrong_blocks == sum(one.was_wrong for one in first + again)


@pytest.mark.parametrize("change", [garbage, truncated])
def test_a_frame_that_does_not_even_decode(change: Callable[[bytes], bytes]) -> None:
    """NvCOMP raises at it here; on a GPU it may report a wrong length instead."""
    engine = engine_on(StandInDevice(ReferenceKernels(), Wrong("encode", change, period=7)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        encoded = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    assert caught
    assert [decoded(one) for one in encoded] == [block.tobytes() for block in BLOCKS]


@pytest.mark.parametrize("chain", [CHAIN, CodecChain(Bytes(), Deflate(1024))], ids=["planes", "bytes"])
def test_a_decoder_that_does_nothing_does_not_pass_the_check(chain: CodecChain) -> None:
    """The memory that it should decode into held the very planes a moment before."""

    class Idle(NvcompStandIn):
        def Codec(self, **options: Any) -> Codec:  # noqa: N802
            made = super().Codec(**options)
            made.decode = lambda source, out, decompression_config: out  # type: ignore[assignment,method-assign]
            return made

    with pytest.warns(RuntimeWarning, match="wrong bytes"):
        encoded = encode(engine_on(StandInDevice(ReferenceKernels(), Idle())), [tensor(BLOCKS[0])], chain)
    assert encoded[0].was_wrong and decoded(encoded[0], chain) == BLOCKS[0].tobytes()


class IdleInspect(ReferenceKernels):
    """No CRC is ever computed, so that all of them are 0."""

    def inspect(self, blocks: RowTable, crc: torch.Tensor, seen: torch.Tensor) -> None:
        super().inspect(blocks, crc.clone(), seen)


class FlipsOnTheWay(StandInDevice):
    """The copy to the host gets a bit wrong."""

    def copy_out(self, source: torch.Tensor, host: memoryview) -> None:
        flipped = source.clone()
        flipped[100] ^= 1
        super().copy_out(flipped, host)


@pytest.mark.parametrize(
    "device",
    [lambda: StandInDevice(IdleInspect()), lambda: FlipsOnTheWay(ReferenceKernels())],
    ids=["no CRCs", "copy"],
)
def test_what_arrives_on_the_host_is_checked(device: Callable[[], StandInDevice]) -> None:
    with pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        encoded = encode(engine_on(device()), [tensor(block) for block in BLOCKS], CHAIN)
    assert any(one.was_wrong for one in encoded)
    assert [decoded(one) for one in encoded] == [block.tobytes() for block in BLOCKS]


def test_without_checks_the_gpu_is_trusted() -> None:
    device = StandInDevice(ReferenceKernels(), Wrong("encode", other_content, period=7))
    encoded = encode(engine_on(device, check_encodes=False), [tensor(block) for block in BLOCKS], CHAIN)
    assert not any(one.was_wrong for one in encoded)
    with pytest.raises(CorruptDataError):
        list(map(decoded, encoded))


def test_the_saves_statistics_count_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = installed(monkeypatch)
    stand_ins.nvcomp = lambda: Wrong("encode", other_content, period=20)
    state = {f"{at}": torch.randn(200_000) for at in range(20)}
    writer = NvcompWriter(tmp_path, codec="planes-deflate")
    with pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        metadata = dcp.save(state, storage_writer=writer, no_dist=True)
    assert writer.last_save is not None and writer.last_save.recoded_blocks > 0
    stats = SaveStats.of(metadata)
    assert stats is not None and stats.recoded_blocks == writer.last_save.recoded_blocks
    into = blank(state)
    load_into(tmp_path, into, engine="cpu", verify="full")
    assert_same(into, state)


# ---- decodes ---------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def shorter(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize("change", [flipped, shorter])
@pytest.mark.parametrize("verify", ["stored", "full", "off"])
def test_a_wrong_decode_is_done_again_by_the_cpu(change: Callable[[bytes], bytes], verify: str) -> None:
    engine = engine_on(StandInDevice(ReferenceKernels(), Wrong("decode", change, period=7)))
    jobs = [job(cpu_encode(block, CHAIN), CHAIN) for block in BLOCKS]
    with pytest.warns(RuntimeWarning, match="decoded blocks to wrong bytes"):
        engine.decode(jobs, verify=verify)
    assert [done.out.numpy().tobytes() for done in jobs] == [block.tobytes() for block in BLOCKS]
    assert engine.health.wrong_blocks > 0


# ---- engines that can't be used --------------------------------------------------------------------------------------


def installed(monkeypatch: pytest.MonkeyPatch, **options: Any) -> StandInPool:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    return install_stand_ins(monkeypatch, ReferenceKernels(), **options)


def raises_type_error(device: torch.device) -> StandInDevice:
    raise TypeError("incompatible constructor arguments")


def test_an_engine_that_can_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, make_device=raises_type_error)
    state = {f"{at}": torch.randn(50_000) for at in range(5)}
    with pytest.warns(RuntimeWarning, match=r"slower CPU engine: TypeError: incompatible"):
        dcp.save(state, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    into = blank(state)
    load_into(tmp_path, into)  # a second warning would be an error
    assert_same(into, state)
    with pytest.raises(CheckpointException, match=r"engine='cuda' can't run here: TypeError"):
        dcp.save(state, storage_writer=NvcompWriter(tmp_path, engine="cuda"), no_dist=True)


def test_the_self_test_passes_on_a_good_device() -> None:
    engine = engine_on(StandInDevice(ReferenceKernels()))
    run_self_test(engine, CPU)
    assert engine.health.unusable is None and not engine.health.refused


@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_the_self_test_finds_a_wrong_coder(direction: str) -> None:
    def raises(name: str, slices: int) -> None:
        raise TypeError("no such argument")

    engine = engine_on(StandInDevice(ReferenceKernels(), Wrong(direction, flipped, period=1)))
    run_self_test(engine, CPU)
    assert set(engine.health.refused) == ({Deflate.name} if direction == "encode" else {Zstd.name, Deflate.name})
    assert engine.health.unusable is None
    engine = engine_on(StandInDevice(ReferenceKernels(), NvcompStandIn(raises)))
    run_self_test(engine, CPU)
    assert "TypeError: no such argument" in str(engine.health.unusable)


def test_a_coder_that_fails_the_self_test_is_left_to_the_cpu() -> None:
    device = StandInDevice(ReferenceKernels(), NvcompWithout())
    engine = engine_on(device)
    run_self_test(engine, CPU)
    assert engine.health.unusable is None and set(engine.health.refused) == {Deflate.name}
    device.nvcomp.calls.clear()
    with pytest.warns(RuntimeWarning, match="coded with deflate"):
        encoded = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    assert [decoded(one) for one in encoded] == [block.tobytes() for block in BLOCKS]
    assert device.nvcomp.calls == []


def test_the_self_test_runs_once() -> None:
    devices: list[StandInDevice] = []

    def make(device: torch.device) -> StandInDevice:
        devices.append(StandInDevice(ReferenceKernels()))
        return devices[-1]

    shared = EnginePool(make)
    with shared.lend(CPU, EnginePolicy(BUDGET)) as one, shared.lend(CPU, EnginePolicy(BUDGET)) as other:
        assert one is not other
    with shared.lend(CPU, EnginePolicy(BUDGET)) as again:
        assert again in (one, other)
    calls = [len([name for name, _ in device.nvcomp.calls if name == "encode"]) for device in devices]
    assert calls == [1, 0], "of nvCOMP's Deflate"


def test_three_failures_in_a_row_send_everything_to_the_cpu_until_the_next_save() -> None:
    calls = 0

    def fails(name: str, slices: int) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("nvCOMP error: internal")

    engine = engine_on(StandInDevice(ReferenceKernels(), NvcompStandIn(fails)))
    with pytest.warns(RuntimeWarning):
        encoded = encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    assert [decoded(one) for one in encoded] == [block.tobytes() for block in BLOCKS]
    assert engine.health.unusable is not None and f"{FAILURES_IN_A_ROW} times in a row" in engine.health.unusable
    before = calls
    encode(engine, [tensor(block) for block in BLOCKS], CHAIN)
    assert calls == before, "the GPU is left alone"
    engine.health.begin()
    assert engine.health.unusable is None


def test_a_failure_now_and_then_is_no_reason_to_leave() -> None:
    engine = engine_on(StandInDevice(ReferenceKernels()))
    for _ in range(10):
        for _ in range(FAILURES_IN_A_ROW - 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine.health.failed("out of memory")
        engine.health.succeeded()
    assert engine.health.unusable is None


def test_with_engine_cuda_the_cpu_does_not_take_over() -> None:
    def fails(name: str, slices: int) -> None:
        raise RuntimeError("nvCOMP error: internal")

    engine = CudaEngine(
        CPU, EnginePolicy(BUDGET, may_fall_back=False), backend=StandInDevice(ReferenceKernels(), NvcompStandIn(fails))
    )
    with pytest.raises(CodecUnavailableError, match=r"internal.*engine='cuda'"):
        encode(engine, [tensor(BLOCKS[0])], CHAIN)
    with pytest.raises(CodecUnavailableError, match=r"internal.*engine='cuda'"):
        engine.decode([job(cpu_encode(BLOCKS[0], CHAIN), CHAIN)], verify="stored")


def test_with_engine_cuda_a_gpu_that_was_given_up_is_an_error() -> None:
    engine = CudaEngine(CPU, EnginePolicy(BUDGET, may_fall_back=False), backend=StandInDevice(ReferenceKernels()))
    engine.health.give_up("it was wrong")
    with pytest.raises(CodecUnavailableError, match=r"engine='cuda' can't go on.*it was wrong"):
        encode(engine, [tensor(BLOCKS[0])], CHAIN)
    with pytest.raises(CodecUnavailableError, match=r"engine='cuda' can't go on.*it was wrong"):
        engine.decode([job(cpu_encode(BLOCKS[0], CHAIN), CHAIN)], verify="stored")


def test_each_borrower_has_its_own_policy() -> None:
    shared = EnginePool(lambda device: StandInDevice(ReferenceKernels()), lambda engine, device: None)
    with shared.lend(CPU, EnginePolicy(BUDGET, check_encodes=False)) as engine:
        assert isinstance(engine, CudaEngine)
    engine.health.give_up("out of memory")
    with shared.lend(CPU, EnginePolicy(BUDGET, may_fall_back=False)) as engine:
        assert isinstance(engine, CudaEngine)
        assert engine._policy == EnginePolicy(BUDGET, may_fall_back=False)


def test_a_self_test_without_memory_is_made_up_for() -> None:
    capacities = [1 << 40, 1 << 16]
    shared = EnginePool(lambda device: StandInDevice(ReferenceKernels(), capacity_nbytes=capacities.pop()))
    with pytest.warns(RuntimeWarning, match="slower CPU engine: .*OutOfMemoryError"):  # noqa: SIM117
        with shared.lend(CPU, EnginePolicy(BUDGET)) as engine:
            assert isinstance(engine, CopyingEngine)
    shared.begin(BUDGET)
    with shared.lend(CPU, EnginePolicy(BUDGET)) as engine:
        assert isinstance(engine, CudaEngine)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.ci
def test_twenty_saves_and_loads_reserve_no_more_than_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins = installed(monkeypatch, self_test=True)
    reserved: list[int] = []
    for number in range(20):
        state = {f"{at}": torch.randn(40_000 + 1000 * number) for at in range(20)}
        dcp.save(state, storage_writer=NvcompWriter(tmp_path, device_memory_budget=4 << 20), no_dist=True)
        into = blank(state)
        load_into(tmp_path, into, device_memory_budget=4 << 20)
        assert_same(into, state)
        reserved.append(sum(device.held_nbytes for device in stand_ins.devices))
    assert len(stand_ins.devices) <= 2
    assert set(reserved) <= {2 << 20, 4 << 20} and sorted(reserved) == reserved, "an engine or two, of 2 MiB each"
    release_device_memory()
    assert [device.held_nbytes for device in stand_ins.devices] == [0] * len(stand_ins.devices)


def test_blocks_of_another_codec_need_no_gpu() -> None:
    """What no GPU encodes takes the way over the CPU, whatever the device's health."""
    chain = CodecChain(Planes(4), Zstd(1024))
    engine = engine_on(StandInDevice(ReferenceKernels()))
    engine.health.broken = "it is on fire"
    encoded = encode(engine, [tensor(block) for block in BLOCKS], chain)
    jobs = [job(one, chain) for one in encoded]
    with pytest.warns(RuntimeWarning, match="it is on fire"):
        engine.decode(jobs, verify="full")
    assert [done.out.numpy().tobytes() for done in jobs] == [block.tobytes() for block in BLOCKS]


# ---- what earlier batches left in device memory ----------------------------------------------------------------------


class TwoFaults(ReferenceKernels):
    """Once `begun`: planes get a bit wrong, and one of the kernels that put blocks together does nothing.

    Args:
        idle: `"merge"`, or `"copy"`, which then copies nothing any more once the blocks were gathered.
    """

    def __init__(self, idle: str) -> None:
        self._idle = idle
        self.begun = False
        self._copies = 0

    def split(self, blocks: RowTable, seen: torch.Tensor, flags: torch.Tensor) -> None:
        super().split(blocks, seen, flags)
        if self.begun:
            for row in blocks.rows[np.unique(blocks.tiles)].tolist():
                _memory(row[5], 1).bitwise_xor_(4)

    def merge(self, blocks: RowTable) -> None:
        if not (self.begun and self._idle == "merge"):
            super().merge(blocks)

    def copy(self, pieces: RowTable) -> None:
        self._copies += self.begun
        if not (self.begun and self._idle == "copy" and self._copies > 1):
            super().copy(pieces)
            if self.begun and self._idle == "copy":
                for row in pieces.rows.tolist():
                    _memory(row[1], 1).bitwise_xor_(4)


def on_plain_memory(kernels: ReferenceKernels, capacity_nbytes: int = 1 << 40) -> StandInDevice:
    """A device whose arena keeps what lay there: a GPU's does."""
    device = StandInDevice(kernels, capacity_nbytes=capacity_nbytes)
    device.arena = Arena(device._reserve)
    device.nvcomp_memory.attach(device.stream_handle, device.arena)
    return device


@pytest.mark.parametrize(("idle", "chain"), [("merge", CHAIN), ("merge", OWN), ("copy", CodecChain(Bytes()))])
@pytest.mark.parametrize("block", [weights(4, 2500), weights(4, 20)], ids=["10 KB", "80 bytes"])
def test_idle_kernels_do_not_pass_where_the_block_was_before(idle: str, chain: CodecChain, block: np.ndarray) -> None:
    kernels = TwoFaults(idle)
    engine = engine_on(on_plain_memory(kernels))
    for _ in range(2):
        (one,) = encode(engine, [tensor(block)], chain)
        assert not one.was_wrong
    kernels.begun = True
    with pytest.warns(RuntimeWarning, match="encoded blocks to wrong bytes"):
        (one,) = encode(engine, [tensor(block)], chain)
    assert one.was_wrong and decoded(one, chain) == block.tobytes()


class TakesMemory(NvcompStandIn):
    """nvCOMP that takes all memory there is to decode."""

    def called(self, name: str, slices: int, *, by_kernels: bool = False) -> None:
        super().called(name, slices, by_kernels=by_kernels)
        taken = []
        with suppress(torch.OutOfMemoryError):
            while name == "decode":
                taken.append(self.allocate(1 << 10))


def test_the_memory_of_the_check_is_held() -> None:
    """NvCOMP's own memory must not overlap it: stored slices are there before the others are decoded."""
    chain = CodecChain(Bytes(), Deflate(1024))
    noise = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    block = np.concatenate([np.zeros(2048, np.uint8), noise])
    engine = engine_on(StandInDevice(ReferenceKernels(), TakesMemory()))
    (one,) = encode(engine, [tensor(block)], chain)  # a warning would be an error
    assert decoded(one, chain) == block.tobytes() and not one.was_wrong
