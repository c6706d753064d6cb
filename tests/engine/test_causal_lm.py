"""The engine computes what the model computes, whatever the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tandem.engine.causal_lm import CausalLM
from tandem.engine.faults import ModelError, PieceNotFinite
from tandem.engine.feed import Feed
from tandem.engine.joined_layers import JoinedLayers
from tests.engine.models import over_slots, plain_greedy, plain_logits, random_ids, random_model

TOLERANCE = 1e-5


def relative(logits: torch.Tensor, expected: torch.Tensor) -> float:
    assert logits.shape == expected.shape
    return float((logits - expected).abs().max() / expected.abs().max())


def test_ragged_batch_equals_each_request_alone() -> None:
    model = random_model()
    lm = over_slots(model)
    sequences = [random_ids(seed, size) for seed, size in enumerate([40, 3, 17, 1, 26])]
    # Some in one piece; others continued, from different lengths, with other numbers of tokens and rows.
    lm.forward([Feed(slot, 0, ids[:half], 1) for slot, ids in enumerate(sequences) if (half := ids.size // 2)])
    feeds = [
        Feed(slot, ids.size // 2, ids[ids.size // 2 :], min(4, ids.size - ids.size // 2))
        for slot, ids in enumerate(sequences)
    ]
    logits = lm.forward(feeds)
    expected = torch.cat([plain_logits(model, ids)[-feed.rows :] for ids, feed in zip(sequences, feeds, strict=True)])
    assert relative(logits, expected) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
        ("mistral", {"sliding_window": 6}),
    ],
)
@pytest.mark.parametrize("slots", [(0, 1, 2, 3), (6, 0, 3, 5)])
def test_padding_is_not_computed_where_it_is_much(
    model_type: str, changes: dict[str, object], slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long block beside short ones: the same logits, and what is stored serves the next forward."""
    model = random_model(model_type, **changes)
    lm = over_slots(model)
    lm.cache.fill_with_noise()
    tokens: list[int] = []
    hidden = JoinedLayers._hidden

    def counted(self: JoinedLayers, token_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        tokens.append(token_ids.numel())
        return hidden(self, token_ids, *rest)

    monkeypatch.setattr(JoinedLayers, "_hidden", counted)
    sequences = [random_ids(slot, 20 + slot) for slot in slots]
    lm.forward([Feed(slot, 0, ids[:10], 1) for slot, ids in zip(slots, sequences, strict=True)])
    held = [10] * len(slots)
    for sizes, rows in (((1, 1, 7, 1), (1, 1, 7, 1)), ((6, 1, 1, 2), (4, 1, 1, 2)), ((3, 3, 2, 3), (1, 2, 1, 3))):
        feeds = [
            Feed(slot, start, ids[start : start + size], wanted)
            for slot, start, ids, size, wanted in zip(slots, held, sequences, sizes, rows, strict=True)
        ]
        held = [start + size for start, size in zip(held, sizes, strict=True)]
        pairs = zip(sequences, held, rows, strict=True)
        expected = torch.cat([plain_logits(model, ids[:end])[-wanted:] for ids, end, wanted in pairs])
        assert relative(lm.forward(feeds), expected) < TOLERANCE
    assert tokens == [40, 10, 10, 12], "the last ones, padding included, since it is little"


@pytest.mark.parametrize(
    ("model_type", "changes", "spared"),
    [
        ("llama", {}, True),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, True),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}, False),
        ("mistral", {"sliding_window": 6}, False),
    ],
)
def test_no_mask_is_made_where_all_is_seen(
    model_type: str, changes: dict[str, object], spared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By single tokens of sessions of one length, if no layer has a window."""
    model = random_model(model_type, **changes)
    lm = over_slots(model)
    lm.cache.fill_with_noise()
    first, second = random_ids(1, 12), random_ids(2, 12)
    lm.forward([Feed(0, 0, first[:9], 1), Feed(1, 0, second[:8], 1)])
    masks: list[torch.Tensor] = []
    mask = CausalLM._mask
    monkeypatch.setattr(CausalLM, "_mask", lambda self, *given: masks.append(given[0]) or mask(self, *given))
    alone = lm.forward([Feed(1, 8, second[8:9], 1)])
    assert relative(alone, plain_logits(model, second[:9])[-1:]) < TOLERANCE
    beside = lm.forward([Feed(0, 9, first[9:10], 1), Feed(1, 9, second[9:10], 1)])
    expected = torch.cat([plain_logits(model, ids[:10])[-1:] for ids in (first, second)])
    assert relative(beside, expected) < TOLERANCE
    assert len(masks) == (0 if spared else 2)
    lm.forward([Feed(0, 10, first[10:11], 1)])
    unequal = lm.forward([Feed(0, 11, first[11:], 1), Feed(1, 10, second[10:11], 1)])
    expected = torch.cat([plain_logits(model, ids)[-1:] for ids in (first, second[:11])])
    assert relative(unequal, expected) < TOLERANCE
    assert len(masks) == (1 if spared else 4)


def test_pieces_of_a_prefill_beside_a_block_are_looked_at_for_what_is_no_number() -> None:
    """They want no logits, and are run with their padding."""
    model = random_model()
    lm = over_slots(model)
    ids = random_ids(1, 12)
    lm.forward([Feed(0, 0, ids[:1], 1), Feed(1, 0, ids, 0)])
    with torch.no_grad():
        model.model.embed_tokens.weight[int(ids[-1])] = torch.nan
    with pytest.raises(PieceNotFinite):
        lm.forward([Feed(0, 1, ids[1:2], 1), Feed(1, 0, ids, 0)])


@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 3, 4), (0, 3, 7), (5, 1, 6), (2, 1, 0)])
def test_any_slots_in_any_order(slots: tuple[int, ...]) -> None:
    model = random_model()
    lm = over_slots(model)
    sequences = {slot: random_ids(slot, 5 + slot) for slot in range(8)}
    for slot, ids in sequences.items():
        lm.forward([Feed(slot, 0, ids[:-3], 0)])
    logits = lm.forward([Feed(slot, sequences[slot].size - 3, sequences[slot][-3:], 2) for slot in slots])
    expected = torch.cat([plain_logits(model, sequences[slot])[-2:] for slot in slots])
    assert relative(logits, expected) < TOLERANCE


@pytest.mark.parametrize("join", [True, False])
def test_a_forward_that_failed_leaves_nothing_to_the_next(join: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots were adjacent, so that all layers were shown theirs at once; those of the next are not."""
    model = random_model()
    lm = over_slots(model, join=join)
    mine, other = random_ids(1, 9), random_ids(2, 7)
    with monkeypatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lm.forward([Feed(3, 0, other, 1)])
    logits = lm.forward([Feed(5, 0, mine, 2), Feed(0, 0, other, 2)])
    expected = torch.cat([plain_logits(model, ids)[-2:] for ids in (mine, other)])
    assert relative(logits, expected) < TOLERANCE


def test_neighbours_and_padding_leave_no_trace() -> None:
    lm = over_slots(random_model())
    mine = random_ids(1, 20)
    lm.forward([Feed(3, 0, mine[:12], 0)])
    for slot in (2, 4):  # beside it, longer ones come and go
        lm.forward([Feed(slot, 0, random_ids(slot, 60), 0)])
    lm.forward([Feed(3, 12, mine[12:14], 1), Feed(4, 30, random_ids(9, 25), 3)])
    among_others = lm.forward([Feed(2, 8, random_ids(8, 40), 1), Feed(3, 14, mine[14:], 6)])[1:]
    alone = over_slots(random_model())
    assert relative(among_others, alone.forward([Feed(0, 0, mine, 6)])) < TOLERANCE


def test_rollback_then_continue_equals_a_cold_run() -> None:
    model = random_model()
    lm = over_slots(model)
    kept, rejected, instead = random_ids(1, 15), random_ids(2, 9), random_ids(3, 9)
    lm.forward([Feed(0, 0, np.concatenate([kept, rejected]), 1)])
    logits = lm.forward([Feed(0, kept.size, instead, instead.size)])
    expected = plain_logits(model, np.concatenate([kept, instead]))[kept.size :]
    assert relative(logits, expected) < TOLERANCE


def test_chunked_prefill_equals_whole_prefill() -> None:
    model = random_model()
    lm = over_slots(model)
    ids = random_ids(1, 60)
    for start in range(0, 56, 7):
        lm.forward([Feed(0, start, ids[start : start + 7], 0), Feed(1, start, ids[start : start + 7], 1)])
    logits = lm.forward([Feed(0, 56, ids[56:], 4)])
    assert relative(logits, plain_logits(model, ids)[-4:]) < TOLERANCE


def test_the_last_column_is_usable_and_the_trash_column_is_not_read() -> None:
    model = random_model()
    lm = over_slots(model, slots=2, max_length=16)
    ids = random_ids(1, 16)
    logits = lm.forward([Feed(0, 0, ids, 2), Feed(1, 0, ids[:1], 1)])
    again = lm.forward([Feed(0, 15, ids[15:], 1), Feed(1, 0, ids[:9], 1)])
    assert relative(logits[:2], plain_logits(model, ids)[-2:]) < TOLERANCE
    assert relative(again[:1], plain_logits(model, ids)[-1:]) < TOLERANCE


def greedy(lm: CausalLM, prompt: np.ndarray, count: int) -> list[int]:
    generated: list[int] = []
    start, feed = 0, prompt
    for _ in range(count):
        token = int(lm.forward([Feed(0, start, feed, 1)])[0].argmax())
        start, feed = start + feed.size, np.array([token], dtype=np.uint32)
        generated.append(token)
    return generated


@pytest.mark.parametrize(("join", "tied"), [(True, False), (True, True), (False, False)])
def test_greedy_equals_generate(join: bool, tied: bool) -> None:
    """A head that is tied to the embedding is packed."""
    model = random_model(tie_word_embeddings=tied)
    for seed in range(5):
        prompt = random_ids(seed, 10 + seed)
        assert greedy(over_slots(model, join=join), prompt, 40) == plain_greedy(model, prompt, 40)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 6}),  # all layers slide; the mask is one tensor
        ("gemma3_text", {"sliding_window": 6, "num_hidden_layers": 6}),  # a dict of masks, two rotary bases
        ("gemma2", {"sliding_window": 6}),  # a cap on attention logits: eager, with an additive mask
        ("cohere2", {"sliding_window": 6, "num_hidden_layers": 4}),  # scaled logits, layers without rotation
        ("qwen2", {}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),  # joined, a dict of masks
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}),  # learned positions
        ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),  # positions with an offset
        ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    ],
)
def test_model_families_past_their_windows(model_type: str, changes: dict[str, object]) -> None:
    model = random_model(model_type, **changes)
    lm = over_slots(model)
    ids = random_ids(1, 40)
    expected = plain_logits(model, ids)
    logits = [lm.forward([Feed(1, 0, ids[:13], 13), Feed(2, 0, ids[:30], 1)])[:13]]
    lm.forward([Feed(1, 13, random_ids(5, 12), 2)])  # a block that is rejected
    logits.append(lm.forward([Feed(1, 13, ids[13:20], 7), Feed(2, 30, ids[30:31], 1)])[:7])
    logits.append(lm.forward([Feed(0, 0, ids[:2], 1), Feed(1, 20, ids[20:], 20)])[1:])
    assert relative(torch.cat(logits), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mamba", {"state_size": 4}),
        ("recurrent_gemma", {}),
        ("llama4_text", {"num_local_experts": 2}),
        ("bloom", {"n_head": 4, "n_layer": 2}),  # takes no mask per query
    ],
)
def test_models_that_cannot_roll_back_are_refused(model_type: str, changes: dict[str, object]) -> None:
    model = random_model(model_type, **changes)
    with pytest.raises(ModelError, match=f"model type '{model_type}"):
        over_slots(model)
