"""`python -m bench serving`: many requests at the same time, beside the same requests one by one.

Two orchestrators share one draft and one target: one runs all requests together, the other a single one at a time. The
two sides take turns, so that a machine whose speed drifts treats both alike.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from .caller import generate, generate_together
from .progress import steps
from .running_pair import ModelPair
from .services import NotMeasured, Planned, free_address, run_all, running_store
from .serving_results import (
    AdaptiveCase,
    Load,
    PrefixResult,
    ServingCase,
    ServingResult,
    Turn,
    adaptive_case,
    serving_case,
    serving_constants,
)
from .simulation import Constants
from .statistic import median
from .worker_times import SyntheticSessions, WorkerStreams, WorkerTimes, worker_streams

DRAFT_SECONDS = 60.0
LARGEST_TOKEN_ID = 512
"""Prompts are of ids below this, which every model has."""
FIRST_TOKEN_ID = 3
PROMPT_TOKENS = 32
QUESTION_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOptions:
    """What to measure."""

    models: ModelPair = field(default_factory=ModelPair)
    concurrencies: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    gammas: Sequence[int] = (0, 5)
    max_tokens: int = 48
    repeats: int = 2
    alone: int = 4
    """Requests of the other side in each repeat, one after the other: its rate does not depend on how many there are."""
    shared_tokens: int = 1000
    prefix_trials: int = 4
    adaptive: bool = False
    """Also beside an adaptive gamma: plain decoding, the best fixed gamma and it, in turns."""
    samples: int = 8
    """Timings of each worker step at each number of requests."""


@dataclass(frozen=True, slots=True)
class _Bench:
    together: grpc.aio.Channel
    alone: grpc.aio.Channel
    orchestrator: psutil.Process
    target_metrics: str
    workers: WorkerStreams
    options: ServingOptions


async def measure(options: ServingOptions) -> ServingResult:
    """Runs all cases."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with _running(options, Path(folder)) as bench:
            await _warm_up(bench, options.gammas)
            loads = list(itertools.product(options.concurrencies, options.gammas))
            cases = [await _case(bench, concurrency, gamma) for concurrency, gamma in steps(loads, "serving")]
            adaptive = await _adaptive_cases(bench, cases) if options.adaptive else []
            prefix = await _prefix(bench)
            constants = await _constants(bench, cases)
    return ServingResult(str(options.models), options.max_tokens, cases, prefix, constants, adaptive)


async def _case(bench: _Bench, concurrency: int, gamma: int) -> ServingCase:
    together, alone = [], []
    for repeat in range(bench.options.repeats):
        first = 1000 * repeat
        together.append(await _load(bench, bench.together, _requests(bench, concurrency, gamma, first)))
        few = min(concurrency, bench.options.alone)
        alone.append(await _load(bench, bench.alone, _requests(bench, few, gamma, first + 500)))
    return serving_case(concurrency, gamma, together, alone)


