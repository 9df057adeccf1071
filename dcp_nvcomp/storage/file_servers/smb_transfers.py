"""Reads and writes of an SMB connection, several at once: begun, and ended when the server has answered.

`DirectTransfers` sends and receives data past smbprotocol. What is encrypted goes through it: `WrappedTransfers`.
"""

from __future__ import annotations

import errno
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from smbprotocol.exceptions import SMBException, SMBResponseException
from smbprotocol.header import Commands, NtStatus, Smb2Flags

from dcp_nvcomp.storage.file_servers.session import ConnectionLostError
from dcp_nvcomp.storage.file_servers.smb_packets import (
    ANSWER_NBYTES,
    Answer,
    Buffer,
    Route,
    is_signed_well,
    read_request,
    signer,
    write_request,
)

_CREDITS: Final = 512  # how many we want to have
_MORE_CREDITS: Final = 64
_CREDIT_NBYTES: Final = 1 << 16


class Refused(SMBException):  # type: ignore[misc]
    """The server's answer to a read or a write is an error."""

    def __init__(self, status: int) -> None:
        name = next((name for name, value in vars(NtStatus).items() if value == status), "unknown")
        super().__init__(f"{name} (0x{status:08x})")
        self.status = status


class Transfers(ABC):
    """What can be on its way on one connection."""

    def __init__(self, wire: Any, tree: Any) -> None:
        self._wire, self._tree, self._login = wire, tree, tree.session

    def _credits(self) -> int:
        window = self._wire.sequence_window
        return int(window["high"] - window["low"])

    def has_credits(self, nbytes: int) -> bool:
        """Return whether the server would take a request for so many bytes now."""
        return self._credits() > _charge(nbytes)

    def room(self, nbytes: int) -> int:
        """Wait until the server takes a request for so many bytes, or for fewer if nothing else is on its way."""
        while self._credits() < _charge(nbytes):
            if not self._wait_for_an_answer():
                nbytes = min(nbytes, self._credits() * _CREDIT_NBYTES)
                if not nbytes:
                    raise ConnectionLostError("the server lets us send nothing more")
        return nbytes

    @abstractmethod
    def _wait_for_an_answer(self) -> bool:
        """Wait until something that is on its way is answered; return False if there is nothing."""

    def credits_wanted(self, charge: int) -> int:
        """Return how many credits to ask for with a request: more than it takes, as long as we have few."""
        return charge + (_MORE_CREDITS if self._credits() < _CREDITS else 0)

    @abstractmethod
    def begin_read(self, handle: Any, start: int, buffer: memoryview) -> Any:
        """Ask for bytes of a file; until `end` returns, the buffer is not to be touched."""

    @abstractmethod
    def begin_write(self, handle: Any, start: int, data: memoryview) -> Any:
        """Send bytes of a file."""

    @abstractmethod
    def end(self, begun: Any) -> int:
        """Wait for the answer.

        Returns:
            How many bytes there were.

        Raises:
            Refused: or smbprotocol's exception, with the server's status. A read behind the end is none.
        """

    def abandon(self, begun: Iterable[Any]) -> None:
        """Wait until nothing more is written into the buffers of reads that were begun, and that nobody wants."""
        return


