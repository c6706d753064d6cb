"""Metrics over HTTP: the named series, and what must always add up."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Container
from importlib import metadata

import grpc
import httpx2
import pytest

from orchestrator.completion import FinishReason
from orchestrator.metrics import (
    BENCH_REASONS,
    DEGRADED_REASONS,
    GAMMA_REASONS,
    LIMIT_DIRECTIONS,
    ROLES,
    ROUND_OUTCOMES,
)
from orchestrator.session_store import (
    AlreadyExists,
    AlreadyFinished,
    ConfigChanged,
    EpochConflict,
    FencedOff,
    StateLost,
    StoreFull,
    StoreUnavailable,
)
from tandem.acceptance import TokenKind
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import Generation, generate, generate_all, paced_channel, request
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
    "tandem_forward_tokens_limit",
    "tandem_forward_tokens_total",
    "tandem_forwards_total",
    "tandem_gathering_seconds_sum",
    "tandem_invariant_violations_total",
    "tandem_items_running",
    "tandem_kv_cache_usage_perc",
    "tandem_prefix_cache_hit_sessions_total",
    "tandem_prefix_cache_hits_total",
    "tandem_prefix_cache_queries_total",
    "tandem_sessions",
    "tandem_sessions_displaced_total",
    "tandem_sessions_refused_total",
    "tandem_sessions_waiting",
    "tandem_slots_of_one_orchestrator",
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


END = 0
"""The tiny models' end token, with a bias that nothing withstands after the least number of tokens."""


def mixed_requests(natural: Generation) -> list[object]:
    """Requests whose blocks are cut by the end token, a stop token, a stop string, a length, and not at all."""
    ends = [{"logit_bias": {END: 100.0}, "min_tokens": minimum} for minimum in (1, 4, 7)]
    stop_ids = [{"stop_token_ids": [natural.ids[index]]} for index in (3, 6, 9)]
    stops = [{"stop": [natural.pieces[3][:4] or "("]}, {"stop": ["\n"]}]
    lengths = [{"max_tokens": length} for length in (1, 2, 5, 17)]
    gammas = [{"num_speculative_tokens": gamma} for gamma in (0, 1, 8)]
    fields = [{"temperature": 0.0, "max_tokens": 24, **each} for each in (*ends, *stop_ids, *stops, *lengths, *gammas)]
    return [request(PROMPT, **each) for each in fields]


def test_callers_see_no_metrics_where_these_have_a_port_of_their_own(observed: Observed) -> None:
    with httpx2.Client(base_url=f"http://{observed.http}", timeout=60, trust_env=False) as http:
        assert http.get("/healthz").status_code == 200
        assert http.get("/metrics").status_code == 404


def test_the_named_series_are_there(observed: Observed) -> None:
    generate(observed.channel, PROMPT, max_tokens=8, temperature=0, num_speculative_tokens=3)
    _wait_until_idle(observed)
    assert observed.scrape("orchestrator").names >= ORCHESTRATOR_SERIES
    for worker in ("draft", "target"):
        assert observed.scrape(worker).names >= WORKER_SERIES


def test_emitted_is_accepted_and_recovered_and_bonus_is_what_was_used(observed: Observed) -> None:
    natural = generate(observed.channel, PROMPT, max_tokens=24, temperature=0)
    _wait_until_idle(observed)
    before = observed.scrape("orchestrator")
    results = generate_all(observed.channel, mixed_requests(natural))
    _wait_until_idle(observed)
    assert [(result.reason, result.ids[-1], result.usage[1]) for result in results[:3]] == [
        (FinishReason.STOP, END, length) for length in (2, 5, 8)
    ]
    ended = before.value("tandem_requests_total", outcome="OK") + len(results)
    change = Change(
        before,
        observed.wait_scraped(
            "orchestrator", lambda found: found.value("tandem_requests_total", outcome="OK") >= ended
        ),
    )
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
    _wait_until_idle(observed)
    before = observed.scrape("orchestrator")
    with paced_channel(observed.stack.orchestrator.address) as channel:
        during = _amid_a_request(observed, channel, before)
    assert during.value("tandem_num_requests_running") == 1
    _wait_until_idle(observed)
    cancelled = before.value("tandem_requests_total", outcome="CANCELLED") + 1
    observed.wait_scraped(
        "orchestrator", lambda found: found.value("tandem_requests_total", outcome="CANCELLED") == cancelled
    )


def _amid_a_request(observed: Observed, channel: grpc.Channel, before: Scrape) -> Scrape:
    """Once three rounds of it are counted, with the draft there."""
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    call = stub.Generate(request(PROMPT, max_tokens=400, ignore_eos=True, temperature=1.0), timeout=60)
    for _ in range(3):
        next(call)
    during = observed.wait_scraped(
        "orchestrator",
        lambda found: (
            Change(before, found).total("tandem_rounds_total") >= 3
            and found.value("tandem_replicas_ready", role="draft") == 1
        ),
    )
    call.cancel()
    return during


MARK = "zqxjkv"
"""In whatever of a request is the caller's to choose; never in a label or a log."""

