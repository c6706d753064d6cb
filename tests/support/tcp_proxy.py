"""A TCP proxy that misbehaves on demand: it delays, throttles, stalls, swallows, half-closes, resets and refuses.

It lives in the event loop of the test. Each direction has its own faults, which apply to all connections, open ones
included, from the next chunk on.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType

from tests.support.ports import free_port

_CHUNK = 65536


class Direction(Enum):
    """Which way the bytes go."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


@dataclass
class Faults:
    """What happens to the chunks of one direction, and what has passed so far."""

    delay: float = 0.0
    """Seconds that each chunk is held back."""
    bytes_per_second: float | None = None
    silent: bool = False
    """Chunks are read and thrown away, the connection stays: how a cut network looks."""
    lose_chunks: int = 0
    """So many chunks are thrown away from now on."""
    close_after_loss: bool = True
    """Whether the connection of a thrown away chunk is closed."""
    chunks: int = 0
    passed_bytes: int = 0
    lost_chunks: int = 0


@dataclass(eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def writer(self, direction: Direction) -> asyncio.StreamWriter:
        return self.server if direction is Direction.TO_SERVER else self.client


class TcpProxy:
    """Listens on a free port of the loopback interface and forwards to one server; an async context manager."""

    def __init__(self, server_host: str, server_port: int) -> None:
        self.server_host = server_host
        self.server_port = server_port
        self.host = "127.0.0.1"
        self.port = 0
        self.faults = {direction: Faults() for direction in Direction}
        self.refusing = False
        self.accepted = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._listener: asyncio.Server | None = None
        self._connections: set[_Connection] = set()

    async def __aenter__(self) -> TcpProxy:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Listens, on the same port again after a `stop_listening`."""
        self.port = self.port or free_port()
        self._listener = await asyncio.start_server(self._accept, self.host, self.port)

    def stop_listening(self) -> None:
        """New connections are refused by the kernel; open ones go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        """Resets all connections and stops."""
        self.stop_listening()
        tasks = [task for connection in self._connections for task in connection.tasks]
        self.reset()
        self._flowing.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def open_connections(self) -> int:
        """Connections that are forwarded now."""
        return len(self._connections)

    def delay(self, seconds: float) -> None:
        """Holds back every chunk in both directions."""
        for faults in self.faults.values():
            faults.delay = seconds

    def limit_bandwidth(self, bytes_per_second: float | None) -> None:
        """Limits each direction of each connection."""
        for faults in self.faults.values():
            faults.bytes_per_second = bytes_per_second

    def cut(self, silent: bool = True) -> None:
        """Swallows everything in both directions, without closing anything; `cut(False)` heals new chunks."""
        for faults in self.faults.values():
            faults.silent = silent

    def stall(self) -> None:
        """Holds all bytes until `resume`; none is lost."""
        self._flowing.clear()

    def resume(self) -> None:
        """Ends a stall."""
        self._flowing.set()

    def lose_next(self, direction: Direction, chunks: int = 1, close: bool = True) -> None:
        """Throws away the next chunks of a direction; `close` says whether each takes its connection along."""
        faults = self.faults[direction]
        faults.lose_chunks = chunks
        faults.close_after_loss = close

    def heal(self) -> None:
        """Ends all of these."""
        self.cut(silent=False)
        self.delay(0.0)
        self.limit_bandwidth(None)
        for faults in self.faults.values():
            faults.lose_chunks = 0
        self.refusing = False
        self.resume()

    def half_close(self, direction: Direction) -> None:
        """Sends end-of-stream in one direction of every open connection; the other direction goes on."""
        for connection in self._connections:
            writer = connection.writer(direction)
            if writer.can_write_eof() and not writer.is_closing():
                writer.write_eof()

    def reset(self) -> None:
        """Aborts every open connection with a TCP reset."""
        for connection in list(self._connections):
            _abort(connection)

    async def _accept(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            if self.refusing:
                raise ConnectionRefusedError
            server_reader, server = await asyncio.open_connection(self.server_host, self.server_port)
        except OSError:
            client.transport.abort()
            return
        connection = _Connection(client, server)
        connection.tasks = [
            asyncio.ensure_future(self._forward(connection, Direction.TO_SERVER, client_reader)),
            asyncio.ensure_future(self._forward(connection, Direction.TO_CLIENT, server_reader)),
        ]
        self._connections.add(connection)
        await asyncio.gather(*connection.tasks, return_exceptions=True)
        self._connections.discard(connection)
        for writer in (client, server):
            writer.transport.abort()

    async def _forward(self, connection: _Connection, direction: Direction, reader: asyncio.StreamReader) -> None:
        faults, writer = self.faults[direction], connection.writer(direction)
        with contextlib.suppress(OSError):
            while chunk := await reader.read(_CHUNK):
                if faults.delay:
                    await asyncio.sleep(faults.delay)
                if faults.bytes_per_second:
                    await asyncio.sleep(len(chunk) / faults.bytes_per_second)
                await self._flowing.wait()
                if self._loses(faults):
                    if not faults.silent and faults.close_after_loss:
                        _abort(connection)
                        return
                    continue
                faults.chunks += 1
                faults.passed_bytes += len(chunk)
                writer.write(chunk)
                await writer.drain()
            if not writer.is_closing():
                writer.write_eof()

    def _loses(self, faults: Faults) -> bool:
        if faults.lose_chunks:
            faults.lose_chunks -= 1
        elif not faults.silent:
            return False
        faults.lost_chunks += 1
        return True


def _abort(connection: _Connection) -> None:
    for writer in (connection.client, connection.server):
        underlying = writer.get_extra_info("socket")
        # Without lingering a close is a reset, and what waits in the buffers is gone.
        with contextlib.suppress(OSError):
            underlying.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
