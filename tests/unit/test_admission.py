"""What finds no room is refused before anything is done for it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from orchestrator.__main__ import make_server
from orchestrator.admission import Admission
from orchestrator.config import OrchestratorConfig
from orchestrator.errors import Overloaded, Unavailable
from orchestrator.servicer import OrchestratorServicer, add_to_server
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc


async def test_no_more_is_read_than_can_run_or_wait() -> None:
    admission = Admission(max_running=2, max_waiting=1, max_waiting_seconds=30)
    with admission.planning(), admission.planning():
        async with admission.place():
            with pytest.raises(Overloaded, match="1 requests run and 0 wait"), admission.planning():
                raise AssertionError("there was room")
        with admission.planning():
            pass
    async with admission.place(), admission.place():
        waiter = asyncio.create_task(admission.place().__aenter__())
        await asyncio.sleep(0)
        assert admission.waiting == 1
        with pytest.raises(Overloaded) as caught, admission.planning():
            raise AssertionError("there was room")
        assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 1.0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    with admission.planning():
        pass


async def test_of_a_call_beyond_all_that_may_be_here_no_message_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.__main__.SPARE_CALLS", 1)
    settings = OrchestratorConfig(
        target_addresses=(), tokenizer="", redis_url="", max_running_requests=1, max_waiting_requests=0
    )
    asked, may_end = asyncio.Queue[str](), asyncio.Event()

    async def run(request: api.GenerateRequest, _: Any) -> None:
        asked.put_nowait(request.request_id)
        await may_end.wait()

    server = make_server(settings)
    add_to_server(OrchestratorServicer(SimpleNamespace(run=run), SimpleNamespace()), server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            calls: list[Any] = []
            for name in ("runs", "beside"):
                calls.append(stub.Generate(api.GenerateRequest(request_id=name)))
                assert await asked.get() == name
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(api.GenerateRequest(request_id="too many")).read()
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert asked.empty()
            may_end.set()
            for call in calls:
                assert await call.code() == grpc.StatusCode.OK
    finally:
        await server.stop(0)


async def test_nothing_is_read_while_shutting_down() -> None:
    admission = Admission(max_running=1, max_waiting=0, max_waiting_seconds=30)
    assert await admission.drain(30)
    with pytest.raises(Unavailable), admission.planning():
        raise AssertionError("nothing may begin")
