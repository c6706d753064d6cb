"""A collector that takes no spans costs nothing but the spans."""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tandem import tracing
from tests.support.channels import open_channel
from tests.support.generation import generate
from tests.support.ports import free_port
from tests.support.services import MODELS, ServiceProcess
from tests.telemetry.conftest import Observed
from tests.telemetry.scrape import scrape

PROMPT = "def read_lines(path):\n"
REQUESTS = 20
EXIT_SECONDS = 25.0
"""Less than a pod is given; the library alone would take all of that."""
ROOM = 64
"""Spans in the queue: far fewer than the requests here make."""


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An endpoint that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


@contextlib.contextmanager
def cut_off(observed: Observed, folder: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess, str]]:
    """A draft and an orchestrator that export to a black hole, and the orchestrator's metrics address."""
    draft_address, address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(3))
    with black_hole() as endpoint:
        shared = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_MAX_QUEUE_SIZE": str(ROOM)}
        draft = ServiceProcess(
            "draft_service",
            draft_address,
            {
                **shared,
                "TANDEM_DRAFT_LISTEN": draft_address,
                "TANDEM_DRAFT_MODEL": str(MODELS / "tiny-draft"),
                "TANDEM_DRAFT_THREADS": "1",
            },
            folder / "draft.log",
        )
        orchestrator = ServiceProcess(
            "orchestrator",
            address,
            {
                **shared,
                "TANDEM_ORCHESTRATOR_LISTEN": address,
                "TANDEM_ORCHESTRATOR_METRICS_LISTEN": metrics,
                "TANDEM_DRAFT_ADDRESSES": draft_address,
                "TANDEM_TARGET_ADDRESSES": observed.stack.target.address,
                "TANDEM_TOKENIZER": str(MODELS / "tiny-target"),
                "TANDEM_REDIS_URL": observed.stack.redis_url,
                "TANDEM_DRAFT_TIMEOUT_SECONDS": "60",
            },
            folder / "orchestrator.log",
        )
        try:
            for service in (draft, orchestrator):
                service.start()
            for service in (draft, orchestrator):
                service.wait_serving()
            yield draft, orchestrator, metrics
        finally:
            for service in (orchestrator, draft):
                service.stop()


def wait_counted(metrics: str, name: str, **labels: str) -> None:
    deadline = time.monotonic() + 60
    while not scrape(metrics).value(name, **labels):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def seconds_of(channel: grpc.Channel) -> float:
    started = time.perf_counter()
    result = generate(channel, PROMPT, max_tokens=16, temperature=0, num_speculative_tokens=3)
    assert result.speculation.draft_tokens
    return time.perf_counter() - started


def test_requests_are_not_slower_spans_are_counted_as_dropped_and_the_end_comes_in_time(
    observed: Observed, tmp_path: Path
) -> None:
    with (
        cut_off(observed, tmp_path) as (draft, orchestrator, metrics),
        open_channel(orchestrator.address) as channel,
    ):
        wait_counted(metrics, "tandem_replicas_ready", role="draft")
        pairs = [(seconds_of(channel), seconds_of(observed.channel)) for _ in range(REQUESTS)]
        without, working = (statistics.median(times) for times in zip(*pairs, strict=True))
        assert without < 3 * working  # an export that held a request up would take its own time, which is seconds
        wait_counted(metrics, "tandem_trace_spans_total", fate="dropped")
        for service in (orchestrator, draft):
            service.signal(15)
            assert service.wait(EXIT_SECONDS) == 0
            assert "spans were not exported" in service.log.read_text()
            assert "Traceback" not in service.log.read_text()


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4317"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}, False),
    ],
)
def test_tracing_is_on_only_where_it_was_asked_for(environment: dict[str, str], on: bool) -> None:
    assert tracing.wanted(environment) is on
    if not on:
        assert tracing.start("target", environment) is None
