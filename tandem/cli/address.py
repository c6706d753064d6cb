"""host:port, as it is written in flags and variables."""

from __future__ import annotations

import dataclasses

from tandem.cli.errors import USAGE, CliError

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens, or is reached."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def reachable(self) -> Address:
        """The address to connect to: one listens on a wildcard, but can't call it."""
        return Address(_WILDCARDS.get(self.host, self.host), self.port)

    def same_place(self, other: Address) -> bool:
        """Whether both lead to one service; all names of loopback do."""
        return self._place() == other._place()

    def _place(self) -> tuple[str, int]:
        host = self.reachable().host.lower()
        return "localhost" if host in _LOOPBACK else host, self.port


def parse_address(text: str, variable: str) -> Address:
    """Reads host:port or [v6]:port; a port alone, with or without its colon, is on loopback. Errors name the variable."""
    host, _, port = text.strip().rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536 or host.count("[") != host.count("]"):
        raise CliError(f"{variable}={text!r} is not an address: expected host:port, port 1 to 65535", USAGE)
    return Address(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))
