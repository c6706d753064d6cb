"""More sessions than slots: they wait in the order in which they came, within bounds, and lose nothing by it."""

from __future__ import annotations

import asyncio

import pytest

from tandem.engine.engine import Engine, WaitingLimits
from tests.engine.harness import (
    GREEDY,
    Client,
    Engines,
    plain_greedy_by_engine,
    reason,
    sampled,
    settled,
    verify_item,
)
from tests.engine.models import over_slots, plain_greedy, random_ids, random_model


def first(name: str, epoch: int = 0, seed: int = 1) -> object:
    return verify_item(name, epoch, random_ids(seed, 20), 0, sampling=GREEDY)


async def told(client: Client, name: str) -> str:
    """Waits for the answer of a session: why it failed, or ""."""
    for _ in range(24_000):
        found = [answer for answer in client.answers if answer.request_id == name]
        if found:
            return reason(found[-1])
        await asyncio.sleep(0.005)
    raise AssertionError(f"{name} is not answered")


async def full(engines: Engines, waiting: WaitingLimits) -> Client:
    """An engine of two slots, both taken."""
    client = Client(engines.target(over_slots(random_model(), slots=2), waiting=waiting))
    answers = await client.ask_all([first("holds0"), first("holds1")])
    assert [reason(answer) for answer in answers] == ["", ""]
    client.answers.clear()
    return client


async def test_slots_go_to_those_who_came_first(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(10, 240))
    other = Client(client.engine)
    for number in range(6):
        asker = client if number % 2 else other
        client.engine.submit(asker.stream, [first(f"w{number}")])
    client.engine.release(client.stream, ["holds0"])
    for number in range(6):
        await told(client if number % 2 else other, f"w{number}")
        served = [answer.request_id for answer in (*client.answers, *other.answers)]
        assert sorted(served) == [f"w{index}" for index in range(number + 1)]
        owner = client if number % 2 else other
        client.engine.release(owner.stream, [f"w{number}"])
    assert {reason(answer) for answer in (*client.answers, *other.answers)} == {""}


async def test_one_more_than_may_wait_is_refused_at_once(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(2, 240))
    client.engine.submit(client.stream, [first("w0"), first("w1")])
    refused = await client.ask(first("w2"))
    assert reason(refused) == "RESOURCE_EXHAUSTED"
    assert refused.error is not None
    assert "2 sessions wait" in refused.error.message
    client.engine.release(client.stream, ["holds0", "holds1"])
    assert [await told(client, "w0"), await told(client, "w1")] == ["", ""]


async def test_a_wait_has_an_end(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(5, 0.2))
    began = asyncio.get_running_loop().time()
    answers = await client.ask_all([first("w0"), first("w1")])
    assert [reason(answer) for answer in answers] == ["RESOURCE_EXHAUSTED"] * 2
    assert 0.15 < asyncio.get_running_loop().time() - began < 30
    client.engine.release(client.stream, ["holds0"])
    assert reason(await client.ask(first("w0", epoch=1))) == ""


async def test_who_is_cancelled_while_waiting_holds_nobody_up(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(5, 240))
    gone = Client(client.engine)
    client.engine.submit(gone.stream, [first("gone")])
    client.engine.submit(client.stream, [first("released"), first("newer"), first("last")])
    newer = asyncio.create_task(client.ask(first("newer", epoch=1, seed=2)))
    await asyncio.sleep(0)
    client.engine.close(gone.stream)
    client.engine.release(client.stream, ["released", "holds0"])
    assert reason(await newer) == ""
    told = {(answer.request_id, answer.cache_epoch): reason(answer) for answer in client.answers}
    assert told == {("released", 0): "CANCELLED", ("newer", 0): "CANCELLED", ("newer", 1): ""}  # "last" still waits
    client.engine.release(client.stream, ["newer", "last", "holds1"])
    await settled(client.engine)
    assert (client.engine.stats.sessions, client.engine.stats.slots_used, client.engine.stats.waiting) == (0, 0, 0)
    assert not client.engine._waiting
    assert gone.answers == []


async def test_a_bad_item_of_one_who_waits_loses_its_place_only(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(5, 240))
    client.engine.submit(client.stream, [first("a"), first("b")])
    assert reason(await client.ask(verify_item("a", 1, random_ids(1, 30), 25))) == "CACHE_MISS"
    client.engine.release(client.stream, ["holds0"])
    assert await told(client, "b") == ""
    client.engine.release(client.stream, ["holds1"])
    assert reason(await client.ask(first("a", epoch=2))) == ""


async def test_draining_sends_those_away_who_wait(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(5, 240))
    waiting = asyncio.create_task(client.ask(first("w0")))
    await asyncio.sleep(0)
    drained = asyncio.create_task(client.engine.drain())
    assert reason(await waiting) == "DRAINING"
    client.engine.release(client.stream, ["holds0", "holds1"])
    await asyncio.wait_for(drained, 60)


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_crowd_that_waits_says_what_each_says_alone(engines: Engines, reuse: bool) -> None:
    """Twelve requests over three slots."""
    model = random_model()
    engine: Engine[object] = engines.target(over_slots(model, slots=3), reuse=reuse, waiting=WaitingLimits(12, 240))
    client = Client(engine)

    async def run(number: int) -> None:
        prompt = random_ids(number, 20)
        assert await plain_greedy_by_engine(client, f"r{number}", prompt, 6) == plain_greedy(model, prompt, 6)
        engine.release(client.stream, [f"r{number}"])

    await asyncio.gather(*(run(number) for number in range(12)))
    await settled(engine)
    assert (engine.stats.sessions, engine.stats.slots_used) == (0, 0)


async def test_what_is_wrong_is_said_before_the_wait(engines: Engines) -> None:
    client = await full(engines, WaitingLimits(5, 240))
    assert (
        reason(await client.ask(verify_item("w", 0, random_ids(1, 20), 0, [96], sampling=GREEDY))) == "INVALID_ARGUMENT"
    )
    assert (
        reason(await client.ask(verify_item("w", 0, random_ids(1, 99), 0, sampling=sampled(1)))) == "CONTEXT_EXCEEDED"
    )
    assert client.engine.stats.sessions == 2
