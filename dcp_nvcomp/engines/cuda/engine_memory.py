"""The device memory of one engine, within the budget of the save or load that has it.

All of it is the arena: what batches take, and scratch memory for decoded blocks, which lies beside a batch. A block
that alone takes more than the budget gets it, and `settle` gives it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from dcp_nvcomp.engines.cuda.batches import fitting
from dcp_nvcomp.engines.cuda.device import Device


class EngineMemory:
    """Memory of an engine. Only `retry` may be called by several threads at once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arena = device.arena
        self._budget_nbytes = 0
        self._scratch_nbytes = 0

    def set_budget(self, nbytes: int) -> None:
        """Work for another save or load, which allows so much; what is held beyond that is given back."""
        assert nbytes > 0
        self._budget_nbytes = nbytes
        with self._device.current():
            self._arena.set_limit(nbytes)

    def reserve(self) -> None:
        """Reserve what the budget allows, or what there is of it."""
        try:
            with self._device.current():
                nbytes = self._arena.capacity_nbytes
        except Exception as error:
            raise torch.OutOfMemoryError(f"no memory can be reserved ({type(error).__name__}: {error})") from error
        if nbytes == 0:
            raise torch.OutOfMemoryError("the device has no memory left for an engine")

    def make_room(self, nbytes: int) -> None:
        """Have room for one batch, be it more than the budget."""
        with self._device.current():
            self._arena.grow(nbytes + self._scratch_nbytes)

    def fitting(self, costs: Sequence[int], start: int, most: int) -> int:
        """Return how many blocks make the next batch, and have room for them."""
        with self._device.current():
            room_nbytes = min(self._arena.capacity_nbytes, self._budget_nbytes) - self._scratch_nbytes
        count = fitting(costs, start, most, room_nbytes)
        if count == 1:
            self.make_room(costs[start])
        return count

    def take_scratch(self, nbytes: int, costs: Sequence[int]) -> Tensor:
        """Return memory for decoded blocks, beside which each can be decoded."""
        need_nbytes = nbytes + max(costs)
        with self._device.current():
            if len(costs) == 1:
                self._arena.grow(need_nbytes)
            elif need_nbytes > min(self._arena.capacity_nbytes, self._budget_nbytes):
                raise torch.OutOfMemoryError(f"an engine does not have {need_nbytes} bytes")
            return self._arena.empty(nbytes)

    @contextmanager
    def beside(self, scratch: Tensor) -> Iterator[None]:
        """Batches meanwhile make do with what this leaves of the budget."""
        self._scratch_nbytes = scratch.numel()
        try:
            yield
        finally:
            self._scratch_nbytes = 0

    def retry(self) -> None:
        """Ask the device again for what it did not have; any thread may call this."""
        self._arena.retry()

    def settle(self, most_nbytes: int | None = None) -> None:
        """Give back what is held beyond the budget, or beyond `most_nbytes`."""
        # what can't be given back is no reason to fail: if the GPU is broken, the next batch finds out
        with suppress(Exception), self._device.current():
            self._arena.settle() if most_nbytes is None else self._arena.shrink(most_nbytes)

    def release(self) -> None:
        """Give back everything that is not in use."""
        with self._device.current():
            self._arena.release()
