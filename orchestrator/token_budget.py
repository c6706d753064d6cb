"""How many tokens a caller may use in a while: so many a minute, of which a minute's worth at once."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 60.0


class TokenBudget:
    """A bucket that fills at a steady rate up to what a minute brings.

    It is paid from as tokens come, since nobody knows before how many a request will take: what runs when the bucket
    is empty goes on, at its cost, and new requests wait until that is made good.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._per_minute = 0
        self._left = 0.0
        self._counted_at = clock()

    def allow(self, per_minute: int) -> None:
        """Sets the rate. What is left is kept, and a bucket that had no rate before begins full."""
        self._fill()
        if not self._per_minute:
            self._left = per_minute
        self._per_minute = per_minute
        self._left = min(self._left, per_minute)

    def spend(self, tokens: int) -> None:
        """So many were used; there may be fewer than none left."""
        self._left -= tokens

    def seconds_until_left(self) -> float:
        """0.0 where a token is left, else when there will be one."""
        self._fill()
        return max(0.0, (1.0 - self._left) * SECONDS / self._per_minute) if self._per_minute else 0.0

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._left + (now - self._counted_at) * self._per_minute / SECONDS, self._per_minute)
        self._counted_at = now
