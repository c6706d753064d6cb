"""Bias, penalties and masks, against the processors of transformers; presence and frequency against vLLM's definition."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from tandem.logit_adjustments import Adjustments, adjust
from tandem.sampling import SamplingParams, draft_tokens, target_rows
from tandem.sampling_limits import MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_BIASES, leaves_a_token
from tandem.v1 import sampling_pb2

SIZE = 40
PROMPT_LENGTH = 9


def message(**fields: Any) -> sampling_pb2.Sampling:
    biases: dict[int, float] = fields.pop("logit_bias", {})
    words: list[list[int]] = fields.pop("bad_words", [])
    neutral: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "acceptance_method": 1, "prompt_length": PROMPT_LENGTH}
    return sampling_pb2.Sampling(
        **(neutral | fields),
        bias_token_ids=biases.keys(),
        biases=biases.values(),
        bad_words=[sampling_pb2.TokenSequence(ids=word) for word in words],
    )


SETTINGS: dict[str, sampling_pb2.Sampling] = {
    "nothing": message(),
    "repetition": message(repetition_penalty=1.3),
    "repetition below one": message(repetition_penalty=0.75),
    "presence": message(presence_penalty=1.5),
    "negative presence": message(presence_penalty=-2.0),
    "frequency": message(frequency_penalty=0.7),
    "all penalties": message(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=-0.3),
    "bias": message(logit_bias={3: 5.0, 7: -100.0, 39: 0.25}),
    "bias and repetition": message(logit_bias={3: -9.0, 7: 9.0}, repetition_penalty=2.0),
    "banned": message(banned_token_ids=[0, 5, 5, 39]),
    "allowed": message(allowed_token_ids=[1, 2, 3, 30]),
    "bad words": message(bad_words=[[4], [1, 2], [2, 3], [1, 1, 1], [3, 2, 1, 0]]),
    "min length": message(min_length=14, end_token_ids=[6, 8]),
    "everything": message(
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={1: 2.0, 2: -3.0},
        banned_token_ids=[0],
        allowed_token_ids=[*range(20)],
        bad_words=[[1, 2], [7]],
        min_length=13,
        end_token_ids=[6],
    ),
}


def oracle(scores: Tensor, sampling: sampling_pb2.Sampling, tokens: NDArray[np.uint32]) -> Tensor:
    """Scores [V] of the row after `tokens`, processed by transformers, one row at a time."""
    scores = scores[None]
    context = torch.from_numpy(tokens.astype(np.int64))[None]

    def apply(*processors: Any) -> None:
        nonlocal scores
        scores = LogitsProcessorList(processors)(context, scores)

    if sampling.bias_token_ids:
        pairs = zip(sampling.bias_token_ids, sampling.biases, strict=True)
        apply(SequenceBiasLogitsProcessor([[[token_id], bias] for token_id, bias in pairs]))
    if sampling.repetition_penalty:
        apply(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    for token_id, count in Counter(tokens[sampling.prompt_length :].tolist()).items():
        scores[0, token_id] -= sampling.frequency_penalty * count
        scores[0, token_id] -= sampling.presence_penalty
    if sampling.bad_words:
        apply(NoBadWordsLogitsProcessor([list(word.ids) for word in sampling.bad_words]))
    if sampling.banned_token_ids:
        apply(SuppressTokensLogitsProcessor(list(sampling.banned_token_ids)))
    if sampling.allowed_token_ids:
        apply(PrefixConstrainedLogitsProcessor(lambda *_: list(sampling.allowed_token_ids), 1))
    if sampling.min_length:
        apply(MinLengthLogitsProcessor(sampling.min_length, list(sampling.end_token_ids)))
    return scores[0]


def law(scores: Tensor) -> NDArray[np.float64]:
    return scores.double().softmax(-1).numpy()


def blocks(seed: int, gamma: int) -> list[NDArray[np.uint32]]:
    """For each setting a prompt, some output and a block of gamma tokens; few ids, so that they repeat."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(PROMPT_LENGTH, PROMPT_LENGTH + 9, len(SETTINGS)) + gamma
    return [rng.integers(0, 6 if index % 2 else SIZE, length).astype(np.uint32) for index, length in enumerate(lengths)]


