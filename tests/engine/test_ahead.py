"""Drafting ahead: what the draft does between items is of use, harms nobody, and is seen nowhere in what it proposes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draft_service import ahead as ahead_module
from draft_service.ahead import DraftAhead
from draft_service.ahead_gain import AheadGain
from tandem.engine.feed import Feed
from tandem.engine.stream import Answer
from tandem.v1 import sampling_pb2
from tests.engine.harness import GREEDY, Client, Engines, propose_item, reason, sampled, settled, speculative
from tests.engine.models import VOCABULARY, over_slots, random_ids, random_model

ROWS = 5
ROUNDS = [3, 3, 2, 5, 5, 1, 1, 8, 3, 0, 0, 4, 4]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """A target, and a draft that agrees with it about as often as not."""
    target = random_model()
    draft = deepcopy(target)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * 0.015)
    return target, draft


async def nothing_left(ahead: DraftAhead) -> None:
    """Waits until all guesses are drafted for."""
    while ahead.wanted:  # noqa: ASYNC110 - the step thread knows no events
        await asyncio.sleep(0.0005)


class UnhurriedTarget(Client):
    """Verifies only once the draft has nothing left to do ahead."""

    ahead: DraftAhead | None = None

    async def ask(self, item: Any) -> Answer:
        if self.ahead is not None:
            await nothing_left(self.ahead)
        return await super().ask(item)


class Pair:
    """A target and a draft at work."""

    def __init__(
        self,
        engines: Engines,
        pair: tuple[Any, Any],
        rows: int,
        stop_below: float = 0.0,
        gain: AheadGain | None = None,
        support: int = 16,
    ) -> None:
        self.ahead = DraftAhead(rows, VOCABULARY, gain=gain) if rows else None
        lm = over_slots(pair[1], slots=8 + rows, max_length=160)
        self.engine = engines.draft(lm, support, ahead=self.ahead, stop_below=stop_below)
        self.draft = Client(self.engine)
        self.target = UnhurriedTarget(engines.target(over_slots(pair[0], max_length=160)))
        self.target.ahead = self.ahead

    async def run(self, name: str, sampling: sampling_pb2.Sampling, *, look_ahead: bool = False) -> Any:
        prompt = random_ids(len(name), 12)
        result = await speculative(self.target, self.draft, name, prompt, ROUNDS, sampling, look_ahead=look_ahead)
        for client in (self.draft, self.target):
            client.engine.release(client.stream, [name])
        return result


SETTINGS = {
    "greedy": GREEDY,
    "warm": sampled(1, 0.7),
    "sampled": sampled(2, 1.0),
    "coupled": sampled(3, 1.0, coupled=True),
}


@pytest.mark.parametrize(("look_ahead", "stop_below"), [(False, 0.0), (True, 0.0), (False, 0.3)])
async def test_text_and_blocks_are_those_of_a_draft_that_never_works_ahead(
    engines: Engines, pair: tuple[Any, Any], look_ahead: bool, stop_below: float
) -> None:
    """Token for token under REJECTION too, so that its law can't be another. The engines check that each slot holds what
    its session believes, after every answer."""
    eager, lazy = Pair(engines, pair, ROWS, stop_below), Pair(engines, pair, 0, stop_below)
    for name, sampling in SETTINGS.items():
        for seed in range(2):
            each = sampling_pb2.Sampling.FromString(sampling.SerializeToString())
            each.seed += seed
            request = f"{name}{seed}"
            assert await eager.run(request, each, look_ahead=look_ahead) == await lazy.run(
                request, each, look_ahead=look_ahead
            )
    stats = eager.engine.stats
    assert stats.invariant_violations == stats.ahead.failed_forwards == 0
    assert (stats.draft.stopped_blocks > 5) == (stop_below > 0.0)
    assert stats.draft.stopped_blocks == lazy.engine.stats.draft.stopped_blocks
    assert stats.ahead.chain_hits > 5
    assert stats.ahead.branch_hits > 5
    assert stats.ahead.misses > 5
    assert 0 < stats.ahead.used_tokens < stats.ahead.tokens
    assert all(answer.work.ahead in ("", "chain", "branch", "miss") for answer in eager.draft.answers if answer.work)


def in_another_dtype(model: Any) -> Any:
    """Its weights as float16 has them: what it computes differs by rounding alone."""
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(parameter.half().float())
    return other


@dataclass(frozen=True)
class Case:
    """A draft that sampling went wrong with elsewhere; the numbers are those of tests/e2e/test_ahead.py."""

    support: int
    temperature: float = 1.0
    other_dtype: bool = False
    """Whether it is the target itself, in another dtype."""


CASES = {
    "H01-always-greedy": Case(support=1),
    "H03-another-dtype": Case(support=VOCABULARY, other_dtype=True),
    "H05-cut-to-eight": Case(support=8, temperature=1.5),
}


@pytest.mark.parametrize("name", CASES)
async def test_odd_drafts_may_work_ahead_too(engines: Engines, pair: tuple[Any, Any], name: str) -> None:
    """Under REJECTION, whose blocks and text, seed for seed, are those of a draft that waits."""
    case, (target, draft) = CASES[name], pair
    models = (target, in_another_dtype(target) if case.other_dtype else draft)
    eager, waiting = (Pair(engines, models, rows, support=case.support) for rows in (ROWS, 0))
    accepted = 0
    for seed in range(4):
        found = await eager.run(str(seed), sampled(seed, case.temperature), look_ahead=True)
        assert found == await waiting.run(str(seed), sampled(seed, case.temperature), look_ahead=True)
        accepted += sum(found[1])
    stats = eager.engine.stats
    assert stats.invariant_violations == stats.ahead.failed_forwards == 0
    assert stats.ahead.chain_hits + stats.ahead.branch_hits > 0
    assert stats.ahead.misses > 0
    sizes = {drafted.q.size for answer in eager.draft.answers for drafted in answer.result or ()}
    assert max(sizes) == case.support
    if case.other_dtype:
        assert accepted > 0.95 * 4 * sum(ROUNDS)


async def test_draws_of_another_position_are_seen(
    engines: Engines, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted, and no invariant is broken: what is drafted ahead is drawn with the randomness of the position before."""
    draws_with = DraftAhead.draws_with

    def misplaced(self: DraftAhead, draw: Any, stop: Any) -> None:
        def earlier(logits: torch.Tensor, rows: Sequence[Any], confident: Sequence[int]) -> Any:
            return draw(logits, [(params, before[:-1]) for params, before in rows], confident)

        draws_with(self, earlier, stop)

    monkeypatch.setattr(DraftAhead, "draws_with", misplaced)
    eager, waiting = (Pair(engines, pair, rows) for rows in (ROWS, 0))
    same = [
        await eager.run(str(seed), sampled(seed)) == await waiting.run(str(seed), sampled(seed)) for seed in range(3)
    ]
    assert not all(same)
    assert eager.engine.stats.ahead.chain_hits + eager.engine.stats.ahead.branch_hits > 0
    assert eager.engine.stats.invariant_violations == 0


