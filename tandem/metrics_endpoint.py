"""The Prometheus endpoint of a service, and the metrics that every service has."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.grpc_server import PortError
from tandem.tracing import SpanCounts


def registry_for(service: str, spans: SpanCounts | None) -> CollectorRegistry:
    """A registry with the build's version, what the process holds and, where tracing is on, what became of the spans."""
    registry = CollectorRegistry()
    build = Gauge("tandem_build_info", "Always 1", ["service", "version"], registry=registry)
    build.labels(service=service, version=metadata.version("tandem-decoding")).set(1)
    ProcessCollector(registry=registry)
    threads = Gauge("tandem_process_threads", "Threads of the process", registry=registry)
    threads.set_function(_threads)
    if spans is not None:
        registry.register(SpanCollector(spans))
    return registry


def serve(listen: str, registry: CollectorRegistry, variable: str) -> None:
    """Serves the registry at host:port, in a thread; not at all if `listen` is empty. Raises PortError."""
    if not listen:
        return
    host, _, port = listen.rpartition(":")
    try:
        start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        raise PortError(f"{variable}: can't listen on {listen!r}: {error.strerror}") from error


def _threads() -> int:
    """Those of native libraries included, where the system says."""
    tasks = Path("/proc/self/task")
    return sum(1 for _ in tasks.iterdir()) if tasks.exists() else threading.active_count()


class SpanCollector(Collector):
    """What became of the spans that ended, read when asked for."""

    def __init__(self, counts: SpanCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """One counter, by fate."""
        spans = CounterMetricFamily("tandem_trace_spans", "Spans that ended, by what became of them", labels=["fate"])
        for fate in ("exported", "failed", "dropped"):
            spans.add_metric([fate], getattr(self._counts, fate))
        yield spans