@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_of_a_block_is_adjusted_by_what_precedes_it(seed: int, gamma: int) -> None:
    """All settings in one batch, as p of the target and as q of the draft, against transformers row by row."""
    everything = np.arange(SIZE, dtype=np.uint32)
    sequences = blocks(seed, gamma)
    params = [SamplingParams.from_proto(each) for each in SETTINGS.values()]
    rows = [(index, sequences[index].size - gamma + row) for index in range(len(params)) for row in range(gamma + 1)]
    logits = torch.randn(len(rows), SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    of_row = [params[index] for index, _ in rows]
    positions = [position for _, position in rows]
    contexts = [sequences[index] if params[index].reads_context else None for index, _ in rows]
    target = target_rows(logits, of_row, positions, [everything] * len(rows), SIZE, contexts)
    draft = draft_tokens(logits, of_row, positions, SIZE, SIZE, contexts)
    assert torch.equal(logits, before)
    for (index, position), scores, p, q in zip(rows, logits, target, draft, strict=True):
        name = list(SETTINGS)[index]
        expected = law(oracle(scores, SETTINGS[name], sequences[index][:position]))
        assert p.p == pytest.approx(expected, abs=1e-6), name
        reported = np.zeros(SIZE)
        reported[q.support_ids] = q.q
        assert reported == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", [1, 2])
def test_a_row_does_not_depend_on_its_neighbours(name: str, temperature: float, method: int) -> None:
    sampling = sampling_pb2.Sampling()
    sampling.CopyFrom(SETTINGS[name])
    sampling.temperature, sampling.acceptance_method = temperature, method
    mixed = [SamplingParams.from_proto(each) for each in [*SETTINGS.values(), sampling]]
    sequences = [*blocks(1, 0), np.array([1, 2, 3, 1, 1, 3, 2, 1, 4, 1, 2], dtype=np.uint32)]
    logits = torch.randn(len(mixed), SIZE, generator=torch.Generator().manual_seed(5)) * 3
    supports = [np.array([2, 7], dtype=np.uint32)] * len(mixed)
    positions = [each.size for each in sequences]
    [*_, together] = target_rows(logits, mixed, positions, supports, SIZE, sequences)
    [alone] = target_rows(logits[-1:], mixed[-1:], positions[-1:], supports[-1:], SIZE, sequences[-1:])
    assert together.p == pytest.approx(alone.p, abs=1e-7)
    assert together.outside_token_id == alone.outside_token_id


def test_what_was_dropped_after_a_rejection_leaves_no_trace() -> None:
    """The next round's rows see the tokens that stand, not those that stood there in the last round."""
    params = SamplingParams.from_proto(message(presence_penalty=2.0, repetition_penalty=3.0))
    logits = torch.zeros(1, SIZE)
    buffer = np.arange(20, dtype=np.uint32)
    everything = np.arange(SIZE, dtype=np.uint32)

    def row(position: int) -> NDArray[np.float32]:
        return target_rows(logits, [params], [position], [everything], SIZE, [buffer])[0].p

    fresh = row(12)
    row(20)
    assert (row(12) == fresh).all()
    assert (fresh[9:12] < fresh[12:20].min()).all()


def test_nothing_asked_for_is_nothing_done() -> None:
    assert Adjustments.from_proto(message()) is None
    assert Adjustments.from_proto(message(repetition_penalty=1.0)) is None
    scores = torch.zeros(2, SIZE)
    assert adjust(scores, [None, None], [0, 0], None) is scores
    # What needs no context is done without one.
    bias = SamplingParams.from_proto(message(logit_bias={3: 50.0}, bad_words=[[4]]))
    assert not bias.reads_context
    [row] = target_rows(scores[:1], [bias], [7], [np.array([3, 4], dtype=np.uint32)], SIZE, [None])
    assert row.p[0] > 0.99
    assert row.p[1] == 0.0


def test_a_missing_context_is_an_error() -> None:
    params = SamplingParams.from_proto(message(frequency_penalty=1.0))
    for contexts in (None, [None], [np.zeros(4, dtype=np.uint32)]):
        with pytest.raises(ValueError, match="row 0: the tokens before it"):
            draft_tokens(torch.zeros(1, SIZE), [params], [5], SIZE, 8, contexts)


def test_ids_beyond_a_smaller_vocabulary_are_ignored() -> None:
    """A draft may lack tokens of the target: what the request says of them has no meaning there."""
    wide = message(
        logit_bias={50: 3.0, 2: 1.0},
        banned_token_ids=[60],
        allowed_token_ids=[1, 2, 70],
        bad_words=[[1, 80]],
        repetition_penalty=1.5,
    )
    narrow = message(logit_bias={2: 1.0}, allowed_token_ids=[1, 2], repetition_penalty=1.5)
    tokens = np.array([1, 99, 2, 1], dtype=np.uint32)
    one, other = (
        draft_tokens(torch.ones(1, SIZE), [SamplingParams.from_proto(each)], [4], SIZE, 8, [tokens])[0]
        for each in (wide, narrow)
    )
    assert one.support_ids.tolist() == other.support_ids.tolist() == [2, 1]
    assert one.q == pytest.approx(other.q)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("repetition_penalty", {"repetition_penalty": float("nan")}),
        ("repetition_penalty", {"repetition_penalty": float("inf")}),
        ("repetition_penalty", {"repetition_penalty": 0.009}),
        ("repetition_penalty", {"repetition_penalty": -1.0}),
        ("repetition_penalty", {"repetition_penalty": 100.1}),
        ("presence_penalty", {"presence_penalty": 2.1}),
        ("presence_penalty", {"presence_penalty": float("nan")}),
        ("frequency_penalty", {"frequency_penalty": -2.1}),
        ("biases", {"logit_bias": {1: float("nan")}}),
        ("biases", {"logit_bias": {1: float("-inf")}}),
        ("bias_token_ids", {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 1.0)}),
        ("banned_token_ids", {"banned_token_ids": range(1025)}),
        ("allowed_token_ids", {"allowed_token_ids": range(1025)}),
        ("bad_words", {"bad_words": [[1]] * (MAX_BAD_WORDS + 1)}),
        ("bad_words", {"bad_words": [[]]}),
        ("bad_words", {"bad_words": [[1] * (MAX_BAD_WORD_IDS + 1)]}),
        ("end_token_ids", {"end_token_ids": range(1025)}),
    ],
)
def test_from_proto_names_the_field_that_is_wrong(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams.from_proto(message(**fields))


def test_biases_must_match_their_ids() -> None:
    with pytest.raises(ValueError, match=r"^biases"):
        Adjustments.from_proto(sampling_pb2.Sampling(bias_token_ids=[1, 2], biases=[1.0]))
    with pytest.raises(ValueError, match=r"^bias_token_ids"):
        Adjustments.from_proto(sampling_pb2.Sampling(bias_token_ids=[2, 2], biases=[1.0, 2.0]))


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, True),
        ({"banned_token_ids": range(SIZE)}, False),
        ({"banned_token_ids": range(1, SIZE)}, True),
        ({"banned_token_ids": range(1, SIZE), "bad_words": [[3, 0]]}, False),
        ({"banned_token_ids": range(1, SIZE), "end_token_ids": [0]}, True),
        ({"banned_token_ids": range(1, SIZE), "end_token_ids": [0], "min_length": 1}, False),
        ({"allowed_token_ids": [5, 6], "banned_token_ids": [5]}, True),
        ({"allowed_token_ids": [5, 6], "banned_token_ids": [5, 6]}, False),
        ({"allowed_token_ids": [SIZE]}, False),
    ],
)
def test_a_token_must_be_left_at_every_position(fields: dict[str, Any], left: bool) -> None:
    assert leaves_a_token(message(**fields), SIZE) is left
