"""Log-probabilities of a row, against transformers' processors and a softmax in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from orchestrator.logprobs import decode_row
from tandem.acceptance import TargetRow
from tandem.engine.stream import Answer
from tandem.sampling import SamplingParams, target_rows
from tandem.v1 import sampling_pb2, target_pb2
from tandem.wire import WireError
from target_service.servicer import pack

SIZE, PADDING = 50, 6
TOKENS = np.array([1, 2, 3, 2, 1, 9], dtype=np.uint32)
RAW, PROCESSED = sampling_pb2.LOGPROBS_MODE_RAW, sampling_pb2.LOGPROBS_MODE_PROCESSED


def params(mode: int, top: int, **fields: Any) -> SamplingParams:
    values = {"temperature": 1.0, "top_p": 1.0, "acceptance_method": 1, "repetition_penalty": 1.3}
    values |= {"banned_token_ids": [4], "logprobs": True, "top_logprobs": top, "logprobs_mode": mode}
    return SamplingParams.from_proto(sampling_pb2.Sampling(**(values | fields)))


def oracle(logits: torch.Tensor, asked: SamplingParams, mode: int) -> NDArray[np.float64]:
    scores = logits[None, :SIZE].clone()
    if mode == PROCESSED:
        steps: list[Any] = [RepetitionPenaltyLogitsProcessor(1.3), SuppressTokensLogitsProcessor([4])]
        if asked.temperature:
            steps.append(TemperatureLogitsWarper(asked.temperature))
        if asked.temperature and asked.top_k:
            steps.append(TopKLogitsWarper(asked.top_k))
        if asked.temperature and asked.top_p < 1:
            steps.append(TopPLogitsWarper(asked.top_p))
        scores = LogitsProcessorList(steps)(torch.from_numpy(TOKENS.astype(np.int64))[None], scores)
    return scores[0].double().log_softmax(-1).numpy()


SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.5, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.5},
    {"acceptance_method": 2},
    {"acceptance_method": 2, "temperature": 0.0},
]


@pytest.mark.parametrize("order", [1, -1])
def test_every_row_of_a_batch_has_those_it_asked_for(order: int) -> None:
    kinds = [(mode, top, shape) for mode in (RAW, PROCESSED) for top in (0, 1, 5, 20) for shape in SHAPES]
    kinds = kinds[::order]
    logits = torch.randn(len(kinds) + 1, SIZE + PADDING, generator=torch.Generator().manual_seed(2)) * 3
    logits[:, SIZE:] = 100.0
    asked = [params(mode, top, **shape) for mode, top, shape in kinds]
    supports = [np.arange(index % 5, dtype=np.uint32) * 3 + 1 for index in range(len(kinds) + 1)]
    of_all = [*asked, params(RAW, 0, logprobs=False)]
    rows = target_rows(logits, of_all, [6] * len(of_all), supports, SIZE, [TOKENS] * len(of_all))
    assert rows[-1].logprobs is None
    for (mode, top, _), each, row, support, scores in zip(kinds, asked, rows, supports, logits, strict=False):
        expected = oracle(scores, each, mode)
        found = row.logprobs
        assert found is not None
        assert found.support == pytest.approx(expected[support], abs=2e-6)
        if row.outside_mass > 0:
            assert found.outside == pytest.approx(expected[row.outside_token_id], abs=2e-6)
        likeliest = [int(i) for i in np.argsort(-expected)[:top] if expected[i] > -np.inf]
        assert found.top_ids.tolist() == likeliest
        assert found.top == pytest.approx(expected[likeliest], abs=2e-6)


def on_the_wire(row: TargetRow) -> target_pb2.TargetRow:
    return pack([Answer("r", 0, [row])]).items[0].verdict.rows[0]


def test_they_cross_the_wire_unchanged() -> None:
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(3))
    support = np.array([7, 4, 1], dtype=np.uint32)
    [row] = target_rows(logits, [params(PROCESSED, 3)], [6], [support], SIZE, [TOKENS])
    assert row.logprobs is not None
    received = decode_row(on_the_wire(row), 3, 3, SIZE)
    assert received.support.tolist() == row.logprobs.support.tolist()
    assert received.support[1] == -np.inf
    assert received.outside == pytest.approx(row.logprobs.outside)
    assert (received.top_ids.tolist(), received.top.tolist()) == (
        row.logprobs.top_ids.tolist(),
        row.logprobs.top.tolist(),
    )


@pytest.mark.parametrize("fault", ["size", "most", "vocabulary", "nan"])
def test_a_target_that_lies_is_found_out(fault: str) -> None:
    logits = torch.zeros(1, SIZE)
    [row] = target_rows(logits, [params(RAW, 3)], [6], [np.array([7], dtype=np.uint32)], SIZE, [TOKENS])
    message = on_the_wire(TargetRow(row.p, row.outside_mass, row.outside_token_id, row.logprobs))
    if fault == "nan":
        message.outside_logprob = float("nan")
    size, most, vocabulary = (1 + (fault == "size"), 3 - (fault == "most"), 1 if fault == "vocabulary" else SIZE)
    with pytest.raises(WireError):
        decode_row(message, size, most, vocabulary)


@pytest.mark.parametrize(("field", "value"), [("top_logprobs", 21), ("logprobs_mode", 0), ("logprobs_mode", 7)])
def test_from_proto_names_the_field_that_is_wrong(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        params(RAW, 1, **{field: value})
