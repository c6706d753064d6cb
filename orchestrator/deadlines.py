"""Limits of many short waits, with one timer for all of them: setting one for each wait, and taking it back, costs more
than most of what is waited for.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadlines:
    """The limits of an event loop's waits of one kind. Cheap where all of them are given the same time, since the timer is
    then set once in that time."""

    def __init__(self) -> None:
        self._open: set[Limit] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one that runs. Asked for once: Python asks the system for the process each time."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def within(self, seconds: float) -> Limit:
        """`with` it, the running task gets a TimeoutError, as from `asyncio.timeout`, for what takes longer."""
        return Limit(self, seconds)

    def _begin(self, limit: Limit, loop: asyncio.AbstractEventLoop) -> None:
        self._open.add(limit)
        if self._timer is not None and self._timer.when() > limit.ends:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = loop.call_at(limit.ends, self._look, loop)

    def _end(self, limit: Limit) -> None:
        self._open.discard(limit)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Expires what is due, and sets the timer for the next one."""
        now, self._timer = loop.time(), None
        for limit in [limit for limit in self._open if limit.ends <= now]:
            self._open.discard(limit)
            limit.expire()
        if self._open:
            self._timer = loop.call_at(min(limit.ends for limit in self._open), self._look, loop)


class Limit:
    """One wait of one task."""

    __slots__ = ("_cancelling", "_deadlines", "_expired", "_seconds", "_task", "ends")

    def __init__(self, deadlines: Deadlines, seconds: float) -> None:
        self._deadlines = deadlines
        self._seconds = seconds
        self._expired = False

    def __enter__(self) -> None:
        loop = self._deadlines.loop
        task = asyncio.current_task(loop)
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self.ends = loop.time() + self._seconds
        self._deadlines._begin(self, loop)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._deadlines._end(self)
        # Like asyncio.timeout: a cancellation that somebody else asked for as well is passed on.
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Breaks the wait off."""
        self._expired = True
        self._task.cancel()
