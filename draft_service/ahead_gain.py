"""Whether drafting ahead makes rounds shorter here, measured on the rounds themselves.

Hidden work is free only where draft and target have processors of their own; where they share them, what the draft does
ahead slows the very verification behind which it hides. The draft sees a whole round without being told of any target:
from one answer to the next of the same request. So it works ahead and leaves it in turns, a few rounds each at first, and
then stays with what had the shorter rounds, with a short look at the other way now and then. Each look is compared with the
rounds just before it, since the speed of a machine drifts, and only blocks of the same length are compared.

What a request gets doesn't depend on it, only when: a guess that came true hands over what would have been drafted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LOOK = 8
"""Rounds of a look at the other way."""
FIRST_STAY, LONGEST_STAY = 96, 768
"""Rounds between two looks: more and more of them while not working ahead stays the better way."""
LEAST_LOOKS = 3
"""Looks before any is believed: until then they follow one another."""
CLEARLY = 1.02
"""The other way has to be better by this factor."""
_LEAST_PAIRS = LOOK // 2
"""Rounds with blocks of a length that both ways had, or there is nothing to compare."""
_KEEP = 0.7
"""Weight of what earlier looks said, against one more."""
_KEEP_ROUND = 0.85
"""Weight of what a mean was, against one more round."""
_MOST_TIMES = 3.0
"""A round counts as at most so many times the mean: a caller that stalls is no trend."""


@dataclass(slots=True)
class _Mean:
    value: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        if self.count:
            seconds = min(seconds, _MOST_TIMES * self.value)
        self.count += 1
        self.value += max(1.0 - _KEEP_ROUND, 1.0 / self.count) * (seconds - self.value)


@dataclass(frozen=True, slots=True)
class _Answer:
    at: float
    phase: int


class AheadGain:
    """Says when to work ahead. Called by the step thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.working = True
        """Whether to work ahead now."""
        self.preferred = True
        """Whether that is the better way as far as is known."""
        self.pauses = 0
        """How often it turned out not to be."""
        self._clock = clock
        self._phase = self._rounds = self._looks = 0
        self._log_ratio = 0.0
        self._stay = FIRST_STAY
        self._last: dict[Hashable, _Answer] = {}
        self._now: dict[int, _Mean] = {}
        """Seconds of this phase's rounds, by the length of the block."""
        self._before: dict[int, _Mean] = {}
        """The same of the phase before."""

    def answered(self, request: Hashable, block: int, *, ordinary: bool) -> None:
        """A block of so many tokens is on its way. `ordinary`: the model drafted it and had no prompt to read, so that the
        time since the request's last answer was a round like any other."""
        now, last = self._clock(), self._last.get(request)
        self._last[request] = _Answer(now, self._phase)
        if not ordinary or last is None or last.phase != self._phase:
            return
        self._now.setdefault(block, _Mean()).add(now - last.at)
        self._rounds += 1
        if self._rounds >= self._length:
            self._end_phase()

    def ended(self, request: Hashable) -> None:
        """The request is over."""
        self._last.pop(request, None)

    @property
    def ratio(self) -> float:
        """Seconds of a round while working ahead over those of one while not; 1 before both ways were looked at."""
        return math.exp(self._log_ratio)

    @property
    def _length(self) -> int:
        """Rounds of the phase that runs now."""
        return self._stay if self.working is self.preferred and self._looks >= LEAST_LOOKS else LOOK

    def _end_phase(self) -> None:
        looked = self.working is not self.preferred
        if looked:
            self._compare()
        self._phase += 1
        self._rounds = 0
        self._before, self._now = self._now, {}
        self.working = not self.working
        if looked and self._looks >= LEAST_LOOKS:
            self._judge()

    def _compare(self) -> None:
        """This look with the rounds before it."""
        pairs = [(each, self._before[block]) for block, each in self._now.items() if block in self._before]
        weights = [min(now.count, before.count) for now, before in pairs]
        if sum(weights) < _LEAST_PAIRS:
            return
        now, before = (
            sum(weight * pair[index].value for weight, pair in zip(weights, pairs, strict=True)) for index in (0, 1)
        )
        if now <= 0.0 or before <= 0.0:
            return
        observed = math.log(now / before) if self.working else math.log(before / now)
        self._looks += 1
        self._log_ratio += max(1.0 - _KEEP, 1.0 / self._looks) * (observed - self._log_ratio)

    def _judge(self) -> None:
        """After a look at the other way, with the preferred one in force again."""
        if self.preferred and self.ratio > CLEARLY:
            self.preferred = self.working = False
            self.pauses += 1
            self._stay = FIRST_STAY
            logger.info("drafting ahead pauses: rounds take %.2f times as long with it", self.ratio)
        elif not self.preferred and self.ratio < 1.0 / CLEARLY:
            self.preferred = self.working = True
            self._stay = FIRST_STAY
            logger.info("drafting ahead goes on: rounds take %.2f times as long with it", self.ratio)
        elif not self.preferred:
            self._stay = min(2 * self._stay, LONGEST_STAY)
