"""gamma, the tokens that a round drafts: fixed by the request, or chosen anew in each round.

The adaptive choice maximises the expected tokens of a round over its expected time (`tandem/cost_model.py`); of requests that
share forwards, what `crowd.py` says is best for all of them. Tokens come
from this request's acceptance by position, the exact sum min(p, q) of each position reached, with what requests before
it saw as a prior; times from `round_costs`. It changes its mind only for a clear gain. A request that does best without
a block tries one now and then, at intervals that grow while it disappoints; those that share forwards try together.

Where the draft ends blocks early, gamma is the most of a block. A position that was not proposed says nothing of its
acceptance; how often blocks go on to it is learnt beside that, and both tokens and time are those of the blocks that
come. The choice also says what chance of standing makes one more token worth its time, for the draft to end blocks by.

Exactness does not depend on any of this: a choice uses only rounds whose tokens are already decided, so the block's
length is a function of what precedes it, of times and of other requests, but never of the randomness of the positions
it covers (nor do requests that run with the same seed at the same time tell each other what they see). Whatever the length, each token then has the target's distribution given what precedes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Protocol

from .crowd import Crowd, block_worth
from .round_costs import ORDINARY_TOKENS, TOGETHER, RoundCosts, RoundTimes
from .speed_estimate import SpeedEstimate

_FADE = 0.96
"""Weight left of an observation of a position after one more of that position."""
_POOL_FADE = 0.98
_UNSEEN_FADE = 0.96
"""Weight left of an observation of a position after a round that didn't ask for so many tokens."""
_SHY_FADE = 0.85
"""The same while the request drafts only now and then: there each trial has to count."""
_PRIOR_WEIGHT = 5.0
"""Observations that a prior stands for."""
_PRIOR_WEIGHT_GRADED = 2.5
"""The same of a request whose observations are probabilities, not whether a token stood: each says more."""
_FIRST_GUESS = 0.6
"""Acceptance before anything was ever accepted."""
_PRIOR_MEMORY = 400.0
"""Observations of a position that the prior remembers."""
_REQUEST_WEIGHT = 8.0
"""Observations of a position that one request adds to the prior at most: else those that draft much, since their tokens are
accepted, would make it, and those that soon stopped have no say."""
_CLEAR_GAIN = 1.03
_FIRST_BLOCK = 1
"""The block of a round before costs are known, or before it grows: with the least at stake it tells what a token costs, and
whether the first one stands."""
_LONGEST_TRIAL = 4
_STEP = 3
"""How far the block may grow in one round."""
_FIRST_INTERVAL, _LONGEST_INTERVAL = 2, 48
"""Rounds between the trials of a request that drafts nothing."""
_PLAIN_INTERVAL = 64
"""Rounds of all requests together after which one goes without a block, to know what that costs today."""
_TRIAL_BUDGET = 0.0125
"""Share of its time, what is still to come included, that a request spends on trials, as far as they cost more than they
bring. A long request can afford one at its beginning, when it gains most by what it learns."""
_SAVED, _MOST_SAVED = 0.3, 3.0
"""Share of what a request might have spent on trials that it leaves to later ones, and the plain rounds that they have at most."""
_TRIAL_PRICE = 0.05
"""What a trial may cost beyond what it brings, over the time since the one before: where trials are dear, what they may cost
in all is spread over the request."""
_PROMISING = 0.3
"""Accepted tokens beyond what was foreseen that make a trial worth another one soon."""
_LEAST_WORTH = 1e-6
"""Of a token that costs nothing: 0 would say that it isn't known."""
_HIGHEST = 0.995


@dataclass(slots=True)
class Choice:
    """One round's gamma, and why."""

    gamma: int
    reason: str
    """One of REASONS."""
    speedup: float
    """Expected tokens a second over those of plain decoding at this moment; 0 where that is not known."""
    stop_below: float = 0.0
    """A block is long enough once its chance to stand as a whole is below this: what comes after it is not worth its
    time. 0 where that is not known."""


REASONS = ("fixed", "best", "trial", "unknown_cost")


