"""What rounds cost on this deployment, learnt from the rounds themselves: C_d and C_t as the workers report them, and
what a round waits beyond that.

A forward is timed by the tokens it runs, all its requests together. So the cost of a block size can be read off for the
case that every request of the batch takes it, which is what a policy followed by all of them amounts to: each alone
would see its longer block paid for by the others.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from tandem.v1 import draft_pb2, target_pb2

ORDINARY_TOKENS = 4
"""Most tokens that a worker reads before the block in a round like any other."""

_KEEP = 0.85
"""Weight of what a mean was, against one more observation."""
_FIRST = 3
"""Observations of which the plain mean is taken, before old ones begin to fade."""
_MOST_TIMES = 3.0
"""An observation counts as at most so many times the mean, or so small a part of it: one stall is not a trend."""
_EXACT_CELLS = 16
"""Forwards up to so many tokens are told apart one by one; larger ones by quarters of an octave."""
_SLOPE_OF_ONE = 0.05
"""Cost of one more token over that of the forward, where a single size was ever timed."""
_LEAST_SHARE = 0.2
"""A smaller forward than any timed is taken to cost at least this share of the smallest one timed."""
_TOGETHER = 1.5
"""Requests in a forward from which on waiting for others is the rule."""


@dataclass(slots=True)
class WorkerTime:
    """What a worker says about one answer: sums over the forwards that the item was in."""

    seconds: float
    forwards: int
    tokens: int
    """Of all items in these forwards."""
    items: int

    @classmethod
    def of(cls, answer: draft_pb2.Proposal | target_pb2.Verdict) -> WorkerTime | None:
        """What the answer says; None if it doesn't."""
        if not answer.HasField("time"):
            return None
        time = answer.time
        return cls(time.seconds, time.forwards, time.tokens, time.items)


@dataclass(slots=True)
class RoundTimes:
    """One round, with what of it is typical."""

    block: int
    propose_seconds: float | None
    """The wait for the draft; None where that says nothing about the next round, as when it had more to read."""
    verify_seconds: float | None
    """The wait for the target, and what follows up to the acceptance; None likewise."""
    draft: WorkerTime | None
    """None where the draft doesn't say."""
    target: WorkerTime | None
    asked: int | None = None
    """Tokens that the draft was asked for, where that may be more than the block has; None: as many as it has."""


class FadingMean:
    """A mean in which old observations fade."""

    __slots__ = ("_bounded", "count", "value")

    def __init__(self, value: float = 0.0, *, bounded: bool = True) -> None:
        """`bounded`: an observation is cut to a bounded multiple of the mean, and so is no stall a trend."""
        self.value = value
        self.count = 0
        self._bounded = bounded

    def add(self, observed: float) -> None:
        """One more."""
        self.count += 1
        if self.count > _FIRST:
            if self._bounded and self.value > 0.0:
                observed = min(max(observed, self.value / _MOST_TIMES), self.value * _MOST_TIMES)
            self.value += (1.0 - _KEEP) * (observed - self.value)
        else:
            self.value += (observed - self.value) / self.count


