"""Lua scripts on a Redis server: those asked for in one event-loop tick share one pipeline, with those of the ticks after it as long as
more come in each.

Every call is a small entry in its tick's batch, and one task per batch talks to the server, on a connection that only
this task uses. A caller that is cancelled just stops waiting: it can neither cancel its neighbours nor leave a reply
behind on a connection that somebody else gets next.

Failed exchanges are repeated here, a bounded number of times and on a fresh connection, never by the client library,
which repeats more than it should. So each script has to recognise that an earlier attempt has already run.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from .deadlines import Deadlines
from .redis_nodes import Address, Connections, Nodes

# Each flush of the script cache can be met once per exchange; three in a row mean that the scripts don't stay.
_MAX_LOADS = 3
_FIRST_BACKOFF = 0.02
_MAX_BACKOFF = 0.5
_MAX_REASON_CHARACTERS = 160

# Another node, or the same one a moment later, may take what was refused with one of these.
_TRANSIENT_REFUSALS = (ReadOnlyError, ClusterDownError, TryAgainError)
_TRANSIENT_CODES = frozenset({"BUSY", "NOREPLICAS", "MASTERDOWN", "READONLY", "FAILOVER"})


class StoreError(Exception):
    """The store didn't do what it was asked to do."""


class StoreUnavailable(StoreError):
    """No usable answer in time. What was asked may or may not have happened, and asking again is safe."""


class StoreFull(StoreError):
    """The server is at its memory limit and refuses to store more; nothing happened."""


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script and the digest the server knows it by."""

    body: bytes
    digest: bytes

    @classmethod
    def of(cls, body: bytes) -> Script:
        """The script with this source."""
        # The protocol names scripts by SHA-1; nothing relies on its strength.
        return cls(body, hashlib.sha1(body, usedforsecurity=False).hexdigest().encode())

    @classmethod
    def load(cls, name: str) -> Script:
        """The script `lua/<name>.lua` of this package."""
        return cls.of(resources.files(__package__).joinpath("lua", f"{name}.lua").read_bytes())


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one exchange may take, and when a failed one is not repeated any more; in seconds."""

    exchange: float
    attempts: int
    total: float


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Who has to hold what a connection has written before it counts; `seconds` is how long one exchange may take."""

    disks: int
    """1: the primary's own append-only file, synced."""
    replicas: int
    seconds: float

    async def obtain(self, connection: AbstractConnection) -> None:
        """Raises RedisError where too few hold it in time."""
        # The server gives up first, so that the reply says how many there are.
        milliseconds = max(1, int(self.seconds * 900))
        if self.disks:
            command = _pack(b"WAITAOF", self.disks, self.replicas, milliseconds)
        else:
            command = _pack(b"WAIT", self.replicas, milliseconds)
        await connection.send_packed_command(command)
        reply = await _read(connection)
        if isinstance(reply, ResponseError):
            raise reply
        disks, replicas = reply if self.disks else (0, reply)
        if disks < self.disks or replicas < self.replicas:
            raise RedisError(f"held by {replicas} replicas and {disks} disks, wanted {self.replicas} and {self.disks}")


class _Call:
    """One script to run, and the future its caller waits on."""

    __slots__ = ("asked", "key", "on_retry", "repeat", "reply", "script", "words")

    def __init__(
        self,
        script: Script,
        words: tuple[bytes | int, ...],
        reply: asyncio.Future[Any],
        repeat: bool,
        key: bytes | None = None,
        on_retry: Callable[[str], None] | None = None,
    ) -> None:
        self.script = script
        self.words = words
        """The command. It is packed when it is sent: whoever asks has something more urgent to send first."""
        self.reply = reply
        self.repeat = repeat
        self.key = key
        """One of its keys, which have all one hash tag."""
        self.on_retry = on_retry
        self.asked: Address | None = None
        """Where a node of a cluster has sent it for its next exchange, and for that one only."""

    def answer(self, reply: Any) -> None:
        if self.reply.done():  # the caller was cancelled
            return
        if isinstance(reply, ResponseError):
            self.reply.set_exception(_refusal(reply))
        else:
            self.reply.set_result(reply)

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


