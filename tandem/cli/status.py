"""`tandem status`: what runs, and whether it is ready."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tandem.cli.choices import recorded_files
from tandem.cli.encryption import from_record
from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import Endpoint
from tandem.cli.processes import is_alive, uptime_seconds
from tandem.cli.readiness import open_probe
from tandem.cli.settings import stack_home, with_flags
from tandem.cli.state import RunningService, StackState, StateFile

# As `systemctl status` and the LSB init scripts have it.
NOT_RUNNING = 3
PROBE_SECONDS = 5.0
"""Each service is asked once: on a busy machine an answer may take its time."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    service: str
    state: str
    address: str
    pid: int
    uptime_seconds: int
    detail: str
    log: str


def run(arguments: argparse.Namespace, environment: Mapping[str, str], interruptions: Interruptions) -> int:
    """Exit code 0 if everything that was started is ready, else 3."""
    state = StateFile(stack_home(with_flags(arguments, environment))).load()
    rows = (
        [_row(service, recorded_files(state), interruptions) for service in state.services] if state is not None else []
    )
    ready = bool(rows) and all(row.state == "ready" for row in rows)
    if arguments.json:
        print(json.dumps({"ready": ready, "services": [dataclasses.asdict(row) for row in rows]}))
    else:
        _print(Console(highlight=False), state, rows)
    return 0 if ready else NOT_RUNNING


def _row(service: RunningService, files: Mapping[str, str], interruptions: Interruptions) -> _Row:
    alive = is_alive(service.process)
    return _Row(
        service=service.name,
        state=_state(service, files, interruptions) if alive else "dead",
        address=service.address,
        pid=service.process.pid,
        uptime_seconds=int(uptime_seconds(service.process)) if alive else 0,
        detail=service.detail,
        log=service.log,
    )


def _state(service: RunningService, files: Mapping[str, str], interruptions: Interruptions) -> str:
    if service.name == "redis":
        endpoint = Endpoint("redis", (f"redis://{service.address}/0",))
    else:
        endpoint = Endpoint("grpc", (service.address,), from_record(files, service.name))
    try:
        with interruptions.held(), open_probe(endpoint, interruptions, PROBE_SECONDS) as probe:
            return probe().reason or "ready"
    except OSError as error:
        return f"can't be asked: {error}"


def _print(console: Console, state: StackState | None, rows: list[_Row]) -> None:
    if state is None:
        console.print("nothing is running: `tandem up` starts the services")
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("service", "state", "address", "pid", "up", ""):
        # An address is to be copied: never cut it.
        table.add_column(title, no_wrap=title != "")
    for row in rows:
        colour = "green" if row.state == "ready" else "red" if row.state == "dead" else "yellow"
        minutes, seconds = divmod(row.uptime_seconds, 60)
        uptime = f"{minutes}:{seconds:02}"
        table.add_row(row.service, f"[{colour}]{row.state}", row.address, str(row.pid), uptime, row.detail)
    console.print(table)
    for name, value in state.choices.items():
        if name.startswith("external"):
            console.print(f"{name}: {value}", markup=False)
    console.print(
        f"logs: {', '.join(sorted({str(Path(row.log).parent) for row in rows}))}", markup=False, soft_wrap=True
    )
