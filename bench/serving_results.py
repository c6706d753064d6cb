"""What a serving run comes to: rates, latencies, batches and CPU of each case, and the other side beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from .acceptance_by_position import acceptance_by_position, conditional
from .caller import Heard
from .simulation import Constants, Curve, curve
from .statistic import median, quantile
from .tables import Goal, results_table

BATCHING_GOAL = 3.0
"""Tokens a second of 16 requests together, over the same requests one by one."""
BATCHING_REQUESTS = 16
OF_PLAIN_GOAL, OF_BEST_GOAL = 0.97, 0.95
"""Tokens a second with an adaptive gamma, over those of plain decoding and of the best fixed gamma."""
DROP_GOAL = 1.5
"""Tokens a second over those of the next larger number of requests."""
PREFIX_GOAL = 0.25
"""Time to the first token with a cached prefix, over that without."""


@dataclass(frozen=True, slots=True)
class Load:
    """One run of some requests at the same time: what was heard, and what the services counted meanwhile."""

    heard: Sequence[Heard]
    forwards: float
    """Forwards of the target."""
    items: float
    """Items in them."""
    orchestrator_cpu: float
    """Seconds."""

    @property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(sum(each.tokens) for each in self.heard)

    @property
    def seconds(self) -> float:
        """From the first call to the last response."""
        return max(each.arrivals[-1] for each in self.heard) - min(each.asked for each in self.heard)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Latency:
    """Quantiles, in milliseconds."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class ServingCase:
    """A number of requests at the same time, at one gamma."""

    concurrency: int
    gamma: int
    tokens_per_second: float
    alone_tokens_per_second: float
    """The other side: the same services, one request after the other."""
    first_token: Latency
    per_output_token: Latency
    batch_size: float
    """Items in a forward of the target."""
    orchestrator_cpu: float
    """Milliseconds for a token."""
    tokens_per_round: float
    acceptance: tuple[float, ...]
    """By position, of those reached."""

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all requests, the prompts' reading left out."""
        return 1000 * self.concurrency / self.per_output_token.p50

    @property
    def batching_gain(self) -> float:
        """Times the tokens a second of one by one."""
        return self.tokens_per_second / self.alone_tokens_per_second


@dataclass(frozen=True, slots=True)
class Turn:
    """The same requests again and again, one run after the other."""

    plain: tuple[Load, Load]
    """Twice, so that what two runs of the same differ by can be told."""
    adaptive: Load
    best: Load | None
    """With the fixed gamma that was fastest at so many requests; None where that is plain decoding."""

    @property
    def plain_rate(self) -> float:
        """Tokens a second, the mean of both."""
        return sum(load.rate for load in self.plain) / len(self.plain)

    @property
    def best_rate(self) -> float:
        """Tokens a second."""
        return self.best.rate if self.best is not None else self.plain_rate


@dataclass(frozen=True, slots=True)
class AdaptiveCase:
    """An adaptive gamma at a number of requests at the same time: medians of neighbouring runs."""

    concurrency: int
    tokens_per_second: float
    of_plain: float
    plain_apart: float
    """By which share two runs of plain decoding differ."""
    best_gamma: int
    of_best: float
    mean_gamma: float


@dataclass(frozen=True, slots=True)
class PrefixResult:
    """Time to the first token of prompts that share their beginning, in milliseconds: medians."""

    shared_tokens: int
    cold: float
    warm: float

    @property
    def ratio(self) -> float:
        """Warm over cold."""
        return self.warm / self.cold


@dataclass(frozen=True, slots=True)
class ServingResult:
    """All that was measured."""

    models: str
    max_tokens: int
    cases: list[ServingCase]
    prefix: PrefixResult
    constants: Constants | None
    """What `simulate` needs to know; None without a case of one plain request."""
    adaptive: list[AdaptiveCase] = field(default_factory=list)
    """If it was asked for."""


def serving_constants(
    draft_steps: Sequence[tuple[float, float]], forwards: Sequence[tuple[float, float]], cases: Sequence[ServingCase]
) -> Constants | None:
    """From the workers' times by size; the rest of a round is what one plain request waits beyond its forward."""
    alone = next((case for case in cases if (case.concurrency, case.gamma) == (1, 0)), None)
    if alone is None:
        return None
    target = curve(forwards)
    return Constants(
        draft_step=curve(draft_steps) if draft_steps else Curve(((1.0, 0.0),)),
        target_forward=target,
        overhead=max(0.0, alone.per_output_token.p50 / 1000 - target.seconds(1)),
        orchestrator=min(
            alone.orchestrator_cpu / 1000, max(0.0, alone.per_output_token.p50 / 1000 - target.seconds(1))
        ),
        acceptance=max((case.acceptance for case in cases), key=len),
    )


def serving_case(concurrency: int, gamma: int, together: Sequence[Load], alone: Sequence[Load]) -> ServingCase:
    """A case out of its repeats."""
    heard = [each for load in together for each in load.heard]
    per_token = [
        (each.arrivals[-1] - each.arrivals[0]) / (sum(each.tokens) - each.tokens[0])
        for each in heard
        if sum(each.tokens) > each.tokens[0]
    ]
    return ServingCase(
        concurrency=concurrency,
        gamma=gamma,
        tokens_per_second=median([load.tokens / load.seconds for load in together]),
        alone_tokens_per_second=median([load.tokens / load.seconds for load in alone]),
        first_token=_latency([each.first_token_seconds for each in heard]),
        per_output_token=_latency(per_token),
        batch_size=sum(load.items for load in together) / max(1.0, sum(load.forwards for load in together)),
        orchestrator_cpu=1000 * sum(load.orchestrator_cpu for load in together) / sum(load.tokens for load in together),
        tokens_per_round=sum(load.tokens for load in together) / sum(len(each.arrivals) for each in heard),
        acceptance=conditional(acceptance_by_position(heard)),
    )


