"""`tandem down`: stops what `tandem up` started, and nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich.console import Console

from tandem.cli.interruptions import Interruptions
from tandem.cli.progress import Progress
from tandem.cli.settings import stack_home, with_flags
from tandem.cli.stack import stop_services
from tandem.cli.state import RunningService, StateFile


def run(arguments: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Processes are recognised by pid and start time; one that only has the pid of another is left alone."""
    progress = Progress(Console(highlight=False))
    file = StateFile(stack_home(with_flags(arguments, environment)))
    with file.locked(), interruptions.held():
        state = file.load()
        alive: tuple[RunningService, ...] = ()
        if state is not None:
            alive = state.alive()
            stop_services(alive, state.choices, progress.note, interruptions)
        file.remove()
    names = ", ".join(service.name for service in reversed(alive))
    progress.note(f"stopped {names}" if names else "nothing was running")
    return 0
