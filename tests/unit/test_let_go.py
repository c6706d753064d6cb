"""What a request leaves when it fails is gone at once, without the garbage collector: it comes late, and a request may be megabytes."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import pytest
from google.rpc import status_pb2

from orchestrator.call import GrpcCall
from orchestrator.drafting import PLAIN
from orchestrator.errors import InvalidArgument, NotFound, Overloaded, RequestFailed, let_go
from orchestrator.http.failures import HttpFailure
from orchestrator.prefix import Prefix
from orchestrator.scoring import TARGET, Scoring, ScoringPolicy, TargetPool
from orchestrator.servicer import OrchestratorServicer, add_to_server
from orchestrator.several import SharedCall
from orchestrator.verdicts import ReceivedVerdict
from orchestrator.worker_stream import ItemFailed
from tandem import wire
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc, sampling_pb2, target_pb2, worker_pb2
from tests.unit.test_http_exchange import post

T = TypeVar("T")


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Megabytes:
    """What a request has in its hands."""


class Held:
    """Whatever was in a frame of a request, as long as it is there."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Megabytes]] = []

    def made(self) -> Megabytes:
        one = Megabytes()
        self._all.append(weakref.ref(one))
        return one

    async def gone(self) -> None:
        """Returns once nothing of it is there."""
        assert self._all
        await gone(lambda: [each for each in self._all if each() is not None])


async def gone(left: Callable[[], list[Any]]) -> None:
    """Returns once nothing is left: who tells a caller may have a step to go."""
    deadline = time.monotonic() + 60
    while left():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def of_type(kind: type[T]) -> list[T]:
    """All there are. By the type alone: to ask of every object what it is an instance of wakes some that are asleep."""
    return [each for each in gc.get_objects() if type(each) is kind]


async def fails(held: Held, failure: RequestFailed) -> None:
    """Keeps its failure in a variable, as whoever looks at it before it is raised does."""
    kept, in_hand = failure, held.made()
    await asyncio.sleep(0)
    try:
        raise KeyError(in_hand)
    except KeyError as error:
        raise kept from error


@pytest.fixture
async def served() -> AsyncIterator[Callable[[Any], Any]]:
    """Serves a stub of the generations and of the updates that are given."""
    server = grpc.aio.server()
    port, channels = server.add_insecure_port("127.0.0.1:0"), []

    async def serve(run: Any) -> Any:
        part: Any = SimpleNamespace(run=run)
        add_to_server(OrchestratorServicer(part, part), server)
        await server.start()
        channels.append(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        return orchestrator_pb2_grpc.OrchestratorServiceStub(channels[0])

    yield serve
    for channel in channels:
        await channel.close()
    await server.stop(0)


@pytest.mark.parametrize("name", ["Generate", "UpdateSampling"])
async def test_a_call_that_is_refused(served: Callable[[Any], Awaitable[Any]], name: str) -> None:
    held = Held()

    async def run(request: Any, _: Any) -> None:
        assert request.request_id == "r"
        await fails(held, InvalidArgument("temperature", "is wrong"))

    stub = await served(run)
    message = api.GenerateRequest if name == "Generate" else api.UpdateSamplingRequest
    call = getattr(stub, name)(message(request_id="r"))
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert await call.details() == "temperature: is wrong"
    trailers = await call.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    assert [each.TypeName() for each in status.details] == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]
    del call  # which has the request too
    await held.gone()
    await gone(lambda: [each for each in of_type(message) if each.request_id == "r"])


async def test_an_exchange_that_fails() -> None:
    held = Held()
    answer = await post(lambda _: fails(held, NotFound("nothing", "REQUEST_UNKNOWN")))
    assert answer.status_code == 404
    await held.gone()


async def test_a_body_that_is_refused() -> None:
    assert (await post(lambda _: asyncio.sleep(0), temperature="hot")).status_code == 400
    assert of_type(HttpFailure) == []


@pytest.mark.parametrize("failing", [True, False])
async def test_several_completions_of_which_one_fails_or_whose_caller_leaves(failing: bool) -> None:
    held, begun = Held(), asyncio.Semaphore(0)

    async def waits() -> None:
        in_hand, waiter = held.made(), asyncio.get_running_loop().create_future()
        begun.release()
        await waiter
        raise AssertionError(in_hand)

    async def run() -> None:
        shared = SharedCall(GrpcCall(None), 3)  # type: ignore[arg-type]
        last = fails(held, Overloaded("full", "QUEUE_FULL", 1.0)) if failing else waits()
        try:
            await shared.run([waits(), waits(), last])
        except RequestFailed as failure:
            let_go(failure)

    calls = asyncio.create_task(run())
    for _ in range(2):
        await begun.acquire()
    if not failing:
        calls.cancel()
    await asyncio.wait([calls])
    del calls
    await held.gone()


async def test_a_fault_of_the_target_that_is_lived_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request goes on, and its tokens are not kept by what has failed."""
    faults: list[weakref.ref[ItemFailed]] = []

    def submit(*_: Any) -> asyncio.Future[ReceivedVerdict]:
        answer = asyncio.get_running_loop().create_future()
        if len(faults) < 3:
            fault = ItemFailed(worker_pb2.ItemError(reason=worker_pb2.ERROR_REASON_INTERNAL))
            faults.append(weakref.ref(fault))
            answer.set_exception(fault)
        else:
            row = target_pb2.TargetRow(outside_mass=1.0, outside_token_id=7)
            answer.set_result(ReceivedVerdict.alone(target_pb2.Verdict(rows=[row])))
        return answer

    pool = TargetPool((), TARGET, lambda _: None, lambda: None)
    scoring = Scoring("r", pool, sampling_pb2.Sampling(), ScoringPolicy(timeout=60.0, retry=60.0), 512)
    monkeypatch.setattr(scoring._session, "seat", lambda: SimpleNamespace(submit=submit))
    monkeypatch.setattr(scoring, "_pause", lambda *_: asyncio.sleep(0))
    monkeypatch.setattr(scoring, "_log_retry", lambda *_: None)  # pytest keeps what is logged
    record: Any = SimpleNamespace(traceparent="", trace_id=None, rescoring=lambda _: None)
    rows = await scoring.verify(Prefix(wire.encode_ids([1])), 0, PLAIN, record)
    assert [row.outside_token_id for row in rows] == [7]
    assert [fault() for fault in faults] == [None] * 3


def test_failures_that_keep_each_other() -> None:
    """The first of a group is raised in the place of the group, and came from it."""
    held = Held()

    def group() -> None:
        in_hand, one = held.made(), Overloaded("full", "QUEUE_FULL", 1.0)
        try:
            raise BaseExceptionGroup("several", [one, KeyError(in_hand)])
        except* Overloaded as some:
            raise some.exceptions[0] from None

    try:
        group()
    except BaseExceptionGroup as failure:
        let_go(failure)
    asyncio.run(held.gone())
