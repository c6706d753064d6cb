"""What `python -m bench pair` finds out, and how it follows from what was heard and timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cost_model import speedup

from .acceptance_by_position import acceptance_by_position
from .caller import Heard
from .statistic import median


@dataclass(frozen=True, slots=True)
class Trial:
    """One run with speculation between two runs of the same request without."""

    before: Heard
    speculative: Heard
    after: Heard


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians of what one round is made of, in milliseconds."""

    plain_step: float
    """C_t(1)."""
    draft: float
    """C_d(gamma)."""
    verify: float
    """C_t(gamma + 1)."""
    overhead: float
    """C_o, from the overhead measurement."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """One class of prompts, temperature and gamma. Times in milliseconds."""

    prompts: str
    temperature: float
    gamma: int
    trials: int
    plain_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    """Median over the trials of tokens/s divided by the mean of the plain runs before and after."""
    tokens_per_round: float
    acceptance_per_position: tuple[float, ...]
    degraded_rounds: int
    plain_first_token: float
    first_token: float
    plain_round: float
    round: float
    costs: Costs
    predicted_speedup: float

    @property
    def of_prediction(self) -> float:
        """Measured over predicted speed-up."""
        return self.speedup / self.predicted_speedup

    @property
    def rest(self) -> float:
        """What of a round is neither draft nor target: the overhead in its place between real models."""
        return self.round - self.costs.draft - self.costs.verify


@dataclass(frozen=True, slots=True)
class WayRow:
    """One class of prompts and temperature, decoded in another way than with a fixed gamma and a draft that waits."""

    prompts: str
    temperature: float
    way: str
    trials: int
    speedup: float
    """Median over the trials of tokens/s divided by the mean of the plain runs before and after, first responses left
    out."""
    tokens_per_round: float
    mean_gamma: float
    """Draft tokens of a round, rounds without any included."""
    expected_speedup: float
    """What an adaptive gamma expected; 0 for a fixed one."""


def way_row(prompts: str, temperature: float, way: str, max_tokens: int, trials: Sequence[Trial]) -> WayRow:
    """Summarises the trials of one case. Blocks differ in size, so all rounds after the first count, the last one too."""
    statistics = [trial.speculative.finish.speculation for trial in trials]
    rounds, tokens, _ = _total([trial.speculative for trial in trials], 0, max_tokens)
    ratios = [_ratio(trial, 0, max_tokens) for trial in trials]
    return WayRow(
        prompts=prompts,
        temperature=temperature,
        way=way,
        trials=len(trials),
        speedup=median([ratio for ratio in ratios if not math.isnan(ratio)]),
        tokens_per_round=tokens / max(rounds, 1),
        mean_gamma=sum(each.draft_tokens for each in statistics) / max(sum(each.rounds for each in statistics), 1),
        expected_speedup=median([each.expected_speedup for each in statistics]),
    )


def pair_row(
    prompts: str, temperature: float, gamma: int, max_tokens: int, trials: Sequence[Trial], costs: Costs
) -> PairRow:
    """Summarises the trials of one case."""
    speculative = [trial.speculative for trial in trials]
    plain = [heard for trial in trials for heard in (trial.before, trial.after)]
    rounds, tokens, seconds = _total(speculative, gamma, max_tokens)
    plain_rounds, plain_tokens, plain_seconds = _total(plain, 0, max_tokens)
    tokens_per_round = tokens / max(rounds, 1)
    # NaN where a completion ended before it had a full round to measure.
    ratios = [_ratio(trial, gamma, max_tokens) for trial in trials]
    return PairRow(
        prompts=prompts,
        temperature=temperature,
        gamma=gamma,
        trials=len(trials),
        plain_tokens_per_second=_per_second(plain_tokens, plain_seconds),
        tokens_per_second=_per_second(tokens, seconds),
        speedup=median([ratio for ratio in ratios if not math.isnan(ratio)]),
        tokens_per_round=tokens_per_round,
        acceptance_per_position=acceptance_by_position(speculative),
        degraded_rounds=sum(heard.finish.speculation.degraded_rounds for heard in speculative),
        plain_first_token=1000 * median([heard.first_token_seconds for heard in plain]),
        first_token=1000 * median([heard.first_token_seconds for heard in speculative]),
        plain_round=1000 * plain_seconds / max(plain_rounds, 1),
        round=1000 * seconds / max(rounds, 1),
        costs=costs,
        predicted_speedup=speedup(tokens_per_round, costs.plain_step, costs.draft, costs.verify, costs.overhead),
    )


def _total(heard: Sequence[Heard], gamma: int, max_tokens: int) -> tuple[int, int, float]:
    parts = [each.full_rounds(gamma, max_tokens) for each in heard]
    return sum(part[0] for part in parts), sum(part[1] for part in parts), sum(part[2] for part in parts)


def _rate(heard: Heard, gamma: int, max_tokens: int) -> float:
    _, tokens, seconds = heard.full_rounds(gamma, max_tokens)
    return _per_second(tokens, seconds)


def _per_second(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else math.nan


def _ratio(trial: Trial, gamma: int, max_tokens: int) -> float:
    plain = (_rate(trial.before, 0, max_tokens) + _rate(trial.after, 0, max_tokens)) / 2
    return _rate(trial.speculative, gamma, max_tokens) / plain
