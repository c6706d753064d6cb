"""A target in two parts, on two processes as torchrun would start them, connected by gloo: the real service, the tiny model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tandem.grpc_server import LIVENESS
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import generate_all, paced_channel, request
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.services import MODELS, ServiceProcess, running_stack

GAMMAS = (0, 1, 2, 5, 8)
TOKENS = 8
SHARED = [7 + 3 * position % 400 for position in range(80)]
PROMPTS = [[5, 9, 300], [*SHARED, 11, 12], [*SHARED, 17], [77] * 40]
"""Longer ones than a chunk of prefill, and a common beginning, which is copied from slot to slot: on both ranks."""


def ranks(port: int) -> list[dict[str, str]]:
    """What torchrun puts into the environment of each of two processes."""
    common = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TANDEM_TARGET_TENSOR_PARALLEL": "2",
        "TANDEM_TARGET_MODEL": str(MODELS / "tiny-target"),
        "TANDEM_TARGET_PREFILL_CHUNK": "32",
        "TANDEM_TARGET_SLOTS": "8",
        "TANDEM_TARGET_CONTEXT_LENGTH": "128",
        "TANDEM_TARGET_THREADS": "1",
        "TANDEM_TARGET_RETRY_SECONDS": "2",
    }
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[tuple[ServiceProcess, dict[str, str]]]:
    """Rank 1, started, and the environment of rank 0."""
    first, second = ranks(free_port())
    follower = ServiceProcess("target_service", "", second, tmp_path / "rank-1.log")
    follower.start()
    yield follower, first
    assert follower.process is not None
    if follower.process.poll() is None:
        follower.kill()  # it leaves signals to rank 0


def test_two_parts_say_what_the_whole_says_until_one_is_gone(
    parts: tuple[ServiceProcess, dict[str, str]], tmp_path: Path
) -> None:
    follower, first = parts
    reference = Reference(MODELS / "tiny-target")
    expected = [reference.greedy(prompt, TOKENS) for prompt in PROMPTS]
    with running_stack(tmp_path, MODELS / "tiny-target", MODELS / "tiny-draft", first) as stack:
        with stack.orchestrator.channel() as channel:
            for gamma in GAMMAS:
                asked = (
                    request(prompt, temperature=0, max_tokens=TOKENS, num_speculative_tokens=gamma)
                    for prompt in PROMPTS
                )
                assert [answer.ids for answer in generate_all(channel, asked)] == expected
        with paced_channel(stack.orchestrator.address) as channel:
            answer = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(
                request([5, 9, 300], temperature=0, max_tokens=100, num_speculative_tokens=0)
            )
            while not next(answer).tokens:
                pass
            follower.kill()
            with pytest.raises(grpc.RpcError) as ended:
                list(answer)
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        _until(lambda: not stack.target.serving(), "the service goes on with half of a model")
        _until(lambda: not stack.target.serving(LIVENESS), "nobody would start it again")
        _until(lambda: "rank 1 of 2 is gone" in stack.target.log.read_text(), "it doesn't say which one is gone")
        assert stack.target.process is not None
        assert stack.target.process.poll() is None, "it says that it is dead, and leaves its end to who started it"
        stack.target.signal(signal.SIGTERM)
        assert stack.target.wait() == 0


def test_the_other_rank_ends_with_the_service(parts: tuple[ServiceProcess, dict[str, str]], tmp_path: Path) -> None:
    follower, first = parts
    address = f"127.0.0.1:{free_port()}"
    service = ServiceProcess("target_service", address, {**first, "TANDEM_TARGET_LISTEN": address}, tmp_path / "0.log")
    service.start()
    try:
        service.wait_serving()
        for process in (follower, service):  # as torchrun does
            process.signal(signal.SIGTERM)
        assert service.wait() == 0
        assert follower.wait() == 0
    finally:
        service.stop()


def _until(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)
