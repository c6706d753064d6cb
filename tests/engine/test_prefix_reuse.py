"""A prompt that begins like an earlier one is not run again from its start, and nothing else is different for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine import slot_pool
from tandem.engine.engine import Engine
from tandem.engine.feed import Feed
from tandem.engine.slot_pool import LEAST_SHARED_TOKENS
from tandem.wire import IdArray
from tests.engine.harness import (
    GREEDY,
    Client,
    Engines,
    propose_item,
    reason,
    sampled,
    settled,
    speculative,
    verify_item,
)
from tests.engine.models import VOCABULARY, over_slots, plain_greedy, random_ids, random_model

SYSTEM = random_ids(1, 60)
GAMMAS = [0, 1, 2, 5, 8]
WINDOWED: dict[str, Any] = {"model_type": "mistral", "sliding_window": 24}


def question(number: int) -> IdArray:
    return np.concatenate([SYSTEM, random_ids(100 + number, 9)])


class Pair:
    """A target and a draft engine, and one stream to each."""

    def __init__(self, engines: Engines, model: Any, other: Any, *, reuse: bool, **limits: int) -> None:
        self.target = engines.target(over_slots(model, slots=3, max_length=200), reuse=reuse, **limits)
        self.draft = engines.draft(
            over_slots(other, slots=3, max_length=200), support_size=VOCABULARY, reuse=reuse, **limits
        )
        self._target, self._draft = Client(self.target), Client(self.draft)

    async def run(self, name: str, prompt: IdArray, gamma: int, sampling: Any = GREEDY) -> tuple[list[int], list[int]]:
        """12 tokens or a few more if the draft is the target, and what each round accepted."""
        rounds = [gamma] * (12 // (gamma + 1) + 1)
        result = await speculative(self._target, self._draft, name, prompt, rounds, sampling)
        self.target.release(self._target.stream, [name])
        self.draft.release(self._draft.stream, [name])
        return result

    @property
    def shared(self) -> tuple[int, int]:
        """Tokens that target and draft took over so far."""
        return self.target.stats.shared_tokens, self.draft.stats.shared_tokens


@pytest.mark.parametrize(("shape", "gammas"), [({}, GAMMAS), (WINDOWED, [0, 5])], ids=["full", "sliding"])
async def test_warm_equals_cold_at_every_gamma(engines: Engines, shape: dict[str, Any], gammas: list[int]) -> None:
    """The same system prompt, the same prompt again, and the next turn of a chat; from finished slots, by copy and in
    place."""
    model, other = random_model(**shape), random_model(seed=9, **shape)
    cold, warm = Pair(engines, model, other, reuse=False), Pair(engines, model, other, reuse=True)
    for gamma in gammas:
        for sampling in (GREEDY, sampled(5, coupled=True)):
            expected, _ = await cold.run("a", question(0), gamma, sampling)
            next_turn = np.concatenate([question(0), np.array(expected, np.uint32), random_ids(7, 5)])
            await warm.run("fill", question(gamma + 1), gamma, sampling)
            for name, prompt in (("a", question(0)), ("again", question(0)), ("next", next_turn)):
                before = warm.shared
                assert await warm.run(name, prompt, gamma, sampling) == await cold.run(name, prompt, gamma, sampling)
                gained = [now - then for now, then in zip(warm.shared, before, strict=True)]
                assert gained[0] >= SYSTEM.size
                assert gained[1] >= SYSTEM.size * (gamma > 0)
    assert cold.shared == (0, 0)
    assert warm.target.stats.shared_sessions == len(gammas) * 2 * 4 - 1  # all but the very first


@pytest.mark.parametrize("gamma", [1, 5])
async def test_a_draft_that_is_the_target_is_accepted_from_a_shared_prefix(engines: Engines, gamma: int) -> None:
    model = random_model()
    pair = Pair(engines, model, model, reuse=True)
    for number in range(4):
        _, accepted = await pair.run("a", question(number), gamma)
        assert set(accepted) == {gamma}
    assert min(pair.shared) >= 3 * SYSTEM.size


def one_too_many(one: IdArray, other: IdArray) -> int:
    """The planted fault: a prefix is reused although its last token differs."""
    return min(shared_length(one, other) + 1, one.size, other.size)


shared_length = slot_pool.shared_length


async def test_a_prefix_whose_last_token_differs_is_caught(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: by the books that are kept where invariants are checked, and, without them, by the text."""
    model = random_model()
    cold = Client(engines.target(over_slots(model, max_length=200), reuse=False, checked=False))
    rows = [await first_rows(cold, question(number)) for number in range(6)]
    monkeypatch.setattr(slot_pool, "shared_length", one_too_many)
    unchecked = Client(engines.target(over_slots(model, max_length=200), checked=False))
    faulty = [await first_rows(unchecked, question(number)) for number in range(6)]
    assert unchecked.engine.stats.shared_tokens == 5 * (SYSTEM.size + 1)
    assert faulty[0] == rows[0]
    assert sum(one != other for one, other in zip(faulty[1:], rows[1:], strict=True)) >= 3

    checked = Client(engines.target(over_slots(model, max_length=200)))
    answers = [await checked.ask(verify_item(f"r{n}", 0, question(n), 0, sampling=GREEDY)) for n in range(3)]
    assert [reason(answer) for answer in answers] == ["", "INTERNAL", "INTERNAL"]
    assert checked.engine.stats.invariant_violations == 2


async def first_rows(client: Client, prompt: IdArray) -> list[int]:
    """The greedy tokens at the last four positions of a prompt and after it."""
    name = f"r{len(client.answers)}"
    block = [int(token) for token in prompt[-4:]]
    answer = await client.ask(verify_item(name, 0, prompt[:-4], 0, block, [[]] * 4, sampling=GREEDY))
    assert reason(answer) == ""
    client.engine.release(client.stream, [name])
    return [row.outside_token_id for row in answer.result]


