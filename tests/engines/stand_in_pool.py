"""A pool of engines on stand-ins: whole saves and loads of host tensors take the way of CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from dcp_nvcomp.engines import choice
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda import pool, slice_coders
from dcp_nvcomp.engines.cuda.coders import DECODE, ENCODE
from dcp_nvcomp.engines.cuda.device import Device, Kernels, Launch
from dcp_nvcomp.engines.cuda.engine import CudaEngine
from dcp_nvcomp.engines.cuda.pool import EnginePool, run_self_test

from .nvcomp_stand_in import NvcompStandIn, StandInDevice

__all__ = ["StandInPool", "install_stand_ins", "prefer_nvcomp"]


@dataclass
class StandInPool:
    """The devices below the engines of saves and loads.

    Attributes:
        kernels: their kernels.
        nvcomp: makes the nvCOMP of the next device.
        devices: those that were made.
        capacity_nbytes: memory of each.
        literals: what starts the kernels of literals*.cu, if they are compiled.
    """

    kernels: Kernels
    nvcomp: Callable[[], NvcompStandIn] = NvcompStandIn
    devices: list[StandInDevice] = field(default_factory=list)
    capacity_nbytes: int = 1 << 40
    literals: Launch | None = None

    def make_device(self, device: torch.device) -> Device:
        """Return another device."""
        self.devices.append(StandInDevice(self.kernels, self.nvcomp(), self.capacity_nbytes, self.literals))
        return self.devices[-1]

    def calls(self, name: str) -> list[int]:
        """Numbers of slices of the calls of nvCOMP's `encode` or `decode`."""
        return [slices for device in self.devices for called, slices in device.nvcomp.calls if called == name]


def prefer_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stand-in be a GPU on which nvCOMP is faster than our own kernels: most tests make it fail."""
    rates = {way: {"nvcomp": 2.0, "literals": 1.0} for way in (ENCODE, DECODE)}
    monkeypatch.setattr(slice_coders, "_rates", lambda: {StandInDevice.name: rates})


def _no_self_test(engine: CudaEngine, device: torch.device) -> None:
    """For tests that count calls, or want nvCOMP to fail later."""


def install_stand_ins(
    monkeypatch: pytest.MonkeyPatch,
    kernels: Kernels,
    *,
    self_test: bool = False,
    make_device: Callable[[torch.device], Device] | None = None,
) -> StandInPool:
    """Send host tensors through engines on stand-ins, unless `engine="cpu"`."""
    prefer_nvcomp(monkeypatch)
    made = StandInPool(kernels)
    shared = EnginePool(make_device or made.make_device, run_self_test if self_test else _no_self_test)
    monkeypatch.setattr(pool, "_pool", shared)
    monkeypatch.setattr(choice, "_is_cuda", lambda device: True)
    monkeypatch.setattr(EngineChoice, "may_use_cuda", lambda self: self.option != "cpu")
    monkeypatch.setattr(EngineChoice, "_unavailable_reason", lambda self: None)
    return made
