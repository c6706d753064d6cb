"""The synchronous client: what it sends, what it gives back, and how it fails."""

import time

import grpc
import numpy as np
import pytest
from google.rpc import code_pb2, error_details_pb2

from tandem.client import (
    AlreadyExistsError,
    FieldViolation,
    FinishReason,
    GenerationOptions,
    InvalidRequestError,
    LogprobsMode,
    Message,
    Method,
    OverloadedError,
    ProtocolError,
    SamplingChange,
    StructuredOutput,
    TandemClient,
    TokenKind,
    UnavailableError,
    Usage,
    build_request,
)
from tandem.client.messages import build_update
from tandem.v1 import orchestrator_pb2 as pb
from tandem.v1 import sampling_pb2


def test_options_left_out_stay_the_servers():
    request = build_request("text", GenerationOptions(), "")
    assert request == pb.GenerateRequest(text="text")


def test_zero_is_sent_and_not_taken_for_unset():
    request = build_request("", GenerationOptions(temperature=0.0, num_speculative_tokens=0, top_k=0, seed=0), "")
    for field in ("temperature", "num_speculative_tokens", "top_k", "seed"):
        assert request.HasField(field)
    assert request.WhichOneof("prompt") == "text"


def test_every_kind_of_prompt():
    options = GenerationOptions(method=Method.COUPLED, stop=("a", "b"), stop_token_ids=(3,), ignore_eos=True)
    chat = build_request([Message("system", "s"), Message("user", "u")], options, "id")
    assert [(message.role, message.content) for message in chat.messages.messages] == [("system", "s"), ("user", "u")]
    assert chat.acceptance_method == sampling_pb2.ACCEPTANCE_METHOD_COUPLED
    assert (list(chat.stop), list(chat.stop_token_ids), chat.ignore_eos) == (["a", "b"], [3], True)
    assert list(build_request([1, 2], GenerationOptions(), "").token_ids.ids) == [1, 2]


def test_adjustments_are_sent():
    options = GenerationOptions(
        repetition_penalty=1.25,
        presence_penalty=0.0,
        logit_bias={5: -1.5},
        banned_token_ids=(1,),
        allowed_token_ids=(2, 3),
        bad_words=("x",),
        bad_words_token_ids=((4, 5), (6,)),
        logprobs=True,
        top_logprobs=2,
        logprobs_mode=LogprobsMode.PROCESSED,
        structured_output=StructuredOutput(regex="a"),
    )
    request = build_request("text", options, "")
    assert (request.logprobs, request.top_logprobs) == (True, 2)
    assert request.structured_output == sampling_pb2.StructuredOutput(regex="a")
    assert request.logprobs_mode == sampling_pb2.LOGPROBS_MODE_PROCESSED
    assert (request.repetition_penalty, dict(request.logit_bias)) == (1.25, {5: -1.5})
    assert (list(request.banned_token_ids), list(request.allowed_token_ids)) == ([1], [2, 3])
    assert (list(request.bad_words), [list(word.ids) for word in request.bad_words_token_ids]) == (["x"], [[4, 5], [6]])


def test_chunks_are_plain_values(orchestrator):
    with TandemClient(orchestrator.address) as client:
        chunks = list(client.generate("hi"))
    assert chunks[0].start.seed == 7
    assert [token.kind for chunk in chunks for token in chunk.tokens] == [
        TokenKind.ACCEPTED,
        TokenKind.ACCEPTED,
        TokenKind.BONUS,
        TokenKind.ACCEPTED,
        TokenKind.RECOVERED,
    ]
    assert chunks[-1].finish.reason is FinishReason.STOP
    assert chunks[-1].finish.speculation.accepted_tokens_per_position == (2, 1)


def test_refused_fields_are_named(orchestrator):
    orchestrator.fail_invalid()
    with TandemClient(orchestrator.address) as client, pytest.raises(InvalidRequestError) as caught:
        next(client.generate("hi"))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.reason == "BAD_FIELD"
    assert caught.value.violations == (FieldViolation("top_p", "must be in (0, 1]"),)


def test_a_request_that_is_known_already_has_its_own_error(orchestrator):
    orchestrator.fail(code_pb2.ALREADY_EXISTS, "request_id belongs to another request")
    with TandemClient(orchestrator.address) as client, pytest.raises(AlreadyExistsError):
        next(client.generate("hi", request_id="r"))


def test_what_the_last_of_several_completions_says(orchestrator):
    finish = orchestrator.responses[-1].finish
    finish.total_usage.MergeFrom(pb.Usage(prompt_tokens=5, completion_tokens=15))
    finish.speculation.expected_speedup = 1.5
    with TandemClient(orchestrator.address) as client:
        *_, last = client.generate("hi")
    assert last.finish.total_usage == Usage(5, 15)
    assert last.finish.speculation.expected_speedup == 1.5


def test_an_overloaded_server_says_when_to_come_back(orchestrator):
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1500)
    orchestrator.fail(code_pb2.RESOURCE_EXHAUSTED, "too many requests", retry)
    with TandemClient(orchestrator.address) as client, pytest.raises(OverloadedError) as caught:
        next(client.generate("hi"))
    assert caught.value.retry_after_seconds == 1.5


def test_nobody_listens(free_port):
    with TandemClient(f"127.0.0.1:{free_port()}") as client, pytest.raises(UnavailableError):
        next(client.generate("hi"))


def test_a_stream_without_an_end_is_not_a_success(orchestrator):
    orchestrator.responses = orchestrator.responses[:-1]
    with TandemClient(orchestrator.address) as client, pytest.raises(ProtocolError):
        list(client.generate("hi"))


@pytest.mark.parametrize(
    "prompt", [[1, "2"], [Message("user", "a"), {"role": "user"}], [Message("user", "a"), 3], [1.5]]
)
def test_a_prompt_of_something_else_is_refused(prompt):
    with pytest.raises(TypeError):
        build_request(prompt, GenerationOptions(), "")


@pytest.mark.parametrize(
    "build",
    [
        lambda: build_request("hi", GenerationOptions(stop="END"), ""),
        lambda: build_request("hi", GenerationOptions(stop_token_ids=b"END"), ""),
        lambda: build_update("id", SamplingChange(bad_words="foo")),
    ],
)
def test_text_is_no_sequence_of_texts(build):
    with pytest.raises(TypeError, match="a sequence is expected"):
        build()


def test_leaving_the_generation_ends_the_call(orchestrator):
    orchestrator.pause_seconds = 60
    with TandemClient(orchestrator.address) as client:
        with client.generate("hi") as generation:
            assert next(generation).text == "The sky is"
        deadline = time.monotonic() + 60
        while not orchestrator.cancelled and time.monotonic() < deadline:
            time.sleep(0.02)
        assert orchestrator.cancelled == 1


def test_token_ids_may_be_of_any_integer_type():
    assert build_request(np.array([5, 7]), GenerationOptions(), "").token_ids.ids == [5, 7]