class ForwardCurve:
    """Seconds of a forward by its tokens: straight lines through what was timed."""

    def __init__(self) -> None:
        self._sizes: list[float] = []
        self._cells: list[FadingMean] = []

    @property
    def known(self) -> bool:
        """Whether any forward was timed."""
        return bool(self._sizes)

    def timed(self, tokens: float) -> bool:
        """Whether forwards of this size were timed."""
        return _cell(tokens) in self._sizes

    def add(self, tokens: float, seconds: float) -> None:
        """One more forward, or the mean of a few of about the same size."""
        size = _cell(tokens)
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes) or self._sizes[place] != size:
            self._sizes.insert(place, size)
            self._cells.insert(place, FadingMean())
        self._cells[place].add(seconds)

    def seconds(self, tokens: float) -> float:
        """Between two sizes on the line through them, beyond all of them on from the outermost; 0 before any is known."""
        sizes, cells = self._sizes, self._cells
        if not sizes:
            return 0.0
        last = len(sizes) - 1
        if last == 0:
            slope = _SLOPE_OF_ONE * cells[0].value
            return max(cells[0].value + slope * (tokens - sizes[0]), _LEAST_SHARE * cells[0].value)
        if tokens >= sizes[last]:
            # The line to the smallest size: two neighbours differ by little more than their noise.
            slope = max(0.0, cells[last].value - cells[0].value) / (sizes[last] - sizes[0])
            return cells[last].value + slope * (tokens - sizes[last])
        if tokens <= sizes[0]:
            slope = max(0.0, cells[last].value - cells[0].value) / (sizes[last] - sizes[0])
            return max(cells[0].value + slope * (tokens - sizes[0]), _LEAST_SHARE * cells[0].value)
        above = bisect_left(sizes, tokens)
        share = (tokens - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return cells[above - 1].value + share * (cells[above].value - cells[above - 1].value)


class RoundCosts:
    """What a round of any block size would take now; shared by all requests of an orchestrator."""

    def __init__(self) -> None:
        self.rounds = 0
        """Rounds observed."""
        self.plain_round: int | None = None
        """The last of them that had no block."""
        self._draft = ForwardCurve()
        self._target = ForwardCurve()
        self._draft_batch = FadingMean(1.0)
        self._target_batch = FadingMean(1.0)
        # How the waits compare with the work: queues, and for the draft what it did ahead of time.
        self._draft_wait = FadingMean(1.0, bounded=False)
        self._target_wait = FadingMean(1.0)
        # What a round waits beyond the work whatever the size of its block: wire and bookkeeping.
        self._draft_overhead = FadingMean()
        self._target_overhead = FadingMean()

    @property
    def draft_known(self) -> bool:
        """Whether a draft was ever timed."""
        return self._draft.known

    @property
    def target_known(self) -> bool:
        """Whether a verification was ever timed."""
        return self._target.known

    def observe(self, times: RoundTimes) -> None:
        """One more round."""
        self.rounds += 1
        if times.block and times.propose_seconds is not None:
            self._observe_draft(times.block, times.propose_seconds, times.draft)
        if times.verify_seconds is not None:
            self._observe_target(times.block + 1, times.verify_seconds, times.target)
            if not times.block:
                self.plain_round = self.rounds

    def round_seconds(self, longest: int) -> list[float]:
        """The expected seconds of a round with a block of 0, 1, ... `longest` tokens, if all requests take the same."""
        step = self._draft_wait.value * self._draft.seconds(self._draft_batch.value)
        batch = self._target_batch.value
        factor = self._target_wait.value if batch > _TOGETHER else 1.0
        crossing, overhead = self._draft_overhead.value, self._target_overhead.value
        return [
            (crossing + block * step if block else 0.0) + factor * self._target.seconds(batch * (block + 1)) + overhead
            for block in range(longest + 1)
        ]

    def _observe_draft(self, block: int, waited: float, draft: WorkerTime | None) -> None:
        if draft is None:
            draft = WorkerTime(waited, block, block, block)
        if draft.forwards:
            self._draft_batch.add(draft.items / draft.forwards)
            self._draft.add(draft.tokens / draft.forwards, draft.seconds / draft.forwards)
        work = block * self._draft.seconds(self._draft_batch.value)
        if self._draft_batch.value < _TOGETHER:
            self._draft_overhead.add(max(0.0, waited - draft.seconds))
            mine = draft.seconds  # nothing of what was drafted ahead
        else:
            mine = max(0.0, waited - self._draft_overhead.value)
        if work > 0.0:
            self._draft_wait.add(min(mine / work, _MOST_TIMES))

    def _observe_target(self, rows: int, waited: float, target: WorkerTime | None) -> None:
        if target is None:
            target = WorkerTime(waited, 1, rows, 1)
        if target.forwards != 1:
            return
        self._target_batch.add(target.items)
        self._target.add(target.tokens, target.seconds)
        if target.items < _TOGETHER:
            self._target_overhead.add(max(0.0, waited - target.seconds))
        elif target.seconds > 0.0:
            self._target_wait.add(max(1.0, (waited - self._target_overhead.value) / target.seconds))


def _cell(tokens: float) -> float:
    if tokens <= _EXACT_CELLS:
        return float(round(tokens))
    size = float(_EXACT_CELLS)
    while size * 1.19 < tokens:
        size *= 1.19
    return size
