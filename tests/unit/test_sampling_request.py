"""From the sampling fields of a request to the Sampling that the workers get."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import normalizers

from orchestrator.errors import InvalidArgument
from orchestrator.request import GenerationPlan, Limits, plan_generation
from orchestrator.sampling_update import SamplingUpdate
from orchestrator.vocabulary import GenerationDefaults, Vocabulary
from tandem.logit_adjustments import Adjustments
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import worker_pb2
from tests.support.services import MODELS

LIMITS = Limits(
    context_length=64,
    vocabulary_size=512,
    max_tokens=32,
    max_prompt_characters=1000,
    max_speculative_tokens=8,
    default_speculative_tokens=4,
    end_token_ids=frozenset({0}),
    adaptive_by_default=False,
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(MODELS / "tiny-target"), "")


async def plan(vocabulary: Vocabulary, **fields: Any) -> GenerationPlan:
    return await plan_generation(
        api.GenerateRequest(token_ids=api.TokenIds(ids=[5, 6, 7]), **fields), vocabulary, LIMITS
    )


async def test_what_is_unset_is_the_models_and_what_is_set_is_the_callers(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = (await plan(vocabulary)).sampling
    assert (ours.temperature, ours.top_k, ours.top_p, ours.min_p, ours.repetition_penalty) == (1.0, 0, 1.0, 0.0, 1.0)
    config = {"temperature": 0.5, "top_k": 9, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    monkeypatch.setattr(vocabulary, "defaults", GenerationDefaults(**config))  # type: ignore[arg-type]
    for gamma in (0, 8):
        models = (await plan(vocabulary, num_speculative_tokens=gamma)).sampling
        assert {name: getattr(models, name) for name in config} == config
    neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    callers = (await plan(vocabulary, **neutral)).sampling
    assert {name: getattr(callers, name) for name in neutral} == neutral


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"min_p": 1.5},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
    ],
)
def test_a_generation_config_out_of_range_is_refused_at_start(config: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="generation config is out of range"):
        GenerationDefaults(**config)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("most", "asked", "said"),
    [
        (32, 33, "must be 1 to 32"),
        (63, 64, "must be 1 to 63"),
        (64, 64, "must be 1 to 63, less with a longer prompt: both share a context of 64"),
        (4096, 9999, "must be 1 to 63, less with a longer prompt: both share a context of 64"),
        (4096, 0, "must be 1 to 63, less with a longer prompt: both share a context of 64"),
        (4096, 62, "must be 1 to 61 with a prompt of 3 tokens: both share a context of 64"),
        (61, 61, ""),
    ],
)
async def test_what_is_refused_says_limits_that_hold(vocabulary: Vocabulary, most: int, asked: int, said: str) -> None:
    request = api.GenerateRequest(token_ids=api.TokenIds(ids=[5, 6, 7]), max_tokens=asked)
    limits = replace(LIMITS, max_tokens=most)
    if not said:
        assert (await plan_generation(request, vocabulary, limits)).max_tokens == asked
        return
    with pytest.raises(InvalidArgument) as refusal:
        await plan_generation(request, vocabulary, limits)
    assert str(refusal.value) == f"max_tokens: {said}"


async def test_every_field_reaches_the_workers(vocabulary: Vocabulary) -> None:
    fields: dict[str, Any] = {
        "repetition_penalty": 1.25,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {9: 1.5, 3: -2.0, 4: 0.0},
        "banned_token_ids": [8, 7, 8],
        "allowed_token_ids": [20, 10],
        "bad_words": ["while"],
        "bad_words_token_ids": [{"ids": [1, 2]}],
        "min_tokens": 2,
    }
    sampling = (await plan(vocabulary, **fields)).sampling
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.25, 0.5, -0.5)
    assert dict(zip(sampling.bias_token_ids, sampling.biases, strict=True)) == {3: -2.0, 9: 1.5}
    assert (list(sampling.banned_token_ids), list(sampling.allowed_token_ids)) == ([7, 8], [10, 20])
    words = [list(word.ids) for word in sampling.bad_words]
    assert words == [[1, 2], *vocabulary.encode_bad_word("while")]
    assert (sampling.prompt_length, sampling.min_length, list(sampling.end_token_ids)) == (3, 5, [0])
    assert Adjustments.from_proto(sampling) is not None


async def test_a_request_that_asks_for_none_pays_nothing(vocabulary: Vocabulary) -> None:
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {3: 0.0}}
    assert Adjustments.from_proto((await plan(vocabulary)).sampling) is None
    assert Adjustments.from_proto((await plan(vocabulary, **neutral)).sampling) is None


def test_a_bad_word_is_banned_at_a_words_start_and_after_a_space(vocabulary: Vocabulary) -> None:
    bare, spaced = vocabulary.encode_bad_word("  x")
    assert vocabulary.decode(bare) == "x"
    assert vocabulary.decode(spaced) == " x"


@pytest.mark.parametrize("regex", ["(secret", "(\U00013000" * 200])
async def test_what_is_wrong_with_a_form_is_for_its_caller_alone(vocabulary: Vocabulary, regex: str) -> None:
    """Its words repeat the form; and they are bounded in bytes, not in characters."""
    with pytest.raises(InvalidArgument) as refusal:
        await plan(vocabulary, structured_output={"regex": regex})
    assert regex[1] in str(refusal.value)
    assert refusal.value.for_log == "structured_output.regex: can't be used"
    assert sum(detail.ByteSize() for detail in refusal.value.details()) + len(str(refusal.value).encode()) < 800
    with pytest.raises(InvalidArgument) as refusal:
        await plan(vocabulary, temperature=-1.0)
    assert refusal.value.for_log == str(refusal.value)


async def test_bad_words_of_more_ids_than_the_workers_take_are_refused_by_name(vocabulary: Vocabulary) -> None:
    longest = await plan(vocabulary, bad_words=["\U00013000" * 256])  # four bytes each, and a space before them
    assert {len(word.ids) for word in longest.sampling.bad_words} == {1024, 1025}
    assert Adjustments.from_proto(longest.sampling) is not None
    tokenizer = copy.deepcopy(vocabulary._tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()  # with which one character may become eighteen
    normalising = Vocabulary(tokenizer, {})
    with pytest.raises(InvalidArgument, match="must have 1 to 1028 ids") as refusal:
        await plan(normalising, bad_words=["\ufdfa" * 256])
    assert refusal.value.field == "bad_words"
    with pytest.raises(InvalidArgument) as refusal:
        update = SamplingUpdate(an_update(bad_words={"texts": ["\ufdfa" * 256]}), normalising, LIMITS)
        await update.change(await plan(normalising))
    assert refusal.value.field == "bad_words"


async def test_the_only_tokens_left_may_not_be_bad_words_endings(vocabulary: Vocabulary) -> None:
    """After [9], nothing would be left of [9]: no row could be decoded."""
    with pytest.raises(InvalidArgument, match="allowed_token_ids"):
        await plan(vocabulary, allowed_token_ids=[9], bad_words_token_ids=[{"ids": [9, 9]}])


def test_a_worker_that_ignores_some_fields_is_not_used(vocabulary: Vocabulary) -> None:
    info = worker_pb2.GetModelInfoResponse(
        model="m",
        vocabulary_size=vocabulary.size,
        vocabulary_fingerprint=vocabulary._fingerprint(vocabulary.size),
        sampling_version=0,
    )
    for check, role in ((vocabulary.check_target, "target"), (vocabulary.check_draft, "draft")):
        with pytest.raises(Exception, match=f"the {role} service applies sampling version 0"):
            check(info)


FULL: dict[str, Any] = {
    "temperature": 0.75,
    "top_k": 9,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 2**64 - 1,
    "acceptance_method": 2,
    "num_speculative_tokens": 3,
    "adaptive_speculative_tokens": True,
    "min_tokens": 2,
    "stop_token_ids": [9],
    "repetition_penalty": 1.25,
    "presence_penalty": -0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {7: 1.5, 5: -2.0},
    "banned_token_ids": [11, 10],
    "allowed_token_ids": range(200),
    "bad_words": ["the", "a"],
    "bad_words_token_ids": [{"ids": [3, 4]}],
    "logprobs": True,
    "top_logprobs": 2,
}


def an_update(**fields: Any) -> api.UpdateSamplingRequest:
    return api.UpdateSamplingRequest(request_id="r", **fields)


@pytest.mark.parametrize(
    "fields", [{}, FULL, {"structured_output": {"json_object": True}}], ids=["defaults", "all", "a form"]
)
async def test_an_update_of_nothing_leaves_the_plan_as_it_is(vocabulary: Vocabulary, fields: dict[str, Any]) -> None:
    before = await plan(vocabulary, **fields)
    assert await SamplingUpdate(an_update(), vocabulary, LIMITS).change(before) == before


async def test_an_update_sets_what_a_request_would_have_set(vocabulary: Vocabulary) -> None:
    before = await plan(vocabulary, **FULL)
    change: dict[str, Any] = {
        "temperature": 1e-4,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "num_speculative_tokens": 0,
        "adaptive_speculative_tokens": False,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    sets: dict[str, Any] = {"logit_bias": {6: 1.0}, "banned_token_ids": [], "allowed_token_ids": [1, 2, 3]}
    update = an_update(
        **change,
        logit_bias={"biases": sets["logit_bias"]},
        banned_token_ids={},
        allowed_token_ids={"ids": [3, 2, 1]},
        bad_words={"texts": ["no"], "token_ids": []},
    )
    expected = await plan(vocabulary, **FULL | change | sets | {"bad_words": ["no"], "bad_words_token_ids": []})
    after = await SamplingUpdate(update, vocabulary, LIMITS).change(before)
    assert replace(after, request_id="") == replace(expected, request_id="")


def test_what_can_be_changed_has_the_same_name_and_kind_as_in_a_request() -> None:
    known = api.GenerateRequest.DESCRIPTOR.fields_by_name
    for field in api.UpdateSamplingRequest.DESCRIPTOR.fields:
        assert known[field.name].number == field.number
        assert field.message_type or known[field.name].type == field.type


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"num_speculative_tokens": 9}, "num_speculative_tokens"),
        ({"logit_bias": {"biases": {512: 0.0}}}, "logit_bias"),
        ({"logit_bias": {"biases": {1: 101.0}}}, "logit_bias"),
        ({"banned_token_ids": {"ids": [512]}}, "banned_token_ids"),
        ({"allowed_token_ids": {"ids": [512]}}, "allowed_token_ids"),
        ({"bad_words": {"texts": [" "]}}, "bad_words"),
        ({"bad_words": {"token_ids": [{}]}}, "bad_words_token_ids"),
        ({"bad_words": {"token_ids": [{"ids": [512]}]}}, "bad_words_token_ids.ids"),
    ],
)
def test_an_update_out_of_range_is_refused_by_name(vocabulary: Vocabulary, fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        SamplingUpdate(an_update(**fields), vocabulary, LIMITS)
    assert refusal.value.field == field


async def test_an_update_that_does_not_go_with_what_stays_is_refused(vocabulary: Vocabulary) -> None:
    formed = await plan(vocabulary, structured_output={"json_object": True})
    with pytest.raises(InvalidArgument) as refusal:
        await SamplingUpdate(an_update(banned_token_ids={"ids": [1]}), vocabulary, LIMITS).change(formed)
    assert refusal.value.field == "banned_token_ids"
    allowed = await plan(vocabulary, allowed_token_ids=[1, 2])
    with pytest.raises(InvalidArgument) as refusal:
        await SamplingUpdate(an_update(banned_token_ids={"ids": [1, 2]}), vocabulary, LIMITS).change(allowed)
    assert refusal.value.field == "allowed_token_ids"
