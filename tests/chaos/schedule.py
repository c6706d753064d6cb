"""Random faults under load, from a seed: `python -m tests.chaos.schedule --requests 500 --seed 7` (`make chaos`).

Two processes of each service; the store, a draft and a target are behind proxies, and the other draft and target in networks of
their own, where this machine allows that. Callers ask, and resume elsewhere whatever
breaks, with the tokens they have; one fault after the other is injected and healed. In the end every text must be that of an
undisturbed run, the store must hold what the caller was sent, each commit have raised its epoch by one, and every cache slot
must be free. Whatever else may go wrong is in the report.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import redis

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tandem.v1.sampling_pb2 import ACCEPTANCE_METHOD_COUPLED
from tandem.wire import encode_ids
from tests.chaos.epochs import EpochWatch
from tests.support import network
from tests.support.generation import gather, request
from tests.support.network import Link
from tests.support.proxy_thread import ProxyThread
from tests.support.services import MODELS, ServiceProcess, Stack, running_stack
from tests.support.tcp_proxy import Direction, TcpProxy

SLOTS = 8
CALLERS = 4
PATIENCE_SECONDS = 90.0
PROMPTS = ([5, 6, 7], [9, 8], [100, 3, 200, 4])
GAMMAS = (0, 2, 5)
ENVIRONMENT = {
    "TANDEM_TARGET_SLOTS": str(SLOTS),
    "TANDEM_DRAFT_SLOTS": str(SLOTS),
    "TANDEM_DRAFT_BACKOFF_SECONDS": "0.2",
    "TANDEM_DRAFT_TIMEOUT_SECONDS": "1",
    "TANDEM_DRAIN_SECONDS": "5",
    "TANDEM_TARGET_TIMEOUT_SECONDS": "3",
}
METHODS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 11, "acceptance_method": ACCEPTANCE_METHOD_COUPLED},
)
EDGE_FAULTS: dict[str, tuple[Callable[[TcpProxy], object], Callable[[TcpProxy], object] | None]] = {
    "connections reset": (TcpProxy.reset, None),
    "cut": (lambda proxy: proxy.cut(), lambda proxy: proxy.cut(silent=False)),
    "stalled": (TcpProxy.stall, TcpProxy.resume),
    "slow": (lambda proxy: proxy.delay(0.05), lambda proxy: proxy.delay(0)),
    "thin": (lambda proxy: proxy.limit_bandwidth(5_000), lambda proxy: proxy.limit_bandwidth(None)),
    "half closed": (lambda proxy: proxy.half_close(Direction.TO_CLIENT), None),
    "a reply lost": (lambda proxy: proxy.lose_next(Direction.TO_CLIENT), None),
}
NETEM = {"lossy": ("loss", "20%"), "late": ("delay", "50ms", "20ms")}
# The tokens so far are committed, and another orchestrator goes on.
GOES_ON_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass
class Report:
    """What happened."""

    seed: int
    faults: Counter[str] = field(default_factory=Counter)
    injected: list[tuple[str, float, float]] = field(default_factory=list)
    """Each of these: which, when it began, and when the next one did; by the monotonic clock."""
    failed_lives: list[tuple[float, float]] = field(default_factory=list)
    """Of each request that failed: when it began, and when it failed."""
    asked: int = 0
    finished: int = 0
    commits: int = 0
    not_run: list[str] = field(default_factory=list)
    """Kinds of faults that this machine can't have, and why."""
    resumptions: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def survived(self) -> Counter[str]:
        """Of the faults: no request that was under way at the time failed, however long afterwards."""
        return Counter(
            name
            for name, began, ended in self.injected
            if not any(asked <= ended and began <= failed for asked, failed in self.failed_lives)
        )

    def text(self) -> str:
        """For people."""
        lines = [
            f"seed {self.seed}: {self.finished} requests finished in {self.commits} commits, {len(self.failures)} failed"
        ]
        lines.append(f"  {self.faults.total()} faults injected, {self.survived.total()} survived")
        lines += [
            f"  fault injected {count:4d} x, survived {self.survived[name]:4d} x: {name}"
            for name, count in sorted(self.faults.items())
        ]
        lines += [f"  went on after  {count:4d} x {name}" for name, count in sorted(self.resumptions.items())]
        lines += [f"  not run: {reason}" for reason in self.not_run]
        return "\n".join([*lines, *(f"  FAILED {failure}" for failure in self.failures)])