class GammaPolicy(Protocol):
    """How a request comes by its gamma."""

    def choose(self, room: int, limit: int | None = None, to_read: int = 0) -> Choice:
        """The gamma of the next round, at most `room`. `limit`, 1 or more: blocks are cut to so many tokens at present. `to_read`:
        tokens that the draft would have to read first."""

    def observe(self, acceptance: Sequence[float], times: RoundTimes) -> None:
        """After a round that got the block it asked for: the acceptance probability of each position reached."""

    def finish(self) -> None:
        """The request has come to its end, and every round that was observed counts."""

    def withdraw(self) -> None:
        """It hasn't: what was observed may be drawn again, with the same randomness."""


class FixedGamma:
    """The gamma that the request asked for; 0 is plain decoding."""

    def __init__(self, gamma: int, speed: SpeedEstimate) -> None:
        self._gamma = gamma
        self._choice = Choice(gamma, "fixed", 0.0)
        self._speed = speed

    def choose(self, room: int, limit: int | None = None, to_read: int = 0) -> Choice:  # noqa: ARG002 - the block is cut, the wish stays
        """As asked, or less where less is left to generate."""
        return self._choice if self._gamma <= room else Choice(room, "fixed", 0.0)

    def observe(self, acceptance: Sequence[float], times: RoundTimes) -> None:
        """Nothing to learn for the request itself."""
        self._speed.observe_fixed(self._gamma, acceptance, times)

    def finish(self) -> None:
        """Nothing to hand on."""

    def withdraw(self) -> None:
        """Nobody has heard of it."""


class AcceptancePrior:
    """Acceptance by position of the requests that are over: what the next one of the kind starts from."""

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._weights: list[float] = []
        self.saved = 0.0
        """Plain rounds that requests might have spent on trials, and didn't: of short ones none could pay for a trial alone, and what
        they are like would never be learnt again."""

    def add(self, sums: Sequence[float], counts: Sequence[float]) -> None:
        """All that a request saw; old requests fade once there are many."""
        for position, (total, count) in enumerate(zip(sums, counts, strict=True)):
            if position == len(self._sums):
                self._sums.append(0.0)
                self._weights.append(0.0)
            if not count:
                continue
            share = min(1.0, _REQUEST_WEIGHT / count)
            weight = self._weights[position] + share * count
            keep = min(1.0, _PRIOR_MEMORY / weight)
            self._sums[position] = keep * (self._sums[position] + share * total)
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
        self._weight = _PRIOR_WEIGHT
        # Over all positions together.
        self._seen = self._reached = 0.0

    def add(self, acceptance: Sequence[float], asked: int, *, shy: bool) -> None:
        """One more round, in which a block of `asked` tokens was asked for."""
        fade, pool_fade = (_SHY_FADE, _SHY_FADE) if shy else (_FADE, _POOL_FADE)
        for position, value in enumerate(acceptance):
            if 0.0 < value < 1.0:
                self._weight = _PRIOR_WEIGHT_GRADED
            self._sums[position] = fade * self._sums[position] + value
            self._weights[position] = fade * self._weights[position] + 1.0
            self._totals[position] += value
            self._counts[position] += 1.0
            self._seen = pool_fade * self._seen + value
            self._reached = pool_fade * self._reached + 1.0
        # What was seen of longer blocks grows old: else few tokens that fell by chance would keep blocks short for good.
        for position in range(asked, len(self._weights)):
            if not self._weights[position]:
                break
            self._sums[position] *= _UNSEEN_FADE
            self._weights[position] *= _UNSEEN_FADE

    def by_position(self, count: int) -> list[float]:
        """What to expect of the first `count` positions: each is drawn towards the request's mean, as far as it was seen rarely,
        and that towards the prior. Not towards the prior's later positions times how the request compares with it: to these
        mostly better requests have got."""
        seen, prior, of_all = self._seen, self._weight, self._reached + self._weight
        return [
            min(_HIGHEST, (total + prior * (seen + prior * expected) / of_all) / (weight + prior))
            for total, weight, expected in zip(
                self._sums[:count], self._weights[:count], self._expected[:count], strict=True
            )
        ]

    def hand_on(self) -> None:
        """Adds what was seen to the prior."""
        self._prior.add(self._totals, self._counts)


