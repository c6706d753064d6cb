"""`python -m bench [command]`: prints tables, and writes the numbers where --json says. `--help` lists the commands."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from . import (
    acceptance,
    ahead,
    capacity,
    gathering,
    network,
    overhead,
    pair,
    peers,
    rounds,
    serving,
    simulation_check,
    tables,
    tracing_cost,
)
from .arguments import cases_from, models_from, options_from, parse
from .machine import load_average, this_machine
from .padded_target import pad
from .peers_results import peers_goals, peers_tables
from .profile import profile_tables
from .running_pair import ModelPair, Way
from .services import NotMeasured, ServiceFailed
from .serving_results import serving_goals, serving_tables
from .simulation import Constants

WIDTH = 150
QUICK_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class Found:
    """What one command found out."""

    name: str
    result: Any
    parts: Sequence[Any]
    """Tables and lines."""
    goals: Sequence[tables.Goal] = ()


def main(arguments: Sequence[str] | None = None, prog: str = "python -m bench") -> int:
    """Runs what was asked for, as the command `prog`; 0 if it could be measured, whatever came out, but for `acceptance`, which fails on a fall."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    options = parse(sys.argv[1:] if arguments is None else arguments, prog)
    if options.command == "plot":
        return _plot(options)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    machine = this_machine()
    found: list[Found] = []
    try:
        for each in _run(options):
            found.append(each)
            _print(console, each.parts)
    except (NotMeasured, ServiceFailed, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    machine = dataclasses.replace(machine, load_after=load_average())
    goals = [goal for each in found for goal in each.goals]
    _print(console, [*([tables.goals_table(goals)] if goals else []), *tables.machine_lines(machine)])
    if options.json:
        numbers = {"machine": machine, **{each.name: each.result for each in found}, "goals": goals}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(_plain(numbers), indent=2) + "\n")
    if options.command == "acceptance" and not options.record:
        return int(any(row.fell for row in found[0].result))
    return 0


def _run(options: argparse.Namespace) -> Iterator[Found]:
    commands = {
        "overhead": _overhead,
        "rounds": _rounds,
        "pair": _pair,
        "ahead": _ahead,
        "peers": _peers,
        "serving": _serving,
        "gathering": _gathering,
        "network": _network,
        "simulate": _simulate,
        "acceptance": _acceptance,
        "tracing": _tracing,
    }
    if options.command == "all":
        quick = parse(["overhead", "--rounds", str(QUICK_ROUNDS)])
        round_times = _overhead(quick)
        yield round_times
        yield _pair(parse(["pair", "--quick", "--overhead-ms", str(_overhead_ms(round_times.result))]))
    else:
        yield commands[options.command](options)


def _overhead(options: argparse.Namespace) -> Found:
    wanted = options_from(options, overhead.OverheadOptions)
    if not options.with_profile:
        found = uvloop.run(overhead.measure(wanted))
        return Found("overhead", found, tables.overhead_tables(found), tables.overhead_goals(found))
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        profile = Path(folder) / "orchestrator.prof"
        found = uvloop.run(overhead.measure(dataclasses.replace(wanted, profile=profile)))
        parts = [*tables.overhead_tables(found), *profile_tables(profile)]
    return Found("overhead", found, parts, tables.overhead_goals(found))


def _rounds(options: argparse.Namespace) -> Found:
    found = uvloop.run(rounds.measure(options_from(options, rounds.RoundsOptions)))
    return Found("rounds", found, [rounds.rounds_table(found)], rounds.rounds_goals(found))


def _overhead_ms(found: overhead.OverheadResult) -> float:
    """C_o in milliseconds: the round of one request with a block."""
    return next(case.round_p50 for case in found.cases if case.concurrency == 1 and case.gamma)


def _pair(options: argparse.Namespace) -> Found:
    if options.overhead is None:
        alone = overhead.OverheadOptions(concurrencies=(1,), gammas=(3,), rounds=QUICK_ROUNDS)
        options.overhead = _overhead_ms(uvloop.run(overhead.measure(alone)))
    options.cases = cases_from(options)
    with _models(options) as options.models:
        found = uvloop.run(pair.measure(options_from(options, pair.PairOptions)))
    return Found("pair", found, tables.pair_tables(found), tables.pair_goals(found))


