"""What to make of a stack that is on record when a command wants to start one."""

from __future__ import annotations

from collections.abc import Callable

from tandem.cli.choices import choices, differing
from tandem.cli.errors import CliError
from tandem.cli.interruptions import Interruptions
from tandem.cli.processes import is_alive
from tandem.cli.settings import StackSettings
from tandem.cli.stack import stop_services
from tandem.cli.state import StackState, StateFile


def usable_stack(
    settings: StackSettings, note: Callable[[str], None], interruptions: Interruptions
) -> StackState | None:
    """The stack that `tandem up` left running, if it is what was asked for, though parts of it may have died; None if there is none.

    Raises CliError where starting another one would be a surprise. What a killed demo left behind is cleared away.
    """
    file = StateFile(settings.home)
    state = file.load()
    if state is None:
        return None
    if not state.alive():
        file.remove()
        return None
    if state.kind == "demo":
        if is_alive(state.starter):
            raise CliError(
                f"a demo is running (pid {state.starter.pid}): wait for it, or set TANDEM_HOME to another folder"
            )
        note("stopping what a demo that was killed left behind")
        stop_services(state.services, state.choices, note, interruptions)
        file.remove()
        return None
    # What is started beside running services has to be what it was before.
    other = differing(state.choices, choices(settings), all_of_them=not state.complete())
    if other:
        raise CliError("\n  ".join(["services with other settings are running: run `tandem down` first", *other]))
    return state
