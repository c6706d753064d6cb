"""Whether a port can be listened on, and if not, who has it.

It has to be asked before a service starts: gRPC servers share a port with SO_REUSEPORT, so a second one would start
without complaint and get half of the calls.
"""

from __future__ import annotations

import errno
import socket
import time

import psutil

from tandem.cli.address import Address
from tandem.cli.errors import CliError

# A port may also be the near end of somebody's outgoing connection, which the system chose by chance and will give back.
_PASSING_SECONDS = 3.0
_POLL_SECONDS = 0.1


def require_free(address: Address, service: str, variable: str) -> None:
    """Raises CliError if `address` can't be listened on."""
    deadline = time.monotonic() + _PASSING_SECONDS
    while not _try_to_listen(address, service, variable):
        listening, holder = _holder(address.port)
        if listening or time.monotonic() >= deadline:
            raise CliError(f"port {address.port} is in use{holder}: set {variable} to another host:port")
        time.sleep(_POLL_SECONDS)


def _try_to_listen(address: Address, service: str, variable: str) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of an earlier run that linger in TIME_WAIT don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            reason = error.strerror or str(error)
            raise CliError(f"{service} can't listen on {address}: {reason}; set {variable}") from error
    return True


def _holder(port: int) -> tuple[bool, str]:
    """Whether somebody listens there, and ` (by pid 123: python -m draft_service)`, as far as this user may know it."""
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return True, ""
    # A socket's local address is (host, port), or empty while it isn't bound.
    users = [connection for connection in connections if connection.laddr[1:2] == (port,)]
    users.sort(key=lambda connection: (connection.status != psutil.CONN_LISTEN, connection.pid is None))
    if not users:
        return False, ""
    first = users[0]
    listening = first.status == psutil.CONN_LISTEN
    if first.pid is None:
        return listening, ""
    how = "" if listening else "for an outgoing connection, "
    return listening, f" ({how}by pid {first.pid}{_command(first.pid)})"


def _command(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
    return f": {command[:80]}" if command else ""