def _charge(nbytes: int) -> int:
    return max(1, -(-nbytes // _CREDIT_NBYTES))


class WrappedTransfers(Transfers):
    """Through smbprotocol."""

    def __init__(self, wire: Any, tree: Any) -> None:
        super().__init__(wire, tree)
        self._unanswered: deque[Any] = deque()

    def _wait_for_an_answer(self) -> bool:
        while self._unanswered:
            request = self._unanswered.popleft()
            if not request.response_event.is_set():
                if not request.response_event.wait(self._wire.silent_seconds):
                    raise ConnectionLostError("no answer from the server", errno.ETIMEDOUT)
                return True
        return False

    def begin_read(self, handle: Any, start: int, buffer: memoryview) -> Any:
        message, unpack = handle.read(start, len(buffer), send=False)
        return self._send(message, len(buffer)), unpack, buffer, len(buffer)

    def begin_write(self, handle: Any, start: int, data: memoryview) -> Any:
        message, unpack = handle.write(bytes(data), start, send=False)
        return self._send(message, len(data)), unpack, None, len(data)

    def _send(self, message: Any, nbytes: int) -> Any:
        wanted = self.credits_wanted(_charge(nbytes))
        login, tree = self._login, self._tree
        request = self._wire.send(message, login.session_id, tree.tree_connect_id, credit_request=wanted)
        while self._unanswered and self._unanswered[0].response_event.is_set():
            self._unanswered.popleft()
        self._unanswered.append(request)
        return request

    def end(self, begun: Any) -> int:
        request, unpack, buffer, nbytes = begun
        assert isinstance(nbytes, int)
        try:
            answer = unpack(request)
        except SMBResponseException as error:
            if buffer is None or error.status != NtStatus.STATUS_END_OF_FILE:
                raise
            return 0
        if buffer is None:
            _check_written(answer, nbytes)
            return nbytes
        nbytes = len(answer)
        buffer[:nbytes] = answer
        return nbytes


def _check_written(found: int, nbytes: int) -> None:
    if found != nbytes:
        raise ConnectionLostError(f"the server has written {found} of {nbytes} bytes")


class _Transfer:
    """A request that is on its way."""

    def __init__(self, buffer: memoryview | None, written_nbytes: int = 0) -> None:
        self.buffer, self.written_nbytes = buffer, written_nbytes
        self.ended = threading.Event()
        self.status: int | None = None
        self.nbytes = 0


class DirectTransfers(Transfers):
    """Past smbprotocol, which shares with it the socket and the numbers of messages."""

    def __init__(self, wire: Any, tree: Any) -> None:
        super().__init__(wire, tree)
        login = tree.session
        sign = None
        if login.signing_required and login.signing_key:
            sign = signer(wire.dialect, wire.signing_algorithm_id, login.signing_key)
        flags = Smb2Flags.SMB2_FLAGS_DFS_OPERATIONS if tree.is_dfs_share else 0
        self._route = Route(login.session_id, tree.tree_connect_id, flags, sign)
        self._on_their_way: dict[int, _Transfer] = {}
        self._has_ended = False
        self._changed = threading.Condition()
        wire.transport.receiver = self

    def begin_read(self, handle: Any, start: int, buffer: memoryview) -> _Transfer:
        def message(message_id: int, charge: int, wanted: int) -> tuple[Buffer, ...]:
            asked = {"file_id": handle.file_id, "start": start, "nbytes": len(buffer)}
            return (read_request(self._route, message_id, charge, wanted, **asked),)

        return self._begin(_Transfer(buffer), len(buffer), message)

    def begin_write(self, handle: Any, start: int, data: memoryview) -> _Transfer:
        def message(message_id: int, charge: int, wanted: int) -> tuple[Buffer, ...]:
            said = {"file_id": handle.file_id, "start": start, "data": data}
            return write_request(self._route, message_id, charge, wanted, **said), data

        return self._begin(_Transfer(None, len(data)), len(data), message)

    def _begin(
        self, transfer: _Transfer, nbytes: int, message: Callable[[int, int, int], tuple[Buffer, ...]]
    ) -> _Transfer:
        wire = self._wire
        charge = _charge(nbytes)
        with wire.sequence_lock:
            if charge > self._credits():
                raise ConnectionLostError("the server lets us send nothing more")
            message_id = wire.sequence_window["low"]
            wire.sequence_window["low"] += charge
        with self._changed:
            if self._has_ended:
                raise ConnectionLostError("the connection has ended")
            self._on_their_way[message_id] = transfer
        charge = charge if wire.supports_multi_credit else 0
        wire.transport.send_parts(message(message_id, charge, self.credits_wanted(_charge(nbytes))))
        return transfer

    def _wait_for_an_answer(self) -> bool:
        seconds = self._wire.silent_seconds
        with self._changed:
            before = len(self._on_their_way)
            if not before:
                return False
            if not self._changed.wait_for(lambda: len(self._on_their_way) < before, seconds):
                raise ConnectionLostError(f"no answer from the server within {seconds:.1f} s", errno.ETIMEDOUT)
        return True

    def end(self, begun: _Transfer) -> int:
        seconds = self._wire.silent_seconds
        if not begun.ended.wait(seconds):
            where = f"{self._wire.server_name}:{self._wire.port}"
            raise ConnectionLostError(f"no answer from {where} within {seconds:.1f} s", errno.ETIMEDOUT)
        if begun.status is None:
            raise ConnectionLostError("the connection has ended")
        if begun.status == NtStatus.STATUS_END_OF_FILE and begun.buffer is not None:
            return 0
        if begun.status != NtStatus.STATUS_SUCCESS:
            raise Refused(begun.status)
        if begun.buffer is None:
            _check_written(begun.nbytes, begun.written_nbytes)
        return begun.nbytes

    def abandon(self, begun: Iterable[_Transfer]) -> None:
        transfers = list(begun)
        if not all(transfer.ended.wait(self._wire.silent_seconds) for transfer in transfers):
            self._wire.transport.cut()
            for transfer in transfers:  # what has arrived is received, then the connection's end
                transfer.ended.wait()

    # --- called by the thread that receives -----------------------------------------------------------------------

    def buffer_for(self, answer: Answer) -> memoryview | None:
        transfer = self._on_their_way.get(answer.message_id)
        if transfer is None:
            return None
        if answer.command != Commands.SMB2_READ or answer.status != NtStatus.STATUS_SUCCESS or transfer.buffer is None:
            return memoryview(b"")
        nbytes = answer.data_nbytes
        if nbytes > len(transfer.buffer) or (nbytes and answer.data_start < ANSWER_NBYTES):
            raise ConnectionLostError(f"an answer of {answer.data_nbytes} bytes from {answer.data_start} on is none")
        return transfer.buffer[: answer.data_nbytes]

    def take(self, answer: Answer, parts: Sequence[Buffer]) -> None:
        with self._wire.sequence_lock:
            self._wire.sequence_window["high"] += answer.credits
        if answer.status == NtStatus.STATUS_PENDING:
            return  # the answer comes later, and this one is not signed
        sign = self._route.sign
        if sign is not None and not is_signed_well(sign, answer, parts):
            raise ConnectionLostError("an answer's signature is wrong: it was changed on the way")
        with self._changed:
            transfer = self._on_their_way.pop(answer.message_id)
            transfer.nbytes = answer.data_nbytes  # or, at the same place, how many were written
            transfer.status = answer.status
            self._changed.notify_all()
        transfer.ended.set()

    def end_all(self) -> None:
        """Tell all who wait that no answer will come."""
        with self._changed:
            self._has_ended = True
            lost, self._on_their_way = self._on_their_way, {}
            self._changed.notify_all()
        for transfer in lost.values():
            transfer.ended.set()