async def _adaptive_cases(bench: _Bench, cases: Sequence[ServingCase]) -> list[AdaptiveCase]:
    await _warm_up(bench, [None])
    found = []
    for concurrency in steps(bench.options.concurrencies, "adaptive"):
        of_it = [case for case in cases if case.concurrency == concurrency]
        best = max(of_it, key=lambda case: case.tokens_per_second).gamma
        sides = [0, None, 0, *([best] if best else [])]
        count = len(sides) * ((bench.options.repeats + 1) // 2)  # each side is the first one as often as the others
        turns = [await _turn(bench, concurrency, sides, turn) for turn in range(count)]
        found.append(adaptive_case(concurrency, best, turns))
    return found


async def _turn(bench: _Bench, concurrency: int, sides: Sequence[int | None], turn: int) -> Turn:
    loads: dict[int, Load] = {}
    for step in range(len(sides)):
        place = (turn + step) % len(sides)
        requests = _requests(bench, concurrency, sides[place], 1000 * turn + 700)
        loads[place] = await _load(bench, bench.together, requests)
    return Turn((loads[0], loads[2]), loads[1], loads.get(3))


def _requests(bench: _Bench, count: int, gamma: int | None, first: int) -> list[api.GenerateRequest]:
    """Different prompts, none of which shares its beginning with another, nor finds itself in a cache."""
    requests = [_request(bench, random_token_ids(first + number, PROMPT_TOKENS), gamma) for number in range(count)]
    for request in requests:
        request.cache_salt = uuid.uuid4().hex
    return requests


def random_token_ids(seed: int, count: int) -> list[int]:
    """The same for the same seed."""
    drawn = np.random.default_rng(seed).integers(FIRST_TOKEN_ID, LARGEST_TOKEN_ID, count)
    return [int(token_id) for token_id in drawn]


def _request(bench: _Bench, prompt: Sequence[int], gamma: int | None) -> api.GenerateRequest:
    request = api.GenerateRequest(
        token_ids=api.TokenIds(ids=prompt),
        max_tokens=bench.options.max_tokens,
        temperature=0.0,
        num_speculative_tokens=gamma,
        ignore_eos=True,
    )
    if gamma is None:
        request.adaptive_speculative_tokens = True
    return request


async def _load(bench: _Bench, channel: grpc.aio.Channel, requests: Sequence[api.GenerateRequest]) -> Load:
    forwards, items = batches(bench.target_metrics)
    cpu = _cpu_seconds(bench.orchestrator)
    heard = await generate_together(channel, requests)
    cpu = _cpu_seconds(bench.orchestrator) - cpu
    forwards_after, items_after = batches(bench.target_metrics)
    for each in heard:
        if each.finish.speculation.degraded_rounds or each.finish.speculation.rebuilds:
            raise NotMeasured(f"the rounds were not what was to be measured: {each.finish.speculation}")
    return Load(heard, forwards_after - forwards, items_after - items, cpu)


async def _prefix(bench: _Bench) -> PrefixResult:
    """The same beginning with and without what the cache has of it, taking turns."""
    options = bench.options
    beginning = random_token_ids(1, options.shared_tokens)
    cold: list[float] = []
    warm: list[float] = []
    for trial in range(options.prefix_trials + 1):
        for times, salt in ((cold, f"trial {trial}"), (warm, "all trials")):
            request = _request(bench, [*beginning, *random_token_ids(2 + trial, QUESTION_TOKENS)], max(options.gammas))
            request.max_tokens = 2
            request.cache_salt = salt
            heard = await generate(bench.together, request)
            if trial:  # the first one fills the cache
                times.append(1000 * heard.first_token_seconds)
    return PrefixResult(options.shared_tokens, median(cold), median(warm))


async def _constants(bench: _Bench, cases: Sequence[ServingCase]) -> Constants | None:
    """The workers' times at every batch and block of the cases, and what a round of one plain request takes beyond them."""
    gammas = [gamma for gamma in bench.options.gammas if gamma]
    length = PROMPT_TOKENS + bench.options.max_tokens // 2
    sampling = sampling_pb2.Sampling(top_p=1.0, acceptance_method=sampling_pb2.ACCEPTANCE_METHOD_REJECTION)
    draft_steps, forwards = [], []
    for count in bench.options.concurrencies:
        times = WorkerTimes()
        sessions = SyntheticSessions(bench.workers, length, sampling, count)
        await sessions.open()
        await sessions.sample(times, gammas, bench.options.samples)
        await sessions.close()
        forwards.append((count, median(times.plain_step)))
        for gamma in gammas:
            draft_steps.append((count, median(times.draft[gamma]) / gamma))
            forwards.append((count * (gamma + 1), median(times.verify[gamma])))
    return serving_constants(draft_steps, forwards, cases)


def batches(address: str) -> tuple[float, float]:
    """Forwards of the target so far, and the items in them."""
    values = scraped(address)
    return values["tandem_batch_size_count"], values["tandem_batch_size_sum"]


def scraped(address: str) -> dict[str, float]:
    """A service's metrics now; of those with labels, some."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _warm_up(bench: _Bench, gammas: Sequence[int | None]) -> None:
    """What is made on first use is made, and both orchestrators, which are ready without a draft, have found it."""
    deadline = time.monotonic() + DRAFT_SECONDS
    for channel, gamma in itertools.product((bench.together, bench.alone), gammas):
        request = _request(bench, random_token_ids(0, PROMPT_TOKENS), gamma)
        while (await generate(channel, request)).finish.speculation.degraded_rounds:
            if time.monotonic() > deadline:
                raise NotMeasured("an orchestrator found no draft")


@contextlib.asynccontextmanager
async def _running(options: ServingOptions, folder: Path) -> AsyncIterator[_Bench]:
    workers = {"draft": free_address(), "target": free_address()}
    metrics = free_address()
    most = max(options.concurrencies)
    async with contextlib.AsyncExitStack() as stack:
        redis_url = stack.enter_context(running_store(folder))
        run_all(stack, [planned_worker(role, address, metrics, options) for role, address in workers.items()], folder)
        places = {"together": most, "alone": 1}
        planned = [planned_orchestrator(name, count, workers, redis_url, options) for name, count in places.items()]
        services = run_all(stack, planned, folder)
        calls = [
            await stack.enter_async_context(grpc.aio.insecure_channel(orchestrator.address)) for orchestrator in planned
        ]
        process = psutil.Process(services[0].process.pid)
        streams = await stack.enter_async_context(worker_streams(workers["draft"], workers["target"]))
        yield _Bench(calls[0], calls[1], process, metrics, streams, options)


def planned_worker(role: str, listen: str, metrics: str, options: ServingOptions, gather: bool = True) -> Planned:
    """A draft, or a target that serves its metrics."""
    models, prefix = options.models, f"TANDEM_{role.upper()}"
    environment = {
        f"{prefix}_LISTEN": listen,
        f"{prefix}_MODEL": str(models.target if role == "target" else models.draft),
        f"{prefix}_DTYPE": models.dtype,
        f"{prefix}_THREADS": str(models.threads),
        f"{prefix}_SLOTS": str(max(options.concurrencies) + 1),
        f"{prefix}_CONTEXT_LENGTH": str(options.shared_tokens + QUESTION_TOKENS + options.max_tokens + 32),
        "OMP_NUM_THREADS": str(models.threads),
    }
    if role == "target":
        environment["TANDEM_TARGET_METRICS_LISTEN"] = metrics
        environment["TANDEM_TARGET_GATHER"] = str(gather).lower()
    return Planned(role, f"{role}_service", environment, listen)


def planned_orchestrator(
    name: str, places: int, workers: Mapping[str, str], redis_url: str, options: ServingOptions
) -> Planned:
    """One that runs so many requests at a time."""
    listen = free_address()
    environment = {
        "TANDEM_ORCHESTRATOR_LISTEN": listen,
        "TANDEM_DRAFT_ADDRESSES": workers["draft"],
        "TANDEM_TARGET_ADDRESSES": workers["target"],
        "TANDEM_TOKENIZER": str(options.models.target),
        "TANDEM_REDIS_URL": redis_url,
        "TANDEM_MAX_RUNNING_REQUESTS": str(places),
        "TANDEM_MAX_WAITING_SECONDS": "600",
        # A slow machine must not turn a round of speculation into a plain one.
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "60",
    }
    return Planned(f"orchestrator-{name}", "orchestrator", environment, listen)
