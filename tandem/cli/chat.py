"""`tandem chat`: a conversation in the terminal. Ctrl-C ends an answer, not the program."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Mapping

from tandem.cli.completion import collect
from tandem.cli.conversation import Conversation
from tandem.cli.endpoint import connected, orchestrator_address
from tandem.cli.errors import USAGE, CliError
from tandem.cli.failure import describe
from tandem.cli.interruptions import Interruptions
from tandem.cli.render import TokenPainter, painter_for
from tandem.cli.request import options_of
from tandem.cli.settings import with_flags
from tandem.client import Chunk, GenerationOptions, TandemClient, TandemError

HELP = """\
/reset   forget what was said
/quit    leave; Ctrl-D does too
/help    this
A line that begins with // is said with one slash. Ctrl-C ends an answer; what there is of it stays said."""


def run(arguments: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Reads lines and answers them until there are no more, or /quit."""
    if arguments.raw:
        raise CliError("--raw completes text; a chat is made of messages", USAGE)
    if arguments.logprobs is not None:
        raise CliError("log-probabilities are shown by `tandem generate --json`", USAGE)
    environment = with_flags(arguments, environment)
    address = orchestrator_address(arguments.address, environment)
    with connected(address, environment, interruptions) as client:
        chat = _Chat(
            client,
            Conversation(arguments.system),
            options_of(arguments),
            arguments.timeout,
            lambda: painter_for(arguments, environment),
            interruptions,
        )
        if arguments.kinds:
            print(f"tokens: {painter_for(arguments, environment).legend()}", file=sys.stderr)
        chat.talk()
    return 0


class _Chat:
    """One session at the terminal."""

    def __init__(
        self,
        client: TandemClient,
        conversation: Conversation,
        options: GenerationOptions,
        timeout: float | None,
        painter: Callable[[], TokenPainter],
        interruptions: Interruptions,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._options = options
        self._timeout = timeout
        self._painter = painter
        self._interruptions = interruptions
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def talk(self) -> None:
        """Until the end of the input."""
        if not self._terminal:
            self._take_turns()
            return
        # Its import gives input() a line to edit and the lines before.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        print("/help says what there is besides talking", file=sys.stderr)
        # A Ctrl-C between a line and its answer, or an answer and the next line, ends neither the program nor what it is in the midst of.
        with self._interruptions.held():
            self._take_turns()

    def _take_turns(self) -> None:
        while (line := self._read()) is not None:
            if line.startswith("/") and not line.startswith("//"):
                if not self._obey(line.strip()):
                    return
            elif line.strip():
                self._answer(line.removeprefix("/") if line.startswith("//") else line)

    def _read(self) -> str | None:
        while True:
            try:
                if self._terminal:
                    self._interruptions.forget_ctrl_c()  # of a second press that met no answer any more
                with self._interruptions.released():
                    return input("> " if self._terminal else "")
            except EOFError:
                if self._terminal:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print()  # the line is given up

    def _obey(self, command: str) -> bool:
        """False for the command that ends it."""
        if command == "/quit":
            return False
        if command == "/reset":
            self._conversation.reset()
        elif command == "/help":
            print(HELP)
        else:
            print(f"no such command: {command}; /help says which there are", file=sys.stderr)
        return True

    def _answer(self, line: str) -> None:
        painter = self._painter()
        said: list[str] = []

        def show(chunk: Chunk) -> None:
            said.append(chunk.text)
            painter.show(chunk)

        messages = self._conversation.asking(line)
        cut_off = ""
        try:
            try:
                with self._interruptions.released():
                    completion = collect(
                        lambda: self._client.generate(messages, self._options, timeout=self._timeout),
                        show,
                        self._interruptions,
                    )
                    cut_off = completion.cut_off(self._options)
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                print(" [ended]", end="")
        except ValueError as error:
            # A number that doesn't fit its field can't even be sent, now or later.
            raise CliError(f"an option is out of range: {error}", USAGE) from error
        except TandemError as error:
            # Nothing of this turn stays, so that it can be said again.
            print(f"{chr(10) if said else ''}tandem: {describe(error, self._client.address)}", file=sys.stderr)
            return
        self._conversation.answered(line, "".join(said))
        print(flush=True)
        if cut_off:
            print(f"tandem: {cut_off}", file=sys.stderr)
