"""`python -m bench pair`: what a pair of models gains over the target alone, beside what the cost model predicts.

One request at a time. Runs with and without speculation take turns, and so do they with the timing of the workers, so
that a machine whose speed drifts treats all alike.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from .caller import Heard, generate
from .pair_results import Costs, PairRow, Trial, WayRow, pair_row, way_row
from .prompts import PROMPT_CLASSES, PromptClass
from .services import REPOSITORY, free_address, running, running_store
from .worker_times import SyntheticSession, WorkerStreams, WorkerTimes, worker_streams

TARGET = REPOSITORY / "models" / "smollm2-135m-instruct"
DRAFT = REPOSITORY / "models" / "smol-draft"
TEMPERATURES = (0.0, 0.7, 1.0)
WARM_UP_TOKENS = 8
WAY_WARM_UP_TOKENS = 48
"""An adaptive gamma must have met the costs of rounds."""
AHEAD_ROWS = 4
DRAFT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Way:
    """How a request is decoded, where that is not a fixed gamma with a draft that waits."""

    gamma: int | None
    """None: adaptive."""
    ahead: bool

    @classmethod
    def parse(cls, text: str) -> Way:
        """From "auto", "2+ahead" or "auto+ahead"; raises ValueError."""
        gamma, plus, ahead = text.partition("+")
        if plus and ahead != "ahead":
            raise ValueError(text)
        return cls(None if gamma == "auto" else int(gamma), bool(plus))

    def __str__(self) -> str:
        return ("auto" if self.gamma is None else str(self.gamma)) + ("+ahead" if self.ahead else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOptions:
    """What to measure."""

    target: Path = TARGET
    draft: Path = DRAFT
    dtype: str = "float32"
    threads: int = 1
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

    target: str
    draft: str
    dtype: str
    threads: int
    max_tokens: int
    rows: list[PairRow]
    ways: list[WayRow]
    ahead_items: dict[str, float]
    """Of the draft that works ahead, over the whole run: items by outcome, and tokens."""


@dataclass(frozen=True, slots=True)
class PairBench:
    calls: grpc.aio.Channel
    ahead_calls: grpc.aio.Channel | None
    """To an orchestrator whose draft works ahead."""
    ahead_metrics: str
    """Its draft's metrics, host:port; empty where there is none."""
    workers: WorkerStreams
    options: PairOptions


async def measure(options: PairOptions) -> PairResult:
    """Runs all cases; a row for each gamma of each."""
    rows: list[PairRow] = []
    ways: list[WayRow] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with running_pair(options, Path(folder)) as bench:
            await _warm_up(bench)
            for name, temperature in options.cases:
                fixed, others = await _case(bench, _prompt_class(name), temperature)
                rows += fixed
                ways += others
            ahead_items = _ahead_items(bench.ahead_metrics)
    return PairResult(
        target=options.target.name,
        draft=options.draft.name,
        dtype=options.dtype,
        threads=options.threads,
        max_tokens=options.max_tokens,
        rows=rows,
        ways=ways,
        ahead_items=ahead_items,
    )


def _prompt_class(name: str) -> PromptClass:
    return next(each for each in PROMPT_CLASSES if each.name == name)


async def _case(bench: PairBench, prompts: PromptClass, temperature: float) -> tuple[list[PairRow], list[WayRow]]:
    options = bench.options
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
        await _interleave(bench, request, trials, times)
        await _take_turns(bench, request, of_ways)
    rows = [
        pair_row(prompts.name, temperature, gamma, options.max_tokens, trials[gamma], _costs(times, gamma, options))
        for gamma in options.gammas
    ]
    return rows, [
        way_row(prompts.name, temperature, str(way), options.max_tokens, of_ways[way]) for way in options.ways
    ]


async def _take_turns(bench: PairBench, request: api.GenerateRequest, trials: dict[Way, list[Trial]]) -> None:
    """One prompt: plain, a way, plain, another way, ... plain."""
    if not trials:
        return
    before = await _run(bench, request, 0)
    for way, so_far in trials.items():
        speculative = await _run_way(bench, request, way)
        after = await _run(bench, request, 0)
        so_far.append(Trial(before, speculative, after))
        before = after


async def _run_way(bench: PairBench, request: api.GenerateRequest, way: Way) -> Heard:
    asked = api.GenerateRequest()
    asked.CopyFrom(request)
    if way.gamma is None:
        asked.ClearField("num_speculative_tokens")
        asked.adaptive_speculative_tokens = True
    else:
        asked.num_speculative_tokens = way.gamma
    calls = bench.ahead_calls if way.ahead else bench.calls
    if calls is None:
        raise AssertionError("no draft works ahead")
    return await generate(calls, asked)


