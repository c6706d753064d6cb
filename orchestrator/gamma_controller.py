"""gamma, the tokens that a round drafts: fixed by the request, or chosen anew in each round.

The adaptive choice maximises the expected tokens of a round over its expected time (`tandem/cost_model.py`). Tokens come
from this request's acceptance by position, the exact sum min(p, q) of each position reached, with what requests before
it saw as a prior; times from `round_costs`. It changes its mind only for a clear gain. A request that does best without
a block tries one now and then, at intervals that grow while it disappoints.

Exactness does not depend on any of this: a choice uses only rounds whose tokens are already decided, so the block's
length is a function of what precedes it, of times and of other requests, but never of the randomness of the positions
it covers. Whatever the length, each token then has the target's distribution given what precedes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.cost_model import expected_tokens

from .round_costs import RoundCosts, RoundTimes
from .speed_estimate import SpeedEstimate

_FADE = 0.96
"""Weight left of an observation of a position after one more of that position."""
_POOL_FADE = 0.98
_SHY_FADE = 0.85
"""The same while the request drafts only now and then: there each trial has to count."""
_PRIOR_WEIGHT = 5.0
"""Observations that the prior stands for."""
_FIRST_GUESS = 0.6
"""Acceptance before anything was ever accepted."""
_PRIOR_MEMORY = 400.0
"""Observations of a position that the prior remembers."""
_CLEAR_GAIN = 1.03
_FIRST_BLOCK = 3
"""The block of a round before costs are known."""
_LONGEST_TRIAL = 4
_STEP = 3
"""How far the block may grow in one round."""
_FIRST_INTERVAL, _LONGEST_INTERVAL = 6, 48
"""Rounds between the trials of a request that drafts nothing."""
_PLAIN_INTERVAL = 64
"""Rounds of all requests together after which one goes without a block, to know what that costs today."""
_TRIAL_BUDGET = 0.01
"""Share of its time that a request spends on trials, as far as they cost more than they bring."""
_PROMISING = 0.3
"""Accepted tokens beyond what was foreseen that make a trial worth another one soon."""
_HIGHEST = 0.995


@dataclass(slots=True)
class Choice:
    """One round's gamma, and why."""

    gamma: int
    reason: str
    """One of REASONS."""
    speedup: float
    """Expected tokens a second over those of plain decoding at this moment; 0 where that is not known."""


REASONS = ("fixed", "best", "trial", "unknown_cost")


class GammaPolicy(Protocol):
    """How a request comes by its gamma."""

    def choose(self, room: int, limit: int | None = None) -> Choice:
        """The gamma of the next round, at most `room`. `limit`, 1 or more: blocks are cut to so many tokens at present."""

    def observe(self, acceptance: Sequence[float], times: RoundTimes) -> None:
        """After a round that got the block it asked for: the acceptance probability of each position reached."""

    def finish(self) -> None:
        """The request has come to its end, and every round that was observed counts."""


class FixedGamma:
    """The gamma that the request asked for; 0 is plain decoding."""

    def __init__(self, gamma: int, speed: SpeedEstimate) -> None:
        self._gamma = gamma
        self._speed = speed

    def choose(self, room: int, limit: int | None = None) -> Choice:  # noqa: ARG002 - the block is cut, the wish stays
        """As asked, or less where less is left to generate."""
        return Choice(min(self._gamma, room), "fixed", 0.0)

    def observe(self, acceptance: Sequence[float], times: RoundTimes) -> None:
        """Nothing to learn for the request itself."""
        self._speed.observe_fixed(self._gamma, acceptance, times)

    def finish(self) -> None:
        """Nothing to hand on."""


class AcceptancePrior:
    """Acceptance by position of the requests that are over: what the next one of the kind starts from."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._weights: list[float] = []

    def add(self, sums: Sequence[float], counts: Sequence[float]) -> None:
        """All that a request saw; old requests fade once there are many."""
        for position, (total, count) in enumerate(zip(sums, counts, strict=True)):
            if position == len(self._sums):
                self._sums.append(0.0)
                self._weights.append(0.0)
            weight = self._weights[position] + count
            keep = min(1.0, _PRIOR_MEMORY / weight) if weight else 1.0
            self._sums[position] = keep * (self._sums[position] + total)
            self._weights[position] = keep * weight

    def by_position(self, count: int) -> list[float]:
        """The mean of each position, drawn towards that of the one before it where it was seen rarely."""
        means: list[float] = []
        mean = _FIRST_GUESS
        for position in range(count):
            if position < len(self._sums):
                mean = (self._sums[position] + _PRIOR_WEIGHT * mean) / (self._weights[position] + _PRIOR_WEIGHT)
            means.append(mean)
        return means


class Acceptance:
    """One request's acceptance by position, given that the position is reached."""

    def __init__(self, prior: AcceptancePrior, longest: int) -> None:
        self._prior = prior
        self._expected = prior.by_position(longest)
        self._sums = [0.0] * longest
        self._weights = [0.0] * longest
        self._totals = [0.0] * longest
        self._counts = [0.0] * longest
        # How this request compares with the prior, over all positions together.
        self._seen = self._foreseen = _PRIOR_WEIGHT * (self._expected[0] if longest else _FIRST_GUESS)

    def add(self, acceptance: Sequence[float], *, shy: bool) -> None:
        """One more round."""
        fade, pool_fade = (_SHY_FADE, _SHY_FADE) if shy else (_FADE, _POOL_FADE)
        for position, value in enumerate(acceptance):
            self._sums[position] = fade * self._sums[position] + value
            self._weights[position] = fade * self._weights[position] + 1.0
            self._totals[position] += value
            self._counts[position] += 1.0
            self._seen = pool_fade * self._seen + value
            self._foreseen = pool_fade * self._foreseen + self._expected[position]

    def by_position(self, count: int) -> list[float]:
        """What to expect of the first `count` positions."""
        likeness = self._seen / self._foreseen
        return [
            min(_HIGHEST, (total + _PRIOR_WEIGHT * min(_HIGHEST, likeness * expected)) / (weight + _PRIOR_WEIGHT))
            for total, weight, expected in zip(
                self._sums[:count], self._weights[:count], self._expected[:count], strict=True
            )
        ]

    def hand_on(self) -> None:
        """Adds what was seen to the prior."""
        self._prior.add(self._totals, self._counts)


