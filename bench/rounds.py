"""`python -m bench rounds`: rounds a second through the real services, where the model is next to nothing.

Real draft and target services with a model of one layer and hidden size 16, beside the stand-ins of `overhead`, whose answers
were made in advance: an orchestrator in front of either, in turns. On a machine with few cores the services take theirs from
one another; so what an orchestrator could do with a core of its own is told by its CPU time for a round.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil
from rich.table import Table

from tandem.v1 import orchestrator_pb2 as api

from . import one_layer_pair
from .caller import Heard, generate, generate_together
from .overhead import (
    CLOSING_ROUNDS,
    PROMPT,
    WARM_UP_ROUNDS,
    OverheadOptions,
    cpu_seconds,
    fixed_request,
    fixed_workers,
    orchestrator_environment,
    wait_for_draft,
)
from .progress import steps
from .services import NotMeasured, Planned, free_address, run_all, running, running_store
from .serving import scraped
from .statistic import quantile
from .tables import Goal, results_table

REAL = "one layer"
FIXED = "fixed"
RATE_GOAL = 2000
"""Rounds a second of an orchestrator on one core."""
OVERHEAD_GOAL = 10.0
"""Milliseconds of a round beside the models, p50, with 64 requests."""
CROWD = 64
CONTEXT_LENGTH = 1024
TEMPERATURE = 0.1
"""What is left of the model is nearly certain of nothing: at 1 few of the draft's tokens would be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsOptions:
    """What to measure."""

    concurrencies: Sequence[int] = (1, 16, 64)
    gammas: Sequence[int] = (5, 0)
    rounds: int = 120
    """Of one request, about."""
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class RoundsCase:
    """One side, concurrency and gamma. Times in milliseconds, for one round of one request."""

    side: str
    concurrency: int
    gamma: int
    rounds: int
    tokens_per_round: float
    round_p50: float
    round_p95: float
    rounds_per_second: float
    orchestrator_cpu: float
    workers_cpu: float
    models: float | None
    """Time in forwards, the draft's and the target's: each is shared with others. None where there is no model."""
    items_per_forward: float | None
    """At the target."""

    @property
    def rounds_per_core_second(self) -> float:
        """What the orchestrator could do with a core of its own."""
        return 1000 / self.orchestrator_cpu

    @property
    def overhead_p50(self) -> float:
        """The median round without its time in forwards."""
        return self.round_p50 - (self.models or 0.0)


@dataclass(frozen=True, slots=True)
class RoundsResult:
    """All that was measured."""

    cases: list[RoundsCase]


@dataclass(frozen=True, slots=True)
class _Side:
    """An orchestrator and the workers behind it."""

    name: str
    calls: grpc.aio.Channel
    orchestrator: psutil.Process
    workers: Sequence[psutil.Process]
    metrics: Mapping[str, str]
    """Where the workers' metrics are, by role; empty where they have no model."""

    def forwards(self) -> dict[str, Forwards]:
        """The workers' counters now, by role."""
        return {role: Forwards.read(address) for role, address in self.metrics.items()}


@dataclass(frozen=True, slots=True)
class Forwards:
    """A worker's counters."""

    count: float
    items: float
    seconds: float

    @classmethod
    def read(cls, address: str) -> Forwards:
        """As they are now."""
        values = scraped(address)
        return cls(
            values["tandem_batch_size_count"], values["tandem_batch_size_sum"], values["tandem_step_seconds_sum"]
        )

    def since(self, before: Forwards) -> Forwards:
        """What came after that reading."""
        return Forwards(self.count - before.count, self.items - before.items, self.seconds - before.seconds)


@dataclass(slots=True)
class _Samples:
    """Of one case, over its repeats."""

    intervals: list[float] = field(default_factory=list)
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    orchestrator_seconds: float = 0.0
    worker_seconds: float = 0.0
    forwards: dict[str, list[Forwards]] = field(default_factory=dict)


async def measure(options: RoundsOptions) -> RoundsResult:
    """Runs all cases, the sides in turns and the repeats of each spread over the whole run."""
    loads = list(itertools.product(options.concurrencies, options.gammas))
    samples = {(name, *load): _Samples() for load in loads for name in (FIXED, REAL)}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with _running(options, Path(folder)) as sides:
            for side in sides:
                for gamma in options.gammas:
                    await generate(side.calls, _request(gamma, options))
            runs = list(itertools.product(range(options.repeats), loads))
            for repeat, (concurrency, gamma) in steps(runs, "rounds"):
                for side in sides if repeat % 2 else reversed(sides):
                    case = samples[side.name, concurrency, gamma]
                    await _measure_once(side, case, _request(gamma, options), concurrency)
    return RoundsResult([_case(*key, taken) for key, taken in samples.items()])


