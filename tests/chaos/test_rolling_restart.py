"""Every service is restarted, one process after the other, under load: no request fails, and each process ends with 0."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.channels import open_channel
from tests.support.generation import gather, generate, paced_channel, request
from tests.support.services import MODELS, ServiceProcess, Stack, running_stack

FIELDS: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "num_speculative_tokens": 2}
PROMPTS = [[5, 6, 7], [9, 8], [100, 3, 200, 4]]
LENGTHS = (5, 60, 25)
DRAIN_SECONDS = 10

# What a caller of several orchestrators does: balance over them, and ask another one where one refuses before it began.
CALLER_OPTIONS = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "methodConfig": [
                    {
                        "name": [{"service": "tandem.v1.OrchestratorService"}],
                        "retryPolicy": {
                            "maxAttempts": 5,
                            "initialBackoff": "0.3s",
                            "maxBackoff": "3s",
                            "backoffMultiplier": 2,
                            "retryableStatusCodes": ["UNAVAILABLE"],
                        },
                    }
                ],
            }
        ),
    ),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {"TANDEM_DRAIN_SECONDS": str(DRAIN_SECONDS), "TANDEM_DRAFT_BACKOFF_SECONDS": "0.2"}
    with running_stack(
        tmp_path_factory.mktemp("rolling"),
        MODELS / "tiny-target",
        MODELS / "tiny-draft",
        environment,
        replicas={"draft": 2, "target": 2, "orchestrator": 2},
    ) as running:
        yield running


def _address(stack: Stack) -> str:
    return "ipv4:" + ",".join(each.address for each in stack.orchestrators)


class Load:
    """Callers that ask one request after the other, and compare each with what it has to be."""

    def __init__(self, stack: Stack, callers: int) -> None:
        self.finished = 0
        self.failures: list[str] = []
        self.others: list[list[int]] = []
        """Texts that are not what they have to be."""
        self._stop = threading.Event()
        with open_channel(stack.orchestrator.address) as channel:
            self._expected = [
                [generate(channel, prompt, max_tokens=length, **FIELDS).ids for length in LENGTHS] for prompt in PROMPTS
            ]
        self._channel = open_channel(_address(stack), options=CALLER_OPTIONS)
        self._threads = [threading.Thread(target=self._call, args=(number,)) for number in range(callers)]
        for thread in self._threads:
            thread.start()

    def _call(self, number: int) -> None:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)
        turn = number
        while not self._stop.is_set():
            which, length = turn % len(PROMPTS), turn // len(PROMPTS) % len(LENGTHS)
            sent = request(PROMPTS[which], max_tokens=LENGTHS[length], **FIELDS)
            try:
                ids = gather(stub.Generate(sent, timeout=120)).ids
            except grpc.RpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")  # type: ignore[attr-defined]
            else:
                if ids != self._expected[which][length]:
                    self.others.append(ids)
                self.finished += 1
            turn += 1

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        self._channel.close()


def _restart(service: ServiceProcess) -> None:
    """As a pod is replaced, which has 30 s to end."""
    service.signal(signal.SIGTERM)
    assert service.wait(30) == 0, service.log.read_text()[-2000:]
    service.start()
    service.wait_serving()


def test_a_rolling_restart_fails_no_request(stack: Stack) -> None:
    load = Load(stack, callers=3)
    try:
        for service in stack.services:
            before = load.finished
            _restart(service)
            deadline = time.monotonic() + 120
            while load.finished < before + 6 and not (load.failures or load.others):
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        load.end()
    assert load.others == []
    assert load.failures == []
    assert load.finished > 6 * len(stack.services)


def test_what_outlasts_the_drain_ends_with_a_status_and_is_resumed(stack: Stack) -> None:
    """The target is stopped, so that the request can't end by itself within the time."""
    first, second = stack.orchestrators
    first.wait_serving()
    fields: dict[str, Any] = {**FIELDS, "max_tokens": 80}
    with open_channel(second.address) as channel:
        truth = generate(channel, PROMPTS[0], **fields)
    # Paced, so that the request is not at its end before the targets are stopped.
    with paced_channel(first.address) as channel, second.channel() as other:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        call = stub.Generate(request(PROMPTS[0], request_id="outlasts", **fields), timeout=120)
        ids = [token.token_id for token in next(call).tokens]
        with _stopped(stack.targets):
            first.signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError) as caught:
                for response in call:
                    ids += [token.token_id for token in response.tokens]
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            assert "shutting down" in caught.value.details()  # type: ignore[attr-defined]
            assert first.wait() == 0
        second.wait_serving()  # its targets were away for a while
        rest = orchestrator_pb2_grpc.OrchestratorServiceStub(other).Generate(
            api.GenerateRequest(request_id="outlasts", token_offset=len(ids)), timeout=120
        )
        ids += [token.token_id for response in rest for token in response.tokens]
    assert ids == truth.ids
    first.start()
    first.wait_serving()


@contextlib.contextmanager
def _stopped(services: list[ServiceProcess]) -> Iterator[None]:
    for service in services:
        service.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for service in services:
            service.signal(signal.SIGCONT)


def test_who_calls_while_it_stops_is_refused_as_unavailable(stack: Stack) -> None:
    """Callers ask again after UNAVAILABLE, as the load above does; after CANCELLED nobody does."""
    service = stack.orchestrators[0]
    answers: set[str] = set()
    stopped = threading.Event()

    def call() -> None:
        with service.channel() as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            while not stopped.is_set():
                try:
                    gather(stub.Generate(request(PROMPTS[0], max_tokens=1, **FIELDS), timeout=60))
                except grpc.RpcError as error:
                    answers.add(error.code().name)  # type: ignore[attr-defined]

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            _restart(service)
    finally:
        stopped.set()
        for thread in threads:
            thread.join(60)
    assert answers == {"UNAVAILABLE"}
