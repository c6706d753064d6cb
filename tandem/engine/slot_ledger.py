"""What each column of each slot was computed from: a second set of books, kept only where invariants are checked.

A session believes that the cache holds its first tokens. Rolling back, sharing a prefix and handing a slot on all rest on
that belief, and a mistake in any of them would show as a text that is slightly wrong. Here it shows as an error.
"""

from __future__ import annotations

import numpy as np

from tandem.engine.feed import Feed
from tandem.engine.invariants import require
from tandem.engine.session import Session


class SlotLedger:
    """The token behind each column, uint32 [slots, columns]."""

    def __init__(self, slots: int, columns: int) -> None:
        self._tokens = np.zeros((slots, columns), dtype=np.uint32)

    def ran(self, feed: Feed) -> None:
        """A forward has stored the feed's keys and values."""
        self._tokens[feed.slot, feed.start : feed.start + feed.token_ids.size] = feed.token_ids

    def copied(self, source: int, target: int, start: int, end: int) -> None:
        """Columns of one slot were copied to another."""
        self._tokens[target, start:end] = self._tokens[source, start:end]

    def check(self, session: Session) -> None:
        """The slot holds what the session believes; raises InvariantError."""
        held = session.cached_length
        same = self._tokens[session.slot, :held] == session.tokens.view(0, held)
        require(bool(same.all()), "the slot holds the keys and values of the session's tokens")
