"""Service processes that are forked from one which has imported torch and transformers already.

Importing them takes a service seven to ten seconds of the CPU, and the suite starts more than a hundred services. A forked one
is a process as any other (own pid, session, environment, signals, log); what it doesn't go through is the
interpreter's start, which `tests/cli` has with the real command lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

_PRELOAD = "tests.support.forked_services_preload"
# Read when a library is imported, so they can't come with the service.
_ENVIRONMENT_OF_IMPORTS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([_PRELOAD])


class ForkedService:
    """`python -m module arguments` in a process of its own; the methods are those of subprocess.Popen."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path, namespace: str = ""
    ) -> None:
        """In the network namespace of that name, if one is given."""
        arguments = (list(command), dict(environment), str(folder), str(log), namespace)
        self._process: ForkServerProcess = _CONTEXT.Process(target=_run, args=arguments, daemon=True)
        self._start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def _start(self) -> None:
        before = {name: os.environ.get(name) for name in _ENVIRONMENT_OF_IMPORTS}
        os.environ.update(_ENVIRONMENT_OF_IMPORTS)
        try:
            self._process.start()  # the first one starts the fork server
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def poll(self) -> int | None:
        """The exit status; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} did not end within {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To the process, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since
                os.kill(self.pid, number)


def _run(command: list[str], environment: dict[str, str], folder: str, log: str, namespace: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    if namespace:
        _enter(namespace)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = list(command)
    runpy.run_module(command[0], run_name="__main__", alter_sys=True)


def _enter(namespace: str) -> None:
    """This thread and all that it starts; `os.setns` is there from Python 3.12 on."""
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(there, _NEW_NETWORK) != 0:
        raise OSError(ctypes.get_errno(), f"the network namespace {namespace} can't be entered")
    os.close(there)
