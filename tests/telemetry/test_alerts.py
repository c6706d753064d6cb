"""The alarms and the dashboard: each alarm has a case that makes it fire; a real Prometheus scrapes the real services,
and what can be broken there is broken."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import gather, request
from tests.support.services import MODELS, REPOSITORY, Stack, free_port, running_stack
from tests.telemetry.prometheus import DASHBOARD, Prometheus, needs_prometheus, rule_groups, running_prometheus

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


@needs_prometheus
def test_cases(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    (tmp_path / "cases.yml").write_text(CASES.read_text())
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "cases.yml"]):
        done = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def hurried() -> list[dict[str, Any]]:
    """The same alarms with a second for each minute, and windows of at least 5 s."""
    groups = copy.deepcopy(rule_groups())
    for rule in (rule for group in groups for rule in group["rules"]):
        rule["expr"] = re.sub(r"\[(\d+)m\]", lambda found: f"[{max(5, int(found[1]))}s]", rule["expr"])
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
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{free_port()}",  # nobody is there
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
    }
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as stack,
        running_prometheus(folder, metrics, hurried()) as prometheus,
        grpc.insecure_channel(stack.orchestrator.address) as channel,
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
    stop.set()
    for caller in callers:
        caller.join()


@needs_prometheus
@pytest.mark.usefixtures("traffic")
def test_alarms_fire_when_things_break(watched: Watched) -> None:
    stack, prometheus = watched.stack, watched.prometheus
    # Three requests for one place, and no collector for the spans.
    prometheus.wait_firing({"TandemQueueGrows", "TandemSpansLost"}, 30)
    assert not prometheus.firing() & {"TandemNoDraft", "TandemNoTarget", "TandemSpeculationOff"}
    stack.draft.kill()
    prometheus.wait_firing({"TandemNoDraft", "TandemSpeculationOff"}, 30)
    stack.target.kill()
    prometheus.wait_firing({"TandemNoTarget", "TandemRequestsFail"}, 30)
    stack.draft.start()
    stack.target.start()
    stack.orchestrator.wait_serving()


@needs_prometheus
def test_every_panel_of_the_dashboard_shows_something(watched: Watched) -> None:
    gather(watched.api.Generate(request("def g(y):", max_tokens=40, num_speculative_tokens=3), timeout=60))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = {
        target["expr"].replace("[$__rate_interval]", "[10m]"): panel["title"]
        for panel in panels
        for target in panel["targets"]
    }
    assert len(expressions) > 30
    known = {item["metric"]["__name__"] for item in watched.prometheus.query('{__name__=~"tandem_.+"}')}
    for expression, title in expressions.items():
        used = set(re.findall(r"tandem_\w+", expression))
        # A counter with labels has no sample before its first event, such as a refusal of the store.
        assert watched.prometheus.query(expression) or used & {"tandem_store_refusals_total"}, (title, expression)
        assert used - known <= {"tandem_store_refusals_total"}, title