async def test_the_fault_free_rows_are_equal(engines: Engines) -> None:
    """What the planted fault is told from."""
    model = random_model()
    cold = Client(engines.target(over_slots(model, max_length=200), reuse=False))
    warm = Client(engines.target(over_slots(model, max_length=200)))
    for number in range(6):
        assert await first_rows(warm, question(number)) == await first_rows(cold, question(number))
    assert warm.engine.stats.shared_tokens == 5 * SYSTEM.size


async def test_a_prefill_that_is_broken_off_leaves_nothing_that_is_not_finite(engines: Engines) -> None:
    """The logits of its first pieces are nobody's, and its keys and values outlast it: as a prefix for the next request."""
    model = random_model()
    embeddings = model.get_input_embeddings().weight.data
    lm = over_slots(model, slots=3, max_length=200)
    client = Client(engines.target(lm, prefill_chunk=32))
    healthy, forward = embeddings[SYSTEM[10]].clone(), lm.forward

    def broken_off(feeds: Sequence[Feed]) -> torch.Tensor:
        """Something goes wrong for a moment, in which the caller leaves."""
        client.engine.release(client.stream, ["first"])
        embeddings[SYSTEM[10]] = torch.nan
        try:
            return forward(feeds)
        finally:
            embeddings[SYSTEM[10]] = healthy
            lm.forward = forward  # type: ignore[method-assign]

    lm.forward = broken_off  # type: ignore[method-assign]
    first = await client.ask(verify_item("first", 0, question(1), 0, sampling=GREEDY))
    for name in ("second", "third"):
        answer = await client.ask(verify_item(name, 0, question(2), 0, sampling=GREEDY))
        assert reason(answer) == ""
        assert [answer.result[0].outside_token_id] == plain_greedy(model, question(2), 1)
    assert reason(first) == "INTERNAL"


async def test_different_salts_share_nothing(engines: Engines) -> None:
    client = Client(engines.target(over_slots(random_model(), max_length=200)))

    async def shared(name: str, salt: str) -> int:
        before = client.engine.stats.shared_tokens
        answer = await client.ask(verify_item(name, 0, question(0), 0, sampling=GREEDY, salt=salt))
        assert reason(answer) == ""
        return client.engine.stats.shared_tokens - before

    assert await shared("a", "one") == 0
    assert await shared("b", "two") == 0
    assert await shared("c", "") == 0
    assert await shared("d", "two") == question(0).size - 1
    too_long = await client.ask(verify_item("e", 0, question(0), 0, sampling=GREEDY, salt="x" * 129))
    assert reason(too_long) == "INVALID_ARGUMENT"
    assert too_long.error is not None
    assert "cache_salt" in too_long.error.message


async def test_prompts_that_come_together_are_run_once_between_them(engines: Engines) -> None:
    """Three requests with one beginning of 180 tokens: each chunk of it is run by one of them."""
    model = random_model()
    beginning = random_ids(3, 180)
    prompts = [np.concatenate([beginning, random_ids(50 + n, 6)]) for n in range(3)]
    cold = Client(engines.target(over_slots(model, max_length=250), reuse=False, prefill_chunk=32))
    warm = Client(engines.target(over_slots(model, max_length=250), prefill_chunk=32))
    answers = []
    for client in (cold, warm):
        items = [verify_item(f"r{n}", 0, prompt, 0, sampling=GREEDY) for n, prompt in enumerate(prompts)]
        answers.append([answer.result[0].outside_token_id for answer in await client.ask_all(items)])
    assert answers[0] == answers[1]
    assert cold.engine.stats.tokens == 3 * 186
    assert warm.engine.stats.tokens <= 186 + 2 * (6 + LEAST_SHARED_TOKENS + 32)


async def test_sessions_of_a_lost_stream_are_rebuilt_from_what_they_left(engines: Engines) -> None:
    """An orchestrator that reconnects, or another that takes over, pays for the last tokens only."""
    engine: Engine[Any] = engines.draft(over_slots(random_model(), max_length=200))
    before, after = Client(engine), Client(engine)
    first = await before.ask(propose_item("a", 3, question(0), 0, 4, sampling=GREEDY))
    engine.close(before.stream)
    second = await after.ask(propose_item("a", 0, question(0), 0, 4, sampling=GREEDY))
    assert [each.token_id for each in second.result] == [each.token_id for each in first.result]
    assert engine.stats.shared_tokens == question(0).size - 1


async def test_kept_prefixes_never_keep_a_request_out(engines: Engines) -> None:
    """All slots hold finished prefixes, then all are wanted at once; running sessions keep their caches."""
    model = random_model()
    engine = engines.target(over_slots(model, slots=3, max_length=200))
    client = Client(engine)
    for number in range(6):
        await first_rows(client, random_ids(200 + number, 40))
    await settled(engine)
    assert engine.stats.slots_used == 0
    items = [verify_item(f"s{n}", 0, random_ids(300 + n, 40), 0, sampling=GREEDY) for n in range(3)]
    assert [reason(answer) for answer in await client.ask_all(items)] == [""] * 3
    assert reason(await client.ask(verify_item("s3", 0, random_ids(1, 40), 0, sampling=GREEDY))) == "RESOURCE_EXHAUSTED"
    rounds = [verify_item(f"s{n}", 1, random_ids(300 + n, 40), 39) for n in range(3)]
    assert [reason(answer) for answer in await asyncio.wait_for(client.ask_all(rounds), 30)] == [""] * 3
