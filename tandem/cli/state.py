"""What a stack consists of while it runs, on disk, so that a later command can find and stop it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from tandem.cli.errors import CliError
from tandem.cli.processes import ProcessIdentity, is_alive

_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class RunningService:
    """A process that was started."""

    name: str
    process: ProcessIdentity
    address: str
    log: str
    detail: str


@dataclasses.dataclass(frozen=True, slots=True)
class StackState:
    """What was started by whom. `choices` are the settings that tell one stack from another."""

    kind: Literal["up", "demo"]
    starter: ProcessIdentity
    orchestrator_address: str
    choices: dict[str, str]
    services: tuple[RunningService, ...] = ()

    def alive(self) -> tuple[RunningService, ...]:
        """The services that still run."""
        return tuple(service for service in self.services if is_alive(service.process))

    def dead(self) -> tuple[RunningService, ...]:
        """The services that don't any more."""
        return tuple(service for service in self.services if not is_alive(service.process))

    def complete(self) -> bool:
        """Whether all of them do."""
        return bool(self.services) and not self.dead()

    def with_service(self, service: RunningService) -> StackState:
        """The state after one more start, perhaps in the place of one that has died."""
        kept = {each.name: each for each in self.services} | {service.name: service}
        return dataclasses.replace(self, services=tuple(kept.values()))


class StateFile:
    """The state of the stack in one home folder."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.path = home / "state.json"

    def load(self) -> StackState | None:
        """The recorded state, whatever still runs of it; None if nothing was started."""
        try:
            return _from_json(json.loads(self.path.read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CliError(
                f"{self.path} can't be read ({error}): end the processes it names, if any, and remove it"
            ) from error

    def save(self, state: StackState) -> None:
        """Replaces the state in one step: a reader never sees half of it."""
        self._home.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({"version": _VERSION, **dataclasses.asdict(state)}, indent=2) + "\n")
        new.replace(self.path)

    def remove(self) -> None:
        """Forgets the stack."""
        self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Held while services are started or stopped. The kernel frees it when its holder dies."""
        self._home.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._home / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise CliError(
                    f"another tandem command is starting or stopping services in {self._home}; try again when it is done"
                ) from error
            yield
        finally:
            os.close(handle)


def _from_json(data: Any) -> StackState:
    if data["version"] != _VERSION:
        raise ValueError(f"version {data['version']}, expected {_VERSION}")
    return StackState(
        kind=data["kind"],
        starter=ProcessIdentity(**data["starter"]),
        orchestrator_address=data["orchestrator_address"],
        choices=dict(data["choices"]),
        services=tuple(
            RunningService(**{**service, "process": ProcessIdentity(**service["process"])})
            for service in data["services"]
        ),
    )
