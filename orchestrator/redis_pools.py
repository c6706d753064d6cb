"""Connections to wherever the primary is: at an address of its own, or where a Sentinel says."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff

SCHEMES = ("redis", "rediss", "unix")
SENTINEL_SCHEME = "redis+sentinel"
_SENTINEL_CONNECTIONS = 4
"""Times the connections of an ordinary pool: a Sentinel's pool raises at its limit, where the other waits."""
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


def check_url(url: str) -> None:
    """Raises ValueError in words that don't repeat the URL, which may hold a password."""
    parts = urlsplit(url)
    if parts.scheme == SENTINEL_SCHEME:
        _sentinels(url)
        return
    if "sentinel" in parts.scheme:
        raise ValueError(
            f"Sentinel addresses are {SENTINEL_SCHEME}://host:port,host:port/service; over TLS they are not supported"
        )
    if "cluster" in parts.scheme or "," in parts.netloc:
        raise ValueError("Redis Cluster addresses are not supported: give the address of a single primary")
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the store's URL must start with one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("the port is no number; a password's special characters must be percent-encoded") from None


def make_pool(url: str, settings: dict[str, Any], size: int, wait_seconds: float) -> ConnectionPool:
    """A pool whose connections lead to the primary. `settings` are those of each connection."""
    if urlsplit(url).scheme != SENTINEL_SCHEME:
        # The URL can't undo a setting.
        fixed = {**settings, "max_connections": size, "timeout": wait_seconds}
        return BlockingConnectionPool(**{**parse_url(url), **fixed})
    sentinels, service, credentials = _sentinels(url)
    # The password is the primary's; a Sentinel that has one of its own can't be asked.
    asking = {
        "socket_timeout": wait_seconds,
        "socket_connect_timeout": settings["socket_connect_timeout"],
        # One that is away must not use up the time in which the next could have been asked.
        "retry": Retry(NoBackoff(), 0),
    }
    manager = Sentinel(sentinels, sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        service,
        manager,
        connection_class=SentinelManagedConnection,
        max_connections=size * _SENTINEL_CONNECTIONS,
        **credentials,
        **settings,
    )


def _sentinels(url: str) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
    """The Sentinels' addresses, the service's name, and user, password and database of the primary."""
    rest = url.partition("://")[2].partition("?")[0]
    authority, _, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    user, _, password = login.partition(":")
    service, _, database = path.partition("/")
    addresses = [part.rpartition(":") for part in hosts.split(",")]
    if not service or (database and not database.isdigit()):
        raise ValueError(f"a Sentinel address is {SENTINEL_SCHEME}://host:port,host:port/service/database")
    if not all(_HOST.fullmatch(host) and port.isdigit() and int(port) < 65536 for host, _, port in addresses):
        raise ValueError("each Sentinel must be given as host:port")
    credentials = {
        "username": unquote(user) or None,
        "password": unquote(password) or None,
        "db": int(database or 0),
    }
    return [(host.strip("[]"), int(port)) for host, _, port in addresses], unquote(service), credentials
