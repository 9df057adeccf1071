"""Saves and loads on a GPU that flips one bit now and then, anywhere between a tensor and its file.

Of what the GPU computes, that is, and of what is copied: a bit that flips in the tensor is the tensor's. Addresses are
left alone, as they are what memory protection is for.
"""

from __future__ import annotations

import random
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dcp_nvcomp.codecs import Planes
from dcp_nvcomp.engines.cuda.batches import RowTable
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import load, save
from tests.states import assert_same

from .kernels_on_cpu import ReferenceKernels, _memory
from .nvcomp_stand_in import StandInDevice
from .reference_literals import ReferenceLiterals, _array
from .stand_in_pool import install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

BUDGET = 4 << 20
# What a batch of these states does at most: kernels, copies.
EVENTS = 24
PLACES = {"inspect", "split", "copy", "merge", "measure_slices", "write_slices", "decode_slices", "copy in", "copy out"}


class Flips:
    """Decides when and where a bit flips, for all devices of a pool.

    Args:
        seed: of its random numbers.
        often: one batch in so many has a flip, if it gets that far.
    """

    def __init__(self, seed: int, often: int) -> None:
        self._random = random.Random(seed)
        self._often = often
        self._lock = threading.Lock()
        self.made: Counter[str] = Counter()

    def batch(self) -> int | None:
        """Return after how many events of the next batch one flips."""
        with self._lock:
            return self._random.randrange(EVENTS) if not self._random.randrange(self._often) else None

    def flip(self, place: str, outputs: Sequence[Tensor]) -> None:
        """Flip a bit of what an event wrote."""
        with self._lock:
            memory = self._random.choice([one.view(torch.uint8).reshape(-1) for one in outputs if one.numel()])
            memory[self._random.randrange(memory.numel())] ^= 1 << self._random.randrange(8)
            self.made[place] += 1


class FlippingDevice(StandInDevice):
    """A stand-in whose bits flip.

    Args:
        flips: when and where.
    """

    def __init__(self, flips: Flips) -> None:
        self._flips = flips
        self._left: int | None = None
        super().__init__(_Kernels(self), literals=_Literals(self))

    @contextmanager
    def session(self, tensors: Sequence[Tensor], after: Sequence[Any] = ()) -> Iterator[None]:
        self._left = self._flips.batch()
        with super().session(tensors, after):
            yield
        self._left = None

    def event(self, place: str, outputs: Sequence[Tensor]) -> None:
        """Note what was written, of which a bit may flip."""
        if self._left is None or not any(one.numel() for one in outputs):
            return
        if self._left == 0:
            self._flips.flip(place, outputs)
        self._left = self._left - 1 if self._left else None

    def copy_in(self, host: memoryview, target: Tensor) -> None:
        super().copy_in(host, target)
        self.event("copy in", [target])

    def copy_out(self, source: Tensor, host: memoryview) -> None:
        super().copy_out(source, host)
        arrived = source.clone()
        self.event("copy out", [arrived])
        self._copies[-1] = (arrived, host) if not torch.equal(arrived, source) else self._copies[-1]


class _Kernels(ReferenceKernels):
    def __init__(self, device: FlippingDevice) -> None:
        self._device = device

    def inspect(self, blocks: RowTable, crc: Tensor, seen: Tensor) -> None:
        super().inspect(blocks, crc, seen)
        self._device.event("inspect", [crc, seen])

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        super().split(blocks, seen, flags)
        planes = [_memory(*one) for row in blocks.rows.tolist() for one in _planes(row)]
        self._device.event("split", [flags, *planes])

    def merge(self, blocks: RowTable) -> None:
        super().merge(blocks)
        self._device.event("merge", [_memory(row[0], row[1]) for row in blocks.rows.tolist()])

    def copy(self, pieces: RowTable) -> None:
        super().copy(pieces)
        self._device.event("copy", [_memory(row[1], row[2] + row[3]) for row in pieces.rows.tolist()])


def _planes(row: Sequence[int]) -> list[tuple[int, int]]:
    """Return the address and length of each plane that `split` writes for a row of its table."""
    _, nbytes, width, _, _, low, rest, exponent = row
    if width == 1 or not nbytes:
        return []
    names = {"low": low, "rest": rest, "exponent": exponent}
    return [(names[plane.name], plane.nbytes) for plane in Planes(width).layout(nbytes, 0, True) if plane.name in names]


class _Literals(ReferenceLiterals):
    def __init__(self, device: FlippingDevice) -> None:
        super().__init__()
        self._device = device

    def __call__(self, name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        super().__call__(name, blocks, arguments)
        self._device.event(name, self._outputs(name, blocks, arguments))

    def _outputs(self, name: str, blocks: int, arguments: tuple[int, ...]) -> list[Tensor]:
        if name == "measure_slices":
            return [_memory(arguments[-1], 4 * blocks)]
        if name == "write_slices":
            slices, places = (_array(arguments[at], 2 * blocks, np.int64).reshape(-1, 2).tolist() for at in (0, 2))
            pairs = zip(slices, places, strict=True)
            return [_memory(address, room) for (_, nbytes), (address, room) in pairs if room < nbytes]
        rows, count, corrupt = arguments
        slices = _array(rows, 4 * count, np.int64).reshape(-1, 4).tolist()
        return [_memory(corrupt, 4 * count), *(_memory(row[2], row[3]) for row in slices)]


def a_state(generator: torch.Generator) -> dict[str, Any]:
    return {
        "w": torch.randn(3000, generator=generator) / 50,
        "v": torch.rand(70, 80, generator=generator),
        "h": torch.randn(9001, generator=generator).bfloat16(),
        "i": torch.arange(2000),
        "z": torch.zeros(3000),
        "b": torch.randint(0, 5, (4001,), generator=generator, dtype=torch.uint8),
    }


class OddFlags(ReferenceKernels):
    """Kernels whose flags have a bit that no codec has, which decoding takes no notice of."""

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        super().split(blocks, seen, flags)
        flags ^= 16


def test_flags_that_no_codec_has_reach_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "pinned_allocate", plain_allocate)
    install_stand_ins(monkeypatch, OddFlags())
    state = a_state(torch.Generator().manual_seed(1))
    with pytest.warns(RuntimeWarning, match="impossible flags"):
        save(tmp_path, state, device_memory_budget=BUDGET)
    assert_same(load(tmp_path, state, engine="cpu", verify="full"), state)


@pytest.mark.parametrize(
    ("saves", "often"), [(60, 1), pytest.param(10_000, 8, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_wrong_value_is_stored_or_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int, often: int
) -> None:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    flips, generator = Flips(saves, often), torch.Generator().manual_seed(saves)
    install_stand_ins(monkeypatch, ReferenceKernels(), make_device=lambda device: FlippingDevice(flips))
    state, again = a_state(generator), 0
    for number in range(saves):
        if number % 10 == 0:
            state = a_state(generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            writer = save(tmp_path / "a", state, device_memory_budget=BUDGET)
            loaded = load(tmp_path / "a", state, device_memory_budget=BUDGET)
        assert writer.last_save is not None
        again += writer.last_save.recoded_blocks
        assert_same(loaded, state)
        assert_same(load(tmp_path / "a", state, engine="cpu", verify="full"), state)
        rmtree(tmp_path / "a")
    assert flips.made.keys() == PLACES, "else it proves little"
    assert again > saves / often / 20, "so many blocks of those that were hit are encoded again"