def _request(gamma: int, options: RoundsOptions) -> api.GenerateRequest:
    request = fixed_request(gamma, options.rounds, OverheadOptions())
    request.temperature = TEMPERATURE
    request.max_tokens = min(request.max_tokens, CONTEXT_LENGTH - len(PROMPT))
    return request


async def _measure_once(side: _Side, samples: _Samples, request: api.GenerateRequest, concurrency: int) -> None:
    forwards = side.forwards()
    orchestrator, workers = cpu_seconds(side.orchestrator), sum(map(cpu_seconds, side.workers))
    heard = await generate_together(side.calls, [request] * concurrency)
    samples.orchestrator_seconds += cpu_seconds(side.orchestrator) - orchestrator
    samples.worker_seconds += sum(map(cpu_seconds, side.workers)) - workers
    for role, now in side.forwards().items():
        samples.forwards.setdefault(role, []).append(now.since(forwards[role]))
    samples.rounds += sum(len(each.arrivals) for each in heard)
    samples.tokens += sum(sum(each.tokens) for each in heard)
    samples.seconds += max(each.arrivals[-1] for each in heard) - min(each.asked for each in heard)
    for each in heard:
        _check(each, request.num_speculative_tokens)
        samples.intervals += each.intervals(WARM_UP_ROUNDS, CLOSING_ROUNDS)


def _check(heard: Heard, gamma: int) -> None:
    speculation = heard.finish.speculation
    if speculation.degraded_rounds or speculation.rebuilds or bool(speculation.draft_tokens) != bool(gamma):
        raise NotMeasured(f"the rounds were not what was to be measured: {speculation}")


def _case(side: str, concurrency: int, gamma: int, samples: _Samples) -> RoundsCase:
    target = samples.forwards.get("target", [])
    return RoundsCase(
        side=side,
        concurrency=concurrency,
        gamma=gamma,
        rounds=samples.rounds,
        tokens_per_round=samples.tokens / samples.rounds,
        round_p50=1000 * quantile(samples.intervals, 0.5),
        round_p95=1000 * quantile(samples.intervals, 0.95),
        rounds_per_second=samples.rounds / samples.seconds,
        orchestrator_cpu=1000 * samples.orchestrator_seconds / samples.rounds,
        workers_cpu=1000 * samples.worker_seconds / samples.rounds,
        models=model_milliseconds(samples.forwards.values(), samples.rounds) if samples.forwards else None,
        items_per_forward=sum(each.items for each in target) / max(sum(each.count for each in target), 1)
        if target
        else None,
    )


def model_milliseconds(forwards: Iterable[Sequence[Forwards]], rounds: int) -> float:
    """What a round of one request waits for forwards: for each worker as many as it is in, at their mean time. A forward
    that it shares with others counts whole, since it waits for all of it."""
    found = 0.0
    for of_worker in forwards:
        count, items, seconds = (
            sum(getattr(each, name) for each in of_worker) for name in ("count", "items", "seconds")
        )
        if count:
            found += items / rounds * seconds / count
    return 1000 * found


@contextlib.asynccontextmanager
async def _running(options: RoundsOptions, folder: Path) -> AsyncIterator[list[_Side]]:
    """Both sides, each with a store of its own."""
    async with contextlib.AsyncExitStack() as stack:
        sides = []
        for name, make in ((FIXED, _fixed_side), (REAL, _real_side)):
            place = folder / name.replace(" ", "-")
            place.mkdir()
            redis_url = stack.enter_context(running_store(place))
            sides.append(await make(stack, redis_url, options, place))
        yield sides


async def _fixed_side(stack: contextlib.AsyncExitStack, redis_url: str, options: RoundsOptions, folder: Path) -> _Side:
    draft, target = free_address(), free_address()
    stand_ins = stack.enter_context(running("workers", fixed_workers(draft, target, OverheadOptions()), {}, folder))
    stand_ins.wait_serving(target)
    calls, orchestrator = await _orchestrator(stack, draft, target, redis_url, options, folder)
    return _Side(FIXED, calls, orchestrator, [psutil.Process(stand_ins.process.pid)], {})


