"""The results as tables for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .acceptance import GAMMA, LARGEST_FALL, AcceptanceRow
from .machine import Machine
from .overhead import OverheadResult
from .pair import PairResult
from .pair_results import PairRow
from .statistic import median
from .tracing_cost import TracingResult

PLAIN_GOAL = 1.02
ROUND_GOAL = 1.0
"""Milliseconds for a round of one request beside the models, p50."""
BYTES_GOAL = 10_000
PREDICTION_GOAL = 0.9
"""Measured over predicted speed-up."""
TRACING_GOAL = 0.98
"""Throughput with one request in a hundred traced, over that without tracing."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Something to reach, and whether it was."""

    name: str
    value: str
    goal: str
    reached: bool


def show_alone(table: Table, machine: Machine) -> None:
    """Prints the only table of a measurement, and what it was made on."""
    console = Console(highlight=False)
    console.print(table)
    for line in machine_lines(machine):
        console.print(line, markup=False)


def machine_lines(machine: Machine) -> list[str]:
    """Where and with what."""
    versions = ", ".join(f"{name} {version}" for name, version in machine.packages.items())
    busy = f"load average {machine.load_before:.1f} before, {machine.load_after:.1f} after"
    quiet = "" if machine.load_before < machine.cores / 2 else "  [not quiet: times are too high]"
    return [
        f"{machine.cores} cores, {machine.architecture}, Python {machine.python}, {versions}",
        f"{busy}{quiet}",
    ]


def overhead_tables(result: OverheadResult) -> list[Table]:
    """Time and bytes."""
    times = results_table(
        f"A round beside the models: orchestrator, wire, commit (k = {result.support_size}; ms)",
        (
            "requests",
            "gamma",
            "rounds",
            "round p50",
            "round p95",
            "rounds/s",
            "CPU per round",
            "of it not ours",
            "items",
        ),
    )
    for case in result.cases:
        times.add_row(
            str(case.concurrency),
            str(case.gamma),
            str(case.rounds),
            f"{case.round_p50:.2f}",
            f"{case.round_p95:.2f}",
            f"{case.rounds_per_second:.0f}",
            f"{case.orchestrator_cpu:.2f}",
            f"{case.worker:.3f}",
            f"{case.items_per_batch:.1f}",
        )
    times.caption = (
        "round: between two responses at the caller. CPU per round: the orchestrator's, for one round of one request. "
        "of it not ours: time in the stand-ins for draft and target, part of the round. items: in one message. "
        f"A bare echo over a stream takes {result.echo_p50:.2f} ms here; a round of one request crosses two, and the caller's."
    )
    if result.plain is not None:
        times.caption += (
            f" A round at gamma 0 takes {result.plain.round_ratio:.3f} of what it takes an orchestrator that was given no draft, "
            f"its CPU time {result.plain.cpu_ratio:.3f} ({result.plain.pairs} runs of either, in turns)."
        )
    sizes = results_table(
        f"Bytes of a round (gamma {result.gamma}, k {result.support_size})",
        ("vocabulary", "Propose", "Proposal", "Verify", "Verdict", "total"),
    )
    for each in result.bytes_per_round:
        numbers = (each.vocabulary_size, each.propose, each.proposal, each.verify, each.verdict, each.total)
        sizes.add_row(*(f"{number:,}" for number in numbers))
    return [times, sizes]


def acceptance_table(rows: Sequence[AcceptanceRow]) -> Table:
    """By class of prompts and temperature."""
    acceptances = results_table(
        f"Acceptance, gamma {GAMMA}",
        ("prompts", "accepted / drafted", "expected / drafted", "recorded"),
    )
    for row in rows:
        before = "-" if row.recorded is None else f"{row.recorded:.3f}"
        acceptances.add_row(
            row.name, f"{row.accepted:.3f}", f"{row.expected:.3f}", before, style="yellow" if row.fell else ""
        )
    return acceptances


def acceptance_goals(rows: Sequence[AcceptanceRow]) -> list[Goal]:
    """No row may have fallen."""
    return [
        Goal(
            f"acceptance, {row.name}",
            f"{row.accepted:.3f}",
            "a record" if row.recorded is None else f">= {row.recorded - LARGEST_FALL:.3f}",
            not row.fell,
        )
        for row in rows
    ]


def tracing_table(result: TracingResult) -> Table:
    """Throughput and CPU with and without tracing."""
    table = results_table(
        f"What tracing costs the orchestrator: {result.concurrency} requests at once, gamma 5, no model time",
        ("tracing", "rounds/s", "of untraced", "CPU per round (ms)", "of untraced"),
    )
    for case in result.cases:
        table.add_row(
            case.name,
            f"{case.rounds_per_second:.0f}",
            f"{case.throughput_ratio:.3f}",
            f"{case.cpu:.3f}",
            f"{case.cpu_ratio:.3f}",
        )
    table.caption = "Medians of runs that took turns; the ratios are medians of neighbouring runs."
    return table


def tracing_goals(result: TracingResult) -> list[Goal]:
    """The issue's figure, by CPU: throughput swings by more than it from run to run."""
    return [
        Goal(
            f"CPU, {case.name}",
            f"{1 / case.cpu_ratio:.3f} of untraced",
            f">= {TRACING_GOAL}",
            1 / case.cpu_ratio >= TRACING_GOAL,
        )
        for case in result.cases[1:3]
    ]


