"""What the adaptive gamma loses, in whole requests, to the best fixed gamma and to none: from nothing known, and after requests of all
kinds.

No clock and no machine: times are made up, and whether the draft is right at a place of a text is a property of the text, the same
for every policy that comes by.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from orchestrator.gamma_controller import AcceptancePrior, AdaptiveGamma
from orchestrator.round_costs import RoundCosts, RoundTimes, WorkerTime
from orchestrator.speed_estimate import SpeedEstimate

LONGEST = 8
SEEDS = range(16)
ALPHAS = (0.05, 0.4, 0.6, 0.8, 0.92)
OF_ALL_KINDS = (0.1, 0.3, 0.55, 0.8) * 3
"""Acceptance of the requests before."""
SHORT = {False: 128, True: 256}
"""Tokens of a request, by whether it is greedy: that one sees whether a token stood, and not how likely it was to."""
PLAIN = 0.010
SLOWER, STRETCH = (1.0, 1.0, 1.5, 3.3), 200
"""What others leave of a shared machine: all its times are so much longer, another one after so many rounds."""
STALLS, STALL_FACTOR = 0.02, 3.0
"""Share of its forwards that are held up beside that, and how much longer these take."""
OF_BEST, OF_PLAIN = 0.95, 0.97
"""The goals: share of the rate of the best fixed gamma, and of plain decoding."""


@dataclass(frozen=True)
class Pair:
    """A draft and a target; all costs over that of a plain step."""

    step: float
    """C_d(1)."""
    token: float
    """What one more token adds to a verification."""
    crossing: float = 0.02
    """What a block waits beside its steps, however long it is."""
    overhead: float = 0.02
    """C_o."""

    def seconds(self, gamma: int) -> float:
        return PLAIN * (1 + self.overhead + (self.crossing + gamma * (self.step + self.token) if gamma else 0.0))

    def times(self, gamma: int, chance: random.Random) -> RoundTimes:
        """As an orchestrator sees them, a tenth more or less."""
        draft, target = (
            PLAIN * each * (1 + 0.1 * chance.uniform(-1, 1)) for each in (gamma * self.step, 1 + gamma * self.token)
        )
        return RoundTimes(
            gamma,
            draft + PLAIN * self.crossing * bool(gamma),
            target + PLAIN * self.overhead,
            WorkerTime(draft, gamma, gamma, gamma) if gamma else None,
            WorkerTime(target, 1, gamma + 1, 1),
        )


PAIRS = {
    "demo": Pair(0.11, 0.07),
    "large draft": Pair(0.4, 0.1),
    "far draft": Pair(0.05, 0.02, crossing=1.0),
}


class Text:
    """Where the draft is right."""

    def __init__(self, alpha: float, length: int, seed: int, hard: float = 0.0) -> None:
        """`alpha`: the mean probability; `hard`: how far it is below or above that for stretches."""
        chance = random.Random(f"{alpha} {seed}")
        self.length = length
        means = [alpha + hard * (1 if place // 6 % 2 else -1) for place in range(length + LONGEST)]
        self.probabilities = [min(1.0, max(0.0, chance.gauss(mean, 0.2))) for mean in means]
        self._stands = [chance.random() < probability for probability in self.probabilities]

    def outcome(self, done: int, block: int, *, greedy: bool) -> tuple[int, list[float]]:
        """Tokens of a block that stand after `done`, and the acceptance seen of each that is reached."""
        accepted = 0
        while accepted < block and self._stands[done + accepted]:
            accepted += 1
        reached = range(done, done + min(accepted + 1, block))
        return accepted, [float(self._stands[each]) if greedy else self.probabilities[each] for each in reached]

    def decode(
        self,
        pair: Pair,
        choose: Callable[[int], int],
        observe: Callable[[Sequence[float], int], None] = lambda _seen, _gamma: None,
        *,
        greedy: bool = True,
    ) -> float:
        """The seconds it takes. A greedy round sees 0 or 1, a sampled one the probabilities."""
        done, seconds = 0, 0.0
        while done < self.length:
            gamma = choose(self.length - done - 1)
            accepted, seen = self.outcome(done, gamma, greedy=greedy)
            observe(seen, gamma)
            seconds += pair.seconds(gamma)
            done += accepted + 1
        return seconds


class Orchestrator:
    """What requests share."""

    def __init__(self, pair: Pair, seed: int, *, greedy: bool, shared: bool = False) -> None:
        """`shared`: others work on the machine too."""
        self._pair, self._greedy = pair, greedy
        self._costs, self._prior, self._chance = RoundCosts(), AcceptancePrior(), random.Random(seed)
        self._slower = 1.0 if shared else None

    def decode(self, text: Text) -> float:
        policy = AdaptiveGamma(self._costs, self._prior, LONGEST, SpeedEstimate(self._costs))
        seconds = text.decode(
            self._pair,
            lambda room: policy.choose(room).gamma,
            lambda seen, gamma: policy.observe(seen, self._times(gamma)),
            greedy=self._greedy,
        )
        policy.finish()
        return seconds

    def _times(self, gamma: int) -> RoundTimes:
        times = self._pair.times(gamma, self._chance)
        if self._slower is None:
            return times
        if self._chance.random() < 1.0 / STRETCH:
            self._slower = self._chance.choice(SLOWER)
        draft, target = self._longer(times.draft), self._longer(times.target)
        if times.draft is not None:
            times.draft.seconds += draft
            times.propose_seconds = (times.propose_seconds or 0.0) + draft
        if times.target is not None:
            times.target.seconds += target
            times.verify_seconds = (times.verify_seconds or 0.0) + target
        return times

    def _longer(self, worker: WorkerTime | None) -> float:
        """By how many seconds, for the others' sake."""
        if worker is None or self._slower is None:
            return 0.0
        return worker.seconds * (self._slower * (STALL_FACTOR if self._chance.random() < STALLS else 1.0) - 1.0)