async def _real_side(stack: contextlib.AsyncExitStack, redis_url: str, options: RoundsOptions, folder: Path) -> _Side:
    models = one_layer_pair.make(folder)
    addresses = {role: free_address() for role in models}
    metrics = {role: free_address() for role in models}
    planned = [
        _planned_worker(role, models[role], addresses[role], metrics[role], max(options.concurrencies))
        for role in models
    ]
    services = run_all(stack, planned, folder)
    calls, orchestrator = await _orchestrator(
        stack, addresses["draft"], addresses["target"], redis_url, options, folder
    )
    return _Side(REAL, calls, orchestrator, [psutil.Process(each.process.pid) for each in services], metrics)


async def _orchestrator(
    stack: contextlib.AsyncExitStack, draft: str, target: str, redis_url: str, options: RoundsOptions, folder: Path
) -> tuple[grpc.aio.Channel, psutil.Process]:
    listen = free_address()
    settings = OverheadOptions(concurrencies=options.concurrencies)
    environment = orchestrator_environment(listen, draft, target, redis_url, settings)
    [service] = run_all(stack, [Planned("orchestrator", "orchestrator", environment, listen)], folder)
    calls = await stack.enter_async_context(grpc.aio.insecure_channel(listen))
    await wait_for_draft(calls, settings)
    return calls, psutil.Process(service.process.pid)


def _planned_worker(role: str, model: Path, listen: str, metrics: str, slots: int) -> Planned:
    prefix = f"TANDEM_{role.upper()}"
    environment = {
        f"{prefix}_LISTEN": listen,
        f"{prefix}_METRICS_LISTEN": metrics,
        f"{prefix}_MODEL": str(model),
        f"{prefix}_DTYPE": "float32",
        f"{prefix}_THREADS": "1",
        f"{prefix}_SLOTS": str(slots),
    }
    return Planned(role, f"{role}_service", environment, listen)


def rounds_table(result: RoundsResult) -> Table:
    """Both sides, case by case."""
    table = results_table(
        f"Rounds through the services with a model of one layer and hidden size {one_layer_pair.HIDDEN_SIZE}, and with fixed answers (ms)",
        (
            *("workers", "requests", "gamma", "rounds", "tok/round", "rounds/s", "CPU", "rounds/CPU s", "workers' CPU"),
            *("p50", "p95", "forwards", "p50 beside", "items"),
        ),
    )
    for case in result.cases:
        table.add_row(
            case.side,
            str(case.concurrency),
            str(case.gamma),
            str(case.rounds),
            f"{case.tokens_per_round:.2f}",
            f"{case.rounds_per_second:.0f}",
            f"{case.orchestrator_cpu:.3f}",
            f"{case.rounds_per_core_second:.0f}",
            f"{case.workers_cpu:.3f}",
            f"{case.round_p50:.2f}",
            f"{case.round_p95:.2f}",
            "-" if case.models is None else f"{case.models:.2f}",
            f"{case.overhead_p50:.2f}",
            "-" if case.items_per_forward is None else f"{case.items_per_forward:.1f}",
        )
    table.caption = (
        "workers: real services with that model, or stand-ins whose answers are fixed. p50, p95: of a round, between two responses at "
        "the caller. CPU: the orchestrator's, for one round of one request; rounds/CPU s: what it could do with a core of its own. "
        "workers' CPU: of both. forwards: the draft's and the target's, part of the round; p50 beside: without them. items: in one "
        "forward of the target."
    )
    return table


def rounds_goals(result: RoundsResult) -> list[Goal]:
    """A core's worth of rounds, and the round's overhead in a crowd."""
    goals = []
    for case in result.cases:
        if case.concurrency != CROWD or not case.gamma:
            continue
        rate, beside = case.rounds_per_core_second, case.overhead_p50
        name = f"{CROWD} requests, gamma {case.gamma}, {case.side}"
        goals += [
            Goal(f"rounds per CPU second, {name}", f"{rate:.0f}", f">= {RATE_GOAL}", rate >= RATE_GOAL),
            Goal(f"p50 beside, {name}", f"{beside:.1f} ms", f"<= {OVERHEAD_GOAL:.0f} ms", beside <= OVERHEAD_GOAL),
        ]
    return goals