class Caller:
    """One request, over as many calls as it takes."""

    def __init__(self, stack: Stack, report: Report, number: int, rng: random.Random) -> None:
        self._stack, self._report, self._number, self._rng = stack, report, number, rng
        self.request_id = f"chaos-{number}"
        self.ids: list[int] = []
        self.text = ""
        self._known = False
        self._began = time.monotonic()

    def run(self, content: dict[str, Any], prompt: list[int], expected: tuple[Any, ...]) -> None:
        """Until the end; whatever is not as it should be goes to the report."""
        deadline = self._began + PATIENCE_SECONDS
        where = self._rng.randrange(len(self._stack.orchestrators))
        attempt = 0
        while time.monotonic() < deadline:
            try:
                if self._call(self._stack.orchestrators[where], content, prompt):
                    self._check(prompt, expected)
                    return
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                if code is grpc.StatusCode.NOT_FOUND and not self.ids:
                    # It was never stored, or its caller was gone before it knew: a new request.
                    self._known, attempt = False, attempt + 1
                    self.request_id = f"chaos-{self._number}-{attempt}"
                elif code is grpc.StatusCode.ALREADY_EXISTS and not self._known:
                    self._known = True
                elif code not in GOES_ON_ELSEWHERE:
                    self._fail(f"{code.name}: {error.details()}")  # type: ignore[attr-defined]
                    return
                else:
                    self._known = self._known or code is not grpc.StatusCode.RESOURCE_EXHAUSTED
                self._report.resumptions[code.name] += 1
            where = (where + 1) % len(self._stack.orchestrators)
            time.sleep(0.05)
        self._fail(f"not finished after {PATIENCE_SECONDS:g} s, with {len(self.ids)} tokens")

    def _call(self, orchestrator: ServiceProcess, content: dict[str, Any], prompt: list[int]) -> bool:
        if self._known:
            sent = api.GenerateRequest(request_id=self.request_id, token_offset=len(self.ids))
        else:
            sent = request(prompt, request_id=self.request_id, **content)
        with orchestrator.channel() as channel:
            # A paused orchestrator says nothing: the caller's patience ends the call.
            for response in orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(sent, timeout=6):
                self._known = True
                self.ids += [token.token_id for token in response.tokens]
                self.text += response.text
                if response.HasField("finish"):
                    return True
        return False

    def _check(self, prompt: list[int], expected: tuple[Any, ...]) -> None:
        store = redis.Redis.from_url(self._stack.redis_url)
        key = f"tandem:{{{self.request_id}}}"
        stored = store.get(f"{key}:tokens")
        status, epoch = store.hmget(f"{key}:state", ["status", "epoch"])
        if (self.ids, self.text) != expected:
            self._fail(f"another text: {self.ids}")
        elif stored != encode_ids([*prompt, *self.ids]):
            self._fail("the store holds something else than the stream")
        elif status != b"finished" or not 1 <= int(epoch) <= len(self.ids):
            self._fail(f"the store says {status!r} at epoch {epoch!r}")
        else:
            self._report.finished += 1

    def _fail(self, problem: str) -> None:
        self._report.failures.append(f"{self.request_id}: {problem}")
        self._report.failed_lives.append((self._began, time.monotonic()))


class Chaos:
    """The faults: each is injected, lasts for a while, and is healed."""

    def __init__(self, stack: Stack, rng: random.Random, report: Report) -> None:
        self._stack, self._rng, self._report = stack, rng, report
        self._faults: dict[str, Callable[[], None]] = {
            f"{name} {role}": self._of_service(action, services)
            for role, services in (
                ("draft", stack.drafts),
                ("target", stack.targets),
                ("orchestrator", stack.orchestrators),
            )
            for name, action in (("killed", self._kill), ("paused", self._pause), ("restarted", self._restart))
        }
        self._faults |= {
            "scripts flushed": lambda: redis.Redis.from_url(stack.redis_url).script_flush() and None,
        }
        assert stack.store_proxy is not None
        for edge, proxy in {"store": stack.store_proxy, **stack.worker_proxies}.items():
            for name, (begin, end) in EDGE_FAULTS.items():
                self._faults[f"edge to the {edge}: {name}"] = partial(self._at_edge, proxy, begin, end)
        for role, link in stack.links.items():
            self._faults[f"link to the {role}: down"] = partial(self._cut, link)
            if not network.netem_missing():
                for name, netem in NETEM.items():
                    self._faults[f"link to the {role}: {name}"] = partial(self._impair, link, netem)
        self._bag: list[str] = []

    def one(self) -> str:
        """The next fault, by name; every kind comes once before any comes again."""
        if not self._bag:
            self._bag = self._rng.sample(sorted(self._faults), len(self._faults))
        name = self._bag.pop()
        self._report.faults[name] += 1
        self._faults[name]()
        return name

    def _for_a_while(self) -> None:
        time.sleep(self._rng.uniform(0.2, 1.5))

    def _of_service(
        self, action: Callable[[ServiceProcess], None], services: list[ServiceProcess]
    ) -> Callable[[], None]:
        return lambda: action(self._rng.choice(services))

    def _kill(self, service: ServiceProcess) -> None:
        service.kill()
        self._for_a_while()
        service.start()
        service.wait_serving()

    def _pause(self, service: ServiceProcess) -> None:
        service.signal(signal.SIGSTOP)
        self._for_a_while()
        service.signal(signal.SIGCONT)

    def _restart(self, service: ServiceProcess) -> None:
        service.signal(signal.SIGTERM)
        status = service.wait(30)
        if status != 0:
            self._report.failures.append(f"{service.module} ended with {status}")
        service.start()
        service.wait_serving()

    def _at_edge(
        self, proxy: ProxyThread, begin: Callable[[TcpProxy], object], end: Callable[[TcpProxy], object] | None
    ) -> None:
        proxy.do(begin)
        self._for_a_while()
        if end is not None:
            proxy.do(end)

    def _cut(self, link: Link) -> None:
        link.cut()
        # Until long after its silence was noticed, or before.
        time.sleep(self._rng.uniform(0.2, 5.0))
        link.join()

    def _impair(self, link: Link, netem: Sequence[str]) -> None:
        link.impair(*netem)
        self._for_a_while()
        link.heal()


