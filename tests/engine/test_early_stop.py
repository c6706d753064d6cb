"""Blocks that end early: where the draft's own confidence says so, and with nothing changed in the text."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.v1 import sampling_pb2
from tests.engine.harness import GREEDY, Client, Engines, propose_item, sampled, speculative
from tests.engine.models import over_slots, plain_logits, random_ids, random_model

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
        item = propose_item(f"{number}", 0, prompt, 0, 4, look_ahead=look_ahead, sampling=sampled(number, 0.6))
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


async def test_never_is_the_default(engines: Engines) -> None:
    draft = Client(engines.draft(over_slots(random_model())))
    answer = await draft.ask(propose_item("a", 0, random_ids(1, 10), 0, 16, sampling=GREEDY))
    assert len(answer.result) == 16
    assert draft.engine.stats.draft.stopped_blocks == 0
