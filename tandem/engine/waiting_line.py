"""Who waits for a cache slot, and whose turn it is: slots are shared fairly by the streams, that is by the orchestrators.

A slot that becomes free goes to the stream that holds the fewest of them, of equals to the one that got one longest ago;
within a stream, first come first served. So whoever floods a worker waits for what it holds itself, and another
one's request gets the next slot. The line is bounded: where it is full, the last of the stream with the most in it makes
room for one with clearly fewer. Nobody's running request is ended for another's.

Called by the step thread alone.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem.engine.session import Session
    from tandem.engine.stream import Stream


@dataclass(frozen=True, slots=True)
class WaitingLimits:
    """How many new sessions may wait for a cache slot, and for how long."""

    sessions: int = 0
    """More are refused at once."""
    seconds: float = 30.0


NO_WAITING = WaitingLimits()


@dataclass(slots=True)
class WaitingStats:
    """Counters since the start, and a level; written by the step thread, to be read from anywhere."""

    most_held: int = 0
    """Slots of the stream that holds the most."""
    full: int = 0
    """Sessions that found neither a slot nor a place in the line."""
    late: int = 0
    """Sessions that waited for as long as one may."""
    gave_way: int = 0
    """Sessions whose place in the line went to another stream's."""
    displaced: int = 0
    """Sessions whose slot went to another stream's."""


class SlotShares:
    """How many slots each stream holds, and when it got one last."""

    def __init__(self, most: int = 0) -> None:
        """`most`: slots that a stream may hold; 0: all there are."""
        self.most = most
        self._held: Counter[Stream] = Counter()
        self._count = itertools.count(1)
        self._last_seat: weakref.WeakKeyDictionary[Stream, int] = weakref.WeakKeyDictionary()

    def took(self, stream: Stream) -> None:
        """One more."""
        self._held[stream] += 1
        self._last_seat[stream] = next(self._count)

    def gave_back(self, stream: Stream) -> None:
        """One less."""
        self._held[stream] -= 1
        if not self._held[stream]:
            del self._held[stream]

    def held(self, stream: Stream) -> int:
        """Slots of its sessions."""
        return self._held[stream]

    def has_all(self, stream: Stream) -> bool:
        """Whether it holds as many as it may."""
        return 0 < self.most <= self._held[stream]

    def largest(self) -> tuple[Stream | None, int]:
        """The stream with the most slots, and how many these are."""
        stream = max(self._held, key=self._held.__getitem__, default=None)
        return stream, self._held[stream] if stream is not None else 0

    def turn(self, stream: Stream) -> tuple[int, int]:
        """Sorts streams: whose turn it is comes first."""
        return self._held[stream], self._last_seat.get(stream, 0)


class WaitingLine:
    """Sessions without a slot, each stream's in the order in which they came."""

    def __init__(self, limits: WaitingLimits, shares: SlotShares) -> None:
        self.limits = limits
        self._shares = shares
        self._lines: dict[Stream, dict[Session, float]] = {}
        """With the time at which each came."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __contains__(self, session: Session) -> bool:
        return any(session in line for line in self._lines.values())

    def join(self, stream: Stream, session: Session, now: float) -> None:
        """The session waits from now on, last of its stream."""
        self._lines.setdefault(stream, {})[session] = now

    def leave(self, stream: Stream, session: Session) -> None:
        """The session waits no more, if it did."""
        line = self._lines.get(stream)
        if line is not None:
            line.pop(session, None)
            if not line:
                del self._lines[stream]

    def first(self) -> tuple[Stream, Session] | None:
        """Whose turn it is for a free slot; None where nobody waits that may have one."""
        streams = [stream for stream in self._lines if not self._shares.has_all(stream)]
        if not streams:
            return None
        stream = min(streams, key=self._shares.turn)
        return stream, next(iter(self._lines[stream]))

    def is_full(self) -> bool:
        """Whether no more may wait."""
        return len(self) >= self.limits.sessions

    def last_of_many(self, stream: Stream) -> tuple[Stream, Session] | None:
        """Who should make room in a full line for a session of this stream: the last of the longest, where that stays at
        least as long as this stream's then is. None where no other stream has so many."""
        own = len(self._lines.get(stream, ()))
        longest = max(self._lines, key=lambda each: len(self._lines[each]), default=None)
        if longest is None or len(self._lines[longest]) < own + 2:
            return None
        return longest, next(reversed(self._lines[longest]))

    def came_before(self, moment: float) -> list[tuple[Stream, Session]]:
        """Who has waited since then or longer."""
        return [
            (stream, session)
            for stream, line in self._lines.items()
            for session, since in line.items()
            if since <= moment
        ]

    def all(self) -> list[tuple[Stream, Session]]:
        """Everybody."""
        return [(stream, session) for stream, line in self._lines.items() for session in line]