def _ahead_items(metrics: str) -> dict[str, float]:
    if not metrics:
        return {}
    with urllib.request.urlopen(f"http://{metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line.startswith("tandem_draft_ahead_"))
    return {name: float(value) for name, _, value in pairs if not name.endswith("_created")}


async def _interleave(
    bench: PairBench, request: api.GenerateRequest, trials: dict[int, list[Trial]], times: WorkerTimes
) -> None:
    """One prompt: gamma 0, g, gamma 0, g', ... gamma 0, the workers timed in the gaps."""
    options = bench.options
    before = await _run(bench, request, 0)
    length = before.start.prompt_tokens + before.finish.usage.completion_tokens // 2
    session = SyntheticSession(bench.workers, length, _sampling(request.temperature))
    await session.open()
    gaps = 2 * len(options.gammas)
    counts = [options.samples * (gap + 1) // gaps - options.samples * gap // gaps for gap in range(gaps)]
    for gamma in options.gammas:
        await session.sample(times, options.gammas, counts.pop())
        speculative = await _run(bench, request, gamma)
        await session.sample(times, options.gammas, counts.pop())
        after = await _run(bench, request, 0)
        trials[gamma].append(Trial(before, speculative, after))
        before = after
    await session.close()


async def _run(bench: PairBench, request: api.GenerateRequest, gamma: int) -> Heard:
    request.num_speculative_tokens = gamma
    return await generate(bench.calls, request)


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


async def _warm_up(bench: PairBench) -> None:
    """What is made on first use is made, and the orchestrator, which is ready without a draft, has found it."""
    request = PROMPT_CLASSES[0].request(0)
    request.max_tokens = WARM_UP_TOKENS
    deadline = time.monotonic() + DRAFT_SECONDS
    for gamma in (0, *bench.options.gammas):
        while (await _run(bench, request, gamma)).finish.speculation.degraded_rounds:
            if time.monotonic() > deadline:
                raise AssertionError("the orchestrator found no draft")
    request.max_tokens = WAY_WARM_UP_TOKENS
    for way in bench.options.ways:
        while (await _run_way(bench, request, way)).finish.speculation.degraded_rounds:
            if time.monotonic() > deadline:
                raise AssertionError("the orchestrator found no draft that works ahead")


@contextlib.asynccontextmanager
async def running_pair(options: PairOptions, folder: Path) -> AsyncIterator[PairBench]:
    draft, target, listen = free_address(), free_address(), free_address()
    eager, eager_listen, metrics = free_address(), free_address(), free_address()
    ahead = any(way.ahead for way in options.ways)
    with running_store(folder) as redis_url, contextlib.ExitStack() as services:
        workers = [("DRAFT", draft, options.draft, {}), ("TARGET", target, options.target, {})]
        if ahead:
            settings = {"TANDEM_DRAFT_AHEAD_ROWS": str(AHEAD_ROWS), "TANDEM_DRAFT_METRICS_LISTEN": metrics}
            workers.append(("DRAFT", eager, options.draft, settings))
        for role, address, model, more in workers:
            environment = {
                f"TANDEM_{role}_LISTEN": address,
                f"TANDEM_{role}_MODEL": str(model),
                f"TANDEM_{role}_DTYPE": options.dtype,
                f"TANDEM_{role}_THREADS": str(options.threads),
                f"TANDEM_{role}_SLOTS": "4",
                "OMP_NUM_THREADS": str(options.threads),
                **more,
            }
            module = f"{role.lower()}_service"
            service = services.enter_context(running(module, ["-m", module], environment, folder))
            service.wait_serving(address)
        for own, its_draft in ((listen, draft), (eager_listen, eager))[: 1 + ahead]:
            environment = {
                "TANDEM_ORCHESTRATOR_LISTEN": own,
                "TANDEM_DRAFT_ADDRESSES": its_draft,
                "TANDEM_TARGET_ADDRESSES": target,
                "TANDEM_TOKENIZER": str(options.target),
                "TANDEM_REDIS_URL": redis_url,
                # A slow machine must not turn a round of speculation into a plain one.
                "TANDEM_DRAFT_TIMEOUT_SECONDS": "30",
            }
            orchestrator = services.enter_context(running("orchestrator", ["-m", "orchestrator"], environment, folder))
            orchestrator.wait_serving(own)
        async with (
            grpc.aio.insecure_channel(listen) as calls,
            grpc.aio.insecure_channel(eager_listen) as ahead_calls,
            worker_streams(draft, target) as streams,
        ):
            yield PairBench(calls, ahead_calls if ahead else None, metrics if ahead else "", streams, options)
