"""The entry point: reads the command line, runs one command, and turns every failure into one line and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from tandem.cli.arguments import parse
from tandem.cli.errors import BROKEN_PIPE, INTERRUPTED, CliError
from tandem.cli.interruptions import Interruptions

# What a missing extra looks like: the orchestrator's installation has `generate`, but no progress bars.
_CLI_EXTRA = ("rich",)


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    parsed = parse(sys.argv[1:] if arguments is None else list(arguments))
    interruptions = Interruptions()
    try:
        with interruptions.installed():
            return _outcome(parsed, os.environ if environment is None else environment, interruptions)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _outcome(parsed: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    try:
        return _run(parsed, environment, interruptions)
    except CliError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader has gone, as `| head` does. Python would complain again when it flushes at exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(parsed: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    try:
        # Only now, so that --help and usage errors don't wait for what a command needs.
        command = importlib.import_module(f"tandem.cli.{parsed.command}")
    except ModuleNotFoundError as error:
        if error.name in _CLI_EXTRA:
            raise CliError(f"`tandem {parsed.command}` needs the extra `cli`: {error}") from error
        if (error.name or "").startswith("tandem.v1"):
            raise CliError("the stubs are missing: run `make proto`") from error
        raise
    code: int = command.run(parsed, environment, interruptions)
    return code


def _fail(message: str, exit_code: int) -> int:
    print(f"tandem: {message}", file=sys.stderr)
    return exit_code
