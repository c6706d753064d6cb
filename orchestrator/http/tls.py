"""TLS of the HTTP face, with the files that gRPC is served with too, and as there following them when they change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from tandem.transport_security import ServerFiles

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


class FollowedContext:
    """What to listen with: each new connection is served with what the files held last. gRPC has checked them before."""

    def __init__(self, files: ServerFiles) -> None:
        self._files = files
        self._current = _made(files)
        self.context = _made(files)
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called in every handshake. Certificate, key and the CA of clients are taken from the context that is set here.
        connection.context = self._current

    async def follow(self) -> None:
        """Looks for changes until it is cancelled."""
        held = _read(self._files)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                contents = await asyncio.to_thread(_read, self._files)
                if contents != held:
                    held = contents
                    self._current = _made(self._files)
                    log.info("the certificates have changed")
            except OSError:
                log.exception("the changed certificates can't be used; the former ones stay in force")


def _made(files: ServerFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(files.client_ca)
    return context


def _read(files: ServerFiles) -> list[bytes]:
    return [Path(name).read_bytes() for name in (files.certificate, files.key, files.client_ca) if name]