LABELS: dict[tuple[str, str], Container[str]] = {
    ("tandem_requests", "outcome"): {status.name for status in grpc.StatusCode},
    ("tandem_sampling_updates", "outcome"): {status.name for status in grpc.StatusCode},
    ("tandem_emitted_tokens", "kind"): {"accepted", "recovered", "bonus"},
    ("tandem_spec_decode_num_accepted_tokens_per_pos", "position"): {str(position) for position in range(16)},
    ("tandem_rounds", "outcome"): ROUND_OUTCOMES,
    ("tandem_degraded_rounds", "reason"): DEGRADED_REASONS,
    ("tandem_draft_benchings", "reason"): BENCH_REASONS,
    ("tandem_block_limits", "direction"): LIMIT_DIRECTIONS,
    ("tandem_cache_rebuilds", "role"): ROLES,
    ("tandem_gamma_choices", "reason"): GAMMA_REASONS,
    ("tandem_expected_tokens_per_second", "rounds"): {"speculative", "plain"},
    ("tandem_replicas_ready", "role"): ROLES,
    ("tandem_worker_sessions", "role"): ROLES,
    ("tandem_worker_items_pending", "role"): ROLES,
    ("tandem_store_refusals", "error"): {
        error.__name__
        for error in (
            AlreadyExists,
            AlreadyFinished,
            ConfigChanged,
            EpochConflict,
            FencedOff,
            StateLost,
            StoreFull,
            StoreUnavailable,
        )
    },
    ("tandem_draft_ahead_items", "outcome"): {"chain", "branch", "miss"},
    ("tandem_sessions_refused", "reason"): {"full", "late", "gave_way"},
    ("tandem_compilations", "when"): {"start", "serving"},
    **{(f"tandem_draft_{each}", "source"): {"model", "ngram"} for each in ("blocks", "tokens", "accepted_tokens")},
    ("tandem_trace_spans", "fate"): {"exported", "failed", "dropped"},
    ("tandem_build_info", "service"): {"orchestrator", "draft", "target"},
    ("tandem_build_info", "version"): {metadata.version("tandem-decoding")},
}


def hostile_requests() -> list[api.GenerateRequest]:
    """What a caller chooses, in as many fields as there are, good and bad."""
    bad = [
        {"request_id": f"{MARK} {MARK}"},
        {"max_tokens": 2**31},
        {"temperature": float("nan")},
        {"stop": [MARK * 100]},
        {"stop": [MARK] * 1000},
        {"num_speculative_tokens": 10_000},
        {"n": 10_000},
        {"logit_bias": {4_000_000: 1.0}},
        {"token_offset": 3, "request_id": MARK},
        {"bad_words": [MARK] * 100_000},
    ]
    good = [
        {"request_id": f"{MARK}-{number}", "seed": number, "num_speculative_tokens": gamma, "stop": [MARK]}
        for number, gamma in enumerate((0, 1, 3, 8, 16))
    ]
    good += [{"n": 3}, {"cache_salt": MARK}, {"adaptive_speculative_tokens": True}]
    return [request(f"{MARK} = 1\n", **{"max_tokens": 8, **fields}) for fields in (*bad, *good)]


def test_no_label_and_no_log_holds_what_a_caller_chose(observed: Observed) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(observed.channel)
    outcomes: Counter[str] = Counter()
    for sent in hostile_requests():
        try:
            list(stub.Generate(sent, timeout=60, metadata=(("x-tandem", MARK), ("traceparent", MARK))))
            outcomes["OK"] += 1
        except grpc.RpcError as error:
            outcomes[error.code().name] += 1
    assert outcomes["INVALID_ARGUMENT"] >= 8
    assert outcomes["OK"] >= 8
    for service in observed.metrics:
        for family in observed.scrape(service).families:
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label == "le" and family.type == "histogram":
                        continue
                    assert value in LABELS[family.name.removesuffix("_created"), label], (sample.name, label, value)
    observed.wait_scraped("orchestrator", lambda found: found.value("tandem_trace_spans_total", fate="exported") > 0)
    for service in observed.stack.services:
        # The request's id is the one thing that a log holds.
        written = re.sub(rf'"(request_id)": "{MARK}[-\d]*"', "", service.log.read_text())
        assert MARK not in written, service.module


def test_the_speed_with_blocks_and_without_is_told_of_requests_with_a_fixed_gamma(observed: Observed) -> None:
    for _ in range(3):
        generate(observed.channel, PROMPT, max_tokens=40, temperature=0, num_speculative_tokens=3)
    found = observed.wait_scraped(
        "orchestrator",
        lambda found: all(
            found.value("tandem_expected_tokens_per_second", rounds=rounds) > 0 for rounds in ("speculative", "plain")
        ),
    )
    speculative, plain = (
        found.value("tandem_expected_tokens_per_second", rounds=rounds) for rounds in ("speculative", "plain")
    )
    assert found.value("tandem_expected_speedup") == pytest.approx(speculative / plain, rel=0.05)


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


def _wait_until_idle(observed: Observed) -> None:
    """All slots come back, and what ended is counted."""
    _until(lambda: not any(_levels(observed)))


def _levels(observed: Observed) -> list[float]:
    found = {service: observed.scrape(service) for service in observed.metrics}
    names = ("tandem_sessions", "tandem_kv_cache_usage_perc")
    of_workers = [found[worker].value(name) for worker in ("draft", "target") for name in names]
    return [found["orchestrator"].value("tandem_num_requests_running"), *of_workers]


def _until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)
