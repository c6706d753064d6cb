"""Connections to where the store's URL says: one primary, the primary that Sentinels name, or a Redis Cluster."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, ConnectionPool, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from .redis_nodes import Address, ClusterNodes, Nodes, OnePrimary
from .redis_tls import FollowingSSLConnection

_SINGLE = ("redis", "rediss", "unix")
_SENTINEL = ("redis+sentinel", "rediss+sentinel")
_CLUSTER = ("redis+cluster", "rediss+cluster")
_SENTINEL_CONNECTIONS = 4
"""Times the connections of an ordinary pool: a Sentinel's pool raises at its limit, where the other waits."""
_SENTINELS_LOGIN = {"sentinel_username": "username", "sentinel_password": "password"}
"""The settings that a Sentinel address takes after a '?', and what the library calls them."""
_SHARE_OF_ASKING = 4
"""So many nodes of a cluster can be asked who serves what within the time of one exchange."""
_ENCODE = "a password's special characters must be percent-encoded"
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


class _FollowingSentinelConnection(SentinelManagedConnection, FollowingSSLConnection):
    """To the primary that Sentinels name, over TLS."""


def is_encrypted(url: str) -> bool:
    """Whether the address asks for TLS."""
    return urlsplit(url).scheme.startswith("rediss")


def check_url(url: str) -> None:
    """Raises ValueError in words that don't repeat the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError(f"the address can't be read; {_ENCODE}") from None
    if parts.scheme in (*_SENTINEL, *_CLUSTER):
        _SeveralHosts.parse(url)
        return
    if "sentinel" in parts.scheme:
        raise ValueError(f"Sentinel addresses are {_SENTINEL[0]}://host:port,host:port/service; over TLS, rediss")
    if "cluster" in parts.scheme or "," in parts.netloc:
        raise ValueError(f"Redis Cluster addresses are {_CLUSTER[0]}://host:port,host:port; over TLS, rediss")
    if parts.scheme not in _SINGLE:
        raise ValueError(f"the store's URL must start with one of {', '.join(f'{scheme}://' for scheme in _SINGLE)}")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError(f"the port is no number; {_ENCODE}") from None
    if "#" in url:
        raise ValueError(f"{parts.scheme}://: nothing may follow a '#'; {_ENCODE}")
    if parts.scheme != "unix" and not re.fullmatch(r"/?|/[0-9]+/?", parts.path):
        raise ValueError(f"{parts.scheme}://: what follows the host must be a database's number; {_ENCODE}")
    _check_settings(url)


def _check_settings(url: str) -> None:
    """Those after the '?' of one server's URL. The client library passes over blank ones, and finds out about unknown ones with each
    connection. Raises ValueError in words that don't repeat them: they may be a part of a password."""
    parts = urlsplit(url)
    given = parse_qsl(parts.query, keep_blank_values=True)
    if (parts.query and not given) or not all(value for _, value in given):
        raise ValueError(f"{parts.scheme}://: each setting after the '?' must be name=value; {_ENCODE}")
    for place, setting in enumerate(given, 1):
        alone = urlunsplit((parts.scheme, "localhost", "", urlencode([setting]), ""))
        try:
            _pool(alone, **parse_url(alone)).make_connection()  # type: ignore[no-untyped-call]
        except (AttributeError, TypeError, ValueError, RedisError):
            problem = (
                f"setting {place} after the '?' is none that the client library takes, or has no value that it takes"
            )
            raise ValueError(f"{parts.scheme}://: {problem}; {_ENCODE}") from None


def make_nodes(url: str, settings: dict[str, Any], size: int, wait_seconds: float) -> Nodes:
    """The store that the URL names. `settings` are those of each connection, `size` their number for each node, and
    `wait_seconds` how long one exchange may take."""
    scheme = urlsplit(url).scheme
    limits = {"max_connections": size, "timeout": wait_seconds}
    if scheme in _SENTINEL:
        return OnePrimary(_sentinel_pool(url, settings, size, wait_seconds))
    if scheme not in _CLUSTER:
        # The URL can't undo a setting.
        return OnePrimary(_pool(url, **{**parse_url(url), **settings, **limits}))
    hosts = _SeveralHosts.parse(url)

    def pool_for(host: str, port: int) -> ConnectionPool:
        return _pool(url, **hosts.login, **settings, **limits, host=host, port=port)

    return ClusterNodes(hosts.addresses, pool_for, wait_seconds / _SHARE_OF_ASKING)


