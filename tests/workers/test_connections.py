"""How the orchestrator reaches its workers: real streams to targets of this process that answer what the tests like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest

from orchestrator.callers import Callers
from orchestrator.config import OrchestratorConfig
from orchestrator.drafting import PLAIN
from orchestrator.gamma_controller import AdaptiveGamma, FixedGamma
from orchestrator.prefix import Prefix
from orchestrator.request import plan_generation
from orchestrator.runtime import Runtime
from orchestrator.scoring import TARGET, Scoring, ScoringPolicy, TargetPool
from orchestrator.session_store import SessionStore, StoreConfig
from orchestrator.vocabulary import Vocabulary
from orchestrator.worker_stream import CHANNEL_OPTIONS, IncompatibleWorker, Replica
from tandem import wire
from tandem.grpc_server import server_options
from tandem.model_info import token_strings, vocabulary_fingerprint
from tandem.sampling_limits import SAMPLING_VERSION
from tandem.transport_security import ClientFiles
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2, target_pb2, target_pb2_grpc, worker_pb2
from tests.support.services import MODELS

MEBIBYTE = 1 << 20


class Target(target_pb2_grpc.TargetServiceServicer):
    """Answers every item with one row of so many bytes, or with errors for these reasons, in turn."""

    def __init__(
        self,
        info: worker_pb2.GetModelInfoResponse,
        row_bytes: int,
        reasons: Iterable[worker_pb2.ErrorReason.ValueType] = (),
    ) -> None:
        self._info = info
        self._row = target_pb2.TargetRow(support_probs=bytes(row_bytes), outside_mass=1.0, outside_token_id=7)
        self._reasons = iter(reasons)
        self.received = 0
        self.largest = 0
        self.asked = 0

    async def GetModelInfo(self, request: Any, context: Any) -> worker_pb2.GetModelInfoResponse:
        return self._info

    async def Verify(self, batches: AsyncIterator[Any], context: Any) -> AsyncIterator[target_pb2.VerdictBatch]:
        async for batch in batches:
            self.received += batch.ByteSize()
            self.largest = max(self.largest, batch.ByteSize())
            for item in batch.items:
                self.asked += 1
                answer = target_pb2.VerdictItem(request_id=item.request_id, cache_epoch=item.cache_epoch)
                reason = next(self._reasons, None)
                if reason is None:
                    answer.verdict.rows.append(self._row)
                else:
                    answer.error.reason = reason
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
        verdict = (await replica.submit(item, seconds=60)).message
    assert [len(row.support_probs) for row in verdict.rows] == [6 * MEBIBYTE]
    assert target.received > 5 * MEBIBYTE


async def test_items_that_are_large_together_leave_in_several_messages() -> None:
    """After a loss all sessions send their whole prefixes at once: as one message, it could be larger than any that gRPC sends."""
    target = Target(worker_pb2.GetModelInfoResponse(), 4)
    sizes = [3 * MEBIBYTE, 4 * MEBIBYTE, 9 * MEBIBYTE, MEBIBYTE, 2 * MEBIBYTE, 6 * MEBIBYTE]
    items = [target_pb2.VerifyItem(request_id=f"r{size}", support_ids=[bytes(size)]) for size in sizes]
    async with serving(target) as address, connected(address) as replica:
        answers = await asyncio.gather(*(replica.submit(item, seconds=60) for item in items))
    assert len(answers) == len(items)
    assert 9 * MEBIBYTE < target.largest < 10 * MEBIBYTE, "the largest item has a message to itself"


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


def info(
    vocabulary: Vocabulary, end_token_ids: Sequence[int] = (), context_length: int = 64
) -> worker_pb2.GetModelInfoResponse:
    strings = token_strings(vocabulary._tokenizer)
    return worker_pb2.GetModelInfoResponse(
        model="m",
        context_length=context_length,
        max_speculative_tokens=16,
        vocabulary_size=len(strings),
        vocabulary_fingerprint=vocabulary_fingerprint(strings),
        sampling_version=SAMPLING_VERSION,
        end_token_ids=end_token_ids,
    )


@asynccontextmanager
async def running(vocabulary: Vocabulary, *targets: str, drafts: tuple[str, ...] = ()) -> AsyncIterator[Runtime]:
    """With all of these targets ready."""
    url = "redis://127.0.0.1:9"  # nothing is asked of it
    config = OrchestratorConfig(target_addresses=targets, draft_addresses=drafts, tokenizer="", redis_url=url)
    runtime = Runtime(config, vocabulary, await SessionStore.connect(StoreConfig(url=url)), Callers(""))
    try:
        await until(lambda: all(replica.ready for replica in runtime.targets.replicas))
        assert len(runtime.targets.replicas) == len(targets)
        yield runtime
    finally:
        await runtime.close()


async def test_the_end_tokens_are_those_of_the_tokenizer_and_of_every_target(vocabulary: Vocabulary) -> None:
    ends = [[7, 300], [9]]
    first, second = (Target(info(vocabulary, each), 4) for each in ends)
    async with serving(first) as one, serving(second) as two, running(vocabulary, one, two) as runtime:
        assert runtime.limits().end_token_ids == vocabulary.end_token_ids | {7, 9, 300}


async def test_a_target_that_is_gone_for_good_bounds_no_request(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (Target(info(vocabulary, context_length=length), 4) for length in (64, 128))
    async with serving(large) as stays, AsyncExitStack() as until_gone:
        goes = await until_gone.enter_async_context(serving(small))
        async with running(vocabulary, goes, stays) as runtime:
            assert runtime.limits().context_length == 64
            await until_gone.aclose()
            await until(lambda: len(runtime.targets.ready_addresses) == 1)
            assert runtime.limits().context_length == 64, "it may be back in a moment"
            monkeypatch.setattr("orchestrator.runtime.GONE_SECONDS", 0.0)
            assert runtime.limits().context_length == 128
            for replica in runtime.targets.replicas:
                replica._disconnected()
            assert runtime.limits().context_length == 64, "where none is there, all may come back"


async def test_no_block_is_wanted_where_there_is_to_be_no_draft(vocabulary: Vocabulary) -> None:
    """Plain decoding is what was asked for then: a round without a block lacks nothing."""
    request = api.GenerateRequest(token_ids=api.TokenIds(ids=[5]))
    adaptive = api.GenerateRequest(token_ids=api.TokenIds(ids=[5]), adaptive_speculative_tokens=True)
    async with serving(Target(info(vocabulary), 4)) as target:
        async with running(vocabulary, target) as plain:
            for each in (request, adaptive):
                plan = await plan_generation(each, vocabulary, plain.limits())
                assert plain.gamma_policy(plan).choose(32, None).gamma == 0
        # Its name isn't resolved, as that of a headless Service without a ready pod.
        async with running(vocabulary, target, drafts=("draft.invalid:50052",)) as waiting:
            assert waiting.drafts.replicas == []
            for each in (request, adaptive):
                plan = await plan_generation(each, vocabulary, waiting.limits())
                assert plan.num_speculative_tokens > 0
                assert isinstance(waiting.gamma_policy(plan), AdaptiveGamma if each is adaptive else FixedGamma)
                assert waiting.gamma_policy(plan).choose(32, None).gamma > 0


async def test_a_worker_that_is_gone_is_not_refused_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: worker_pb2.GetModelInfoResponse) -> None:
        raise IncompatibleWorker("of another vocabulary")

    changes: list[str] = []
    async with AsyncExitStack() as until_gone:
        address = await until_gone.enter_async_context(serving(Target(worker_pb2.GetModelInfoResponse(), 4)))
        replica: Replica[Any, Any] = Replica(address, TARGET, refuse, lambda: changes.append(replica.refusal))
        try:
            await until(lambda: replica.refusal == "of another vocabulary")
            await until_gone.aclose()
            monkeypatch.setattr("orchestrator.worker_stream.DESCRIBE_SECONDS", 0.1)
            await until(lambda: not replica.refusal)
        finally:
            await replica.close()
    assert changes == ["of another vocabulary", ""]


async def test_a_name_that_can_be_none_keeps_no_other_from_being_resolved() -> None:
    pool = TargetPool(("gr\u00f6\u00dfe..svc:1", "localhost:2"), TARGET, lambda _: None, lambda: None)
    try:
        await until(lambda: len(pool.replicas) == 1)
    finally:
        await pool.close()


async def test_a_stream_that_fails_again_and_again_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.worker_stream.MAX_BACKOFF_SECONDS", 0.01)
    tries = 0

    def credentials(_: ClientFiles) -> None:
        nonlocal tries
        tries += 1
        raise FileNotFoundError("no such certificate")

    monkeypatch.setattr(ClientFiles, "credentials", credentials)
    replica: Replica[Any, Any] = Replica("127.0.0.1:9", TARGET, lambda _: None, lambda: None)
    try:
        await until(lambda: tries > 3)
    finally:
        await replica.close()
    assert [record.getMessage() for record in caplog.records] == ["target 127.0.0.1:9: the stream failed"]


class Record:
    """Nothing is asked of it here."""

    traceparent = ""
    trace_id = None

    def rebuilding(self, _role: str, _reason: str) -> None: ...

    def rescoring(self, _reason: str) -> None: ...


async def test_a_round_that_two_targets_refuse_goes_to_the_third_though_it_is_busy() -> None:
    refusing = [worker_pb2.ERROR_REASON_CONTEXT_EXCEEDED] * 20
    busy = [worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED] * 2
    known = worker_pb2.GetModelInfoResponse(slots=8)
    targets = [Target(known, 0, reasons) for reasons in (refusing, refusing, busy)]
    async with AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(serving(target)) for target in targets]
        pool = TargetPool(tuple(addresses), TARGET, lambda _: None, lambda: None)
        try:
            await until(lambda: len(pool.ready_addresses) == 3)
            [third] = [replica for replica in pool.replicas if replica.address == addresses[2]]
            third.sessions += 100
            policy = ScoringPolicy(timeout=60, retry=60)
            scoring = Scoring("r", pool, sampling_pb2.Sampling(), policy, vocabulary_size=512)
            record: Any = Record()
            [row] = await scoring.verify(Prefix(wire.encode_ids([1])), 1, PLAIN, record)
        finally:
            await pool.close()
    assert row.outside_token_id == 7
    assert [target.asked for target in targets] == [1, 1, 3]
