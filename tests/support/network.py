"""A network namespace for a service, joined to this one by a pair of virtual interfaces: a cable that can be pulled.

What a proxy can't do: while the cable is out no packet gets through and none is answered, not even one that would reset a
connection. It needs root and `ip` of iproute2, and losses and delays need `tc` and a kernel with netem; `missing` and
`netem_missing` say what isn't there.
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
from types import TracebackType

# For benchmarks of networks: nobody's own. Of it each link has a subnet of two addresses.
_RANGE = list(ipaddress.ip_network("198.18.0.0/15").subnets(new_prefix=30))
_numbers = itertools.count()


class Link:
    """A context manager: a namespace, and the link to it. Stop what runs there before the end."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.namespace = f"tandem-{os.getpid()}-{number}"
        here, there = _RANGE[(os.getpid() * 16 + number) % len(_RANGE)].hosts()
        self.address = str(there)
        """Of the namespace, as it is reached from here."""
        self._here = str(here)
        self._interface = f"td{os.getpid()}-{number}"
        self._inside = "inside"

    def __enter__(self) -> Link:
        _run("ip", "netns", "add", self.namespace)
        try:
            pair = ("type", "veth", "peer", "name", self._inside, "netns", self.namespace)
            _run("ip", "link", "add", self._interface, *pair)
            _run("ip", "addr", "add", f"{self._here}/30", "dev", self._interface)
            _run("ip", "link", "set", self._interface, "up")
            _run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/30", "dev", self._inside)
            _run("ip", "-n", self.namespace, "link", "set", "lo", "up")
            self.join()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _run("ip", "netns", "del", self.namespace)

    def cut(self) -> None:
        """Pulls the cable. At the far end: here the packets would be routed elsewhere instead, and perhaps be answered."""
        _run("ip", "-n", self.namespace, "link", "set", self._inside, "down")

    def join(self) -> None:
        """Puts it back."""
        _run("ip", "-n", self.namespace, "link", "set", self._inside, "up")

    def impair(self, *netem: str) -> None:
        """What is sent from here is lost or late, as `tc`'s netem is told: "loss", "20%"."""
        _run("tc", "qdisc", "replace", "dev", self._interface, "root", "netem", *netem)

    def heal(self) -> None:
        """Ends that."""
        _run("tc", "qdisc", "del", "dev", self._interface, "root")


@functools.lru_cache(maxsize=1)
def missing() -> str:
    """Why there can be no links; empty if there can."""
    if shutil.which("ip") is None:
        return "network namespaces: no `ip` (iproute2) on the path"
    if os.geteuid() != 0:
        return "network namespaces: only root can make them"
    try:
        with Link() as link:
            return "" if _answers(link.address) else "network namespaces: packets don't get to them and back"
    except (subprocess.SubprocessError, OSError) as error:
        return f"network namespaces: {_words(error)}"


@functools.lru_cache(maxsize=1)
def netem_missing() -> str:
    """Why a link can't lose or delay packets; empty if it can."""
    if missing():
        return missing()
    try:
        with Link() as link:
            link.impair("delay", "1ms")
            link.heal()
            return ""
    except (subprocess.SubprocessError, OSError) as error:
        return f"lossy and slow links: {_words(error)}"


def _answers(address: str) -> bool:
    """Whether a closed port refuses a connection, as it does where nothing lies in between."""
    try:
        socket.create_connection((address, 9), timeout=10).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)


def _words(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"`{' '.join(error.cmd)}` says {error.stderr.strip()!r}"
    return str(error)
