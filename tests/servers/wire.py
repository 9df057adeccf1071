"""A wire to a server that knows nothing of what goes over it, and can be cut anywhere: for HTTP, SSH and SMB alike.

    with Wire(server.port) as wire:
        ... use 127.0.0.1:wire.port ...
        wire.cut(at=3)                       the third time from now that a client asks: before its question arrives
        wire.cut(at=3, answered=True)        the server does it, and its answer gets lost
        wire.break_off(), wire.mend()        no connections at all, as if the server was killed, and started again
        wire.hold(True), wire.hold(False)    nothing gets through any more, and goes on later

A question is what a client sends before it hears anything; the greetings when a connection begins are some too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Final

_PIECE_NBYTES: Final = 1 << 16
_STEP_SECONDS: Final = 60.0


@dataclass(eq=False)
class _Connection:
    """Both halves of a connection."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    asking: bool = False  # whether the client was the last that said something
    doomed: bool = False  # whether the connection is cut as soon as the server answers

    def cut(self) -> None:
        for half in (self.client, self.server):
            half.transport.abort()


class Wire:
    """See the module."""

    def __init__(self, server_port: int) -> None:
        self.port = 0
        self.questions = self.cuts = 0
        self._server_port = server_port
        self._at, self._answered = 0, False
        self._connections: set[_Connection] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Wire:
        self._thread.start()
        self.mend()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold(False)
        self.break_off()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STEP_SECONDS)
        self._loop.close()

    def cut(self, at: int, *, answered: bool = False) -> None:
        """Lose the question that is the `at`-th from now on, or the answer to it, with its connection; 0 for none."""
        self._at, self._answered = self.questions + at if at else 0, answered

    def mend(self) -> None:
        """Listen, at the same port as before."""
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_STEP_SECONDS)

    def break_off(self) -> None:
        """Cut all connections, and refuse new ones."""
        asyncio.run_coroutine_threadsafe(self._break_off(), self._loop).result(_STEP_SECONDS)

    def hold(self, held: bool) -> None:
        """Keep what is sent from now on until it may go on."""
        self._loop.call_soon_threadsafe(self._flowing.clear if held else self._flowing.set)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _break_off(self) -> None:
        self._listener.close()
        for connection in list(self._connections):
            connection.cut()
        while self._connections:
            await asyncio.sleep(0.001)

    async def _connect(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:  # the server is down: so is what the client sees
            to_client.transport.abort()
            return
        connection = _Connection(to_client, to_server)
        self._connections.add(connection)
        with contextlib.suppress(OSError):
            await asyncio.gather(
                self._carry_questions(connection, from_client), self._carry_answers(connection, from_server)
            )
        connection.cut()
        self._connections.discard(connection)

    async def _carry_questions(self, connection: _Connection, source: asyncio.StreamReader) -> None:
        while data := await source.read(_PIECE_NBYTES):
            if not connection.asking:
                connection.asking = True
                self.questions += 1
                if self.questions == self._at:
                    self.cuts += 1
                    if not self._answered:
                        raise ConnectionResetError
                    connection.doomed = True
            await self._flowing.wait()
            connection.server.write(data)
            await connection.server.drain()
        connection.server.write_eof()

    async def _carry_answers(self, connection: _Connection, source: asyncio.StreamReader) -> None:
        while data := await source.read(_PIECE_NBYTES):
            connection.asking = False
            if connection.doomed:
                raise ConnectionResetError
            connection.client.write(data)
            await connection.client.drain()
        raise ConnectionResetError  # nobody waits for questions that are never answered
