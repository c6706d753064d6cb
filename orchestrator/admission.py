"""How many requests run at once, and how many may wait for their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from .errors import Overloaded, Unavailable

RETRY_AFTER_SECONDS = 1.0


class Admission:
    """Grants places in the order of arrival; bounded in running requests, waiting requests and waiting time."""

    def __init__(self, max_running: int, max_waiting: int, max_waiting_seconds: float) -> None:
        self._places = asyncio.Semaphore(max_running)
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._max_waiting_seconds = max_waiting_seconds
        self.running = 0
        self.waiting = 0
        self._planned = 0
        """Requests that are being read, on their way to a place."""
        self.draining = False
        self.cut_off = False
        """Whether those that still run are being ended."""
        self._holders: set[asyncio.Task[Any]] = set()
        self._waiters: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def capacity(self) -> int:
        """Requests that can be here at the same time."""
        return self._max_running + self._max_waiting

    @contextmanager
    def planning(self) -> Iterator[None]:
        """Around what has to be done for a request before it can wait, such as encoding its prompt: raises Overloaded where it would
        find no room afterwards, Unavailable when the service is shutting down."""
        self._refuse_when_draining()
        if self.running + self.waiting + self._planned >= self.capacity:
            raise self._full()
        self._planned += 1
        try:
            yield
        finally:
            self._planned -= 1

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Holds a place for the body. Raises Overloaded when too many wait or the wait is too long, Unavailable when the
        service is shutting down."""
        task = asyncio.current_task()
        assert task is not None
        await self._wait_in_line(task)
        self.running += 1
        self._idle.clear()
        self._holders.add(task)
        try:
            yield
        finally:
            self._holders.discard(task)
            self.running -= 1
            self._places.release()
            if self.running == 0:
                self._idle.set()

    async def drain(self, seconds: float) -> bool:
        """Takes no more requests, sends those that wait away, and waits until none runs; False if some still did after
        `seconds`."""
        self.draining = True
        for task in self._waiters:
            task.cancel()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def end_all(self, seconds: float) -> None:
        """Cancels the requests that still run and gives them so long to say so."""
        self.cut_off = True
        for task in self._holders:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    async def _wait_in_line(self, task: asyncio.Task[Any]) -> None:
        self._waiters.add(task)
        try:
            await self._acquire()
        except asyncio.CancelledError:
            self._refuse_when_draining()
            raise
        finally:
            self._waiters.discard(task)

    async def _acquire(self) -> None:
        self._refuse_when_draining()
        if self._places.locked() and self.waiting >= self._max_waiting:
            raise self._full()
        self.waiting += 1
        try:
            # Not `wait_for`: up to Python 3.11 it loses a cancellation that comes together with the place.
            async with asyncio.timeout(self._max_waiting_seconds):
                await self._places.acquire()
        except TimeoutError:
            raise Overloaded(
                f"no place became free within {self._max_waiting_seconds:g} s", "QUEUE_TIMEOUT", RETRY_AFTER_SECONDS
            ) from None
        finally:
            self.waiting -= 1
        if self.draining:
            self._places.release()
            self._refuse_when_draining()

    def _full(self) -> Overloaded:
        return Overloaded(f"{self.running} requests run and {self.waiting} wait", "QUEUE_FULL", RETRY_AFTER_SECONDS)

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise Unavailable("the service is shutting down", "DRAINING", RETRY_AFTER_SECONDS)
