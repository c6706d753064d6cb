"""Watches what the store really does: every commit of a session raises its epoch by one, whoever made it."""

from __future__ import annotations

import re
import threading
from types import TracebackType

import redis

_LAST_WORD = "ECHO end-of-watch"
_CREATED = re.compile(r"HSET (\S+) fence 1 claim ")
_COMMITTED = re.compile(r"HSET (\S+) epoch (\d+) length (\d+)$")


class EpochWatch:
    """A context manager; at its end everything that happened in it was seen."""

    def __init__(self, redis_url: str) -> None:
        # Without a limit: of itself the client would take a store that has nothing to say for five seconds for a dead one.
        self._client = redis.Redis.from_url(redis_url, socket_timeout=None)
        self._at: dict[str, tuple[int, int]] = {}
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._watching = threading.Event()
        self.commits = 0
        self.violations: list[str] = []

    def __enter__(self) -> EpochWatch:
        self._thread.start()
        assert self._watching.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.execute_command(*_LAST_WORD.split())
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._client.close()

    def _watch(self) -> None:
        with self._client.monitor() as monitor:
            self._watching.set()
            for seen in monitor.listen():
                if seen["command"] == _LAST_WORD:
                    return
                if seen["client_type"] == "lua":
                    self._look_at(seen["command"])

    def _look_at(self, command: str) -> None:
        if created := _CREATED.match(command):
            self._at[created[1]] = (0, 0)
        elif committed := _COMMITTED.match(command):
            session, epoch, length = committed[1], int(committed[2]), int(committed[3])
            before = self._at.get(session, (0, 0))
            if epoch != before[0] + 1 or length <= before[1]:
                self.violations.append(f"{session} went from epoch and length {before} to {(epoch, length)}")
            self._at[session] = (epoch, length)
            self.commits += 1
