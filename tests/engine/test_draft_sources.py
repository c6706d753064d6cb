"""A draft that has a model and n-grams: the text is the target's, and what n-grams left unread is read in time."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from draft_service.ahead import DraftAhead
from tandem.engine.engine import Engine
from tandem.engine.idle import SlotWork
from tandem.v1 import sampling_pb2
from tests.engine.harness import GREEDY, Client, Engines, propose_item, reason, sampled, settled, speculative
from tests.engine.models import VOCABULARY, over_slots, random_ids, random_model

ROUNDS = [3, 5, 2, 0, 8, 1, 4, 4, 3, 5, 5, 2]
PATTERN = random_ids(5, 9)
COPYING = np.concatenate([PATTERN, random_ids(6, 4), PATTERN, PATTERN[:5]]).astype(np.uint32)
SHORT = np.concatenate([PATTERN[:6], random_ids(6, 1), PATTERN[:4]]).astype(np.uint32)


async def everything_read(engine: Engine[Any]) -> None:
    while engine._idle is not None and engine._idle.wanted:  # noqa: ASYNC110 - the step thread knows no events
        await asyncio.sleep(0.0005)
    await settled(engine)


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("sampling", [GREEDY, sampled(3, 1.0, coupled=True)], ids=["greedy", "coupled"])
async def test_the_text_is_that_of_plain_decoding(engines: Engines, sampling: sampling_pb2.Sampling, rows: int) -> None:
    """With blocks of both sources, and the draft working ahead on the model's own; each slot holds what its session
    believes, which the engines check after every answer."""
    target = Client(engines.target(over_slots(random_model(), max_length=160)))
    ahead = DraftAhead(rows, VOCABULARY) if rows else None
    draft = Client(engines.both(over_slots(random_model(seed=1), slots=8 + rows, max_length=160), ahead=ahead))
    for name, prompt in (("copying", COPYING), ("other", random_ids(8, 12))):
        plain, _ = await speculative(target, draft, f"{name}0", prompt, [0] * 40, sampling)
        text, _ = await speculative(target, draft, f"{name}1", prompt, ROUNDS, sampling, look_ahead=bool(rows))
        assert text[:40] == plain[: len(text)]
    stats = draft.engine.stats
    assert stats.invariant_violations == stats.draft.failed_reads == 0
    assert {answer.work.source for answer in draft.answers if answer.work} == {"model", "ngram"}
    assert all(each.blocks and each.accepted <= each.tokens for each in stats.draft.sources.values())


async def test_a_block_of_ngrams_needs_no_forward_and_its_prefix_is_read_afterwards(engines: Engines) -> None:
    draft = Client(engines.both(over_slots(random_model(), max_length=160), chunk=8))
    first = await draft.ask(propose_item("a", 0, COPYING, 0, 4, sampling=GREEDY))
    assert [each.token_id for each in first.result] == [*COPYING[5:9]]
    assert (first.work.steps, first.work.source, first.cached_length) == (0, "ngram", COPYING.size + 4)
    assert first.unread_tokens == COPYING.size
    await everything_read(draft.engine)
    assert draft.engine.stats.draft.read_tokens == COPYING.size
    # All of the block stood, and what comes then was never said before: the model's turn, with a block's tokens to read.
    tokens = np.concatenate([COPYING, COPYING[5:9], [90, 91]]).astype(np.uint32)
    second = await draft.ask(propose_item("a", 1, tokens, first.cached_length, 3))
    assert (second.work.source, second.work.prefill_tokens, second.unread_tokens) == ("model", 6, 0)
    alone = Client(engines.draft(over_slots(random_model(), max_length=160)))
    expected = await alone.ask(propose_item("a", 0, tokens, 0, 3, sampling=GREEDY))
    assert [each.token_id for each in second.result] == [each.token_id for each in expected.result]
    counts = draft.engine.stats.draft.sources["ngram"]
    assert (counts.blocks, counts.tokens, counts.accepted) == (1, 4, 4)


async def test_a_model_that_could_not_read_meanwhile_reads_before_its_block(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = SlotWork.read, iter([True])

    def fails_once(self: SlotWork, feeds: Any) -> None:
        read(self, feeds)
        if next(failures, False):
            raise RuntimeError("planted")

    monkeypatch.setattr(SlotWork, "read", fails_once)
    draft = Client(engines.both(over_slots(random_model(), max_length=160)))
    first = await draft.ask(propose_item("a", 0, COPYING, 0, 2, sampling=GREEDY))
    await everything_read(draft.engine)
    assert (draft.engine.stats.draft.failed_reads, draft.engine.stats.draft.read_tokens) == (1, 0)
    tokens = np.concatenate([COPYING, [90, 91]]).astype(np.uint32)
    second = await draft.ask(propose_item("a", 1, tokens, COPYING.size, 3))
    assert reason(second) == ""
    assert (second.work.source, second.work.prefill_tokens) == ("model", tokens.size)
    assert first.work.source == "ngram"
    assert draft.engine.stats.invariant_violations == 0


async def test_a_request_that_ends_is_read_no_further(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun, go_on = SlotWork.read, threading.Event(), threading.Event()

    def waits(self: SlotWork, feeds: Any) -> None:
        read(self, feeds)
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(SlotWork, "read", waits)
    engine = engines.both(over_slots(random_model(), max_length=160), chunk=1)
    draft = Client(engine)
    await draft.ask(propose_item("a", 0, COPYING, 0, 2, sampling=GREEDY))
    assert await asyncio.to_thread(begun.wait, 60)
    engine.release(draft.stream, ["a"])
    go_on.set()
    await everything_read(engine)
    assert (engine.stats.sessions, engine.stats.draft.read_tokens) == (0, 1)
    assert reason(await draft.ask(propose_item("b", 0, COPYING, 0, 2, sampling=GREEDY))) == ""


def reads(monkeypatch: pytest.MonkeyPatch, *, together: bool = True) -> list[list[int]]:
    """The slots of each forward that reads on; `together` false: one of several fails."""
    read, slots = SlotWork.read, []

    def noted(self: SlotWork, feeds: Any) -> None:
        if len(feeds) > 1 and not together:
            raise RuntimeError("planted")
        slots.append([feed.slot for feed in feeds])
        read(self, feeds)

    monkeypatch.setattr(SlotWork, "read", noted)
    return slots


async def begin(draft: Client, **prompts: np.ndarray) -> None:
    """All in one message, so that all are answered before anything is read."""
    items = [propose_item(name, 0, prompt, 0, 2, sampling=GREEDY) for name, prompt in prompts.items()]
    answers = await draft.ask_all(items)
    assert [answer.work.source for answer in answers if answer.work] == ["ngram"] * len(prompts)
    await everything_read(draft.engine)


@pytest.mark.parametrize("together", [True, False])
async def test_requests_that_cannot_be_read_together_are_read_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    slots = reads(monkeypatch, together=together)
    draft = Client(engines.both(over_slots(random_model(), max_length=160)))
    draft.engine._scheduler.most_tokens = 2 * SHORT.size + 1
    await begin(draft, a=SHORT, b=SHORT, c=SHORT)
    stats = draft.engine.stats.draft
    assert slots == ([[0, 1], [2]] if together else [[0], [1], [2]])
    assert (stats.failed_reads, stats.read_tokens) == (0 if together else 1, 3 * SHORT.size)


async def test_a_long_prompt_and_short_ones_take_turns(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = reads(monkeypatch)
    draft = Client(engines.both(over_slots(random_model(), max_length=160), chunk=4))
    await begin(draft, long=np.concatenate([random_ids(7, 40), COPYING]).astype(np.uint32), short=SHORT)
    assert slots[:5] == [[1], [0], [1], [0], [1]]


async def test_completions_of_one_prompt_read_it_once(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = reads(monkeypatch)
    draft = Client(engines.both(over_slots(random_model(), max_length=160)))
    await begin(draft, a=COPYING, b=COPYING, c=COPYING)
    assert slots == [[0], [1], [2]] or slots == [[0], [1, 2]]
    assert draft.engine.stats.draft.read_tokens == COPYING.size + 2
    follow = await draft.ask(propose_item("c", 1, np.append(COPYING, [90, 91]).astype(np.uint32), COPYING.size, 3))
    alone = Client(engines.draft(over_slots(random_model(), max_length=160)))
    expected = await alone.ask(
        propose_item("c", 0, np.append(COPYING, [90, 91]).astype(np.uint32), 0, 3, sampling=GREEDY)
    )
    assert [each.token_id for each in follow.result] == [each.token_id for each in expected.result]
    assert draft.engine.stats.invariant_violations == 0
