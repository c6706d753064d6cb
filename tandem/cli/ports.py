"""Whether a port can be listened on, and if not, who has it.

It has to be asked before a service starts: gRPC servers share a port with SO_REUSEPORT, so a second one would start
without complaint and get half of the calls.
"""

from __future__ import annotations

import errno
import socket

import psutil

from tandem.cli.address import Address
from tandem.cli.errors import CliError


def require_free(address: Address, service: str, variable: str) -> None:
    """Raises CliError if `address` can't be listened on."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Connections of an earlier run that linger in TIME_WAIT don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CliError(
                    f"{service} can't listen on {address}: {error.strerror or error}; set {variable}"
                ) from error
            raise CliError(
                f"port {address.port} is in use{_holder(address.port)}: set {variable} to another host:port"
            ) from error


def _holder(port: int) -> str:
    """` (by pid 123: python -m draft_service)`, as far as this user may know it."""
    try:
        listeners = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return ""
    for connection in listeners:
        # A socket's local address is (host, port), or empty while it isn't bound.
        if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid is not None:
            return f" (by pid {connection.pid}{_command(connection.pid)})"
    return ""


def _command(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
    return f": {command[:80]}" if command else ""
