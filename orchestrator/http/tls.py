"""TLS of the HTTP face, with the files that gRPC is served with too."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from tandem.transport_security import ServerFiles

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0


def context_of(files: ServerFiles) -> ssl.SSLContext | None:
    """What to listen with; None for plain text. gRPC has checked the files before."""
    if not files.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if files.client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
    _load(context, files)
    return context


async def follow(context: ssl.SSLContext, files: ServerFiles) -> None:
    """Takes changed files up, for new connections. A CA that is gone from its file is trusted until the service restarts."""
    held = await asyncio.to_thread(_read, files)
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            contents = await asyncio.to_thread(_read, files)
            if contents != held:
                _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)  # raises before the context in use is touched
                _load(context, files)
                held = contents
                log.info("the certificates have changed")
        except OSError:
            log.exception("the changed certificates can't be used; the former ones stay in force")


def _load(context: ssl.SSLContext, files: ServerFiles) -> None:
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca:
        context.load_verify_locations(files.client_ca)


def _read(files: ServerFiles) -> list[bytes]:
    return [Path(name).read_bytes() for name in (files.certificate, files.key, files.client_ca) if name]
