"""A form allows the same after the same tokens, whatever it was asked before; and rows are masked by it."""

from __future__ import annotations

import json
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from transformers import AutoTokenizer

from orchestrator.decoder import before_dead_end
from orchestrator.errors import DeadEnd
from tandem import sampling, structured_output
from tandem.acceptance import Outcome, TargetRow, TokenKind
from tandem.sampling import SamplingParams, draft_tokens, target_rows
from tandem.structured_output import FormError, Forms
from tandem.v1 import sampling_pb2
from tests.support.services import MODELS

SIZE = 512
END = 0
PROMPT = [7, 8, 9]
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yz"]}}, "required": ["b"]}
FORMS: list[dict[str, Any]] = [
    {"json_schema": json.dumps(OBJECT)},
    {"json_object": True},
    {"regex": "[0-9]{3}(-[a-z]+)?"},
    {"grammar": 'start: "(" start ")" | /[a-c]+/'},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODELS / "tiny-target")


@pytest.fixture(scope="module")
def forms(tokenizer: Any) -> Forms:
    return Forms(tokenizer)


def message(wanted: dict[str, Any], **fields: Any) -> sampling_pb2.Sampling:
    values: dict[str, Any] = {
        "top_p": 1.0,
        "acceptance_method": sampling_pb2.ACCEPTANCE_METHOD_REJECTION,
        "prompt_length": len(PROMPT),
        "end_token_ids": [END],
        "structured_output": wanted,
    }
    return sampling_pb2.Sampling(**(values | fields))


def ids(*tokens: int) -> Any:
    return np.array([*PROMPT, *tokens], dtype=np.uint32)


@pytest.mark.parametrize("wanted", FORMS, ids=lambda each: next(iter(each)))
def test_what_is_allowed_depends_on_the_tokens_alone(forms: Forms, wanted: dict[str, Any]) -> None:
    """A walk that goes on, back, astray and to the end, against a form that is asked for the first time."""
    kept, walk, output = forms.form(message(wanted)), random.Random(3), list[int]()
    for _ in range(150):
        found, fresh = (each.allowed_after(ids(*output)) for each in (kept, forms.form(message(wanted))))
        assert np.array_equal(found, fresh) if found is not None else fresh is None, output
        if found is None or walk.random() < 0.1 or len(output) > 40:
            del output[walk.randint(0, len(output)) :]
        elif walk.random() < 0.1:
            output.append(walk.randrange(SIZE))
        else:
            output.append(int(walk.choice(np.flatnonzero(found))))


@pytest.mark.parametrize(("states", "dead"), [(1000, False), (400, True)])
def test_a_form_too_complex_to_read_is_a_dead_end_by_the_tokens_alone(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, states: int, dead: bool
) -> None:
    """An automaton of 4,096 states, of which an output meets some: not to be taken for an output that has no such form."""
    monkeypatch.setattr(structured_output, "_LIMITS", LLParserLimits(max_lexer_states=states))
    caplog.set_level(logging.INFO)
    forms, walk = Forms(tokenizer), random.Random(1)
    wanted = message({"regex": "(a|b)*a(a|b){12}"})
    output = walk.choices(tokenizer.convert_tokens_to_ids(["a", "b"]), k=400)
    kept = forms.form(wanted)
    for length in (*range(0, 400, 5), 0):
        found, fresh = (each.allowed_after(ids(*output[:length])) for each in (kept, forms.form(wanted)))
        assert found is not None, length
        assert np.array_equal(found, fresh), length
    found = kept.allowed_after(ids(*output))
    assert found is not None
    assert found.any() != dead
    # Both are told of: they cost a step each.
    assert forms.stats.recompilations == caplog.text.count("was compiled anew")
    assert (forms.stats.recompilations > 0) == dead
    assert forms.stats.dead_ends == caplog.text.count("too complex to go on with")
    assert (forms.stats.dead_ends > 0) == dead
    assert "a|b" not in caplog.text


def test_an_end_token_may_come_exactly_where_the_output_may_end(forms: Forms, tokenizer: Any) -> None:
    several = forms.form(message({"regex": "ab?"}, end_token_ids=[END, 5]))
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])

    def allowed(*tokens: int) -> list[int] | None:
        found = several.allowed_after(ids(*tokens))
        return None if found is None else np.flatnonzero(found).tolist()

    assert a in (allowed() or ())
    assert not {END, 5, b} & set(allowed() or ())
    assert allowed(a) == [END, 5, b]
    assert allowed(a, b) == [END, 5]
    assert allowed(b) is None
    assert allowed(a, END) is None
    assert allowed(a, b, b) is None
    assert several.longest_run(ids(), ids(a, b, b)[len(PROMPT) :]) == 2


