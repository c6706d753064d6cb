"""A failed call in one line for a person."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tandem.cli.errors import CliError
from tandem.cli.request import FLAGS
from tandem.client import DeadlineError, TandemError, UnavailableError


@contextlib.contextmanager
def calls_explained(address: str) -> Iterator[None]:
    """Turns the errors of calls to `address` into a CliError."""
    try:
        yield
    except TandemError as error:
        raise CliError(describe(error, address)) from error


def describe(error: TandemError, address: str) -> str:
    """Status, message, the fields at fault and their flags where these are called otherwise, and what to do where that is known."""
    text = f"{error.code.name}: {error.message}"
    violations = "; ".join(f"{violation.field}: {violation.description}" for violation in error.violations)
    if violations and violations not in text:
        text += f" ({violations})"
    if flags := sorted({FLAGS[violation.field] for violation in error.violations if violation.field in FLAGS}):
        text += f" ({', '.join(flags)})"
    if error.retry_after_seconds is not None:
        text += f" (try again in {error.retry_after_seconds:g} s)"
    # The transport's own words when nobody listens; a service that answers UNAVAILABLE says why itself.
    if isinstance(error, UnavailableError) and "connect" in error.message.lower():
        return f"UNAVAILABLE: no orchestrator answers at {address}; `tandem up` starts one, `tandem status` shows what runs"
    if isinstance(error, DeadlineError) or "deadline exceeded" in error.message.lower():
        return "DEADLINE_EXCEEDED: the time of --timeout is up before the answer is whole"
    return text