def _ahead(options: argparse.Namespace) -> Found:
    options.cases = cases_from(options)
    with _models(options) as options.models:
        wanted = options_from(options, ahead.AheadOptions)
        found = uvloop.run(ahead.measure(wanted))
    return Found("ahead", found, [ahead.ahead_table(found, wanted)], ahead.ahead_goals(found))


def _peers(options: argparse.Namespace) -> Found:
    if options.ways:
        options.ways = (Way(0, ahead=False), *(way for way in options.ways if way != Way(0, ahead=False)))
    options.cases = cases_from(options)
    with _models(options) as options.models:
        found = uvloop.run(peers.measure(options_from(options, peers.PeersOptions)))
    return Found("peers", found, peers_tables(found), peers_goals(found))


def _serving(options: argparse.Namespace) -> Found:
    with _models(options) as options.models:
        found = uvloop.run(serving.measure(options_from(options, serving.ServingOptions)))
    return Found("serving", found, serving_tables(found), serving_goals(found))


def _gathering(options: argparse.Namespace) -> Found:
    with _models(options) as options.models:
        wanted = options_from(options, gathering.GatheringOptions)
        found = uvloop.run(gathering.measure(wanted))
    return Found("gathering", found, [gathering.gathering_table(found, wanted)])


def _network(options: argparse.Namespace) -> Found:
    options.bytes_per_second = None if options.mbit is None else options.mbit * 1e6 / 8
    with _models(options) as options.models:
        found = uvloop.run(network.measure(options_from(options, network.NetworkOptions)))
    return Found("network", found, network.network_tables(found))


def _simulate(options: argparse.Namespace) -> Found:
    measured = json.loads(options.measured.read_text()) if options.measured else {}
    checked = simulation_check.check(measured)
    constants = simulation_check.constants_from(measured) if measured.get("serving") else capacity.EXAMPLE
    options.constants = _with_flags(constants, options)
    options.round_trip = None if options.rtt_ms is None else options.rtt_ms / 1000
    found = capacity.plan_capacity(options_from(options, capacity.CapacityOptions))
    parts = [*([simulation_check.check_table(checked)] if checked else []), *capacity.capacity_tables(found)]
    return Found("simulate", {"checked": checked, "capacity": found}, parts)


def _with_flags(constants: Constants, options: argparse.Namespace) -> Constants:
    """What the command line says takes the place of what was measured."""
    given = {
        "draft_step": options.draft_step_ms,
        "target_forward": options.target_ms,
        "overhead": None if options.overhead_ms is None else options.overhead_ms / 1000,
        "orchestrator": None if options.orchestrator_ms is None else options.orchestrator_ms / 1000,
        "acceptance": options.acceptance,
    }
    return dataclasses.replace(constants, **{name: value for name, value in given.items() if value is not None})


def _acceptance(options: argparse.Namespace) -> Found:
    record = options.recorded or acceptance.RECORDED
    rows = uvloop.run(acceptance.measure(acceptance.recorded(record), models_from(options)))
    if options.record:
        acceptance.record(rows, record)
    return Found("acceptance", rows, [tables.acceptance_table(rows)], tables.acceptance_goals(rows))


def _tracing(options: argparse.Namespace) -> Found:
    cost = uvloop.run(tracing_cost.measure(options_from(options, tracing_cost.TracingOptions)))
    return Found("tracing", cost, [tables.tracing_table(cost)], tables.tracing_goals(cost))


@contextlib.contextmanager
def _models(options: argparse.Namespace) -> Iterator[ModelPair]:
    """The pair asked for, its target padded if that was asked for too."""
    models = models_from(options)
    if options.cost_ratio is None:
        yield models
        return
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        yield pad(models, options.cost_ratio, Path(folder))


def _plot(options: argparse.Namespace) -> int:
    try:
        from . import plots  # it needs matplotlib, and nothing else does
    except ModuleNotFoundError as error:
        print(f"error: plots need the extra `bench`: {error}", file=sys.stderr)
        return 1
    results: dict[str, Any] = {}
    for file in options.files:
        results |= json.loads(file.read_text())
    for path in plots.draw(results, options.into):
        print(path)
    return 0


def _print(console: Console, parts: Sequence[Any]) -> None:
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, with their computed properties; what JSON has no number for becomes null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, each in vars(type(value)).items() if isinstance(each, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


if __name__ == "__main__":
    sys.exit(main())
