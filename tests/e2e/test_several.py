"""Several completions of one prompt in one call: each is what it would be alone; they end, fail and are resumed as requests."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest
import redis

from orchestrator.vocabulary import Vocabulary
from tandem.randomness import completion_seed
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc, sampling_pb2
from tests.support.generation import gather, generate, generate_several, request
from tests.support.services import MODELS, Stack

PROMPT = [47, 12, 300, 12, 47, 12, 9]
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
SAMPLED: dict[str, Any] = {"temperature": 1.2, "seed": 77, "acceptance_method": COUPLED, "max_tokens": 20}


@pytest.mark.parametrize("channel", ["same_channel", "tiny_channel", "random_draft_channel"])
def test_each_is_what_it_would_be_alone_at_every_gamma(channel: str, request: pytest.FixtureRequest) -> None:
    found: grpc.Channel = request.getfixturevalue(channel)
    fields = SAMPLED | {"presence_penalty": 0.5, "logprobs": True}
    plain = generate_several(found, PROMPT, 4, num_speculative_tokens=0, **fields)
    assert [each.start.seed for each in plain] == [completion_seed(77, index) for index in range(4)]
    assert plain[0].start.seed == 77
    assert len({tuple(each.ids) for each in plain}) == 4
    for gamma in (1, 2, 5, 8):
        several = generate_several(found, PROMPT, 4, num_speculative_tokens=gamma, **fields)
        assert [each.seen for each in several] == [each.seen for each in plain]
    for each in plain:
        alone = generate(found, PROMPT, num_speculative_tokens=5, **(fields | {"seed": each.start.seed}))
        assert alone.seen == each.seen


def test_greedy_completions_are_all_alike(tiny_channel: grpc.Channel) -> None:
    alone = generate(tiny_channel, PROMPT, temperature=0, max_tokens=12)
    assert all(
        each.seen == alone.seen for each in generate_several(tiny_channel, PROMPT, 16, temperature=0, max_tokens=12)
    )


def test_they_end_one_by_one(tiny_channel: grpc.Channel) -> None:
    lengths = [
        each.usage[1] for each in generate_several(tiny_channel, PROMPT, 6, stop_token_ids=range(5, 60), **SAMPLED)
    ]
    assert len(set(lengths)) > 1


def test_each_has_a_name_and_can_be_resumed_by_it(tiny_channel: grpc.Channel) -> None:
    several = generate_several(tiny_channel, PROMPT, 3, request_id="three", **SAMPLED)
    assert [each.start.request_id for each in several] == ["three", "three#1", "three#2"]
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(tiny_channel)
    for each in several:
        again = list(stub.Generate(api.GenerateRequest(request_id=each.start.request_id, token_offset=4), timeout=60))
        assert [token.token_id for response in again for token in response.tokens] == each.ids[4:]
    with pytest.raises(grpc.RpcError) as caught:
        generate_several(tiny_channel, PROMPT, 3, request_id="three", **SAMPLED)
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]


def test_a_name_that_is_taken_fails_all_and_leaves_nothing(tiny_stack: Stack, tiny_channel: grpc.Channel) -> None:
    """Two completions' names are those of an earlier request's, so the call fails; the third one's is free again."""
    generate_several(tiny_channel, PROMPT, 2, request_id="taken", **SAMPLED)
    with pytest.raises(grpc.RpcError) as caught:
        generate_several(
            tiny_channel, PROMPT, 3, request_id="taken", **(SAMPLED | {"max_tokens": 900, "ignore_eos": True})
        )
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS  # type: ignore[attr-defined]
    with redis.Redis.from_url(tiny_stack.redis_url) as store:
        deadline = time.monotonic() + 60
        while store.exists("tandem:{taken#2}:state"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    # Nothing goes on in the background: a place for every one of these is free.
    generate_several(tiny_channel, PROMPT, 16, temperature=0, max_tokens=4)


def test_a_caller_that_leaves_ends_them_all(tiny_channel: grpc.Channel) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(tiny_channel)
    fields = {"max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
    for _ in range(4):  # 64 in all, twice the places
        call = stub.Generate(request(PROMPT, n=16, **fields))
        next(call)
        call.cancel()
    assert generate(tiny_channel, PROMPT, temperature=0, max_tokens=4).usage[1] == 4


def test_the_prompt_is_reported_on_request(tiny_channel: grpc.Channel) -> None:
    vocabulary = Vocabulary.load(str(MODELS / "tiny-target"), "")
    text = "def f(x):"
    for each in generate_several(tiny_channel, text, 2, echo=True, **SAMPLED):
        assert list(each.start.prompt_token_ids) == vocabulary.encode_text(text)
        assert each.start.prompt_text == text
    assert not generate(tiny_channel, text, temperature=0, max_tokens=2).start.prompt_token_ids
    gather(orchestrator_pb2_grpc.OrchestratorServiceStub(tiny_channel).Generate(request(text, echo=True, max_tokens=1)))
