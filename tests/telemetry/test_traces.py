"""One trace per request over three processes: its edges, its sums, its schema."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import grpc
import pytest

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.channels import open_channel
from tests.support.generation import Generation, gather, generate, paced_channel, request
from tests.support.services import MODELS, running_stack
from tests.support.tcp_proxy import Direction
from tests.telemetry import schema
from tests.telemetry.collector import Span, running_collector
from tests.telemetry.conftest import Observed

PROMPT = "def read_lines(path):\n"
CALLER_SPAN = "00f067aa0ba902b7"

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]


def new_trace(*, sampled: bool = True) -> tuple[str, Metadata]:
    """A trace id and the metadata of a caller that is in it."""
    trace_id = secrets.token_hex(16)
    return trace_id, (("traceparent", f"00-{trace_id}-{CALLER_SPAN}-{int(sampled):02x}"),)


def traced(observed: Observed, sent: api.GenerateRequest) -> tuple[Generation, list[Span]]:
    """Runs a request in a trace of its own, and waits for all its spans."""
    trace_id, metadata = new_trace()
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(observed.channel)
    result = gather(stub.Generate(sent, timeout=60, metadata=metadata))
    rounds = result.speculation.rounds
    spans = observed.collector.wait(
        trace_id,
        lambda spans: (
            count(spans)["generate"] == 1
            and count(spans)["target.verify"] >= rounds
            and count(spans)["draft.propose"] >= len(result.speculation.draft_tokens_per_position[:1])
            and sum(span.attributes.get("tandem.proposed_tokens", 0) for span in spans)
            >= result.speculation.draft_tokens
        ),
    )
    return result, spans


def count(spans: list[Span]) -> Counter[str]:
    return Counter(span.name for span in spans)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def total(spans: list[Span], attribute: str) -> Any:
    return sum(span.attributes.get(attribute, 0) for span in spans)


@pytest.fixture(scope="module")
def speculative(observed: Observed) -> tuple[Generation, list[Span]]:
    fields = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 7, "max_tokens": 40}
    return traced(observed, request(PROMPT, num_speculative_tokens=4, request_id="traced-1", **fields))


def test_an_adaptive_gamma_says_what_it_chose_and_why(observed: Observed) -> None:
    result, spans = traced(observed, request(PROMPT, temperature=0, max_tokens=60, adaptive_speculative_tokens=True))
    rounds = [span for span in named(spans, "tandem.round") if span.attributes["tandem.outcome"] == "committed"]
    for span in rounds:
        schema.check(span)
        assert span.attributes["tandem.gamma_chosen"] >= span.attributes["tandem.gamma"]
    reasons = {span.attributes["tandem.gamma_reason"] for span in rounds}
    assert reasons <= {"best", "trial", "unknown_cost"}
    assert "best" in reasons
    assert result.speculation.expected_speedup > 0
    [root] = named(spans, "generate")
    assert root.attributes["tandem.adaptive_speculative_tokens"] is True


def test_the_trace_continues_the_callers(speculative: tuple[Generation, list[Span]]) -> None:
    _, spans = speculative
    [root] = named(spans, "generate")
    assert root.parent_id == CALLER_SPAN
    assert {span.service for span in spans} == {"tandem-orchestrator", "tandem-draft", "tandem-target"}


def test_each_span_hangs_where_the_schema_says(speculative: tuple[Generation, list[Span]]) -> None:
    _, spans = speculative
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        parent = schema.SCHEMA["spans"][span.name]["parent"]
        if span.name != "generate":
            assert by_id[span.parent_id].name == parent
            assert span.start_ns >= by_id[span.parent_id].start_ns
        assert span.end_ns >= span.start_ns


def test_each_item_is_linked_from_the_step_that_ended_it(
    observed: Observed, speculative: tuple[Generation, list[Span]]
) -> None:
    """A step serves many requests: it is in none of their traces."""
    _, spans = speculative
    for item, step in (("draft.propose", "draft.step"), ("target.verify", "target.step")):
        items = {span.span_id for span in named(spans, item)}
        steps = observed.collector.wait_for_links(items)
        assert {span.name for span in steps} == {step}
        assert Counter(link for span in steps for link in span.links) == Counter(items)
        for span in steps:
            schema.check(span)
            assert span.parent_id == ""


def test_there_is_one_round_span_per_round_and_each_has_its_parts(speculative: tuple[Generation, list[Span]]) -> None:
    result, spans = speculative
    rounds = sorted(named(spans, "tandem.round"), key=lambda span: span.attributes["tandem.round"])
    assert [span.attributes["tandem.round"] for span in rounds] == list(range(result.speculation.rounds))
    for span in rounds:
        parts = count([each for each in spans if each.parent_id == span.span_id])
        drafted = 1 if span.attributes["tandem.gamma"] else 0
        assert (parts["target.verify"], parts["tandem.accept"], parts["tandem.commit"]) == (1, 1, 1)
        assert parts["draft.propose"] == drafted
        assert span.attributes["tandem.outcome"] == "committed"


def test_the_sums_over_the_rounds_are_the_usage(speculative: tuple[Generation, list[Span]]) -> None:
    result, spans = speculative
    [root] = named(spans, "generate")
    rounds, speculation = named(spans, "tandem.round"), result.speculation
    assert root.attributes["gen_ai.usage.input_tokens"] == result.usage[0]
    assert root.attributes["gen_ai.usage.output_tokens"] == result.usage[1] == total(rounds, "tandem.emitted")
    assert total(rounds, "tandem.gamma") == speculation.draft_tokens
    assert total(rounds, "tandem.accepted") == speculation.accepted_tokens
    assert total(rounds, "tandem.expected_acceptance") == pytest.approx(speculation.expected_accepted_tokens)
    assert total(named(spans, "target.verify"), "tandem.target_rows") >= speculation.draft_tokens + speculation.rounds


def test_the_spans_agree_with_the_schema_and_show_the_request(speculative: tuple[Generation, list[Span]]) -> None:
    _, spans = speculative
    for span in spans:
        schema.check(span)
    [root] = named(spans, "generate")
    shown = {key.removeprefix("gen_ai.request."): value for key, value in root.attributes.items()}
    assert (shown["max_tokens"], shown["top_k"], shown["seed"]) == (40, 40, 7)
    assert shown["temperature"] == pytest.approx(0.8)
    assert root.attributes["tandem.request_id"] == "traced-1"
    assert root.attributes["gen_ai.response.finish_reasons"] in (["stop"], ["length"])
    prefills = [span.attributes["tandem.prefill_tokens"] for span in named(spans, "target.verify")]
    assert max(prefills) == root.attributes["gen_ai.usage.input_tokens"]


def test_no_text_and_no_ids_of_tokens_are_exported(
    observed: Observed, speculative: tuple[Generation, list[Span]]
) -> None:
    words = re.findall(r"\w{5,}", PROMPT + speculative[0].text)
    assert words
    shown = " ".join(str((span.attributes, span.events)) for span in observed.collector.spans)
    assert not [word for word in words if word in shown]


def test_a_refused_request_is_a_trace_too(observed: Observed) -> None:
    trace_id, metadata = new_trace()
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(observed.channel)
    with pytest.raises(grpc.RpcError):
        list(stub.Generate(request(PROMPT, max_tokens=0), metadata=metadata, timeout=30))
    [root] = observed.collector.wait(trace_id, lambda spans: len(spans) == 1)
    schema.check(root)
    assert (root.attributes["tandem.status"], root.status) == ("INVALID_ARGUMENT", 0)


def test_a_deadline_that_passes_is_told_from_a_cancellation(observed: Observed) -> None:
    """On a connection that paces it: unread, the request can't come to its end before."""
    sent = request(PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0)
    with paced_channel(observed.stack.orchestrator.address) as channel:
        for timeout in (2, 8, 30):  # the next, where nothing came before it passed, on a slow machine
            trace_id, metadata = new_trace()
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            call = stub.Generate(sent, metadata=metadata, timeout=timeout)
            with contextlib.suppress(grpc.RpcError):
                next(call)
                break
        while call.is_active():
            time.sleep(0.05)
        with pytest.raises(grpc.RpcError):
            list(call)
    [root] = named(observed.collector.wait(trace_id, _all_ended), "generate")
    assert (root.attributes["tandem.status"], root.status) == ("DEADLINE_EXCEEDED", 2)
    assert root.attributes["gen_ai.usage.output_tokens"] > 0


