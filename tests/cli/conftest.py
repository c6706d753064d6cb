"""Fixtures of the command line's tests."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest

from tandem.v1 import orchestrator_pb2_grpc
from tests.cli.fake_orchestrator import FakeOrchestrator


@pytest.fixture
def orchestrator() -> Iterator[FakeOrchestrator]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    fake = FakeOrchestrator()
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    fake.release()
    server.stop(None)


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find
