"""The schema and the code, both ways: what is exported is declared (`schema.check`), and what is declared is exported."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import defaultdict

import numpy as np
import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from prometheus_client import CollectorRegistry

from orchestrator.completion import EmittedToken, FinishReason
from orchestrator.drafting import Block
from orchestrator.gamma_controller import Choice
from orchestrator.metrics import BENCH_REASONS, DEGRADED_REASONS, Metrics
from orchestrator.recorder import Recorders, RequestRecorder
from orchestrator.request import GenerationPlan
from tandem.acceptance import Drafted, Outcome, TokenKind
from tandem.engine.item_spans import ItemSpans, SpanVocabulary
from tandem.engine.stream import Answer
from tandem.engine.work import Step, Work
from tandem.telemetry import JsonFormatter
from tandem.v1 import draft_pb2, sampling_pb2, target_pb2, worker_pb2
from tests.telemetry import schema
from tests.telemetry.memory import Memory

PLAN = GenerationPlan(
    request_id="seen",
    prompt=b"",
    prompt_tokens=3,
    sampling=sampling_pb2.Sampling(temperature=0.5, top_p=0.9, top_k=5, seed=7),
    num_speculative_tokens=2,
    adaptive=True,
    max_tokens=9,
    min_tokens=0,
    end_token_ids=frozenset(),
    stop=(),
    include_stop=False,
    cache_salt="",
)
DRAFTED = Drafted(1, np.array([1], dtype=np.uint32), np.array([1.0], dtype=np.float32), 0)
BLOCK = Block((DRAFTED, DRAFTED))
DRAFT = SpanVocabulary("draft.propose", "tandem.proposed_tokens", "draft.step")
TARGET = SpanVocabulary("target.verify", "tandem.target_rows", "target.step")
RECOVERED = EmittedToken(4, TokenKind.RECOVERED, "")


def recorders_of(memory: Memory, slow_seconds: float = 60.0) -> Recorders:
    return Recorders(Metrics(CollectorRegistry()), memory.tracing, slow_seconds)


def eventful(recorder: RequestRecorder) -> list[str]:
    """A request to which everything happens that is told to a recorder; the trace contexts that its workers got."""
    recorder.planned(PLAN, "a-target")
    recorder.admitted()
    recorder.resumed(5, 2)
    first = recorder.begin_round(5)
    first.chosen(Choice(2, "best", 1.5))
    for role in ("draft", "target"):
        first.rebuilding(role, "ERROR_REASON_CACHE_MISS")
    first.rescoring("StreamLost")
    first.recommitting("no answer within 0.50 s")
    first.benched(BENCH_REASONS[0])
    first.shortened(2)
    first.short(2)
    first.lengthened(4)
    first.proposed(2)
    first.verified()
    first.accept_began()
    first.accepted(BLOCK, Outcome([4], [TokenKind.RECOVERED], 0, [0.25]), 1)
    second = recorder.begin_round(6)
    first.committed()
    second.degraded(DEGRADED_REASONS[0], newly=True)
    second.proposed(0)
    second.verified()
    second.accept_began()
    second.accepted(Block(), Outcome([4], [TokenKind.BONUS], 0, []), 1)
    second.committed()
    recorder.begin_round(7)
    recorder.sampling_changed(1, 4)
    recorder.end("OK", "", FinishReason.LENGTH)
    return [first.traceparent, second.traceparent]


def worked(memory: Memory, traceparents: list[str]) -> None:
    """The workers' part: an answered and a refused item at each."""
    for vocabulary, item in ((DRAFT, draft_pb2.ProposeItem), (TARGET, target_pb2.VerifyItem)):
        spans = ItemSpans(memory.tracing, vocabulary)
        spans.received(
            [item(request_id="seen", cache_epoch=i, traceparent=each) for i, each in enumerate(traceparents)]
        )
        of_draft = {"ahead": "chain", "source": "model"} if vocabulary is DRAFT else {}
        work = Work(prefill_tokens=1, reused_tokens=2, **of_draft)
        work.ran(1, 1)
        work.took(Step(1, items=1, tokens=3, seconds=1e-6))
        refusal = worker_pb2.ItemError(reason=worker_pb2.ERROR_REASON_CACHE_MISS)
        spans.answered([Answer("seen", 0, result=[object()], work=work), Answer("seen", 1, None, error=refusal)])


