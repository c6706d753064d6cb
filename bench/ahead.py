"""`python -m bench ahead`: what drafting ahead brings, beside the same draft that waits and beside plain decoding.

One request at a time, the three in turns, and always working ahead: whether it should is not asked here. Greedily, and under
COUPLED with a seed, all three give the same tokens, so the same rounds are compared; sampled otherwise, blocks of a draft
that works ahead come with a look-ahead, and the text may be another one of the same law.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from .caller import Heard
from .progress import steps
from .prompts import PromptClass, prompt_class
from .running_pair import Ahead, ModelPair, RunningPair, Way, running_pair
from .services import NotMeasured
from .statistic import median
from .tables import Goal, results_table

PLAIN_GOAL = 2.5
"""Tokens a second of a draft that works ahead over those of plain decoding, for a target padded to a cost ratio of 15."""
WAITING_GOAL = 1.25
"""Over those of the same draft that waits, where two cores are free."""
_OUTCOMES = ("chain", "branch", "miss")


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadOptions:
    """What to measure."""

    models: ModelPair = field(default_factory=ModelPair)
    gammas: Sequence[int] = (2, 4, 6, 8)
    cases: Sequence[tuple[str, float]] = (("chat", 1.0), ("prose", 1.0))
    """Classes of prompts, each with a temperature."""
    coupled: bool = True
    """The acceptance method; it makes no difference at temperature 0."""
    rows: int = 12
    """Outcomes that are drafted for at a time."""
    prompts: int = 3
    """Of each case."""
    max_tokens: int = 128


@dataclass(frozen=True, slots=True)
class AheadRow:
    """One case at one gamma. Speed-ups are medians over the prompts."""

    prompts: str
    temperature: float
    gamma: int
    plain_tokens_per_second: float
    tokens_per_round: float
    waiting: float
    """Tokens a second of the draft that waits, over plain decoding's."""
    ahead: float
    """Of the draft that works ahead, over plain decoding's."""
    gain: float
    """Of the draft that works ahead, over the other's."""
    outcomes: tuple[int, int, int]
    """Blocks asked for whose prefix was the draft's own guess, another guess, and none of them."""
    same_tokens: bool

    @property
    def ready(self) -> float:
        """The share of blocks that were ready, or begun, when they were asked for."""
        return sum(self.outcomes[:2]) / max(sum(self.outcomes), 1)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One prompt, in three ways."""

    plain: Heard
    waiting: Heard
    ahead: Heard


async def measure(options: AheadOptions) -> list[AheadRow]:
    """Runs all cases; a row for each gamma of each."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        ahead = Ahead(options.rows, measured=False)
        async with running_pair(options.models, Path(folder), ahead=ahead) as services:
            ways = [Way(gamma, ahead=each) for gamma in options.gammas for each in (False, True)]
            await services.warm_up([Way(0, ahead=False), *ways])
            cases = [(case, gamma) for case in options.cases for gamma in options.gammas]
            return [
                await _row(services, options, prompt_class(name), temperature, gamma)
                for (name, temperature), gamma in steps(cases, "ahead")
            ]


async def _row(
    services: RunningPair, options: AheadOptions, prompts: PromptClass, temperature: float, gamma: int
) -> AheadRow:
    before = services.ahead_items()
    turns = [
        await _turn(services, _request(options, prompts, temperature, index), gamma, ahead_first=bool(index % 2))
        for index in range(options.prompts)
    ]
    return ahead_row(prompts.name, temperature, gamma, turns, _outcomes(before, services.ahead_items()))


async def _turn(services: RunningPair, request: api.GenerateRequest, gamma: int, *, ahead_first: bool) -> _Turn:
    plain = await services.decode(request, Way(0, ahead=False))
    heard = {ahead: await services.decode(request, Way(gamma, ahead=ahead)) for ahead in (ahead_first, not ahead_first)}
    return _Turn(plain, heard[False], heard[True])


