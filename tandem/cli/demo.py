"""`tandem demo`: one answer with its tokens told apart, then the same prompt without speculation beside it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console

from tandem.cli.completion import Completion, collect
from tandem.cli.endpoint import connected
from tandem.cli.errors import USAGE, CliError
from tandem.cli.existing import usable_stack
from tandem.cli.failure import calls_explained
from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import plan_stack
from tandem.cli.progress import Progress
from tandem.cli.render import TokenPainter, use_colour
from tandem.cli.request import options_of, prompt_of
from tandem.cli.settings import StackSettings, load_settings, with_flags
from tandem.cli.stack import Stack
from tandem.cli.state import StateFile
from tandem.cli.tables import speed_up, statistics_table
from tandem.cli.variables import misspelt
from tandem.client import Chunk, GenerationOptions, Prompt, TandemClient

PROMPT = "Why should we protect the oceans?"
# The fastest block on a CPU for the default pair, which agrees on fewer than every second token.
GAMMA = 2
ADAPTIVE_VARIABLE = "TANDEM_ADAPTIVE_SPECULATIVE_TOKENS"
_WARM_UP_TOKENS = 4
_TURNS_SECONDS = 6.0
"""What may be spent on a second, unseen run of each."""
_DRAFT_SECONDS = 15.0
_RETRY_SECONDS = 0.25


def run(arguments: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Uses the services of `tandem up` if they run; else starts them, and stops them whatever happens."""
    if arguments.logprobs is not None:
        raise CliError("log-probabilities are shown by `tandem generate --json`", USAGE)
    environment = with_flags(arguments, environment)
    settings = load_settings(environment)
    console = Console(highlight=False, soft_wrap=True)
    text = arguments.prompt or PROMPT
    screen = _Screen(console, use_colour(arguments.colour, sys.stdout, environment))
    progress = Progress(console)
    for line in misspelt(environment):
        progress.note(line)
    with (
        running_stack(settings, progress, interruptions) as address,
        interruptions.released(),
        calls_explained(address),
        connected(address, settings.environment, interruptions) as client,
    ):
        options = _with_gamma(options_of(arguments), environment)
        caller = _Caller(client, prompt_of(arguments, text), arguments.timeout, interruptions)
        _compare(caller, text, options, screen)
    console.print(f"logs: {settings.logs}", markup=False)
    return 0


@contextlib.contextmanager
def running_stack(settings: StackSettings, progress: Progress, interruptions: Interruptions) -> Iterator[str]:
    """The orchestrator's address, for as long as the stack is needed. All of it is a hold, and who uses the stack releases it meanwhile:
    nothing can come between its end and the stop."""
    file = StateFile(settings.home)
    stack: Stack | None = None
    with interruptions.held():
        with file.locked():
            running = usable_stack(settings, progress.note, interruptions)
            if running is not None and not running.complete():
                dead = ", ".join(service.name for service in running.dead())
                raise CliError(
                    f"{dead} of the running services has died: `tandem up` starts it again, `tandem status` shows more"
                )
            if running is not None:
                progress.note(f"using the services that run at {running.orchestrator_address}")
                address = running.orchestrator_address
            else:
                stack = Stack(plan_stack(settings), settings, "demo", progress, interruptions)
                stack.start()
                address = stack.state.orchestrator_address
        try:
            yield address
        finally:
            if stack is not None:
                stack.stop()


def _with_gamma(options: GenerationOptions, environment: Mapping[str, str]) -> GenerationOptions:
    """The demo's own gamma, where neither the flag nor the server's variable names one."""
    given = options.num_speculative_tokens is not None or options.adaptive_speculative_tokens is not None
    if given or environment.get("TANDEM_NUM_SPECULATIVE_TOKENS") or environment.get(ADAPTIVE_VARIABLE):
        return options
    return dataclasses.replace(options, num_speculative_tokens=GAMMA)


