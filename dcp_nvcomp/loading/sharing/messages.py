"""What ranks that share reads send each other: a status, and the bytes of a read if they are there."""

from __future__ import annotations

import threading
from typing import Final

import torch

UNREAD, THERE, FAILED = range(3)
_HEAD_NBYTES: Final = 64  # before the bytes; the first is the status


class Memory:
    """Buffers of messages, all of one size, that are used again."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._free, self._lock = _HEAD_NBYTES + nbytes, list[torch.Tensor](), threading.Lock()

    def take(self) -> torch.Tensor:
        with self._lock:
            return self._free.pop() if self._free else torch.empty(self._nbytes, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free.append(buffer)


class Message:
    """A read's bytes, in memory that is given back once all its users have released it."""

    def __init__(self, memory: Memory, nbytes: int, room: threading.Semaphore | None, users: int) -> None:
        self._memory, self._room, self._users = memory, room, users
        self._lock = threading.Lock()
        self._buffer = memory.take()
        self.data = self._buffer[: _HEAD_NBYTES + nbytes]

    @property
    def status(self) -> int:
        return int(self.data[0])

    @property
    def payload(self) -> memoryview:
        return self.data.numpy().data[_HEAD_NBYTES:]

    def sent_as(self, status: int) -> torch.Tensor:
        """Return what is sent: where the bytes are not there, no more than that."""
        self.data[0] = status
        return self.data if status == THERE else self.data[:_HEAD_NBYTES]

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._memory.give_back(self._buffer)
        if self._room is not None:
            self._room.release()
