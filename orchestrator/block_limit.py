"""How long a block may be after the draft was late: half as long each time, and longer again once it keeps its time.

The rung between whole blocks and none. A shorter block takes a draft that is slow, or has many to serve, less time; only one
that is late with a single token is left alone. Longer blocks are tried again after intervals that grow while they are late.
Output doesn't depend on it: a block's length is fixed before its tokens are drawn, by times alone.
"""

from __future__ import annotations

_FIRST_INTERVAL, _LONGEST_INTERVAL = 4, 64
"""Blocks in time, one after the other, after which one of twice the length is tried."""
_HOLDS = _FIRST_INTERVAL
"""Blocks in time, one after the other, after which a length that was tried is no trial any more."""


class BlockLimit:
    """Of one request at one draft replica."""

    def __init__(self) -> None:
        self._limit: int | None = None
        self._in_time = 0
        self._interval = _FIRST_INTERVAL
        self._trying = False

    @property
    def tokens(self) -> int | None:
        """The most to ask for, 1 or more; None where that is whatever is wanted."""
        return self._limit

    def of(self, gamma: int) -> int:
        """What to ask for where `gamma`, 1 or more, is wanted."""
        return gamma if self._limit is None else min(gamma, self._limit)

    def late(self, asked: int) -> int:
        """A block of `asked` tokens was late. Returns the new limit; 0: no block at all for a while, and then of one token."""
        if self._trying and self._limit is not None and 2 * asked > self._limit:
            self._interval = min(2 * self._interval, _LONGEST_INTERVAL)
        self._trying, self._in_time = False, 0
        self._limit = max(asked // 2, 1)
        return asked // 2

    def in_time(self, asked: int, longest: int) -> int | None:
        """A block of `asked` tokens came in time, of a request that may ask this replica for up to `longest`. Returns the new
        limit where longer ones are tried from now on."""
        if self._limit is None or asked < min(self._limit, longest):
            return None  # says nothing of the limit
        self._in_time += 1
        if self._trying and self._in_time >= _HOLDS:
            self._trying, self._interval = False, _FIRST_INTERVAL
        if self._trying or self._in_time < self._interval:
            return None
        if self._limit >= longest:
            self._limit = None  # whole blocks hold
            return None
        self._limit = min(2 * self._limit, longest)
        self._trying, self._in_time = True, 0
        return self._limit