def adaptive_case(concurrency: int, best_gamma: int, turns: Sequence[Turn]) -> AdaptiveCase:
    """Out of its turns."""
    finished = [each.finish.speculation for turn in turns for each in turn.adaptive.heard]
    return AdaptiveCase(
        concurrency=concurrency,
        tokens_per_second=median([turn.adaptive.rate for turn in turns]),
        of_plain=median([turn.adaptive.rate / turn.plain_rate for turn in turns]),
        plain_apart=median([abs(turn.plain[1].rate / turn.plain[0].rate - 1.0) for turn in turns]),
        best_gamma=best_gamma,
        of_best=median([turn.adaptive.rate / turn.best_rate for turn in turns]),
        mean_gamma=sum(each.draft_tokens for each in finished) / max(1, sum(each.rounds for each in finished)),
    )


def _latency(seconds: Sequence[float]) -> Latency:
    return Latency(*(1000 * quantile(seconds, share) for share in (0.5, 0.95, 0.99)))


def serving_tables(result: ServingResult) -> list[Table]:
    """Load and prefix."""
    cases = results_table(
        f"Requests at the same time: {result.models}, {result.max_tokens} tokens each, greedy",
        ("requests", "gamma", "tokens/s", "one by one", "gain", "TTFT p50/p95/p99", "TPOT p50/p95/p99", "batch", "CPU"),
    )
    for case in result.cases:
        cases.add_row(
            str(case.concurrency),
            str(case.gamma),
            f"{case.tokens_per_second:.1f}",
            f"{case.alone_tokens_per_second:.1f}",
            f"{case.batching_gain:.2f}x",
            _shown(case.first_token, 0),
            _shown(case.per_output_token, 1),
            f"{case.batch_size:.1f}",
            f"{case.orchestrator_cpu:.2f}",
        )
    cases.caption = (
        "one by one: the same services behind an orchestrator that runs one request at a time. TTFT, TPOT: ms to the first "
        "token and for each one after it. batch: items in a forward of the target. CPU: the orchestrator's, ms for a token."
    )
    prefix = results_table(
        "Time to the first token of prompts with a common beginning (ms)", ("shared", "cold", "warm", "ratio")
    )
    found = result.prefix
    prefix.add_row(str(found.shared_tokens), f"{found.cold:.0f}", f"{found.warm:.0f}", f"{found.ratio:.2f}")
    prefix.caption = "tokens in common; cold: with a salt of its own, so that nothing is shared; medians, taking turns."
    return [cases, *([_adaptive_table(result)] if result.adaptive else []), prefix]


def _adaptive_table(result: ServingResult) -> Table:
    table = results_table(
        "An adaptive gamma",
        ("requests", "tokens/s", "of gamma 0", "itself again", "best fixed gamma", "of that", "mean gamma"),
    )
    for case in result.adaptive:
        table.add_row(
            str(case.concurrency),
            f"{case.tokens_per_second:.1f}",
            f"{case.of_plain:.2f}x",
            f"±{case.plain_apart:.2f}",
            str(case.best_gamma),
            f"{case.of_best:.2f}x",
            f"{case.mean_gamma:.1f}",
            style="" if case.of_plain >= 1 else "yellow",
        )
    table.caption = (
        "The same requests plainly, adaptively, plainly again, and with the gamma that was fastest above, in turns. itself again: "
        "by how much two runs at gamma 0 differ."
    )
    return table


def _adaptive_goals(cases: Sequence[AdaptiveCase]) -> list[Goal]:
    worst_plain, worst_best = min(case.of_plain for case in cases), min(case.of_best for case in cases)
    return [
        Goal("auto over gamma 0, worst", f"{worst_plain:.2f}x", f">= {OF_PLAIN_GOAL}", worst_plain >= OF_PLAIN_GOAL),
        Goal("auto over the best fixed, worst", f"{worst_best:.2f}x", f">= {OF_BEST_GOAL}", worst_best >= OF_BEST_GOAL),
    ]


def _largest_drop(result: ServingResult) -> float:
    """Of the tokens a second from a number of requests to the next, at any gamma."""
    drops = [
        before.tokens_per_second / after.tokens_per_second
        for gamma in {case.gamma for case in result.cases}
        for before, after in itertools.pairwise(
            sorted((case for case in result.cases if case.gamma == gamma), key=lambda case: case.concurrency)
        )
    ]
    return max(drops, default=0.0)


def serving_goals(result: ServingResult) -> list[Goal]:
    """Whether batching is worth it, and the shared prefix."""
    goals = [
        Goal(
            f"{case.concurrency} requests together over one by one, gamma {case.gamma}",
            f"{case.batching_gain:.2f}x",
            f"at least {BATCHING_GOAL:g}x",
            case.batching_gain >= BATCHING_GOAL,
        )
        for case in result.cases
        if case.concurrency == BATCHING_REQUESTS
    ]
    drop = _largest_drop(result)
    goals.append(Goal("largest drop between neighbours", f"{drop:.2f}x", f"<= {DROP_GOAL}", drop <= DROP_GOAL))
    if result.adaptive:
        goals += _adaptive_goals(result.adaptive)
    ratio = result.prefix.ratio
    return [
        *goals,
        Goal(
            "first token with a shared prefix, over cold",
            f"{ratio:.2f}",
            f"at most {PREFIX_GOAL}",
            ratio <= PREFIX_GOAL,
        ),
    ]


def _shown(latency: Latency, digits: int) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in (latency.p50, latency.p95, latency.p99))
