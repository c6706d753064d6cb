"""What rounds cost on this deployment, learnt from the rounds themselves: C_d and C_t as the workers report them, and
what a round waits beyond that.

A forward is timed by the tokens it runs, all its requests together: what `crowd.py` needs for requests that share forwards, and
`round_seconds` for the case that all of them take the same block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite, log

from tandem.v1 import draft_pb2, target_pb2

ORDINARY_TOKENS = 4
"""Most tokens that a worker reads before the block in a round like any other."""

_KEEP = 0.85
"""Weight of what a mean was, against one more observation."""
_FIRST = 3
"""Observations of which the plain mean is taken, before old ones begin to fade."""
_MOST_TIMES = 3.0
"""An observation counts as at most so many times the mean, or so small a part of it: one stall is not a trend."""
_SELDOM = 0.03
"""Weight of an observation that is longer than usual, as behind a prefill, or a stall."""
_FOLLOW = 0.2
"""Part of a forward's deviation that the level takes up, at least."""
_LEARN = 0.05
"""And a size's share of the level, where all of the level comes from other sizes."""
_MOST_APART = 0.5
"""A deviation counts as at most so much, as a logarithm: it may be a stall."""
_FOLLOW_AGAIN = 0.7
"""Part that the level takes up, of all of it, where the forward before was as far off: the machine has changed."""
_LEAST_SECONDS = 1e-9
"""No forward takes less, whatever a clock says."""
_EXACT_CELLS = 16
"""Forwards up to so many tokens are told apart one by one; larger ones by quarters of an octave."""
_SLOPE_OF_ONE = 0.05
"""Cost of one more token over that of the forward, where a single size was ever timed."""
_LEAST_SHARE = 0.2
"""A smaller forward than any timed is taken to cost at least this share of the smallest one timed."""
_RECENT = 16
"""Forwards among which one that is told of again is looked for."""
_FAR_BELOW = 0.5
TOGETHER = 1.5
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
        """What the answer says; None if it doesn't, or says what can't be."""
        if not answer.HasField("time") or not 0.0 <= answer.time.seconds < inf:
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

    __slots__ = ("_bounded", "_usual", "count", "value")

    def __init__(self, value: float = 0.0, *, bounded: bool = True, usual: float = inf) -> None:
        """`bounded`: an observation is cut to a bounded multiple of the mean, and so is no stall a trend. `usual`: one above it, and above
        the mean, counts little."""
        self.value = value
        self.count = 0
        self._bounded = bounded
        self._usual = usual

    def add(self, observed: float) -> None:
        """One more."""
        self.count += 1
        usual = max(self._usual, self.value)
        if observed > usual:
            self.value += _SELDOM * (min(observed, usual * _MOST_TIMES) - self.value)
        elif self.count > _FIRST:
            if self._bounded and self.value > 0.0:
                observed = min(max(observed, self.value / _MOST_TIMES), self.value * _MOST_TIMES)
            self.value += (1.0 - _KEEP) * (observed - self.value)
        else:
            self.value += (observed - self.value) / self.count