class _Screen:
    """The demo's own output: coloured where there is colour, with letters where there is none."""

    def __init__(self, console: Console, colour: bool) -> None:
        self.console = console
        self.colour = colour

    def tokens(self) -> TokenPainter:
        return TokenPainter(sys.stdout, colour=self.colour, letters=not self.colour)

    def line(self, text: str = "") -> None:
        print(text, flush=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Caller:
    """Completions of one prompt."""

    client: TandemClient
    prompt: Prompt
    timeout: float | None
    interruptions: Interruptions

    def complete(self, options: GenerationOptions, on_chunk: Callable[[Chunk], None]) -> Completion:
        """Raises TandemError."""
        return collect(
            lambda: self.client.generate(self.prompt, options, timeout=self.timeout), on_chunk, self.interruptions
        )


def _compare(caller: _Caller, text: str, options: GenerationOptions, screen: _Screen) -> None:
    screen.line(f"\nprompt: {text}")
    screen.line(f"tokens: {screen.tokens().legend()}\n")
    _warm_up(caller, options)
    speculative = _stream(caller, options, screen)
    # The same seed: with the coupled method, or greedily, the text must be the same too.
    plain_options = dataclasses.replace(
        options, num_speculative_tokens=0, adaptive_speculative_tokens=None, seed=speculative.start.seed
    )
    screen.line(
        "\nthe same without speculation (gamma = 0: each token is the target's alone, a bonus without a block):\n"
    )
    plain = _stream(caller, plain_options, screen)
    turns = ""
    if speculative.total_seconds + plain.total_seconds <= _TURNS_SECONDS:
        # The other way around, so that a machine that gets slower or faster meanwhile does so for both alike.
        plain = _averaged(plain, caller.complete(plain_options, _unseen))
        again = dataclasses.replace(options, seed=speculative.start.seed)
        speculative = _averaged(speculative, caller.complete(again, _unseen))
        turns = " over two runs of each, in turns"
    adaptive = options.adaptive_speculative_tokens
    block = "auto" if adaptive else len(speculative.finish.speculation.draft_tokens_per_position)
    screen.console.print(statistics_table([(f"gamma = {block}", speculative), ("gamma = 0", plain)]))
    screen.line(f"speed-up {speed_up(speculative, plain):.2f}x{turns}; {_equality(speculative, plain, options)}")
    for line in _doubts(speculative, plain):
        screen.line(line)


def _averaged(shown: Completion, again: Completion) -> Completion:
    """The completion that was shown, as fast as both together. The other one may be shorter or longer, where blocks depend on the time and
    draws on the blocks."""
    of_both = len(shown.tokens) + len(again.tokens)
    if not of_both:
        return shown
    return dataclasses.replace(
        shown,
        first_token_seconds=(shown.first_token_seconds + again.first_token_seconds) / 2,
        total_seconds=(shown.total_seconds + again.total_seconds) * len(shown.tokens) / of_both,
    )


def _unseen(_: Chunk) -> None:
    """Of a run that is only timed."""


def _doubts(speculative: Completion, plain: Completion) -> Iterator[str]:
    """What the comparison doesn't show although it looks so."""
    stats = speculative.finish.speculation
    if stats.degraded_rounds and not stats.draft_tokens:
        yield f"no round had a draft ({', '.join(stats.degraded_reasons)}): this is plain decoding, twice"
    elif speed_up(speculative, plain) > max(1.0, speculative.tokens_per_round):
        yield (
            f"a round can't bring more than its {speculative.tokens_per_round:.2f} tokens: "
            "other load slowed the plain run down; try again"
        )


def _warm_up(caller: _Caller, options: GenerationOptions) -> None:
    """The first request pays for what is made on first use; neither side of the comparison should.

    An orchestrator is ready without a draft, so here it also gets the time to find the one that has just started.
    """
    short = dataclasses.replace(options, max_tokens=_WARM_UP_TOKENS, min_tokens=None)
    unhurried = dataclasses.replace(caller, timeout=None)
    deadline = time.monotonic() + _DRAFT_SECONDS
    while True:
        completion = unhurried.complete(short, _unseen)
        if not completion.finish.speculation.degraded_rounds or time.monotonic() >= deadline:
            return
        time.sleep(_RETRY_SECONDS)


def _stream(caller: _Caller, options: GenerationOptions, screen: _Screen) -> Completion:
    painter = screen.tokens()
    with painter.line_ended():
        completion = caller.complete(options, painter.show)
    screen.line()
    return completion


def _equality(speculative: Completion, plain: Completion, options: GenerationOptions) -> str:
    """Whether the texts are equal, and what that means for this kind of request."""
    if [token.token_id for token in speculative.tokens] == [token.token_id for token in plain.tokens]:
        return "both texts are equal, token for token"
    shared = 0
    for one, other in zip(speculative.tokens, plain.tokens, strict=False):
        if one.token_id != other.token_id:
            break
        shared += 1
    if options.temperature == 0 or (options.method is not None and options.method.value == "coupled"):
        why = "a near tie that rounding decides; in float32 they agree"
    else:
        why = "as two draws from one distribution do"
    return f"the texts differ after {shared} tokens ({why})"