def _pool(url: str, **settings: Any) -> ConnectionPool:
    if is_encrypted(url):
        settings["connection_class"] = FollowingSSLConnection
    return BlockingConnectionPool(**settings)


def _sentinel_pool(url: str, settings: dict[str, Any], size: int, wait_seconds: float) -> ConnectionPool:
    hosts, encrypted = _SeveralHosts.parse(url), is_encrypted(url)
    asking = {
        **hosts.sentinels_login,
        **{name: value for name, value in settings.items() if name.startswith("ssl_")},
        "socket_timeout": wait_seconds,
        "socket_connect_timeout": settings["socket_connect_timeout"],
        # One that is away must not use up the time in which the next could have been asked.
        "retry": Retry(NoBackoff(), 0),
        "connection_class": FollowingSSLConnection if encrypted else Connection,
    }
    manager = Sentinel([])  # type: ignore[no-untyped-call]
    manager.sentinels = [
        Redis.from_pool(ConnectionPool(host=host, port=port, **asking)) for host, port in hosts.addresses
    ]
    connection_class: type[AbstractConnection] = (
        _FollowingSentinelConnection if encrypted else SentinelManagedConnection
    )
    return SentinelConnectionPool(  # type: ignore[no-untyped-call]
        hosts.service,
        manager,
        connection_class=connection_class,
        max_connections=size * _SENTINEL_CONNECTIONS,
        db=hosts.database,
        **hosts.login,
        **settings,
    )


@dataclass(frozen=True, slots=True)
class _SeveralHosts:
    """What the URL of several Sentinels, or of several nodes of a cluster, says."""

    addresses: list[Address]
    login: dict[str, str | None]
    """User and password, the primaries'."""
    sentinels_login: dict[str, str]
    """Those of the Sentinels; empty: they want none."""
    service: str
    database: int

    @classmethod
    def parse(cls, url: str) -> _SeveralHosts:
        """Raises ValueError in words that don't repeat the URL."""
        scheme, _, rest = url.partition("://")
        rest, _, settings = rest.partition("?")
        sentinels_login = _sentinels_login(scheme, settings)
        authority, _, path = rest.partition("/")
        login, _, hosts = authority.rpartition("@")
        user, _, password = login.partition(":")
        service, _, database = path.partition("/")
        if scheme in _CLUSTER and path not in ("", "0"):
            raise ValueError(f"a Redis Cluster has only database 0: {scheme}://host:port,host:port")
        if scheme in _SENTINEL and (not service or (database and not database.isdigit())):
            raise ValueError(f"a Sentinel address is {scheme}://host:port,host:port/service/database")
        addresses = [part.rpartition(":") for part in hosts.split(",")]
        if not all(_HOST.fullmatch(host) and port.isdigit() and int(port) < 65536 for host, _, port in addresses):
            raise ValueError("each Sentinel, or node of a cluster, must be given as host:port")
        return cls(
            addresses=[(host.strip("[]"), int(port)) for host, _, port in addresses],
            login={"username": unquote(user) or None, "password": unquote(password) or None},
            sentinels_login=sentinels_login,
            service=unquote(service),
            database=int(database or 0),
        )


def _sentinels_login(scheme: str, settings: str) -> dict[str, str]:
    """From what follows the '?'. Raises ValueError in words that don't repeat it."""
    known = _SENTINELS_LOGIN if scheme in _SENTINEL else {}
    given = parse_qsl(settings, keep_blank_values=True)
    names = [name for name, _ in given]
    if (settings and not given) or not all(name in known for name in names) or len(set(names)) < len(names):
        takes = f"only {' and '.join(known)}" if known else "no settings"
        raise ValueError(f"{scheme}:// takes {takes} after a '?'; in a password it must be percent-encoded")
    if "sentinel_username" in names and "sentinel_password" not in names:
        raise ValueError(f"{scheme}://: sentinel_username needs sentinel_password")
    if blank := [name for name, value in given if not value]:
        # Most likely a variable that was not set: dropped, it would be no login at all.
        raise ValueError(f"{scheme}://: {' and '.join(blank)} must not be empty")
    return {known[name]: value for name, value in given}
