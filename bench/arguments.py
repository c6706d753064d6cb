"""The command line: which measurements there are, and their options."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .ahead import AheadOptions
from .gathering import GatheringOptions
from .network import NetworkOptions
from .pair import TEMPERATURES, PairOptions
from .peers import PeersOptions
from .prompts import PROMPT_CLASSES
from .running_pair import ModelPair, Way
from .serving import ServingOptions
from .simulation import Curve

Options = TypeVar("Options")
_RESULTS = Path(__file__).resolve().parent / "results"
COMMANDS = {
    "all": "overhead and pair, quickly (the default)",
    "overhead": "a round beside the models: time, CPU, bytes",
    "rounds": "rounds a second through the real services with a model that is next to nothing",
    "pair": "speed-up of a pair of models, beside the cost model's prediction",
    "ahead": "a draft that works ahead, beside the same one that waits and plain decoding",
    "peers": "the same pair through transformers' generate, alone and assisted, and through Tandem",
    "serving": "many requests at the same time, and prompts with a common beginning",
    "gathering": "requests out of phase, at a target whose steps wait for those about to come back and at another",
    "network": "a distance between the services",
    "simulate": "capacity planning: drafts for each target, best gamma, break-even distance, from measured constants",
    "acceptance": "what the pair accepts of fixed prompts, beside what it did; fails on a fall",
    "tracing": "what tracing costs the orchestrator",
    "plot": "draw what other commands wrote with --json",
}
_QUICK: dict[type, dict[str, Any]] = {
    PairOptions: {
        "gammas": (2, 3),
        "max_tokens": 40,
        "cases": (("chat", 0.0), ("chat", 0.7), ("code", 0.0), ("copying", 0.0), ("prose", 1.0)),
    },
    AheadOptions: {"gammas": (4,), "cases": (("prose", 1.0),), "prompts": 1, "max_tokens": 40},
    PeersOptions: {"cases": (("chat", 0.0), ("copying", 0.0), ("prose", 1.0)), "max_tokens": 32, "repeats": 1},
    ServingOptions: {"concurrencies": (1, 4, 16), "max_tokens": 16, "repeats": 1},
    GatheringOptions: {"concurrencies": (1, 2), "max_tokens": 16, "repeats": 1},
    NetworkOptions: {"gammas": (0, 2), "max_tokens": 24, "repeats": 1},
}


def parse(arguments: Sequence[str], prog: str = "python -m bench") -> argparse.Namespace:
    """No sub-command means `all`; `prog` is what the usage calls it."""
    if not arguments or arguments[0] not in (*COMMANDS, "-h", "--help"):
        arguments = ["all", *arguments]
    return _parser(prog).parse_args(arguments)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Measure Tandem on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    add: dict[str, Callable[[argparse.ArgumentParser], None]] = {
        "overhead": _add_overhead,
        "rounds": _add_rounds,
        "pair": _add_pair,
        "ahead": _add_ahead,
        "peers": _add_peers,
        "serving": _add_serving,
        "gathering": _add_gathering,
        "network": _add_network,
        "simulate": _add_simulate,
        "acceptance": _add_acceptance,
        "tracing": _add_tracing,
        "plot": _add_plot,
    }
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name != "plot":
            command.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file too")
        if name in add:
            add[name](command)
    return parser


def options_from(arguments: argparse.Namespace, kind: type[Options]) -> Options:
    """What was asked for, else what `--quick` stands for, else the defaults."""
    names = {each.name for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names and value is not None}
    quick = _QUICK.get(kind, {}) if getattr(arguments, "quick", False) else {}
    return kind(**{**quick, **given})


def models_from(arguments: argparse.Namespace) -> ModelPair:
    """The pair of models asked for."""
    return options_from(arguments, ModelPair)


def cases_from(arguments: argparse.Namespace) -> tuple[tuple[str, float], ...] | None:
    """All of the classes asked for at all of the temperatures; None if neither was."""
    if not (arguments.classes or arguments.temperature):
        return None
    names = arguments.classes or [each.name for each in PROMPT_CLASSES]
    return tuple(itertools.product(names, arguments.temperature or TEMPERATURES))


def _add_models(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int, help="CPU threads of each model")
    parser.add_argument(
        "--cost-ratio",
        type=float,
        metavar="RATIO",
        help="pad the target with layers that add nothing, until its step costs so many times the draft's",
    )
    parser.add_argument("--quick", action="store_true", help="few combinations, few tokens: it shows that all works")


def _add_folders(parser: argparse.ArgumentParser) -> None:
    default = ModelPair()
    parser.add_argument("--target", type=Path, help=f"folder of the target model: {default.target.name}")
    parser.add_argument("--draft", type=Path, help=f"folder of the draft model: {default.draft.name}")


def _add_cases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--classes", type=_names, help="kinds of prompts: chat,code,copying,prose")
    parser.add_argument("--temperature", type=_reals, help="temperatures: 0,0.7,1")
    parser.add_argument("--tokens", dest="max_tokens", type=int, help="most tokens of a completion")
    parser.add_argument("--prompts", type=int, help="prompts of each class for each temperature")


def _add_overhead(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", dest="concurrencies", type=_numbers, help="requests at the same time: 1,8,64")
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round: 5,0")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of one request")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--acceptance", type=float, help="probability that a draft token is accepted")
    parser.add_argument("--support-size", type=int)
    parser.add_argument("--tokenizer", type=Path, help="folder of the tokenizer to use")
    parser.add_argument(
        "--profile",
        dest="with_profile",
        action="store_true",
        help="show what the time goes into (the times themselves get longer)",
    )
    parser.add_argument(
        "--own-core",
        action="store_const",
        const=True,
        help="place the orchestrator on a core of its own, and all others on the rest (Linux)",
    )


def _add_rounds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", dest="concurrencies", type=_numbers, help="requests at the same time: 1,16,64")
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round: 5,0")
    parser.add_argument("--rounds", type=int, help="rounds of one request, about")
    parser.add_argument("--repeats", type=int, help="runs of each case, the sides taking turns")


def _add_pair(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    _add_cases(parser)
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round: 1,2,3,5")
    parser.add_argument(
        "--ways", type=_ways, help="other ways to decode, in turns with plain decoding: auto,2+ahead,auto+ahead"
    )
    parser.add_argument("--samples", type=int, help="timings of each worker step")
    parser.add_argument("--overhead-ms", dest="overhead", type=float, help="C_o; measured first if not given")


def _add_ahead(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    _add_cases(parser)
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round: 2,4,6,8")
    parser.add_argument("--rows", type=int, help="outcomes that are drafted for at a time")
    parser.add_argument(
        "--rejection",
        dest="coupled",
        action="store_const",
        const=False,
        help="the acceptance method; COUPLED if not given",
    )


def _add_peers(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    _add_cases(parser)
    parser.add_argument("--ways", type=_ways, help="Tandem's, besides plain decoding: 2,3,auto,2+ahead")
    parser.add_argument("--repeats", type=int, help="turns of each prompt")


def _add_serving(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    parser.add_argument(
        "--requests", dest="concurrencies", type=_numbers, help="requests at the same time: 1,2,4,8,16,32,64"
    )
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round: 0,5")
    parser.add_argument(
        "--auto",
        dest="adaptive",
        action="store_true",
        help="an adaptive gamma too, beside plain decoding and the best fixed one",
    )
    parser.add_argument("--tokens", dest="max_tokens", type=int, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, help="runs of each case, each side taking turns")
    parser.add_argument("--samples", type=int, help="timings of each worker step")
    parser.add_argument("--shared-tokens", type=int, help="tokens of the common beginning")


def _add_gathering(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    parser.add_argument("--requests", dest="concurrencies", type=_numbers, help="requests at the same time: 1,2,4,16")
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round: 0,5")
    parser.add_argument("--tokens", dest="max_tokens", type=int, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, help="pairs of runs of each case")


def _add_network(parser: argparse.ArgumentParser) -> None:
    _add_models(parser)
    parser.add_argument("--rtt-ms", dest="round_trips", type=_reals, help="added to each link: 0,0.3,1,5,20")
    parser.add_argument("--mbit", type=float, help="bandwidth of each link, Mbit/s")
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="draft tokens of a round, 0 among them: 0,2,4")
    parser.add_argument("--tokens", dest="max_tokens", type=int, help="tokens of a completion")
    parser.add_argument("--repeats", type=int, help="runs of each gamma at each distance, in turns")


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="measured",
        type=Path,
        metavar="FILE",
        help="what `serving --json FILE` wrote: constants, and cases to check the simulation with; `pair`'s are checked only. "
        "Without it, the constants of an imagined large pair",
    )
    parser.add_argument("--draft-step-ms", type=_curve, help="time of a draft's forward by blocks in it: 1:2,16:2.6")
    parser.add_argument("--target-ms", type=_curve, help="time of a target's forward by tokens in it: 1:30,8:31,64:34")
    parser.add_argument("--overhead-ms", type=float, help="C_o of a round of one request")
    parser.add_argument("--orchestrator-ms", type=float, help="what of it keeps the orchestrator busy")
    parser.add_argument("--acceptance", type=_reals, help="by position, given that it is reached: 0.8,0.75,0.7")
    parser.add_argument("--requests", type=_numbers, help="at the same time, for each target: 1,4,16,64")
    parser.add_argument("--targets-per-draft", type=_numbers, help="1,2,4,8")
    parser.add_argument("--gamma", dest="gammas", type=_numbers, help="1,2,3,4,5,6,8")
    parser.add_argument("--rtt-ms", type=float, help="round trip between the orchestrator and each worker")
    parser.add_argument("--ahead", type=float, help="share of blocks that are drafted ahead of time, 0 to 1")
    parser.add_argument("--draft-price", type=float, help="of a draft's device, in those of a target's")


def _add_acceptance(parser: argparse.ArgumentParser) -> None:
    _add_folders(parser)
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="the record, if not the committed one")
    parser.add_argument("--record", action="store_true", help="write the numbers down instead of failing")


def _add_tracing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", dest="concurrency", type=int, help="requests at the same time")
    parser.add_argument("--rounds", type=int, help="rounds of each request")
    parser.add_argument("--waves", type=int, help="times that so many requests run in one measurement")
    parser.add_argument("--repeats", type=int)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", type=Path, nargs="+", help="what other commands wrote with --json")
    parser.add_argument("--into", type=Path, default=_RESULTS, help="folder of the PNG files: bench/results")


def _curve(text: str) -> Curve:
    points = (part.split(":") for part in text.split(","))
    return Curve(tuple((float(size), float(milliseconds) / 1000) for size, milliseconds in points))


def _ways(text: str) -> tuple[Way, ...]:
    return tuple(Way.parse(part) for part in text.split(","))


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
