"""The three services with everything that can be seen of them switched on, and a collector that takes their spans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from tests.support.channels import open_channel
from tests.support.ports import free_port
from tests.support.services import MODELS, Stack, running_stack
from tests.telemetry.collector import Collector, running_collector
from tests.telemetry.scrape import Scrape, scrape


@dataclass(frozen=True)
class Observed:
    """A stack, where its spans go, and where its metrics are."""

    stack: Stack
    channel: grpc.Channel
    collector: Collector
    metrics: dict[str, str]
    """Address by service."""
    http: str
    """Where the orchestrator answers HTTP."""

    def scrape(self, service: str) -> Scrape:
        return scrape(self.metrics[service])

    def wait_scraped(self, service: str, what: Callable[[Scrape], bool]) -> Scrape:
        """The first scrape of which it is so. A process counts a moment before or after it answers."""
        deadline = time.monotonic() + 60
        while not what(found := self.scrape(service)):
            assert time.monotonic() < deadline, f"not counted by the {service}"
            time.sleep(0.05)
        return found

    def log_lines(self) -> list[str]:
        """Whole lines of the orchestrator: the last one may be under way."""
        return self.stack.orchestrator.log.read_text().split("\n")[:-1]


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    metrics = {service: f"127.0.0.1:{free_port()}" for service in ("orchestrator", "draft", "target")}
    http = f"127.0.0.1:{free_port()}"
    with running_collector() as (collector, endpoint):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "TANDEM_LOG_FORMAT": "json",
            "TANDEM_LOG_LEVEL": "DEBUG",
            "TANDEM_TARGET_RETRY_SECONDS": "120",
            "TANDEM_HTTP_LISTEN": http,
            "TANDEM_DRAFT_TIMEOUT_SECONDS": "10",  # one test stops the draft
            **{f"TANDEM_{service.upper()}_METRICS_LISTEN": address for service, address in metrics.items()},
        }
        with (
            running_stack(
                folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment, store_proxy=True
            ) as stack,
            open_channel(stack.orchestrator.address) as channel,
        ):
            yield Observed(stack, channel, collector, metrics, http)