class ForwardCurve:
    """Seconds of a forward by its tokens: straight lines through what was timed, never falling.

    A machine's speed changes by more than sizes differ, for all sizes alike. So a level follows each forward, and a size is
    known by its share of the level: what was timed while the machine was slow says nothing false of now. A share is learnt
    as far as the level comes from other sizes; a stretch of one size is about the level alone.
    """

    def __init__(self) -> None:
        self._sizes: list[float] = []
        self._shares: list[float] = []
        self._compared: list[float] = []
        """Forwards of each size that were compared with others; of a stretch of one size few count."""
        self._level = 0.0
        self._forwards = 0
        self._last = 0.0
        self._from_others = 1.0
        """How much of the level comes from other sizes than the last one."""
        self._far = 0.0
        """By how much the last forward was further off than one counts."""
        self._rising: list[float] | None = None
        """The shares as they are read; None until that is asked for."""

    @property
    def known(self) -> bool:
        """Whether any forward was timed."""
        return bool(self._sizes)

    def scale(self, factor: float) -> None:
        """The machine is so many times slower than at the last forward, as others show."""
        self._level *= factor

    def add(self, tokens: float, seconds: float) -> float:
        """One more forward, or the mean of a few of about the same size. Returns how many times slower the machine is taken to be
        now."""
        if not isfinite(seconds):
            return 1.0
        seconds = max(seconds, _LEAST_SECONDS)
        size = _cell(tokens)
        place = self._place(size, seconds)
        before = self._level
        self._forwards += 1
        deviation = log(seconds / (self._level * self._shares[place]))
        apart = min(max(deviation, -_MOST_APART), _MOST_APART)
        far = deviation - apart
        again, self._far = far * self._far > 0.0, far
        follow = _FOLLOW_AGAIN if again else max(1.0 / self._forwards, _FOLLOW)
        self._from_others = self._from_others * (1.0 - follow) if size == self._last else 1.0
        self._last = size
        # A stall says little of the size, and as little of the machine: counted for one alone, stalls would add up in it without end.
        says = (apart / deviation) ** 2 if far else 1.0
        self._level *= exp(follow * (deviation if again else says * apart))
        if len(self._sizes) > 1:
            says *= self._from_others
            self._compared[place] += says
            self._shares[place] *= exp(says * max(1.0 / (self._compared[place] + 1.0), _LEARN) * apart)
            self._centre()
        return self._level / before

    def seconds(self, tokens: float) -> float:
        """Between two sizes on the line through them, beyond all of them on from the outermost; 0 before any is known."""
        return self._level * self._share(tokens) if self._sizes else 0.0

    def _place(self, size: float, seconds: float) -> int:
        """Where the size is kept. A new one begins as what the others let expect."""
        place = bisect_left(self._sizes, size)
        if place == len(self._sizes) or self._sizes[place] != size:
            if not self._sizes:
                self._level = seconds
            share = self._share(size) if self._sizes else 1.0
            self._sizes.insert(place, size)
            self._shares.insert(place, share)
            self._compared.insert(place, 0.0)
            self._centre()
        return place

    def _centre(self) -> None:
        """The shares say how sizes compare; what they have in common is the level's."""
        common = exp(sum(map(log, self._shares)) / len(self._shares))
        self._shares = [share / common for share in self._shares]
        self._level *= common
        self._rising = None

    def _share(self, tokens: float) -> float:
        if self._rising is None:
            self._rising = _rising(self._shares, [min(count + 1.0, 1.0 / _LEARN) for count in self._compared])
        sizes, shares = self._sizes, self._rising
        last = len(sizes) - 1
        if last == 0:
            slope = _SLOPE_OF_ONE * shares[0]
            return max(shares[0] + slope * (tokens - sizes[0]), _LEAST_SHARE * shares[0])
        # The line through the outermost: two neighbours differ by little more than their noise.
        slope = (shares[last] - shares[0]) / (sizes[last] - sizes[0])
        if tokens >= sizes[last]:
            return shares[last] + slope * (tokens - sizes[last])
        if tokens <= sizes[0]:
            return max(shares[0] + slope * (tokens - sizes[0]), _LEAST_SHARE * shares[0])
        above = bisect_left(sizes, tokens)
        between = (tokens - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
        return shares[above - 1] + between * (shares[above] - shares[above - 1])


@dataclass(slots=True)
class _Heard:
    """A forward, and the shortest wait of those that were in it: the others waited for that one to come."""

    forward: WorkerTime
    shortest_wait: float


class RoundCosts:
    """What a round of any block size would take now; shared by all requests of an orchestrator."""

    def __init__(self, requests: Callable[[], int] = lambda: 1) -> None:
        """`requests`: how many run at the time."""
        self._requests = requests
        self.rounds = 0
        """Rounds observed."""
        self.plain_round: int | None = None
        """The last of them that had no block."""
        self.forwards = 0
        """The target's, of which a round has told."""
        self.plain_forward = 0
        """The last of them without any block."""
        self._draft = ForwardCurve()
        self._target = ForwardCurve()
        self._recent: deque[_Heard] = deque()
        """Forwards of several requests that were heard of last; several targets answer in turns."""
        self._items = FadingMean(1.0)
        """In a forward of the target."""
        self._draft_batch = FadingMean(1.0)
        # Of the requests: how many there are is known at once, how many of them share a forward only by their rounds.
        self._target_share = FadingMean(1.0)
        # How the waits compare with the work: queues, and for the draft what it did ahead of time.
        self._draft_wait = FadingMean(1.0, bounded=False, usual=TOGETHER)
        self._target_wait = FadingMean(1.0, usual=1.0)
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
            moved = self._observe_target(times.block + 1, times.verify_seconds, times.target)
            if not times.block:
                self.plain_round = self.rounds
            if not times.block or (times.draft is not None and not times.draft.forwards):
                # Nothing is heard of the draft's model: how the two compare is taken to last, so that the choice doesn't follow the machine.
                self._draft.scale(moved)

    @property
    def batch(self) -> float:
        """Requests that a forward of the target is likely to have, at least one; while none runs, as it was."""
        requests = self._requests()
        return max(1.0, self._target_share.value * requests if requests else self._items.value)

    @property
    def crossing(self) -> float:
        """Seconds that a block takes beside its draft steps."""
        return self._draft_overhead.value

    @property
    def overhead(self) -> float:
        """Seconds that a round takes beside its draft steps and its forward."""
        return self._target_overhead.value

    def draft_seconds(self, items: float) -> float:
        """Of a draft step that so many requests take, as far as it is waited for."""
        return self._draft_wait.value * self._draft.seconds(items)

    def target_seconds(self, tokens: float) -> float:
        """Of a forward of so many tokens, and of what it is waited for."""
        factor = self._target_wait.value if self.batch > TOGETHER else 1.0
        return factor * self._target.seconds(tokens)

    def round_seconds(self, longest: int) -> list[float]:
        """The expected seconds of a round with a block of 0, 1, ... `longest` tokens, if all requests take the same."""
        step, batch = self.draft_seconds(self._draft_batch.value), self.batch
        return [
            (self.crossing + block * step if block else 0.0) + self.target_seconds(batch * (block + 1)) + self.overhead
            for block in range(longest + 1)
        ]

    def reading_seconds(self, tokens: int) -> float:
        """What so many tokens of a prefix would take the draft, if all requests had as many; far beyond the forwards that were
        timed, so no more than a guess."""
        # Blocks that came at no time say nothing of it.
        return max(1.0, self._draft_wait.value) * self._draft.seconds(self.batch * tokens)

    def _observe_draft(self, block: int, waited: float, draft: WorkerTime | None) -> None:
        if draft is None:
            draft = WorkerTime(waited, block, block, block)
        if draft.forwards:
            self._draft_batch.add(draft.items / draft.forwards)
            self._draft.add(draft.tokens / draft.forwards, draft.seconds / draft.forwards)
        work = block * self._draft.seconds(self._draft_batch.value)
        beyond = max(0.0, waited - draft.seconds)
        alone = self.batch <= TOGETHER and draft.items <= max(1, draft.forwards)
        if alone or beyond < _FAR_BELOW * self._draft_overhead.value:
            self._draft_overhead.add(beyond)
        # Alone nothing of what was drafted ahead.
        mine = draft.seconds if alone else max(0.0, waited - self._draft_overhead.value)
        if work > 0.0:
            self._draft_wait.add(min(mine / work, _MOST_TIMES))

    def _observe_target(self, rows: int, waited: float, target: WorkerTime | None) -> float:
        """Returns how many times slower the target is taken to be now."""
        if target is None:
            target = WorkerTime(waited, 1, rows, 1)
        if target.forwards != 1:
            return 1.0
        beyond = max(0.0, waited - target.seconds)
        # Among others it is mostly a wait for theirs; but an overhead that rounds are far below is wrong.
        if (self.batch <= TOGETHER and target.items <= 1) or beyond < _FAR_BELOW * self._target_overhead.value:
            self._target_overhead.add(beyond)
        wait = max(1.0, (waited - self._target_overhead.value) / target.seconds) if target.seconds > 0.0 else 1.0
        if target.items > 1:
            heard = next((each for each in self._recent if each.forward == target), None)
            if heard is not None:
                heard.shortest_wait = min(heard.shortest_wait, wait)
                return 1.0  # all of the forward's items tell of it
            self._recent.appendleft(_Heard(target, wait))
            if len(self._recent) > _RECENT:
                self._target_wait.add(self._recent.pop().shortest_wait)
        self.forwards += 1
        if target.tokens <= target.items:
            self.plain_forward = self.forwards
        self._items.add(target.items)
        self._target_share.add(target.items / max(1, self._requests()))
        return self._target.add(target.tokens, target.seconds)


def _cell(tokens: float) -> float:
    if tokens <= _EXACT_CELLS:
        return float(round(tokens))
    size = float(_EXACT_CELLS)
    while size * 1.19 < tokens:
        size *= 1.19
    return size


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest to the values that never falls: neighbours in the wrong order take their common mean."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        total, heavy, count = value * weight, weight, 1
        while pools and pools[-1][0] * heavy > total * pools[-1][1]:
            before = pools.pop()
            total, heavy, count = total + before[0], heavy + before[1], count + before[2]
        pools.append((total, heavy, count))
    return [total / heavy for total, heavy, count in pools for _ in range(count)]