@cache
def seconds_of_fixed(pair: Pair, alpha: float, length: int) -> list[float]:
    """By gamma, of all texts together."""
    texts = [Text(alpha, length, seed) for seed in SEEDS]
    return [
        sum(text.decode(pair, lambda room, gamma=gamma: min(gamma, room)) for text in texts)  # type: ignore[misc]
        for gamma in range(LONGEST + 1)
    ]


@cache
def experienced(pair: Pair, seed: int, greedy: bool, shared: bool = False) -> Orchestrator:
    orchestrator = Orchestrator(pair, seed, greedy=greedy, shared=shared)
    for number, alpha in enumerate(OF_ALL_KINDS):
        orchestrator.decode(Text(alpha, 60, 1000 * seed + number + 500))
    return orchestrator


def check(pair: Pair, length: int, start: Callable[[int], Orchestrator]) -> None:
    missed = {}
    for alpha in ALPHAS:
        fixed = seconds_of_fixed(pair, alpha, length)
        adaptive = sum(start(seed).decode(Text(alpha, length, seed)) for seed in SEEDS)
        of_best, of_plain = min(fixed) / adaptive, fixed[0] / adaptive
        if of_best < OF_BEST or of_plain < OF_PLAIN:
            missed[alpha] = of_best, of_plain
    assert not missed, "share of the best fixed gamma's rate, and of plain decoding's"


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pair", PAIRS)
def test_after_requests_of_all_kinds(pair: str, greedy: bool) -> None:
    check(PAIRS[pair], SHORT[greedy], lambda seed: copy.deepcopy(experienced(PAIRS[pair], seed, greedy)))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pair", PAIRS)
def test_from_nothing_known(pair: str, greedy: bool) -> None:
    check(PAIRS[pair], 2 * SHORT[greedy], lambda seed: Orchestrator(PAIRS[pair], seed, greedy=greedy))


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("pair", ["demo", "large draft"])
def test_on_a_machine_whose_speed_changes(pair: str, greedy: bool) -> None:
    """What was timed while it was slow is not compared with what was timed while it was quick. What a choice is worth is worked out
    with the times of an idle machine: it doesn't depend on who else was there."""
    check(PAIRS[pair], SHORT[greedy], lambda seed: copy.deepcopy(experienced(PAIRS[pair], seed, greedy, True)))


@pytest.mark.parametrize("step", [0.05, 0.2])
def test_blocks_that_end_where_no_further_token_is_worth_it(step: float) -> None:
    """A text that is easy here and hard there, and a draft that knows where: by what the choices say that a token has to be worth,
    it takes less time than whole blocks do, of an adaptive gamma as of the best fixed one."""
    pair, length = Pair(step, 0.05), 300

    def seconds(seed: int, early: bool) -> float:
        text = Text(0.6, length, seed, hard=0.5)
        costs, chance = RoundCosts(), random.Random(seed)
        policy = AdaptiveGamma(costs, AcceptancePrior(), LONGEST, SpeedEstimate(costs))
        done, taken = 0, 0.0
        while done < length:
            choice = policy.choose(length - done - 1)
            block, reach = 0, 1.0
            while block < choice.gamma and (not early or not block or reach >= choice.stop_below):
                reach *= text.probabilities[done + block]
                block += 1
            accepted, seen = text.outcome(done, block, greedy=True)
            policy.observe(seen, dataclasses.replace(pair.times(block, chance), asked=choice.gamma))
            taken += pair.seconds(block)
            done += accepted + 1
        return taken

    early, whole = (sum(seconds(seed, each) for seed in SEEDS) for each in (True, False))
    texts = [Text(0.6, length, seed, hard=0.5) for seed in SEEDS]
    fixed = [sum(text.decode(pair, lambda room, gamma=gamma: min(gamma, room)) for text in texts) for gamma in range(9)]  # type: ignore[misc]
    assert early < 0.97 * whole
    assert early < min(fixed)
