"""The thread that owns a model: commands reach it through a queue, steps run between them.

The event loop must answer while a forward runs, and a forward must not wait for the loop: hence one thread with one
queue. (A one-thread executor locks into half batches: each result's successor arrives just after the next step began.)
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class StepThread:
    """Runs commands in order and, while there is work, steps.

    `step` says how long the next one may wait for a command: 0 where there is work to do, None where there is none.
    """

    def __init__(self, name: str, step: Callable[[], float | None], on_death: Callable[[BaseException], None]) -> None:
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._step = step
        self._on_death = on_death
        # A daemon: a forward that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Runs `command` in the thread, before the next step; from any thread."""
        self._inbox.put(command)

    def stop(self, timeout: float) -> bool:
        """Ends the thread after the step that runs; waits for it at most `timeout` seconds, and says whether it has ended."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            seconds: float | None = None
            while self._drain(seconds):
                seconds = self._step()
        except BaseException as error:  # reported, and the end of this thread in any case
            logger.critical("the step thread died", exc_info=True)
            self._on_death(error)

    def _drain(self, seconds: float | None) -> bool:
        """Runs the commands that are there, after waiting for one so long, None: for ever; False when the thread is to end."""
        try:
            command = self._inbox.get(seconds != 0, seconds)
            while command is not None:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False
