"""Fixtures of the command line's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest

from tandem.v1 import orchestrator_pb2_grpc
from tests.cli.fake_orchestrator import FakeOrchestrator
from tests.support import ports


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
    return ports.free_port
