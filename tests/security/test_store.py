"""The store over TLS: who is refused, and certificates that change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.session_store import SessionStore, StoreConfig, StoreUnavailable
from tandem.transport_security import ClientFiles
from tests.support.authority import Authority, server_context
from tests.support.redis_servers import RedisServer
from tests.support.tls_proxy import TlsProxy

pytest_plugins = ("tests.support.redis_fixtures",)

HOST = "127.0.0.1"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "inside")


@pytest.fixture
def front(authority: Authority, one_redis_server: RedisServer) -> Iterator[TlsProxy]:
    context = server_context(str(authority.folder / "ca.pem"), *authority.issue("server", HOST))
    with TlsProxy(context, one_redis_server.port) as running:
        yield running


async def _ping(front: TlsProxy, files: ClientFiles) -> None:
    url = f"rediss://{HOST}:{front.port}/0"
    store = await SessionStore.connect(StoreConfig(url=url, tls=files, retry_seconds=0))
    try:
        await store.ping()
    finally:
        await store.close()


async def test_only_certificates_of_the_right_authority(authority: Authority, front: TlsProxy, tmp_path: Path) -> None:
    right, other = authority.client("orchestrator", "o.example"), Authority(tmp_path / "outside")
    await _ping(front, right)
    wrong = [
        ClientFiles(right.ca),
        ClientFiles(right.ca, *other.issue("orchestrator", "o.example")),
        ClientFiles(str(other.folder / "ca.pem"), right.certificate, right.key),
    ]
    for files in wrong:
        with pytest.raises(StoreUnavailable):
            await _ping(front, files)


async def test_a_certificate_that_changes_is_followed(authority: Authority, front: TlsProxy, tmp_path: Path) -> None:
    files, other = authority.client("orchestrator", "o.example"), Authority(tmp_path / "outside")
    url = f"rediss://{HOST}:{front.port}/0"
    store = await SessionStore.connect(StoreConfig(url=url, tls=files, retry_seconds=0))
    await store.ping()
    other.issue("orchestrator", "o.example")
    _overwrite(authority, other)
    await store.ping()
    front.drop_connections()
    with pytest.raises(StoreUnavailable):
        for _ in range(2):  # the first may meet the connection that was dropped
            await store.ping()
    authority.issue("orchestrator", "o.example")
    await store.ping()
    await store.close()


def _overwrite(authority: Authority, other: Authority) -> None:
    for name in ("orchestrator.pem", "orchestrator.key"):
        (authority.folder / name).write_bytes((other.folder / name).read_bytes())


def test_a_ca_needs_an_encrypted_address() -> None:
    with pytest.raises(ValueError, match="rediss"):
        StoreConfig(url="redis://:secret@host:1/0", tls=ClientFiles("ca.pem"))
