"""`python -m bench overhead`: what a round costs beside the models, that is orchestrator, wire and commit.

Real processes: the orchestrator, an embedded Valkey with an append-only file, and a process that stands for draft and
target (see `fixed_workers`). A round's time is the time between two responses at the caller.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from tandem.cost_model import expected_tokens
from tandem.v1 import orchestrator_pb2 as api

from .caller import Heard, generate, generate_together
from .echo import measure_echo
from .fixed_workers import ECHO_METHOD, TIMINGS_METHOD
from .placement import Cores, allowed_cores, placed_on
from .round_bytes import RoundBytes, round_bytes
from .services import REPOSITORY, NotMeasured, free_address, running, running_store
from .statistic import median, quantile

TOKENIZER = REPOSITORY / "models" / "tiny-target"
PROMPT = list(range(100, 164))
WARM_UP_ROUNDS = 10
_PLAIN_PAIRS = 4
"""Pairs of runs at gamma 0 for each repeat: they differ by little."""
CLOSING_ROUNDS = 2
"""Left out at a request's end: the last round also stores the finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOptions:
    """What to measure."""

    concurrencies: Sequence[int] = (1, 8, 64)
    gammas: Sequence[int] = (5, 0)
    rounds: int = 400
    """Rounds of one request; fewer where several run at once."""
    repeats: int = 3
    acceptance: float = 0.8
    support_size: int = 64
    vocabulary_sizes: Sequence[int] = (512, 151_936)
    tokenizer: Path = TOKENIZER
    profile: Path | None = None
    """Where to write a profile of the orchestrator; it slows it down."""
    own_core: bool = False
    """The orchestrator has a core of its own, and all others share the rest."""


@dataclass(frozen=True, slots=True)
class OverheadCase:
    """One concurrency and gamma. Times in milliseconds."""

    concurrency: int
    gamma: int
    rounds: int
    round_p50: float
    round_p95: float
    rounds_per_second: float
    orchestrator_cpu: float
    """CPU time of the orchestrator for one round of one request."""
    worker: float
    """Time that both fixed workers took for one round of one request, included in the above."""
    items_per_batch: float


@dataclass(frozen=True, slots=True)
class PlainCost:
    """Rounds at gamma 0, of one request at a time: by an orchestrator with drafts, and by one that was given none."""

    pairs: int
    """Runs of either, in turns."""
    round_ratio: float
    """With drafts over without: the median over the pairs of the ratios of their median rounds."""
    cpu_ratio: float
    """Of the CPU time of both orchestrators, for the same number of rounds."""


@dataclass(frozen=True, slots=True)
class OverheadResult:
    """All that was measured."""

    cases: list[OverheadCase]
    plain: PlainCost | None
    """None where gamma 0 was not asked for."""
    bytes_per_round: list[RoundBytes]
    gamma: int
    support_size: int
    echo_p50: float
    """Milliseconds of a bare round trip over a stream, see `echo`."""


@dataclass(slots=True)
class _Samples:
    """Of one case, over its repeats."""

    intervals: list[float] = field(default_factory=list)
    rounds: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    worker_seconds: float = 0.0
    batches: int = 0
    items: int = 0


@dataclass(frozen=True, slots=True)
class _WithoutDraft:
    """An orchestrator that was given no draft, in front of the same target and store."""

    calls: grpc.aio.Channel
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class _Bench:
    """The running services as the measurement sees them."""

    calls: grpc.aio.Channel
    workers: grpc.aio.Channel
    orchestrator: psutil.Process
    without_draft: Callable[[], contextlib.AbstractAsyncContextManager[_WithoutDraft]]
    """Started for what it is needed for only: it would take its share of the machine from all else."""

    async def worker_timings(self) -> dict[str, float]:
        """Of the fixed workers since the last reading."""
        read: Any = self.workers.unary_unary(TIMINGS_METHOD)
        timings: dict[str, float] = json.loads(await read(b""))
        return timings


