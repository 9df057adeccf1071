"""Values that last as long as torch.distributed does: names of process groups come again after it was shut down."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

import torch.distributed as dist

from dcp_nvcomp.errors import ConfigurationError

T = TypeVar("T")


class PerWorld(Generic[T]):
    """A value of this process, made anew after `destroy_process_group`, and in a forked child.

    Args:
        make: makes one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._held: tuple[weakref.ref[dist.ProcessGroup], T] | None = None
        # What a forked child got from its parent. Kept for good: the destructor of a process group waits for threads
        # that the child does not have.
        self._of_parents: list[object] = []
        os.register_at_fork(after_in_child=self._begin_again)

    def get(self) -> T:
        """Return the value; `ConfigurationError` if torch.distributed was shut down."""
        world = dist.group.WORLD
        if world is None:
            raise ConfigurationError("torch.distributed was shut down (destroy_process_group) before this call.")
        with self._lock:
            if self._held is None or self._held[0]() is not world:
                self._held = weakref.ref(world), self._make()
            return self._held[1]

    def _begin_again(self) -> None:
        self._of_parents.append(self._held)
        self._held, self._lock = None, threading.Lock()
