"""`tandem up`: starts the services and leaves them running."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from tandem.cli.choices import settings_on_record
from tandem.cli.existing import usable_stack
from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import plan_stack
from tandem.cli.progress import Progress
from tandem.cli.settings import load_settings, with_flags
from tandem.cli.stack import Stack, previous_log
from tandem.cli.state import StackState, StateFile
from tandem.cli.variables import misspelt


def run(arguments: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Returns when every service is ready, or raises and leaves nothing running."""
    settings = load_settings(with_flags(arguments, environment))
    progress = Progress(Console(highlight=False))
    for line in misspelt(environment):
        progress.note(line)
    with StateFile(settings.home).locked():
        running = usable_stack(settings, progress.note, interruptions)
        if running is not None and running.complete():
            _say_what_runs(running, progress)
            return 0
        plan = plan_stack(settings)
        for service in running.dead() if running is not None else ():
            progress.note(
                f"{service.name} has died and is started again (its last log: {previous_log(Path(service.log))})"
            )
        Stack(plan, settings, "up", progress, interruptions, running).start()
    if not plan.services:
        progress.note(f"nothing to start: the orchestrator at {plan.orchestrator_address} is used as it is")
        return 0
    progress.note(f"orchestrator at {plan.orchestrator_address}, logs in {settings.logs}")
    if http := settings.environment.get("TANDEM_HTTP_LISTEN"):
        scheme = "https" if settings.environment.get("TANDEM_TLS_CERTIFICATE") else "http"
        progress.note(f"OpenAI's API and a page at {scheme}://{http}/")
    progress.note('`tandem generate "…"` talks to it, `tandem down` stops it')
    return 0


def _say_what_runs(running: StackState, progress: Progress) -> None:
    progress.note(f"already running at {running.orchestrator_address} (`tandem status` shows more)")
    if set_before := settings_on_record(running):
        progress.note(f"with {', '.join(f'{name}={value}' for name, value in set_before.items())}")
