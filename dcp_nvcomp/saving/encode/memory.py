"""What a save needs of the memory that its tasks are encoded into, wherever that comes from.

    feeding thread   reserves room for a task, which may wait: that is how a slow sink holds back the encoders
    encode thread    takes a room that was reserved, which never waits, fills it, says how much it keeps
    write thread     releases the room when its blocks are written

`BufferMemory` lends equal buffers of one save, `StagingMemory` fills segments that are kept for the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from dcp_nvcomp.codecs.encoded import EncodedBlock


class Cancelled(Exception):
    """The save failed while a thread waited for memory."""


class Room(ABC):
    """Memory for the encoded blocks of one task.

    Attributes:
        view: the memory, as much as a task may need at most.
    """

    __slots__ = ("view",)

    view: memoryview

    @abstractmethod
    def keep(self, blocks: list[EncodedBlock], nbytes: int) -> list[EncodedBlock]:
        """Say what is needed from now on; on the thread that encodes.

        Args:
            blocks: what was encoded into this room.
            nbytes: how much of the room they take, with the gaps between them.

        Returns:
            The same blocks, perhaps elsewhere in the room.
        """

    @abstractmethod
    def release(self) -> None:
        """Give the memory back; any thread may."""


class TaskMemory(ABC):
    """Rooms of one size.

    Attributes:
        room_nbytes: the most that one task may need.
    """

    room_nbytes: int

    @abstractmethod
    def reserve(self) -> None:
        """Reserve a room; wait until there is one. Only for one thread.

        Raises:
            Cancelled: the save failed.
        """

    @abstractmethod
    def take(self) -> Room:
        """Return a room that was reserved; any thread may."""

    @abstractmethod
    def unreserve(self) -> None:
        """Give up a reservation that was not used; any thread may."""


class JobMemory(ABC):
    """The memory of one save job."""

    @abstractmethod
    def host(self, lane: int) -> TaskMemory:
        """Return where tasks of the CPU engine are encoded.

        Args:
            lane: number of the lane that writes them.
        """

    @abstractmethod
    def cuda(self, lane: int) -> TaskMemory:
        """Return where tasks of CUDA engines are encoded."""

    @abstractmethod
    def wait_to_write(self) -> None:
        """Wait until written blocks are wanted; called once by each write thread."""

    @abstractmethod
    def close(self) -> None:
        """Wake all that wait, because the save failed."""
