"""The socket under smbprotocol: with time limits, and with a way for data past it.

    messages of smbprotocol  <->  send, recv
    READ and WRITE            ->  send_parts; their answers go to whoever waits for them, the data into his memory

smbprotocol makes a socket of its own class when it connects; `dcp_nvcomp.storage.file_servers.smb_login` puts this one
in its place, which has the same methods.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from dcp_nvcomp.storage.file_servers.session import ConnectionLostError
from dcp_nvcomp.storage.file_servers.smb_packets import ANSWER_NBYTES, Answer, Buffer


class Receiver(Protocol):
    """Who takes answers that smbprotocol does not see."""

    def buffer_for(self, answer: Answer) -> memoryview | None:
        """Return where the data of an answer go, which may be nowhere; None if smbprotocol awaits the answer."""

    def take(self, answer: Answer, parts: Sequence[Buffer]) -> None:
        """Take an answer, all of whose bytes were received."""

    def end_all(self) -> None:
        """Hear that no more answers will come."""


class SmbSocket:
    """A connection over TCP, each message of which begins with its length.

    Attributes:
        connected: whether it is, as far as we know.
        receiver: who takes answers past smbprotocol.
    """

    def __init__(self, host: str, port: int, timeout: float) -> None:
        self._address, self._timeout = (host, port), timeout
        self._socket: Any = None
        self._sending, self._closing = threading.Lock(), threading.Lock()
        self.connected = False
        self.receiver: Receiver | None = None

    def connect(self) -> None:
        """Connect; ValueError, as smbprotocol's own says, if that can't be."""
        try:
            self._socket = socket.create_connection(self._address, timeout=self._timeout)
        except OSError as error:
            raise ValueError(f"Failed to connect to {self._address[0]}:{self._address[1]}: {error}") from error
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self.connected = True

    def limit(self, silent_seconds: float) -> None:
        """Set how long the server may take nothing of what is sent; OSError if the socket is closed."""
        seconds = max(silent_seconds, 0.001)
        timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def cut(self) -> None:
        """End the connection at once: who waits for it is told."""
        if self.connected:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket, by the thread that receives or when it has ended."""
        with self._closing:
            if not self.connected:
                return
            self.connected = False
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self.receiver is not None:
            self.receiver.end_all()

    def send(self, message: Any) -> None:
        """Send one message of smbprotocol."""
        self.send_parts((message if isinstance(message, bytes) else message.pack(),))

    def send_parts(self, parts: Sequence[Buffer]) -> None:
        """Send one message that is in parts."""
        length = sum(map(len, parts)).to_bytes(4, "big")
        waiting = [memoryview(part) for part in (length, *parts)]
        with self._sending:
            while waiting:
                sent = self._socket.sendmsg(waiting)
                while waiting and sent >= len(waiting[0]):
                    sent -= len(waiting.pop(0))
                if sent:
                    waiting[0] = waiting[0][sent:]

    def recv(self, timeout: float) -> bytes:
        """Return the next message for smbprotocol, b"" at the end."""
        end = time.monotonic() + timeout
        while True:
            if not self._poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError(f"nothing was received for {timeout:.1f} s")
            length = bytearray(4)
            if not self._fill(length):
                self.close()
                return b""
            nbytes = int.from_bytes(length, "big")
            message = bytearray(min(nbytes, ANSWER_NBYTES))
            self._must_fill(message)
            answer = Answer.read(message)
            buffer = None
            if answer is not None and self.receiver is not None and not answer.next_command:
                buffer = self.receiver.buffer_for(answer)
            if answer is None or buffer is None:
                rest = bytearray(nbytes - len(message))
                self._must_fill(rest)
                return bytes(message + rest)
            self._receive(answer, message, nbytes, buffer)
            end = time.monotonic() + timeout

    def _receive(self, answer: Answer, message: bytearray, nbytes: int, buffer: memoryview) -> None:
        """Receive what comes after a message's beginning: padding, data, and what else there is."""
        padding = bytearray(answer.data_start - len(message) if len(buffer) else 0)
        rest = bytearray(nbytes - len(message) - len(padding) - len(buffer))
        for part in (padding, buffer, rest):
            self._must_fill(part)
        assert self.receiver is not None
        self.receiver.take(answer, (message, padding, buffer, rest))

    def _must_fill(self, buffer: bytearray | memoryview) -> None:
        if not self._fill(buffer):
            raise ConnectionLostError(f"{self._address[0]}:{self._address[1]} ended the connection within a message")

    def _fill(self, buffer: bytearray | memoryview) -> bool:
        """Fill a buffer; return False if the connection ends before."""
        view, position = memoryview(buffer), 0
        while position < len(view):
            try:
                received = self._socket.recv_into(view[position:])
            except (ConnectionResetError, ConnectionAbortedError):
                received = 0
            if not received:
                return False
            position += received
        return True