class ScriptPipeline:
    """Runs scripts at the nodes of the store, whose connections it owns. Use it from one event loop."""

    def __init__(
        self,
        nodes: Nodes,
        patience: Patience,
        on_retry: Callable[[str], None],
        acknowledgement: Acknowledgement | None = None,
    ) -> None:
        self._acknowledgement = acknowledgement
        self._nodes = nodes
        self._patience = patience
        self._on_retry = on_retry
        self._batch: list[_Call] = []
        self._deliveries: set[asyncio.Task[None]] = set()
        self._closed = False
        self._deadlines = Deadlines()

    async def run(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Iterable[bytes | int],
        repeat: bool = True,
        on_retry: Callable[[str], None] | None = None,
    ) -> Any:
        """The script's reply. A cancelled call may still take effect. `on_retry` is told why, each time it is repeated.

        Raises StoreUnavailable, after repeating the call if `repeat`, or StoreFull.
        """
        if self._closed:
            raise StoreUnavailable("the store is closed")
        loop = self._deadlines.loop
        words = (b"EVALSHA", script.digest, len(keys), *keys, *args)
        call = _Call(script, words, loop.create_future(), repeat, keys[0] if keys else None, on_retry)
        if not self._batch:
            loop.call_soon(self._flush)
        self._batch.append(call)
        return await call.reply

    async def run_everywhere(self, script: Script) -> None:
        """Runs a script without arguments once at each primary. Raises as `run` does; it doesn't repeat."""
        if problem := await self._locate(self._patience.exchange):
            raise StoreUnavailable(problem)
        probes = self._nodes.probes()
        if not probes:
            raise StoreUnavailable("no node of the cluster serves a slot")
        await asyncio.gather(*(self.run(script, keys, (), repeat=False) for keys in probes))

    async def close(self) -> None:
        """Waits for the calls under way, each of which has a bound, and closes the connections."""
        self._closed = True
        self._flush()
        await asyncio.gather(*self._deliveries, return_exceptions=True)
        await self._nodes.close()

    def _flush(self, seen: int = 1) -> None:
        if seen < len(self._batch) and not self._closed:
            # More may come: an exchange costs as much as several calls.
            self._deadlines.loop.call_soon(self._flush, len(self._batch))
            return
        batch = [call for call in self._batch if not call.reply.done()]
        self._batch = []
        if batch:
            # The loop keeps weak references only.
            delivery = asyncio.get_running_loop().create_task(self._deliver(batch))
            self._deliveries.add(delivery)
            delivery.add_done_callback(self._deliveries.discard)

    async def _deliver(self, calls: list[_Call]) -> None:
        """Sees to it that each call gets a reply or an error, whatever happens."""
        try:
            await self._deliver_repeatedly(calls)
        finally:
            for call in calls:
                call.fail(StoreUnavailable("the exchange was broken off"))

    async def _deliver_repeatedly(self, calls: list[_Call]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience.total
        limit = self._patience.exchange
        for attempt in range(1, self._patience.attempts + 1):
            problem = await self._attempt(calls, limit)
            if problem is None:
                return
            pause = _backoff(attempt)
            last = attempt == self._patience.attempts or loop.time() + pause >= deadline
            for call in calls:
                if last or not call.repeat:
                    call.fail(StoreUnavailable(problem))
            calls = [call for call in calls if not call.reply.done()]
            if not calls:
                return
            self._on_retry(problem)
            for call in calls:
                if call.on_retry is not None:
                    call.on_retry(problem)
            await asyncio.sleep(pause)
            limit = min(self._patience.exchange, deadline - loop.time())

    async def _attempt(self, calls: list[_Call], limit: float) -> str | None:
        """One exchange with each node concerned; a problem in words if calls are left without an answer."""
        if problem := await self._locate(limit):
            return problem
        groups: dict[tuple[Connections | None, bool], list[_Call]] = {}
        for call in calls:
            asked, call.asked = call.asked, None
            node = self._nodes.serving(call.key) if asked is None else self._nodes.at(asked)
            groups.setdefault((node, asked is not None), []).append(call)
        if len(groups) == 1:
            return await self._attempt_at(*groups.popitem(), limit)
        problems = await asyncio.gather(*(self._attempt_at(to, some, limit) for to, some in groups.items()))
        return next(filter(None, problems), None)

    async def _locate(self, limit: float) -> str | None:
        """The problem in words if it isn't known who serves what, and nobody says."""
        if self._nodes.located:
            return None
        try:
            async with asyncio.timeout(limit):
                await self._nodes.locate()
            return None
        except TimeoutError:
            return f"no answer within {limit:.2f} s"
        except (RedisError, OSError) as error:
            return _reason(error)

    async def _attempt_at(self, to: tuple[Connections | None, bool], calls: list[_Call], limit: float) -> str | None:
        """`to` whom, and whether that node takes the calls only when told that another one has sent them."""
        node, asking = to
        if node is None:
            return "no node of the cluster serves the slot"
        connection: AbstractConnection | None = None
        clean = False
        try:
            with self._deadlines.within(limit):
                connection = await node.take()
                await self._exchange(connection, calls, asking)
            clean = True
            return None
        except TimeoutError:
            problem = f"no answer within {limit:.2f} s"
        except (RedisError, OSError) as error:
            problem = _reason(error)
        finally:
            if connection is not None:
                await node.give_back(connection, clean)
        await self._nodes.suspect(node)
        return problem

    async def _exchange(self, connection: AbstractConnection, calls: list[_Call], asking: bool) -> None:
        """Sends the calls and hands out the replies. Raises RedisError if calls are left without an answer."""
        prefix = _ASKING if asking else b""
        for _ in range(_MAX_LOADS):
            await connection.send_packed_command(b"".join([prefix + _pack(*call.words) for call in calls]))
            refusal, unknown, replies = None, [], []
            for call in calls:
                if asking:
                    await _read(connection)
                reply = await _read(connection)
                if isinstance(reply, NoScriptError):
                    unknown.append(call)
                elif isinstance(reply, ResponseError) and self._is_transient(reply):
                    refusal = reply
                    call.asked = self._nodes.redirected(reply)
                else:
                    replies.append((call, reply))
            if self._acknowledgement is not None and replies:
                # Nothing of it counts before others hold it. It is asked again then, and knows itself.
                await self._acknowledgement.obtain(connection)
            for call, reply in replies:
                call.answer(reply)
            if refusal is not None:
                raise refusal
            if not unknown:
                return
            await self._load(connection, {call.script for call in unknown})
            calls = unknown
        raise RedisError("the server forgets its scripts faster than they are loaded")

    def _is_transient(self, error: ResponseError) -> bool:
        if isinstance(error, AskError):
            return self._nodes.redirects
        return isinstance(error, _TRANSIENT_REFUSALS) or str(error).partition(" ")[0] in _TRANSIENT_CODES

    async def _load(self, connection: AbstractConnection, scripts: set[Script]) -> None:
        loads = [_pack(b"SCRIPT", b"LOAD", script.body) for script in scripts]
        await connection.send_packed_command(b"".join(loads))
        replies = [await _read(connection) for _ in loads]
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise reply


def _pack(*words: bytes | int) -> bytes:
    packed: bytes = hiredis.pack_command(words)  # type: ignore[arg-type]  # declared for one word only
    return packed


_ASKING = _pack(b"ASKING")


async def _read(connection: AbstractConnection) -> Any:
    """A reply; a refusal is returned, since the replies behind it have to be read as well."""
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


def _refusal(error: ResponseError) -> StoreError:
    if isinstance(error, OutOfMemoryError):
        return StoreFull("the server is at its memory limit")
    if isinstance(error, AskError):
        return StoreUnavailable("the server is a node of a Redis Cluster: its address starts with redis+cluster://")
    return StoreUnavailable(_reason(error))


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_REASON_CHARACTERS]


def _backoff(attempt: int) -> float:
    """Doubles from attempt to attempt; jittered, so that the instances don't come back all at once."""
    longest = min(_MAX_BACKOFF, _FIRST_BACKOFF * 2 ** (attempt - 1))
    return random.uniform(longest / 2, longest)  # noqa: S311
