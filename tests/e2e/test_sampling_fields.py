"""Each sampling field at every gamma, with a draft that is the target, a real one and a random one: the output is that of
plain decoding, greedy and COUPLED with a seed; and greedy output is transformers' own with the same processors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import grpc
import pytest

from orchestrator.completion import FinishReason
from orchestrator.vocabulary import Vocabulary
from tandem.v1 import sampling_pb2
from tests.support.channels import open_channel
from tests.support.generation import Generation, generate, generate_all, request
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

GAMMAS = (0, 1, 2, 5, 8)
PAIRS = ("same_channel", "tiny_channel", "random_draft_channel")
PROMPT = [47, 12, 300, 12, 47, 12, 9]
TOKENS = 24
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED


@cache
def reference() -> Reference:
    return Reference(MODELS / "tiny-target")


@cache
def natural() -> tuple[int, ...]:
    """What the target says by itself, greedily."""
    return tuple(reference().greedy(PROMPT, TOKENS))


def sequences(*words: list[int]) -> list[sampling_pb2.TokenSequence]:
    return [sampling_pb2.TokenSequence(ids=word) for word in words]


def settings() -> dict[str, dict[str, Any]]:
    """Fields that change the greedy output of the pair; all ids come from it, so that they matter."""
    ids = list(natural())
    return {
        "repetition": {"repetition_penalty": 1.3},
        "repetition below one": {"repetition_penalty": 0.8},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 1.2},
        "frequency below zero": {"frequency_penalty": -2.0},
        "penalties": {"repetition_penalty": 1.15, "presence_penalty": 0.6, "frequency_penalty": -0.4},
        "bias": {"logit_bias": {ids[0]: -3.0, ids[4]: 2.5, ids[9]: -100.0}},
        "banned": {"banned_token_ids": [ids[1], ids[5], ids[6]]},
        "allowed": {"allowed_token_ids": sorted({*ids[1:], *range(40, 80)} - {ids[0], ids[7]})},
        "bad words": {"bad_words_token_ids": sequences([ids[3]], ids[0:2], ids[6:9], [PROMPT[-1], ids[0]])},
        "min tokens": {"min_tokens": 17, "stop_token_ids": [ids[6], ids[11]]},
        "all": {
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "logit_bias": {ids[0]: 2.0},
            "banned_token_ids": [ids[2]],
            "bad_words_token_ids": sequences(ids[4:6]),
            "min_tokens": 9,
            "stop_token_ids": [ids[3]],
        },
    }


MODES = {"greedy": {"temperature": 0.0}, "coupled": {"temperature": 1.0, "seed": 5, "acceptance_method": COUPLED}}


def at_every_gamma(channel: grpc.Channel, many: dict[str, dict[str, Any]]) -> dict[str, list[Generation]]:
    """All requests at the same time, so that those of one batch differ in all fields; by name, one for each gamma."""
    requests = [
        request(PROMPT, num_speculative_tokens=gamma, max_tokens=TOKENS, **fields)
        for fields in many.values()
        for gamma in GAMMAS
    ]
    results = generate_all(channel, requests)
    return {name: results[index * len(GAMMAS) :][: len(GAMMAS)] for index, name in enumerate(many)}


def in_mode(mode: str) -> dict[str, dict[str, Any]]:
    return {name: fields | MODES[mode] for name, fields in settings().items()}


@pytest.fixture(params=PAIRS)
def channel(request: pytest.FixtureRequest) -> grpc.Channel:
    found: grpc.Channel = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_a_field_acts_the_same_at_every_gamma(channel: grpc.Channel, mode: str) -> None:
    for name, (plain, *others) in at_every_gamma(channel, in_mode(mode)).items():
        fields = settings()[name]
        for gamma, other in zip(GAMMAS[1:], others, strict=True):
            assert other.seen == plain.seen, f"{name}, gamma {gamma}"
            assert other.speculation.draft_tokens > 0
        if mode == "greedy":
            assert plain.ids != list(natural()), name
        assert not set(fields.get("banned_token_ids", ())) & set(plain.ids)
        assert set(plain.ids) <= set(fields.get("allowed_token_ids", plain.ids))


def test_a_greedy_draft_that_is_the_target_is_always_accepted(same_channel: grpc.Channel) -> None:
    """Draft and target apply the same processing to the same tokens, so nothing is ever rejected."""
    for name, results in at_every_gamma(same_channel, in_mode("greedy")).items():
        for result in results:
            assert result.speculation.accepted_tokens == result.speculation.draft_tokens, name


def as_generate_has_it(fields: dict[str, Any]) -> dict[str, Any]:
    """The same settings as arguments of transformers' generate."""
    known: dict[str, Any] = {"repetition_penalty": fields.get("repetition_penalty")}
    if "logit_bias" in fields:
        known["sequence_bias"] = [[[token_id], bias] for token_id, bias in fields["logit_bias"].items()]
    if "banned_token_ids" in fields:
        known["suppress_tokens"] = fields["banned_token_ids"]
    if "bad_words_token_ids" in fields:
        known["bad_words_ids"] = [list(word.ids) for word in fields["bad_words_token_ids"]]
    if "min_tokens" in fields:
        known |= {"min_new_tokens": fields["min_tokens"], "eos_token_id": [0, *fields["stop_token_ids"]]}
    return known


