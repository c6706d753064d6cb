"""The life of a worker whose engine dies: it says so, refuses calls, and still ends in order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.engine.causal_lm import CausalLM
from tandem.engine.engine import Engine
from tandem.engine.faults import ModelError
from tandem.engine.scheduler import StepLimits
from tandem.engine.worker import Loaded, WorkerSpec, serve
from tandem.grpc_server import LIVENESS
from tandem.v1 import target_pb2, target_pb2_grpc
from target_service import servicer
from target_service.verifier import Verifier
from tests.engine.harness import GREEDY, verify_item
from tests.engine.models import over_slots, random_ids, random_model
from tests.support.channels import open_async_channel
from tests.support.ports import free_port


@dataclass(frozen=True)
class Config:
    listen: str
    drain_seconds: float = 120.0
    max_speculative_tokens: int = 16
    tls_certificate: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""
    health_listen: str = ""


def spec(load: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Loaded]) -> WorkerSpec:
    return WorkerSpec(
        service=servicer.SERVICE,
        listen_variable="TANDEM_TARGET_LISTEN",
        health_variable="TANDEM_TARGET_HEALTH_LISTEN",
        model_variable="TANDEM_TARGET_MODEL",
        add_servicer=servicer.add_to_server,
        load=load,
    )


def spec_of(lm: CausalLM, ended: list[bool]) -> WorkerSpec:
    """Of a worker that notes in `ended` whether its engine's thread had ended when the rest of the model was to end."""

    def load(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Loaded:
        engine = Engine(lm, Verifier(96, 16), loop, limits=StepLimits(), on_death=on_death)
        return Loaded(SimpleNamespace(name="test", lm=lm, context_length=96), engine, ended.append)  # type: ignore[arg-type]

    return spec(load)


async def until(channel: grpc.aio.Channel, status: Any, name: str = "") -> None:
    """Returns when health says so."""
    health = health_pb2_grpc.HealthStub(channel)
    for _ in range(3000):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True)
        if answer.status == status:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("health never changed")


async def test_a_dead_engine_is_not_serving_and_refuses_calls() -> None:
    lm = over_slots(random_model())
    ended: list[bool] = []
    address = f"127.0.0.1:{free_port()}"
    worker = asyncio.create_task(serve(Config(address), spec_of(lm, ended)))
    async with open_async_channel(address) as channel:
        await until(channel, health_pb2.HealthCheckResponse.SERVING)
        lm.forward = lm.self_test = broken  # type: ignore[method-assign, assignment]
        for _ in range(2):  # the stream on which it died, and any later one
            call = target_pb2_grpc.TargetServiceStub(channel).Verify()
            item = verify_item("a", 0, random_ids(1, 9), 0, sampling=GREEDY)
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await answers(call, item)
            assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "the engine died" in str(raised.value.details())
        await until(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        await until(channel, health_pb2.HealthCheckResponse.NOT_SERVING, LIVENESS)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(worker, 60) == 0
    assert ended == [True]


async def test_nobody_waits_for_the_sessions_of_an_engine_that_dies_while_it_drains() -> None:
    lm = over_slots(random_model())
    address = f"127.0.0.1:{free_port()}"
    worker = asyncio.create_task(serve(Config(address, drain_seconds=3600), spec_of(lm, [])))
    async with open_async_channel(address) as channel:
        await until(channel, health_pb2.HealthCheckResponse.SERVING)
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        await call.write(target_pb2.VerifyBatch(items=[verify_item("a", 0, random_ids(1, 9), 0, sampling=GREEDY)]))
        assert (await call.read()).items  # there is a session
        os.kill(os.getpid(), signal.SIGTERM)
        await until(channel, health_pb2.HealthCheckResponse.NOT_SERVING)
        lm.forward = lm.self_test = broken  # type: ignore[method-assign, assignment]
        await call.write(target_pb2.VerifyBatch(items=[verify_item("a", 1, random_ids(1, 9), 0)]))
        assert await asyncio.wait_for(worker, 60) == 0


async def test_a_model_that_loads_but_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    lm = over_slots(random_model())
    lm.self_test = broken  # type: ignore[method-assign]

    def load(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Loaded:
        engine = Engine(lm, Verifier(96, 16), loop, limits=StepLimits(), on_death=on_death)
        return Loaded(SimpleNamespace(name="test", lm=lm, context_length=96), engine)  # type: ignore[arg-type]

    def refuse(_loop: object, _on_death: object) -> Loaded:
        raise ModelError("no such model")

    assert await serve(Config(f"127.0.0.1:{free_port()}"), spec(load)) == 1
    assert await serve(Config(f"127.0.0.1:{free_port()}"), spec(refuse)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert "error: TANDEM_TARGET_MODEL: RuntimeError: device-side assert" in lines
    assert "error: TANDEM_TARGET_MODEL: no such model" in lines


async def test_a_worker_that_is_told_to_stop_does_not_wait_for_its_first_forward() -> None:
    """Which may never end where one of several ranks is lost."""
    lm, began, ends = over_slots(random_model()), threading.Event(), threading.Event()
    engines: list[Engine[Any]] = []

    def self_test() -> None:
        began.set()
        ends.wait(300)

    def load(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Loaded:
        lm.self_test = self_test  # type: ignore[method-assign]
        engines.append(Engine(lm, Verifier(96, 16), loop, limits=StepLimits(), on_death=on_death))
        return Loaded(SimpleNamespace(name="test", lm=lm, context_length=96), engines[0])  # type: ignore[arg-type]

    worker = asyncio.create_task(serve(Config(f"127.0.0.1:{free_port()}"), spec(load)))
    try:
        assert await asyncio.to_thread(began.wait, 60)
        os.kill(os.getpid(), signal.SIGTERM)
        done, _ = await asyncio.wait({worker}, timeout=120)
        assert done
        assert worker.result() == 0
    finally:
        ends.set()
        engines[0].stop()


async def answers(call: Any, item: Any) -> list[Any]:
    await call.write(target_pb2.VerifyBatch(items=[item]))
    return [answer async for answer in call]


def broken(*_: object) -> Any:
    raise RuntimeError("device-side assert")
