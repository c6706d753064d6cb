"""What a caller sees never depends on gamma, nor on the draft: ids, text, finish reason, usage; and bad input is refused
by the name of its field, without harm to what follows."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from orchestrator.completion import FinishReason
from tandem.acceptance import TokenKind
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc, sampling_pb2
from tests.support.generation import Generation, gather, generate, generate_all, refused_field, request

GAMMAS = (0, 1, 2, 5, 8)
PAIRS = ("same_channel", "tiny_channel", "random_draft_channel")
PROMPT = "def read_lines(path):\n"
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
TokenSequence = sampling_pb2.TokenSequence


@pytest.fixture(params=PAIRS)
def channel(request: pytest.FixtureRequest) -> grpc.Channel:
    found: grpc.Channel = request.getfixturevalue(request.param)
    return found


def at_every_gamma(channel: grpc.Channel, **fields: Any) -> Generation:
    """Runs a request at every gamma, fails unless all look alike, and returns the one at gamma 0."""
    requests = [request(PROMPT, num_speculative_tokens=gamma, **fields) for gamma in GAMMAS]
    results = generate_all(channel, requests)
    for gamma, result in zip(GAMMAS, results, strict=True):
        assert result.seen == results[0].seen, f"gamma {gamma}"
        _check_kinds(result)
    return results[0]


def _check_kinds(result: Generation) -> None:
    """emitted = accepted + recovered + bonus, and one of the latter two at most in each round."""
    kinds = [TokenKind(kind) for kind in result.kinds]
    accepted = kinds.count(TokenKind.ACCEPTED)
    assert accepted == result.speculation.accepted_tokens
    assert 0 <= result.speculation.rounds - (len(kinds) - accepted) <= 1
    assert result.usage[1] == len(kinds)


@pytest.fixture(scope="module")
def natural(same_channel: grpc.Channel) -> Generation:
    return generate(same_channel, PROMPT, temperature=0, max_tokens=32, num_speculative_tokens=0)


def test_greedy_is_the_same_at_every_gamma(channel: grpc.Channel, natural: Generation) -> None:
    assert at_every_gamma(channel, temperature=0, max_tokens=32).ids == natural.ids


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 1.0, "min_tokens": 10},
    ],
)
def test_coupled_with_a_seed_is_the_same_at_every_gamma(channel: grpc.Channel, fields: dict[str, float]) -> None:
    at_every_gamma(channel, max_tokens=32, seed=11, acceptance_method=COUPLED, **fields)


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_ends_the_output_wherever_it_falls_in_a_block(
    channel: grpc.Channel, natural: Generation, index: int
) -> None:
    token_id = natural.ids[index]
    first = natural.ids.index(token_id)
    result = at_every_gamma(channel, temperature=0, max_tokens=32, stop_token_ids=[token_id])
    assert result.ids == natural.ids[: first + 1]
    assert result.reason == FinishReason.STOP


@pytest.mark.parametrize("minimum", range(8))
def test_no_end_token_before_min_tokens(channel: grpc.Channel, natural: Generation, minimum: int) -> None:
    result = at_every_gamma(channel, temperature=0, max_tokens=16, min_tokens=minimum, stop_token_ids=[natural.ids[2]])
    assert len(result.ids) > minimum
    if minimum <= natural.ids.index(natural.ids[2]):
        assert result.ids == natural.ids[: natural.ids.index(natural.ids[2]) + 1]
    else:
        assert natural.ids[2] not in result.ids[:minimum]


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("start", [0, 1, 5, 9, 14, 20])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_text_wherever_it_lies(
    same_channel: grpc.Channel, natural: Generation, start: int, length: int, include: bool
) -> None:
    stop = natural.text[start : start + length]
    result = at_every_gamma(
        same_channel, temperature=0, max_tokens=32, stop=[stop, "never to be seen"], include_stop_str_in_output=include
    )
    cut = natural.text.index(stop)
    assert result.text == natural.text[: cut + length if include else cut]
    assert result.reason == FinishReason.STOP
    assert result.ids == natural.ids[: len(result.ids)]


@pytest.mark.parametrize("maximum", [1, 2, 3, 4, 5, 6, 7, 12])
def test_max_tokens_is_exact(channel: grpc.Channel, natural: Generation, maximum: int) -> None:
    result = at_every_gamma(channel, temperature=0, max_tokens=maximum)
    assert result.ids == natural.ids[:maximum]
    assert result.reason == FinishReason.LENGTH


def test_a_prompt_of_context_minus_r_yields_r_tokens(same_channel: grpc.Channel) -> None:
    for rest in (1, 2, 5, 9):
        prompt = [5 + index % 200 for index in range(1024 - rest)]
        for gamma in (0, 1, 5, 8):
            result = generate(same_channel, prompt, temperature=0, ignore_eos=True, num_speculative_tokens=gamma)
            assert result.usage == (1024 - rest, rest)
            assert result.reason == FinishReason.LENGTH


def test_text_is_decode_of_ids(tiny_channel: grpc.Channel) -> None:
    from orchestrator.vocabulary import Vocabulary
    from tests.support.services import MODELS

    vocabulary = Vocabulary.load(str(MODELS / "tiny-target"), "")
    for seed in range(20):
        result = generate(tiny_channel, PROMPT, temperature=1.5, max_tokens=60, seed=seed, ignore_eos=True)
        assert result.text == vocabulary.decode(result.ids)


def test_a_request_without_a_seed_reports_one_that_repeats_it(tiny_channel: grpc.Channel) -> None:
    first = generate(tiny_channel, PROMPT, temperature=1, max_tokens=20)
    assert first.start.seed != generate(tiny_channel, PROMPT, temperature=1, max_tokens=20).start.seed
    again = generate(tiny_channel, PROMPT, temperature=1, max_tokens=20, seed=first.start.seed)
    assert again.ids == first.ids


def test_sixteen_at_once_are_as_alone(tiny_channel: grpc.Channel) -> None:
    """A request's tokens never depend on its neighbours in the batch."""
    requests = [
        request(
            PROMPT + "    " * index,
            temperature=0 if index % 2 else 1,
            acceptance_method=COUPLED,
            seed=index,
            max_tokens=10 + 3 * index,
            num_speculative_tokens=GAMMAS[index % len(GAMMAS)],
        )
        for index in range(16)
    ]
    alone = [generate_all(tiny_channel, [each])[0] for each in requests]
    for _ in range(5):
        assert [result.seen for result in generate_all(tiny_channel, requests)] == [result.seen for result in alone]


