"""What the command line accepts. Kept apart from what it does, so that --help answers without loading anything."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

AUTO = "auto"
DISTRIBUTION = "tandem-decoding"


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Exact speculative decoding as services.",
        epilog="Everything that isn't a flag is set by TANDEM_* variables; the README lists them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tandem {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_CommandParser)
    _add_up(commands.add_parser("up", help="start the services and leave them running", allow_abbrev=False))
    _add_home(commands.add_parser("down", help="stop the services that `up` started", allow_abbrev=False))
    _add_status(commands.add_parser("status", help="show what runs", allow_abbrev=False))
    _add_demo(commands.add_parser("demo", help="one answer, coloured, beside plain decoding", allow_abbrev=False))
    _add_generate(commands.add_parser("generate", help="complete a prompt and stream the text", allow_abbrev=False))
    _add_trace(commands.add_parser("trace", help="draw the rounds of a traced request", allow_abbrev=False))
    _add_chat(commands.add_parser("chat", help="talk with the model in the terminal", allow_abbrev=False))
    commands.add_parser("bench", help="measure; `bench --help` lists the measurements", add_help=False)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """Of one command. What it doesn't know it refuses itself, with its own usage, where argparse leaves that to the program's parser."""

    # typeshed has overloads, for namespaces of other classes.
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown)
        return known, unknown

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        option = next((each.partition("=")[0] for each in unknown if each.startswith("-")), None)
        if option is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        close = difflib.get_close_matches(option, self._option_string_actions, 1)
        self.error(f"there is no option {option}" + (f"; {close[0]} is one" if close else ""))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """What was asked for. All that follows `bench` is the measurements' own, also what begins with a dash."""
    if arguments[:1] == ["bench"]:
        return argparse.Namespace(command="bench", arguments=list(arguments[1:]))
    return build_parser().parse_args(arguments)


def _version() -> str:
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "(not installed: running from its sources)"


