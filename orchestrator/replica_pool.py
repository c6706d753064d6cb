"""The replicas of one worker service as they come and go, and a request's seat at one of them.

Addresses are watched: a replica that a name resolves to anew is connected to, one that it no longer resolves to gets no new
session. A session stays where its cache is for as long as its replica is there to stay; one that drains, or that no name
leads to any more, is left for another as soon as there is one, and the cache is rebuilt there from the tokens so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic

from tandem.transport_security import ClientFiles
from tandem.v1 import worker_pb2

from .placement import Placement
from .resolver import Resolve, is_name, resolve_by_dns, resolved, split
from .worker_stream import PLAIN_TEXT, AnswerT, ItemT, Replica, WorkerKind

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
"""How often names are resolved again; also at once when a replica is lost, since it may be back under another address."""
SHORTEST_RESOLVE_SECONDS = 0.2


class ReplicaPool(Generic[ItemT, AnswerT]):
    """The replicas of one worker service; a new session goes to the one with the least to do, or with its prefix."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        kind: WorkerKind[ItemT, AnswerT],
        check: Callable[[worker_pb2.GetModelInfoResponse], None],
        on_change: Callable[[], None],
        security: ClientFiles = PLAIN_TEXT,
        resolve: Resolve = resolve_by_dns,
    ) -> None:
        """`addresses` are host:port, each of one replica or, by its name, of many."""
        self.role = kind.role
        self.configured = bool(addresses)
        self.replicas: list[Replica[ItemT, AnswerT]] = []
        self._kind = kind
        self._check = check
        self._on_change = on_change
        self._security = security
        self._resolve = resolve
        self._placement: Placement[Replica[ItemT, AnswerT]] = Placement()
        self._was_ready, self._away_since = False, time.monotonic()
        self._changed = asyncio.Event()
        self._look_again = asyncio.Event()
        self._known: dict[str, set[str]] = {address: set() for address in addresses}
        """What each configured address stood for when it was last resolved."""
        self._unresolved: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        for address in addresses:
            if not is_name(address):
                self._known[address] = {address}
        self._follow()
        if any(map(is_name, addresses)):
            self._watch = asyncio.create_task(self._watch_names(), name=f"{kind.role} addresses")

    def pick(
        self,
        avoid: Replica[ItemT, AnswerT] | None = None,
        digests: Sequence[bytes] = (),
        refusing: Collection[Replica[ItemT, AnswerT]] = (),
    ) -> Replica[ItemT, AnswerT] | None:
        """The ready replica for a session whose prompt has these digests: `avoid`, those on their way out, and last of all those
        `refusing` it, only where there is no other; one that was benched and is due to be tried again before all others. None
        when none is ready."""
        ready = [replica for replica in self.replicas if replica.ready and replica.bench.usable]
        taking = [replica for replica in ready if replica not in refusing]
        for candidates in (
            [replica for replica in taking if replica.bench.due and not replica.leaving],
            [replica for replica in taking if replica is not avoid and not replica.leaving],
            [replica for replica in taking if not replica.leaving],
            taking,
            ready,
        ):
            if candidates:
                return self._placement.choose(candidates, digests)
        return None

    @property
    def benched(self) -> str:
        """Why a ready replica is benched; empty where none is."""
        return next((replica.bench.reason for replica in self.replicas if replica.ready and replica.bench.reason), "")

    @property
    def ready_addresses(self) -> set[str]:
        """The replicas that could take a session now."""
        return {replica.address for replica in self.replicas if replica.ready and not replica.leaving}

    async def wait_for_change(self, seconds: float) -> None:
        """Returns when a replica came or went, at latest after `seconds`."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            # Not `wait_for`: up to Python 3.11 it loses a cancellation that comes together with the change.
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    @property
    def ready(self) -> bool:
        """Whether any replica is ready."""
        return any(replica.ready for replica in self.replicas)

    @property
    def refusals(self) -> list[str]:
        """Why replicas were refused, each reason once. The log has their addresses."""
        return list(dict.fromkeys(replica.refusal for replica in self.replicas if replica.refusal))

    @property
    def away_seconds(self) -> float:
        """How long no replica has been ready; 0 while one is."""
        return 0.0 if self.ready else time.monotonic() - self._away_since

    async def close(self) -> None:
        """Ends all streams."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        await asyncio.gather(*(replica.close() for replica in self.replicas), *self._closing)

    def _replica_changed(self) -> None:
        if self.ready or not self._was_ready:
            self._was_ready = self.ready
        else:
            self._was_ready, self._away_since = False, time.monotonic()
        self._changed.set()
        self._look_again.set()
        self._on_change()

    async def _watch_names(self) -> None:
        while True:
            self._look_again.clear()
            for address in filter(is_name, self._known):
                await self._resolve_one(address)
            self._follow()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_SECONDS):
                    await self._look_again.wait()
            await asyncio.sleep(SHORTEST_RESOLVE_SECONDS)

    async def _resolve_one(self, address: str) -> None:
        """No answer is no news: what was there is taken to be there still."""
        try:
            found = await resolved(address, self._resolve)
        except (OSError, UnicodeError) as error:  # the latter where the name is none
            if address not in self._unresolved:
                log.warning("the %s address %s is not resolved: %s", self.role, address, error)
                self._unresolved.add(address)
            return
        self._unresolved.discard(address)
        self._known[address] = found

    def _follow(self) -> None:
        """Replicas for all addresses there are; the others take no new session, and go with their last one."""
        wanted = {replica: address for address, replicas in self._known.items() for replica in replicas}
        for address in sorted(wanted.keys() - {replica.address for replica in self.replicas}):
            configured = wanted[address]
            name = split(configured)[0] if is_name(configured) else ""
            self.replicas.append(Replica(address, self._kind, self._check, self._replica_changed, self._security, name))
        for replica in list(self.replicas):
            if replica.retired != (replica.address not in wanted):
                replica.retired = not replica.retired
                log.info("%s %s is %s", self.role, replica.address, "gone from its name" if replica.retired else "back")
                self._on_change()
            if replica.retired and not (replica.ready and replica.sessions):
                self._dismiss(replica)

    def _dismiss(self, replica: Replica[ItemT, AnswerT]) -> None:
        self.replicas.remove(replica)
        self._placement.forget(replica.address)
        closing = asyncio.create_task(replica.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


class WorkerSession(Generic[ItemT, AnswerT]):
    """One request's seat at a replica: which, and how many of the request's tokens its cache holds."""

    def __init__(self, request_id: str, pool: ReplicaPool[ItemT, AnswerT], digests: Iterable[bytes] = ()) -> None:
        """`digests` are those of the prompt's blocks, by which a replica that has its beginning is found."""
        self.request_id = request_id
        self.cached_length = 0
        self.replica: Replica[ItemT, AnswerT] | None = None
        self._pool = pool
        self._digests = tuple(digests)
        self._generation = -1
        self._benchings = 0
        self._avoid: Replica[ItemT, AnswerT] | None = None
        self.refusing: set[Replica[ItemT, AnswerT]] = set()
        """Replicas that don't take this session."""

    def seat(self) -> Replica[ItemT, AnswerT] | None:
        """The replica to use now, with the session's place on it; None when there is none.

        A session stays where its cache is. When that stream has gone, or the replica was benched, it starts afresh, elsewhere
        if it can.
        """
        if self.replica is not None and self._may_stay(self.replica):
            return self.replica
        chosen = self._pool.pick(self.replica or self._avoid, self._digests, self.refusing)
        self.leave()
        if chosen is not None:
            self.replica = chosen
            self._generation = chosen.generation
            self._benchings = chosen.bench.benchings
            chosen.bench.taken()
            chosen.sessions += 1
        return chosen

    def _may_stay(self, replica: Replica[ItemT, AnswerT]) -> bool:
        return replica.ready and replica.generation == self._generation and not self.displaced

    @property
    def displaced(self) -> bool:
        """Whether the session's replica was benched since it sat down there."""
        return self.replica is not None and self.replica.bench.benchings != self._benchings

    @property
    def can_move(self) -> bool:
        """Whether there is another replica to go to, which takes this session as far as is known."""
        others = (each for each in self._pool.replicas if each is not self.replica and each not in self.refusing)
        return any(each.ready and each.bench.usable and not each.leaving for each in others)

    @property
    def should_move(self) -> bool:
        """Whether the session's replica is on its way out, and another is there to take over."""
        return self.replica is not None and self.replica.leaving and self.can_move

    @property
    def opened(self) -> bool:
        """Whether the replica knows the session."""
        return self.cached_length > 0

    def forget(self) -> None:
        """The replica's cache is not what it should be: the next item rebuilds it from token 0."""
        self.cached_length = 0

    def leave(self) -> None:
        """Gives the seat up; the next one is elsewhere, if it can be."""
        if self.replica is not None:
            self.replica.release(self.request_id, self._generation)
            self.replica.sessions -= 1
            self._avoid, self.replica = self.replica, None
        self.cached_length = 0
