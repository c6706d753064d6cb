"""Spans without services: what ends badly, what never ends, and what there is no room for."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind

from orchestrator.request_trace import NoticedReason, RequestTrace
from tandem.engine.item_spans import ItemSpans, SpanVocabulary
from tandem.engine.stream import Answer
from tandem.engine.work import Step, Work
from tandem.span_export import CountingExporter, CountingProcessor
from tandem.tracing import SpanCounts, Tracing
from tandem.v1 import target_pb2, worker_pb2
from tests.telemetry.memory import Memory

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def item_spans(memory: Memory) -> ItemSpans:
    return ItemSpans(memory.tracing, SpanVocabulary("target.verify", "tandem.target_rows", "target.step"))


def item(epoch: int = 0, traceparent: str = PARENT) -> target_pb2.VerifyItem:
    return target_pb2.VerifyItem(request_id="a", cache_epoch=epoch, traceparent=traceparent)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_an_answered_item_is_a_child_of_its_round(memory: Memory, item_spans: ItemSpans) -> None:
    item_spans.received([item()])
    work = Work(prefill_tokens=9, reused_tokens=4)
    work.ran(began_ns=1, batch_size=2)
    work.ran(began_ns=2, batch_size=5)
    item_spans.answered([Answer("a", 0, result=[object()] * 3, work=work)])
    [span] = memory.spans
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    expected = {
        "tandem.steps": 2,
        "tandem.batch_size": 3.5,
        "tandem.prefill_tokens": 9,
        "tandem.reused_tokens": 4,
        "tandem.target_rows": 3,
    }
    assert attributes(span).items() >= expected.items()


def test_a_step_is_linked_to_the_traced_items_that_ended_in_it(memory: Memory, item_spans: ItemSpans) -> None:
    item_spans.received([item(0), item(1), item(2), item(3, traceparent="")])
    first, second = Step(1_000, items=2, tokens=3, seconds=1e-6), Step(5_000, items=9, tokens=40, seconds=2e-6)
    answers = []
    for epoch, steps in enumerate(([first], [first, second], [second], [second])):
        work = Work()
        for step in steps:
            work.ran(step.began_ns, step.items)
            work.took(step)
        answers.append(Answer("a", epoch, result=[object()], work=work))
    item_spans.answered(answers)
    by_name = {name: [span for span in memory.spans if span.name == name] for name in ("target.verify", "target.step")}
    epochs = {span.context.span_id: attributes(span)["tandem.epoch"] for span in by_name["target.verify"]}
    assert sorted(epochs.values()) == [0, 1, 2]
    steps = {span.start_time: span for span in by_name["target.step"]}
    assert {start: sorted(epochs[link.context.span_id] for link in span.links) for start, span in steps.items()} == {
        1_000: [0],
        5_000: [1, 2],
    }
    assert (steps[5_000].end_time, steps[5_000].parent) == (7_000, None)
    assert attributes(steps[5_000]) == {"tandem.items": 9, "tandem.tokens": 40}


def test_a_refused_item_has_its_reason(memory: Memory, item_spans: ItemSpans) -> None:
    item_spans.received([item()])
    error = worker_pb2.ItemError(reason=worker_pb2.ERROR_REASON_CACHE_MISS)
    item_spans.answered([Answer("a", 0, None, error=error)])
    [span] = memory.spans
    assert attributes(span) == {"tandem.epoch": 0, "error.type": "ERROR_REASON_CACHE_MISS"}
    assert not span.status.is_ok


def test_what_a_stream_leaves_unanswered_ends_with_it(memory: Memory, item_spans: ItemSpans) -> None:
    item_spans.received([item(0), item(1)])
    item_spans.close()
    item_spans.close()
    assert [attributes(span)["error.type"] for span in memory.spans] == ["ERROR_REASON_CANCELLED"] * 2


@pytest.mark.parametrize("traceparent", ["", "nonsense", PARENT.removesuffix("1") + "0"])
def test_no_sampled_context_no_span(traceparent: str, memory: Memory, item_spans: ItemSpans) -> None:
    item_spans.received([item(traceparent=traceparent)])
    item_spans.answered([Answer("a", 0, result=[])])
    assert not memory.spans


def test_a_round_that_is_open_at_the_end_is_ended_once(memory: Memory) -> None:
    request = RequestTrace(memory.tracing, (), "chat")
    opened = request.begin_round(0, 0)
    request.end("CANCELLED", "", 0, "", None)
    opened.abandoned()
    assert [span.name for span in memory.spans] == ["tandem.round", "generate"]
    assert attributes(memory.spans[0])["tandem.outcome"] == "abandoned"


class StuckExporter(SpanExporter):
    """Takes a batch and never comes back, until it is told to."""

    def __init__(self) -> None:
        self.stuck, self.release = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.stuck.set()
        self.release.wait(120)
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.release.set()


def test_every_span_is_exported_or_counted_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    counts, stuck = SpanCounts(), StuckExporter()
    exporter = CountingExporter(stuck, counts)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(CountingProcessor(exporter, counts))
    tracer = provider.get_tracer("test")
    tracing = Tracing(tracer, tracer, counts, provider.shutdown, exporter.shutdown)
    for _ in range(4):
        tracing.start_span("a", SpanKind.INTERNAL, Context()).end()
    assert stuck.stuck.wait(60)
    for _ in range(20):
        tracing.start_span("a", SpanKind.INTERNAL, Context()).end()
    assert (counts.ended, counts.taken, counts.queued, counts.dropped) == (24, 4, 8, 12)
    tracing.shutdown(0.2)
    assert (counts.exported, counts.lost) == (0, 24)


@pytest.mark.parametrize("noticed", [*NoticedReason, None])
@pytest.mark.parametrize("sent", ["", PARENT[:-1] + "0"])
def test_what_the_sampler_left_out_is_told_of_if_it_deserves_notice(noticed: NoticedReason | None, sent: str) -> None:
    memory = Memory(ALWAYS_OFF)
    request = RequestTrace(memory.tracing, [("traceparent", sent)] if sent else (), "chat")
    assert not request.recording
    status = "UNAVAILABLE" if noticed is NoticedReason.ERROR else "OK"
    request.end(status, "no target", 7, "length", noticed)
    if noticed is None or sent:
        assert memory.spans == ()
        return
    [span] = memory.spans
    assert attributes(span)["tandem.noticed"] == noticed.value
    assert attributes(span)["gen_ai.usage.output_tokens"] == 7
    assert f"{span.context.trace_id:032x}" != "0" * 32
    assert span.status.is_ok == (noticed is not NoticedReason.ERROR) or span.status.is_unset
