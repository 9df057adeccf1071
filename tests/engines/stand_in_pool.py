"""A pool of engines on stand-ins: whole saves and loads of host tensors take the way of CUDA tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from dcp_nvcomp.engines import choice
from dcp_nvcomp.engines.choice import EngineChoice
from dcp_nvcomp.engines.cuda import pool
from dcp_nvcomp.engines.cuda.device import Device, Kernels
from dcp_nvcomp.engines.cuda.engine import CudaEngine
from dcp_nvcomp.engines.cuda.pool import EnginePool, run_self_test

from .nvcomp_stand_in import NvcompStandIn, StandInDevice

__all__ = ["StandInPool", "install_stand_ins"]


@dataclass
class StandInPool:
    """The devices below the engines of saves and loads.

    Attributes:
        kernels: their kernels.
        nvcomp: makes the nvCOMP of the next device.
        devices: those that were made.
        capacity_nbytes: memory of each.
    """

    kernels: Kernels
    nvcomp: Callable[[], NvcompStandIn] = NvcompStandIn
    devices: list[StandInDevice] = field(default_factory=list)
    capacity_nbytes: int = 1 << 40

    def make_device(self, device: torch.device) -> Device:
        """Return another device."""
        self.devices.append(StandInDevice(self.kernels, self.nvcomp(), self.capacity_nbytes))
        return self.devices[-1]

    def calls(self, name: str) -> list[int]:
        """Numbers of slices of the calls that `encode` or `decode`, of nvCOMP and of our kernels."""
        calls = [call for device in self.devices for call in device.nvcomp.calls + device.nvcomp.kernel_calls]
        return [slices for called, slices in calls if called == name]


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
    made = StandInPool(kernels)
    shared = EnginePool(make_device or made.make_device, run_self_test if self_test else _no_self_test)
    monkeypatch.setattr(pool, "_pool", shared)
    monkeypatch.setattr(choice, "_is_cuda", lambda device: True)
    monkeypatch.setattr(EngineChoice, "may_use_cuda", lambda self: self.option != "cpu")
    monkeypatch.setattr(EngineChoice, "_unavailable_reason", lambda self: None)
    return made