async def test_many_at_once_are_as_each_alone(engines: Engines, pair: tuple[Any, Any]) -> None:
    """Rows change hands between requests, and the draft is busy most of the time."""
    eager, lazy = Pair(engines, pair, ROWS), Pair(engines, pair, 0)
    eager.target.ahead = None
    names = [f"{name}{index}" for name in SETTINGS for index in range(2)]
    alone = [await lazy.run(name, SETTINGS[name[:-1]]) for name in names]
    for _ in range(3):
        assert await asyncio.gather(*(eager.run(name, SETTINGS[name[:-1]]) for name in names)) == alone
    assert eager.engine.stats.invariant_violations == 0


async def test_a_draft_that_is_the_target_has_every_block_ready(engines: Engines) -> None:
    """Any acceptance below 1 would be a cache fault; each block but the first was drafted ahead, all of it."""
    model = random_model()
    same = Pair(engines, (model, model), ROWS)
    prompt = random_ids(1, 9)
    _, accepted = await speculative(same.target, same.draft, "a", prompt, [4] * 20, GREEDY)
    assert accepted == [4] * 20
    assert same.engine.stats.ahead.chain_hits == 19
    works = [answer.work for answer in same.draft.answers if answer.work is not None]
    assert [work.steps for work in works[1:]] == [0] * 19


