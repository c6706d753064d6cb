"""Ports for servers that are started later, in this process or another."""

from __future__ import annotations

import socket
from collections import deque

# Bound and never listened on: the kernel gives such a port to nobody who asks for any, and a server that asks for this very
# one gets it, as both say SO_REUSEADDR. The latest only, since servers are started soon after.
_reserved: deque[socket.socket] = deque(maxlen=64)


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on, and that is given to no one else for now."""
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    if len(_reserved) == _reserved.maxlen:
        _reserved.popleft().close()
    _reserved.append(reservation)
    port: int = reservation.getsockname()[1]
    return port
