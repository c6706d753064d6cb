"""A TcpProxy with an event loop of its own, for tests that don't run in one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType

from tests.support.tcp_proxy import TcpProxy


class ProxyThread:
    """A context manager; `do` runs something on the proxy, in its loop."""

    def __init__(self, server_host: str, server_port: int) -> None:
        self._proxy = TcpProxy(server_host, server_port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def port(self) -> int:
        """Where it listens, on the loopback interface."""
        return self._proxy.port

    def do(self, action: Callable[[TcpProxy], object]) -> None:
        """Runs `action`, and returns when it has run."""

        async def act() -> None:
            action(self._proxy)

        asyncio.run_coroutine_threadsafe(act(), self._loop).result(60)

    def __enter__(self) -> ProxyThread:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._proxy.start(), self._loop).result(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._proxy.close(), self._loop).result(60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
