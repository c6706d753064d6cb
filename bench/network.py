"""`python -m bench network`: what a distance between the services costs, and up to which one speculation pays.

The orchestrator reaches draft and target over links that delay what they carry (see `delayed_link`). A round crosses the target's link,
and with a block the draft's before it, there and back. All round trips take turns.
"""

from __future__ import annotations

import itertools
import math
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from tandem.v1 import orchestrator_pb2 as api

from .caller import Heard, generate
from .progress import steps
from .prompts import prompt_class
from .running_pair import DRAFT_SECONDS, WARM_UP_TOKENS, ModelPair, RunningPair, running_pair
from .services import NotMeasured
from .statistic import median
from .tables import results_table


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """What to measure."""

    models: ModelPair = field(default_factory=ModelPair)
    round_trips: Sequence[float] = (0.0, 0.3, 1.0, 5.0, 20.0)
    """Milliseconds that the links add, the draft's and the target's each."""
    bytes_per_second: float = math.inf
    """Of each link."""
    gammas: Sequence[int] = (0, 2, 4)
    case: tuple[str, float] = ("chat", 0.0)
    max_tokens: int = 48
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class NetworkRow:
    """One round trip and gamma. Times in milliseconds."""

    round_trip: float
    gamma: int
    round: float
    """Median over the repeats of the mean time between responses."""
    predicted_round: float
    """The round without a distance, and the round trips that it makes."""
    tokens_per_round: float
    speedup: float
    """Over plain decoding at the same distance."""


@dataclass(frozen=True, slots=True)
class NetworkResult:
    """All that was measured."""

    models: str
    case: str
    bytes_per_second: float
    rows: list[NetworkRow]
    pays: dict[int, tuple[float, float]]
    """By gamma: from which to which round trip, in milliseconds added to the nearest; (0, 0) where at none."""


async def measure(options: NetworkOptions) -> NetworkResult:
    """Runs every gamma at every distance, in turns. Raises ValueError where plain decoding is not among the gammas."""
    if 0 not in options.gammas:
        raise ValueError("--gamma: 0 must be among them, since all others are compared with it")
    heard: dict[tuple[float, int], list[Heard]] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        async with running_pair(options.models, Path(folder), far=True) as services:
            for link in services.links:
                link.bytes_per_second = options.bytes_per_second
            await _warm_up(services, options)
            turns = list(itertools.product(range(options.repeats), options.round_trips, options.gammas))
            for _, round_trip, gamma in steps(turns, "network"):
                for link in services.links:
                    link.round_trip_seconds = round_trip / 1000
                assert services.far is not None
                run = await generate(services.far, _request(options, gamma))
                if run.finish.speculation.degraded_rounds:
                    raise NotMeasured(f"rounds without the draft: {list(run.finish.speculation.degraded_reasons)}")
                heard.setdefault((round_trip, gamma), []).append(run)
    name, temperature = options.case
    rows = network_rows(heard, options.max_tokens)
    return NetworkResult(
        str(options.models), f"{name}, T = {temperature:g}", options.bytes_per_second, rows, _paying_by_gamma(rows)
    )


async def _warm_up(services: RunningPair, options: NetworkOptions) -> None:
    deadline = time.monotonic() + DRAFT_SECONDS
    assert services.far is not None
    for gamma in options.gammas:
        request = _request(options, gamma)
        request.max_tokens = WARM_UP_TOKENS
        while (await generate(services.far, request)).finish.speculation.degraded_rounds:
            if time.monotonic() > deadline:
                raise NotMeasured("the far orchestrator found no draft")


def _request(options: NetworkOptions, gamma: int) -> api.GenerateRequest:
    name, temperature = options.case
    request = prompt_class(name).request(0)
    request.temperature, request.seed, request.max_tokens = temperature, 1000, options.max_tokens
    request.num_speculative_tokens, request.ignore_eos, request.cache_salt = gamma, True, uuid.uuid4().hex
    return request


def network_rows(heard: dict[tuple[float, int], list[Heard]], max_tokens: int) -> list[NetworkRow]:
    """A row for each distance and gamma; the smallest distance is what the predictions start from."""
    rounds, tokens = {}, {}
    for (round_trip, gamma), runs in heard.items():
        parts = [run.full_rounds(gamma, max_tokens) for run in runs]
        rounds[round_trip, gamma] = 1000 * median([seconds / count for count, _, seconds in parts if count])
        tokens[round_trip, gamma] = sum(part[1] for part in parts) / max(1, sum(part[0] for part in parts))
    nearest = min(round_trip for round_trip, _ in heard)
    return [
        NetworkRow(
            round_trip=round_trip,
            gamma=gamma,
            round=rounds[round_trip, gamma],
            predicted_round=rounds[nearest, gamma] + _crossings(gamma) * (round_trip - nearest),
            tokens_per_round=tokens[round_trip, gamma],
            speedup=tokens[round_trip, gamma] * rounds[round_trip, 0] / rounds[round_trip, gamma],
        )
        for round_trip, gamma in heard
    ]


def _crossings(gamma: int) -> int:
    """Round trips of a round, one after the other."""
    return 2 if gamma else 1


def paying_distances(plain_round: float, round_time: float, tokens_per_round: float) -> tuple[float, float]:
    """From which to which round trip of both links, beyond what the two rounds have already, a block pays; (0, 0) where it never does.

    A token costs (plain_round + x) plainly and (round_time + 2x) / tokens_per_round else. Below two tokens a round the crossing to the
    draft costs more than what the tokens share of that to the target, above two less.
    """
    gained = tokens_per_round * plain_round - round_time
    if tokens_per_round > 2.0:
        return max(0.0, -gained / (tokens_per_round - 2.0)), math.inf
    if gained <= 0.0:
        return 0.0, 0.0
    return 0.0, gained / (2.0 - tokens_per_round) if tokens_per_round < 2.0 else math.inf


def _paying_by_gamma(rows: Sequence[NetworkRow]) -> dict[int, tuple[float, float]]:
    """From the rows of the smallest distance."""
    nearest = min(row.round_trip for row in rows)
    near = {row.gamma: row for row in rows if row.round_trip == nearest}
    return {
        gamma: paying_distances(near[0].round, row.round, row.tokens_per_round) for gamma, row in near.items() if gamma
    }


def network_tables(result: NetworkResult) -> list[Table]:
    """Rounds and speed-ups by distance."""
    width = "" if math.isinf(result.bytes_per_second) else f", {result.bytes_per_second * 8 / 1e6:g} Mbit/s"
    table = results_table(
        f"Services apart: {result.models}, {result.case}{width}",
        ("RTT ms", "gamma", "tok/round", "round ms", "predicted", "speed-up"),
    )
    for row in result.rows:
        table.add_row(
            f"{row.round_trip:g}",
            str(row.gamma),
            f"{row.tokens_per_round:.2f}",
            f"{row.round:.1f}",
            f"{row.predicted_round:.1f}",
            f"{row.speedup:.2f}x",
            style="" if row.speedup >= 1 else "yellow",
        )
    pays = ", ".join(f"gamma {gamma} {_distances(*limits)}" for gamma, limits in result.pays.items())
    table.caption = (
        "RTT: added between the orchestrator and each worker. predicted: the nearest round and its round trips. speed-up: over "
        f"gamma 0 at the same distance. By the nearest rounds, a block pays: {pays}."
    )
    return [table]


def _distances(least: float, most: float) -> str:
    if not most:
        return "never"
    if math.isinf(most):
        return f"from {least:.1f} ms on" if least else "at any distance"
    return f"up to {most:.1f} ms"
