"""Who holds which cache slot, and which tokens the slots that nobody holds are still good for.

A slot outlives its session: the keys and values of a finished request stay until the room is needed. A new session whose
prompt begins with tokens that any slot holds, of a finished or of a running request, takes them over instead of running
them again. What is kept makes room as soon as a session needs it, the contents that were of use longest ago first, so it
never costs a running request anything.

A session always gets the lowest slot that no other holds, so that the slots of a batch tend to be adjacent and are read
as views; contents that are worth more than others and lie there are moved. Copying is cheap, scattered slots are not.

Called by the step thread alone, between forwards.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from tandem.engine.session import Session
from tandem.wire import IdArray

LEAST_SHARED_TOKENS = 16
"""Fewer shared tokens are not worth a look: many prompts begin alike by a few tokens of their template."""


@dataclass(frozen=True, slots=True)
class Move:
    """Columns to be copied from one slot to another."""

    source: int
    target: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Seat:
    """The slot of a new session, and what it need not run."""

    slot: int
    shared: int
    """How many of the session's first tokens it holds once the moves are made; 0 for none."""
    moves: tuple[Move, ...] = ()
    """To be made in this order, before the session runs."""


@dataclass(slots=True)
class _Kept:
    """Tokens whose keys and values a slot holds, and who may share them."""

    token_ids: IdArray
    salt: str
    used: int
    """When they were of use last: counts seats and releases."""


class SlotPool:
    """Gives slots to sessions."""

    def __init__(self, slots: int, *, reuse: bool = True) -> None:
        """`reuse` false: every session starts with nothing."""
        self.slots = slots
        self._reuse = reuse
        self._empty = list(range(slots))
        self._kept: dict[int, _Kept] = {}
        self._held: dict[int, Session] = {}
        self._clock = itertools.count()

    @property
    def used(self) -> int:
        """Slots held by sessions."""
        return len(self._held)

    def acquire(self, session: Session) -> Seat | None:
        """A slot for a session whose prefix is known; None when all are held.

        At least one token of the prefix is left to run: what follows it is what is asked for.
        """
        if len(self._held) == self.slots:
            return None
        source, shared = self._most_shared(session) if self._reuse else (None, 0)
        if source in self._kept:
            self._kept[source].used = next(self._clock)
        slot = min([*self._empty[:1], *self._kept])
        moves = self._clear(slot, shared if source == slot else 0)
        if source is not None and source != slot:
            moves.append(Move(source, slot, 0, shared))
            if self._is_used_up(source, shared):
                del self._kept[source]
                heapq.heappush(self._empty, source)
        self._held[slot] = session
        return Seat(slot, shared, tuple(moves))

    def more_shared(self, session: Session) -> Move | None:
        """What a session that is still being prefilled could take over by now: two that came together with the same
        beginning run it once between them."""
        assert session.slot is not None
        source, shared = self._most_shared(session, session.cached_length) if self._reuse else (None, 0)
        return None if source is None else Move(source, session.slot, session.cached_length, shared)

    def release(self, session: Session) -> None:
        """Takes the session's slot back; nothing may be running on it. What it holds is kept."""
        slot = session.slot
        assert slot is not None
        assert self._held.pop(slot) is session
        session.slot = None
        if self._reuse and session.cached_length >= LEAST_SHARED_TOKENS:
            token_ids = session.tokens.view(0, session.cached_length).copy()
            self._kept[slot] = _Kept(token_ids, session.salt, next(self._clock))
        else:
            heapq.heappush(self._empty, slot)

    def forget(self, slots: Iterable[int]) -> None:
        """What was to be in these slots isn't there: a copy failed."""
        for slot in slots:
            if self._kept.pop(slot, None) is not None:
                heapq.heappush(self._empty, slot)

    def _clear(self, slot: int, shared: int) -> list[Move]:
        """Takes a slot for a session that shares so many of its tokens; its contents go elsewhere if they are worth it."""
        if slot not in self._kept:
            heapq.heappop(self._empty)  # it is the lowest of these
            return []
        if self._is_used_up(slot, shared):
            del self._kept[slot]
            return []
        elsewhere = heapq.heappop(self._empty) if self._empty else min(self._kept, key=self._last_use)
        contents = self._kept.pop(slot)
        if elsewhere == slot:
            return []
        self._kept[elsewhere] = contents
        return [Move(slot, elsewhere, 0, contents.token_ids.size)]

    def _last_use(self, slot: int) -> int:
        return self._kept[slot].used

    def _is_used_up(self, slot: int, shared: int) -> bool:
        """Whether a session that goes on from the slot's first tokens leaves nothing worth keeping: as the next turn of a
        chat does."""
        kept = self._kept.get(slot)
        return kept is not None and shared > 0 and kept.token_ids.size - shared < LEAST_SHARED_TOKENS

    def _most_shared(self, session: Session, held: int = 0) -> tuple[int | None, int]:
        """The slot that shares the longest prefix with the session, and its length. Only what goes beyond the `held` first
        tokens counts."""
        wanted = session.tokens.view(0, session.prefix_length - 1)
        best, most = None, held + LEAST_SHARED_TOKENS - 1
        if wanted.size <= most:
            return None, 0
        for slot, token_ids in self._candidates(session.salt):
            # Most pairs differ at this one token already, which is found at a tenth of the time.
            if min(token_ids.size, wanted.size) > most and token_ids[most] == wanted[most]:
                shared = shared_length(wanted, token_ids)
                if shared > most:
                    best, most = slot, shared
        return (best, most) if best is not None else (None, 0)

    def _candidates(self, salt: str) -> Iterator[tuple[int, IdArray]]:
        for slot, kept in self._kept.items():
            if kept.salt == salt:
                yield slot, kept.token_ids
        for slot, other in self._held.items():
            if other.salt == salt:
                yield slot, other.tokens.view(0, other.cached_length)


def shared_length(one: IdArray, other: IdArray) -> int:
    """How many tokens two sequences have in common from their start."""
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size