def _truths(stack: Stack, max_tokens: int) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Ids and text of each prompt by each method, decoded plainly and undisturbed."""
    with stack.orchestrators[-1].channel() as channel:  # not through the proxy
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        truths = {}
        for which, prompt in enumerate(PROMPTS):
            for method, fields in enumerate(METHODS):
                sent = request(prompt, num_speculative_tokens=0, max_tokens=max_tokens, ignore_eos=True, **fields)
                whole = gather(stub.Generate(sent, timeout=60))
                truths[which, method] = (whole.ids, whole.text)
    return truths


def _ledger_is_empty(stack: Stack, report: Report, max_tokens: int) -> None:
    """As many requests as there are slots run at once, none of them without the draft, and no state is left running. Not at once:
    benched drafts are tried again, and streams that broke are noticed."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while problem := _crowded(stack, max_tokens):
        if time.monotonic() > deadline:
            report.failures.append(f"afterwards: {problem}")
            return
        time.sleep(0.2)
    store = redis.Redis.from_url(stack.redis_url)
    running = [key for key in store.scan_iter("tandem:*:state") if store.hget(key, "status") != b"finished"]
    # A request that began anew because its first call was never answered may have been stored after all; it expires.
    known = {f"tandem:{{chaos-{number}}}:state".encode() for number in range(report.finished)}
    if leftover := [key for key in running if key in known and store.pttl(key) > 61_000]:  # type: ignore[operator]
        report.failures.append(f"afterwards: still running: {leftover}")


def _crowded(stack: Stack, max_tokens: int) -> str:
    """What goes wrong with as many requests at once as there are slots; empty if nothing does."""
    with stack.orchestrator.channel() as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        sent = request(PROMPTS[0], max_tokens=max_tokens, temperature=0.0, ignore_eos=True, num_speculative_tokens=2)
        calls = [stub.Generate(sent, timeout=60) for _ in range(SLOTS)]
        try:
            degraded = sum(gather(call).speculation.degraded_rounds for call in calls)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
    return f"{degraded} rounds without the draft" if degraded else ""


def run(
    folder: Path, seed: int, requests: int, max_tokens: int = 60, least_faults: int = 0, *, links: bool = True
) -> Report:
    """The whole of it; starts and stops everything. Callers go on beyond `requests` until there were `least_faults`. Without `links`
    the faults are the same on every machine."""
    report, rng = Report(seed), random.Random(seed)
    if links:
        report.not_run = list(dict.fromkeys(filter(None, (network.missing(), network.netem_missing()))))
    deployment = running_stack(
        folder,
        MODELS / "tiny-target",
        MODELS / "tiny-draft",
        ENVIRONMENT,
        replicas={"draft": 2, "target": 2, "orchestrator": 2},
        store_proxy=True,
        worker_proxies=True,
        linked=("draft", "target") if links and not network.missing() else (),
    )
    with deployment as stack, EpochWatch(stack.redis_url) as watch:
        truths = _truths(stack, max_tokens)
        lock = threading.Lock()

        def call() -> None:
            while True:
                with lock:
                    if report.asked >= requests and sum(report.faults.values()) >= least_faults:
                        return
                    number = report.asked
                    report.asked += 1
                its = random.Random(f"{seed}-{number}")
                which, method = its.randrange(len(PROMPTS)), its.randrange(len(METHODS))
                content = {
                    **METHODS[method],
                    "num_speculative_tokens": its.choice(GAMMAS),
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                }
                Caller(stack, report, number, its).run(content, PROMPTS[which], truths[which, method])

        callers = [threading.Thread(target=call, daemon=True) for _ in range(CALLERS)]
        for thread in callers:
            thread.start()
        chaos = Chaos(stack, rng, report)
        while any(thread.is_alive() for thread in callers):
            began, fault = time.monotonic(), chaos.one()
            time.sleep(rng.uniform(0.0, 0.3))
            report.injected.append((fault, began, time.monotonic()))
        for service in stack.services:
            service.wait_serving()
        _ledger_is_empty(stack, report, max_tokens)
    report.commits = watch.commits
    report.failures += watch.violations
    return report


def main() -> int:
    """Prints the report; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), arguments.seed, arguments.requests)
    print(report.text())
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
