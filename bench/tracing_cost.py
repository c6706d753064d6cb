"""`python -m bench tracing`: what tracing costs the orchestrator's rounds.

Orchestrators that differ in their OTEL_* variables alone stand in front of the same fixed workers and take turns. The
collector is a process that takes spans and forgets them.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import psutil

from .caller import generate_together
from .overhead import (
    OverheadOptions,
    cpu_seconds,
    fixed_request,
    fixed_workers,
    orchestrator_environment,
    wait_for_draft,
)
from .services import free_address, running, running_store
from .statistic import median

GAMMA = 5
UNTRACED = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingOptions:
    """What to measure."""

    concurrency: int = 16
    rounds: int = 20
    """Of each request."""
    waves: int = 8
    """Times that so many requests run in one measurement: one in a hundred is to be traced, so there must be hundreds."""
    repeats: int = 9


@dataclass(frozen=True, slots=True)
class TracingCase:
    """One setting of the tracing. CPU in milliseconds for one round of one request; ratios to the untraced runs."""

    name: str
    rounds_per_second: float
    throughput_ratio: float
    cpu: float
    cpu_ratio: float


@dataclass(frozen=True, slots=True)
class TracingResult:
    """All that was measured; the untraced case comes first."""

    concurrency: int
    cases: list[TracingCase]


@dataclass(frozen=True, slots=True)
class _Orchestrator:
    calls: grpc.aio.Channel
    process: psutil.Process
    rates: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


async def measure(options: TracingOptions) -> TracingResult:
    """Runs all settings, one after the other, so many times."""
    fixed = OverheadOptions(concurrencies=(options.concurrency,))
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with _running(fixed, Path(folder)) as orchestrators:
            for repeat in range(options.repeats + 1):
                for orchestrator in orchestrators.values():
                    await _run(orchestrator, options, fixed, kept=repeat > 0)
            untraced = orchestrators[UNTRACED]
            cases = [_case(name, each, untraced) for name, each in orchestrators.items()]
    return TracingResult(options.concurrency, cases)


async def _run(orchestrator: _Orchestrator, options: TracingOptions, fixed: OverheadOptions, *, kept: bool) -> None:
    request = fixed_request(GAMMA, options.rounds, fixed)
    cpu, began = cpu_seconds(orchestrator.process), time.perf_counter()
    rounds = 0
    for _ in range(options.waves):
        heard = await generate_together(orchestrator.calls, [request] * options.concurrency)
        rounds += sum(len(each.arrivals) for each in heard)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(orchestrator.process) - cpu
    if kept:  # the first is a warm-up
        orchestrator.rates.append(rounds / seconds)
        orchestrator.cpu.append(1000 * cpu / rounds)


def _case(name: str, measured: _Orchestrator, untraced: _Orchestrator) -> TracingCase:
    return TracingCase(
        name=name,
        rounds_per_second=median(measured.rates),
        throughput_ratio=_ratio(measured.rates, untraced.rates),
        cpu=median(measured.cpu),
        cpu_ratio=_ratio(measured.cpu, untraced.cpu),
    )


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    return median([one / other for one, other in zip(ones, others, strict=True)])


def _settings(collector: str) -> dict[str, dict[str, str]]:
    sampled = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"}
    return {
        UNTRACED: {"OTEL_SDK_DISABLED": "true"},
        "1 % of the requests": {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}", **sampled},
        "1 %, dead collector": {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{free_address()}", **sampled},
        "every request": {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{collector}"},
    }


@contextlib.asynccontextmanager
async def _running(options: OverheadOptions, folder: Path) -> AsyncIterator[dict[str, _Orchestrator]]:
    draft, target, collector = free_address(), free_address(), free_address()
    async with contextlib.AsyncExitStack() as stack:
        redis_url = stack.enter_context(running_store(folder))
        workers = stack.enter_context(running("workers", fixed_workers(draft, target, options), {}, folder))
        sink = stack.enter_context(running("collector", ["-m", "bench.span_sink", collector], {}, folder))
        workers.wait_serving(target)
        sink.wait_serving(collector)
        orchestrators = {}
        for index, (name, tracing) in enumerate(_settings(collector).items()):
            orchestrators[name] = await _start(stack, f"orchestrator-{index}", tracing, options, folder, {
                "draft": draft, "target": target, "redis_url": redis_url,
            })  # fmt: skip
        yield orchestrators


async def _start(
    stack: contextlib.AsyncExitStack,
    name: str,
    tracing: Mapping[str, str],
    options: OverheadOptions,
    folder: Path,
    where: Mapping[str, str],
) -> _Orchestrator:
    listen = free_address()
    environment = {**orchestrator_environment(listen, **where, options=options), **tracing}
    service = stack.enter_context(running(name, ["-m", "orchestrator"], environment, folder))
    service.wait_serving(listen)
    calls = await stack.enter_async_context(grpc.aio.insecure_channel(listen))
    await wait_for_draft(calls, options)
    return _Orchestrator(calls, psutil.Process(service.process.pid))
