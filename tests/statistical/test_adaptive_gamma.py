"""The joint law of a request's tokens where its gamma is chosen anew for each round, by the real controller.

As in `test_rule`, whose draft, target and trials these are; the times that the controller sees are made up, and drift
so that gammas differ. Planted: a block whose length depends on what it drew, which must be caught.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from orchestrator.gamma_controller import AcceptancePrior, AdaptiveGamma
from orchestrator.round_costs import RoundCosts, RoundTimes, WorkerTime
from orchestrator.speed_estimate import SpeedEstimate
from tandem.acceptance import Drafted, Outcome, accept
from tandem.randomness import Lane, uniforms
from tandem.sampling import SamplingParams
from tests.statistical.test_rule import (
    ALPHA,
    CAUGHT,
    START,
    Block,
    Models,
    Setting,
    law_of_pairs,
    law_of_row,
    make_params,
    p_value,
    propose,
    verify,
)
from tests.statistical.test_rule import models as models

TRIALS = 26_000
"""Of four tokens each: 104,000."""
FEWER_TRIALS = 2_500
LENGTH = 4
LONGEST = 4
WAVE = 512
"""Requests that run together, and share costs and prior."""

Shorten = Callable[[Sequence[Drafted]], int]


class Wave:
    """Some requests at the same time, each with a controller of its own."""

    def __init__(self, models: Models, seeds: Sequence[int], costs: RoundCosts, prior: AcceptancePrior) -> None:
        self._models = models
        self._chance = random.Random(seeds[0])
        self._params = [make_params(seed=seed) for seed in seeds]
        self._controllers = [AdaptiveGamma(costs, prior, LONGEST, SpeedEstimate(costs)) for _ in seeds]
        self.texts: list[list[int]] = [[] for _ in seeds]

    def run(self, gammas: Counter[int], shorten: Shorten) -> None:
        for done in range(LENGTH):
            ready = [trial for trial, text in enumerate(self.texts) if len(text) == done]
            chosen = {trial: self._controllers[trial].choose(LONGEST).gamma for trial in ready}
            gammas.update(chosen.values())
            for gamma in sorted(set(chosen.values())):
                self._round([trial for trial in ready if chosen[trial] == gamma], done, gamma, shorten)
        for controller in self._controllers:
            controller.finish()

    def _round(self, trials: list[int], done: int, gamma: int, shorten: Shorten) -> None:
        params: list[SamplingParams] = [self._params[trial] for trial in trials]
        last = [self.texts[trial][-1] if self.texts[trial] else 0 for trial in trials]
        how = Setting(make_params(), gamma=gamma, look_ahead=False)
        blocks = propose(self._models, params, last, START + done, how)
        rows = verify(self._models, params, last, START + done, blocks)
        for trial, block, scored in zip(trials, blocks, rows, strict=True):
            size = shorten(block.drafted)
            drawn = uniforms(self._params[trial].seed, START + done, gamma + 1)[:, [Lane.ACCEPT, Lane.RESIDUAL]]
            outcome = accept(block.drafted[:size], _cut(scored, block, size), drawn.tolist())
            self.texts[trial] += outcome.token_ids
            self._controllers[trial].observe(outcome.expected_acceptance, self._times(gamma, outcome))

    def _times(self, gamma: int, outcome: Outcome) -> RoundTimes:
        """Of a machine whose speed swings, and that takes longer where less was accepted: the history may matter."""
        draft = gamma * self._chance.choice((0.02, 0.4))
        target = 1.0 + self._chance.choice((0.0, 0.3)) * gamma + 0.1 * outcome.accepted
        return RoundTimes(
            gamma, draft, target, WorkerTime(draft, gamma, gamma, gamma), WorkerTime(target, 1, gamma + 1, 1)
        )


def _cut(rows: list, block: Block, size: int) -> list:  # type: ignore[type-arg]
    """The rows of a block of `size`; the bonus row is the one of the first token left out, without its support."""
    if size == len(block.drafted):
        return rows
    row, left_out = rows[size], block.drafted[size]
    rng = np.random.default_rng(left_out.token_id)
    weights = np.append(row.p, row.outside_mass).astype(np.float64)
    pick = int(rng.choice(weights.size, p=weights / weights.sum()))
    token = row.outside_token_id if pick == row.p.size else int(left_out.support_ids[pick])
    return [*rows[:size], replace(row, p=row.p[:0], outside_mass=1.0, outside_token_id=token)]


def whole(block: Sequence[Drafted]) -> int:
    return len(block)


def up_to_an_unlikely_token(block: Sequence[Drafted]) -> int:
    """Looks at the token itself, not only at what precedes it."""
    return next((index for index, drafted in enumerate(block) if drafted.index > 0), len(block))


def texts_of(models: Models, trials: int, shorten: Shorten) -> tuple[NDArray[np.int64], Counter[int]]:
    costs, prior, gammas = RoundCosts(), AcceptancePrior(), Counter[int]()
    texts: list[list[int]] = []
    for first in range(0, trials, WAVE):
        wave = Wave(models, range(90_000_000 + first, 90_000_000 + min(first + WAVE, trials)), costs, prior)
        wave.run(gammas, shorten)
        texts += wave.texts
    return np.array([text[:LENGTH] for text in texts]), gammas


def p_values(texts: NDArray[np.int64], models: Models) -> list[float]:
    """Of the first two tokens, and of the last two."""
    transitions = np.array([law_of_row(row, make_params()) for row in models.target.double().numpy()])
    third = transitions[0] @ transitions @ transitions
    return [
        p_value(texts[:, :2], law_of_pairs(models, make_params())),
        p_value(texts[:, 2:], third[:, None] * transitions),
    ]


def test_the_law_holds_while_gamma_changes(models: Models) -> None:
    texts, gammas = texts_of(models, TRIALS, whole)
    assert min(gammas[gamma] for gamma in (0, 1, 2)) > 0.005 * sum(gammas.values()), gammas
    assert len(gammas) > 3
    assert min(p_values(texts, models)) > ALPHA


def test_a_length_that_depends_on_what_was_drawn_is_caught(models: Models) -> None:
    texts, _ = texts_of(models, FEWER_TRIALS, up_to_an_unlikely_token)
    assert min(p_values(texts, models)) < CAUGHT