def _request(options: AheadOptions, prompts: PromptClass, temperature: float, index: int) -> api.GenerateRequest:
    request = prompts.request(index)
    request.temperature = temperature
    request.max_tokens = options.max_tokens
    request.seed = 1000 + index
    request.ignore_eos = True
    if options.coupled:
        request.acceptance_method = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
    return request


def _outcomes(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[int, int, int]:
    names = [f'tandem_draft_ahead_items_total{{outcome="{outcome}"}}' for outcome in _OUTCOMES]
    chain, branch, miss = (round(after.get(name, 0.0) - before.get(name, 0.0)) for name in names)
    return chain, branch, miss


def ahead_row(
    prompts: str, temperature: float, gamma: int, turns: Sequence[_Turn], outcomes: tuple[int, int, int]
) -> AheadRow:
    """Summarises the turns of one case."""
    waiting = [turn.waiting for turn in turns]
    return AheadRow(
        prompts=prompts,
        temperature=temperature,
        gamma=gamma,
        plain_tokens_per_second=median([_rate(turn.plain) for turn in turns]),
        tokens_per_round=sum(sum(each.tokens) for each in waiting) / sum(len(each.tokens) for each in waiting),
        waiting=median([_rate(turn.waiting) / _rate(turn.plain) for turn in turns]),
        ahead=median([_rate(turn.ahead) / _rate(turn.plain) for turn in turns]),
        gain=median([_rate(turn.ahead) / _rate(turn.waiting) for turn in turns]),
        outcomes=outcomes,
        same_tokens=all(
            len({each.token_ids for each in (turn.plain, turn.waiting, turn.ahead)}) == 1 for turn in turns
        ),
    )


def _rate(heard: Heard) -> float:
    """Tokens a second, after the first response."""
    if len(heard.arrivals) < 2:
        raise NotMeasured("a completion came in one response: it needs more tokens")
    return sum(heard.tokens[1:]) / (heard.arrivals[-1] - heard.arrivals[0])


def ahead_table(rows: Sequence[AheadRow], options: AheadOptions) -> Table:
    """Each case and gamma."""
    method = "COUPLED" if options.coupled else "REJECTION"
    table = results_table(
        f"Drafting ahead, {options.rows} outcomes at a time: {options.models}, {options.max_tokens} tokens, {method}",
        (
            "prompts",
            "T",
            "gamma",
            "plain tok/s",
            "tok/round",
            "waiting",
            "ahead",
            "gain",
            "ready",
            "chain/branch/miss",
            "text",
        ),
    )
    for row in rows:
        table.add_row(
            row.prompts,
            f"{row.temperature:g}",
            str(row.gamma),
            f"{row.plain_tokens_per_second:.1f}",
            f"{row.tokens_per_round:.2f}",
            f"{row.waiting:.2f}x",
            f"{row.ahead:.2f}x",
            f"{row.gain:.2f}x",
            f"{row.ready:.0%}",
            "/".join(map(str, row.outcomes)),
            "same" if row.same_tokens else "differs",
        )
    table.caption = (
        "waiting, ahead: over plain decoding, in turns, after the first response. gain: of the draft that works ahead over the "
        "same one that waits. ready: blocks that were drafted, or begun, when they were asked for. It never leaves off here."
    )
    return table


def ahead_goals(rows: Sequence[AheadRow]) -> list[Goal]:
    """By gamma, over all classes of prompts: the best with drafting ahead, beside plain decoding, the same gamma without, and the
    best one without."""
    by_gamma = {row.gamma: [each for each in rows if each.gamma == row.gamma] for row in rows}
    best = max(by_gamma, key=lambda gamma: median([row.ahead for row in by_gamma[gamma]]))
    ahead = median([row.ahead for row in by_gamma[best]])
    gain = median([row.gain for row in by_gamma[best]])
    return [
        Goal(f"ahead, gamma {best}, over plain decoding", f"{ahead:.2f}x", f">= {PLAIN_GOAL}x", ahead >= PLAIN_GOAL),
        Goal(f"ahead over waiting, gamma {best}", f"{gain:.2f}x", f">= {WAITING_GOAL}x", gain >= WAITING_GOAL),
    ]
