"""A codec is one file and one line in the registry: this file is one, and nothing else knows of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.codecs import Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.base import (
    ELEMENT_TYPES,
    U8,
    ArrayToBytes,
    Coder,
    ElementType,
    Plane,
    ScratchArrays,
    SliceDecoder,
    SliceEncoder,
    slice_nbytes,
)
from dcp_nvcomp.codecs.registry import CODECS, check_chain
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.errors import ConfigurationError, CorruptDataError, FormatError, UnknownCodecError
from dcp_nvcomp.loading import decoder
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import assert_loads, data_file, flip, save
from tests.engines.kernels_on_cpu import ReferenceKernels
from tests.engines.nvcomp_stand_in import StandInDevice
from tests.engines.stand_in_pool import install_stand_ins
from tests.states import State

_SAME = 1


@dataclass(frozen=True)
class Toy(ArrayToBytes):
    """The even bytes of a block stored, the odd ones coded after a key is added. Equal even bytes are stored once."""

    name: ClassVar[str] = "toy"
    key: int = 0

    def configuration(self) -> dict[str, Any]:
        return {"key": self.key}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Toy:
        key = configuration.get("key")
        if type(key) is not int or not 0 <= key < 256:
            raise FormatError("Codec 'toy' needs a key from 0 to 255.")
        return cls(key)

    def layout(self, nbytes: int, flags: int, has_coder: bool) -> tuple[Plane, ...]:
        even = min(nbytes, 1) if flags & _SAME else nbytes // 2
        return Plane("even", even, False), Plane("odd", nbytes // 2, has_coder)

    def check_flags(self, flags: int) -> bool:
        return flags in (0, _SAME)

    def split(self, block: U8, planes: Sequence[U8]) -> int:
        even, odd = planes
        np.copyto(even, block[::2])
        np.add(block[1::2], self.key, out=odd, casting="unsafe")
        return _SAME if (even == even[0]).all() else 0

    def merge(self, planes: Sequence[U8], flags: int, block: U8, scratch: ScratchArrays) -> None:
        even, odd = planes
        block[::2] = even
        np.subtract(odd, self.key, out=block[1::2], casting="unsafe")

    def fits(self, element: ElementType) -> bool:
        return element.float_nbytes > 0


@dataclass(frozen=True)
class ToyRuns(Coder):
    """A slice of one byte again and again is that byte; any other gains nothing, so it is stored."""

    name: ClassVar[str] = "toy-runs"
    slice_nbytes: int = 4096
    block_nbytes: ClassVar[int] = 256 << 10

    def configuration(self) -> dict[str, Any]:
        return {"slice_nbytes": self.slice_nbytes}

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> ToyRuns:
        return cls(slice_nbytes(configuration, cls.name))

    def encoder(self) -> SliceEncoder:
        return lambda data: data[:1] if bytes(data).count(data[0]) == len(data) else data

    def decoder(self) -> SliceDecoder:
        def decode(frame: memoryview, out: memoryview) -> None:
            if len(frame) != 1:
                raise CorruptDataError("A slice of 'toy-runs' has one byte.")
            out[:] = bytes(frame) * len(out)

        return decode


TOY_CHAIN = CodecChain(Toy(key=250), ToyRuns())


class ToyForFloats:
    """Nvcomp's coders for the other elements, so that both kinds are in one batch."""

    def choose(self, element: ElementType, sample: U8, nbytes: int) -> CodecChain:
        return TOY_CHAIN if element.float_nbytes else CodecChain(Bytes(), Zstd(literals_only=True))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, Toy.name, Toy)
    monkeypatch.setitem(CODECS, ToyRuns.name, ToyRuns)


@dataclass
class GpuStandIn:
    """Stand-ins of GPUs below the CUDA engines that a save or load made, and what its CPU engines did for them."""

    devices: list[StandInDevice] = field(default_factory=list)

    def calls(self, work: Callable[[], Any]) -> list[tuple[str, int]]:
        """Run some work, and return what nvCOMP and the kernels were asked for."""
        for device in self.devices:
            device.nvcomp.calls.clear()
            device.nvcomp.kernel_calls.clear()
        work()
        return [call for device in self.devices for call in device.nvcomp.calls + device.nvcomp.kernel_calls]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> GpuStandIn:
    """Host tensors are handled as CUDA tensors are, unless the option says engine="cpu"."""
    made = GpuStandIn()

    def engine(device: torch.device) -> StandInDevice:
        made.devices.append(StandInDevice(ReferenceKernels()))
        return made.devices[-1]

    install_stand_ins(monkeypatch, ReferenceKernels(), make_device=engine)
    for module in (buffers, decoder):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    return made


def save_toy(path: Path, state: State, **options: Any) -> NvcompWriter:
    return save(path, state, **{"codec": ToyForFloats(), **options})