def test_chat_messages_use_the_template_and_special_text_stays_text(tiny_channel: grpc.Channel) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(tiny_channel)

    def chat(content: str) -> Generation:
        messages = api.ChatMessages(messages=[api.ChatMessage(role="user", content=content)])
        return gather(stub.Generate(api.GenerateRequest(messages=messages, temperature=0, max_tokens=4)))

    plain = chat("hello")
    assert plain.usage[0] > len("hello") // 4
    assert chat("hello<|end|>").usage[0] > plain.usage[0] + 1


BAD = [
    ("prompt", {"token_ids": api.TokenIds()}),
    ("prompt", {"text": ""}),
    ("prompt", {}),
    ("prompt", {"text": "a b " * 2000}),
    ("text", {"text": "a" * 1_000_001}),
    ("text", {"text": "a" * 5_000_000}),  # more than gRPC lets through by itself
    ("messages", {"messages": api.ChatMessages(messages=[api.ChatMessage(role="user", content="a" * 1_000_001)])}),
    ("token_ids", {"token_ids": api.TokenIds(ids=[5] * 1024)}),
    ("token_ids", {"token_ids": api.TokenIds(ids=[5, 512])}),
    ("token_ids", {"token_ids": api.TokenIds(ids=[5, 4_000_000])}),
    ("token_ids", {"token_ids": api.TokenIds(ids=[2**32 - 1])}),
    ("messages", {"messages": api.ChatMessages()}),
    ("messages.role", {"messages": api.ChatMessages(messages=[api.ChatMessage(role="root", content="x")])}),
    ("max_tokens", {"text": "a", "max_tokens": 0}),
    ("max_tokens", {"text": "a", "max_tokens": 1024}),
    ("max_tokens", {"text": "a", "max_tokens": 2**32 - 1}),
    ("min_tokens", {"text": "a", "max_tokens": 5, "min_tokens": 6}),
    ("temperature", {"text": "a", "temperature": float("nan")}),
    ("temperature", {"text": "a", "temperature": -0.1}),
    ("temperature", {"text": "a", "temperature": float("inf")}),
    ("top_p", {"text": "a", "top_p": 0.0}),
    ("top_p", {"text": "a", "top_p": 1.01}),
    ("min_p", {"text": "a", "min_p": -1.0}),
    ("num_speculative_tokens", {"text": "a", "num_speculative_tokens": 17}),
    ("acceptance_method", {"text": "a", "acceptance_method": 9}),
    ("stop", {"text": "a", "stop": ["x"] * 17}),
    ("stop", {"text": "a", "stop": [""]}),
    ("stop", {"text": "a", "stop": ["x" * 257]}),
    ("stop_token_ids", {"text": "a", "stop_token_ids": [512]}),
    ("stop_token_ids", {"text": "a", "stop_token_ids": [4_000_000], "min_tokens": 2}),
    ("stop_token_ids", {"text": "a", "stop_token_ids": list(range(65))}),
    ("repetition_penalty", {"text": "a", "repetition_penalty": 0.0}),
    ("repetition_penalty", {"text": "a", "repetition_penalty": float("nan")}),
    ("repetition_penalty", {"text": "a", "repetition_penalty": 101.0}),
    ("presence_penalty", {"text": "a", "presence_penalty": 2.5}),
    ("presence_penalty", {"text": "a", "presence_penalty": float("nan")}),
    ("frequency_penalty", {"text": "a", "frequency_penalty": float("-inf")}),
    ("logit_bias", {"text": "a", "logit_bias": {191_222: -100.0}}),
    ("logit_bias", {"text": "a", "logit_bias": {1: float("nan")}}),
    ("logit_bias", {"text": "a", "logit_bias": {1: 100.5}}),
    ("logit_bias", {"text": "a", "logit_bias": dict.fromkeys(range(1025), 1.0)}),
    ("banned_token_ids", {"text": "a", "banned_token_ids": [2**32 - 1]}),
    ("banned_token_ids", {"text": "a", "banned_token_ids": [1] * 1025}),
    ("banned_token_ids", {"text": "a", "banned_token_ids": range(512)}),
    ("allowed_token_ids", {"text": "a", "allowed_token_ids": [512]}),
    ("allowed_token_ids", {"text": "a", "allowed_token_ids": [7], "banned_token_ids": [7]}),
    ("allowed_token_ids", {"text": "a", "allowed_token_ids": [0], "min_tokens": 1}),
    ("bad_words", {"text": "a", "bad_words": [" "]}),
    ("bad_words", {"text": "a", "bad_words": ["x" * 257]}),
    ("bad_words", {"text": "a", "bad_words": ["x"] * 50_000}),
    ("bad_words_token_ids", {"text": "a", "bad_words_token_ids": [TokenSequence()]}),
    ("bad_words_token_ids", {"text": "a", "bad_words_token_ids": [TokenSequence(ids=[1])] * 257}),
    ("bad_words_token_ids.ids", {"text": "a", "bad_words_token_ids": [TokenSequence(ids=[1, 4_000])]}),
    ("bad_words_token_ids.ids", {"text": "a", "bad_words_token_ids": [TokenSequence(ids=[1] * 33)]}),
    ("top_logprobs", {"text": "a", "logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"text": "a", "logprobs": True, "top_logprobs": 10**9}),
    ("top_logprobs", {"text": "a", "top_logprobs": 1}),
    ("logprobs_mode", {"text": "a", "logprobs": True, "logprobs_mode": 3}),
    ("n", {"text": "a", "n": 0}),
    ("n", {"text": "a", "n": 5_000_000}),
    ("request_id", {"text": "a", "request_id": "a#1"}),
    ("request_id", {"text": "a", "request_id": "white space"}),
    ("request_id", {"text": "a", "request_id": "x" * 129}),
    ("cache_salt", {"text": "a", "cache_salt": "x" * 129}),
]


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_bad_input_is_refused_by_name_and_does_no_harm(
    tiny_channel: grpc.Channel, natural: Generation, field: str, fields: dict[str, Any]
) -> None:
    assert refused_field(tiny_channel, **fields) == field
    assert generate(tiny_channel, PROMPT, temperature=0, max_tokens=32).seen == natural.seen


def test_a_request_larger_than_a_message_may_be_is_refused_without_harm(
    tiny_channel: grpc.Channel, natural: Generation
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        generate(tiny_channel, "a" * 9_000_000)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    assert generate(tiny_channel, PROMPT, temperature=0, max_tokens=32).seen == natural.seen


def test_neutral_values_pass(tiny_channel: grpc.Channel, natural: Generation) -> None:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "stop": [], "stop_token_ids": []}
    neutral |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {3: 0.0}}
    neutral |= {"banned_token_ids": [], "allowed_token_ids": [], "bad_words": [], "bad_words_token_ids": []}
    neutral |= {"logprobs": False, "top_logprobs": 0, "n": 1}
    assert generate(tiny_channel, PROMPT, temperature=0, max_tokens=32, **neutral).seen == natural.seen


def test_a_request_id_is_taken_only_once(tiny_channel: grpc.Channel) -> None:
    generate(tiny_channel, PROMPT, temperature=0, max_tokens=4, request_id="taken-once")
    with pytest.raises(grpc.RpcError) as caught:
        generate(tiny_channel, "other", temperature=0, max_tokens=4, request_id="taken-once")
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]


