"""Shows how far the services are: a moving table on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_SILENCE_SECONDS = 10.0
"""Without a moving table, what is waited for is said so often."""


class Progress:
    """The state of each service while a command waits for all of them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._waiting: dict[str, str] = {}
        self._said_at = time.monotonic()
        self._bars = RichProgress(
            SpinnerColumn(finished_text="[green]✓" if console.encoding.startswith("utf") else "*"),
            TextColumn("{task.description:<13}"),
            TextColumn("{task.fields[state]:<30}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, name: str, detail: str) -> None:
        """A service is waited for from now on."""
        self._started[name] = time.monotonic()
        self._tasks[name] = self._bars.add_task(name, total=1, state=detail or "starting")

    def update(self, name: str, state: str) -> None:
        """What the service does instead of being ready."""
        self._bars.update(self._tasks[name], state=state)
        self._waiting[name] = state
        if not self._console.is_terminal and time.monotonic() - self._said_at >= _SILENCE_SECONDS:
            self._said_at = time.monotonic()
            self.note("waiting for " + ", ".join(f"{each} ({why})" for each, why in self._waiting.items()))

    def ready(self, name: str, note: str) -> None:
        """The service is ready; the note is what else it says, if anything."""
        said = f", {note}" if note else ""
        self._bars.update(self._tasks[name], completed=1, state=f"ready{said}")
        self._waiting.pop(name, None)
        if not self._console.is_terminal:
            self.note(f"{name} ready after {time.monotonic() - self._started[name]:.1f} s{said}")

    def note(self, line: str) -> None:
        """A line of its own, above the table."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
