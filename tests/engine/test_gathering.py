"""When a step waits for others, and that one never waits for nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from bench.simulation import Constants, Curve, Layout, simulate
from tandem.engine.forward_cost import FREE_TOKENS, ForwardCost
from tandem.engine.gathering import LEAST_SECONDS, LONGEST_SHARE, Gathering
from tests.engine.harness import GREEDY, Client, Engines, Gate, plain_greedy_by_engine, reason, settled, verify_item
from tests.engine.models import over_slots, plain_greedy, random_ids, random_model

MOST_TOKENS = 64
LINEAR = ForwardCost(((1, 1.0), (2, 2.0)))


def gathering(cost: ForwardCost = FREE_TOKENS, forward: float = 1.0) -> Gathering[str]:
    """One whose forwards of a token took `forward` seconds."""
    made: Gathering[str] = Gathering(cost, lambda: MOST_TOKENS)
    made.ran([1], forward)
    return made


def come_and_go(made: Gathering[str], name: str, away: Sequence[float], until: float, tokens: int = 1) -> None:
    """A session that was away for such times, and is answered at `until`."""
    now = until - sum(away)
    for seconds in away:
        made.answered(name, tokens, now)
        now += seconds
        made.arrived(name, now)
    made.answered(name, tokens, until)


def test_a_step_waits_for_who_is_about_to_come_back() -> None:
    made = gathering()
    come_and_go(made, "b", [0.1] * 40, until=10.0)
    assert made.seconds([1], 10.0) == pytest.approx(0.1, rel=0.01)
    assert made.seconds([1], 10.05) == pytest.approx(0.05, rel=0.02)
    made.arrived("b", 10.1)
    assert made.seconds([1, 1], 10.1) == 0.0


def test_nobody_waits_without_a_reason() -> None:
    made = gathering()
    assert made.seconds([1], 0.0) == 0.0, "nobody else is known"
    made.answered("new", 1, 0.0)
    assert made.seconds([1], 0.0) == 0.0, "how long this one stays away isn't known yet"
    come_and_go(made, "b", [0.1] * 40, until=10.0)
    assert made.seconds([], 10.0) == 0.0, "nothing is there that could run: all wait for commands anyway"
    made.ended("b")
    assert made.seconds([1], 10.0) == 0.0


def test_who_is_late_is_not_waited_for() -> None:
    made = gathering()
    come_and_go(made, "b", [0.1] * 40, until=10.0)
    assert made.seconds([1], 10.2) == 0.0


@pytest.mark.parametrize(("away", "waits"), [(0.1, True), (0.45, True), (0.55, False), (3.0, False)])
def test_a_wait_is_a_share_of_a_forward_at_most(away: float, waits: bool) -> None:
    made = gathering()
    come_and_go(made, "b", [away] * 40, until=10.0)
    assert (made.seconds([1], 10.0) > 0) == waits


def test_one_after_the_other_they_hold_a_step_up_no_longer() -> None:
    """Each one comes in time, and with each comes the news of another."""
    made = gathering()
    for number in range(20):
        come_and_go(made, str(number), [0.1] * 40, until=10.0 + 0.09 * number)
    now, waiting = 10.0, [1]
    while wait := made.seconds(waiting, now):
        now += wait
        waiting.append(1)
    assert now <= 10.0 + LONGEST_SHARE + LEAST_SECONDS


def test_there_is_no_wait_where_a_forward_of_all_costs_as_much_as_two() -> None:
    made = gathering(LINEAR)
    come_and_go(made, "b", [0.01] * 40, until=10.0)
    assert made.seconds([1], 10.0) == 0.0


def test_unlike_feeds_are_waited_for_where_padding_is_not_computed() -> None:
    """Those who decode are about to be back, and a block of two is there: with padding, each of them counts as two."""
    for computes_padding in (True, False):
        made = gathering(ForwardCost(((1, 10.0), (2, 15.0)), computes_padding), forward=10.0)
        for number in range(15):
            come_and_go(made, str(number), [0.1] * 40, until=100.0)
        assert (made.seconds([2], 100.0) > 0) != computes_padding


def test_there_is_no_wait_for_one_who_finds_no_room() -> None:
    made = gathering()
    come_and_go(made, "b", [0.1] * 40, until=10.0)
    assert made.seconds([1] * MOST_TOKENS, 10.0) == 0.0


def test_there_is_no_wait_once_memory_holds_no_forward_of_both() -> None:
    most = 2
    made: Gathering[str] = Gathering(FREE_TOKENS, lambda: most)
    made.ran([1], 1.0)
    come_and_go(made, "b", [0.1] * 40, until=10.0)
    assert made.seconds([1], 10.0) > 0
    most = 1
    assert made.seconds([1], 10.0) == 0.0


def test_who_comes_back_at_any_time_is_not_counted_on() -> None:
    made = gathering()
    come_and_go(made, "b", [0.01, 0.9] * 20, until=10.0)
    assert made.seconds([1], 10.0) == 0.0


def test_a_forward_in_which_the_process_was_stopped_makes_no_later_wait_longer() -> None:
    made = gathering(forward=0.05)
    come_and_go(made, "slow", [2.0] * 40, until=100.0)
    assert made.seconds([1], 100.0) == 0.0
    made.ran([1], 60.0)
    assert made.seconds([1], 100.0) == 0.0


def test_forwards_that_have_become_slower_are_waited_with_for_longer() -> None:
    made = gathering(forward=0.05)
    come_and_go(made, "b", [0.3] * 40, until=10.0)
    assert made.seconds([1], 10.0) == 0.0
    for _ in range(40):
        made.ran([1], 1.0)
    assert made.seconds([1], 10.0) == pytest.approx(0.3, rel=0.01)


CURVES = {"flat": Curve(((1.0, 0.030), (64.0, 0.036))), "rising": Curve(((1.0, 0.05), (5.0, 0.08), (33.0, 0.30)))}


@pytest.mark.parametrize("target", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("gamma", [0, 5])
@pytest.mark.parametrize("requests", [1, 2, 4, 16])
def test_requests_out_of_phase_gain_and_nobody_loses(target: Curve, gamma: int, requests: int) -> None:
    """In the simulation, whose targets ask this very class."""
    costs = Constants(draft_step=Curve(((1.0, 0.002),)), target_forward=target, overhead=0.002, acceptance=(0.8, 0.7))
    for spread in (0.0, 0.4, 1.0):
        on, off = (
            simulate(costs, Layout(gather=gather), requests=requests, gamma=gamma, spread=spread).tokens_per_second
            for gather in (True, False)
        )
        assert on >= 0.999 * off
        if requests == 2 and gamma == 0 and spread:
            assert on > 1.4 * off


class UntilTwo:
    """Lets a step wait for ever until two items are there, and notes when items came."""

    def __init__(self) -> None:
        self.came: list[float] = []
        self.ran_tokens: list[int] = []

    def seconds(self, waiting: Sequence[int], now: float) -> float:
        return 3600.0 if len(waiting) == 1 else 0.0

    def arrived(self, session: object, now: float) -> None:
        self.came.append(now)

    def ran(self, sizes: Sequence[int], seconds: float) -> None:
        self.ran_tokens.append(sum(sizes))

    def answered(self, session: object, tokens: int, now: float) -> None: ...
    def ended(self, session: object) -> None: ...


class NoWait(UntilTwo):
    """Lets no step wait."""

    def seconds(self, waiting: Sequence[int], now: float) -> float:
        return 0.0


@pytest.fixture
async def client(engines: Engines) -> Client:
    return Client(engines.target(over_slots(random_model()), gather=True))


async def test_an_engines_step_waits_for_commands_and_begins_with_what_they_brought(client: Client) -> None:
    engine, prompts = client.engine, [random_ids(1, 9), random_ids(2, 9)]
    await engine.call(lambda: setattr(engine, "_gathering", UntilTwo()))
    first = asyncio.create_task(client.ask(verify_item("a", 0, prompts[0], 0, sampling=GREEDY)))
    await asyncio.sleep(0)
    await settled(engine)
    assert engine.stats.forwards == 0
    second = asyncio.create_task(client.ask(verify_item("b", 0, prompts[1], 0, sampling=GREEDY)))
    assert [reason(answer) for answer in await asyncio.gather(first, second)] == ["", ""]
    assert (engine.stats.forwards, engine.stats.feeds, engine.stats.gatherings) == (1, 2, 1)
    assert engine.stats.gathering_seconds > 0


async def test_an_item_came_when_it_was_sent_whatever_ran_then(engines: Engines) -> None:
    lm = over_slots(random_model())
    gate = Gate(lm)
    gate.open()
    client = Client(engines.target(lm, gather=True))
    engine, times = client.engine, UntilTwo()
    prompts = {"a": random_ids(1, 9), "b": random_ids(2, 9)}
    items = [verify_item(name, 0, prompt, 0, sampling=GREEDY) for name, prompt in prompts.items()]
    held = {answer.request_id: answer.cached_length for answer in await client.ask_all(items)}
    await engine.call(lambda: setattr(engine, "_gathering", times))
    gate.close()
    others = [verify_item(name, 0, random_ids(3, 9), 0, sampling=GREEDY) for name in ("c", "d")]
    running = asyncio.create_task(client.ask_all(others))
    await asyncio.sleep(0)
    again = [verify_item(name, 1, [*prompt, 5], held[name]) for name, prompt in prompts.items()]
    waiting = asyncio.create_task(client.ask_all(again))
    await asyncio.sleep(0)
    sent = time.perf_counter()
    gate.open()
    await asyncio.gather(running, waiting)
    assert len(times.came) == 2
    assert max(times.came) <= sent


async def test_what_forwards_take_is_not_learnt_from_chunks_of_prefill(engines: Engines) -> None:
    engine = engines.target(over_slots(random_model(), max_length=250), prefill_chunk=64, gather=True)
    client, times = Client(engine), NoWait()
    await engine.call(lambda: setattr(engine, "_gathering", times))
    prompt = random_ids(1, 120)
    answer = await client.ask(verify_item("a", 0, prompt, 0, sampling=GREEDY))
    assert (reason(answer), times.ran_tokens) == ("", [])
    assert reason(await client.ask(verify_item("a", 1, [*prompt, 5], answer.cached_length))) == ""
    assert len(times.ran_tokens) == 1


async def test_a_crowd_that_is_waited_for_says_what_each_says_alone(client: Client) -> None:
    prompts = {f"r{number}": random_ids(number, 5 + number) for number in range(6)}

    async def run(name: str) -> list[int]:
        await asyncio.sleep(0.001 * len(prompts[name]))
        return await plain_greedy_by_engine(client, name, prompts[name], 12)

    found = await asyncio.gather(*map(run, prompts))
    assert found == [plain_greedy(random_model(), prompt, 12) for prompt in prompts.values()]
