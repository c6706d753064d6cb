"""A discrete-event simulation of rounds: many requests, several draft and target devices, distances between them.

A request goes round and round: orchestrator, draft, target, orchestrator. The orchestrator takes all rounds that wait for it together, and
sends what becomes of them together. A device runs one forward at a time: a target takes all verifications that wait into one; a draft
takes one step for all blocks under way, which join and leave between steps, as in `tandem/engine`. No random numbers: outcomes of
rounds come from a sequence that fills the unit interval evenly, so that a short run has the means of a long one, and the same question
the same answer. All times in seconds.
"""

from __future__ import annotations

import heapq
import itertools
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from tandem.engine.gathering import Gathering

_Any = TypeVar("_Any")
GOLDEN = 0.6180339887498949
"""Steps of this length round the unit interval fill it most evenly (Weyl, 1916)."""
IN_STEP, IN_TURNS = 0.0, 1.0
"""How requests begin: at the same moment, or spread over a plain round."""
WARM_UP_SHARE = 0.2
MOST_TOKENS = 2048
"""In a forward, as `tandem/engine/scheduler.py` has it."""
ROUNDS, LEAST_ROUNDS = 800, 30
"""Of all requests together, and of each at least."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a forward by its size: straight lines through what was measured, the outermost going on."""

    points: tuple[tuple[float, float], ...]
    """Size and seconds, rising in size; one point alone stands for every size."""

    def seconds(self, size: float) -> float:
        """Never less than nothing."""
        sizes = [each for each, _ in self.points]
        seconds = [each for _, each in self.points]
        place = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
        if place == 0:
            return seconds[0]
        slope = (seconds[place] - seconds[place - 1]) / (sizes[place] - sizes[place - 1])
        return max(0.0, seconds[place] + slope * (size - sizes[place]))

    def of(self, sizes: Sequence[int]) -> float:
        """Of feeds of such sizes together."""
        return self.seconds(sum(sizes))


