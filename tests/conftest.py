"""Fixtures that several folders share: running services, and reference outputs computed without any of our code."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import grpc
import pytest
from hypothesis import HealthCheck, settings

from tests.support.channels import open_channel
from tests.support.model_scripts import load_script
from tests.support.reruns import Reruns
from tests.support.services import MODELS, Stack, running_stack

# The same examples in every run, however slow the machine is.
settings.register_profile("tandem", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Reruns())


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs so, and all that the tests start would be deaf to Ctrl-C as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector while pytest rewrites the tests: in Python before 3.11.8 and 3.12.2 a collection in the midst of
    `ast.parse`, which lets other threads parse, ends it as "AST constructor recursion depth mismatch" (python/cpython#106905). And
    without all that was imported by then from here on: each full collection would stop the whole process for 0.2 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def tiny_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The tiny pair, which agrees about as much as a real pair does."""
    with running_stack(tmp_path_factory.mktemp("tiny"), MODELS / "tiny-target", MODELS / "tiny-draft") as stack:
        yield stack


@pytest.fixture(scope="session")
def tiny_channel(tiny_stack: Stack) -> Iterator[grpc.Channel]:
    with open_channel(tiny_stack.orchestrator.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def same_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The draft is the target: every token must be accepted, so block borders are at known places."""
    with running_stack(tmp_path_factory.mktemp("same"), MODELS / "tiny-target", MODELS / "tiny-target") as stack:
        yield stack


@pytest.fixture(scope="session")
def same_channel(same_stack: Stack) -> Iterator[grpc.Channel]:
    with open_channel(same_stack.orchestrator.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def random_draft_channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    """The draft knows nothing: nearly every round takes the residual path."""
    folder: Path = tmp_path_factory.mktemp("random")
    draft = folder / "draft"
    load_script("variants").random_draft(MODELS / "tiny-draft", draft, seed=7)
    with (
        running_stack(folder, MODELS / "tiny-target", draft) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield channel
