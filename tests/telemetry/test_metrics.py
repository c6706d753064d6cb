"""Metrics over HTTP: the named series, and what must always add up."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from orchestrator.metrics import ROUND_OUTCOMES
from tandem.acceptance import TokenKind
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import Generation, generate, generate_all, request
from tests.telemetry.conftest import Observed
from tests.telemetry.scrape import Scrape

PROMPT = "def read_lines(path):\n"

ORCHESTRATOR_SERIES = {
    "tandem_build_info",
    "tandem_cache_rebuilds_total",
    "tandem_commit_seconds_count",
    "tandem_degraded_rounds_total",
    "tandem_e2e_request_latency_seconds_bucket",
    "tandem_emitted_tokens_total",
    "tandem_expected_accepted_tokens_total",
    "tandem_generation_tokens_total",
    "tandem_inter_token_latency_seconds_bucket",
    "tandem_num_requests_running",
    "tandem_num_requests_waiting",
    "tandem_num_speculative_tokens_bucket",
    "tandem_prompt_tokens_total",
    "tandem_propose_seconds_bucket",
    "tandem_replicas_ready",
    "tandem_request_queue_time_seconds_bucket",
    "tandem_requests_total",
    "tandem_rounds_rescored_total",
    "tandem_rounds_total",
    "tandem_spec_decode_num_accepted_tokens_per_pos_total",
    "tandem_spec_decode_num_accepted_tokens_total",
    "tandem_spec_decode_num_draft_tokens_total",
    "tandem_spec_decode_num_drafts_total",
    "tandem_store_retries_total",
    "tandem_time_to_first_token_seconds_bucket",
    "tandem_trace_spans_total",
    "tandem_verify_seconds_bucket",
}
WORKER_SERIES = {
    "tandem_batch_size_count",
    "tandem_batch_size_sum",
    "tandem_build_info",
    "tandem_failed_forwards_total",
    "tandem_forward_tokens_total",
    "tandem_forwards_total",
    "tandem_invariant_violations_total",
    "tandem_items_running",
    "tandem_kv_cache_usage_perc",
    "tandem_prefix_cache_hit_sessions_total",
    "tandem_prefix_cache_hits_total",
    "tandem_prefix_cache_queries_total",
    "tandem_sessions",
    "tandem_sessions_waiting",
    "tandem_step_seconds_sum",
    "tandem_trace_spans_total",
}


class Change:
    """What was counted between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before, after

    def value(self, name: str, **labels: str) -> float:
        return self._after.value(name, **labels) - self._before.value(name, **labels)

    def total(self, name: str) -> float:
        return self._after.total(name) - self._before.total(name)


def mixed_requests(natural: Generation) -> list[object]:
    """Requests whose blocks are cut by a stop token, a stop string, a length, and not at all."""
    stop_ids = [{"stop_token_ids": [natural.ids[index]]} for index in (3, 6, 9)]
    stops = [{"stop": [natural.pieces[3][:4] or "("]}, {"stop": ["\n"]}]
    lengths = [{"max_tokens": length} for length in (1, 2, 5, 17)]
    gammas = [{"num_speculative_tokens": gamma} for gamma in (0, 1, 8)]
    fields = [{"temperature": 0.0, "max_tokens": 24, **each} for each in (*stop_ids, *stops, *lengths, *gammas)]
    return [request(PROMPT, **each) for each in fields]


def test_the_named_series_are_there(observed: Observed) -> None:
    generate(observed.channel, PROMPT, max_tokens=8, temperature=0, num_speculative_tokens=3)
    assert observed.scrape("orchestrator").names >= ORCHESTRATOR_SERIES
    for worker in ("draft", "target"):
        assert observed.scrape(worker).names >= WORKER_SERIES


