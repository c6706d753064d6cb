"""The alarms and the dashboard: each alarm has a case that makes it fire; a real Prometheus scrapes the real services,
and what can be broken there is broken."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis
import yaml

from tandem.v1 import orchestrator_pb2_grpc
from tests.support.channels import open_channel
from tests.support.generation import gather, request
from tests.support.ports import free_port
from tests.support.services import MODELS, REPOSITORY, ServiceProcess, Stack, running_stack
from tests.support.tcp_proxy import Direction
from tests.telemetry.prometheus import DASHBOARD, Prometheus, needs_prometheus, rule_groups, running_prometheus
from tests.telemetry.scrape import scrape

CASES = Path(__file__).with_name("alert_cases.yaml")
NAMES = {rule["alert"] for group in rule_groups() for rule in group["rules"]}


def cased() -> set[str]:
    """The alarms that some case expects to fire."""
    tests = yaml.safe_load(CASES.read_text())["tests"]
    return {case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case.get("exp_alerts")}


def test_each_alarm_has_a_case_and_an_entry_in_the_manual() -> None:
    assert cased() == NAMES
    manual = (REPOSITORY / "docs" / "operations.md").read_text()
    assert [name for name in sorted(NAMES) if f"`{name}`" not in manual] == []


def test_each_metric_that_an_alarm_or_a_panel_names_is_one_that_is_served() -> None:
    """By the page, which is held to the code; promtool and Prometheus find out more, where they are."""
    page = (REPOSITORY / "docs" / "observability.md").read_text()
    defined = set(re.findall(r"^\| `(tandem_\w+)", page, re.MULTILINE))
    expressions = [rule["expr"] for group in rule_groups() for rule in group["rules"]]
    expressions += [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    ]
    used = {name for expression in expressions for name in re.findall(r"tandem_\w+", expression)}
    assert len(used) > 30
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in used} <= defined


@needs_prometheus
def test_cases(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    (tmp_path / "cases.yml").write_text(CASES.read_text())
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "cases.yml"]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def hurried() -> list[dict[str, Any]]:
    """The same alarms with a second for three minutes, ten minutes for a day, windows of at least 5 s, and as many fewer tokens."""
    groups = copy.deepcopy(rule_groups())
    for rule in (rule for group in groups for rule in group["rules"]):
        expression = re.sub(
            r"(\[|offset )(\d+)m", lambda found: f"{found[1]}{max(5, int(found[2]) // 3)}s", rule["expr"]
        )
        rule["expr"] = expression.replace("[1d]", "[600s]").replace("> 2000", f"> {2000 // 180}")
        rule["for"] = "1s"
    return groups


@dataclass(frozen=True)
class Watched:
    """A stack with a Prometheus beside it."""

    stack: Stack
    api: orchestrator_pb2_grpc.OrchestratorServiceStub
    prometheus: Prometheus


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("watched")
    metrics = {service: f"127.0.0.1:{free_port()}" for service in ("orchestrator", "draft", "target")}
    environment = {
        **{f"TANDEM_{service.upper()}_METRICS_LISTEN": address for service, address in metrics.items()},
        "TANDEM_MAX_RUNNING_REQUESTS": "1",
        "TANDEM_TARGET_RETRY_SECONDS": "1",
        "TANDEM_DRAFT_BACKOFF_SECONDS": "0.1",
        "TANDEM_DEBUG_INVARIANTS": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",  # nobody is there
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment, store_proxy=True) as stack,
        running_prometheus(folder, metrics, hurried()) as prometheus,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield Watched(stack, orchestrator_pb2_grpc.OrchestratorServiceStub(channel), prometheus)


def keep_asking(watched: Watched, stop: threading.Event, tokens: int = 60) -> None:
    """Requests one after the other; their errors are what is to be seen."""
    while not stop.is_set():
        try:
            gather(watched.api.Generate(request("def f(x):", max_tokens=tokens, num_speculative_tokens=4), timeout=20))
        except grpc.RpcError:
            stop.wait(0.1)


@pytest.fixture
def traffic(watched: Watched) -> Iterator[None]:
    """Three callers for the one place."""
    stop = threading.Event()
    callers = [threading.Thread(target=keep_asking, args=(watched, stop)) for _ in range(3)]
    for caller in callers:
        caller.start()
    yield
    stop.set()  # first, or they would ask for ever where the stack can't be restored
    watched.stack.restore()
    for caller in callers:
        caller.join()


def delay_commits(stack: Stack, seconds: float) -> None:
    assert stack.store_proxy is not None
    stack.store_proxy.do(lambda proxy: setattr(proxy.faults[Direction.TO_CLIENT], "delay", seconds))


def bad_draft(stack: Stack) -> ServiceProcess:
    """In the draft's place, once that is gone."""
    draft = stack.draft
    return ServiceProcess(draft.module, draft.address, draft.environment, draft.log, "a_draft_gone_bad")