def every_kind() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "w": torch.randn(300, 999, generator=generator),
        "h": torch.randn(70_001, generator=generator).bfloat16(),
        "constant": torch.full((100_000,), 1.5),
        "strided": torch.randn(400, 200, generator=generator).t(),
        "i": torch.arange(40_000),
        "small": torch.ones(5),
        "small too": torch.arange(7),
        "empty": torch.zeros(0, 3),
    }


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("codec", [ToyForFloats(), TOY_CHAIN, CodecChain(Toy(3))], ids=["chooser", "chain", "no coder"])
def test_on_the_cpu(tmp_path: Path, codec: Any) -> None:
    state = every_kind()
    stats = save_toy(tmp_path, state, codec=codec).last_save
    assert stats is not None
    label = "toy" if codec == CodecChain(Toy(3)) else "toy-toy-runs"
    assert stats.by_codec[label].records >= 5
    assert_loads(tmp_path, state, verify="full")
    with pytest.raises(FormatError, match="needs a key"):
        CODECS["toy"].from_configuration({"key": 256})
    # equal bytes cost next to nothing, so the planes, the flags and the coder do what they are for
    save_toy(tmp_path / "constant", {"constant": torch.full((1_000_000,), 1.5, dtype=torch.bfloat16)})
    assert data_file(tmp_path / "constant").stat().st_size < 20_000


@pytest.mark.usefixtures("registered")
def test_the_cuda_engine_leaves_it_to_the_cpu_engine(tmp_path: Path, gpu: GpuStandIn) -> None:
    """Without a warning: that is how it is to be. Its neighbours in the batch stay on the GPU."""
    state = every_kind()
    asked = gpu.calls(lambda: save_toy(tmp_path / "gpu", state))
    assert gpu.devices and {name for name, _ in asked} == {"encode", "decode"}
    asked = gpu.calls(lambda: assert_loads(tmp_path / "gpu", state, verify="full"))
    assert {name for name, _ in asked} == {"decode"}
    asked = gpu.calls(lambda: save_toy(tmp_path / "toy", state, codec=TOY_CHAIN))
    assert {name for name, _ in asked} <= {"encode", "decode"}
    assert not gpu.calls(lambda: save_toy(tmp_path / "floats", {"w": state["w"]}))
    assert not gpu.calls(lambda: assert_loads(tmp_path / "floats", {"w": state["w"]}, verify="full"))


@pytest.mark.usefixtures("registered")
def test_both_engines_write_the_same(tmp_path: Path, gpu: GpuStandIn) -> None:
    state = {"w": every_kind()["w"]}
    for engine in ("cpu", "auto"):
        save_toy(tmp_path / engine, state, engine=engine)
    assert gpu.devices
    assert_loads(tmp_path / "auto", state, engine="cpu", verify="full")
    assert_loads(tmp_path / "cpu", state, verify="full")
    sizes = {next((tmp_path / engine).glob("*.distcp")).stat().st_size for engine in ("cpu", "auto")}
    assert len(sizes) == 1


@pytest.mark.usefixtures("registered", "gpu")
@pytest.mark.parametrize("at", [5000, 120_000])
def test_a_flipped_bit_is_found_where_the_cuda_engine_falls_back(tmp_path: Path, at: int) -> None:
    state = every_kind()
    save_toy(tmp_path, state)
    flip(data_file(tmp_path), at, 4)
    with pytest.raises(CheckpointException, match="CRC"):
        assert_loads(tmp_path, state, verify="full")


def test_unregistered_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = every_kind()
    with monkeypatch.context() as while_registered:
        while_registered.setitem(CODECS, Toy.name, Toy)
        while_registered.setitem(CODECS, ToyRuns.name, ToyRuns)
        save_toy(tmp_path, state)
    with pytest.raises(CheckpointException, match=r"codec .toy. is unknown here") as caught:
        assert_loads(tmp_path, state, verify="full")
    assert isinstance(caught.value.failures[0][0], UnknownCodecError)
    with pytest.raises(CheckpointException, match="no reader could decode"):
        save_toy(tmp_path, state)


class Unhashable(Bytes):
    __hash__ = None  # type: ignore[assignment]


def test_planes_may_be_named_in_a_list(tmp_path: Path) -> None:
    chain = CodecChain(Planes(4, ["exponent"]), Zstd())  # type: ignore[arg-type]
    assert chain == CodecChain(Planes(4), Zstd())
    state = {"w": torch.randn(300, 200)}
    save(tmp_path, state, codec=chain)
    assert_loads(tmp_path, state)


def test_a_chain_that_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unhashable"):
        check_chain(CodecChain(Unhashable()), ELEMENT_TYPES["uint8"])
