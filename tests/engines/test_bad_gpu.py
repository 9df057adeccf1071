"""Whole saves and loads with default options on a GPU that misbehaves: none fails, and no wrong value is loaded.

Each misbehaviour is there from the beginning, when the self-test sees it, or begins after the self-test.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dcp_nvcomp.engines.cuda.batches import RowTable
from dcp_nvcomp.engines.cuda.device import Kernels
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.saving.encode import tasks as buffers
from tests.checkpoints import assert_loads, load, save
from tests.effort import sampled
from tests.states import assert_same

from .kernels_on_cpu import ReferenceKernels, _memory
from .nvcomp_stand_in import BatchArray, Codec, NvcompStandIn, StandInDevice
from .stand_in_pool import install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class DriverError(Exception):
    """An error of a type that nobody has heard of."""


ERRORS = (
    *(RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError, OSError, MemoryError),
    *(torch.OutOfMemoryError, AssertionError, ZeroDivisionError, StopIteration, NotImplementedError, DriverError),
)


# ---- nvCOMP ----------------------------------------------------------------------------------------------------------


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def other_content(stream: bytes) -> bytes:
    """A good stream of other bytes; of what is no stream, other bytes."""
    try:
        return zlib.compress(flipped(zlib.decompress(stream, wbits=-15)), wbits=-15)
    except zlib.error:
        return flipped(stream)


def noise(data: bytes) -> bytes:
    return random.Random(len(data)).randbytes(len(data))


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "other content": other_content,
    "a flipped bit": flipped,
    "one byte less": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "one byte": lambda data: data[:1],
    "nothing": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
    "noise": noise,
    "bytes in another order": lambda data: data[::-1],
}
SIZES: dict[str, Callable[[list[int]], Any]] = {
    "of zero": lambda sizes: [0] * len(sizes),
    "below zero": lambda sizes: [-1] * len(sizes),
    "too large": lambda sizes: [1 << 40] * len(sizes),
    "one more": lambda sizes: [size + 1 for size in sizes],
    "one less": lambda sizes: [size - 1 for size in sizes],
    "of too few slices": lambda sizes: sizes[:-1],
    "that are none": lambda sizes: None,
    "that are words": lambda sizes: ["?"] * len(sizes),
}


class BadNvcomp(NvcompStandIn):
    """nvCOMP of which one direction misbehaves.

    Args:
        direction: `"encode"` or `"decode"`.
        change: what becomes of the right bytes of a slice.
        sizes: what becomes of the right sizes of a batch.
        idle: True to do nothing and report success.
        error: what calls raise.
        period: 1 to misbehave always, 3 in every third slice or call.
    """

    def __init__(
        self,
        direction: str,
        *,
        change: Callable[[bytes], bytes] | None = None,
        sizes: Callable[[list[int]], Any] | None = None,
        idle: bool = False,
        error: type[Exception] | None = None,
        period: int = 1,
    ) -> None:
        super().__init__(self._raise)
        self._direction, self._change, self._sizes = direction, change, sizes
        self._idle, self._error, self._period = idle, error, period
        self._count = 0

    def _now(self) -> bool:
        self._count += 1
        return self._count % self._period == 0

    def _raise(self, name: str, slices: int) -> None:
        if self._error is not None and name == self._direction and self._now():
            raise self._error("something is wrong with the GPU")

    def Codec(self, **options: Any) -> Codec:  # noqa: N802
        made = super().Codec(**options)
        change, right = self._change, getattr(made, f"_{self._direction}_slice")
        work = getattr(made, self._direction)
        if change is not None:
            setattr(made, f"_{self._direction}_slice", lambda data: change(right(data)) if self._now() else right(data))
        if self._idle:
            setattr(
                made, self._direction, lambda source, out, **more: out if self._now() else work(source, out=out, **more)
            )
        if self._sizes is not None:
            setattr(made, self._direction, lambda *given, **more: self._lying(work(*given, **more)))
        return made

    def _lying(self, batch: BatchArray) -> BatchArray:
        sizes, is_now = self._sizes, self._now()
        assert sizes is not None

        class Lying(BatchArray):
            @property
            def buffer_sizes(self) -> Any:
                right = [array.size for array in self.arrays()]
                return sizes(right) if is_now else right

        batch.__class__ = Lying
        return batch


class Unusable(NvcompStandIn):
    """nvCOMP of which one function raises."""

    def __init__(self, name: str, error: type[Exception]) -> None:
        super().__init__()

        def fails(*given: Any, **more: Any) -> Any:
            raise error(f"{name} is not what it was")

        if name in ("as_array", "as_arrays", "Codec"):
            setattr(self, name, fails)
        else:
            made = super().Codec

            def codec(**options: Any) -> Codec:
                found = made(**options)
                setattr(found, name, fails)
                return found

            self.Codec = codec  # type: ignore[method-assign]


NVCOMP: dict[str, Callable[[], NvcompStandIn]] = {}
for _direction in ("encode", "decode"):
    for _period in (1, 3):
        _often = "" if _period == 1 else " now and then"
        for _name, _change in CHANGES.items():
            NVCOMP[f"{_direction}: {_name}{_often}"] = lambda d=_direction, c=_change, p=_period: BadNvcomp(
                d, change=c, period=p
            )
        for _name, _sizes in SIZES.items():
            NVCOMP[f"{_direction}: sizes {_name}{_often}"] = lambda d=_direction, s=_sizes, p=_period: BadNvcomp(
                d, sizes=s, period=p
            )
        NVCOMP[f"{_direction}: idle{_often}"] = lambda d=_direction, p=_period: BadNvcomp(d, idle=True, period=p)
        for _error in ERRORS:
            NVCOMP[f"{_direction}: {_error.__name__}{_often}"] = lambda d=_direction, e=_error, p=_period: BadNvcomp(
                d, error=e, period=p
            )
for _name in (
    "as_arrays",
    "as_array",
    "Codec",
    "get_max_comp_buffer_size",
    "compression_config",
    "decompression_config",
):
    for _error in (RuntimeError, TypeError):
        NVCOMP[f"{_name}: {_error.__name__}"] = lambda n=_name, e=_error: Unusable(n, e)


# ---- kernels ---------------------------------------------------------------------------------------------------------


class BadKernels:
    """Kernels of which one misbehaves.

    Args:
        name: which one.
        how: `"idle"`, `"wrong"`, or the type of the error that it raises.
        period: as for `BadNvcomp`.
    """

    def __init__(self, name: str, how: str | type[Exception], period: int) -> None:
        self._name, self._how, self._period = name, how, period
        self._good, self._count = ReferenceKernels(), 0

    def _run(self, name: str, table: RowTable, *more: Tensor) -> None:
        self._count += name == self._name
        is_now = name == self._name and self._count % self._period == 0
        if is_now and not isinstance(self._how, str):
            raise self._how("CUDA error: unspecified launch failure")
        if is_now and self._how == "idle":
            return
        getattr(self._good, name)(table, *more)
        if is_now and name == "inspect":
            more[0].bitwise_xor_(1)
        elif is_now and name == "split":
            self._spoil(table, column=-1)
        elif is_now:
            self._spoil(table, column=1 if name == "copy" else 0)

    def _spoil(self, table: RowTable, column: int) -> None:
        """Change what was written, a plane, a block, or a piece: not so that it would be right if done twice."""
        for row in table.rows.tolist():
            if row[column]:
                _memory(row[column], 1).add_(4)

    def inspect(self, blocks: RowTable, crc: Tensor, seen: Tensor) -> None:
        self._run("inspect", blocks, crc, seen)

    def split(self, blocks: RowTable, seen: Tensor, flags: Tensor) -> None:
        self._run("split", blocks, seen, flags)

    def merge(self, blocks: RowTable) -> None:
        self._run("merge", blocks)

    def copy(self, pieces: RowTable) -> None:
        self._run("copy", pieces)


KERNELS: dict[str, Callable[[], Kernels]] = {
    f"{name}: {how if isinstance(how, str) else how.__name__}{'' if period == 1 else ' now and then'}": (
        lambda name=name, how=how, period=period: BadKernels(name, how, period)
    )
    for name in ("inspect", "split", "merge", "copy")
    for how in ("idle", "wrong", RuntimeError, TypeError)
    for period in (1, 3)
}


# ---- devices ---------------------------------------------------------------------------------------------------------


def no_device(error: type[Exception]) -> Callable[[torch.device], StandInDevice]:
    def make(device: torch.device) -> StandInDevice:
        raise error("no such device")

    return make


def second_device_fails() -> Callable[[torch.device], StandInDevice]:
    made: list[StandInDevice] = []

    def make(device: torch.device) -> StandInDevice:
        if made:
            raise TypeError("only one at a time")
        made.append(StandInDevice(ReferenceKernels()))
        return made[0]

    return make


def small(capacity_nbytes: int) -> Callable[[torch.device], StandInDevice]:
    return lambda device: StandInDevice(ReferenceKernels(), capacity_nbytes=capacity_nbytes)


DEVICES = {
    **{f"none: {error.__name__}": no_device(error) for error in ERRORS},
    "only one": second_device_fails(),
    **{f"{capacity} bytes": small(capacity) for capacity in (0, 1000, 300_000, 3_000_000, 20_000_000)},
}

CASES: dict[str, Callable[[torch.device], StandInDevice]] = {
    **{
        f"nvcomp {k}": lambda device, make=make: StandInDevice(ReferenceKernels(), make()) for k, make in NVCOMP.items()
    },
    **{f"kernels {k}": lambda device, make=make: StandInDevice(make()) for k, make in KERNELS.items()},
    **{f"device {k}": make for k, make in DEVICES.items()},
}


def some_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "w": torch.randn(100, 999, generator=generator) / 50,
        "h": torch.randn(70_001, generator=generator).bfloat16(),
        "v": torch.rand(200, 100, generator=generator).t(),
        "i": torch.arange(20_000),
        "small": torch.ones(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "object": {"a": 1},
    }


BUDGET = 8 << 20  # only because a stand-in fills all of it with garbage


CHOSEN = [*dict.fromkeys([*sampled([*CASES], 29), "nvcomp encode: sizes one more now and then"])]


def save_and_load(path: Path, monkeypatch: pytest.MonkeyPatch, case: str, *, self_test: bool) -> None:
    for module in (buffers, decoding):
        monkeypatch.setattr(module, "pinned_allocate", plain_allocate)
    state = some_state()
    codec = "planes-deflate" if case.startswith("nvcomp") else "auto"
    save(path / "good", state, codec=codec, engine="cpu")
    install_stand_ins(monkeypatch, ReferenceKernels(), self_test=self_test, make_device=CASES[case])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        save(path / "a", state, codec=codec, device_memory_budget=BUDGET)
        assert_same(load(path / "good", state, device_memory_budget=BUDGET), state)
        assert_same(load(path / "a", state, device_memory_budget=BUDGET), state)
    assert_loads(path / "a", state, engine="cpu", verify="full")


@pytest.mark.ci
@pytest.mark.parametrize("self_test", [True, False], ids=["from the beginning", "later"])
@pytest.mark.parametrize("case", CHOSEN)
def test_no_save_and_no_load_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, self_test: bool) -> None:
    save_and_load(tmp_path, monkeypatch, case, self_test=self_test)
