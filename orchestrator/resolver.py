"""From the addresses that an operator wrote down to those of the replicas that are there now.

A name may stand for many replicas (a headless Service has one address for each ready pod), and for others a minute later.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""From a host name and a port to IP addresses; raises OSError where there is no answer."""


async def resolve_by_dns(host: str, port: int) -> Sequence[str]:
    """All addresses of the name, of one family only: a pod with an IPv4 and an IPv6 address is one replica."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    wanted = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(address[0]) for family, _, _, _, address in found if family == wanted})


def split(address: str) -> tuple[str, int]:
    """host:port, with an IPv6 address in brackets or without."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def joined(host: str, port: int) -> str:
    """host:port as gRPC takes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_name(address: str) -> bool:
    """Whether the host of host:port has to be resolved."""
    try:
        ipaddress.ip_address(split(address)[0])
    except ValueError:
        return True
    return False


async def resolved(address: str, resolve: Resolve) -> set[str]:
    """The host:port of each replica behind one address; raises OSError."""
    if not is_name(address):
        return {address}
    host, port = split(address)
    return {joined(found, port) for found in await resolve(host, port)}
