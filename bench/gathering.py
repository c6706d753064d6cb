"""`python -m bench gathering`: requests out of phase, at a target whose steps wait for those about to come back and at one whose don't.

The requests begin one after the other, spread over a plain round, as callers do who know nothing of one another. Two targets
share one draft; the sides take turns, and the gain is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from rich.table import Table

from tandem.v1 import orchestrator_pb2 as api

from .caller import Heard, generate
from .progress import steps
from .services import free_address, run_all, running_store
from .serving import (
    PROMPT_TOKENS,
    ServingOptions,
    batches,
    planned_orchestrator,
    planned_worker,
    random_token_ids,
)
from .statistic import median, quantile
from .tables import results_table

SIDES = ("on", "off")
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheringOptions(ServingOptions):
    """What to measure."""

    concurrencies: Sequence[int] = (1, 2, 4, 16)
    repeats: int = 8
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Requests of one side, once."""

    rate: float
    """Tokens a second of all requests while they decode."""
    batch: float
    """Items in a forward."""


@dataclass(frozen=True, slots=True)
class GatheringCase:
    """A number of requests at one gamma. By side: on, off."""

    concurrency: int
    gamma: int
    rates: tuple[float, float]
    batch_sizes: tuple[float, float]
    ratios: tuple[float, ...]
    """Of each pair of neighbouring runs: the rate with gathering over that without."""

    @property
    def gain(self) -> float:
        """The median."""
        return median(self.ratios)


@dataclass(frozen=True, slots=True)
class _Side:
    channel: grpc.aio.Channel
    metrics: str


async def measure(options: GatheringOptions) -> list[GatheringCase]:
    """Runs all cases."""
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with _running(options, Path(folder)) as sides:
            loads = list(itertools.product(options.concurrencies, options.gammas))
            rounds = [await _plain_round(side, options) for side in sides]
            return [
                await _case(sides, options, concurrency, gamma, min(rounds))
                for concurrency, gamma in steps(loads, "gathering")
            ]


async def _plain_round(side: _Side, options: GatheringOptions) -> float:
    """Seconds; and whatever is made on first use is made."""
    for gamma in options.gammas:
        await generate(side.channel, _request(options, 0, gamma))
    heard = await generate(side.channel, _request(options, 1, 0))
    return median(heard.intervals(1, 1))


async def _case(
    sides: Sequence[_Side], options: GatheringOptions, concurrency: int, gamma: int, spread: float
) -> GatheringCase:
    runs: tuple[list[Run], list[Run]] = ([], [])
    for repeat in range(options.repeats):
        for index in (0, 1) if repeat % 2 else (1, 0):
            requests = [_request(options, 1000 * repeat + 2 + number, gamma) for number in range(concurrency)]
            runs[index].append(await _run(sides[index], requests, spread))
    on, off = runs
    return GatheringCase(
        concurrency,
        gamma,
        rates=(median([run.rate for run in on]), median([run.rate for run in off])),
        batch_sizes=(median([run.batch for run in on]), median([run.batch for run in off])),
        ratios=tuple(one.rate / other.rate for one, other in zip(on, off, strict=True)),
    )


def _request(options: GatheringOptions, number: int, gamma: int) -> api.GenerateRequest:
    return api.GenerateRequest(
        token_ids=api.TokenIds(ids=random_token_ids(number, PROMPT_TOKENS)),
        max_tokens=options.max_tokens,
        temperature=0.0,
        num_speculative_tokens=gamma,
        ignore_eos=True,
        cache_salt=str(number),
    )


async def _run(side: _Side, requests: Sequence[api.GenerateRequest], spread: float) -> Run:
    async def begun(number: int) -> Heard:
        await asyncio.sleep(spread * number / len(requests))
        return await generate(side.channel, requests[number])

    forwards, items = batches(side.metrics)
    heard = await asyncio.gather(*(begun(number) for number in range(len(requests))))
    forwards_after, items_after = batches(side.metrics)
    rate = sum((sum(each.tokens) - each.tokens[0]) / (each.arrivals[-1] - each.arrivals[0]) for each in heard)
    return Run(rate, (items_after - items) / (forwards_after - forwards))


@contextlib.asynccontextmanager
async def _running(options: GatheringOptions, folder: Path) -> AsyncIterator[list[_Side]]:
    draft = free_address()
    targets = {side: (free_address(), free_address()) for side in SIDES}
    async with contextlib.AsyncExitStack() as stack:
        redis_url = stack.enter_context(running_store(folder))
        workers = [
            planned_worker("target", listen, metrics, options, gather=side == "on")
            for side, (listen, metrics) in targets.items()
        ]
        run_all(stack, [planned_worker("draft", draft, "", options), *workers], folder)
        planned = [
            planned_orchestrator(
                side, max(options.concurrencies), {"draft": draft, "target": listen}, redis_url, options
            )
            for side, (listen, _) in targets.items()
        ]
        run_all(stack, planned, folder)
        yield [
            _Side(await stack.enter_async_context(grpc.aio.insecure_channel(each.address)), metrics)
            for each, (_, metrics) in zip(planned, targets.values(), strict=True)
        ]


def gathering_table(cases: Sequence[GatheringCase], options: GatheringOptions) -> Table:
    """Each case; the quartiles say how sure its gain is."""
    table = results_table(
        f"Requests out of phase: {options.models}, {options.max_tokens} tokens each, greedy",
        ("requests", "gamma", "tokens/s on", "off", "batch on", "off", "gain", "quartiles"),
    )
    for case in cases:
        table.add_row(
            str(case.concurrency),
            str(case.gamma),
            *(f"{rate:.1f}" for rate in case.rates),
            *(f"{size:.1f}" for size in case.batch_sizes),
            f"{case.gain:.2f}x",
            " to ".join(f"{quantile(case.ratios, share):.2f}" for share in (0.25, 0.75)),
        )
    table.caption = (
        f"on: TANDEM_TARGET_GATHER. Rates of decoding, of all requests together. gain: the median of {options.repeats} "
        "ratios of neighbouring runs. batch: items in a forward of the target, the prompts' included."
    )
    return table
