"""A bad draft among good ones is benched: the output is right all along, speculation goes on elsewhere, and it gets another chance."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orchestrator.bench import STRIKES, YIELD_TOKENS, Bench
from tandem.v1 import draft_pb2
from tests.support.channels import open_channel
from tests.support.generation import Generation, generate, generate_all, request
from tests.support.liars import LyingWorker, honest
from tests.support.ports import free_port
from tests.support.services import MODELS, ServiceProcess, Stack, running_stack
from tests.telemetry.scrape import scrape

PROMPT = [5, 6, 7]
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "num_speculative_tokens": 3}
BACKOFF = 0.5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("bench")
    # The draft is the target itself: whatever is not accepted is the liar's work.
    with running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-target") as running:
        yield running


@pytest.fixture(scope="module")
def liar(stack: Stack) -> Iterator[LyingWorker]:
    worker = LyingWorker("draft", stack.draft.address)
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def metrics() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def orchestrator(
    stack: Stack, liar: LyingWorker, metrics: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """With two drafts, of which one may lie."""
    address = f"127.0.0.1:{free_port()}"
    environment = {
        "TANDEM_ORCHESTRATOR_LISTEN": address,
        "TANDEM_ORCHESTRATOR_METRICS_LISTEN": metrics,
        "TANDEM_DRAFT_ADDRESSES": f"{liar.address},{stack.draft.address}",
        "TANDEM_TARGET_ADDRESSES": stack.target.address,
        "TANDEM_TOKENIZER": str(MODELS / "tiny-target"),
        "TANDEM_REDIS_URL": stack.redis_url,
        "TANDEM_DRAFT_BACKOFF_SECONDS": str(BACKOFF),
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "3",
    }
    log = tmp_path_factory.mktemp("orchestrator") / "orchestrator.log"
    process = ServiceProcess("orchestrator", address, environment, log)
    process.start()
    process.wait_serving()
    yield process
    process.stop()


@pytest.fixture
def channel(orchestrator: ServiceProcess, liar: LyingWorker) -> Iterator[grpc.Channel]:
    liar.lie = honest
    with open_channel(orchestrator.address) as opened:
        _until(lambda: _well(opened, orchestrator))
        yield opened
    liar.lie = honest


def _well(channel: grpc.Channel, orchestrator: ServiceProcess) -> bool:
    """Both drafts are in use: as many trials ended well as began."""
    generate(channel, PROMPT, **FIELDS)
    log = orchestrator.log.read_text()
    return (log.count("is connected") >= 3 and log.count("is benched") == 0) or log.rfind("well again") > log.rfind(
        "is benched"
    )


def _until(what: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _truth(channel: grpc.Channel, **fields: Any) -> tuple[Any, ...]:
    return generate(channel, PROMPT, **{**FIELDS, **fields, "num_speculative_tokens": 0}).seen


def _invalid(batch: draft_pb2.ProposalBatch) -> Iterator[draft_pb2.ProposalBatch]:
    for item in batch.items:
        for token in item.proposal.tokens:
            token.token_id = 10**6
    yield batch


def _silent(batch: draft_pb2.ProposalBatch) -> Iterator[draft_pb2.ProposalBatch]:
    yield from ()


def _benchings(metrics: str, reason: str) -> float:
    return scrape(metrics).value("tandem_draft_benchings_total", reason=reason)


def test_one_that_lies_is_benched_and_the_other_goes_on(
    channel: grpc.Channel, liar: LyingWorker, metrics: str, orchestrator: ServiceProcess
) -> None:
    truth, before = _truth(channel), _benchings(metrics, "draft_invalid")
    liar.lie = _invalid
    # Sessions alternate between drafts that have as little to do, so one of the first requests meets the liar.
    first = next(
        one for one in (generate(channel, PROMPT, **FIELDS) for _ in range(20)) if one.speculation.benched_drafts
    )
    assert first.seen == truth
    # One round is lost, and the next one has a block from the other draft.
    assert first.speculation.degraded_rounds == 1
    assert list(first.speculation.degraded_reasons) == ["draft_invalid"]
    assert first.speculation.benched_drafts == 1
    assert first.speculation.accepted_tokens == first.speculation.draft_tokens > 20
    assert _benchings(metrics, "draft_invalid") == before + 1
    # Each trial that fails doubles the time, so there are few: after 0.5 s, 1.5 s, 3.5 s, ...
    began, faults = time.monotonic(), 0
    for _ in range(12):
        generation = generate(channel, PROMPT, **FIELDS)
        assert generation.seen == truth
        faults += generation.speculation.degraded_rounds
    assert faults <= 1 + math.log2((time.monotonic() - began) / BACKOFF + 1)
    assert "is benched for" in orchestrator.log.read_text()


def test_one_that_never_answers_is_benched_after_some_strikes(
    channel: grpc.Channel, liar: LyingWorker, metrics: str
) -> None:
    truth, before = _truth(channel, max_tokens=200), _benchings(metrics, "draft_timeout")
    liar.lie = _silent
    results: list[Generation] = []
    _until(lambda: _kept(results, generate(channel, PROMPT, **{**FIELDS, "max_tokens": 200})).benched_drafts == 1)
    assert [result.seen for result in results] == [truth] * len(results)
    assert _benchings(metrics, "draft_timeout") == before + 1
    after = generate(channel, PROMPT, **FIELDS)
    assert after.seen[0] == truth[0][: len(after.ids)]
    assert after.speculation.degraded_rounds <= 1, "at most a trial"
    assert after.speculation.accepted_tokens > 20


def _kept(results: list[Generation], result: Generation) -> Any:
    results.append(result)
    return result.speculation


def _wrong_guess(batch: draft_pb2.ProposalBatch) -> Iterator[draft_pb2.ProposalBatch]:
    """Within the rules, and worthless: certain of the same token, always."""
    for item in batch.items:
        for token in item.proposal.tokens:
            token.token_id = 3
            token.support_ids = (3).to_bytes(4, "little")
            token.support_probs = b"\x00\x00\x80\x3f"
    yield batch


def test_one_whose_guesses_are_worthless_is_benched(channel: grpc.Channel, liar: LyingWorker, metrics: str) -> None:
    """Its peer must have been seen to do better: two requests at once, one for each."""
    truth, before = _truth(channel), _benchings(metrics, "draft_collapsed")
    liar.lie = _wrong_guess
    benched = 0
    deadline = time.monotonic() + 120
    while not benched:
        assert time.monotonic() < deadline
        results = generate_all(channel, [request(PROMPT, **FIELDS)] * 2)
        assert [result.seen for result in results] == [truth] * len(results)
        benched = sum(result.speculation.benched_drafts for result in results)
    assert _benchings(metrics, "draft_collapsed") == before + 1


def test_the_record_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("orchestrator.bench.time", SimpleNamespace(monotonic=lambda: now))
    bench, peer = Bench("draft a"), Bench("draft b")
    for _ in range(STRIKES - 1):
        assert not bench.fault("draft_timeout", 0.05, at_once=False)
    bench.answered()
    assert not bench.fault("draft_timeout", 0.05, at_once=False), "only strikes in a row count"
    assert bench.usable
    assert bench.fault("draft_invalid", 0.05, at_once=True)
    assert not bench.usable
    now += 0.06
    assert bench.usable
    assert bench.due
    bench.taken()
    assert not bench.usable, "one trial at a time"
    assert bench.fault("draft_timeout", 0.05, at_once=False), "on probation one strike is enough"
    now += 0.06
    assert not bench.usable, "the time has doubled"
    now += 0.06
    bench.answered()
    assert bench.usable
    assert not bench.reason
    bench.yielded(YIELD_TOKENS, 5)
    assert not bench.collapsed([bench, peer]), "nobody to compare with"
    peer.yielded(YIELD_TOKENS, YIELD_TOKENS // 2)
    assert bench.collapsed([bench, peer])
    assert not peer.collapsed([bench, peer])
    peer.fault("draft_invalid", 1.0, at_once=True)
    assert not bench.collapsed([bench, peer]), "worse than one that is benched itself is no reason"
