"""A worker from its start to its end: readiness, bad settings, bad models, signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tandem.config import settings_of
from tandem.grpc_server import LIVENESS
from tandem.v1 import target_pb2_grpc, worker_pb2
from target_service.config import TargetConfig
from tests.engine.harness import GREEDY, propose_item, verify_item
from tests.engine.models import random_ids
from tests.support.channels import open_channel
from tests.support.services import ServiceProcess
from tests.workers.client import propose_stream, reason, verify_stream
from tests.workers.conftest import StartWorker

TOKENS = random_ids(1, 20, 512)
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def first_health(address: str) -> int:
    """The first answer that the process gives. By default a channel would try to connect less and less often."""
    options = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]
    with open_channel(address, options=options) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=120).status)


def test_ready_only_when_the_model_has_run(start_worker: StartWorker) -> None:
    process = start_worker(cold=True)
    assert first_health(process.address) == NOT_SERVING
    assert process.serving(LIVENESS, 60)
    with open_channel(process.address) as channel:
        with pytest.raises(grpc.RpcError) as info:
            target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(worker_pb2.GetModelInfoRequest(), timeout=60)
        assert info.value.code() == grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as stream:
            verify_stream(channel).ask(verify_item("a", 0, TOKENS, 0, sampling=GREEDY))
        assert stream.value.code() == grpc.StatusCode.UNAVAILABLE
        process.wait_serving()
        for service in ("", "tandem.v1.TargetService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health_pb2_grpc.HealthStub(channel).Check(request).status == health_pb2.HealthCheckResponse.SERVING
        assert reason(verify_stream(channel).ask(verify_item("a", 0, TOKENS, 0, sampling=GREEDY))) == ""

    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    entries = [json.loads(line) for line in process.log.read_text().splitlines()]
    assert any("KV cache" in entry["message"] and "MiB" in entry["message"] for entry in entries)
    assert {entry["service"] for entry in entries} == {"target"}


def test_sigterm_while_loading(start_worker: StartWorker) -> None:
    process = start_worker(cold=True)
    first_health(process.address)
    process.signal(signal.SIGTERM)
    assert process.wait(240) == 0  # what is being imported, for ten seconds on a fast machine, is imported first


def test_sigterm_serves_running_sessions_to_their_end(start_worker: StartWorker) -> None:
    process = start_worker(drain_seconds=120)
    process.wait_serving()
    with open_channel(process.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        next(watch)
        stream = verify_stream(channel)
        assert reason(stream.ask(verify_item("old", 0, TOKENS, 0, sampling=GREEDY))) == ""
        process.signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING
        assert reason(stream.ask(verify_item("new", 0, TOKENS, 0, sampling=GREEDY))) == "DRAINING"
        for epoch in range(1, 4):
            assert reason(stream.ask(verify_item("old", epoch, TOKENS, 19))) == ""
        stream.send([], release=["old"])
        with pytest.raises(grpc.RpcError) as ended:
            stream.read()
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.wait() == 0, "long before the time is up"


def test_sigint_ends_a_session_that_stays_when_the_time_is_up(start_worker: StartWorker) -> None:
    process = start_worker("draft")
    process.wait_serving()
    with open_channel(process.address) as channel:
        stream = propose_stream(channel)
        assert reason(stream.ask(propose_item("a", 0, TOKENS, 0, 2, sampling=GREEDY))) == ""
        began = time.monotonic()
        process.signal(signal.SIGINT)
        with pytest.raises(grpc.RpcError) as ended:
            stream.read()
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        assert process.wait() == 0
        assert 2.5 < time.monotonic() - began < 60


def failed_start(process: ServiceProcess) -> str:
    """The last line that a process wrote before it ended with status 1."""
    assert process.wait(90) == 1
    output = process.log.read_text()
    assert "Traceback" not in output
    return output.splitlines()[-1]


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_missing_model_is_named(start_worker: StartWorker, role: str) -> None:
    line = failed_start(start_worker(role, MODEL="models/no-such-model"))
    assert line.startswith(f"error: TANDEM_{role.upper()}_MODEL: can't load model 'models/no-such-model'")


def test_a_bad_setting_is_named(start_worker: StartWorker) -> None:
    problem = "error: TANDEM_TARGET_SLOTS='many' can't be read: expected 1 to 4096"
    assert failed_start(start_worker(SLOTS="many")) == problem


def test_a_port_in_use_is_named(start_worker: StartWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = failed_start(start_worker(LISTEN=address))
    assert line.startswith(f"error: TANDEM_TARGET_LISTEN: can't listen on '{address}'")


def test_help_lists_every_setting() -> None:
    output = subprocess.run(
        [sys.executable, "-m", "target_service", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for declared in settings_of(TargetConfig).values():
        assert declared.variable in output.replace("\n", "")


def test_reflection_lists_the_service(target_channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(target_channel)
    [answer] = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in answer.list_services_response.service}
    assert {"tandem.v1.TargetService", "grpc.health.v1.Health"} <= names
