"""Starting, recognising and stopping processes that outlive the command that started them."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process for sure: a pid is used again after its process has died, a pid with its start is not."""

    pid: int
    started: str


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has this pid now, or None if there is none. A zombie is none: it only waits to be reaped."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return ProcessIdentity(pid, _start_mark(process))
    except (psutil.Error, OSError):
        return None


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly this process still runs."""
    return identify(identity.pid) == identity


def uptime_seconds(identity: ProcessIdentity) -> float:
    """How long the process has run."""
    try:
        return max(0.0, time.time() - psutil.Process(identity.pid).create_time())
    except psutil.Error:
        return 0.0


def spawn(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, *, die_with_parent: bool
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, so that a Ctrl-C in the terminal reaches only the one who starts it.

    With `die_with_parent` the kernel ends it when the caller dies without a word (Linux only).
    """
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent_hook() if die_with_parent else None,  # noqa: PLW1509 (no other threads yet)
        )


def stop(identity: ProcessIdentity, grace_seconds: float, *, hurry: Callable[[], bool] = lambda: False) -> bool:
    """Asks the process to end, and kills its whole group when it takes too long, or once there is a hurry; returns whether it ended
    by itself."""
    if not _signal(identity, signal.SIGTERM):
        return True
    ended = wait_dead(identity, grace_seconds, hurry)
    if not ended:
        kill(identity)
        wait_dead(identity, grace_seconds)
    return ended


def kill(identity: ProcessIdentity) -> None:
    """Ends the process and all it has started, at once."""
    if is_alive(identity):
        try:
            # The leader of a session: its pid is the group's.
            os.killpg(identity.pid, signal.SIGKILL)
        except ProcessLookupError:
            _signal(identity, signal.SIGKILL)


def wait_dead(identity: ProcessIdentity, seconds: float, hurry: Callable[[], bool] = lambda: False) -> bool:
    """Waits until the process is gone; False if it still runs after `seconds`, or when there is a hurry."""
    deadline = time.monotonic() + seconds
    while is_alive(identity):
        if time.monotonic() >= deadline or hurry():
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    if not is_alive(identity):
        return False
    try:
        os.kill(identity.pid, number)
    except ProcessLookupError:
        return False
    return True


def _start_mark(process: psutil.Process) -> str:
    """When the process started, in a form that doesn't change when the clock is set."""
    if sys.platform != "linux":
        return f"{process.create_time():.3f}"
    # The name in parentheses may hold spaces; the start in ticks since boot is field 22.
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{fields[19]}"


def _die_with_parent_hook() -> Callable[[], None] | None:
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def hook() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return hook