class AdaptiveGamma:
    """Chooses gamma for one request."""

    def __init__(self, costs: RoundCosts, prior: AcceptancePrior, longest: int, speed: SpeedEstimate) -> None:
        self._costs = costs
        self._speed = speed
        self._acceptance = Acceptance(prior, longest)
        self._longest = longest
        self._gamma = min(_FIRST_BLOCK, longest)
        self._interval = _FIRST_INTERVAL
        self._since_trial = 0
        self._trial_expected: float | None = None
        self._promising = False

    def choose(self, room: int, limit: int | None = None) -> Choice:
        """Looks at a few block sizes around the last one, of those that are not cut. One that was best before it would be is
        still chosen, to be had again once it isn't; a trial is of what the draft will be asked for."""
        longest = wanted = min(self._longest, room)
        self._trial_expected = None
        if longest == 0:
            return Choice(0, "best", 1.0)
        if not (self._costs.target_known and self._costs.draft_known):
            return Choice(min(self._gamma or _FIRST_BLOCK, longest), "unknown_cost", 0.0)
        cut = limit is not None and limit < wanted
        if limit is not None:
            longest = min(longest, limit)
        # Not further than a step or two from here: what lies beyond is the least known, and looking costs time.
        longest = min(longest, max(self._gamma, _LONGEST_TRIAL) + _STEP)
        acceptance = self._acceptance.by_position(longest)
        seconds = self._costs.round_seconds(longest)
        rates = _rates(acceptance, seconds)
        self._settle(rates, cut=cut)
        gamma = min(self._gamma, wanted)
        speedup = rates[min(gamma, longest)] / rates[0]
        if gamma == 0:
            return self._perhaps_a_trial(acceptance, seconds, rates)
        if self._plain_is_stale():
            return Choice(0, "trial", speedup)
        return Choice(gamma, "best", speedup)

    def observe(self, acceptance: Sequence[float], times: RoundTimes) -> None:
        """After a round."""
        self._costs.observe(times)
        self._speed.observe(acceptance, times.block)
        if not acceptance:
            return
        self._acceptance.add(acceptance, shy=self._gamma == 0)
        if self._trial_expected is not None:
            # Better than foreseen: look again soon, it may have changed for good.
            promising = sum(acceptance) > self._trial_expected + _PROMISING
            self._interval = _FIRST_INTERVAL // 2 if promising else min(2 * self._interval, _LONGEST_INTERVAL)
            self._promising = promising

    def finish(self) -> None:
        """Hands on what was learnt."""
        self._acceptance.hand_on()

    def _settle(self, rates: list[float], *, cut: bool) -> None:
        best = max(range(len(rates)), key=rates.__getitem__)
        current = self._gamma
        if current >= len(rates) and not cut:
            return  # the end is near: what is best there says nothing about the rest
        current = min(current, len(rates) - 1)
        if rates[best] > _CLEAR_GAIN * rates[current]:
            if best == 0:
                self._interval, self._since_trial = _FIRST_INTERVAL, 0
            self._gamma = best

    def _perhaps_a_trial(self, acceptance: list[float], seconds: list[float], rates: list[float]) -> Choice:
        self._since_trial += 1
        if self._since_trial < self._interval or len(rates) < 2:
            return Choice(0, "best", 1.0)
        candidates = range(1, min(len(rates) - 1, _LONGEST_TRIAL) + 1)
        trial = max(candidates, key=rates.__getitem__)
        lost = seconds[trial] * (1.0 - rates[trial] / rates[0])
        if not self._promising and lost > _TRIAL_BUDGET * self._since_trial * seconds[0]:
            return Choice(0, "best", 1.0)
        self._since_trial = 0
        self._trial_expected = expected_tokens(acceptance[:trial]) - 1.0
        return Choice(trial, "trial", rates[trial] / rates[0])

    def _plain_is_stale(self) -> bool:
        last = self._costs.plain_round
        return last is None or self._costs.rounds - last >= _PLAIN_INTERVAL


def _rates(acceptance: list[float], seconds: list[float]) -> list[float]:
    """Expected tokens a second for each block size."""
    tokens = reached = 1.0
    rates = [tokens / seconds[0] if seconds[0] > 0.0 else 1.0]
    for probability, duration in zip(acceptance, seconds[1:], strict=True):
        reached *= probability
        tokens += reached
        rates.append(tokens / duration if duration > 0.0 else 1.0)
    return rates
