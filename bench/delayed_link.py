"""A stretch of network between two services: what is sent over it arrives later, and no faster than its bandwidth.

Unlike a proxy that sleeps between reading and writing, it holds any number of bytes under way at once, as a cable does. Threads with
blocking sockets, since an event loop rounds its waits up to milliseconds.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from types import TracebackType
from typing import Self

_CHUNK = 1 << 16


class DelayedLink:
    """Listens on a free loopback port and forwards to one server; a context manager."""

    def __init__(self, server: str, round_trip_seconds: float = 0.0, bytes_per_second: float = float("inf")) -> None:
        """`server`: host:port."""
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        self.round_trip_seconds = round_trip_seconds
        """Half of it each way; may be changed at any time, for what is read from then on."""
        self.bytes_per_second = bytes_per_second
        """Of each direction of each connection; may be changed likewise."""

    @property
    def address(self) -> str:
        """Where to connect to, host:port."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in (self._listener, *self._open):
            # A close alone leaves a thread blocked in accept or recv.
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # the end of the link
            try:
                server = socket.create_connection(self._server)
            except OSError:
                client.close()
                continue
            for source, sink in ((client, server), (server, client)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._open.add(source)
                under_way: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                threading.Thread(target=self._depart, args=(source, under_way), daemon=True).start()
                threading.Thread(target=_arrive, args=(sink, under_way), daemon=True).start()

    def _depart(self, source: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        line_free = 0.0
        chunk = b"?"
        while chunk:
            try:
                chunk = source.recv(_CHUNK)
            except OSError:
                chunk = b""
            line_free = max(line_free, time.monotonic()) + len(chunk) / self.bytes_per_second
            under_way.put((line_free + self.round_trip_seconds / 2, chunk))


def _arrive(sink: socket.socket, under_way: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    with contextlib.suppress(OSError):
        while True:
            due, chunk = under_way.get()
            time.sleep(max(0.0, due - time.monotonic()))
            if not chunk:
                sink.shutdown(socket.SHUT_WR)
                return
            sink.sendall(chunk)
