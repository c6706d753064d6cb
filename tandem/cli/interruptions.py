"""Ctrl-C, SIGTERM and SIGHUP: where they end what runs, and where that has to wait.

Python lets a signal's handler raise between any two steps of the main thread, and there is code that can't stand it. gRPC's own Python is such
code: an exception in the midst of its conditions leaves a lock of the channel held, and the next call, or the program's end, waits for
that lock for ever. So is what starts and stops processes: one that isn't on record yet would be left behind.

    with interruptions.held():                              # nothing is raised in here, it is noted
        call = start()
        with interruptions.cancelling(call.cancel):         # but ends what is waited for
            for each in call:
                with interruptions.released():              # and is raised here, or where the hold ends
                    show(each)
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import FrameType, TracebackType
from typing import Any, NamedTuple

_NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""By rank: who is told to end by the system has no more use for a Ctrl-C."""


class Interruptions:
    """The signals that end a command. They arrive once `installed`, in the main thread, which alone may call this.

    Outside of a hold the first one is raised, as KeyboardInterrupt or SystemExit, and the next one ends the process at once. In a hold they
    are noted. In a release, which is a part of a hold, the first one is raised; those after it are noted, so that nothing on the way out
    is disturbed.
    """

    def __init__(self) -> None:
        self._phase = _Phase(holds=False, raises=True)
        self._noted: set[int] = set()
        self._wake: SimpleQueue[bool] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Puts the handlers in place; they stay for a process that one of them has ended, down to its last step."""
        before: dict[int, Any] = {}
        for number in _NUMBERS:
            # A shell's background job is deaf to Ctrl-C, and Python leaves it so.
            if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, self._arrive)
        yield
        for installed, handler in before.items():
            signal.signal(installed, signal.SIG_DFL if handler is None else handler)

    def leave_ctrl_c_to_python(self) -> None:
        """For asyncio, which cancels its tasks in order at a Ctrl-C, but only where nobody else has a handler."""
        if signal.getsignal(signal.SIGINT) == self._arrive:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def noted(self) -> bool:
        """Whether anything has arrived in this hold and was not raised yet."""
        return bool(self._noted)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """What arrives in here is noted. It is raised at the end, unless another hold is around this one."""
        return _Turn(self, raises=False)

    def released(self) -> contextlib.AbstractContextManager[None]:
        """Within a hold: what was noted is raised at once, and so is the first one that arrives in here."""
        return _Turn(self, raises=True)

    def forget_ctrl_c(self) -> None:
        """A Ctrl-C that was noted has had its effect."""
        self._noted.discard(signal.SIGINT)

    @contextlib.contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Within a hold: something noted calls `cancel`, in a thread of its own, so that what is waited for in here ends."""
        wake: SimpleQueue[bool] = SimpleQueue()
        watcher = threading.Thread(target=_cancel_when_woken, args=(wake, cancel), daemon=True)
        self._wake = wake
        if self._noted:
            wake.put(True)
        watcher.start()
        try:
            yield
        finally:
            self._wake = None
            wake.put(False)
            watcher.join()

    def enter(self, *, raises: bool) -> _Phase:
        """Begins a hold, or a release; returns what was before."""
        before = self._phase
        self._phase = _Phase(holds=before.holds or not raises, raises=raises)
        self._raise_noted()
        return before

    def leave(self, before: _Phase, kind: type[BaseException] | None) -> None:
        """Ends it, by an exception of this kind if there is one."""
        ended = kind is not None and issubclass(kind, (KeyboardInterrupt, SystemExit))
        if kind is not None and ended:
            # It is on its way already; what came after it only mattered to who looked at `noted`. But the system's word outranks a Ctrl-C.
            self._noted.intersection_update(() if issubclass(kind, SystemExit) else (signal.SIGTERM, signal.SIGHUP))
        self._phase = _Phase(before.holds, before.raises and not ended)
        self._raise_noted()

    def _raise_noted(self) -> None:
        if self._phase == _HELD:
            return
        for number in _NUMBERS:
            if number in self._noted:
                self._noted.clear()
                self._arrive(number, None)

    def _arrive(self, number: int, _: FrameType | None) -> None:
        """The handler: everything in here may interrupt any other method."""
        if self._phase == _HELD:
            self._noted.add(number)
            wake = self._wake
            if wake is not None:
                wake.put(True)  # the only queue that may interrupt its own `put`
        elif self._phase.raises:
            self._phase = self._phase._replace(raises=False)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class _Phase(NamedTuple):
    """What becomes of a signal: raised, or else noted where there is a hold, or else the end."""

    holds: bool
    raises: bool


_HELD = _Phase(holds=True, raises=False)


class _Turn(contextlib.AbstractContextManager[None]):
    """A hold or a release. No generator: one that is interrupted on its way to its `finally` gets there at any time later."""

    def __init__(self, interruptions: Interruptions, *, raises: bool) -> None:
        self._interruptions = interruptions
        self._raises = raises
        self._before = _HELD

    def __enter__(self) -> None:
        self._before = self._interruptions.enter(raises=self._raises)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interruptions.leave(self._before, kind)


def _cancel_when_woken(wake: SimpleQueue[bool], cancel: Callable[[], object]) -> None:
    if wake.get():
        cancel()
