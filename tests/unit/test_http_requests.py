"""What an HTTP caller's JSON becomes: every field in its place, and what isn't honoured refused by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.errors import InvalidArgument, Overloaded
from orchestrator.http.failures import http_failure
from orchestrator.http.inquiry import Inquiry, Kind, read_inquiry
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

CHAT = {"messages": [{"role": "user", "content": "Why?"}]}


def completion(**fields: Any) -> Inquiry:
    return read_inquiry("completion", {"prompt": "p", **fields}, "id")


def chat(**fields: Any) -> Inquiry:
    return read_inquiry("chat", {**CHAT, **fields}, "id")


def test_every_field_of_the_contract_can_be_set() -> None:
    found = completion(
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        acceptance_method="coupled",
        num_speculative_tokens=0,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        include_stop_str_in_output=True,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={"5": -100, "6": 1.5},
        banned_token_ids=[1],
        allowed_token_ids=[2, 3],
        bad_words=["x"],
        bad_words_token_ids=[[1, 2], [3]],
        cache_salt="s",
        adaptive_speculative_tokens=False,
        logprobs=3,
        logprobs_mode="processed",
        structured_outputs={"regex": "[ab]+"},
        n=2,
        best_of=2,
        skip_special_tokens=False,
        token_by_token=True,
    ).request
    wanted = api.GenerateRequest(
        request_id="id",
        text="p",
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        acceptance_method=sampling_pb2.ACCEPTANCE_METHOD_COUPLED,
        num_speculative_tokens=0,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        include_stop_str_in_output=True,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={5: -100, 6: 1.5},
        banned_token_ids=[1],
        allowed_token_ids=[2, 3],
        bad_words=["x"],
        bad_words_token_ids=[sampling_pb2.TokenSequence(ids=[1, 2]), sampling_pb2.TokenSequence(ids=[3])],
        cache_salt="s",
        adaptive_speculative_tokens=False,
        logprobs=True,
        top_logprobs=3,
        logprobs_mode=sampling_pb2.LOGPROBS_MODE_PROCESSED,
        structured_output={"regex": "[ab]+"},
        n=2,
        skip_special_tokens=False,
        token_by_token=True,
    )
    assert found == wanted
    # A field that the contract gains must get its place here too, or be left out on purpose.
    unset = {field.name for field in api.GenerateRequest.DESCRIPTOR.fields} - {
        field.name for field, _ in wanted.ListFields()
    }
    assert unset == {"token_ids", "messages", "token_offset", "echo"}
    assert completion(echo=True).request.echo


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    for found in (chat(logprobs=True, top_logprobs=2).request, completion(logprobs=2).request):
        assert (found.logprobs, found.top_logprobs) == (True, 2)
    assert completion(logprobs=0).request.logprobs
    assert not chat(logprobs=False, top_logprobs=0).request.logprobs
    assert completion(logprobs=99).name_for_caller("top_logprobs") == "logprobs"
    assert chat().name_for_caller("top_logprobs") == "top_logprobs"


def test_what_is_left_out_stays_the_servers() -> None:
    assert chat().request == api.GenerateRequest(
        request_id="id", messages=api.ChatMessages(messages=[api.ChatMessage(role="user", content="Why?")])
    )
    assert completion().request == api.GenerateRequest(request_id="id", text="p", max_tokens=16)


@pytest.mark.parametrize(
    ("prompt", "request_"),
    [
        (["p"], api.GenerateRequest(text="p")),
        ([5, 6], api.GenerateRequest(token_ids=api.TokenIds(ids=[5, 6]))),
        ([[5, 6]], api.GenerateRequest(token_ids=api.TokenIds(ids=[5, 6]))),
        ([], api.GenerateRequest(token_ids=api.TokenIds())),
    ],
)
def test_forms_of_a_prompt(prompt: Any, request_: api.GenerateRequest) -> None:
    found = read_inquiry("completion", {"prompt": prompt, "max_tokens": 1}, "").request
    found.ClearField("max_tokens")
    assert found == request_


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True},
                }
            },
            {"json_schema": '{"a": 1}'},
        ),
        ({"structured_outputs": {"json": {"a": 1}}}, {"json_schema": '{"a": 1}'}),
        ({"structured_outputs": {"json": "{}"}}, {"json_schema": "{}"}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"structured_outputs": {"choice": ["a", 'b"']}}, {"grammar": 'start: "a" | "b\\""'}),
    ],
)
def test_forms_of_the_output(fields: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    for found in (completion(**fields), chat(**fields)):
        assert found.request.HasField("structured_output") == (wanted is not None)
        assert found.request.structured_output == sampling_pb2.StructuredOutput(**(wanted or {}))
        assert found.name_for_caller("structured_output.regex") == next(iter(fields))


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    answer = {"role": "assistant", "content": "So.", "refusal": None, "tool_calls": None, "annotations": []}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    found = read_inquiry("chat", {"messages": [{"role": "developer", "content": "d"}, answer, parts]}, "").request
    assert [(message.role, message.content) for message in found.messages.messages] == [
        ("system", "d"),
        ("assistant", "So."),
        ("user", "ab"),
    ]


def test_both_names_of_the_limit() -> None:
    assert chat(max_completion_tokens=5, max_tokens=5).request.max_tokens == 5
    assert chat(max_tokens=6).name_for_caller("max_tokens") == "max_tokens"
    assert chat(max_completion_tokens=6).name_for_caller("max_tokens") == "max_completion_tokens"
    with pytest.raises(InvalidArgument) as caught:
        chat(max_completion_tokens=5, max_tokens=6)
    assert caught.value.field == "max_completion_tokens"


NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "stop": None,
    "top_k": -1,
    "seed": None,
    "logit_bias": {},
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "min_p": 0,
    "user": "somebody",
    "metadata": {},
    "store": False,
    "service_tier": "auto",
    "stream": False,
    "stream_options": None,
    "skip_special_tokens": True,
    "whatever": None,
}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_values_that_ask_for_nothing_pass(kind: Kind) -> None:
    own = (
        {
            **CHAT,
            "logprobs": False,
            "top_logprobs": 0,
            "tools": [],
            "tool_choice": "auto",
            "response_format": {"type": "text"},
            "parallel_tool_calls": True,
        }
        if kind == "chat"
        else {"prompt": "p", "echo": False, "suffix": "", "logprobs": None}
    )
    request = read_inquiry(kind, {**own, **NEUTRAL}, "").request
    assert request.top_k == 0
    assert not request.logit_bias


REFUSED: list[tuple[Kind, dict[str, Any], str]] = [
    ("completion", {"n": 2.5}, "n"),
    ("completion", {"n": True}, "n"),
    ("completion", {"n": 4_000_000_000}, "n"),
    ("chat", {"n": 17}, "n"),
    ("completion", {"best_of": 3}, "best_of"),
    ("completion", {"echo": 1}, "echo"),
    ("completion", {"echo": True, "logprobs": 1}, "logprobs"),
    ("completion", {"n": 2, "best_of": 3}, "best_of"),
    ("chat", {"echo": True}, "echo"),
    ("completion", {"suffix": "x"}, "suffix"),
    ("completion", {"logprobs": True}, "logprobs"),
    ("completion", {"top_logprobs": 3}, "top_logprobs"),
    ("completion", {"logprobs_mode": "cooked"}, "logprobs_mode"),
    ("completion", {"prompt": None}, "prompt"),
    ("completion", {"prompt": 5}, "prompt"),
    ("completion", {"prompt": ["a", "b"]}, "prompt"),
    ("completion", {"prompt": [1, -1]}, "prompt"),
    ("completion", {"prompt": [2**32]}, "prompt"),
    ("completion", {"prompt": [1.5]}, "prompt"),
    ("completion", {"prompt": "\ud800"}, "prompt"),
    ("completion", {"stop": [5]}, "stop"),
    ("completion", {"seed": -1}, "seed"),
    ("completion", {"seed": 2**64}, "seed"),
    ("completion", {"temperature": "0"}, "temperature"),
    ("completion", {"temperature": True}, "temperature"),
    ("completion", {"temperature": 10**400}, "temperature"),
    ("completion", {"max_tokens": -1}, "max_tokens"),
    ("completion", {"max_tokens": 1.5}, "max_tokens"),
    ("completion", {"top_k": -2}, "top_k"),
    ("completion", {"ignore_eos": 1}, "ignore_eos"),
    ("completion", {"acceptance_method": "greedy"}, "acceptance_method"),
    ("completion", {"acceptance_method": []}, "acceptance_method"),
    ("completion", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("completion", {"logit_bias": {"1": "2"}}, "logit_bias"),
    ("completion", {"logit_bias": [1]}, "logit_bias"),
    ("completion", {"bad_words_token_ids": [1]}, "bad_words_token_ids"),
    ("completion", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completion", {"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
    ("completion", {"use_beam_search": True}, "use_beam_search"),
    ("completion", {"temprature": 0.5}, "temprature"),
    ("completion", {"messages": []}, "messages"),
    ("completion", {"token_offset": 3}, "token_offset"),
    ("chat", {"logprobs": 3}, "logprobs"),
    ("chat", {"tools": [{"type": "function"}]}, "tools"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"functions": [{"name": "f"}]}, "functions"),
    ("chat", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("completion", {"prompt_logprobs": 1}, "prompt_logprobs"),
    ("completion", {"guided_regex": "a"}, "guided_regex"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format.type"),
    ("chat", {"response_format": {}}, "response_format.type"),
    ("chat", {"response_format": {"type": "text", "regex": "a"}}, "response_format.regex"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema"),
    ("chat", {"structured_outputs": {}}, "structured_outputs"),
    ("chat", {"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ("chat", {"structured_outputs": {"ebnf": "a"}}, "structured_outputs.ebnf"),
    ("chat", {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ("chat", {"structured_outputs": {"json": {"a": "\ud800"}}}, "structured_outputs.json"),
    ("chat", {"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ("chat", {"reasoning_effort": "high"}, "reasoning_effort"),
    ("chat", {"prompt": "p"}, "prompt"),
    ("chat", {"messages": "p"}, "messages"),
    ("chat", {"messages": ["p"]}, "messages[0]"),
    ("chat", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ("chat", {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("kind", "fields", "name"), REFUSED)
def test_what_is_not_honoured_is_refused_by_name(kind: Kind, fields: dict[str, Any], name: str) -> None:
    good = CHAT if kind == "chat" else {"prompt": "p"}
    read_inquiry(kind, dict(good), "")
    with pytest.raises(InvalidArgument) as caught:
        read_inquiry(kind, {**good, **fields}, "")
    # Names inside a list are those of the list's element.
    assert caught.value.field == name


def test_an_error_is_small_and_does_not_quote_its_request() -> None:
    with pytest.raises(InvalidArgument) as caught:
        completion(**{"\x1b" + "n" * 5000: 1})
    failure = http_failure(caught.value)
    body = json.dumps(failure.body())
    assert failure.status == 400
    assert len(body) < 1000
    assert "\\u001b" not in body


def test_fields_are_told_under_the_callers_names() -> None:
    found = http_failure(InvalidArgument("text", "is long"), completion().name_for_caller)
    assert found.body()["error"] == {
        "message": "prompt: is long",
        "type": "invalid_request_error",
        "param": "prompt",
        "code": "invalid_value",
    }


def test_when_to_come_back() -> None:
    failure = http_failure(Overloaded("full", "QUEUE_FULL", 0.25))
    assert failure.status == 429
    assert failure.headers() == {"retry-after": "1", "retry-after-ms": "250"}
    assert failure.body()["error"]["code"] == "queue_full"