class Persistence:
    """How often a request's blocks go on to a position, where the draft ends blocks early: once the position before it is
    drafted, and once that is accepted. Always, as long as no block ended early."""

    def __init__(self, longest: int) -> None:
        self._stops = False
        self._went_on = [[_PRIOR_WEIGHT] * longest, [_PRIOR_WEIGHT] * longest]
        self._could = [[_PRIOR_WEIGHT] * longest, [_PRIOR_WEIGHT] * longest]

    def add(self, acceptance: Sequence[float], block: int, asked: int) -> None:
        """A block of `block` tokens where `asked` were asked for, and the acceptance of the positions that were reached."""
        self._stops = self._stops or block < asked
        if not self._stops:
            return
        whole = acceptance[-1] if len(acceptance) == block else 0.0
        for position in range(1, min(block + 1, asked, len(self._could[0]))):
            went_on = float(position < block)
            for index, weight in ((0, 1.0), (1, went_on if position < len(acceptance) else whole * (1.0 - went_on))):
                keep = 1.0 - weight * (1.0 - _FADE)
                self._went_on[index][position] = keep * self._went_on[index][position] + weight * went_on
                self._could[index][position] = keep * self._could[index][position] + weight

    def chances(self, acceptance: Sequence[float]) -> list[float]:
        """Of each token of a block to be proposed and accepted, given the acceptance by position."""
        tokens, _ = self.blocks(acceptance, [0.0] * (len(acceptance) + 1))
        return [after - before for before, after in pairwise(tokens)]

    def blocks(self, acceptance: Sequence[float], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
        """Expected tokens and seconds of rounds whose blocks have at most 0, 1, ... tokens, given the acceptance by position and
        the seconds of whole blocks."""
        tokens, times = [1.0], [seconds[0]]
        reached = drafted = 1.0
        for position, probability in enumerate(acceptance):
            reached *= probability
            if self._stops:
                drafted *= self._went_on[0][position] / self._could[0][position]
                reached *= self._went_on[1][position] / self._could[1][position]
            tokens.append(tokens[-1] + reached)
            times.append(times[-1] + drafted * (seconds[position + 1] - seconds[position]))
        return tokens, times


class AdaptiveGamma:
    """Chooses gamma for one request."""

    def __init__(
        self,
        costs: RoundCosts,
        prior: AcceptancePrior,
        longest: int,
        speed: SpeedEstimate,
        crowd: Crowd | None = None,
        seed: int | None = None,
    ) -> None:
        """`crowd`: the requests that it may share forwards with; None: it is alone. `seed`: of tokens that depend on the length of
        blocks; None where none do."""
        self._costs = costs
        self._crowd = crowd
        if crowd is not None and seed is not None:
            crowd.join(self, seed)
        self._speed = speed
        self._prior = prior
        self._acceptance = Acceptance(prior, longest)
        self._first_chances = list(accumulate(prior.by_position(longest), mul))
        self._persistence = Persistence(longest)
        self._longest = longest
        self._gamma = min(_FIRST_BLOCK, longest)
        self._interval = _FIRST_INTERVAL
        self._since_trial = 0
        self._rounds = 0
        self._trials_lost = 0.0
        """Plain rounds that trials were expected to cost beyond what they bring."""
        self._trial_expected: float | None = None

    def choose(self, room: int, limit: int | None = None, to_read: int = 0) -> Choice:
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
        if self._crowd is not None and self._costs.batch > TOGETHER:
            return self._choose_in(self._crowd, longest, room, to_read)
        acceptance = self._acceptance.by_position(longest)
        whole = self._costs.round_seconds(longest)
        tokens, seconds = self._persistence.blocks(acceptance, whole)
        rates = _rates(tokens, seconds)
        self._settle(rates, cut=cut)
        gamma = min(self._gamma, wanted)
        speedup = rates[min(gamma, longest)] / rates[0]
        reading = self._costs.reading_seconds(to_read) if to_read > ORDINARY_TOKENS else 0.0
        # What is to be read may take more than blocks would save until the end.
        if gamma == 0 or (reading and reading > room * seconds[0] * (1.0 - 1.0 / speedup)):
            return self._perhaps_a_trial(tokens, seconds, rates, room, reading)
        if self._plain_is_stale():
            return Choice(0, "trial", speedup)
        return Choice(gamma, "best", speedup, _worth(max(rates), whole, acceptance))

    def _choose_in(self, crowd: Crowd, longest: int, room: int, to_read: int) -> Choice:
        """By what is best for all that it shares forwards with."""
        chances = self._persistence.chances(self._acceptance.by_position(longest))
        plan = crowd.plan(self, self._first_chances if crowd.has_twin(self) else chances)
        gamma, tokens = block_worth(chances[: plan.depth], plan.price)
        reading = self._costs.reading_seconds(to_read) if to_read > ORDINARY_TOKENS else 0.0
        dear = reading > room * plan.plain_seconds * (1.0 - 1.0 / plan.speedup) if reading else False
        self._gamma = gamma
        if gamma and not dear:
            if crowd.rests():
                return Choice(0, "trial", plan.speedup)
            return Choice(gamma, "best", plan.speedup, min(1.0, max(_LEAST_WORTH, plan.price * tokens)))
        self._since_trial += 1
        # Where the others draft, a block of one's own costs little; else all try in the same round.
        alone = plan.depth and not reading
        if not (self._since_trial >= self._interval if alone else crowd.may_try(self, reading)):
            return Choice(0, "best", plan.speedup)
        self._since_trial = 0
        self._trial_expected = chances[0]
        return Choice(1, "trial", plan.speedup)

    def observe(self, acceptance: Sequence[float], times: RoundTimes) -> None:
        """After a round."""
        self._rounds += 1
        self._costs.observe(times)
        self._speed.observe(acceptance, times.block)
        if not acceptance:
            return
        asked = times.block if times.asked is None else times.asked
        self._acceptance.add(acceptance, asked, shy=self._gamma == 0)
        self._persistence.add(acceptance, times.block, asked)
        if self._trial_expected is not None:
            # Better than foreseen: look again soon, it may have changed for good.
            promising = sum(acceptance) > self._trial_expected + _PROMISING
            self._interval = _FIRST_INTERVAL // 2 if promising else min(2 * self._interval, _LONGEST_INTERVAL)

    def finish(self) -> None:
        """Hands on what was learnt."""
        self._acceptance.hand_on()
        left = self._settle_trials()
        self._prior.saved = min(self._prior.saved + _SAVED * max(0.0, left), _MOST_SAVED)
        if self._crowd is not None:
            self._crowd.leave(self)

    def withdraw(self) -> None:
        """Lets nobody have a choice depend on it."""
        self._settle_trials()
        if self._crowd is not None:
            self._crowd.forget(self)

    def _settle_trials(self) -> float:
        """What is left of the rounds that it might have spent on trials; where it ends before it could, others' savings pay."""
        left = _TRIAL_BUDGET * self._rounds - self._trials_lost
        self._prior.saved = max(0.0, self._prior.saved + min(0.0, left))
        return left

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

    def _perhaps_a_trial(
        self, tokens: list[float], seconds: list[float], rates: list[float], room: int, reading: float
    ) -> Choice:
        self._since_trial += 1
        if self._since_trial < self._interval or len(rates) < 2:
            return Choice(0, "best", 1.0)
        candidates = range(1, min(len(rates) - 1, _LONGEST_TRIAL) + 1)
        trial = max(candidates, key=rates.__getitem__)
        lost = (reading + seconds[trial] * (1.0 - rates[trial] / rates[0])) / seconds[0]
        saved = self._prior.saved
        too_soon = lost > _TRIAL_PRICE * self._since_trial + saved
        borrowed = max(0.0, self._trials_lost + lost - _TRIAL_BUDGET * (self._rounds + room))
        if too_soon or borrowed > saved:
            return Choice(0, "best", 1.0)
        self._prior.saved -= borrowed
        self._since_trial = 0
        self._trials_lost += max(0.0, lost) - borrowed
        self._trial_expected = tokens[trial] - 1.0
        return Choice(trial, "trial", rates[trial] / rates[0])

    def _plain_is_stale(self) -> bool:
        last = self._costs.plain_round
        return last is None or self._costs.rounds - last >= _PLAIN_INTERVAL


def _worth(rate: float, whole: list[float], acceptance: list[float]) -> float:
    """The chance of a block to stand, below which its next token brings less for its time than rounds do on the average, `rate`
    tokens a second: for long the best time to end a renewal's cycle. `whole`: seconds of rounds with whole blocks."""
    token = (whole[-1] - whole[1]) / (len(whole) - 2) if len(whole) > 2 else whole[-1] - whole[0]
    likely = sum(acceptance) / len(acceptance)
    return min(1.0, max(_LEAST_WORTH, rate * token / likely)) if likely > 0.0 else 1.0


def _rates(tokens: list[float], seconds: list[float]) -> list[float]:
    """Expected tokens a second for each block size."""
    return [count / duration if duration > 0.0 else 1.0 for count, duration in zip(tokens, seconds, strict=True)]
