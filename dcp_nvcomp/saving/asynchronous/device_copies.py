"""A copy of what a rank saves in the memory of its GPUs, so that training waits only for that memory.

spare      what torch has never taken from the driver: what is free of the rest, the next step takes again
copy       each tensor, after what the caller has queued; the few that are in host memory are copied there
give back  each copy to torch once it is encoded; none is kept for the next save, and two saves never have copies

Where there is no room for all of them there are none, and the state is encoded while training waits.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.engines.tensors import is_transparent, without_lazy_bits
from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.rank_save import Resolve

_MOST_HOST_NBYTES: Final = 64 << 20  # steps, random states: a state that is in host memory is copied in other ways
_MARGIN: Final = 16  # this part of a GPU's memory stays free: what is free lies in pieces
_STEP: Final = 50  # a step takes at least this part more than what stays
_STEP_RESERVED: Final = 10  # and has torch reserve at least this part more; less may lie between what stays


class DeviceMemory(Protocol):
    """The memory of GPUs."""

    turn: threading.Lock  # held while a save has copies

    @property
    def is_in_use(self) -> bool:
        """True if any tensor can be there."""

    def has(self, tensor: Tensor) -> bool:
        """Return True if the tensor is there."""

    def spare_nbytes(self, device: torch.device) -> int:
        """Return how much of a device's memory training needs at no time."""

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory for a copy, which nothing may use before `follow`; raises torch.OutOfMemoryError."""

    def follow(self, device: torch.device) -> None:
        """Have what this thread starts from now on wait for whatever used the memory before."""

    def copy(self, tensor: Tensor, into: Tensor) -> None:
        """Start to copy a tensor."""

    def wait(self, device: torch.device) -> None:
        """Wait for the copies that this thread has started."""


class CudaMemory:
    """What torch allocates on NVIDIA GPUs.

    What torch has reserved is training's, also while it is free: the next step takes it again. What the driver has left
    is spare, and so is what earlier copies had torch reserve.
    """

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._left: dict[torch.device, int] = {}  # of each device what copies had torch reserve
        self._before: dict[torch.device, int] = {}  # how much was reserved when copying began

    @property
    def is_in_use(self) -> bool:
        return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]

    def has(self, tensor: Tensor) -> bool:
        return tensor.device.type == "cuda"

    def spare_nbytes(self, device: torch.device) -> int:
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        peak_nbytes = torch.cuda.max_memory_allocated(device)
        # training that logs its peaks resets them, often just before it saves; what torch has reserved it can't
        if peak_nbytes < allocated + allocated // _STEP and reserved < allocated + allocated // _STEP_RESERVED:
            return 0  # no step was made yet: what one takes is not known
        free_nbytes, total_nbytes = torch.cuda.mem_get_info(device)
        left = self._left[device] = min(self._left.get(device, 0), reserved - allocated)
        self._before[device] = reserved
        return free_nbytes + left - total_nbytes // _MARGIN

    def empty_like(self, tensor: Tensor) -> Tensor:
        # else torch keeps the memory for a stream that training does not use
        with torch.cuda.stream(torch.cuda.default_stream(tensor.device)):
            return torch.empty_like(tensor)

    def follow(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))

    def copy(self, tensor: Tensor, into: Tensor) -> None:
        into.copy_(tensor, non_blocking=True)

    def wait(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()
        reserved = torch.cuda.memory_reserved(device)
        grown = reserved - self._before.pop(device, reserved)
        self._left[device] = self._left.get(device, 0) + max(0, grown)


class DeviceCopies:
    """The copies of one save."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.nbytes = 0  # on devices
        self._memory = memory
        self._copies: list[Any] = []
        self._given: dict[int, Any] = {}  # by the ids of items
        self._has_turn = False

    def copy(self, items: Sequence[WriteItem], resolve: Resolve) -> bool:
        """Copy the data of all items. False if there is no room, or no tensor on a device; then nothing is held."""
        if not self._memory.is_in_use:
            return False
        self._has_turn = self._has_turn or self._memory.turn.acquire(blocking=False)
        if not self._has_turn:
            return False
        devices = self._devices(items, resolve)
        are_there = bool(devices)
        try:
            if are_there:
                self._start(items, resolve, devices)
        except torch.OutOfMemoryError:
            are_there = False
        except BaseException:
            self._wait(devices)
            self.end()
            raise
        self._wait(devices)
        if not are_there:
            self.end()
        return are_there

    def _wait(self, devices: set[torch.device]) -> None:
        # also before memory goes back: what is copied by then would be written over what is another's
        for device in devices:
            self._memory.wait(device)

    def _devices(self, items: Sequence[WriteItem], resolve: Resolve) -> set[torch.device]:
        """Return where there are tensors to copy; nothing unless all that is saved can be copied, and there is room."""
        tensors = [item for item in items if item.tensor_data is not None]
        total_nbytes, host_nbytes, devices = sum(map(planned_nbytes, tensors)), 0, set[torch.device]()
        for item in tensors:
            value = resolve(item)
            if not is_transparent(value):
                return set()
            if not self._memory.has(value):
                host_nbytes += value.nbytes
                if host_nbytes > _MOST_HOST_NBYTES:
                    return set()
            elif value.device not in devices:
                if self._memory.spare_nbytes(value.device) < total_nbytes:
                    return set()
                devices.add(value.device)
        return devices

    def _start(self, items: Sequence[WriteItem], resolve: Resolve, devices: set[torch.device]) -> None:
        self.nbytes = 0
        for item in items:
            value = resolve(item)
            if isinstance(value, io.BytesIO):
                self._copies.append(value)
            elif self._memory.has(value):
                self.nbytes += value.nbytes
                self._copies.append(self._memory.empty_like(value))
            else:
                self._copies.append(without_lazy_bits(value).clone())
        for device in devices:  # once: before each of thousands of small copies, it would take longer than they do
            self._memory.follow(device)
        for item, copy in zip(items, self._copies, strict=True):
            if not isinstance(copy, io.BytesIO):  # whose values would be pickled once more
                value = resolve(item)
                if self._memory.has(value):
                    self._memory.copy(without_lazy_bits(value), copy)

    def resolver(self, items: Sequence[WriteItem]) -> Resolve:
        """Return what gives out the copies, once each: of the items that were copied, in their order."""
        self._given = {id(item): copy for item, copy in zip(items, self._copies, strict=True)}
        self._copies = []
        return lambda item: self._given.pop(id(item))

    def end(self) -> None:
        """Give back what is left."""
        self._copies.clear()
        self._given.clear()
        if self._has_turn:
            self._has_turn = False
            self._memory.turn.release()