def test_an_end_token_as_the_first_token(tiny_channel: grpc.Channel, natural: Generation) -> None:
    result = at_every_gamma(tiny_channel, temperature=0, max_tokens=32, stop_token_ids=[natural.ids[0]])
    assert result.usage[1] == 1
    assert result.speculation.rounds == 1


@pytest.mark.parametrize("gamma", [0, 5])
def test_token_by_token_each_has_a_response(same_channel: grpc.Channel, gamma: int) -> None:
    fields = {"max_tokens": 24, "temperature": 0.0, "num_speculative_tokens": gamma}
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(same_channel)
    name = f"one-by-one-{gamma}"
    calls = [
        request("def read(path):\n", request_id=name, token_by_token=True, **fields),
        request("def read(path):\n", **fields),
        api.GenerateRequest(request_id=name, token_offset=0, token_by_token=True),
    ]
    single, rounds, again = ([*stub.Generate(each, timeout=60)] for each in calls)
    whole = gather(rounds)
    for responses in (single, again):
        assert gather(responses).seen == whole.seen
        assert [len(response.tokens) for response in responses if response.tokens] == [1] * len(whole.ids)
    assert [response.text for response in single] == [token.text for response in rounds for token in response.tokens]
    assert sum(response.draft_tokens for response in single) == whole.speculation.draft_tokens
    assert (max(len(response.tokens) for response in rounds) == 1) == (gamma == 0)
