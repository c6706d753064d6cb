"""How far a measurement is, for whoever watches: a bar on the terminal's error stream, and nothing where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Step = TypeVar("Step")


def steps(each: Sequence[Step], name: str) -> Iterable[Step]:
    """The steps themselves, one by one."""
    # Redrawn twice a second by a thread, which takes nothing worth mentioning from what is measured.
    return track(
        each, name, console=Console(stderr=True), transient=True, refresh_per_second=2, disable=not sys.stderr.isatty()
    )
