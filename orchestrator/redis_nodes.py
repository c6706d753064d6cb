"""Who runs a script: the one primary, wherever it is at the time, or the node of a Redis Cluster that serves its key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.crc import key_slot
from redis.exceptions import AskError, MovedError, RedisError, ResponseError

Address: TypeAlias = tuple[str, int]

# A primary that serves so few slots that none of these keys is in one is not probed.
_MAX_PROBE_KEYS = 2_000


class Connections:
    """Lends the connections of a pool. One that is not wanted elsewhere stays here, ready: asking the pool for it
    and giving it back again would be a tenth of a commit.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._spare: AbstractConnection | None = None
        self._waiting = 0

    async def take(self) -> AbstractConnection:
        """A connection for one exchange. Raises RedisError."""
        connection, self._spare = self._spare, None
        if connection is None:
            return await self._take_from_pool()
        try:
            if not await _is_clean(connection):
                await self._pool.ensure_connection(connection)  # connects anew
        except BaseException:
            await self.give_back(connection, clean=False)
            raise
        return connection

    async def _take_from_pool(self) -> AbstractConnection:
        self._waiting += 1
        try:
            connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
            return connection
        finally:
            self._waiting -= 1

    async def give_back(self, connection: AbstractConnection, clean: bool) -> None:
        """Ends a loan; a connection that may have replies left is closed."""
        if not clean:
            await connection.disconnect(nowait=True)
        elif self._spare is None and not self._waiting:
            self._spare = connection
            return
        await self._pool.release(connection)

    async def drop_idle(self) -> None:
        """Closes the connections that are not lent."""
        spare, self._spare = self._spare, None
        if spare is not None:
            await self.give_back(spare, clean=False)
        with contextlib.suppress(RedisError, OSError):
            await self._pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        """Closes all connections."""
        await self.drop_idle()
        await self._pool.aclose()


async def _is_clean(connection: AbstractConnection) -> bool:
    """Neither closed nor with bytes left. The pool asks too, for several times as long."""
    try:
        return connection.is_connected and not await connection.can_read()
    except RedisError:
        return False


class Nodes(Protocol):
    """The servers that together are the store."""

    located: bool
    """Whether it is known who serves what; if not, `locate` first."""
    redirects: bool
    """Whether a node that answers MOVED or ASK is to be believed."""

    async def locate(self) -> None:
        """Finds out who serves what. Raises RedisError or OSError."""

    def serving(self, key: bytes | None) -> Connections | None:
        """To the primary that serves this key; None if nobody does."""

    def at(self, address: Address) -> Connections:
        """To this node."""

    def redirected(self, refusal: ResponseError) -> Address | None:
        """Where the refused call is to go this once; None: to who serves its key."""

    def probes(self) -> Sequence[Sequence[bytes]]:
        """Keys for a script that is to run once at each primary."""

    async def suspect(self, connections: Connections) -> None:
        """An exchange over one of these failed."""

    async def close(self) -> None:
        """Closes all connections."""


class OnePrimary:
    """A single server; if it is another one after a failover, new connections lead there."""

    located = True
    redirects = False

    def __init__(self, pool: ConnectionPool) -> None:
        self._connections = Connections(pool)

    async def locate(self) -> None:
        """Nothing to find out."""

    def serving(self, key: bytes | None) -> Connections:  # noqa: ARG002
        """It serves everything."""
        return self._connections

    def at(self, address: Address) -> Connections:
        """It redirects nobody."""
        raise AssertionError(address)

    def redirected(self, refusal: ResponseError) -> Address | None:  # noqa: ARG002
        """Nowhere."""
        return None

    def probes(self) -> Sequence[Sequence[bytes]]:
        """Once, without keys."""
        return ((),)

    async def suspect(self, connections: Connections) -> None:
        """What broke one connection (a restart, a failover, a lost route) has usually broken the idle ones too, and one
        that leads to a demoted primary would never break by itself."""
        await connections.drop_idle()

    async def close(self) -> None:
        """Closes all connections."""
        await self._connections.close()


