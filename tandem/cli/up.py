"""`tandem up`: starts the services and leaves them running."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from rich.console import Console

from tandem.cli.existing import usable_stack
from tandem.cli.plan import plan_stack
from tandem.cli.progress import Progress
from tandem.cli.settings import load_settings, with_flags
from tandem.cli.stack import Stack
from tandem.cli.state import StateFile


def run(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Returns when every service is ready, or raises and leaves nothing running."""
    settings = load_settings(with_flags(arguments, environment))
    progress = Progress(Console(highlight=False))
    with StateFile(settings.home).locked():
        running = usable_stack(settings, progress.note)
        if running is not None:
            progress.note(f"already running at {running.orchestrator_address} (`tandem status` shows more)")
            return 0
        plan = plan_stack(settings)
        Stack(plan, settings, "up", progress).start()
    if not plan.services:
        progress.note(f"nothing to start: the orchestrator at {plan.orchestrator_address} is used as it is")
        return 0
    progress.note(f"orchestrator at {plan.orchestrator_address}, logs in {settings.logs}")
    if http := settings.environment.get("TANDEM_HTTP_LISTEN"):
        scheme = "https" if settings.environment.get("TANDEM_TLS_CERTIFICATE") else "http"
        progress.note(f"OpenAI's API and a page at {scheme}://{http}/")
    progress.note('`tandem generate "…"` talks to it, `tandem down` stops it')
    return 0
