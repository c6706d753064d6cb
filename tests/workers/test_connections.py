"""How the orchestrator reaches its workers: real streams to targets of this process that answer what the tests like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from orchestrator.callers import Callers
from orchestrator.config import OrchestratorConfig
from orchestrator.runtime import Runtime
from orchestrator.scoring import TARGET
from orchestrator.session_store import SessionStore, StoreConfig
from orchestrator.vocabulary import Vocabulary
from orchestrator.worker_stream import CHANNEL_OPTIONS, Replica
from tandem.grpc_server import server_options
from tandem.model_info import token_strings, vocabulary_fingerprint
from tandem.sampling_limits import SAMPLING_VERSION
from tandem.v1 import target_pb2, target_pb2_grpc, worker_pb2
from tests.support.services import MODELS

MEBIBYTE = 1 << 20


class Target(target_pb2_grpc.TargetServiceServicer):
    """Answers every item with one row of so many bytes."""

    def __init__(self, info: worker_pb2.GetModelInfoResponse, row_bytes: int) -> None:
        self._info = info
        self._row = target_pb2.TargetRow(support_probs=bytes(row_bytes))
        self.received = 0

    async def GetModelInfo(self, request: Any, context: Any) -> worker_pb2.GetModelInfoResponse:
        return self._info

    async def Verify(self, batches: AsyncIterator[Any], context: Any) -> AsyncIterator[target_pb2.VerdictBatch]:
        async for batch in batches:
            self.received += batch.ByteSize()
            for item in batch.items:
                verdict = target_pb2.Verdict(rows=[self._row])
                answer = target_pb2.VerdictItem(
                    request_id=item.request_id, cache_epoch=item.cache_epoch, verdict=verdict
                )
                yield target_pb2.VerdictBatch(items=[answer])


@asynccontextmanager
async def serving(target: Target) -> AsyncIterator[str]:
    """The address."""
    server = grpc.aio.server(options=server_options())
    target_pb2_grpc.add_TargetServiceServicer_to_server(target, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Replica[Any, Any]]:
    replica = Replica(address, TARGET, lambda _: None, lambda: None)
    try:
        await until(lambda: replica.ready)
        yield replica
    finally:
        await replica.close()


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_messages_beyond_four_mebibytes_pass_both_ways() -> None:
    """gRPC by itself refuses to receive them: a batch of many requests may be as large."""
    target = Target(worker_pb2.GetModelInfoResponse(), row_bytes=6 * MEBIBYTE)
    item = target_pb2.VerifyItem(request_id="large", support_ids=[bytes(5 * MEBIBYTE)])
    async with serving(target) as address, connected(address) as replica:
        verdict = await replica.submit(item, seconds=60)
    assert [len(row.support_probs) for row in verdict.rows] == [6 * MEBIBYTE]
    assert target.received > 5 * MEBIBYTE


async def test_a_proxy_of_the_environment_is_not_for_the_way_to_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    async with serving(Target(worker_pb2.GetModelInfoResponse(), 4)) as address, connected(address) as replica:
        assert (await replica.submit(target_pb2.VerifyItem(request_id="a"), seconds=60)).rows


def test_a_worker_that_comes_back_is_found_within_a_second_or_so() -> None:
    """By itself gRPC waits longer each time, for two minutes in the end."""
    options = dict(CHANNEL_OPTIONS)
    assert 0 < options["grpc.initial_reconnect_backoff_ms"] <= options["grpc.max_reconnect_backoff_ms"] <= 1000
    assert options["grpc.min_reconnect_backoff_ms"] <= 1000


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(MODELS / "tiny-target"), "")


def info(vocabulary: Vocabulary, end_token_ids: Sequence[int]) -> worker_pb2.GetModelInfoResponse:
    strings = token_strings(vocabulary._tokenizer)
    return worker_pb2.GetModelInfoResponse(
        model="m",
        context_length=64,
        max_speculative_tokens=16,
        vocabulary_size=len(strings),
        vocabulary_fingerprint=vocabulary_fingerprint(strings),
        sampling_version=SAMPLING_VERSION,
        end_token_ids=end_token_ids,
    )


async def test_the_end_tokens_are_those_of_the_tokenizer_and_of_every_target(vocabulary: Vocabulary) -> None:
    ends = [[7, 300], [9]]
    first, second = (Target(info(vocabulary, each), 4) for each in ends)
    async with serving(first) as one, serving(second) as two:
        url = "redis://127.0.0.1:9"  # nothing is asked of it
        config = OrchestratorConfig(target_addresses=(one, two), tokenizer="", redis_url=url)
        runtime = Runtime(config, vocabulary, await SessionStore.connect(StoreConfig(url=url)), Callers(""))
        try:
            await until(lambda: all(replica.ready for replica in runtime.targets.replicas))
            assert len(runtime.targets.replicas) == 2
            assert runtime.limits().end_token_ids == vocabulary.end_token_ids | {7, 9, 300}
        finally:
            await runtime.close()
