"""Whether a port can be listened on, and if not, who has it.

It has to be asked before a service starts: gRPC servers share a port with SO_REUSEPORT, so a second one would start
without complaint and get half of the calls.
"""

from __future__ import annotations

import dataclasses
import errno
import socket
import textwrap
import time
from collections.abc import Callable

import psutil

from tandem.cli.address import Address
from tandem.cli.errors import CliError

# A port may also be the near end of somebody's outgoing connection, which the system chose by chance: the services' default
# ports lie in the range that it chooses from. It gives the port back when the connection ends, ...
_PASSING_SECONDS = 3.0
# ... or, where the near end closed first, a minute (Linux) after that.
_LINGERING_SECONDS = 65.0
_POLL_SECONDS = 0.1
_COMMAND_CHARACTERS = 300


def require_free(address: Address, service: str, variable: str, note: Callable[[str], None]) -> None:
    """Raises CliError if `address` can't be listened on, nor can soon; `note` is told of a wait that takes longer."""
    began = time.monotonic()
    told = False
    while not _try_to_listen(address, service, variable):
        use = _use(address.port)
        patience = _LINGERING_SECONDS if use.lingers else 0.0 if use.listens else _PASSING_SECONDS
        if time.monotonic() - began >= patience:
            raise CliError(f"port {address.port} is in use{use.holder}: set {variable} to another host:port")
        if use.lingers and not told:
            note(f"port {address.port} is held by a connection that has ended (TIME-WAIT): waiting, a minute at most")
            told = True
        time.sleep(_POLL_SECONDS)


def _try_to_listen(address: Address, service: str, variable: str) -> bool:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the services do: what lingers of connections that an earlier run had accepted doesn't count then.
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """What a port is used for. `holder` is ` (by pid 123: python -m draft_service)`, as far as this user may know it."""

    listens: bool = False
    lingers: bool = False
    """Nobody has it any more, but for the system, which waits for what may still be under way."""
    holder: str = ""


def _use(port: int) -> _Use:
    try:
        connections = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return _Use(listens=True)
    # A socket's local address is (host, port), or empty while it isn't bound.
    users = [connection for connection in connections if connection.laddr[1:2] == (port,)]
    users.sort(
        key=lambda user: (user.status != psutil.CONN_LISTEN, user.status == psutil.CONN_TIME_WAIT, user.pid is None)
    )
    if not users:
        return _Use()
    first = users[0]
    if first.status == psutil.CONN_TIME_WAIT:
        return _Use(lingers=True, holder=" (by connections that have ended: TIME-WAIT)")
    listens = first.status == psutil.CONN_LISTEN
    if first.pid is None:
        return _Use(listens)
    how = "" if listens else "for an outgoing connection, "
    return _Use(listens, holder=f" ({how}by pid {first.pid}{_command(first.pid)})")


def _command(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""
    return f": {textwrap.shorten(command, _COMMAND_CHARACTERS, placeholder=' ...')}" if command else ""