def curve(measured: Iterable[tuple[float, float]]) -> Curve:
    """Through measurements in any order; of several of one size the mean."""
    by_size: dict[float, list[float]] = {}
    for size, seconds in measured:
        by_size.setdefault(float(size), []).append(seconds)
    return Curve(tuple((size, sum(each) / len(each)) for size, each in sorted(by_size.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """What was measured of a pair of models on their devices."""

    draft_step: Curve
    """Of one forward, by the blocks in it."""
    target_forward: Curve
    """By the tokens in it, all requests together."""
    overhead: float
    """Of a round of one request, beside the models and the distance."""
    orchestrator: float = 0.0
    """What of the overhead keeps the orchestrator busy, so that only one round at a time can have it."""
    acceptance: tuple[float, ...]
    """By position: the probability that a draft token is accepted, if those before it are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the models run."""

    targets: int = 1
    drafts: int = 1
    """Devices of the drafts; 0: each target's device drafts for its own requests too, and no link is crossed."""
    orchestrators: int = 1
    draft_round_trip: float = 0.0
    target_round_trip: float = 0.0
    gather: bool = True
    """Whether a target waits a moment for requests that are about to come back (`TANDEM_TARGET_GATHER`)."""
    ahead: float = 0.0
    """Share of the blocks that the draft has ready when they are asked for, drafted while the target verified."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """How it goes in the long run."""

    tokens_per_second: float
    """Of all requests."""
    tokens_per_round: float
    draft_busy: float
    """Share of the time, mean over the devices; 0 where targets draft themselves."""
    target_busy: float


class _Orchestrator:
    """Decides the rounds of some requests: all that wait, together."""

    def __init__(self) -> None:
        self.waiting: list[_Request] = []
        self.running = False


class _Device:
    """Runs one forward at a time. One that has both models drafts all blocks first and verifies them together, as an engine of
    one process does."""

    def __init__(self, gathering: Gathering[_Request] | None = None) -> None:
        self.gathering = gathering
        self.verifying: list[_Request] = []
        self.drafting: list[_Request] = []
        self.running = False
        self.busy = 0.0


@dataclass(slots=True, eq=False)
class _Request:
    number: int
    orchestrator: _Orchestrator
    draft: _Device
    target: _Device
    rounds: int = 0
    missing: int = 0
    """Tokens that its block under way lacks."""
    tokens: list[tuple[float, int]] = field(default_factory=list)
    """Of each round, and when it was over."""


def simulate(
    constants: Constants, layout: Layout, *, requests: int, gamma: int, rounds: int = 0, spread: float = IN_TURNS
) -> Simulated:
    """Runs `requests` at once, all with blocks of `gamma`, for so many rounds of each; 0: enough for the means.

    They begin spread over `spread` plain rounds. It matters: a device takes what waits and waits for nothing, so requests that begin at the
    same moment move in step and share each forward for ever, and others end up in groups that take turns.
    """
    return _Run(constants, layout, requests, gamma, spread).run(rounds or max(LEAST_ROUNDS, ROUNDS // requests))


class _Run:
    def __init__(self, constants: Constants, layout: Layout, requests: int, gamma: int, spread: float) -> None:
        self._spread = spread
        self._constants, self._layout, self._gamma = constants, layout, gamma
        self._targets = [
            _Device(Gathering(constants.target_forward, lambda: MOST_TOKENS) if layout.gather else None)
            for _ in range(layout.targets)
        ]
        self._drafts = [_Device() for _ in range(layout.drafts)] or self._targets
        orchestrators = [_Orchestrator() for _ in range(layout.orchestrators)]
        self._requests = [
            _Request(number, _turn(orchestrators, number), _turn(self._drafts, number), _turn(self._targets, number))
            for number in range(requests)
        ]
        self._far = min(1, layout.drafts)
        self._now = 0.0
        self._wanted = self._unfinished = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._survival = list(itertools.accumulate(_acceptance(constants.acceptance, gamma), operator.mul))
        """The probability that so many tokens of the block and one more are accepted."""

    def run(self, rounds: int) -> Simulated:
        self._wanted, self._unfinished = rounds, len(self._requests)
        plain = self._constants.overhead + self._constants.target_forward.seconds(1)
        for request in self._requests:
            self._after(self._spread * plain * request.number / len(self._requests), partial(self._begin, request))
        while self._unfinished:
            self._now, _, happens = heapq.heappop(self._events)
            happens()
        # While all of them run, and after they have spread out.
        begin = WARM_UP_SHARE * self._now
        counted = [tokens for request in self._requests for time, tokens in request.tokens if time > begin]
        return Simulated(
            tokens_per_second=sum(counted) / (self._now - begin),
            tokens_per_round=sum(counted) / len(counted),
            draft_busy=_mean_busy(self._drafts, self._now) if self._far else 0.0,
            target_busy=_mean_busy(self._targets, self._now),
        )

    def _after(self, seconds: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), happens))

    def _begin(self, request: _Request) -> None:
        request.orchestrator.waiting.append(request)
        self._after(0.0, lambda: self._decide(request.orchestrator))

    def _decide(self, orchestrator: _Orchestrator) -> None:
        if orchestrator.running or not orchestrator.waiting:
            return
        orchestrator.running = True
        batch, orchestrator.waiting = orchestrator.waiting, []

        def decided() -> None:
            orchestrator.running = False
            for request in batch:
                self._send(request)
            self._after(0.0, lambda: self._decide(orchestrator))

        self._after(len(batch) * self._constants.orchestrator, decided)

    def _send(self, request: _Request) -> None:
        rest = self._constants.overhead - self._constants.orchestrator
        if not self._gamma:
            self._after(rest, lambda: self._to_target(request))
            return
        self._after(rest + self._far * self._layout.draft_round_trip / 2, lambda: self._at_draft(request))

    def _at_draft(self, request: _Request) -> None:
        if _even(request.rounds, request.number, GOLDEN**2) < self._layout.ahead:
            self._drafted(request)
            return
        request.missing = self._gamma
        request.draft.drafting.append(request)
        self._wake(request.draft)

    def _drafted(self, request: _Request) -> None:
        self._after(self._far * self._layout.draft_round_trip / 2, lambda: self._to_target(request))

    def _to_target(self, request: _Request) -> None:
        self._after(self._layout.target_round_trip / 2, lambda: self._at_target(request))

    def _at_target(self, request: _Request) -> None:
        if request.target.gathering is not None:
            request.target.gathering.arrived(request, self._now)
        request.target.verifying.append(request)
        self._wake(request.target)

    def _wake(self, device: _Device) -> None:
        # After all that happens at this very moment: what arrives now is in time for the next forward.
        self._after(0.0, lambda: self._run_device(device))

    def _run_device(self, device: _Device) -> None:
        if device.running or not (device.verifying or device.drafting):
            return
        if device.drafting:
            stepping = list(device.drafting)
            seconds = self._constants.draft_step.seconds(len(stepping))
            self._occupy(device, seconds, lambda: self._stepped(device, stepping))
            return
        wait = self._gathering_seconds(device)
        if wait:
            self._after(wait, lambda: self._run_device(device))
            return
        batch, device.verifying = device.verifying, []
        tokens = len(batch) * (self._gamma + 1)
        seconds = self._constants.target_forward.seconds(tokens)

        def verified() -> None:
            if device.gathering is not None:
                device.gathering.ran([self._gamma + 1] * len(batch), seconds)
            self._verified(batch)

        self._occupy(device, seconds, verified)

    def _gathering_seconds(self, device: _Device) -> float:
        if device.gathering is None:
            return 0.0
        return device.gathering.seconds([self._gamma + 1] * len(device.verifying), self._now)

    def _occupy(self, device: _Device, seconds: float, done: Callable[[], None]) -> None:
        device.running = True
        device.busy += seconds

        def free() -> None:
            device.running = False
            done()
            self._wake(device)

        self._after(seconds, free)

    def _stepped(self, device: _Device, stepping: Sequence[_Request]) -> None:
        for request in stepping:
            request.missing -= 1
            if not request.missing:
                device.drafting.remove(request)
                self._drafted(request)

    def _verified(self, batch: Sequence[_Request]) -> None:
        for request in batch:
            if request.target.gathering is not None:
                request.target.gathering.answered(request, self._gamma + 1, self._now)
            self._after(self._layout.target_round_trip / 2, partial(self._end, request))

    def _end(self, request: _Request) -> None:
        outcome = _even(request.rounds, request.number, GOLDEN)
        accepted = sum(outcome < survival for survival in self._survival)
        request.rounds += 1
        self._unfinished -= request.rounds == self._wanted
        request.tokens.append((self._now, accepted + 1))
        self._begin(request)


def _acceptance(by_position: Sequence[float], gamma: int) -> list[float]:
    """Of `gamma` positions; those beyond what was measured are like the last one."""
    if gamma and not by_position:
        raise ValueError("the acceptance of no position is known")
    return [by_position[min(position, len(by_position) - 1)] for position in range(gamma)]


def _turn(devices: Sequence[_Any], number: int) -> _Any:
    return devices[number % len(devices)]


def _even(step: int, request: int, stride: float) -> float:
    """The next of an even sequence in [0, 1), another one for each request."""
    return (0.5 + step * stride + request * 0.7548776662466927) % 1.0


def _mean_busy(devices: Sequence[_Device], seconds: float) -> float:
    # A forward that has begun counts as a whole.
    return min(1.0, sum(device.busy for device in devices) / len(devices) / seconds)
