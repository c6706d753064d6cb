"""What running services hold once a test is over: no request's slot, session, item, handler or key that stays for ever, and no
more threads, files, tasks and memory than a little above what they had after the first test.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import time
import urllib.request
from collections.abc import Iterator

import psutil
import redis

from tests.support.services import ServiceProcess, Stack

SETTLE_SECONDS = 120.0
"""A broken connection is noticed within a minute, whatever else the machine does."""
_LEVELS = re.compile(
    rb"^(tandem_(?:sessions|sessions_waiting|items_running|kv_cache_usage_perc|num_requests_running|num_requests_waiting"
    rb"|worker_sessions\{[^}]*\}|worker_items_pending\{[^}]*\})) (\S+)$",
    re.MULTILINE,
)
_TASKS = re.compile(rb"^tandem_event_loop_tasks (\S+)$", re.MULTILINE)
_NO_ANSWER = (OSError, http.client.HTTPException)
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Pools and executors fill up by use. A thread, a file or a task that each request leaves behind would be far more in the end.
_MOST_GROWTH = {"threads": 64, "files": 200, "tasks": 100, "MiB": 1000}


class StackLedger:
    """Of one stack, from test to test."""

    def __init__(self, stack: Stack, settle_seconds: float = SETTLE_SECONDS) -> None:
        self._stack = stack
        self._settle_seconds = settle_seconds
        self._processes: dict[str, psutil.Process] = {}
        self._first: dict[str, dict[str, float]] = {}
        self._cpu_seconds = -1.0

    def check(self) -> None:
        """Waits until no request holds anything; fails where that takes too long, or where anything else grows."""
        if self._idle_since_last():
            return
        deadline = time.monotonic() + self._settle_seconds
        while held := [what for service in self._running() for what in _held(service)]:
            assert time.monotonic() < deadline, f"after the test: {held}"
            time.sleep(0.05)
        assert not (kept := _kept_for_ever(self._stack)), f"keys that never expire: {kept}"
        for service in self._running():
            while grown := self._growth(service):  # connections and their tasks may just be ending
                assert time.monotonic() < deadline, f"{service.module} has more than after its first test: {grown}"
                time.sleep(0.2)
        self._idle_since_last()

    def _running(self) -> list[ServiceProcess]:
        return [each for each in self._stack.services if each.process is not None and each.process.poll() is None]

    def _idle_since_last(self) -> bool:
        """Whether no process has done anything to speak of since this was called last."""
        try:
            times = [self._process(service).cpu_times() for service in self._running()]
        except psutil.Error:
            return False
        before, self._cpu_seconds = self._cpu_seconds, sum(each.user + each.system for each in times)
        return before == self._cpu_seconds

    def _process(self, service: ServiceProcess) -> psutil.Process:
        assert service.process is not None
        known = self._processes.get(service.address)
        if known is None or known.pid != service.process.pid:  # it was started anew
            known = self._processes[service.address] = psutil.Process(service.process.pid)
            self._first.pop(service.address, None)
        return known

    def _growth(self, service: ServiceProcess) -> dict[str, float]:
        """What is too much beside the first time; nothing where the service ends just now."""
        try:
            now = self._amounts(service)
        except (psutil.Error, *_NO_ANSWER):
            return {}
        first = self._first.setdefault(service.address, now)
        return {what: now[what] - first[what] for what in now if now[what] - first[what] > _MOST_GROWTH[what]}

    def _amounts(self, service: ServiceProcess) -> dict[str, float]:
        process = self._process(service)
        now = {"threads": float(process.num_threads()), "files": float(process.num_fds())}
        if service in self._stack.orchestrators:
            # The workers' caches are memory that is there from the start, and touched as it is used.
            now["MiB"] = process.memory_info().rss / (1 << 20)
            now["tasks"] = float(found[1]) if (found := _TASKS.search(_metrics(service))) else 0.0
        return now


def _metrics(service: ServiceProcess) -> bytes:
    with _WITHOUT_PROXY.open(f"http://{service.metrics}/metrics", timeout=30) as response:
        return bytes(response.read())


def _held(service: ServiceProcess) -> Iterator[str]:
    try:
        page = _metrics(service)
    except _NO_ANSWER as error:
        yield f"{service.module} does not answer: {error}"
        return
    for name, value in _LEVELS.findall(page):
        if float(value):
            yield f"{service.module} {name.decode()} {value.decode()}"


def _kept_for_ever(stack: Stack) -> list[bytes]:
    with contextlib.closing(redis.Redis.from_url(stack.redis_url)) as store:
        keys = list(store.scan_iter(count=1000))
        pipeline = store.pipeline(transaction=False)
        for key in keys:
            pipeline.pttl(key)
        return [key for key, left in zip(keys, pipeline.execute(), strict=True) if left == -1]
