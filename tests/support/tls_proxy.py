"""A TLS front for a server that speaks none, with client certificates required; in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from types import TracebackType


class TlsProxy:
    """A context manager: listens on a free port of the loopback interface and forwards what comes, decrypted."""

    def __init__(self, context: ssl.SSLContext, server_port: int) -> None:
        self._context = context
        self._server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.accepted = 0

    def __enter__(self) -> TlsProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def drop_connections(self) -> None:
        """Ends every open connection."""
        asyncio.run_coroutine_threadsafe(self._drop(), self._loop).result(60)

    async def _start(self) -> None:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=self._context)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._listener.close()
        await self._drop()

    async def _drop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.ensure_future(self._forward(client_reader, client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forward(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        server_reader, server = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            _, pending = await asyncio.wait(
                {
                    asyncio.ensure_future(_copy(client_reader, server)),
                    asyncio.ensure_future(_copy(server_reader, client)),
                },
                return_when=asyncio.FIRST_COMPLETED,
            )
            for task in pending:
                task.cancel()
        finally:
            for writer in (client, server):
                writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()
