"""TLS towards the store: the client library's connection, with certificates that follow their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redis.asyncio.connection import SSLConnection

from tandem.transport_security import ClientFiles


def tls_settings(files: ClientFiles) -> dict[str, Any]:
    """The files as the library names them."""
    settings = {"ssl_ca_certs": files.ca, "ssl_certfile": files.certificate, "ssl_keyfile": files.key}
    return {name: value for name, value in settings.items() if value}


class FollowingSSLConnection(SSLConnection):
    """Makes a new TLS context when a file has changed. The library makes one for each connection object, and keeps it
    over reconnections; making one reads all of the system's CAs, too much for each reconnection."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._stamps: tuple[int, ...] = ()

    def _connection_arguments(self) -> Mapping[str, Any]:
        context = self.ssl_context
        files = (context.ca_certs, context.certfile, context.keyfile)
        stamps = tuple(Path(file).stat().st_mtime_ns for file in files if file)
        if stamps != self._stamps:
            context.context, self._stamps = None, stamps
        arguments: Mapping[str, Any] = super()._connection_arguments()
        return arguments
