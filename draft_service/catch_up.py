"""Reading on while nothing is asked: what a model has not read since other sources gave the answers.

So that its turn, when it comes, doesn't begin with a long prefill. One forward at a time, of what many requests lack, or a
chunk of what one does, in turns: an item that comes meanwhile waits for one at most. What another slot holds is copied, not
read. A draft that is always busy does not catch up; the model then reads before its block, as after any prefill.
"""

from __future__ import annotations

import logging
from typing import Any

from tandem.engine.draft_stats import DraftStats
from tandem.engine.feed import Feed
from tandem.engine.idle import AheadStats, IdleWork, SlotWork
from tandem.engine.session import Session

logger = logging.getLogger(__name__)

_SHORT = 16
"""Tokens that a request may lack to share a forward with others."""
_MOST_TOGETHER = 16
_FAILURES = 3
"""After so many failed forwards there is no more of this."""


class CatchUp:
    """IdleWork; afterwards comes what else there is to do in such steps."""

    def __init__(self, chunk: int, stats: DraftStats, then: IdleWork | None = None) -> None:
        """`chunk`: most tokens of one request in a forward."""
        self._chunk = chunk
        self._draft_stats = stats
        self._then = then
        self._work: SlotWork | None = None
        self._behind: dict[Session, None] = {}
        self._short_was_last = False

    @property
    def stats(self) -> AheadStats:
        """Of what comes afterwards."""
        return self._then.stats if self._then is not None else AheadStats()

    @property
    def slots(self) -> int:
        """It writes to the sessions' own slots."""
        return self._then.slots if self._then is not None else 0

    @property
    def wanted(self) -> bool:
        """Whether anything is unread, or left to do afterwards."""
        return bool(self._behind) or (self._then is not None and self._then.wanted)

    def attach(self, work: SlotWork, first_slot: int) -> None:
        """The engine's: what runs feeds."""
        self._work = work
        if self._then is not None:
            self._then.attach(work, first_slot)

    def answered(self, job: Any) -> None:
        """Notes what the model has not read."""
        if _lacks(job.session) and self._draft_stats.failed_reads < _FAILURES:
            self._behind[job.session] = None
        if self._then is not None:
            self._then.answered(job)

    def ended(self, session: Session) -> None:
        """The request is over."""
        self._behind.pop(session, None)
        if self._then is not None:
            self._then.ended(session)

    def step(self) -> None:
        """One forward at most."""
        self._behind = {session: None for session in self._behind if _lacks(session)}
        if self._behind:
            self._read(self._next())
        elif self._then is not None:
            self._then.step()

    def _next(self) -> list[Session]:
        """In rising order of slots. Those that lack little do not keep the others waiting, nor the other way round."""
        assert self._work is not None
        short = [session for session in self._behind if _lacks(session) <= _SHORT]
        long = next((session for session in self._behind if _lacks(session) > _SHORT), None)
        self._short_was_last = bool(short) and not (long is not None and self._short_was_last)
        if not self._short_was_last:
            assert long is not None
            return [long]
        widest = max(_lacks(session) for session in short)
        return sorted(short[: max(1, min(_MOST_TOGETHER, self._work.most_tokens // widest))], key=_slot)

    def _read(self, sessions: list[Session]) -> None:
        """Where that fails, each of several is tried alone: one may be bad, or all together too large for the memory."""
        assert self._work is not None
        try:
            if len(sessions) == 1:
                self._work.take_over(sessions[0])
            feeds = [self._feed(session) for session in sessions]
            self._work.read(feeds)
        except Exception:
            # No answer is lost.
            self._draft_stats.failed_reads += 1
            logger.warning("reading on failed, for %d requests", len(sessions), exc_info=True)
            if len(sessions) == 1:
                self._give_up(sessions[0])
        else:
            for session, feed in zip(sessions, feeds, strict=True):
                session.cached_length += feed.token_ids.size
                self._draft_stats.read_tokens += feed.token_ids.size
            return
        for session in sessions if len(sessions) > 1 else ():  # outside: the error holds what the forward had allocated
            self._read([session])

    def _feed(self, session: Session) -> Feed:
        """The next tokens that the model has not read, without a wish for logits."""
        end = min(session.prefix_length, session.cached_length + self._chunk)
        return Feed(_slot(session), session.cached_length, session.tokens.view(session.cached_length, end), rows=0)

    def _give_up(self, session: Session) -> None:
        """What the slot holds now may not be finite: the model reads this prefix anew."""
        assert self._work is not None
        self._behind.pop(session)
        session.cached_length = 0
        self._work.clear(_slot(session))  # where even that fails, the device is beyond repair


def _lacks(session: Session) -> int:
    """Tokens of the prefix that are not read."""
    return max(0, session.prefix_length - session.cached_length)


def _slot(session: Session) -> int:
    assert session.slot is not None
    return session.slot
