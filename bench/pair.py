"""`python -m bench pair`: what a pair of models gains over the target alone, beside what the cost model predicts.

One request at a time. Runs with and without speculation take turns, and so do they with the timing of the workers, so
that a machine whose speed drifts treats all alike.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from .pair_results import Costs, PairRow, Trial, WayRow, pair_row, way_row
from .progress import steps
from .prompts import PROMPT_CLASSES, PromptClass, prompt_class
from .running_pair import Ahead, ModelPair, RunningPair, Way, running_pair
from .worker_times import SyntheticSessions, WorkerTimes

TEMPERATURES = (0.0, 0.7, 1.0)
PLAIN = Way(0, ahead=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What to measure."""

    models: ModelPair = field(default_factory=ModelPair)
    gammas: Sequence[int] = (1, 2, 3, 5)
    ways: Sequence[Way] = ()
    """Other ways to decode, measured beside these."""
    cases: Sequence[tuple[str, float]] = tuple(
        (each.name, temperature) for each in PROMPT_CLASSES for temperature in TEMPERATURES
    )
    """Classes of prompts, each with a temperature."""
    max_tokens: int = 64
    prompts: int = 1
    """Prompts for each case."""
    samples: int = 10
    """Timings of each worker step for each prompt."""
    overhead: float
    """C_o, in milliseconds."""


@dataclass(frozen=True, slots=True)
class PairResult:
    """All that was measured."""

    models: str
    max_tokens: int
    rows: list[PairRow]
    ways: list[WayRow]
    ahead_items: dict[str, float]
    """Of the draft that works ahead, over the whole run: items by outcome, and tokens."""


async def measure(options: PairOptions) -> PairResult:
    """Runs all cases; a row for each gamma of each."""
    rows: list[PairRow] = []
    ways: list[WayRow] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        ahead = Ahead() if any(way.ahead for way in options.ways) else None
        async with running_pair(options.models, Path(folder), ahead=ahead) as services:
            await services.warm_up([PLAIN, *(Way(gamma, ahead=False) for gamma in options.gammas), *options.ways])
            for name, temperature in steps(options.cases, "pair"):
                fixed, others = await _case(services, options, prompt_class(name), temperature)
                rows += fixed
                ways += others
            ahead_items = services.ahead_items()
    return PairResult(str(options.models), options.max_tokens, rows, ways, ahead_items)


async def _case(
    services: RunningPair, options: PairOptions, prompts: PromptClass, temperature: float
) -> tuple[list[PairRow], list[WayRow]]:
    trials: dict[int, list[Trial]] = {gamma: [] for gamma in options.gammas}
    of_ways: dict[Way, list[Trial]] = {way: [] for way in options.ways}
    times = WorkerTimes()
    # Another prompt at each temperature, so that few prompts don't stand for all.
    first = sum(other < temperature for other in TEMPERATURES)
    for index in range(first, first + options.prompts):
        request = prompts.request(index)
        request.temperature = temperature
        request.max_tokens = options.max_tokens
        request.seed = 1000 + index
        await _interleave(services, options, request, trials, times)
        await _take_turns(services, request, of_ways)
    rows = [
        pair_row(prompts.name, temperature, gamma, options.max_tokens, trials[gamma], _costs(times, gamma, options))
        for gamma in options.gammas
    ]
    return rows, [
        way_row(prompts.name, temperature, str(way), options.max_tokens, of_ways[way]) for way in options.ways
    ]


async def _take_turns(services: RunningPair, request: api.GenerateRequest, trials: dict[Way, list[Trial]]) -> None:
    """One prompt: plain, a way, plain, another way, ... plain."""
    if not trials:
        return
    before = await services.decode(request, PLAIN)
    for way, so_far in trials.items():
        speculative = await services.decode(request, way)
        after = await services.decode(request, PLAIN)
        so_far.append(Trial(before, speculative, after))
        before = after


async def _interleave(
    services: RunningPair,
    options: PairOptions,
    request: api.GenerateRequest,
    trials: dict[int, list[Trial]],
    times: WorkerTimes,
) -> None:
    """One prompt: gamma 0, g, gamma 0, g', ... gamma 0, the workers timed in the gaps."""
    before = await services.decode(request, PLAIN)
    length = before.start.prompt_tokens + before.finish.usage.completion_tokens // 2
    session = SyntheticSessions(services.workers, length, _sampling(request.temperature))
    await session.open()
    gaps = 2 * len(options.gammas)
    counts = [options.samples * (gap + 1) // gaps - options.samples * gap // gaps for gap in range(gaps)]
    for gamma in options.gammas:
        await session.sample(times, options.gammas, counts.pop())
        speculative = await services.decode(request, Way(gamma, ahead=False))
        await session.sample(times, options.gammas, counts.pop())
        after = await services.decode(request, PLAIN)
        trials[gamma].append(Trial(before, speculative, after))
        before = after
    await session.close()


def _sampling(temperature: float) -> sampling_pb2.Sampling:
    return sampling_pb2.Sampling(
        temperature=temperature,
        top_p=1.0,
        seed=7,
        acceptance_method=sampling_pb2.ACCEPTANCE_METHOD_REJECTION,
    )


def _costs(times: WorkerTimes, gamma: int, options: PairOptions) -> Costs:
    plain_step, draft, verify = (1000 * seconds for seconds in times.medians(gamma))
    return Costs(plain_step, draft, verify, options.overhead)
