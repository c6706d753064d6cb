"""One span for each traced item of a stream, made in the event loop once the item is answered, and one for each step
that such items ended in.

The step thread knows nothing of this: it notes an item's Work, and the span is made of that afterwards, as a child of
the round that the item's `traceparent` names. An item without one costs a look at an empty string. A step belongs to
no single request: its span is a trace of its own, with links to the items' spans.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.engine.job import WorkItem
from tandem.engine.stream import Answer
from tandem.engine.work import Step
from tandem.tracing import Tracing
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import AttributeValue

_NANOSECONDS = 1e-9


@dataclass(frozen=True, slots=True)
class SpanVocabulary:
    """What a service's item spans are called, and what the length of a result is called in them."""

    name: str
    result_attribute: str
    step_name: str


class ItemSpans:
    """The traced items of one stream that are not answered yet."""

    def __init__(self, tracing: Tracing, vocabulary: SpanVocabulary) -> None:
        self._tracing = tracing
        self._vocabulary = vocabulary
        self._arrivals: dict[tuple[str, int], tuple[str, int]] = {}

    def received(self, items: Sequence[WorkItem]) -> None:
        """A batch has arrived."""
        now = time.time_ns()
        for item in items:
            if item.traceparent:
                self._arrivals[item.request_id, item.cache_epoch] = (item.traceparent, now)

    def answered(self, answers: Sequence[Answer]) -> None:
        """These items have their answers."""
        steps: defaultdict[Step, list[SpanContext]] = defaultdict(list)
        for answer in answers:
            made = self._answered(answer)
            if made is not None and answer.work is not None and answer.work.last is not None:
                steps[answer.work.last].append(made)
        for step, items in steps.items():
            self._step(step, items)

    def _answered(self, answer: Answer) -> SpanContext | None:
        arrival = self._arrivals.pop((answer.request_id, answer.cache_epoch), None)
        if arrival is None:
            return None
        attributes: dict[str, AttributeValue] = {"tandem.epoch": answer.cache_epoch}
        if answer.work is not None and answer.work.steps:
            attributes["tandem.queue_seconds"] = max(0, answer.work.began_ns - arrival[1]) * _NANOSECONDS
            attributes["tandem.steps"] = answer.work.steps
            attributes["tandem.batch_size"] = answer.work.companions / answer.work.steps
            attributes["tandem.prefill_tokens"] = answer.work.prefill_tokens
            attributes["tandem.reused_tokens"] = answer.work.reused_tokens
        if answer.work is not None and answer.work.ahead:
            attributes["tandem.draft_ahead"] = answer.work.ahead
        if answer.work is not None and answer.work.source:
            attributes["tandem.draft_source"] = answer.work.source
        if answer.error is not None:
            return self._make(arrival, attributes, worker_pb2.ErrorReason.Name(answer.error.reason))
        attributes[self._vocabulary.result_attribute] = _length(answer.result)
        return self._make(arrival, attributes, "")

    def _step(self, step: Step, items: Sequence[SpanContext]) -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import Link, SpanKind

        attributes: dict[str, AttributeValue] = {"tandem.items": step.items, "tandem.tokens": step.tokens}
        links = [Link(item) for item in items]
        # The sampler has spoken for the items.
        span = self._tracing.start_span_anyway(
            self._vocabulary.step_name, SpanKind.INTERNAL, Context(), attributes, step.began_ns, links
        )
        span.end(step.began_ns + round(step.seconds / _NANOSECONDS))

    def close(self) -> None:
        """The stream is over: what has no answer gets none."""
        arrivals, self._arrivals = self._arrivals, {}
        for (_, epoch), arrival in arrivals.items():
            self._make(arrival, {"tandem.epoch": epoch}, "ERROR_REASON_CANCELLED")

    def _make(self, arrival: tuple[str, int], attributes: dict[str, AttributeValue], error: str) -> SpanContext | None:
        # Imported here: a service without tracing never needs OpenTelemetry.
        from opentelemetry.trace import SpanKind, Status, StatusCode, get_current_span

        from tandem.tracing import context_from

        traceparent, began_ns = arrival
        parent = context_from(traceparent)
        if not get_current_span(parent).get_span_context().trace_flags.sampled:
            return None
        if error:
            attributes["error.type"] = error
        span = self._tracing.start_span(self._vocabulary.name, SpanKind.SERVER, parent, attributes, began_ns)
        if error and error != "ERROR_REASON_CANCELLED":
            span.set_status(Status(StatusCode.ERROR))
        span.end()
        return span.get_span_context()


def _length(result: Any) -> int:
    return len(result) if isinstance(result, Sequence) else 0
