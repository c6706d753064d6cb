"""docs/observability.md says what is there: the schema's tables word for word, and every metric."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry

from orchestrator.metrics import Metrics, StoreMetrics
from tandem.engine.engine import EngineStats
from tandem.engine.metrics import EngineCollector
from tandem.metrics_endpoint import SpanCollector, registry_for
from tandem.tracing import SpanCounts
from tests.support.services import REPOSITORY
from tests.telemetry import schema

PAGE = (REPOSITORY / "docs" / "observability.md").read_text()


def test_the_page_has_the_tables_of_the_schema() -> None:
    assert schema.tables() in PAGE, "run `python -m tests.telemetry.schema` and paste what it prints"


def test_the_page_defines_every_metric_and_no_other() -> None:
    registry = registry_for("orchestrator", SpanCounts())
    Metrics(registry)
    StoreMetrics(registry)
    workers = CollectorRegistry()
    workers.register(EngineCollector(lambda: (EngineStats(), 1)))
    workers.register(SpanCollector(SpanCounts()))
    families = [family for each in (registry, workers) for family in each.collect()]
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    # Read from the runtime, so not in a registry without one.
    served |= {"tandem_num_requests_running", "tandem_num_requests_waiting", "tandem_replicas_ready"}
    served |= {
        "tandem_draft_replicas_benched",
        "tandem_worker_sessions",
        "tandem_worker_items_pending",
        "tandem_event_loop_tasks",
        "tandem_expected_speedup",
        "tandem_expected_tokens_per_second",
    }
    defined = set(re.findall(r"^\| `((?:tandem|process)_\w+)", PAGE, re.MULTILINE))
    assert defined == served