class ClusterNodes:
    """The primaries of a Redis Cluster, and the slots that each serves, by the word of any node of it."""

    redirects = True

    def __init__(
        self, seeds: Sequence[Address], pool_for: Callable[[str, int], ConnectionPool], ask_seconds: float
    ) -> None:
        """`seeds` are some of the nodes; one that doesn't say within `ask_seconds` who serves what is passed over."""
        self.located = False
        self._seeds = seeds
        self._pool_for = pool_for
        self._ask_seconds = ask_seconds
        self._connections: dict[Address, Connections] = {}
        self._first_slots: list[int] = []
        self._ranges: list[tuple[int, Address]] = []  # each up to this slot
        self._probes: list[Sequence[bytes]] = []
        self._told: Address | None = None
        self._locating = asyncio.Lock()

    async def locate(self) -> None:
        """Asks one node after the other. Raises RedisError where none knows."""
        async with self._locating:
            if self.located:
                return
            problem: Exception | None = None
            for address in self._to_ask():
                try:
                    async with asyncio.timeout(self._ask_seconds):
                        slots = await self._ask(address)
                except (RedisError, OSError, TimeoutError) as error:
                    problem = error
                    continue
                self._read(slots, address[0])
                self.located, self._told = True, None
                await self._close_others()
                return
            raise RedisError(f"no node of the cluster says who serves what: {problem}")

    def serving(self, key: bytes | None) -> Connections | None:
        """To the primary of the key's slot."""
        assert key is not None
        address = self._owner(key_slot(key))
        if address is None:
            self.located = False
            return None
        return self.at(address)

    def at(self, address: Address) -> Connections:
        """To this node."""
        found = self._connections.get(address)
        if found is None:
            found = self._connections[address] = Connections(self._pool_for(*address))
        return found

    def redirected(self, refusal: ResponseError) -> Address | None:
        """The slot is elsewhere from now on (MOVED), or just this key is (ASK), while its slot is on the move."""
        if not isinstance(refusal, AskError) or not refusal.host:
            return None
        address = (str(refusal.host), int(refusal.port))
        if isinstance(refusal, MovedError):
            self._told = address
            return None
        return address

    def probes(self) -> Sequence[Sequence[bytes]]:
        """A key for each primary."""
        return self._probes

    async def suspect(self, connections: Connections) -> None:
        """Somebody else may serve its slots now."""
        self.located = False
        await connections.drop_idle()

    async def close(self) -> None:
        """Closes all connections."""
        for connections in self._connections.values():
            await connections.close()

    def _to_ask(self) -> list[Address]:
        """Who was named by a redirection, then any: the same one each time might be cut off from the others."""
        known = {*self._seeds, *(address for _, address in self._ranges)}
        told = [] if self._told is None else [self._told]
        return [*told, *random.sample(sorted(known), len(known))]

    async def _ask(self, address: Address) -> list[Any]:
        connections, clean = self.at(address), False
        connection = await connections.take()
        try:
            await connection.send_command("CLUSTER", "SLOTS")
            slots: list[Any] = await connection.read_response()
            clean = True
        finally:
            await connections.give_back(connection, clean)
        if not slots:
            raise RedisError("it knows of no slots: it has not joined the cluster, or was reset")
        return slots

    def _read(self, slots: list[Any], asked: str) -> None:
        """Each range of slots comes as: first, last, (host, port, …) of its primary, and of its replicas."""
        ranges = []
        for first, last, (host, port, *_), *_ in slots:
            # A node that doesn't know its own address leaves it out.
            ranges.append((int(first), int(last), (host.decode() if host else asked, int(port))))
        ranges.sort()
        self._first_slots = [first for first, _, _ in ranges]
        self._ranges = [(last, address) for _, last, address in ranges]
        self._probes = self._find_probes()

    def _owner(self, slot: int) -> Address | None:
        index = bisect_right(self._first_slots, slot) - 1
        if index < 0 or slot > self._ranges[index][0]:
            return None
        return self._ranges[index][1]

    def _find_probes(self) -> list[Sequence[bytes]]:
        primaries = {address for _, address in self._ranges}
        found: dict[Address | None, Sequence[bytes]] = {}
        for number in itertools.takewhile(lambda _: len(found) < len(primaries), range(_MAX_PROBE_KEYS)):
            key = b"tandem:probe:%d" % number
            owner = self._owner(key_slot(key))
            if owner is not None:
                found.setdefault(owner, (key,))
        return list(found.values())

    async def _close_others(self) -> None:
        """Nodes that have left, and whom nobody would name again."""
        for address in set(self._connections) - {*self._seeds, *(address for _, address in self._ranges)}:
            await self._connections.pop(address).close()
