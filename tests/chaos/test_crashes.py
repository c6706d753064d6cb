"""Processes die in mid stream: committed tokens stay, the text is the same, or the status says what is gone."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import redis

from tandem.cli.interruptions import Interruptions
from tandem.cli.plan import Endpoint
from tandem.cli.readiness import open_probe
from tandem.client import UnavailableError
from tandem.client.errors import to_tandem_error
from tandem.grpc_server import LIVENESS
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import Generation, gather, generate, paced_channel, request
from tests.support.services import MODELS, Stack, running_stack

PROMPT = [5, 6, 7]
TOKENS = 400
FIELDS = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "num_speculative_tokens": 2}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    environment = {
        "TANDEM_TARGET_RETRY_SECONDS": "60",
        "TANDEM_DRAFT_BACKOFF_SECONDS": "0.2",
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "1",
        "TANDEM_DRAIN_SECONDS": "240",
    }
    with running_stack(tmp_path, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as running:
        yield running


@pytest.fixture
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    with paced_channel(stack.orchestrator.address) as channel:
        yield channel


def _until(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _interrupted(
    channel: grpc.Channel, after: int, interrupt: Callable[[], None], **later: tuple[int, Callable[[], None]]
) -> Generation:
    """Runs the request and calls `interrupt` once `after` tokens have come, and what is to be called later as well."""
    interrupts = [(after, interrupt), *later.values()]
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)

    def responses() -> Iterator[api.GenerateResponse]:
        seen = 0
        for response in stub.Generate(request(PROMPT, **FIELDS), timeout=120):
            yield response
            before, seen = seen, seen + len(response.tokens)
            for at, action in interrupts:
                if before < at <= seen:
                    action()

    return gather(responses())


def test_the_draft_is_killed_and_comes_back(stack: Stack, channel: grpc.Channel) -> None:
    undisturbed = generate(channel, PROMPT, **FIELDS)
    result = _interrupted(channel, 40, stack.draft.kill)
    assert result.seen == undisturbed.seen
    assert "draft_unavailable" in result.speculation.degraded_reasons
    assert 0 < result.speculation.draft_tokens < undisturbed.speculation.draft_tokens
    stack.draft.start()
    stack.draft.wait_serving()
    _until(lambda: generate(channel, PROMPT, **FIELDS).speculation.degraded_rounds == 0)


def test_the_draft_hangs_and_goes_on(stack: Stack, channel: grpc.Channel) -> None:
    undisturbed = generate(channel, PROMPT, **FIELDS)

    # As long as a hundred tokens take without it: by the clock, on a busy machine, no round might have met it.
    result = _interrupted(
        channel,
        40,
        lambda: stack.draft.signal(signal.SIGSTOP),
        goes_on=(140, lambda: stack.draft.signal(signal.SIGCONT)),
    )
    assert result.seen == undisturbed.seen
    # Late at first; after a second or two without an answer to a ping it is taken to be gone.
    reasons = set(result.speculation.degraded_reasons)
    assert reasons
    assert reasons <= {"draft_timeout", "draft_shortened", "draft_unavailable"}


def test_the_target_is_killed_and_comes_back(stack: Stack, channel: grpc.Channel) -> None:
    undisturbed = generate(channel, PROMPT, **FIELDS)

    def crash() -> None:
        stack.target.kill()
        stack.target.start()

    result = _interrupted(channel, 40, crash)
    assert result.seen == undisturbed.seen
    assert result.speculation.rebuilds >= 1


def test_the_target_is_killed_and_stays_away(tmp_path: Path) -> None:
    environment = {"TANDEM_TARGET_RETRY_SECONDS": "2"}
    with (
        running_stack(tmp_path, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as stack,
        paced_channel(stack.orchestrator.address) as channel,
    ):
        started = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            _interrupted(channel, 40, stack.target.kill)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        error = to_tandem_error(caught.value)
        assert isinstance(error, UnavailableError)
        assert error.reason == "TARGET_UNAVAILABLE"
        assert error.retry_after_seconds is not None
        assert time.monotonic() - started < 60
        assert not stack.orchestrator.serving()
        assert "no target is connected: none came back within 2 s" in caught.value.details()  # type: ignore[attr-defined]
        assert stack.orchestrator.serving(LIVENESS, 60)  # a restart would bring back no target
        with open_probe(Endpoint("grpc", (stack.orchestrator.address,)), Interruptions()) as probe:
            _until(lambda: probe().reason == "not ready: no target is connected")
        with pytest.raises(grpc.RpcError) as refused:  # and who asks anew isn't kept waiting
            generate(channel, PROMPT, **FIELDS)
        assert refused.value.details() == "no target is connected"  # type: ignore[attr-defined]


def test_the_store_goes_away_and_nothing_is_half_committed(stack: Stack, channel: grpc.Channel) -> None:
    store = redis.Redis.from_url(stack.redis_url)
    received: list[int] = []
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        for response in stub.Generate(request(PROMPT, request_id="lost-store", **FIELDS), timeout=120):
            received += [token.token_id for token in response.tokens]
            if len(received) > 40:
                store.delete("tandem:{lost-store}:state")
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
    assert received == generate(channel, PROMPT, **FIELDS).ids[: len(received)]


def _sessions(stack: Stack) -> int:
    store = redis.Redis.from_url(stack.redis_url)
    return sum(1 for key in store.scan_iter("tandem:*:state") if store.hget(key, "status") != b"finished")


@pytest.mark.parametrize("after", [0, 1, 50])
def test_a_cancelled_request_leaves_nothing(stack: Stack, channel: grpc.Channel, after: int) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    for _ in range(20):
        call = stub.Generate(request(PROMPT, **FIELDS))
        seen = 0
        while seen < after:
            seen += len(next(call).tokens)
        call.cancel()
    _until(lambda: _sessions(stack) == 0)
    # Every slot is free again: as many requests as there are slots run at once.
    assert generate(channel, PROMPT, **FIELDS).usage[1] == TOKENS


def test_a_deadline_ends_the_request(stack: Stack, channel: grpc.Channel) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    stack.target.signal(signal.SIGSTOP)
    try:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request(PROMPT, **FIELDS), timeout=1))
    finally:
        stack.target.signal(signal.SIGCONT)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
    stack.orchestrator.wait_serving()  # it may have missed the target
    assert generate(channel, PROMPT, **FIELDS).usage[1] == TOKENS
    _until(lambda: _sessions(stack) == 0)


def test_sigterm_drains_the_orchestrator(stack: Stack, channel: grpc.Channel) -> None:
    undisturbed = generate(channel, PROMPT, **FIELDS)
    refused: list[grpc.StatusCode] = []

    def terminate() -> None:
        stack.orchestrator.signal(signal.SIGTERM)
        _until(lambda: not stack.orchestrator.serving())
        assert stack.orchestrator.serving(LIVENESS, 60)
        with pytest.raises(grpc.RpcError) as caught:
            generate(channel, PROMPT, **FIELDS)
        refused.append(caught.value.code())  # type: ignore[attr-defined]

    result = _interrupted(channel, 10, terminate)
    assert result.seen == undisturbed.seen
    assert refused == [grpc.StatusCode.UNAVAILABLE]
    assert stack.orchestrator.wait() == 0
