"""OpenTelemetry traces, switched on by the standard variables; when off, no span object is ever made.

Spans are started with an explicit parent and ended explicitly. None is ever the "current" one: a generator that is
dropped in the middle of a stream would reset that in another context, and log a traceback for each cancelled request.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Tracer
    from opentelemetry.util.types import AttributeValue

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 2.0
"""A dead collector holds a service up no longer than this."""

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"


@dataclass(slots=True)
class SpanCounts:
    """Spans since the start. Each number has one writer: the event loop, or the thread that exports."""

    ended: int = 0
    dropped: int = 0
    """The queue was full."""
    taken: int = 0
    """From the queue, by the exporter."""
    exported: int = 0
    failed: int = 0
    """The collector did not take them."""

    @property
    def queued(self) -> int:
        """Waiting to be exported."""
        return self.ended - self.dropped - self.taken

    @property
    def lost(self) -> int:
        """Ended and never exported, should the process end now."""
        return self.ended - self.exported


class Tracing:
    """Where a service's spans are made."""

    def __init__(
        self,
        tracer: Tracer,
        unsampled: Tracer,
        counts: SpanCounts,
        flush_and_close: Callable[[], None],
        abandon: Callable[[], None],
    ) -> None:
        """`unsampled` exports every span: it tells afterwards of what the sampler of `tracer` left out."""
        self.counts = counts
        self._tracer = tracer
        self._unsampled = unsampled
        self._flush_and_close = flush_and_close
        self._abandon = abandon

    def start_span(
        self,
        name: str,
        kind: SpanKind,
        parent: Context,
        attributes: Mapping[str, AttributeValue] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """A span that the caller must end."""
        return self._tracer.start_span(name, parent, kind, attributes, start_time=start_ns)

    def start_span_anyway(
        self,
        name: str,
        kind: SpanKind,
        parent: Context,
        attributes: Mapping[str, AttributeValue],
        start_ns: int,
        links: Sequence[Link] = (),
    ) -> Span:
        """A span that the sampler has no say in. The caller must end it."""
        return self._unsampled.start_span(name, parent, kind, attributes, links, start_ns)

    def shutdown(self, seconds: float = SHUTDOWN_SECONDS) -> None:
        """Exports what is left, for at most so long. Blocks; call it when nothing else has to be done."""
        closing = threading.Thread(target=self._flush_and_close, name="close tracing", daemon=True)
        closing.start()
        closing.join(seconds)
        lost = self.counts.lost
        if closing.is_alive():
            self._abandon()
        if lost:
            log.warning("%d of %d spans were not exported", lost, self.counts.ended)


def start(service: str, environment: Mapping[str, str]) -> Tracing | None:
    """The tracing that the OTEL_* variables ask for, named `tandem-<service>` unless they say otherwise; else None."""
    if not wanted(environment):
        return None
    from tandem.span_export import build

    return build(service, environment)


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether an OTLP endpoint is set, or OTLP is chosen as the exporter, and nothing switches it off."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if exporter:
        return exporter == "otlp"
    return any(environment.get(f"OTEL_EXPORTER_OTLP{signal}_ENDPOINT") for signal in ("", "_TRACES"))


def context_of(span: Span) -> Context:
    """The context of a span's children."""
    from opentelemetry.context import Context
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span, Context())


def context_from(traceparent: str, tracestate: str = "") -> Context:
    """The context that a caller sent; an empty one where that is missing or malformed."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {TRACEPARENT: traceparent}
    if tracestate:
        carrier[TRACESTATE] = tracestate
    return TraceContextTextMapPropagator().extract(carrier, Context())


def traceparent_of(span: Span) -> str:
    """What is sent along for another process to make children of the span."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def trace_id_of(span: Span) -> str:
    """The trace's id, as UIs show it."""
    return f"{span.get_span_context().trace_id:032x}"
