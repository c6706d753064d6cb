"""`tandem generate`: one call of the public API, streamed to the terminal or into a pipe."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Mapping

from tandem.cli.completion import Completion, collect, collect_all
from tandem.cli.endpoint import connected, orchestrator_address
from tandem.cli.errors import USAGE, CliError
from tandem.cli.failure import calls_explained
from tandem.cli.interruptions import Interruptions
from tandem.cli.render import painter_for
from tandem.cli.request import options_of, prompt_of
from tandem.cli.settings import with_flags
from tandem.client import Chunk, Generation, GenerationOptions, TandemClient


def run(arguments: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Streams the text to standard output; statistics and errors go to standard error."""
    if arguments.raw and arguments.system:
        raise CliError("--system is a chat message; it can't be used with --raw", USAGE)
    if arguments.logprobs is not None and not arguments.json:
        raise CliError("log-probabilities have no place in the text; --logprobs needs --json", USAGE)
    if arguments.json and (arguments.stats or arguments.kinds):
        raise CliError("--json has the statistics and the kinds of the tokens already", USAGE)
    start = _call(arguments)
    environment = with_flags(arguments, environment)
    address = orchestrator_address(arguments.address, environment)
    with connected(address, environment, interruptions) as client, calls_explained(address):
        begin = functools.partial(_begin, start, client)
        if arguments.json:
            for each in collect_all(begin, _show_nothing, interruptions):
                print(json.dumps(each.to_json(), ensure_ascii=False))
            return 0
        painter = painter_for(arguments, environment)
        if arguments.kinds:
            print(f"tokens: {painter.legend()}", file=sys.stderr)
        with painter.line_ended():
            completion = collect(begin, painter.show, interruptions)
    cut_off = completion.cut_off(options_of(arguments))
    if cut_off or arguments.stats or sys.stdout.isatty():
        painter.end_line()
    if cut_off:
        print(f"tandem: {cut_off}", file=sys.stderr)
    if arguments.stats:
        _print_statistics(completion)
    return 0


def _call(arguments: argparse.Namespace) -> Callable[[TandemClient], Generation]:
    """What is asked for: a new generation, or the rest of one."""
    if (arguments.n or 1) > 1 and not arguments.json:
        raise CliError("several completions would be mixed on the terminal; --n needs --json", USAGE)
    if not arguments.resume:
        if arguments.offset is not None:
            raise CliError("--offset belongs to --resume", USAGE)
        prompt, options = prompt_of(arguments, read_prompt(arguments.prompt)), options_of(arguments)
        return lambda client: client.generate(
            prompt, options, request_id=arguments.request_id, timeout=arguments.timeout
        )
    given = (arguments.prompt is not None, arguments.request_id, arguments.raw, arguments.system)
    if any(given) or options_of(arguments) != GenerationOptions():
        raise CliError("a request that is resumed has its prompt and its options already", USAGE)
    return lambda client: client.resume(arguments.resume, arguments.offset or 0, timeout=arguments.timeout)


def _begin(start: Callable[[TandemClient], Generation], client: TandemClient) -> Generation:
    try:
        return start(client)
    except ValueError as error:
        # A number that doesn't fit its field can't even be sent.
        raise CliError(f"an option is out of range: {error}", USAGE) from error


def read_prompt(argument: str | None) -> str:
    """The prompt from the command line, else from standard input without its last line end, as `$(...)` in a shell."""
    if argument not in (None, "-"):
        return str(argument)
    if argument is None and sys.stdin.isatty():
        raise CliError('no prompt: tandem generate "…", or pass it to standard input', USAGE)
    return sys.stdin.read().removesuffix("\n")


def _show_nothing(_: Chunk) -> None:
    """With --json everything comes at the end."""


def _print_statistics(completion: Completion) -> None:
    from rich.console import Console

    from tandem.cli.tables import statistics_table

    console = Console(stderr=True)
    console.print(statistics_table([(f"request {completion.start.request_id}", completion)]))
    console.print(f"seed {completion.start.seed}, finished by {completion.finish.reason}", highlight=False)