def test_emitted_is_accepted_and_recovered_and_bonus_is_what_was_used(observed: Observed) -> None:
    natural = generate(observed.channel, PROMPT, max_tokens=24, temperature=0)
    before = observed.scrape("orchestrator")
    results = generate_all(observed.channel, mixed_requests(natural))
    change = Change(before, observed.scrape("orchestrator"))
    kinds = Counter(TokenKind(kind).name.lower() for result in results for kind in result.kinds)
    completion_tokens = sum(result.usage[1] for result in results)
    for kind in TokenKind:
        name = kind.name.lower()
        assert change.value("tandem_emitted_tokens_total", kind=name) == kinds[name]
    assert change.total("tandem_emitted_tokens_total") == completion_tokens
    assert change.total("tandem_generation_tokens_total") == completion_tokens
    assert change.total("tandem_prompt_tokens_total") == sum(result.usage[0] for result in results)
    speculation = [result.speculation for result in results]
    accepted = sum(each.accepted_tokens for each in speculation)
    assert change.total("tandem_spec_decode_num_accepted_tokens_total") == accepted == kinds["accepted"]
    assert change.total("tandem_spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert change.total("tandem_spec_decode_num_draft_tokens_total") == sum(each.draft_tokens for each in speculation)
    assert change.total("tandem_expected_accepted_tokens_total") == pytest.approx(
        sum(each.expected_accepted_tokens for each in speculation)
    )
    rounds = sum(each.rounds for each in speculation)
    assert change.total("tandem_rounds_total") == rounds == change.value("tandem_commit_seconds_count")
    assert change.value("tandem_num_speculative_tokens_count") == rounds
    assert change.value("tandem_requests_total", outcome="OK") == len(results)
    assert change.value("tandem_time_to_first_token_seconds_count") == len(results)
    assert change.value("tandem_e2e_request_latency_seconds_count") == len(results)


def test_metrics_move_while_a_request_runs(observed: Observed) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(observed.channel)
    before = observed.scrape("orchestrator")
    call = stub.Generate(request(PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0), timeout=60)
    for _ in range(3):
        next(call)
    during = observed.scrape("orchestrator")
    call.cancel()
    change = Change(before, during)
    assert change.total("tandem_rounds_total") >= 3
    assert during.value("tandem_num_requests_running") == 1
    assert during.value("tandem_replicas_ready", role="draft") == 1
    _wait_until_idle(observed)
    assert Change(before, observed.scrape("orchestrator")).value("tandem_requests_total", outcome="CANCELLED") == 1


def test_the_labels_have_no_more_values_than_declared(observed: Observed) -> None:
    found = observed.scrape("orchestrator")
    assert found.label_values("tandem_rounds_total", "outcome") == set(ROUND_OUTCOMES)
    assert found.label_values("tandem_trace_spans_total", "fate") == {"exported", "failed", "dropped"}
    assert found.value("tandem_trace_spans_total", fate="exported") > 0


def test_workers_count_what_they_run(observed: Observed) -> None:
    before = {worker: observed.scrape(worker) for worker in ("draft", "target")}
    result = generate(observed.channel, PROMPT, max_tokens=16, temperature=0, num_speculative_tokens=3)
    target = Change(before["target"], observed.scrape("target"))
    draft = Change(before["draft"], observed.scrape("draft"))
    assert target.value("tandem_forwards_total") >= result.speculation.rounds
    assert target.value("tandem_batch_size_sum") >= result.speculation.rounds
    assert target.value("tandem_forward_tokens_total") >= result.usage[0] + result.speculation.draft_tokens
    assert draft.value("tandem_forwards_total") >= result.speculation.draft_tokens
    assert draft.value("tandem_step_seconds_sum") > 0
    _wait_until_idle(observed)


def test_a_request_leaves_one_complete_line_in_the_log(observed: Observed) -> None:
    result = generate(
        observed.channel, PROMPT, max_tokens=12, temperature=0, num_speculative_tokens=3, request_id="one-line"
    )
    time.sleep(0.2)
    lines = observed.stack.orchestrator.log.read_text().splitlines()
    [line] = [line for line in lines if '"one-line"' in line]
    fields = json.loads(line)
    assert fields["level"] == "INFO"
    assert (fields["status"], fields["finish_reason"]) == ("OK", "length")
    assert (fields["prompt_tokens"], fields["completion_tokens"]) == result.usage
    assert fields["rounds"] == result.speculation.rounds
    assert fields["draft_tokens"] == result.speculation.draft_tokens
    assert fields["accepted_tokens"] == result.speculation.accepted_tokens
    assert 0 < fields["time_to_first_token_seconds"] <= fields["total_seconds"]
    assert len(fields["trace_id"]) == 32


def _wait_until_idle(observed: Observed) -> None:
    """All slots come back."""
    for _ in range(100):
        found = {service: observed.scrape(service) for service in observed.metrics}
        running = found["orchestrator"].value("tandem_num_requests_running")
        if running == 0 and all(found[worker].value("tandem_sessions") == 0 for worker in ("draft", "target")):
            assert found["target"].value("tandem_kv_cache_usage_perc") == 0
            return
        time.sleep(0.05)
    raise AssertionError("sessions are left")
