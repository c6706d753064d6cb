"""Whether a step waits a moment for sessions that will be back at once.

A step takes whatever waits. So two requests that are out of phase share no forward, ever: each one's next item arrives
while the other's forward runs, and each decodes at half the rate, although a forward of two costs hardly more than one of
one. A step that waits for the other brings them into phase, and from then on there is nothing to wait for.

It is worth it where the wait and one forward of all take clearly less than two forwards in turns. How long a session stays
away is known from its last rounds, what forwards cost from those that ran. Who is late is not waited for again before it
has been back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

CLEARLY = 0.9
"""Of the time of two forwards in turns: more for the wait and the forward of all, and there is no wait."""
LONGEST_SHARE = 0.5
"""Of the forward of those who wait: more a step never waits, whoever comes meanwhile."""
MOST_SLOWER = 2.0
"""As many times as long as expected a forward counts as having taken, at most. One in which the process was stopped says nothing of the
next one, and half of what it took is no moment."""
LEAST_SECONDS = 2e-5
"""Shorter waits are over before they begin."""
_NEW = 0.25
"""Weight of the latest observation."""

KeyT = TypeVar("KeyT", bound=Hashable)


class Cost(Protocol):
    """What a forward takes by the sizes of its feeds, in any unit."""

    def of(self, sizes: Sequence[int], /) -> float: ...


@dataclass(slots=True)
class _Pace:
    """A session between an answer and its next item."""

    tokens: int = 1
    """Of its last feed."""
    answered: float | None = None
    """When; None while something of it runs."""
    away: float | None = None
    """Seconds from an answer to the next item, smoothed; None before the first time."""
    deviation: float = 0.0
    """Of these seconds, as smooth."""

    def arrived(self, now: float) -> None:
        if self.answered is None:
            return
        seconds = now - self.answered
        self.answered = None
        if self.away is None:
            self.away, self.deviation = seconds, seconds / 2
            return
        self.deviation += _NEW * (abs(seconds - self.away) - self.deviation)
        self.away += _NEW * (seconds - self.away)


class Gathering(Generic[KeyT]):
    """Knows who is away and when each one is likely to be back. Times are seconds on any one clock."""

    def __init__(self, cost: Cost, most_tokens: Callable[[], int]) -> None:
        """`most_tokens` says what a forward may have at the time, padded."""
        self._cost = cost
        self._most_tokens = most_tokens
        self._paces: dict[KeyT, _Pace] = {}
        self._scale: float | None = None
        """Seconds of a forward over what `cost` says; None before the first."""
        self._began: float | None = None
        """When the wait began, if one is under way."""

    def arrived(self, key: KeyT, now: float) -> None:
        """The next item of a session is there."""
        pace = self._paces.get(key)
        if pace is not None:
            pace.arrived(now)

    def answered(self, key: KeyT, tokens: int, now: float) -> None:
        """A session's item of so many tokens is answered."""
        pace = self._paces.setdefault(key, _Pace())
        pace.tokens, pace.answered = tokens, now

    def ended(self, key: KeyT) -> None:
        """The session won't be back."""
        self._paces.pop(key, None)

    def ran(self, sizes: Sequence[int], seconds: float) -> None:
        """A forward of feeds of such sizes is over: one of those that may be waited with, so no chunk of a prefill, which
        doesn't take what they take by its tokens."""
        units = self._cost.of(sizes)
        if units <= 0.0:
            return  # a forward that costs nothing saves nothing
        scale = seconds / units
        if self._scale is None:
            self._scale = scale
        else:
            self._scale += _NEW * (min(scale, MOST_SLOWER * self._scale) - self._scale)

    def seconds(self, waiting: Sequence[int], now: float) -> float:
        """How much longer the step of items of these sizes should wait for others; 0: it should run."""
        wait = self._wait(waiting, now) if waiting and self._scale is not None else 0.0
        if wait < LEAST_SECONDS:
            self._began = None
            return 0.0
        if self._began is None:
            self._began = now
        return wait

    def _wait(self, waiting: Sequence[int], now: float) -> float:
        expected = sorted(
            (pace.answered + pace.away + pace.deviation, pace.tokens)
            for pace in self._paces.values()
            if pace.answered is not None and pace.away is not None
        )
        began = self._began if self._began is not None else now
        alone = self._forward(waiting)
        latest = began + LONGEST_SHARE * alone
        best, until = 0.0, now
        others: list[int] = []
        for back, tokens in expected:
            if back <= now:
                continue  # late already
            if back > latest:
                break
            others.append(tokens)
            all_of_them = [*waiting, *others]
            if len(all_of_them) * max(all_of_them) > self._most_tokens():
                break
            saved = CLEARLY * (alone + self._forward(others)) - (back - now) - self._forward(all_of_them)
            if saved > best:
                best, until = saved, back
        return until - now

    def _forward(self, sizes: Sequence[int]) -> float:
        assert self._scale is not None
        return self._scale * self._cost.of(sizes)