def test_a_round_that_is_dropped_counts_for_nothing() -> None:
    """What is counted of rounds is of those that are committed, as their number is."""
    recorder = recorders_of(Memory()).begin("seen", (), "chat")
    for dropped in (True, True, False):
        each = recorder.begin_round(3)
        each.chosen(Choice(2, "best", 1.5))
        each.short(1)
        each.degraded(DEGRADED_REASONS[0], newly=True)
        each.accepted(Block(), Outcome([4], [TokenKind.BONUS], 0, []), 1)
        if not dropped:
            each.committed()
    found = recorder.statistics
    assert (found.rounds, found.shortened_rounds, found.estimates) == (1, 1, 1)
    assert found.degraded == {DEGRADED_REASONS[0]: 1}


def test_what_is_exported_is_declared_and_what_is_declared_is_exported() -> None:
    memory = Memory()
    recorders = recorders_of(memory)
    worked(memory, eventful(recorders.begin("seen", (), "chat")))
    recorders.begin("", (), "chat").end("UNAVAILABLE", "no target", None)
    attributes: defaultdict[str, set[str]] = defaultdict(set)
    events: defaultdict[str, set[str]] = defaultdict(set)
    for span in memory.exported():
        schema.check(span)
        attributes[span.name] |= set(span.attributes)
        events[span.name] |= {name for name, _ in span.events}
    declared = schema.SCHEMA["spans"]
    attributes["generate"].add("tandem.noticed")  # of what the sampler left out: the test below
    assert attributes == {name: set(span["attributes"]) for name, span in declared.items()}
    assert {name: found for name, found in events.items() if found} == {
        name: set(span["events"]) for name, span in declared.items() if span["events"]
    }


def test_a_schema_with_a_stranger_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    recorders = recorders_of(memory)
    eventful(recorders.begin("seen", (), "chat"))
    round_span = next(span for span in memory.exported() if span.name == "tandem.round")
    schema.check(round_span)
    for wrong in (
        dataclasses.replace(round_span, attributes={**round_span.attributes, "tandem.stranger": 1}),
        dataclasses.replace(round_span, attributes={**round_span.attributes, "tandem.gamma": "2"}),
        dataclasses.replace(round_span, attributes={"tandem.round": 0}),
        dataclasses.replace(round_span, events=(("tandem.retry", {}),)),
        dataclasses.replace(round_span, kind="SERVER"),
    ):
        with pytest.raises(AssertionError):
            schema.check(wrong)


@pytest.mark.parametrize(
    ("status", "degraded", "slow_seconds", "noticed"),
    [
        ("UNAVAILABLE", False, 60.0, "error"),
        ("OK", True, 60.0, "degraded"),
        ("OK", False, 0.0, "slow"),
        ("OK", False, 60.0, None),
        ("CANCELLED", False, 60.0, None),
        ("INVALID_ARGUMENT", False, 60.0, None),
    ],
)
def test_what_deserves_notice(status: str, degraded: bool, slow_seconds: float, noticed: str | None) -> None:
    memory = Memory(ALWAYS_OFF)
    recorders = recorders_of(memory, slow_seconds)
    recorder = recorders.begin("seen", (), "chat")
    recorder.planned(PLAN, "a-target")
    if degraded:
        recorder.begin_round(0).degraded("draft_timeout", newly=True)
    recorder.end(status, "", None)
    found = list(memory.exported())
    assert [span.attributes["tandem.noticed"] for span in found] == ([noticed] if noticed else [])
    for span in found:
        schema.check(span)


@pytest.mark.parametrize(
    ("status", "detail", "finish"),
    [
        ("OK", "", FinishReason.STOP),
        ("INVALID_ARGUMENT", "max_tokens must be positive", None),
        ("CANCELLED", "", None),
        ("UNAVAILABLE", "no target", None),
    ],
)
def test_one_line_for_each_request_however_it_ends(
    status: str, detail: str, finish: FinishReason | None, caplog: pytest.LogCaptureFixture
) -> None:
    recorders = recorders_of(Memory())
    with caplog.at_level(logging.INFO):
        recorder = recorders.begin("seen", (), "chat")
        trace_id = recorder.trace_id
        recorder.end(status, detail, finish)
    [record] = caplog.records
    line = json.loads(JsonFormatter("orchestrator").format(record))
    assert (line["message"], line["request_id"], line["trace_id"]) == ("request ended", "seen", trace_id)
    assert (line["status"], line.get("error", ""), line.get("finish_reason")) == (
        status,
        detail,
        finish.name.lower() if finish else None,
    )
    assert {"rounds", "accepted_tokens", "completion_tokens", "total_seconds"} <= set(line)
