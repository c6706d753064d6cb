"""`python -m bench [all | acceptance | overhead | pair | serving | tracing]`: prints tables, and writes the numbers where --json says."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console

from . import acceptance, overhead, pair, serving, tables, tracing_cost
from .machine import load_average, this_machine
from .profile import profile_tables
from .prompts import PROMPT_CLASSES
from .services import ServiceFailed
from .serving_results import serving_goals, serving_tables

COMMANDS = ("all", "acceptance", "overhead", "pair", "serving", "tracing", "-h", "--help")
WIDTH = 150
QUICK_GAMMAS = (2, 3)
QUICK_TOKENS = 40
QUICK_ROUNDS = 200
QUICK_REQUESTS = (1, 4, 16)
QUICK_SERVING_TOKENS = 16
QUICK_CASES = (("chat", 0.0), ("chat", 0.7), ("code", 0.0), ("copying", 0.0), ("prose", 1.0))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what was asked for; 0 if it could be measured, whatever came out, but for `acceptance`, which fails on a fall."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    options = _parser().parse_args(_with_default(sys.argv[1:] if arguments is None else arguments))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    try:
        results = _measure(options, console)
    except ServiceFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        options.json.write_text(json.dumps(_plain(results), indent=2) + "\n")
    return int(any(row.fell for row in results.get("acceptance", ())) and not options.record)


def _with_default(arguments: Sequence[str]) -> list[str]:
    """No sub-command means `all`."""
    if arguments and (arguments[0] in COMMANDS):
        return list(arguments)
    return ["all", *arguments]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Tandem on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    everything = commands.add_parser("all", help="both, quickly (the default)")
    alone = commands.add_parser("overhead", help="a round beside the models: time, CPU, bytes")
    both = commands.add_parser("pair", help="speed-up of a pair of models, beside the cost model's prediction")
    traced = commands.add_parser("tracing", help="what tracing costs the orchestrator")
    crowd = commands.add_parser("serving", help="many requests at the same time, and prompts with a common beginning")
    guard = commands.add_parser(
        "acceptance", help="what the pair accepts of fixed prompts, beside what it did; fails on a fall"
    )
    guard.add_argument("--record", action="store_true", help="write the numbers down instead of failing")
    guard.add_argument("--recorded", type=Path, default=acceptance.RECORDED, metavar="FILE", help="the record")
    guard.add_argument("--target", type=Path, default=pair.TARGET, help="folder of the target model")
    guard.add_argument("--draft", type=Path, default=pair.DRAFT, help="folder of the draft model")
    for command in (everything, alone, both, crowd, traced, guard):
        command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
    everything.set_defaults(quick=True)
    _add_overhead_arguments(alone)
    _add_pair_arguments(both)
    traced.add_argument("--requests", type=int, default=16, help="requests at the same time")
    traced.add_argument("--rounds", type=int, default=20, help="rounds of each request")
    traced.add_argument("--waves", type=int, default=8, help="times that so many requests run in one measurement")
    traced.add_argument("--repeats", type=int, default=9)
    _add_serving_arguments(crowd)
    return parser


def _add_overhead_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=_numbers, default=(1, 8, 64), help="requests at the same time: 1,8,64")
    parser.add_argument("--gamma", type=_numbers, default=(5, 0), help="draft tokens of a round: 5,0")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of one request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft token is accepted")
    parser.add_argument("--support-size", type=int, default=64)
    parser.add_argument("--tokenizer", type=Path, default=overhead.TOKENIZER, help="folder of the tokenizer to use")
    parser.add_argument(
        "--profile", action="store_true", help="show what the time goes into (the times themselves get longer)"
    )


def _add_pair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", type=Path, default=pair.TARGET, help="folder of the target model")
    parser.add_argument("--draft", type=Path, default=pair.DRAFT, help="folder of the draft model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each model")
    parser.add_argument("--gamma", type=_numbers, help="draft tokens of a round: 1,2,3,5")
    parser.add_argument(
        "--ways",
        type=_ways,
        default=(),
        help="other ways to decode, in turns with plain decoding: auto,2+ahead,auto+ahead",
    )
    parser.add_argument("--classes", type=_names, help="kinds of prompts: chat,code,copying,prose")
    parser.add_argument("--temperature", type=_reals, help="temperatures: 0,0.7,1")
    parser.add_argument("--tokens", type=int, help="most tokens of a completion")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of each class for each temperature")
    parser.add_argument("--samples", type=int, default=12, help="timings of each worker step")
    parser.add_argument("--overhead-ms", type=float, help="C_o of the prediction; measured first if not given")
    parser.add_argument("--quick", action="store_true", help="few combinations: two minutes instead of ten or more")


def _add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    default = serving.ServingOptions()
    parser.add_argument("--target", type=Path, default=default.target, help="folder of the target model")
    parser.add_argument("--draft", type=Path, default=default.draft, help="folder of the draft model")
    parser.add_argument("--dtype", default=default.dtype)
    parser.add_argument("--threads", type=int, default=default.threads, help="CPU threads of each model")
    parser.add_argument("--requests", type=_numbers, help="requests at the same time: 1,2,4,8,16,32,64")
    parser.add_argument("--gamma", type=_numbers, default=default.gammas, help="draft tokens of a round: 0,5")
    parser.add_argument("--tokens", type=int, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, help="runs of each case, each side taking turns")
    parser.add_argument(
        "--shared-tokens", type=int, default=default.shared_tokens, help="tokens of the common beginning"
    )
    parser.add_argument("--quick", action="store_true", help="few requests, few tokens, once: some minutes")


def _ways(text: str) -> tuple[pair.Way, ...]:
    return tuple(pair.Way.parse(part) for part in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _reals(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    known = {each.name for each in PROMPT_CLASSES}
    names = tuple(text.split(","))
    if not known.issuperset(names):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(sorted(known))}")
    return names


def _measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    machine = this_machine()
    results: dict[str, Any] = {}
    goals: list[tables.Goal] = []
    if options.command in ("all", "overhead"):
        found = _overhead(options, console)
        results["overhead"] = found
        goals += tables.overhead_goals(found)
    if options.command in ("all", "pair"):
        pair_found = uvloop.run(pair.measure(_pair_options(options, results.get("overhead"))))
        results["pair"] = pair_found
        goals += tables.pair_goals(pair_found)
        _print(console, tables.pair_tables(pair_found))
    if options.command == "acceptance":
        models = pair.PairOptions(target=options.target, draft=options.draft, overhead=math.nan)
        rows = uvloop.run(acceptance.measure(acceptance.recorded(options.recorded), models))
        results["acceptance"] = rows
        goals += tables.acceptance_goals(rows)
        _print(console, [tables.acceptance_table(rows)])
        if options.record:
            acceptance.record(rows, options.recorded)
    if options.command == "tracing":
        wanted = tracing_cost.TracingOptions(
            concurrency=options.requests, rounds=options.rounds, waves=options.waves, repeats=options.repeats
        )
        cost = uvloop.run(tracing_cost.measure(wanted))
        results["tracing"] = cost
        goals += tables.tracing_goals(cost)
        _print(console, [tables.tracing_table(cost)])
    if options.command == "serving":
        serving_found = uvloop.run(serving.measure(_serving_options(options)))
        results["serving"] = serving_found
        goals += serving_goals(serving_found)
        _print(console, serving_tables(serving_found))
    machine = dataclasses.replace(machine, load_after=load_average())
    _print(console, [tables.goals_table(goals), *tables.machine_lines(machine)])
    return {"machine": machine, **results, "goals": goals}


def _overhead(options: argparse.Namespace, console: Console) -> overhead.OverheadResult:
    if options.command == "all":
        found = uvloop.run(overhead.measure(overhead.OverheadOptions(rounds=QUICK_ROUNDS)))
        _print(console, tables.overhead_tables(found))
        return found
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        profile = Path(folder) / "orchestrator.prof" if options.profile else None
        found = uvloop.run(
            overhead.measure(
                overhead.OverheadOptions(
                    concurrencies=options.requests,
                    gammas=options.gamma,
                    rounds=options.rounds,
                    repeats=options.repeats,
                    acceptance=options.acceptance,
                    support_size=options.support_size,
                    tokenizer=options.tokenizer,
                    profile=profile,
                )
            )
        )
        _print(console, tables.overhead_tables(found))
        if profile is not None:
            _print(console, profile_tables(profile))
    return found


def _pair_options(options: argparse.Namespace, found: overhead.OverheadResult | None) -> pair.PairOptions:
    if options.command == "all":
        return pair.PairOptions(
            gammas=QUICK_GAMMAS, cases=QUICK_CASES, max_tokens=QUICK_TOKENS, overhead=_overhead_ms(found)
        )
    default = pair.PairOptions(overhead=math.nan)
    cases = default.cases
    if options.quick:
        cases = QUICK_CASES
    if options.classes or options.temperature:
        cases = tuple(
            (name, temperature)
            for name in options.classes or [each.name for each in PROMPT_CLASSES]
            for temperature in options.temperature or pair.TEMPERATURES
        )
    return dataclasses.replace(
        default,
        target=options.target,
        draft=options.draft,
        dtype=options.dtype,
        threads=options.threads,
        gammas=options.gamma or (QUICK_GAMMAS if options.quick else default.gammas),
        ways=options.ways,
        cases=cases,
        max_tokens=options.tokens or (QUICK_TOKENS if options.quick else default.max_tokens),
        prompts=options.prompts,
        samples=options.samples,
        overhead=_overhead_ms(None) if options.overhead_ms is None else options.overhead_ms,
    )


def _serving_options(options: argparse.Namespace) -> serving.ServingOptions:
    default = serving.ServingOptions()
    return serving.ServingOptions(
        target=options.target,
        draft=options.draft,
        dtype=options.dtype,
        threads=options.threads,
        concurrencies=options.requests or (QUICK_REQUESTS if options.quick else default.concurrencies),
        gammas=options.gamma,
        max_tokens=options.tokens or (QUICK_SERVING_TOKENS if options.quick else default.max_tokens),
        repeats=options.repeats or (1 if options.quick else default.repeats),
        shared_tokens=options.shared_tokens,
    )


def _overhead_ms(found: overhead.OverheadResult | None) -> float:
    """C_o in milliseconds: the round of one request at the largest gamma measured."""
    if found is None:
        alone = overhead.OverheadOptions(concurrencies=(1,), gammas=(3,), rounds=QUICK_ROUNDS)
        found = uvloop.run(overhead.measure(alone))
    return next(case.round_p50 for case in found.cases if case.concurrency == 1 and case.gamma)


def _print(console: Console, parts: Sequence[Any]) -> None:
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, with their computed properties."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        names += [name for name, each in vars(type(value)).items() if isinstance(each, property)]
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value


if __name__ == "__main__":
    sys.exit(main())
