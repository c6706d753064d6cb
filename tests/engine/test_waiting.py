"""More sessions than slots: they wait within bounds, orchestrators in turns, and lose nothing by it."""

from __future__ import annotations

import asyncio

import pytest

from tandem.engine.engine import Engine
from tandem.engine.waiting_line import WaitingLimits
from tests.engine.harness import (
    GREEDY,
    Client,
    Engines,
    Gate,
    plain_greedy_by_engine,
    propose_item,
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
    client.engine.submit(client.stream, [first(f"w{number}") for number in range(6)])
    client.engine.release(client.stream, ["holds0"])
    for number in range(6):
        await told(client, f"w{number}")
        served = [answer.request_id for answer in client.answers]
        assert sorted(served) == [f"w{index}" for index in range(number + 1)]
        client.engine.release(client.stream, [f"w{number}"])
    assert {reason(answer) for answer in client.answers} == {""}


async def test_a_free_slot_goes_to_the_orchestrator_that_holds_the_fewest(engines: Engines) -> None:
    """One holds both slots and has more waiting; another one's request, which comes after all of these, is next."""
    flood = await full(engines, WaitingLimits(10, 240))
    engine, other = flood.engine, Client(flood.engine)
    engine.submit(flood.stream, [first(f"f{number}") for number in range(4)])
    engine.submit(other.stream, [first(f"o{number}") for number in range(3)])
    order = []
    for owner, released, seated, whose in (
        (flood, "holds0", "o0", other),
        (flood, "holds1", "f0", flood),  # each has one now, so each one's share stays its own
        (other, "o0", "o1", other),
        (flood, "f0", "f1", flood),
        (other, "o1", "o2", other),
        (other, "o2", "f2", flood),  # nobody else wants it
    ):
        engine.release(owner.stream, [released])
        assert await told(whose, seated) == ""
        order += [released, seated]
        served = {answer.request_id for answer in (*flood.answers, *other.answers)}
        assert served == {name for name in order if name[0] in "fo"}
    engine.release(flood.stream, ["f1", "f2"])
    assert await told(flood, "f3") == ""
    await settled(engine)
    assert engine.stats.line.most_held == 1


async def test_a_full_line_has_room_for_another_orchestrator(engines: Engines) -> None:
    flood = await full(engines, WaitingLimits(4, 240))
    engine, other = flood.engine, Client(flood.engine)
    engine.submit(flood.stream, [first(f"f{number}") for number in range(4)])
    assert reason(await flood.ask(first("f4"))) == "RESOURCE_EXHAUSTED"
    engine.submit(other.stream, [first("o0"), first("o1")])
    assert [await told(flood, "f3"), await told(flood, "f2")] == ["RESOURCE_EXHAUSTED"] * 2
    assert reason(await other.ask(first("o2"))) == "RESOURCE_EXHAUSTED", "both have as many in it now"
    assert reason(await flood.ask(first("f5"))) == "RESOURCE_EXHAUSTED"
    await settled(engine)
    line = engine.stats.line
    assert (engine.stats.waiting, line.full, line.gave_way, line.late) == (4, 3, 2, 0)
    engine.release(flood.stream, ["holds0", "holds1"])
    assert [await told(other, "o0"), await told(flood, "f0")] == ["", ""]
    engine.close(flood.stream)
    assert await told(other, "o1") == ""


async def test_an_orchestrator_holds_no_more_than_its_quota(engines: Engines) -> None:
    engine = engines.target(over_slots(random_model(), slots=3), waiting=WaitingLimits(2, 240), slots_per_stream=2)
    flood, other = Client(engine), Client(engine)
    assert [reason(answer) for answer in await flood.ask_all([first("f0"), first("f1")])] == ["", ""]
    engine.submit(flood.stream, [first("f2"), first("f3")])
    assert reason(await other.ask(first("o0"))) == "", "the third slot is free, and the line no hindrance"
    full = await flood.ask(first("f4"))
    assert full.error is not None
    assert "2 of 3" in full.error.message
    engine.release(flood.stream, ["f1"])
    assert await told(flood, "f2") == ""
    engine.release(other.stream, ["o0"])
    await settled(engine)
    assert (engine.stats.slots_used, engine.stats.waiting, engine.stats.line.most_held) == (2, 1, 2)


async def test_a_draft_that_is_full_takes_a_slot_from_the_orchestrator_with_the_most(engines: Engines) -> None:
    """The idle session with the least to read again: its request drafts on, from the start, once there is room."""
    model = random_model()
    engine = engines.draft(over_slots(model, slots=4))
    flood, other = Client(engine), Client(engine)
    prompts = {f"f{number}": random_ids(number, length) for number, length in enumerate((30, 12, 40, 20))}
    items = [propose_item(name, 0, prompt, 0, 3, sampling=GREEDY) for name, prompt in prompts.items()]
    assert [reason(answer) for answer in await flood.ask_all(items)] == [""] * 4

    prompt = random_ids(9, 15)
    for name in ("o0", "o1"):
        answer = await other.ask(propose_item(name, 0, prompt, 0, 3, sampling=GREEDY))
        assert [each.token_id for each in answer.result] == plain_greedy(model, prompt, 3)
    full = await other.ask(propose_item("o2", 0, prompt, 0, 3, sampling=GREEDY))
    assert reason(full) == "RESOURCE_EXHAUSTED", "two each: nobody has more"
    assert (engine.stats.line.displaced, engine.stats.line.full) == (2, 1)

    async def drafts_on(name: str, epoch: int, base: int) -> str:
        answer = await flood.ask(propose_item(name, epoch, prompts[name], base, 3, sampling=GREEDY))
        if answer.error is None:
            assert [each.token_id for each in answer.result] == plain_greedy(model, prompts[name], 3)
        return reason(answer)

    assert [await drafts_on(name, 1, prompts[name].size - 1) for name in ("f0", "f2")] == ["", ""]
    for name in ("f1", "f3"):
        assert await drafts_on(name, 1, prompts[name].size - 1) == "CACHE_MISS"
        assert await drafts_on(name, 1, 0) == "RESOURCE_EXHAUSTED"
    engine.close(other.stream)
    assert [await drafts_on(name, 2, 0) for name in ("f1", "f3")] == ["", ""]
    engine.close(flood.stream)
    await settled(engine)
    assert (engine.stats.sessions, engine.stats.slots_used, engine.stats.line.most_held) == (0, 0, 0)


async def test_where_none_is_idle_a_draft_ends_one_that_runs(engines: Engines) -> None:
    lm = over_slots(random_model(), slots=2)
    gate = Gate(lm)
    engine = engines.draft(lm)
    flood, other = Client(engine), Client(engine)
    running = asyncio.create_task(
        flood.ask_all(
            [propose_item(f"f{number}", 0, random_ids(number, 12), 0, 3, sampling=GREEDY) for number in (0, 1)]
        )
    )
    await asyncio.sleep(0)
    asked = asyncio.create_task(other.ask(propose_item("o0", 0, random_ids(5, 12), 0, 3, sampling=GREEDY)))
    await asyncio.sleep(0)
    gate.open()
    assert reason(await asked) == ""
    assert sorted(reason(answer) for answer in await running) == ["", "RESOURCE_EXHAUSTED"]


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
    assert not len(client.engine._line)
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
