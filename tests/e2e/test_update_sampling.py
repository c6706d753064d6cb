"""A running request's sampling is changed: up to the boundary that the answer reports its tokens are those of the former sampling,
from there on those of a fresh request under the new one, whatever the blocks are and whatever the draft is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch

from orchestrator.vocabulary import Vocabulary
from tandem.client import (
    FinishedError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    SamplingChange,
    TandemClient,
)
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc, sampling_pb2
from tests.support.generation import Generation, gather, generate, generate_all, paced_channel, request
from tests.support.reference import Reference
from tests.support.services import MODELS, Stack

GAMMAS = (0, 1, 2, 5, 8)
PAIRS = ("same_channel", "tiny_channel", "random_draft_channel")
PROMPT = [47, 12, 300, 12, 47, 12, 9]
TOKENS = 64
"""A paced request is never further ahead than some rounds of nine tokens."""
ENDLESS = {"max_tokens": TOKENS, "ignore_eos": True}
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "seed": 5, "acceptance_method": COUPLED},
}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "greedy": [
        {"repetition_penalty": 1.6},
        {"logit_bias": {40: 4.0, 41: 3.5}, "allowed_token_ids": list(range(30, 90)), "banned_token_ids": [44, 45]},
        {"bad_words_token_ids": [sampling_pb2.TokenSequence(ids=ids) for ids in ([62], [32, 224])]},
        {"repetition_penalty": 1.3, "num_speculative_tokens": 2},
        {"allowed_token_ids": list(range(40, 300, 3)), "adaptive_speculative_tokens": True},
    ],
    "coupled": [
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.0},
        {"repetition_penalty": 1.6, "logit_bias": {40: 4.0, 41: 3.5}},
        {"temperature": 1.5, "num_speculative_tokens": 1},
        {"banned_token_ids": list(range(0, 512, 2)), "num_speculative_tokens": 0},
    ],
}
"""One for each gamma."""


@dataclass
class Changed:
    """A request in whose midst something was changed."""

    whole: Generation
    at: int

    @property
    def before(self) -> list[int]:
        return self.whole.ids[: self.at]

    @property
    def after(self) -> list[int]:
        return self.whole.ids[self.at :]


def stub(channel: grpc.Channel) -> orchestrator_pb2_grpc.OrchestratorServiceStub:
    return orchestrator_pb2_grpc.OrchestratorServiceStub(channel)


def update(request_id: str, **fields: Any) -> api.UpdateSamplingRequest:
    """The same names as those of a GenerateRequest."""
    if "logit_bias" in fields:
        fields["logit_bias"] = api.LogitBias(biases=fields["logit_bias"])
    for name in {"allowed_token_ids", "banned_token_ids"} & fields.keys():
        fields[name] = api.TokenIds(ids=fields[name])
    if "bad_words_token_ids" in fields:
        fields["bad_words"] = api.BadWords(token_ids=fields.pop("bad_words_token_ids"))
    return api.UpdateSamplingRequest(request_id=request_id, **fields)


@dataclass
class Case:
    """A request, and what is to be changed in its midst."""

    name: str
    fields: dict[str, Any]
    change: dict[str, Any]


def change_midway(paced: grpc.Channel, cases: Sequence[Case]) -> list[Changed]:
    """All at the same time, so that a batch has rounds before a change, after one, and of other requests."""
    calls = [
        stub(paced).Generate(request(PROMPT, request_id=case.name, **ENDLESS | case.fields), timeout=120)
        for case in cases
    ]
    received = [[next(call), next(call)] for call in calls]
    answers = [stub(paced).UpdateSampling(update(case.name, **case.change), timeout=60) for case in cases]
    found = []
    for call, responses, answer in zip(calls, received, answers, strict=True):
        responses += call
        whole = gather(responses)
        assert answer.config_version == 1
        assert 1 < answer.completion_tokens < TOKENS
        # A round that was dropped is in neither.
        assert sum(response.draft_tokens for response in responses) == whole.speculation.draft_tokens
        found.append(Changed(whole, answer.completion_tokens))
    return found


@pytest.fixture(params=PAIRS)
def channel(request: pytest.FixtureRequest) -> grpc.Channel:
    found: grpc.Channel = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def paced(channel: grpc.Channel) -> Iterator[grpc.Channel]:
    address = channel._channel.target().decode()  # type: ignore[attr-defined]
    with paced_channel(address) as opened:
        yield opened


@pytest.mark.parametrize("mode", MODES)
def test_from_the_boundary_on_the_tokens_are_those_of_the_new_sampling(
    channel: grpc.Channel, paced: grpc.Channel, mode: str
) -> None:
    fields = MODES[mode]
    plain = generate(channel, PROMPT, **ENDLESS, **fields, num_speculative_tokens=0).ids
    cases = [
        Case(f"{mode}-{gamma}", fields | {"num_speculative_tokens": gamma}, change)
        for gamma, change in zip(GAMMAS, CHANGES[mode], strict=True)
    ]
    found = change_midway(paced, cases)
    fresh = [
        request(
            [*PROMPT, *each.before],
            **fields | case.change | {"num_speculative_tokens": 0},
            max_tokens=TOKENS - each.at,
            ignore_eos=True,
        )
        for case, each in zip(cases, found, strict=True)
    ]
    for case, each, expected in zip(cases, found, generate_all(channel, fresh), strict=True):
        assert each.before == plain[: each.at], case
        assert each.after == expected.ids, case
        if TOKENS - each.at >= 8:
            assert each.after != plain[each.at :], case
        assert each.whole.usage == (len(PROMPT), TOKENS)
        assert each.whole.speculation.degraded_rounds == 0


def test_penalties_count_what_came_before_the_change(tiny_stack: Stack, tiny_channel: grpc.Channel) -> None:
    """The output, and not the prompt, is what presence and frequency are about; a fresh request would have another prompt."""
    reference = Reference(MODELS / "tiny-target")
    change = {"presence_penalty": 1.5, "frequency_penalty": 0.4}
    cases = [
        Case(f"penalties-{gamma}", {"temperature": 0.0, "num_speculative_tokens": gamma}, change) for gamma in (0, 5)
    ]
    with paced_channel(tiny_stack.orchestrator.address) as paced:
        for found in change_midway(paced, cases):
            ids = list(found.before)
            for _ in range(10):
                logits = reference.logits([*PROMPT, *ids])
                counts = torch.bincount(torch.tensor(ids), minlength=logits.numel())
                ids.append(int((logits - 0.4 * counts - 1.5 * (counts > 0)).argmax()))
            assert found.whole.ids[: len(ids)] == ids


def test_changes_follow_one_another_and_an_unset_field_stays(tiny_channel: grpc.Channel, tiny_stack: Stack) -> None:
    """The last one wins where both set a field; asking again for what is in force changes nothing and says so."""
    with paced_channel(tiny_stack.orchestrator.address) as paced:
        call = stub(paced).Generate(
            request(PROMPT, request_id="twice", temperature=0.0, num_speculative_tokens=5, **ENDLESS), timeout=120
        )
        received = [next(call)]
        first = stub(paced).UpdateSampling(update("twice", logit_bias={40: 3.0}, repetition_penalty=1.4))
        again = stub(paced).UpdateSampling(update("twice", repetition_penalty=1.4, logit_bias={40: 3.0}))
        assert again == first
        while sum(len(response.tokens) for response in received) <= first.completion_tokens:
            received.append(next(call))
        second = stub(paced).UpdateSampling(update("twice", logit_bias={}, num_speculative_tokens=1))
        # A call that asks for nothing tells what is in force.
        assert stub(paced).UpdateSampling(update("twice")) == second
        whole = gather([*received, *call])
    assert (first.config_version, second.config_version) == (1, 2)
    assert first.completion_tokens <= second.completion_tokens < TOKENS
    rest = generate(
        tiny_channel,
        [*PROMPT, *whole.ids[: second.completion_tokens]],
        temperature=0.0,
        repetition_penalty=1.4,
        max_tokens=TOKENS - second.completion_tokens,
        ignore_eos=True,
        num_speculative_tokens=0,
    )
    assert whole.ids[second.completion_tokens :] == rest.ids


def test_one_of_several_completions_is_changed_alone(same_stack: Stack, same_channel: grpc.Channel) -> None:
    fields = {"temperature": 1.0, "seed": 9, "acceptance_method": COUPLED, "num_speculative_tokens": 2, **ENDLESS}
    undisturbed = generate(same_channel, PROMPT, **fields | {"n": 1})
    with paced_channel(same_stack.orchestrator.address) as paced:
        call = stub(paced).Generate(request(PROMPT, request_id="siblings", n=2, **fields), timeout=120)
        received = [next(call)]
        while {response.index for response in received} != {0, 1}:
            received.append(next(call))
        answer = stub(paced).UpdateSampling(update("siblings#1", allowed_token_ids=[50, 51]))
        received += call
    first, second = (gather(each for each in received if each.index == index) for index in (0, 1))
    assert first.ids == undisturbed.ids
    assert 0 < answer.completion_tokens < TOKENS
    assert set(second.ids[answer.completion_tokens :]) <= {50, 51}
    assert not set(second.ids[: answer.completion_tokens]) <= {50, 51}


def test_a_stop_string_ends_the_text_behind_the_boundary(tiny_stack: Stack, tiny_channel: grpc.Channel) -> None:
    """The ends are as they were, and nothing that was dropped has left a trace in what is held back for them."""
    vocabulary = Vocabulary.load(str(MODELS / "tiny-target"), "")
    plain = generate(tiny_channel, PROMPT, temperature=0.0, **ENDLESS).text
    texts = {token_id: vocabulary.decode([token_id]) for token_id in range(300)}
    token_id = next(each for each, text in texts.items() if text.isascii() and text.isalpha() and text not in plain)
    stops = [texts[token_id] * 3, plain[:9] + "?", plain[20:29] + "?", plain[40:49] + "?"]
    fields = {"temperature": 0.0, "stop": stops}
    cases = [
        Case(f"stopped-{gamma}", fields | {"num_speculative_tokens": gamma}, {"allowed_token_ids": [token_id]})
        for gamma in GAMMAS
    ]
    with paced_channel(tiny_stack.orchestrator.address) as paced:
        for found in change_midway(paced, cases):
            assert found.after == [token_id] * 3
            assert found.whole.text == vocabulary.decode(found.before)
            assert found.whole.reason == api.FINISH_REASON_STOP


def test_a_refused_change_changes_nothing(tiny_stack: Stack, tiny_channel: grpc.Channel) -> None:
    """Each field has Generate's own range and name; what an update can't set is no field of it."""
    undisturbed = generate(tiny_channel, PROMPT, temperature=0.0, num_speculative_tokens=2, **ENDLESS)
    with (
        paced_channel(tiny_stack.orchestrator.address) as paced,
        TandemClient(tiny_stack.orchestrator.address) as client,
    ):
        call = stub(paced).Generate(
            request(PROMPT, request_id="steady", temperature=0.0, num_speculative_tokens=2, **ENDLESS), timeout=120
        )
        received = [next(call)]
        for field, value in {
            "temperature": float("nan"),
            "top_p": 0.0,
            "logit_bias": {512: 1.0},
            "banned_token_ids": [512],
            "num_speculative_tokens": 4_000,
            "bad_words": [" "],
        }.items():
            with pytest.raises(InvalidRequestError) as caught:
                client.update_sampling("steady", SamplingChange(**{field: value}))  # type: ignore[arg-type]
            assert [each.field for each in caught.value.violations] == [field]
        for unknown in ("nobody", "steady#1", "#"):
            with pytest.raises(NotFoundError):
                client.update_sampling(unknown, SamplingChange(temperature=0.5))
        with pytest.raises(InvalidRequestError):
            client.update_sampling("", SamplingChange(temperature=0.5))
        assert gather([*received, *call]).seen == undisturbed.seen
        with pytest.raises(FinishedError):
            client.update_sampling("steady", SamplingChange(temperature=0.5))
    with pytest.raises(TypeError):
        SamplingChange(seed=3)  # type: ignore[call-arg]


def test_a_request_that_is_changed_in_a_loop_comes_to_its_end(tiny_stack: Stack) -> None:
    """A change takes less than a round, and would drop it each time."""
    address = tiny_stack.orchestrator.address
    sent = request(PROMPT, request_id="restless", temperature=1.0, num_speculative_tokens=2, **ENDLESS)
    with paced_channel(address) as paced, ThreadPoolExecutor(1) as reader, TandemClient(address) as client:
        call = stub(paced).Generate(sent, timeout=60)
        received = [next(call)]
        in_force = client.update_sampling("restless", SamplingChange(temperature=0.6))
        rest = reader.submit(list, call)
        for temperature in itertools.cycle((0.9, 0.6)):
            try:
                in_force = client.update_sampling("restless", SamplingChange(temperature=temperature))
            except OverloadedError as early:
                assert (early.reason, early.retry_after_seconds) == ("CHANGED_TOO_SOON", 0.1)  # noqa: PT017
            except FinishedError:
                break
        whole = gather([*received, *rest.result()])
    assert whole.usage == (len(PROMPT), TOKENS)
    assert 1 <= in_force.config_version <= whole.speculation.rounds + 1
