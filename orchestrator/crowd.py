"""What speculation is worth to requests that share forwards.

Requests in one batch go in step: all of them wait for the draft steps of the longest block, and each token of a block makes the
forward of all longer. So what a block brings to its own request is no measure. What is made least here is the mean time of
a token over all requests, and it has two parts: how many draft steps a round has, its *depth*, which all wait for and which is
chosen for all; and which requests use them, each token for itself. A token is worth its place where it adds at least as much
to what its request expects of the round as one token more for each request would add to the round's time: its *price*.

As SmartSpec chooses one block size for a batch (Liu et al., "Optimizing speculative decoding for serving large language models
using goodput", 2024), but a batch may hold requests of which the draft knows much and others of which it knows little; and a
mean of times, unlike the tokens of all together, doesn't grow by what the quick ones gain at the expense of the slow ones.

Requests with a fixed gamma are no members: what they make the others wait for is in the times, but not in what is weighed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
from numpy.typing import NDArray

from .round_costs import RoundCosts

_CLEAR_GAIN = 1.03
_ROUNDS_OF_A_PLAN = 2
"""Rounds of each request for which a plan holds."""
_TRIAL_BUDGET = 0.0075
"""Share of the time of all that goes to trials, as far as they cost more than they bring."""
_LEAST_INTERVAL = 8
"""Forwards between two trials."""
_PLAIN_INTERVAL = 64
"""Forwards after which there is one without blocks, to know what that costs today."""


@dataclass(frozen=True, slots=True)
class Plan:
    """For the rounds of the next moment."""

    depth: int = 0
    """Draft steps of a round."""
    price: float = 1.0
    """By which share a round takes longer with one more token for each request."""
    speedup: float = 1.0
    """Over rounds without blocks."""
    plain_seconds: float = 0.0
    """Of a round without blocks."""
    trial_rounds: float = 1.0
    """What a round with a block of one token for each request costs beyond what it brings, in plain rounds."""


class Crowd:
    """The requests of an orchestrator that choose their gamma."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._chances: WeakKeyDictionary[object, Sequence[float]] = WeakKeyDictionary()
        """By request: the chance of each token of its next block to be accepted."""
        self._plan = Plan()
        self._choices = 0
        """Of gamma, by all requests: about as many as they have rounds."""
        self._plan_until = 0
        self._seeds: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._twins: WeakSet[object] = WeakSet()
        """Those with another one's seed: what they see may be what the other one has yet to draw."""
        self._trial = self._trial_before = self._rest = costs.forwards
        """The forwards after which requests tried last, and before that, and went without blocks."""
        self._trials_left = self._rests_left = 0
        """Choices that may still be of that trial, or of that rest."""
        self._tried: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        """By request: the forward after which it tried last, or came."""

    def join(self, request: object, seed: int) -> None:
        """A request whose tokens are drawn with this seed, and depend on the length of blocks."""
        twins = [other for other, its in self._seeds.items() if its == seed]
        self._seeds[request] = seed
        for twin in twins:
            self._twins.add(request)
            if twin not in self._twins:
                self._twins.add(twin)
                self._drop(twin)

    def has_twin(self, request: object) -> bool:
        """Whether what it sees must not bear upon another one's choices."""
        return request in self._twins

    def leave(self, request: object) -> None:
        """It is over."""
        self._chances.pop(request, None)
        self._seeds.pop(request, None)

    def plan(self, request: object, chances: Sequence[float]) -> Plan:
        """For a request whose next block's tokens have these chances, by position, to be accepted."""
        self._chances[request] = chances
        self._tried.setdefault(request, self._costs.forwards)
        self._choices += 1
        if self._choices > self._plan_until:
            self._plan_until = self._choices + _ROUNDS_OF_A_PLAN * len(self._chances)
            self._plan = self._best()
        return self._plan

    def forget(self, request: object) -> None:
        """Leaves nothing of it in the plan: its positions will be drawn again with the same randomness, on which its choices may not
        depend."""
        self._seeds.pop(request, None)
        self._drop(request)

    def _drop(self, request: object) -> None:
        if self._chances.pop(request, None) is not None:
            self._plan, self._plan_until = Plan(), 0

    def may_try(self, request: object, reading: float = 0.0) -> bool:
        """Whether a request may draft a token where the plan has none, although the draft has so many seconds to read before. All that
        come from the same forward may, and then none for long: one block costs the others nearly as much as one for each of them."""
        now = self._costs.forwards
        rounds = self._plan.trial_rounds + reading / self._plan.plain_seconds
        joins = now == self._trial and self._trials_left > 0
        last = self._trial_before if joins else self._trial
        # Its own time counts too: else who has much to read would wait for ever on those who have little.
        if now - last < _LEAST_INTERVAL or now - min(last, self._tried[request]) < rounds / _TRIAL_BUDGET:
            return False
        if not joins:
            self._trial_before, self._trial, self._trials_left = self._trial, now, self._at_most
        self._trials_left -= 1  # where no block comes of it, nothing is heard that would end it
        self._tried[request] = now
        return True

    def rests(self) -> bool:
        """Whether a request goes without a block although the plan has some: all do after the same forward."""
        now = self._costs.forwards
        if now == self._rest and self._rests_left > 0:
            self._rests_left -= 1
            return True
        if now - max(self._rest, self._costs.plain_forward) < _PLAIN_INTERVAL:
            return False
        self._rest, self._rests_left = now, self._at_most - 1
        return True

    @property
    def _at_most(self) -> int:
        """Requests that may come from one forward."""
        return max(len(self._chances), ceil(self._costs.batch))

    def _best(self) -> Plan:
        yields = _Yields(list(self._chances.values()))
        plain = self._seconds([])
        paces, prices, seconds = [plain], [0.0], plain
        best = 0
        for depth in range(1, yields.deepest + 1):
            prices.append(self._costs.batch * self._token_seconds(depth) / seconds)
            used, rounds = yields.of(depth, prices[depth])
            took = self._seconds(used)
            paces.append(rounds * took)
            if paces[depth] < paces[best]:
                best, seconds = depth, took
        current = min(self._plan.depth, yields.deepest)
        if paces[current] < _CLEAR_GAIN * paces[best]:
            best = current
        tried = self._seconds([1.0]) / plain - yields.first if yields.deepest else 1.0
        return Plan(best, prices[best], plain / paces[best], plain, max(0.0, tried))

    def _seconds(self, used: Sequence[float]) -> float:
        """Of a round in which such shares of the requests use its draft steps."""
        costs, batch = self._costs, self._costs.batch
        steps = sum(costs.draft_seconds(max(1.0, batch * share)) for share in used if share)
        crossing = costs.crossing if steps else 0.0
        return crossing + steps + costs.target_seconds(batch * (1.0 + sum(used))) + costs.overhead

    def _token_seconds(self, depth: int) -> float:
        """By how much one token of a block of so many makes a round longer, beside the draft steps themselves."""
        costs, batch = self._costs, self._costs.batch
        verify = (costs.target_seconds(batch * (depth + 1)) - costs.target_seconds(batch)) / (batch * depth)
        draft = (costs.draft_seconds(batch) - costs.draft_seconds(1.0)) / max(1.0, batch - 1.0)
        return verify + draft