def pair_tables(result: PairResult) -> list[Table]:
    """Speed, and what a round is made of."""
    title = f"{result.models}, one request, up to {result.max_tokens} tokens"
    speed = results_table(
        title,
        (
            *("prompts", "T", "gamma", "plain tok/s", "tok/s", "speed-up", "predicted", "ratio", "tok/round"),
            *("TTFT 0/g ms", "accepted by position"),
        ),
    )
    rounds = results_table(
        "A round in ms, and the times that the prediction is made of",
        ("prompts", "T", "gamma", "C_t(1)", "plain round", "C_d", "C_t(g+1)", "C_o", "round", "round - C_d - C_t"),
    )
    for row in result.rows:
        name = (row.prompts, f"{row.temperature:g}", str(row.gamma))
        speed.add_row(
            *name,
            f"{row.plain_tokens_per_second:.1f}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}x",
            f"{row.predicted_speedup:.2f}x",
            f"{row.of_prediction:.2f}",
            f"{row.tokens_per_round:.2f}",
            f"{row.plain_first_token:.0f}/{row.first_token:.0f}",
            " ".join(f"{rate:.2f}" for rate in row.acceptance_per_position),
            style="" if row.speedup >= 1 else "yellow",
        )
        costs = row.costs
        numbers = (costs.plain_step, row.plain_round, costs.draft, costs.verify, costs.overhead, row.round, row.rest)
        rounds.add_row(*name, *(f"{number:.1f}" for number in numbers))
    speed.caption = (
        "tok/s: after the first response. speed-up: beside the plain runs just before and after. predicted: "
        "tok/round x C_t(1) / (C_d + C_t(g+1) + C_o). ratio: speed-up / predicted."
    )
    found = [speed, rounds, _by_gamma(result.rows)]
    return [*found, _ways(result)] if result.ways else found


def _ways(result: PairResult) -> Table:
    """Other ways than a fixed gamma, beside the fixed gammas of the same run."""
    table = results_table(
        "Ways to choose gamma, and a draft that works ahead",
        ("prompts", "T", "way", "speed-up", "best fixed gamma", "expected", "tok/round", "gamma"),
    )
    for row in result.ways:
        fixed = [each for each in result.rows if (each.prompts, each.temperature) == (row.prompts, row.temperature)]
        best = max(fixed, key=lambda each: each.speedup)
        table.add_row(
            row.prompts,
            f"{row.temperature:g}",
            row.way,
            f"{row.speedup:.2f}x",
            f"{best.gamma}: {best.speedup:.2f}x",
            f"{row.expected_speedup:.2f}x" if row.expected_speedup else "",
            f"{row.tokens_per_round:.2f}",
            f"{row.mean_gamma:.1f}",
            style="" if row.speedup >= 1 else "yellow",
        )
    for way in dict.fromkeys(row.way for row in result.ways):
        chosen = [row for row in result.ways if row.way == way]
        losing = [f"{row.prompts} T={row.temperature:g} {row.speedup:.2f}x" for row in chosen if row.speedup < 1]
        middle = median([row.speedup for row in chosen])
        table.add_row("all", "", way, f"{middle:.2f}x", "", "", "", "", end_section=True)
        table.add_row("slower than plain", "", way, ", ".join(losing) or "none")
    counts = ", ".join(f"{name.removeprefix('tandem_')} {value:.0f}" for name, value in result.ahead_items.items())
    table.caption = f"speed-up: beside the plain runs just before and after. {counts}"
    return table


def _by_gamma(rows: Sequence[PairRow]) -> Table:
    table = results_table("All prompts: medians", ("gamma", "speed-up", "predicted", "ratio", "slower than plain"))
    for gamma in sorted({row.gamma for row in rows}):
        chosen = [row for row in rows if row.gamma == gamma]
        losing = [f"{row.prompts} T={row.temperature:g} {row.speedup:.2f}x" for row in chosen if row.speedup < 1]
        table.add_row(
            str(gamma),
            f"{median([row.speedup for row in chosen]):.2f}x",
            f"{median([row.predicted_speedup for row in chosen]):.2f}x",
            f"{_median_ratio(chosen):.2f}",
            ", ".join(losing) or "none",
        )
    return table


def _median_ratio(rows: Sequence[PairRow]) -> float:
    return median([row.of_prediction for row in rows if not math.isnan(row.of_prediction)])


def overhead_goals(result: OverheadResult) -> list[Goal]:
    """Round time of one request, bytes."""
    goals = [
        Goal(
            f"round p50, 1 request, gamma {case.gamma}",
            f"{case.round_p50:.2f} ms",
            f"<= {ROUND_GOAL:.1f} ms",
            case.round_p50 <= ROUND_GOAL,
        )
        for case in result.cases
        if case.concurrency == 1
    ]
    most = max(each.total for each in result.bytes_per_round)
    if result.plain is not None:
        ratio = result.plain.round_ratio
        goal = f"<= {PLAIN_GOAL}"
        goals.append(Goal("round at gamma 0 / without a draft", f"{ratio:.3f}", goal, ratio <= PLAIN_GOAL))
    return [*goals, Goal("bytes per round", f"{most:,}", f"<= {BYTES_GOAL:,}", most <= BYTES_GOAL)]


def pair_goals(result: PairResult) -> list[Goal]:
    """Speed as predicted."""
    ratio = _median_ratio(result.rows)
    goal = Goal("speed-up / prediction, median", f"{ratio:.2f}", f">= {PREDICTION_GOAL}", ratio >= PREDICTION_GOAL)
    return [goal]


def goals_table(goals: Sequence[Goal]) -> Table:
    """Reached or not."""
    table = results_table("Goals", ("", "measured", "goal", ""))
    for goal in goals:
        style = "green" if goal.reached else "red"
        table.add_row(goal.name, goal.value, goal.goal, "reached" if goal.reached else "missed", style=style)
    return table


def results_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", caption_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table