def test_a_take_over_is_seen_on_both_sides(observed: Observed) -> None:
    (first, first_metadata), (second, second_metadata) = new_trace(), new_trace()
    sent = request(PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0, request_id="taken-over")
    with paced_channel(observed.stack.orchestrator.address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        lost = stub.Generate(sent, metadata=first_metadata, timeout=60)
        had = sum(len(next(lost).tokens) for _ in range(3))
        sent.token_offset = had
        taken = stub.Generate(sent, metadata=second_metadata, timeout=60)
        next(taken)
        with pytest.raises(grpc.RpcError) as ended:
            list(lost)
        assert ended.value.code() is grpc.StatusCode.ABORTED
        taken.cancel()
    [old] = named(observed.collector.wait(first, _all_ended), "generate")
    assert old.attributes["error.type"] == "ABORTED"
    [new] = named(observed.collector.wait(second, _all_ended), "generate")
    schema.check(new)
    events = dict(new.events)
    assert events["tandem.resume"]["tandem.token_offset"] == had
    assert events["tandem.resume"]["tandem.committed_tokens"] >= had


def test_a_change_of_the_sampling_is_seen_in_the_trace_the_metrics_and_the_log(observed: Observed) -> None:
    trace_id, metadata = new_trace()
    before = observed.scrape("orchestrator")
    sent = request(PROMPT, max_tokens=100, ignore_eos=True, temperature=1.0, request_id="changed-midway")
    with paced_channel(observed.stack.orchestrator.address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        call = stub.Generate(sent, metadata=metadata, timeout=60)
        received = [next(call)]
        answer = stub.UpdateSampling(
            api.UpdateSamplingRequest(request_id="changed-midway", temperature=0.5), timeout=60
        )
        result = gather([*received, *call])
    spans = observed.collector.wait(trace_id, _all_ended)
    [root] = named(spans, "generate")
    schema.check(root)
    assert dict(root.events)["tandem.sampling_changed"] == {
        "tandem.config_version": 1,
        "tandem.committed_tokens": answer.completion_tokens,
    }
    # What was dropped is no round of the statistics.
    outcomes = Counter(span.attributes["tandem.outcome"] for span in named(spans, "tandem.round"))
    assert outcomes["committed"] == result.speculation.rounds
    assert outcomes["abandoned"] >= 1
    after = observed.scrape("orchestrator")
    for name, labels, risen in (
        ("tandem_sampling_updates_total", {"outcome": "OK"}, 1),
        ("tandem_sampling_changes_total", {}, 1),
        ("tandem_generation_tokens_total", {}, result.usage[1]),
    ):
        assert after.value(name, **labels) - before.value(name, **labels) == risen, name
    _wait(lambda: "sampling updated" in observed.stack.orchestrator.log.read_text())


def test_a_trace_that_the_caller_does_not_sample_has_no_spans(observed: Observed) -> None:
    trace_id, metadata = new_trace(sampled=False)
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(observed.channel)
    gather(stub.Generate(request(PROMPT, max_tokens=8), metadata=metadata, timeout=60))
    traced(observed, request(PROMPT, max_tokens=4))
    assert observed.collector.trace(trace_id) == []
    _wait(lambda: trace_id in observed.stack.orchestrator.log.read_text())


def test_twenty_cancelled_streams_end_all_their_spans_and_leave_no_error(observed: Observed) -> None:
    logs = [service.log for service in (observed.stack.orchestrator, observed.stack.draft, observed.stack.target)]
    before = [len(log.read_text()) for log in logs]
    traces = []
    with paced_channel(observed.stack.orchestrator.address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        for number in range(20):
            trace_id, metadata = new_trace()
            sent = request(PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0, seed=number)
            call = stub.Generate(sent, metadata=metadata, timeout=60)
            for _ in range(3):
                next(call)
            call.cancel()
            traces.append(trace_id)
    for trace_id in traces:
        spans = observed.collector.wait(trace_id, _all_ended)
        [root] = named(spans, "generate")
        assert root.attributes["tandem.status"] == "CANCELLED"
        assert len(named(spans, "tandem.round")) >= 3
        for span in spans:
            schema.check(span)
    for log, start in zip(logs, before, strict=True):
        written = log.read_text()[start:]
        assert "Failed to detach context" not in written
        assert not [line for line in written.splitlines() if '"level": "ERROR"' in line or "Traceback" in line]


def test_a_draft_that_stops_is_seen_in_the_trace_the_metrics_and_the_log(observed: Observed) -> None:
    before = observed.scrape("orchestrator")
    observed.stack.draft.signal(signal.SIGSTOP)
    try:
        request_id = f"degraded-{secrets.token_hex(4)}"
        sent = request(PROMPT, request_id=request_id, max_tokens=12, temperature=0, num_speculative_tokens=4)
        result, spans = traced(observed, sent)
    finally:
        observed.stack.draft.signal(signal.SIGCONT)
    # An unanswered ping may be noticed before the draft's time is up.
    reasons = set(result.speculation.degraded_reasons)
    assert reasons
    assert reasons <= {"draft_timeout", "draft_unavailable"}
    degraded = [span for span in named(spans, "tandem.round") if "tandem.degraded_reason" in span.attributes]
    assert len(degraded) == result.speculation.degraded_rounds
    assert {span.attributes["tandem.degraded_reason"] for span in degraded} == reasons
    events = [event for span in degraded for event in span.events]
    assert any(name == "tandem.fallback" and attributes["tandem.reason"] in reasons for name, attributes in events)
    for span in spans:
        schema.check(span)
    counted = before.total("tandem_degraded_rounds_total") + result.speculation.degraded_rounds
    observed.wait_scraped("orchestrator", lambda found: found.total("tandem_degraded_rounds_total") == counted)
    [line] = _wait(lambda: [line for line in observed.log_lines() if '"status"' in line and request_id in line])
    logged = json.loads(line)["degraded"]
    assert set(logged) == reasons
    assert sum(logged.values()) == result.speculation.degraded_rounds


def test_a_commit_that_is_repeated_is_seen_in_the_trace_and_the_metrics(observed: Observed) -> None:
    assert observed.stack.store_proxy is not None
    before = observed.scrape("orchestrator").value("tandem_store_retries_total")
    trace_id, metadata = new_trace()
    sent = request(PROMPT, max_tokens=60, ignore_eos=True, temperature=1.0)
    with paced_channel(observed.stack.orchestrator.address) as channel:
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(sent, metadata=metadata, timeout=120)
        begun = [next(call) for _ in range(3)]
        # Not only one: a look at the store's health may take it.
        observed.stack.store_proxy.do(lambda proxy: proxy.lose_next(Direction.TO_CLIENT, 3))
        result = gather([*begun, *call])
    spans = observed.collector.wait(trace_id, lambda spans: count(spans)["tandem.round"] >= result.speculation.rounds)
    events = [event for span in named(spans, "tandem.round") for event in span.events]
    assert "store" in [fields["tandem.role"] for name, fields in events if name == "tandem.retry"]
    observed.wait_scraped("orchestrator", lambda found: found.value("tandem_store_retries_total") > before)
    assert result.usage[1] == 60


def test_a_target_that_dies_is_seen_in_the_trace_the_metrics_and_the_log(observed: Observed) -> None:
    before = observed.scrape("orchestrator")
    trace_id, metadata = new_trace()
    sent = request(PROMPT, max_tokens=120, ignore_eos=True, temperature=1.0, request_id="outlives-its-target")
    with paced_channel(observed.stack.orchestrator.address) as channel:
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(sent, metadata=metadata, timeout=120)
        begun = [next(call) for _ in range(3)]
        observed.stack.target.kill()
        observed.stack.target.start()
        result = gather([*begun, *call])
    spans = observed.collector.wait(trace_id, lambda spans: count(spans)["tandem.round"] >= result.speculation.rounds)
    events = [event for span in named(spans, "tandem.round") for event in span.events]
    rebuilds = [fields for name, fields in events if name == "tandem.rebuild" and fields["tandem.role"] == "target"]
    retries = [fields for name, fields in events if name == "tandem.retry"]
    assert rebuilds
    assert "StreamLost" in {fields["tandem.reason"] for fields in retries}
    assert any(name == "tandem.rollback" for name, _ in events)
    for counter, seen in (
        ("tandem_cache_rebuilds_total", len(rebuilds)),
        ("tandem_rounds_rescored_total", len(retries)),
    ):
        risen = before.total(counter) + seen
        observed.wait_scraped("orchestrator", lambda found, counter=counter, risen=risen: found.total(counter) >= risen)  # type: ignore[misc]
    lines = [json.loads(line) for line in observed.log_lines() if trace_id in line]
    warnings = [line for line in lines if line["message"].startswith("the round is scored again")]
    assert len(warnings) == len(retries)
    assert {line["request_id"] for line in warnings} == {"outlives-its-target"}
    observed.stack.orchestrator.wait_serving()


def _wait(what: Callable[[], T], seconds: float = 60) -> T:
    """What it is once it is anything: a log has a line a moment after the answer."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def _all_ended(spans: list[Span]) -> bool:
    """A parent that is not there would be a span that was never ended."""
    present = {span.span_id for span in spans} | {CALLER_SPAN}
    return bool(named(spans, "generate")) and all(span.parent_id in present for span in spans)


def test_a_degraded_request_is_traced_where_the_sampler_leaves_all_others_out(tmp_path: Path) -> None:
    with running_collector() as (collector, endpoint):
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
            "TANDEM_TRACE_SLOW_SECONDS": "600",
        }
        pair = (MODELS / "tiny-target", MODELS / "tiny-draft")
        with (
            running_stack(tmp_path, *pair, environment) as stack,
            open_channel(stack.orchestrator.address) as channel,
        ):
            generate(channel, PROMPT, max_tokens=6, request_id="well")
            stack.draft.kill()
            result = generate(channel, PROMPT, max_tokens=6, request_id="degraded", num_speculative_tokens=3)
            assert result.speculation.degraded_rounds > 0
            _wait(lambda: collector.spans)
    assert [span.attributes["tandem.request_id"] for span in collector.spans] == ["degraded"]
    [span] = collector.spans
    schema.check(span)
    assert span.attributes["tandem.noticed"] == "degraded"
    # The log leads to it.
    assert span.trace_id in (tmp_path / "orchestrator.log").read_text()