def _add_home(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--home", metavar="DIR", help="state, logs and data [TANDEM_HOME, default .tandem]")


def _add_up(parser: argparse.ArgumentParser) -> None:
    _add_home(parser)
    group = parser.add_argument_group("services (a running one is named by its address and is then not started)")
    for service, port in (("redis", 6399), ("draft", 50052), ("target", 50053), ("orchestrator", 50051)):
        group.add_argument(
            f"--{service}-listen",
            metavar="HOST:PORT",
            help=f"[TANDEM_{service.upper()}_LISTEN, default 127.0.0.1:{port}]",
        )
    group.add_argument(
        "--http-listen",
        metavar="HOST:PORT",
        help="OpenAI's API of the orchestrator [TANDEM_HTTP_LISTEN; default: none]",
    )
    group.add_argument("--redis-url", metavar="URL", help="[TANDEM_REDIS_URL]")
    for service in ("draft", "target"):
        group.add_argument(
            f"--{service}-addresses", metavar="HOST:PORT,...", help=f"[TANDEM_{service.upper()}_ADDRESSES]"
        )
        group.add_argument(
            f"--{service}-model", metavar="NAME|DIR", help=f"a name or a folder [TANDEM_{service.upper()}_MODEL]"
        )
    group.add_argument("--orchestrator-address", metavar="HOST:PORT", help="[TANDEM_ORCHESTRATOR_ADDRESS]")
    group.add_argument(
        "--ready-timeout", metavar="SECONDS", help="how long to wait for readiness [TANDEM_READY_TIMEOUT, default 180]"
    )


def _add_status(parser: argparse.ArgumentParser) -> None:
    _add_home(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_colour(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--colour",
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="kinds of tokens by colour or by letters; auto: by colour on a terminal, unless NO_COLOR is set",
    )


def _whole(text: str, bits: int = 32) -> int:
    """A number that fits its field of the contract. What of it makes sense is for the server to say: its limits are not known here."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    if number >= 1 << bits:
        raise argparse.ArgumentTypeError(f"{text!r} is more than fits into {bits} bits")
    return number


def _seed(text: str) -> int:
    return _whole(text, bits=64)


def _gamma(text: str) -> int | str:
    if text == AUTO:
        return AUTO
    try:
        return _whole(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor {AUTO}") from None


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def _bias(text: str) -> tuple[int, float]:
    token_id, found, bias = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=BIAS, such as 42=-1.5")
    return _whole(token_id), _real(bias)


def _add_sampling(parser: argparse.ArgumentParser, temperature: float | None, max_tokens: int | None) -> None:
    """The options that `generate` and `demo` share; an option that isn't given is left to the server."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=_whole, default=max_tokens, metavar="N", help="most tokens to generate")
    group.add_argument("--min-tokens", type=_whole, metavar="N", help="no end before this many tokens")
    group.add_argument("--temperature", type=_real, default=temperature, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=_whole, metavar="K", help="0 keeps all")
    group.add_argument("--top-p", type=_real, metavar="P", help="1 keeps all")
    group.add_argument("--min-p", type=_real, metavar="P", help="0 keeps all")
    group.add_argument(
        "--seed",
        type=_seed,
        metavar="N",
        help="default: random, and reported; the same repeats an output at a fixed --gamma, or with --method coupled",
    )
    group.add_argument(
        "--gamma",
        type=_gamma,
        metavar="N",
        help="draft tokens a round; 0 is plain decoding; auto: chosen anew for each round",
    )
    group.add_argument("--method", choices=("rejection", "coupled"), help="acceptance method")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument(
        "--stop-token-id",
        action="append",
        type=_whole,
        default=[],
        metavar="ID",
        help="end after this token (repeatable)",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end tokens")
    group.add_argument("--keep-special-tokens", action="store_true", help="show special tokens as text")
    group.add_argument("--raw", action="store_true", help="complete the text as it stands, not as a chat message")
    group.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    _add_adjustments(parser)
    _add_form(parser)
    parser.add_argument("--timeout", type=_real, metavar="SECONDS", help="deadline of the call")
    _add_colour(parser)


def _add_adjustments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "tokens made likelier, rarer, or impossible (options with an ID or a TEXT are repeatable)"
    )
    group.add_argument(
        "--repetition-penalty", type=_real, metavar="R", help="above 1: rarer if in the prompt or the output; 1 is none"
    )
    group.add_argument("--presence-penalty", type=_real, metavar="R", help="above 0: rarer if in the output")
    group.add_argument(
        "--frequency-penalty", type=_real, metavar="R", help="above 0: rarer each time it is in the output"
    )
    group.add_argument(
        "--logit-bias", action="append", type=_bias, default=[], metavar="ID=BIAS", help="add to the token's logit"
    )
    group.add_argument(
        "--ban-token-id", action="append", type=_whole, default=[], metavar="ID", help="never this token"
    )
    group.add_argument(
        "--allow-token-id", action="append", type=_whole, default=[], metavar="ID", help="only such tokens"
    )
    group.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="never this text's tokens in a row"
    )
    group.add_argument(
        "--logprobs", type=_whole, metavar="N", help="log-probabilities of the tokens and the N likeliest (with --json)"
    )
    group.add_argument(
        "--logprobs-mode", choices=("raw", "processed"), help="of the model's own distribution, or of that drawn from"
    )


def _add_form(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("form of the output (one of them)").add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="JSON that fits this JSON Schema")
    group.add_argument("--json-object", action="store_true", help="any JSON object")
    group.add_argument("--regex", metavar="TEXT", help="text that matches this regular expression")
    group.add_argument("--grammar", metavar="FILE", help="what this Lark grammar derives")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="default: a question that the demo's model can answer")
    _add_up(parser)
    _add_sampling(parser, temperature=0.0, max_tokens=96)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="ID|FILE", help="a trace id, a request id, or a JSON file of OTLP or of Jaeger's UI"
    )
    parser.add_argument(
        "--jaeger", metavar="URL", help="its query API [TANDEM_JAEGER_URL, default http://127.0.0.1:16686]"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a drawing instead of text")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help="the prompt; read from standard input if it is missing or -")
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="[TANDEM_ORCHESTRATOR_ADDRESS; default: what `tandem up` started]"
    )
    _add_home(parser)
    _add_sampling(parser, temperature=None, max_tokens=None)
    parser.add_argument("--n", type=_whole, metavar="N", help="completions, one line each (needs --json)")
    parser.add_argument("--request-id", default="", metavar="ID", help="default: made by the server")
    parser.add_argument(
        "--resume", default="", metavar="ID", help="go on with this request, on any orchestrator; takes no prompt"
    )
    parser.add_argument("--offset", type=_whole, metavar="N", help="tokens of it that are there already (default 0)")
    parser.add_argument(
        "--kinds",
        action="store_true",
        help="tell tokens apart by kind: in colour, or by letters, A, R, B, and = if it is replayed; a line's end is then "
        "written \\n, the end of the answer <end>, a token that completes no text <>",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    parser.add_argument("--stats", action="store_true", help="print a table of rounds and acceptance to standard error")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="[TANDEM_ORCHESTRATOR_ADDRESS; default: what `tandem up` started]"
    )
    _add_home(parser)
    _add_sampling(parser, temperature=None, max_tokens=None)
    parser.add_argument("--kinds", action="store_true", help="tell tokens apart by kind: in colour, or by letters")