async def measure(options: OverheadOptions) -> OverheadResult:
    """Runs all cases, the repeats of each spread over the whole run."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with _running(options, Path(folder)) as bench:
            samples = await _measure_cases(bench, options)
            plain = await _measure_plain(bench, options)
            echo_p50 = await measure_echo(bench.workers, ECHO_METHOD)
    gamma = max(options.gammas)
    return OverheadResult(
        cases=[_case(concurrency, gamma, taken) for (concurrency, gamma), taken in samples.items()],
        plain=plain,
        bytes_per_round=[round_bytes(size, gamma, options.support_size) for size in options.vocabulary_sizes],
        gamma=gamma,
        support_size=options.support_size,
        echo_p50=echo_p50,
    )


async def _measure_cases(bench: _Bench, options: OverheadOptions) -> dict[tuple[int, int], _Samples]:
    cases = [(concurrency, gamma) for concurrency in options.concurrencies for gamma in options.gammas]
    samples = {case: _Samples() for case in cases}
    for gamma in options.gammas:
        await generate(bench.calls, fixed_request(gamma, 64, options))
    if options.profile is not None:
        bench.orchestrator.send_signal(signal.SIGUSR1)
    for _ in range(options.repeats):
        for concurrency, gamma in cases:
            # With many at once each needs fewer, but enough for a steady state.
            rounds = max(options.rounds // concurrency, min(60, options.rounds))
            await _measure_once(bench, samples[concurrency, gamma], fixed_request(gamma, rounds, options), concurrency)
    return samples


async def _measure_plain(bench: _Bench, options: OverheadOptions) -> PlainCost | None:
    """Neighbouring runs are compared, since the speed of a machine drifts; which of them is first alternates."""
    if 0 not in options.gammas:
        return None
    async with bench.without_draft() as without:
        return await _compare(bench, without, options)


async def _compare(bench: _Bench, without: _WithoutDraft, options: OverheadOptions) -> PlainCost:
    request = fixed_request(0, options.rounds, options)
    sides = [(bench.calls, bench.orchestrator), (without.calls, without.process)]
    await generate(without.calls, fixed_request(0, 64, options))
    medians: list[list[float]] = [[], []]
    cpu = [0.0, 0.0]
    for number in range(_PLAIN_PAIRS * options.repeats):
        for side in (0, 1) if number % 2 else (1, 0):
            calls, process = sides[side]
            began = cpu_seconds(process)
            heard = await generate(calls, request)
            cpu[side] += cpu_seconds(process) - began
            _check(heard, 0)
            medians[side].append(median(heard.intervals(WARM_UP_ROUNDS, CLOSING_ROUNDS)))
    return plain_cost(medians, cpu)


def plain_cost(medians: Sequence[Sequence[float]], cpu: Sequence[float]) -> PlainCost:
    """Of the median rounds of each run, and of the CPU seconds of all: with drafts, and without."""
    ratios = [with_draft / alone for with_draft, alone in zip(*medians, strict=True)]
    return PlainCost(len(ratios), median(ratios), cpu[0] / cpu[1] if cpu[1] else math.nan)


async def _measure_once(bench: _Bench, samples: _Samples, request: api.GenerateRequest, concurrency: int) -> None:
    await bench.worker_timings()
    cpu = cpu_seconds(bench.orchestrator)
    heard = await generate_together(bench.calls, [request] * concurrency)
    samples.cpu_seconds += cpu_seconds(bench.orchestrator) - cpu
    worker = await bench.worker_timings()
    samples.worker_seconds += worker["seconds"]
    samples.batches += int(worker["batches"])
    samples.items += int(worker["items"])
    samples.rounds += sum(len(each.arrivals) for each in heard)
    samples.seconds += max(each.arrivals[-1] for each in heard) - min(each.asked for each in heard)
    for each in heard:
        _check(each, request.num_speculative_tokens)
        samples.intervals += each.intervals(WARM_UP_ROUNDS, CLOSING_ROUNDS)


def _check(heard: Heard, gamma: int) -> None:
    speculation = heard.finish.speculation
    if speculation.degraded_rounds or speculation.rebuilds or bool(speculation.draft_tokens) != bool(gamma):
        raise NotMeasured(f"the rounds were not what was to be measured: {speculation}")


def _case(concurrency: int, gamma: int, samples: _Samples) -> OverheadCase:
    return OverheadCase(
        concurrency=concurrency,
        gamma=gamma,
        rounds=samples.rounds,
        round_p50=1000 * quantile(samples.intervals, 0.5),
        round_p95=1000 * quantile(samples.intervals, 0.95),
        rounds_per_second=samples.rounds / samples.seconds,
        orchestrator_cpu=1000 * samples.cpu_seconds / samples.rounds,
        worker=1000 * samples.worker_seconds / samples.rounds,
        items_per_batch=samples.items / max(samples.batches, 1),
    )


def fixed_request(gamma: int, rounds: int, options: OverheadOptions) -> api.GenerateRequest:
    """One that the fixed workers answer in about so many rounds."""
    tokens = round(rounds * expected_tokens([options.acceptance] * gamma))
    return api.GenerateRequest(
        token_ids=api.TokenIds(ids=PROMPT),
        max_tokens=tokens,
        temperature=1.0,
        num_speculative_tokens=gamma,
        ignore_eos=True,
    )


def cpu_seconds(process: psutil.Process) -> float:
    """What a process has used so far, in user and system mode."""
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.asynccontextmanager
async def _running(options: OverheadOptions, folder: Path) -> AsyncIterator[_Bench]:
    draft, target, listen = free_address(), free_address(), free_address()
    workers = fixed_workers(draft, target, options)
    profiled = ["bench.profiled_orchestrator", str(options.profile)] if options.profile else ["orchestrator"]
    own, rest = _cores(options)
    with placed_on(rest), running_store(folder) as redis_url:
        environment = orchestrator_environment(listen, draft, target, redis_url, options)
        with (
            running("workers", workers, {}, folder) as fixed,
            placed_on(own),
            running("orchestrator", ["-m", *profiled], environment, folder) as orchestrator,
            placed_on(rest),
        ):
            fixed.wait_serving(target)
            orchestrator.wait_serving(listen)
            async with grpc.aio.insecure_channel(listen) as calls, grpc.aio.insecure_channel(target) as side:
                await wait_for_draft(calls, options)
                without = partial(_without_draft, target, redis_url, options, folder, (own, rest))
                yield _Bench(calls, side, psutil.Process(orchestrator.process.pid), without)


@contextlib.asynccontextmanager
async def _without_draft(
    target: str, redis_url: str, options: OverheadOptions, folder: Path, cores: tuple[Cores, Cores]
) -> AsyncIterator[_WithoutDraft]:
    (own, rest), listen = cores, free_address()
    environment = orchestrator_environment(listen, "", target, redis_url, options)
    with (
        placed_on(own),
        running("without-draft", ["-m", "orchestrator"], environment, folder) as orchestrator,
        placed_on(rest),
    ):
        orchestrator.wait_serving(listen)
        async with grpc.aio.insecure_channel(listen) as calls:
            yield _WithoutDraft(calls, psutil.Process(orchestrator.process.pid))


def _cores(options: OverheadOptions) -> tuple[Cores, Cores]:
    """Those for the orchestrator, and those for all others; no core stands for any."""
    if not options.own_core:
        return frozenset(), frozenset()
    cores = allowed_cores()
    if len(cores) < 2:
        raise NotMeasured("a core of its own takes two cores, and a system where processes can be placed")
    return frozenset({min(cores)}), cores - {min(cores)}


def fixed_workers(draft: str, target: str, options: OverheadOptions) -> list[str]:
    """What Python is given to run the stand-ins at these addresses."""
    arguments = ["-m", "bench.fixed_workers", "--draft", draft, "--target", target]
    arguments += ["--tokenizer", str(options.tokenizer)]
    return [*arguments, "--acceptance", str(options.acceptance), "--support-size", str(options.support_size)]


def orchestrator_environment(
    listen: str, draft: str, target: str, redis_url: str, options: OverheadOptions
) -> dict[str, str]:
    """The settings of an orchestrator in front of the stand-ins; without a draft where that is empty."""
    return {
        "TANDEM_ORCHESTRATOR_LISTEN": listen,
        **({"TANDEM_DRAFT_ADDRESSES": draft} if draft else {}),
        "TANDEM_TARGET_ADDRESSES": target,
        "TANDEM_TOKENIZER": str(options.tokenizer),
        "TANDEM_REDIS_URL": redis_url,
        "TANDEM_MAX_RUNNING_REQUESTS": str(max(options.concurrencies)),
        "TANDEM_MAX_TOKENS": "60000",
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "30",
    }


async def wait_for_draft(calls: grpc.aio.Channel, options: OverheadOptions) -> None:
    """The orchestrator is ready without a draft; these numbers need one."""
    deadline = time.monotonic() + 30
    while (await generate(calls, fixed_request(1, 4, options))).finish.speculation.degraded_rounds:
        if time.monotonic() > deadline:
            raise NotMeasured("the orchestrator found no draft")
