"""Blocks that end early: where the draft's own confidence says so, and with nothing changed in the text."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from draft_service.ahead import DraftAhead
from tandem.v1 import sampling_pb2
from tests.engine.harness import GREEDY, Client, Engines, propose_item, reason, sampled, speculative
from tests.engine.models import VOCABULARY, over_slots, plain_logits, random_ids, random_model

ROUNDS = [3, 5, 8, 1, 4, 2, 8, 8, 5, 3]


@pytest.mark.parametrize("sampling", [GREEDY, sampled(3, 1.0, coupled=True)], ids=["greedy", "coupled"])
async def test_the_text_is_that_of_plain_decoding(engines: Engines, sampling: sampling_pb2.Sampling) -> None:
    target = Client(engines.target(over_slots(random_model(), max_length=160)))
    draft = Client(engines.draft(over_slots(random_model(), max_length=160), stop_below=0.3))
    plain, _ = await speculative(target, draft, "plain", random_ids(8, 12), [0] * 60, sampling)
    text, _ = await speculative(target, draft, "early", random_ids(8, 12), ROUNDS, sampling)
    assert text[:60] == plain[: len(text)]
    assert draft.engine.stats.draft.stopped_blocks > 2
    assert draft.engine.stats.invariant_violations == 0


@pytest.mark.parametrize("look_ahead", [False, True])
async def test_a_block_ends_once_its_chance_is_below_the_threshold(engines: Engines, look_ahead: bool) -> None:
    """Recomputed from the model's own logits; the token at which the chance falls is still in the block."""
    model = random_model()
    draft = Client(engines.draft(over_slots(model, slots=12), stop_below=0.25))
    sizes = set()
    for number in range(12):
        prompt = random_ids(number, 10)
        item = propose_item(
            f"{number}", 0, prompt, 0, 4, look_ahead=look_ahead, sampling=sampled(number, 0.6, coupled=True)
        )
        block = (await draft.ask(item)).result
        tokens = [*prompt.tolist(), *(each.token_id for each in block)]
        rows = plain_logits(model, np.array(tokens, dtype=np.uint32)) / 0.6
        likeliest = rows.softmax(-1).amax(-1)[len(prompt) - 1 :].tolist()
        reach, expected = 1.0, 0
        while expected < 4 + look_ahead and (not expected or reach >= 0.25):
            reach *= likeliest[expected]
            expected += 1
        assert len(block) == expected
        sizes.add(expected)
    assert len(sizes) > 1


async def test_a_block_of_which_the_look_ahead_alone_is_missing_did_not_end_early(engines: Engines) -> None:
    draft = Client(engines.draft(over_slots(random_model()), stop_below=1.0))
    for wanted, stopped in ((1, 0), (2, 1)):
        item = propose_item(f"{wanted}", 0, random_ids(1, 10), 0, wanted, look_ahead=True, sampling=GREEDY)
        assert len((await draft.ask(item)).result) == 1
        assert draft.engine.stats.draft.stopped_blocks == stopped


@pytest.mark.parametrize("rows", [0, 4])
async def test_a_request_of_rejection_sampling_gets_whole_blocks(engines: Engines, rows: int) -> None:
    """Beside greedy requests in the same forwards, whose blocks do end, and with blocks that were drafted ahead."""
    ahead = DraftAhead(rows, VOCABULARY) if rows else None
    draft = Client(engines.draft(over_slots(random_model(), slots=8 + rows), ahead=ahead, stop_below=0.9))
    prompts = {"sampled": random_ids(1, 10), "greedy": random_ids(2, 10)}
    settings = {"sampled": sampled(5, 1.0), "greedy": GREEDY}
    cached = dict.fromkeys(prompts, 0)
    for epoch in range(3):
        items = [
            propose_item(name, epoch, prompt, cached[name], 5, sampling=None if epoch else settings[name])
            for name, prompt in prompts.items()
        ]
        answers = await asyncio.gather(*(draft.ask(item) for item in items))
        sizes = {name: len(answer.result) for name, answer in zip(prompts, answers, strict=True)}
        assert sizes["sampled"] == 5
        assert sizes["greedy"] < 5
        for (name, prompt), answer in zip(prompts.items(), answers, strict=True):
            cached[name] = min(answer.cached_length, prompt.size + len(answer.result))
            prompts[name] = np.concatenate([prompt, [each.token_id for each in answer.result]]).astype(np.uint32)
        while ahead is not None and ahead.wanted:  # noqa: ASYNC110 - the step thread knows no events
            await asyncio.sleep(0.0005)
    stats = draft.engine.stats
    assert stats.draft.stopped_blocks == 3
    assert stats.invariant_violations == 0
    assert not rows or stats.ahead.tokens > 0


async def test_never_is_the_default(engines: Engines) -> None:
    draft = Client(engines.draft(over_slots(random_model())))
    answer = await draft.ask(propose_item("a", 0, random_ids(1, 10), 0, 16, sampling=GREEDY))
    assert len(answer.result) == 16
    assert draft.engine.stats.draft.stopped_blocks == 0


async def test_an_item_says_what_a_token_has_to_be_worth_where_blocks_end_early_at_all(engines: Engines) -> None:
    """As an adaptive gamma does, which knows what one costs; nobody makes a draft end blocks that doesn't."""
    sizes = {}
    for configured in (0.0, 0.5):
        draft = Client(engines.draft(over_slots(random_model(), slots=8), stop_below=configured))
        for own in (0.0, 1e-6, 1.0):
            item = propose_item(f"{own}", 0, random_ids(3, 10), 0, 8, sampling=GREEDY)
            item.stop_below = own
            sizes[configured, own] = len((await draft.ask(item)).result)
    assert [sizes[0.0, own] for own in (0.0, 1e-6, 1.0)] == [8, 8, 8]
    assert sizes[0.5, 1.0] == 1 <= sizes[0.5, 0.0] < sizes[0.5, 1e-6] == 8


@pytest.mark.parametrize("below", [-0.1, 1.5, float("nan"), float("inf")])
async def test_a_threshold_that_is_no_chance_is_refused_by_name(engines: Engines, below: float) -> None:
    draft = Client(engines.draft(over_slots(random_model()), stop_below=0.5))
    item = propose_item("a", 0, random_ids(1, 10), 0, 4, sampling=GREEDY)
    item.stop_below = below
    answer = await draft.ask(item)
    assert reason(answer) == "INVALID_ARGUMENT"
    assert answer.error is not None
    assert answer.error.message.startswith("stop_below")
    assert draft.engine.stats.forwards == 0