@needs_prometheus
@pytest.mark.usefixtures("traffic")
def test_each_alarm_fires_when_what_it_watches_breaks(watched: Watched) -> None:
    stack, fired = watched.stack, set[str]()

    def fires(*alarms: str) -> None:
        watched.prometheus.wait_firing({f"Tandem{alarm}" for alarm in alarms}, 120)
        fired.update(f"Tandem{alarm}" for alarm in alarms)

    # Three callers for one place, no collector for the spans, a store that is far.
    delay_commits(stack, 0.15)
    fires("QueueGrows", "SpansLost", "CommitsSlow")
    unfounded = {
        "NoOrchestrator",
        "NoDraft",
        "NoTarget",
        "SpeculationOff",
        "StoreRefuses",
        "CacheRebuilds",
        "InvariantBroken",
    }
    watched.prometheus.wait_quiet({f"Tandem{alarm}" for alarm in unfounded}, 60)
    delay_commits(stack, 0.0)
    stack.draft.kill()
    fires("NoDraft", "SpeculationOff")
    bad = bad_draft(stack)
    bad.start()
    try:
        fires("AcceptanceFell", "AcceptanceBelowExpectation", "SpeculationLoses", "CacheRebuilds", "InvariantBroken")
    finally:
        bad.kill()
    with redis.Redis.from_url(stack.redis_url) as store:
        store.config_set("maxmemory", "1")
        fires("StoreRefuses")
        store.config_set("maxmemory", "0")
    stack.target.kill()
    fires("NoTarget", "RequestsFail")
    stack.orchestrator.kill()
    fires("NoOrchestrator")
    assert fired == NAMES


@needs_prometheus
def test_every_panel_of_the_dashboard_shows_something(watched: Watched) -> None:
    _wait_for_the_draft(watched)
    gather(watched.api.Generate(request("def g(y):", max_tokens=40, num_speculative_tokens=3), timeout=120))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = {
        target["expr"].replace("[$__rate_interval]", "[10m]"): panel["title"]
        for panel in panels
        for target in panel["targets"]
    }
    assert len(expressions) > 30
    deadline = time.monotonic() + 60
    while empty := _empty(watched.prometheus, expressions):  # what is counted now is scraped a second later
        assert time.monotonic() < deadline, empty
        time.sleep(0.2)


EVENTS = {"tandem_store_refusals_total"}
"""A counter with labels has no sample before its first event, such as a refusal of the store."""


def _empty(prometheus: Prometheus, expressions: dict[str, str]) -> list[tuple[str, str]]:
    """The expressions that show nothing, or name a metric that nothing has, with their panels."""
    known = {item["metric"]["__name__"] for item in prometheus.query('{__name__=~"tandem_.+"}')}
    found = []
    for expression, title in expressions.items():
        used = set(re.findall(r"tandem_\w+", expression))
        if not (prometheus.query(expression) or used & EVENTS) or used - known - EVENTS:
            found.append((title, expression))
    return found


def _wait_for_the_draft(watched: Watched) -> None:
    """The orchestrator may have found it since it was started, or only its target."""
    deadline = time.monotonic() + 60
    while not scrape(watched.stack.orchestrator.metrics).value("tandem_replicas_ready", role="draft"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