def test_greedy_output_is_that_of_generate_with_the_same_processors(tiny_channel: grpc.Channel) -> None:
    names = ("repetition", "repetition below one", "bias", "banned", "bad words", "min tokens")
    results = at_every_gamma(tiny_channel, {name: in_mode("greedy")[name] for name in names})
    for name in names:
        expected = reference().greedy(PROMPT, TOKENS, **as_generate_has_it(settings()[name]))
        for result in results[name]:
            assert result.ids == expected, name


def test_a_bad_word_as_text_is_banned_at_a_words_start_and_after_a_space(tiny_channel: grpc.Channel) -> None:
    natural_text = generate(tiny_channel, "def read(path):\n", temperature=0, max_tokens=TOKENS).text
    word = max(natural_text.split(), key=natural_text.split().count)
    fields = {"temperature": 0.0, "max_tokens": TOKENS, "bad_words": [word]}
    requests = [request("def read(path):\n", num_speculative_tokens=gamma, **fields) for gamma in GAMMAS]
    plain, *others = generate_all(tiny_channel, requests)
    assert plain.text != natural_text
    assert all(other.seen == plain.seen for other in others)


def test_rejection_sampling_accepts_about_as_often_with_penalties(tiny_channel: grpc.Channel) -> None:
    """The draft applies them too: otherwise q would be far from p, and the output right but slow."""
    rates = []
    for fields in ({}, {"repetition_penalty": 1.3, "presence_penalty": 1.0}, {"allowed_token_ids": range(40, 80)}):
        requests = [
            request(
                PROMPT, temperature=1.0, seed=seed, max_tokens=32, num_speculative_tokens=2, ignore_eos=True, **fields
            )
            for seed in range(10)
        ]
        results = [result.speculation for result in generate_all(tiny_channel, requests)]
        rates.append(sum(each.accepted_tokens for each in results) / sum(each.draft_tokens for each in results))
    assert min(rates[1:]) > 0.7 * rates[0], rates


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(str(MODELS / "tiny-target"), "")


def test_characters_of_several_tokens_are_never_cut(channel: grpc.Channel, vocabulary: Vocabulary) -> None:
    """Nothing but the bytes of an emoji and of two letters: whole characters, halves and nonsense, wherever blocks end."""
    ids = sorted({token for text in ("\U0001f600", "\u00e9", "a") for token in vocabulary.encode_text(text)})
    fields = {"allowed_token_ids": ids, "ignore_eos": True, "temperature": 1.5, "acceptance_method": COUPLED}
    emoji = vocabulary.encode_text("\U0001f600")
    many = {str(seed): fields | {"seed": seed} for seed in range(4)}
    many["emoji"] = fields | {"logit_bias": dict.fromkeys(emoji, 4.0), "seed": 9}
    for plain, *others in at_every_gamma(channel, many).values():
        assert plain.text == vocabulary.decode(plain.ids)
        for other in others:
            assert other.seen == plain.seen
            assert "".join(other.pieces) == plain.text


def test_an_end_token_that_comes_first_is_the_whole_output(channel: grpc.Channel, vocabulary: Vocabulary) -> None:
    (end,) = vocabulary.end_token_ids
    forced = {"logit_bias": {end: 100.0}, "temperature": 0.0}
    for shown in (False, True):
        for result in at_every_gamma(channel, {"end": forced | {"skip_special_tokens": not shown}})["end"]:
            assert (result.ids, result.usage, result.reason) == ([end], (len(PROMPT), 1), FinishReason.STOP)
            assert result.text == (vocabulary.decode_all([end]) if shown else "")


def test_special_tokens_have_text_if_asked_for(tiny_channel: grpc.Channel, vocabulary: Vocabulary) -> None:
    special = vocabulary.encode_text("<|user|>")
    fields = {"temperature": 1.0, "seed": 2, "acceptance_method": COUPLED, "logit_bias": {special[0]: 14.0}}
    many = {"shown": fields | {"skip_special_tokens": False}, "skipped": fields}
    results = at_every_gamma(tiny_channel, many)
    for plain, *others in results.values():
        assert all(other.seen == plain.seen for other in others)
    shown, skipped = results["shown"][0], results["skipped"][0]
    assert shown.ids == skipped.ids
    assert special[0] in shown.ids
    assert shown.text == vocabulary.decode_all(shown.ids) != skipped.text == vocabulary.decode(skipped.ids)
    stopped = generate(tiny_channel, PROMPT, max_tokens=TOKENS, stop=["<|user|>"], **many["shown"])
    assert stopped.text == shown.text[: shown.text.index("<|user|>")]