class _Yields:
    """Expected tokens of each request's round, by the length of its block."""

    def __init__(self, chances: Sequence[Sequence[float]]) -> None:
        self.deepest = max(len(each) for each in chances)
        padded = np.zeros((len(chances), self.deepest))
        for row, each in enumerate(chances):
            padded[row, : len(each)] = each
        self._tokens: NDArray[np.float64] = np.ones((len(chances), self.deepest + 1))
        self._tokens[:, 1:] += np.cumsum(padded, axis=1)
        self._worth: NDArray[np.float64] = padded / self._tokens[:, :-1]
        """Of each token, to be compared with the price: falls with the position."""

    @property
    def first(self) -> float:
        """Tokens of a round with a block of one, in the mean."""
        return float(self._tokens[:, 1].mean())

    def of(self, depth: int, price: float) -> tuple[list[float], float]:
        """Where each request drafts as many of `depth` tokens as are worth the price: the shares of the requests that use each draft
        step, and the rounds for a token, in the mean."""
        used = self._worth[:, :depth] >= price
        gammas = np.count_nonzero(used, axis=1)
        tokens = self._tokens[np.arange(gammas.size), gammas]
        return used.mean(axis=0).tolist(), float((1.0 / tokens).mean())


def block_worth(chances: Sequence[float], price: float) -> tuple[int, float]:
    """The longest block whose tokens are all worth the price, and the expected tokens of its round."""
    gamma, tokens = 0, 1.0
    for chance in chances:
        if chance < price * tokens:
            break
        gamma, tokens = gamma + 1, tokens + chance
    return gamma, tokens