def test_rows_have_the_law_of_what_is_allowed(forms: Forms) -> None:
    torch.manual_seed(1)
    params = SamplingParams.from_proto(message({"regex": "[a-d][e-h]"}, temperature=1.0), forms)
    free = SamplingParams.from_proto(message({"regex": "a"}, temperature=1.0), forms)
    free = SamplingParams(**{name: getattr(free, name) for name in free.__slots__} | {"form": None})
    logits = torch.randn(2, SIZE)
    support = np.arange(SIZE, dtype=np.uint32)
    masked, plain = target_rows(logits, [params, free], [3, 3], [support] * 2, SIZE, [ids(), None])
    found = forms.form(message({"regex": "[a-d][e-h]"})).allowed_after(ids())
    assert found is not None
    first = found[:SIZE]
    expected = torch.softmax(logits[0].masked_fill(torch.from_numpy(~first), -np.inf), -1)
    assert masked.p == pytest.approx(expected.numpy(), abs=1e-6)
    assert plain.p == pytest.approx(torch.softmax(logits[1], -1).numpy(), abs=1e-6)
    (drafted,) = draft_tokens(logits[:1], [params], [3], SIZE, 64, [ids()])
    assert set(drafted.support_ids.tolist()) == set(np.flatnonzero(first).tolist())


def test_where_no_token_of_the_vocabulary_can_follow_is_a_dead_end(forms: Forms, tokenizer: Any) -> None:
    params = SamplingParams.from_proto(message({"regex": "[a-d]"}, temperature=0.0), forms)
    small = tokenizer.convert_tokens_to_ids("a")
    (row,) = target_rows(torch.zeros(1, SIZE), [params], [3], [np.empty(0, np.uint32)], small, [ids()])
    assert row.dead_end
    assert row.outside_mass == 1.0
    (row,) = target_rows(torch.zeros(1, SIZE), [params], [3], [np.empty(0, np.uint32)], SIZE, [ids()])
    assert not row.dead_end


def test_fewer_allowed_tokens_than_top_k_are_read_once(forms: Forms, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams.from_proto(message({"regex": "[a-d]"}, temperature=1.0, top_k=40, top_p=0.9), forms)
    read, calls = sampling._read, []
    monkeypatch.setattr(sampling, "_read", lambda *arguments: calls.append(1) or read(*arguments))
    target_rows(torch.randn(1, SIZE), [params], [3], [np.empty(0, np.uint32)], SIZE, [ids()])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ({}, "is empty"),
        ({"json_object": False}, "is empty"),
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"json_schema": "{"}, "line 1"),
        ({"json_schema": '{"not": {}}'}, "Unimplemented"),
        ({"json_schema": '{"$ref": "http://localhost/a"}'}, "not present"),
        ({"json_schema": "[" * 20_000}, "line 1"),
        ({"grammar": "start: " + "(" * 20_000}, "too deeply nested"),
        ({"grammar": "start: A\nA: /a/ & /b/"}, "nothing is of this form"),
        ({"json_schema": '{"type": "integer", "multipleOf": 999999937}'}, "fuel"),
        ({"regex": "a" * 32_769}, "more than 32768"),
    ],
)
def test_what_is_no_form_is_refused(forms: Forms, wanted: dict[str, Any], problem: str) -> None:
    with pytest.raises(FormError, match=problem) as caught:
        forms.check(sampling_pb2.StructuredOutput(**wanted))
    assert len(str(caught.value)) <= 200
    with pytest.raises(ValueError, match="structured_output: "):
        SamplingParams.from_proto(message(wanted), forms)


@pytest.mark.parametrize(
    "fields",
    [{"min_length": 9}, {"banned_token_ids": [1]}, {"allowed_token_ids": [1]}, {"bad_words": [{"ids": [1]}]}],
)
def test_a_worker_refuses_what_could_leave_no_token(forms: Forms, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(fields))}: can't be combined"):
        SamplingParams.from_proto(message({"regex": "a"}, **fields), forms)


def test_without_a_tokenizer_that_can_be_used_there_are_no_forms() -> None:
    with pytest.raises(FormError, match="tokenizer can't be used"):
        Forms(object())
    with pytest.raises(ValueError, match="structured_output: this model's tokenizer"):
        SamplingParams.from_proto(message({"regex": "a"}))


def test_tokens_before_a_dead_end_stand_whatever_the_block() -> None:
    def row(*, dead_end: bool) -> TargetRow:
        return TargetRow(np.empty(0), 1.0, 5, dead_end=dead_end)

    kinds = [TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.BONUS]
    outcome = Outcome([1, 2, 3], kinds, accepted=2, expected_acceptance=[1.0, 1.0])
    alive, dead = row(dead_end=False), row(dead_end=True)
    assert before_dead_end(outcome, [alive, alive, alive]) is outcome
    for count in (1, 2):
        cut = before_dead_end(outcome, [alive] * count + [dead] * (3 - count))
        assert (cut.token_ids, cut.kinds, cut.accepted) == (outcome.token_ids[:count], kinds[:count], count)
    with pytest.raises(DeadEnd):
        before_dead_end(outcome, [dead, alive, alive])
    # What follows a rejection is of no account.
    rejected = Outcome([7], [TokenKind.RECOVERED], accepted=0, expected_acceptance=[0.5])
    assert before_dead_end(rejected, [alive, dead, dead]) is rejected
