"""A tracing that keeps its spans in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, Sampler

from tandem.tracing import SpanCounts, Tracing
from tests.telemetry import schema
from tests.telemetry.collector import Span


class Memory:
    """A tracing that keeps its spans."""

    def __init__(self, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter = InMemorySpanExporter()
        tracers = []
        for each in (sampler, ALWAYS_ON):
            provider = TracerProvider(sampler=ParentBased(each))
            provider.add_span_processor(SimpleSpanProcessor(self._exporter))
            tracers.append(provider.get_tracer("test"))
        self.tracing = Tracing(tracers[0], tracers[1], SpanCounts(), lambda: None, lambda: None)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def exported(self) -> Iterator[Span]:
        """The spans as a collector would have them, from the service that the schema says."""
        for span in self.spans:
            attributes = {key: _plain(value) for key, value in (span.attributes or {}).items()}
            yield Span(
                service=f"tandem-{schema.SCHEMA['spans'][span.name]['service']}",
                name=span.name,
                kind=span.kind.name,
                trace_id=f"{span.context.trace_id:032x}",
                span_id=f"{span.context.span_id:016x}",
                parent_id=f"{span.parent.span_id:016x}" if span.parent is not None else "",
                start_ns=span.start_time or 0,
                end_ns=span.end_time or 0,
                status=span.status.status_code.value,
                attributes=attributes,
                events=tuple((event.name, dict(event.attributes or {})) for event in span.events),
                links=tuple(f"{link.context.span_id:016x}" for link in span.links),
                resource=dict.fromkeys(schema.SCHEMA["resource"], ""),
            )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
