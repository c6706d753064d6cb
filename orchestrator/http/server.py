"""uvicorn inside a running event loop: it takes no signals, and ends when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from tandem.grpc_server import PortError
from tandem.transport_security import ServerFiles

from .tls import FollowedContext

KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections, so that none sends a request into one that is being closed."""
_PROBES = (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))


def bind(listen: str, variable: str, unread_seconds: float) -> socket.socket:
    """A listening socket at host:port; raises PortError that names the variable. Its connections end when their peer has
    vanished, or has taken nothing for `unread_seconds`."""
    host, _, port = listen.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=1024)
    except OSError as error:
        raise PortError(f"{variable}: can't listen on {listen!r}: {error.strerror}") from error
    # What is accepted inherits these.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_PROBES, ("TCP_USER_TIMEOUT", int(unread_seconds * 1000))):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return listener


class HttpServer:
    """Serves an application on a socket until it is closed."""

    def __init__(self, app: Starlette, listener: socket.socket, files: ServerFiles, close_seconds: int) -> None:
        followed = FollowedContext(files) if files.certificate else None
        self._server = _Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ssl_context_factory=None if followed is None else lambda *_: followed.context,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=close_seconds,
            )
        )
        self._task = asyncio.create_task(self._server.serve([listener]))
        self._renewal = None if followed is None else asyncio.create_task(followed.follow())

    async def close(self) -> None:
        """Takes no more connections, lets responses end for a moment, and cuts off the rest."""
        if self._renewal is not None:
            self._renewal.cancel()
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They belong to the service as a whole."""
        yield
