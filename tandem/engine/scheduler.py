"""Which tokens of which jobs run in a step.

Short feeds (verifications, draft steps, plain decoding) share one forward, or a few of like widths where padding all
to the widest would cost more than another forward: so on a CPU, hardly ever on a GPU. Long feeds, that is prefills, are cut into
chunks which run as a forward of their own, at most one in a step, so that a row of six tokens is never padded to a
chunk and decoding waits for one chunk at most. Where a forward hasn't room for all, streams take turns, and each one's jobs:
an orchestrator with many requests slows another one's no more than one with few does.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from tandem.engine.feed import Feed
from tandem.engine.forward_cost import FREE_TOKENS, ForwardCost
from tandem.engine.job import JobT

if TYPE_CHECKING:
    from tandem.engine.stream import Stream

_CLEARLY = 0.9


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step, in tokens."""

    short_feed: int = 17
    """Longest feed that shares the decode forward."""
    prefill_chunk: int = 256
    """Padded tokens of a prefill forward."""
    decode_tokens: int = 2048
    """Padded tokens of a decode forward."""
    forward_cost: ForwardCost = FREE_TOKENS
    """Where padding costs more than another forward, one is split."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[JobT]):
    """One forward: feeds in rising order of slots, each with its job."""

    jobs: list[JobT]
    feeds: list[Feed]


class Scheduler(Generic[JobT]):
    """The jobs that are running, in the order in which they are served."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._jobs: dict[JobT, None] = {}
        self._short_turns: _Turns[JobT] = _Turns()
        self._long_turns: _Turns[JobT] = _Turns()
        self.most_tokens = max(limits.decode_tokens, limits.prefill_chunk)
        """Padded tokens of a forward of several jobs, beside the other limits: what the memory turned out to hold."""

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: JobT) -> None:
        """Takes the job into the next step."""
        self._jobs[job] = None

    def remove(self, job: JobT) -> None:
        """Takes the job out; it must not be in a step that runs."""
        self._jobs.pop(job, None)

    def halve(self, batch: Batch[JobT]) -> None:
        """The batch was too large for the memory: from now on no forward of several jobs has more than half its tokens."""
        self.most_tokens = len(batch.feeds) * max(feed.token_ids.size for feed in batch.feeds) // 2

    def prefills(self) -> list[JobT]:
        """The jobs whose next feed is a chunk of prefill."""
        return [job for job in self._jobs if job.pending > self._limits.short_feed]

    def short_feeds(self) -> list[int]:
        """The sizes of what the next step would run, if there is no prefill in it; else nothing."""
        sizes = [job.pending for job in self._jobs]
        return sizes if all(size <= self._limits.short_feed for size in sizes) else []

    def plan(self) -> list[Batch[JobT]]:
        """The forwards of the next step, at most one of them a chunk of prefill. A job is in at most one of them."""
        short: list[JobT] = []
        long: list[JobT] = []
        for job in self._jobs:
            (short if job.pending <= self._limits.short_feed else long).append(job)
        batches = []
        if short:
            chosen = self._fit(self._short_turns, short, self._limits.short_feed, self._limits.decode_tokens)
            batches += [self._batch(group) for group in _alike(chosen, self._limits.forward_cost)]
        if long:
            chunk = self._limits.prefill_chunk
            batches.append(self._batch(self._fit(self._long_turns, long, chunk, chunk)))
        return batches

    def _fit(self, turns: _Turns[JobT], jobs: list[JobT], longest: int, budget: int) -> list[tuple[JobT, int]]:
        """The first jobs, with the size of each one's feed, that fit into the budget when padded to the widest."""
        budget = min(budget, self.most_tokens)
        chosen: list[tuple[JobT, int]] = []
        width = 0
        for job in turns.order(jobs):
            size = _feed_size(job, longest)
            if chosen and (len(chosen) + 1) * max(width, size) > budget:
                continue
            width = max(width, size)
            chosen.append((job, size))
        if len(chosen) < len(jobs):
            turns.took(chosen[0][0].stream)
            for job, _ in chosen:  # served now, so last in the next round
                del self._jobs[job]
                self._jobs[job] = None
        return chosen

    @staticmethod
    def _batch(chosen: list[tuple[JobT, int]]) -> Batch[JobT]:
        chosen.sort(key=_slot)
        return Batch([job for job, _ in chosen], [_feed(job, size) for job, size in chosen])


class _Turns(Generic[JobT]):
    """Whose turn it is in forwards that haven't room for all."""

    def __init__(self) -> None:
        self._count = itertools.count(1)
        self._last: weakref.WeakKeyDictionary[Stream, int] = weakref.WeakKeyDictionary()

    def order(self, jobs: list[JobT]) -> list[JobT]:
        """One job of each stream, then a second one of each, and so on; first the stream whose turn was longest ago."""
        lines: dict[Stream, list[JobT]] = {}
        for job in jobs:
            lines.setdefault(job.stream, []).append(job)
        if len(lines) == 1:
            return jobs
        in_order = [lines[stream] for stream in sorted(lines, key=lambda stream: self._last.get(stream, 0))]
        return [job for rank in itertools.zip_longest(*in_order) for job in rank if job is not None]

    def took(self, stream: Stream) -> None:
        """It came first."""
        self._last[stream] = next(self._count)


def _alike(chosen: list[tuple[JobT, int]], cost: ForwardCost) -> list[list[tuple[JobT, int]]]:
    """Splits into groups of like widths for as long as that is clearly cheaper."""
    chosen = sorted(chosen, key=_size)
    sizes = [size for _, size in chosen]
    borders = [index for index in range(1, len(sizes)) if sizes[index] > sizes[index - 1]]
    if not borders:
        return [chosen]
    seconds, at = min((cost.of(sizes[:index]) + cost.of(sizes[index:]), index) for index in borders)
    if seconds > _CLEARLY * cost.of(sizes):
        return [chosen]
    return [*_alike(chosen[:at], cost), *_alike(chosen[at:], cost)]


def _size(chosen: tuple[JobT, int]) -> int:
    return chosen[1]


def _slot(chosen: tuple[JobT, int]) -> int:
    slot = chosen[0].session.slot
    assert slot is not None
    return slot


def _feed_size(job: JobT, longest: int) -> int:
    """All that is pending, or a chunk that leaves the wanted rows for a later one."""
    pending = job.pending
    return pending if pending <= longest else min(longest, pending - job.rows)


def _feed(job: JobT, size: int) -> Feed:
    session = job.session
    assert session.slot is not None
    start = session.cached_length
    end = start + size
    rows = job.rows if end == session.tokens.length else 0
    return Feed(session.slot, start, session.tokens.view(start, end), rows)
