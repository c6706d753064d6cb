"""Which replicas are left alone for now: those that lie, are late time and again, or are much worse than their peers.

A replica is benched for a time that doubles with each benching in a row. Then one session may try it; a good answer clears its
record, another fault benches it again. Sessions that sit at a replica when it is benched go elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

log = logging.getLogger(__name__)

LONGEST_SECONDS = 30.0
PROBE_SECONDS = 1.0
"""After its time is up, a replica is tried by one session in so many seconds."""
STRIKES = 3
"""Faults in a row after which a replica is benched, where one alone may be nobody's fault."""
YIELD_TOKENS = 256
"""Draft tokens after which a yield says something."""
COLLAPSE_RATIO = 0.25
"""A replica whose yield is below this share of a peer's is benched: drafts of one pool have the same model."""


class Bench:
    """One replica's record."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._strikes = 0
        self._silences = 0
        self._silent_at = 0.0
        self._in_a_row = 0
        self._until = 0.0
        self._drafted = 0
        self._accepted = 0
        self.reason = ""
        """Why it is benched, or on probation; empty where it is neither."""
        self.benchings = 0
        """Rises with each; a session that sat down before gets up."""

    @property
    def usable(self) -> bool:
        """Whether a session may sit down."""
        return not self.reason or time.monotonic() >= self._until

    @property
    def due(self) -> bool:
        """Whether it should be tried, to see if it is well again."""
        return bool(self.reason) and time.monotonic() >= self._until

    def taken(self) -> None:
        """A session sits down. Where it is a trial, nobody else does for a while."""
        if self.reason:
            self._until = time.monotonic() + PROBE_SECONDS

    def answered(self) -> None:
        """A good answer, in time."""
        self._strikes = self._silences = 0
        if self.reason:
            log.info("%s is well again", self._name)
            self.reason, self._in_a_row = "", 0

    def answered_late(self) -> None:
        """It lives."""
        self._silences = 0

    def silent(self, reason: str, first_seconds: float, asked_at: float) -> bool:
        """No answer in time to a block that may be asked for shorter; since when it was waited for, by the monotonic clock. All that
        wait at the same time count once, and nothing counts once a late answer comes. Returns whether it is benched for it."""
        if asked_at < self._silent_at:
            return False
        self._silences, self._silent_at = self._silences + 1, time.monotonic()
        return self._silences >= STRIKES and self.fault(reason, first_seconds, at_once=True)

    def fault(self, reason: str, first_seconds: float, *, at_once: bool) -> bool:
        """A bad answer or none; `at_once` if one is enough. Returns whether it is benched for it."""
        self._strikes += 1
        if self._strikes < STRIKES and not at_once and not self.reason:
            return False
        seconds = min(first_seconds * 2**self._in_a_row, max(LONGEST_SECONDS, first_seconds))
        self._strikes = self._silences = 0
        self._in_a_row = min(self._in_a_row + 1, 16)
        self._drafted = self._accepted = 0
        self._until = time.monotonic() + seconds
        self.reason = reason
        self.benchings += 1
        log.warning("%s is benched for %.3g s: %s", self._name, seconds, reason)
        return True

    def yielded(self, drafted: int, accepted: int) -> None:
        """So many of its tokens were tried, and became output."""
        if self._drafted >= 4 * YIELD_TOKENS:
            self._drafted //= 2
            self._accepted //= 2
        self._drafted += drafted
        self._accepted += accepted

    def collapsed(self, peers: Iterable[Bench]) -> bool:
        """Whether its tokens are accepted far less often than those of a peer that could take its place."""
        if self._drafted < YIELD_TOKENS:
            return False
        best = max((peer._rate for peer in peers if peer is not self and not peer.reason), default=0.0)
        return self._rate < COLLAPSE_RATIO * best

    @property
    def _rate(self) -> float:
        return self._accepted / self._drafted if self._drafted >= YIELD_TOKENS else 0.0
