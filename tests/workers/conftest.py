"""Worker processes on free ports, each with the tiny model and few, short slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.support.channels import open_channel
from tests.support.ports import free_port
from tests.support.services import MODELS, ServiceProcess

SLOTS = 3
CONTEXT = 128

StartWorker = Callable[..., ServiceProcess]


def worker_process(
    role: str, folder: Path, *, cold: bool = False, drain_seconds: int = 3, **settings: str
) -> ServiceProcess:
    """A draft or target process that is not started yet; settings are variables without their prefix."""
    address = f"127.0.0.1:{free_port()}"
    defaults = {
        "LISTEN": address,
        "MODEL": str(MODELS / "tiny-target"),
        "SLOTS": str(SLOTS),
        "CONTEXT_LENGTH": str(CONTEXT),
        "THREADS": "1",
        "MAX_WAITING": "0",
    }
    prefixed = {f"TANDEM_{role.upper()}_{name}": value for name, value in {**defaults, **settings}.items()}
    environment = {
        "TANDEM_DEBUG_INVARIANTS": "1",
        "TANDEM_LOG_FORMAT": "json",
        "TANDEM_DRAIN_SECONDS": str(drain_seconds),
    }
    log = folder / f"{role}.log"
    return ServiceProcess(f"{role}_service", address, {**environment, **prefixed}, log, cold=cold)


@contextlib.contextmanager
def running(process: ServiceProcess) -> Iterator[ServiceProcess]:
    process.start()
    try:
        process.wait_serving()
        yield process
    finally:
        process.stop()


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(worker_process("target", tmp_path_factory.mktemp("target"))) as process:
        yield process


@pytest.fixture(scope="package")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(worker_process("draft", tmp_path_factory.mktemp("draft"))) as process:
        yield process


@pytest.fixture
def target_channel(target: ServiceProcess) -> Iterator[grpc.Channel]:
    with open_channel(target.address) as channel:
        yield channel


@pytest.fixture
def draft_channel(draft: ServiceProcess) -> Iterator[grpc.Channel]:
    with open_channel(draft.address) as channel:
        yield channel


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[StartWorker]:
    """Starts processes of the test's own, which end with it."""
    started: list[ServiceProcess] = []

    def start(role: str = "target", **settings: Any) -> ServiceProcess:
        process = worker_process(role, tmp_path, **settings)
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.stop()