async def test_a_guess_that_did_not_come_true_is_caught_if_used(
    engines: Engines, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a guess of the right length is taken for the prefix."""
    monkeypatch.setattr(ahead_module, "_came_true", lambda row, job: row.base == job.session.prefix_length)
    eager = Pair(engines, pair, ROWS)
    with pytest.raises(AssertionError):
        await eager.run("greedy", GREEDY)
    assert eager.engine.stats.invariant_violations > 0


async def test_tokens_of_another_guess_are_caught(
    engines: Engines, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the right keys and values, with the tokens that another guess drafted."""
    claim = DraftAhead.claim

    mixed = []

    def mixed_up(self: DraftAhead, job: Any) -> Any:
        others = [row.drafted for row in self._rows if row.active and row.owner is job.session]
        drafted = claim(self, job)
        wrong = (
            [other for other in others if len(other) >= len(drafted) and other[0] is not drafted[0]] if drafted else []
        )
        mixed.extend(wrong[:1])
        return wrong[0][: len(drafted)] if wrong else drafted

    monkeypatch.setattr(DraftAhead, "claim", mixed_up)
    eager = Pair(engines, pair, ROWS)
    with pytest.raises(AssertionError):
        for index in range(8):
            await eager.run(f"sampled{index}", SETTINGS["sampled"])
    assert mixed
    assert eager.engine.stats.invariant_violations > 0


async def test_whoever_asks_waits_for_one_step_at_most(engines: Engines) -> None:
    model = random_model()
    lm = over_slots(model, slots=8 + ROWS, max_length=160)
    ahead = DraftAhead(ROWS, VOCABULARY)
    steps: list[str] = []
    forward, begun, asked = lm.forward, threading.Event(), threading.Event()

    def recorded(feeds: Sequence[Feed]) -> torch.Tensor:
        steps.append("ahead" if feeds[0].slot >= 8 else "item")
        if steps[-1] == "ahead":
            begun.set()
            asked.wait(60)
        return forward(feeds)

    lm.forward = recorded  # type: ignore[method-assign]
    client = Client(engines.draft(lm, ahead=ahead))
    await client.ask(propose_item("a", 0, random_ids(1, 9), 0, 8, sampling=GREEDY))
    assert await asyncio.to_thread(begun.wait, 60)
    assert ahead.wanted, "there is a lot to draft ahead"
    before = len(steps)  # the step under way is among them
    other = asyncio.create_task(client.ask(propose_item("b", 0, random_ids(2, 9), 0, 6, sampling=GREEDY)))
    await asyncio.sleep(0)
    asked.set()
    await other
    assert steps[before:][:6] == ["item"] * 6, "not between its own steps either"


async def test_an_answer_leaves_before_more_is_guessed(engines: Engines) -> None:
    """Both threads take turns at the interpreter, and guessing would hold up what it is to hide behind."""
    ahead = DraftAhead(ROWS, VOCABULARY)
    engine = engines.draft(over_slots(random_model(), slots=8 + ROWS, max_length=160), ahead=ahead)
    client = Client(engine)
    deliver = client.stream.deliver
    seen = []

    def slowly(answers: Sequence[Answer]) -> None:
        for _ in range(3):  # after each of these the step thread looks for work
            done = threading.Event()
            engine._thread.post(done.set)
            assert done.wait(60)
        seen.append((ahead.wanted, ahead.stats.forwards))
        deliver(answers)

    client.stream.deliver = slowly
    await client.ask(propose_item("a", 0, random_ids(1, 9), 0, 8, sampling=GREEDY))
    assert seen == [(True, 0)]
    await nothing_left(ahead)
    assert ahead.stats.forwards > 0


async def test_most_outcomes_are_foreseen_where_the_noise_is_known(engines: Engines, pair: tuple[Any, Any]) -> None:
    """Under COUPLED, whatever the target draws: half of the tokens fall, and three in four blocks are ready all the same."""
    eager = Pair(engines, pair, 16)
    for seed in range(6):
        await eager.run(str(seed), sampled(seed, coupled=True))
    stats = eager.engine.stats.ahead
    assert stats.branch_hits > 3 * stats.misses


async def test_slots_are_kept_apart_and_rows_end_with_the_request(engines: Engines) -> None:
    lm = over_slots(random_model(), slots=2 + ROWS, max_length=60)
    ahead = DraftAhead(ROWS, VOCABULARY)
    engine = engines.draft(lm, ahead=ahead)
    client = Client(engine)
    for name in ("a", "b"):
        assert reason(await client.ask(propose_item(name, 0, random_ids(1, 9), 0, 3, sampling=GREEDY))) == ""
    full = await client.ask(propose_item("c", 0, random_ids(1, 9), 0, 3, sampling=GREEDY))
    assert reason(full) == "RESOURCE_EXHAUSTED"
    await nothing_left(ahead)
    assert {id(row.owner) for row in ahead._rows if row.active} == {
        id(each) for each in client.stream.sessions.values()
    }
    engine.release(client.stream, ["a"])
    engine.close(client.stream)
    await settled(engine)
    assert not any(row.active or row.owner for row in ahead._rows)
    assert engine.stats.slots_used == 0


async def test_the_end_of_the_context_is_respected(engines: Engines) -> None:
    lm = over_slots(random_model(), slots=2 + ROWS, max_length=40)
    ahead = DraftAhead(ROWS, VOCABULARY)
    client = Client(engines.draft(lm, ahead=ahead))
    for length in range(30, 39):
        tokens = random_ids(length, length)
        await client.ask(propose_item(str(length), 0, tokens, 0, 40 - length, sampling=GREEDY))
        await nothing_left(ahead)
        client.engine.release(client.stream, [str(length)])
    assert ahead.stats.failed_forwards == 0
    assert ahead.stats.forwards > 0


async def test_a_forward_that_fails_ahead_harms_nobody(engines: Engines, pair: tuple[Any, Any]) -> None:
    lazy = await Pair(engines, pair, 0).run("greedy", GREEDY)
    eager = Pair(engines, pair, ROWS)
    lm = eager.engine._lm
    healthy = lm.forward

    def forward(feeds: Sequence[Feed]) -> torch.Tensor:
        if feeds[0].slot >= 8:
            raise RuntimeError("out of memory")
        return healthy(feeds)

    lm.forward = forward  # type: ignore[method-assign]
    assert await eager.run("greedy", GREEDY) == lazy
    stats = eager.engine.stats
    assert (stats.ahead.failed_forwards, stats.failed_forwards, engines.deaths) == (3, 0, 0)


async def test_planning_brings_all_positions_over_at_once(
    engines: Engines, pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every transfer waits for the device: one for all guesses, whatever the number of requests and positions."""
    eager = Pair(engines, pair, ROWS)
    transfers: list[torch.Tensor] = []
    cpu, plan = torch.Tensor.cpu, DraftAhead._plan_all

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        transfers.append(tensor)
        return cpu(tensor)

    seen: list[tuple[int, int]] = []

    def planned(self: DraftAhead) -> None:
        positions, before = sum(len(job.drafted) for job in self._answered.values()), len(transfers)
        with _NoScalars():
            plan(self)
        seen.append((positions, len(transfers) - before))

    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    monkeypatch.setattr(DraftAhead, "_plan_all", planned)
    items = [
        propose_item(name, 0, random_ids(number, 9), 0, 4, sampling=SETTINGS[name])
        for number, name in enumerate(SETTINGS)
    ]
    await eager.draft.ask_all(items)
    assert eager.ahead is not None
    await nothing_left(eager.ahead)
    assert sum(positions for positions, _ in seen) == 16
    assert all(count == (positions > 0) for positions, count in seen)
    assert eager.ahead.stats.failed_forwards == 0


class _NoScalars(TorchDispatchMode):
    """Reading one number of a tensor, as `float` and `item` do, is a transfer too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


async def test_silent_requests_leave_their_guesses_to_others(engines: Engines) -> None:
    """More requests than rows, each with one guess; then nothing is heard of them."""
    now = 0.0
    ahead = DraftAhead(2, VOCABULARY, clock=lambda: now)
    client = Client(engines.draft(over_slots(random_model(), slots=8 + 2, max_length=60), ahead=ahead))

    async def ask(name: str) -> set[str]:
        """Whose guesses there are once it is answered."""
        await client.ask(propose_item(name, 0, random_ids(1, 9), 0, 3, sampling=GREEDY))
        await nothing_left(ahead)
        return {row.owner.request_id for row in ahead._rows if row.active and row.owner is not None}

    assert await ask("a") == {"a"}
    now = 1.0
    assert await ask("b") == {"a", "b"}
    assert await ask("c") == {"a", "b"}  # their answers may still come
    now = 2.5
    assert "d" in await ask("d")
    now = 9.0
    assert await ask("e") == {"e"}
    assert ahead.stats.failed_forwards == 0


async def test_a_changed_item_is_not_answered_from_a_guess(engines: Engines, pair: tuple[Any, Any]) -> None:
    """Other sampling, a rebuilt cache, a longer or a shorter block."""
    eager, lazy = Pair(engines, pair, ROWS), Pair(engines, pair, 0)
    chooser = random.Random(3)
    tokens = random_ids(7, 10)
    held = [0, 0]
    for epoch in range(40):
        gamma = chooser.choice((1, 2, 4, 7))
        sampling = sampled(chooser.randrange(3), chooser.choice((0.5, 1.0))) if epoch % 5 == 0 else None
        rebuilt = chooser.random() < 0.2
        blocks = []
        for side, each in enumerate((eager, lazy)):
            base = 0 if rebuilt else held[side]
            answer = await each.draft.ask(propose_item("a", epoch, tokens, base, gamma, sampling=sampling))
            assert reason(answer) == ""
            held[side] = answer.cached_length
            blocks.append([(one.token_id, one.support_ids.tolist()) for one in answer.result])
        assert blocks[0] == blocks[1]
        assert eager.ahead is not None
        await nothing_left(eager.ahead)
        kept = chooser.randrange(gamma + 1)
        follow = [one[0] for one in blocks[0][:kept]] + [chooser.randrange(3, VOCABULARY)]
        held = [min(length, tokens.size + kept) for length in held]
        tokens = np.concatenate([tokens, np.array(follow, dtype=np.uint32)])
        if tokens.size > 140:
            break


async def test_it_leaves_off_where_rounds_are_longer_with_it(engines: Engines, pair: tuple[Any, Any]) -> None:
    """On a clock by which they are; with the same text as ever, on the way there and afterwards."""
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += 1.3 if gain.working else 1.0
        return seconds

    gain = AheadGain(clock)
    eager, waiting = Pair(engines, pair, ROWS, gain=gain), Pair(engines, pair, 0)
    expected = {name: await waiting.run(name, GREEDY) for name in ("x", "xx")}
    for name in ("x", "xx") * 4:
        assert await eager.run(name, GREEDY) == expected[name]
    stats = eager.engine.stats.ahead
    assert (stats.paused, stats.pauses) == (True, 1)
    assert stats.round_ratio == pytest.approx(1.3, abs=0.05)
    before = stats.tokens
    assert before > 0
    await eager.run("y", GREEDY)
    assert stats.tokens == before
    assert eager.engine.stats.invariant_violations == 0
