"""From ended spans to a collector, with every bound there is: in memory, in time, and in what is logged.

Imports the SDK and the exporter, half a second of work, so it is imported only where tracing is on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from tandem.tracing import SpanCounts, Tracing

log = logging.getLogger(__name__)

MAX_QUEUED_SPANS = 4096
MAX_SPANS_PER_EXPORT = 128
"""A batch is encoded in one go while the event loop wants the interpreter too, so batches are small."""
EXPORT_DELAY_MS = 1000


def build(service: str, environment: Mapping[str, str]) -> Tracing:
    """A tracing that exports to where the OTEL_* variables say; the sampler is theirs as well."""
    _quieten_the_sdk()
    counts = SpanCounts()
    exporter = CountingExporter(OTLPSpanExporter(), counts)
    resource = _resource(service, environment)
    # Not at exit: the services shut down by themselves, within a limit.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    always = TracerProvider(resource=resource, sampler=ALWAYS_ON, shutdown_on_exit=False)
    processor = CountingProcessor(exporter, counts)
    for each in (provider, always):
        each.add_span_processor(processor)
    tracer, unsampled = (each.get_tracer("tandem", _version()) for each in (provider, always))
    return Tracing(tracer, unsampled, counts, provider.shutdown, exporter.shutdown)


class CountingExporter(SpanExporter):
    """Counts what was exported and what was not, and logs when that changes, not each time."""

    def __init__(self, exporter: SpanExporter, counts: SpanCounts) -> None:
        self._exporter = exporter
        self._counts = counts
        self._failing = False
        self._closed = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports a batch; in the processor's thread."""
        self._counts.taken += len(spans)
        result = SpanExportResult.FAILURE if self._closed.is_set() else self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._counts.exported += len(spans)
        else:
            self._counts.failed += len(spans)
        self._note(result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Ends an export under way, and all later ones."""
        if not self._closed.is_set():
            self._closed.set()
            self._exporter.shutdown()

    def _note(self, failing: bool) -> None:
        if failing == self._failing:
            return
        self._failing = failing
        if failing:
            log.warning("spans are lost: the collector of OTEL_EXPORTER_OTLP_ENDPOINT does not take them")
        else:
            log.info("the collector takes spans again")


class CountingProcessor(BatchSpanProcessor):
    """A bounded queue before the exporter, which knows how many spans it had no room for."""

    def __init__(self, exporter: CountingExporter, counts: SpanCounts) -> None:
        self._room = _from_environment("OTEL_BSP_MAX_QUEUE_SIZE", MAX_QUEUED_SPANS)
        super().__init__(
            exporter,
            max_queue_size=self._room,
            schedule_delay_millis=_from_environment("OTEL_BSP_SCHEDULE_DELAY", EXPORT_DELAY_MS),
            max_export_batch_size=min(
                self._room, _from_environment("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", MAX_SPANS_PER_EXPORT)
            ),
        )
        self._counts = counts

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a sampled span; a full queue loses its oldest."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._counts.queued >= self._room:
            self._counts.dropped += 1
        self._counts.ended += 1
        super().on_end(span)


def _resource(service: str, environment: Mapping[str, str]) -> Resource:
    attributes: dict[str, str] = {SERVICE_VERSION: _version(), SERVICE_INSTANCE_ID: uuid4().hex}
    named = environment.get("OTEL_SERVICE_NAME") or "service.name=" in environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not named:
        attributes[SERVICE_NAME] = f"tandem-{service}"
    return Resource.create(attributes)


def _version() -> str:
    return metadata.version("tandem-decoding")


def _from_environment(variable: str, default: int) -> int:
    try:
        return max(1, int(os.environ.get(variable, default)))
    except ValueError:
        return default


def _quieten_the_sdk() -> None:
    """The SDK logs each retry, each failure and each dropped span: a dead collector would fill the log."""
    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
