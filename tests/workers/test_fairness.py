"""Two orchestrators at one worker, of which one floods it: the other one is served all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tests.engine.harness import GREEDY, propose_item, verify_item
from tests.engine.models import random_ids
from tests.support.channels import open_channel
from tests.support.services import ServiceProcess
from tests.workers.client import PackedClient, propose_stream, reason, verify_stream
from tests.workers.conftest import StartWorker

TOKENS = random_ids(1, 20, 512)


@contextlib.contextmanager
def two(process: ServiceProcess, stream: Callable[[Any], PackedClient]) -> Iterator[tuple[PackedClient, PackedClient]]:
    """Streams of two orchestrators, each over a connection of its own."""
    with (
        open_channel(process.address) as one,
        open_channel(process.address) as other,
    ):
        yield stream(one), stream(other)


def verify(name: str) -> Any:
    return verify_item(name, 0, TOKENS, 0, sampling=GREEDY)


def propose(name: str) -> Any:
    return propose_item(name, 0, TOKENS, 0, 2, sampling=GREEDY)


def test_a_flooded_target_serves_another_orchestrator_next(start_worker: StartWorker) -> None:
    process = start_worker(SLOTS="2", MAX_WAITING="4")
    process.wait_serving()
    with two(process, verify_stream) as (flood, other):
        held: list[str] = []
        for turn in range(3):
            flood.send([verify(f"f{turn}.{number}") for number in range(8)])
            answers = [flood.read() for _ in range(6 if turn else 4)]  # the line has room for four, and had two in it
            held += sorted(answer.request_id for answer in answers if not reason(answer))
            refused = [reason(answer) for answer in answers if reason(answer)]
            assert (len(held), refused) == (2, ["RESOURCE_EXHAUSTED"] * (len(answers) - (0 if turn else 2)))

            other.send([verify(f"o{turn}")])
            assert reason(flood.read()) == "RESOURCE_EXHAUSTED", "the flood's last one makes room in the line"
            flood.send([], release=[held.pop(0)])
            served = other.read()
            assert (served.request_id, reason(served)) == (f"o{turn}", "")
            other.send([], release=[f"o{turn}"])
            seated = flood.read()
            assert reason(seated) == ""
            held.append(seated.request_id)


def test_a_flooded_draft_gives_another_orchestrator_its_share(start_worker: StartWorker) -> None:
    process = start_worker("draft", SLOTS="4", SLOTS_PER_ORCHESTRATOR="3")
    process.wait_serving()
    with two(process, propose_stream) as (flood, other):
        reasons = [reason(flood.ask(propose(f"f{number}"))) for number in range(4)]
        assert reasons == ["", "", "", "RESOURCE_EXHAUSTED"], "a quota of three of four"
        assert [reason(other.ask(propose(f"o{number}"))) for number in range(3)] == ["", "", "RESOURCE_EXHAUSTED"]
        again = [reason(flood.ask(propose_item(f"f{number}", 1, TOKENS, 19, 2))) for number in range(3)]
        assert sorted(again) == ["", "", "CACHE_MISS"], "two each"