ASKING = {
    "raw": {"logprobs": True, "top_logprobs": 5},
    "processed": {"logprobs": True, "top_logprobs": 3, "logprobs_mode": sampling_pb2.LOGPROBS_MODE_PROCESSED},
}
SHAPE = {"repetition_penalty": 1.2, "top_k": 30}


def test_logprobs_are_the_same_at_every_gamma(channel: grpc.Channel) -> None:
    stop = {"stop_token_ids": [natural()[5]]}  # the end of the output cuts them off too
    asked = {f"{how} {mode}": ASKING[how] | SHAPE | MODES[mode] | stop for how in ASKING for mode in MODES}
    for name, (plain, *others) in at_every_gamma(channel, asked).items():
        assert len(plain.logprobs) == len(plain.ids)
        for gamma, other in zip(GAMMAS[1:], others, strict=True):
            assert other.seen == plain.seen
            assert other.logprobs == pytest.approx(plain.logprobs, abs=1e-4), f"{name}, gamma {gamma}"
            for one, same in zip(plain.top_logprobs, other.top_logprobs, strict=True):
                assert one == pytest.approx(same, abs=1e-4), f"{name}, gamma {gamma}"


def test_logprobs_end_where_a_stop_string_ends_the_output(channel: grpc.Channel, vocabulary: Vocabulary) -> None:
    """The token that completes the stop is the last that has any, wherever in a block it lies."""
    text = vocabulary.decode(natural())
    stops = {str(start): text[start : start + 3] for start in (2, len(text) // 2)}
    asked = {name: ASKING["raw"] | MODES["greedy"] | {"stop": [stop]} for name, stop in stops.items()}
    for name, (plain, *others) in at_every_gamma(channel, asked).items():
        assert plain.reason == FinishReason.STOP
        assert plain.text == text[: text.index(stops[name])]
        assert stops[name] in vocabulary.decode(plain.ids)
        assert stops[name] not in vocabulary.decode(plain.ids[:-1])
        for result in (plain, *others):
            assert result.seen == plain.seen
            assert len(result.logprobs) == len(result.top_logprobs) == len(result.ids) == result.usage[1]
            assert [len(top) for top in result.top_logprobs] == [5] * len(result.ids)
            assert result.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_logprobs_of_every_kind_of_token_are_the_models_own(tiny_channel: grpc.Channel) -> None:
    """Against one forward of transformers over the whole sequence; drawn under REJECTION, so that all kinds occur."""
    fields = ASKING["raw"] | SHAPE | {"temperature": 1.0, "max_tokens": 32, "ignore_eos": True, "top_logprobs": 20}
    requests = [request(PROMPT, seed=seed, num_speculative_tokens=3, **fields) for seed in range(6)]
    results = generate_all(tiny_channel, requests)
    assert {kind for result in results for kind in result.kinds} == {1, 2, 3}
    for result in results:
        laws = reference().logprobs([*PROMPT, *result.ids])[len(PROMPT) - 1 : -1]
        assert result.logprobs == pytest.approx(
            [law[token] for law, token in zip(laws, result.ids, strict=True)], abs=1e-4
        )
        for law, top in zip(laws, result.top_logprobs, strict=True):
            assert list(top.values()) == pytest.approx(sorted(law, reverse=True)[:20], abs=1e-4)
            assert list(top.values()) == pytest.approx([law[token] for token in top], abs=1e-4)


def test_without_being_asked_there_are_none(tiny_channel: grpc.Channel) -> None:
    result = generate(tiny_channel, PROMPT, temperature=0, max_tokens=4)
    assert (result.logprobs, result.top_logprobs) == ([], [{}] * 4)


@pytest.fixture(scope="module")
def faulty_channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    """A target that penalises wrongly inside blocks: see tests/support/faulty_service.py."""
    faults = {"target_service": "penalties_inside_blocks"}
    folder = tmp_path_factory.mktemp("faulty")
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", faults=faults) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield channel


def test_planted_faults_are_found_by_the_same_comparison(faulty_channel: grpc.Channel) -> None:
    # Repetition: tokens that were rejected stay counted. Frequency: all rows of a block see what the first one sees.
    faulty = {name: in_mode("greedy")[name] for name in ("repetition", "frequency below zero")}
    for name, (plain, *others) in at_every_gamma(faulty_channel, faulty).items():
        assert any(other.seen != plain.seen for other in others), name
