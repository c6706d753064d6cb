"""The supervisor: starts a planned stack, waits until it is ready, and stops it again.

Nothing it starts is ever left behind by accident: a failure or an interruption on the way stops what was started so far,
and every process is on record before the next one starts, so that `tandem down` finds it even after a kill -9.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from tandem.cli.choices import SETTING, choices
from tandem.cli.errors import CliError
from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import ServiceSpec, StackPlan
from tandem.cli.ports import require_free
from tandem.cli.processes import ProcessIdentity, identify, is_alive, kill, spawn, stop
from tandem.cli.progress import Progress
from tandem.cli.readiness import Probe, open_probe
from tandem.cli.settings import StackSettings
from tandem.cli.state import RunningService, StackState, StateFile

DEFAULT_DRAIN_SECONDS = 20.0
"""The orchestrator's; a worker's is shorter."""
LONGEST_DRAIN_SECONDS = 3600.0
CLOSING_SECONDS = 12.0
"""What a service takes at most to end once it has drained; longer is a hang."""
_POLL_SECONDS = 0.1
_LOG_LINES = 20


class Stack:
    """A stack being started, running, or being stopped by this command; or what is missing of one that runs."""

    def __init__(
        self,
        plan: StackPlan,
        settings: StackSettings,
        kind: Literal["up", "demo"],
        progress: Progress,
        interruptions: Interruptions,
        before: StackState | None = None,
    ) -> None:
        """What runs of `before` is left as it is."""
        starter = identify(os.getpid())
        assert starter is not None
        self._plan = plan
        self._settings = settings
        self._progress = progress
        self._interruptions = interruptions
        self._file = StateFile(settings.home)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._before = before
        running = {service.name for service in before.alive()} if before is not None else set()
        self._to_start = [spec for spec in plan.services if spec.name not in running]
        self.state = before or StackState(kind, starter, plan.orchestrator_address, choices(settings))

    def start(self) -> None:
        """Starts every service and waits for readiness; on any failure stops what it has started."""
        with self._interruptions.held():
            try:
                with self._interruptions.released():
                    self._require_ports()
                self._settings.logs.mkdir(parents=True, exist_ok=True)
                for spec in self._to_start:
                    self._start_one(spec)
                self._wait_ready()
                self._check_children()
                with self._interruptions.released():
                    pass  # the last moment at which it stops what has been started
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Stops what this stack started."""
        with self._interruptions.held():
            started = [service for service in self.state.services if service.name in self._children]
            stop_services(started, self.state.choices, self._progress.note, self._interruptions)
            for child in self._children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=1)
            if self._before is not None:
                self._file.save(self._before)
            elif self.state.services:
                self._file.remove()

    def _require_ports(self) -> None:
        for spec in self._to_start:
            for variable, address in {spec.listen_variable: spec.listen, **spec.further_listens}.items():
                require_free(address, spec.name, variable, self._progress.note)

    def _start_one(self, spec: ServiceSpec) -> None:
        log = self._settings.logs / f"{spec.name}.log"
        _keep_previous(log)
        environment = {**self._settings.environment, **spec.environment}
        try:
            child = spawn(
                spec.command, environment, self._settings.root, log, die_with_parent=self.state.kind == "demo"
            )
        except OSError as error:
            raise CliError(f"{spec.name} can't be started: {error}") from error
        self._children[spec.name] = child
        # A child that has ended already is a zombie, which has no identity; its exit is reported by the wait below.
        identity = identify(child.pid) or ProcessIdentity(child.pid, "ended")
        self.state = self.state.with_service(
            RunningService(spec.name, identity, str(spec.listen.reachable()), str(log), spec.detail)
        )
        self._file.save(self.state)

    def _wait_ready(self) -> None:
        endpoints = {spec.name: spec.endpoint for spec in self._plan.services}
        external = {each.name: each.endpoint for each in self._plan.external}
        endpoints |= external
        deadline = time.monotonic() + self._settings.ready_timeout_seconds
        with contextlib.ExitStack() as connections, self._progress:
            waiting: dict[str, Probe] = {}
            for name, endpoint in endpoints.items():
                waiting[name] = connections.enter_context(open_probe(endpoint, self._interruptions))
                self._progress.begin(name, "external" if name in external else "")
            while waiting:
                self._check_children()
                for name, probe in list(waiting.items()):
                    answer = probe()
                    if answer.final:
                        ends = [self._log_end(name)] if name in self._children else []
                        raise CliError("\n".join([f"{name} won't be ready: {answer.reason}", *ends]))
                    if answer.reason:
                        self._progress.update(name, answer.reason)
                    else:
                        self._progress.ready(name, answer.note)
                        del waiting[name]
                if waiting and time.monotonic() >= deadline:
                    raise self._not_ready(sorted(waiting))
                with self._interruptions.released():
                    time.sleep(_POLL_SECONDS if waiting else 0)

    def _check_children(self) -> None:
        """Raises CliError with the end of the log if a service has exited."""
        for name, child in self._children.items():
            code = child.poll()
            if code is not None:
                how = f"was ended by signal {-code}" if code < 0 else f"exited with status {code}"
                raise CliError(f"{name} {how} while starting\n{self._log_end(name)}")

    def _not_ready(self, names: Sequence[str]) -> CliError:
        limit = self._settings.ready_timeout_seconds
        ends = [self._log_end(name) for name in names if name in self._children]
        external = [f"{name} was there before: is it running?" for name in names if name not in self._children]
        return CliError("\n".join([f"not ready within {limit:g} s: {', '.join(names)}", *external, *ends]))

    def _log_end(self, name: str) -> str:
        log = self._settings.logs / f"{name}.log"
        return "\n".join([f"the end of {log}:", *(f"  | {line}" for line in last_lines(log, _LOG_LINES))])


def grace_seconds(started_with: Mapping[str, str]) -> float:
    """How long services that were started with these choices may take to end: requests that run go on for a while."""
    try:
        drain = float(started_with.get(f"{SETTING}TANDEM_DRAIN_SECONDS", ""))
    except ValueError:
        drain = DEFAULT_DRAIN_SECONDS
    if not 0.0 <= drain <= LONGEST_DRAIN_SECONDS:  # no service has started with it
        drain = DEFAULT_DRAIN_SECONDS
    return drain + CLOSING_SECONDS


def stop_services(
    services: Iterable[RunningService],
    started_with: Mapping[str, str],
    note: Callable[[str], None],
    interruptions: Interruptions,
) -> None:
    """Stops services, callers before what they call. A Ctrl-C meanwhile, the second one of a demo, kills what is left."""
    grace = grace_seconds(started_with)
    left = [service for service in reversed(tuple(services)) if is_alive(service.process)]
    with interruptions.held():
        try:
            for service in left:
                ended = stop(service.process, grace, hurry=lambda: interruptions.noted)
                if not ended and not interruptions.noted:
                    note(f"{service.name} did not stop within {grace:g} s and was killed; see {service.log}")
        except BaseException:
            for service in left:
                kill(service.process)
            raise


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log, or a line that says that there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[-count:] or ["(empty)"]


def previous_log(log: Path) -> Path:
    """Where the log of the run before stays readable beside the new one."""
    return log.with_suffix(".log.1")


def _keep_previous(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        log.replace(previous_log(log))
