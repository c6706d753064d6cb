"""An OTLP collector: a real gRPC server that keeps the spans it is sent."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """A span as it was exported."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    status: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]
    links: tuple[str, ...]
    """Ids of spans."""
    resource: dict[str, Any] = field(repr=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps all spans; thread-safe."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        spans = list(_spans(request))
        with self._changed:
            self._spans.extend(spans)
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[Span]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, trace_id: str, complete: Callable[[list[Span]], bool], seconds: float = 60) -> list[Span]:
        """The spans of a trace, once `complete` says that they are all there."""
        return self._wait(lambda span: span.trace_id == trace_id, complete, seconds)

    def wait_for_links(self, span_ids: set[str], seconds: float = 60) -> list[Span]:
        """The spans with links to any of these, once all of these are linked from somewhere."""
        return self._wait(
            lambda span: not span_ids.isdisjoint(span.links),
            lambda spans: span_ids <= {link for span in spans for link in span.links},
            seconds,
        )

    def _wait(
        self, wanted: Callable[[Span], bool], complete: Callable[[list[Span]], bool], seconds: float
    ) -> list[Span]:
        deadline = time.monotonic() + seconds
        with self._changed:
            while not complete(spans := [span for span in self._spans if wanted(span)]):
                left = deadline - time.monotonic()
                assert left > 0, f"after {seconds} s: {sorted((span.name, span.service) for span in spans)}"
                self._changed.wait(left)
        return spans


@contextlib.contextmanager
def running_collector() -> Iterator[tuple[Collector, str]]:
    """A collector and its OTLP endpoint."""
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def _spans(request: Any) -> Iterator[Span]:
    for group in request.resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield Span(
                    service=resource["service.name"],
                    name=span.name,
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    status=span.status.code,
                    attributes=_attributes(span.attributes),
                    events=tuple((event.name, _attributes(event.attributes)) for event in span.events),
                    links=tuple(link.span_id.hex() for link in span.links),
                    resource=resource,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    assert kind is not None
    return getattr(value, kind)
