"""Output of a given form: it is of that form, at every gamma the same, with a draft that is the target, a real one and a
random one, greedily and COUPLED with a seed; and greedy output is what the target says by itself among the tokens that the form
allows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from scipy.stats import chisquare
from transformers import AutoTokenizer

from orchestrator.completion import FinishReason
from tandem.v1 import orchestrator_pb2_grpc, sampling_pb2
from tests.support.channels import open_channel
from tests.support.generation import gather, generate_all, request
from tests.support.reference import Reference
from tests.support.services import MODELS, running_stack

GAMMAS = (0, 1, 2, 5, 8)
PAIRS = ("same_channel", "tiny_channel", "random_draft_channel")
PROMPT = [47, 12, 300, 12, 47, 12, 9]
END = 0
TOKENS = 40
COUPLED = sampling_pb2.ACCEPTANCE_METHOD_COUPLED
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "top_k": 50, "seed": 5, "acceptance_method": COUPLED},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["def", "class", "import"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = r"[a-z]{2,6}\([0-9]{1,3}\);( [A-Z]{2})?"
GRAMMAR = 'start: item ("," item){2,4}\nitem: /[a-z]{1,4}/ "=" /[0-9]{1,2}/'
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": json.dumps(SCHEMA)},
    "json_object": {"json_object": True},
    "regex": {"regex": REGEX},
    "grammar": {"grammar": GRAMMAR},
}


def form(name: str) -> sampling_pb2.StructuredOutput:
    return sampling_pb2.StructuredOutput(**FORMS[name])


def is_of_form(name: str, text: str) -> bool:
    if name == "json_object":
        return isinstance(json.loads(text), dict)
    if name == "json_schema":
        value = json.loads(text)
        return value["kind"] in SCHEMA["properties"]["kind"]["enum"] and 0 <= value["size"] <= 99 and len(value) == 2  # type: ignore[index]
    item = r"[a-z]{1,4}=[0-9]{1,2}"
    return re.fullmatch(REGEX if name == "regex" else f"{item}(,{item}){{2,4}}", text) is not None


@pytest.fixture(params=PAIRS)
def channel(request: pytest.FixtureRequest) -> grpc.Channel:
    found: grpc.Channel = request.getfixturevalue(request.param)
    return found


def at_every_gamma(channel: grpc.Channel, names: tuple[str, ...], mode: str) -> Iterator[tuple[str, list[Any]]]:
    """All requests at the same time, so that forms differ within a batch."""
    requests = [
        request(PROMPT, num_speculative_tokens=gamma, max_tokens=TOKENS, structured_output=form(name), **MODES[mode])
        for name in names
        for gamma in GAMMAS
    ]
    results = generate_all(channel, requests)
    for index, name in enumerate(names):
        yield name, results[index * len(GAMMAS) :][: len(GAMMAS)]


@pytest.mark.parametrize("mode", MODES)
def test_output_is_of_its_form_and_the_same_at_every_gamma(channel: grpc.Channel, mode: str) -> None:
    ended = drafted = 0
    for name, (plain, *others) in at_every_gamma(channel, tuple(FORMS), mode):
        for gamma, other in zip(GAMMAS[1:], others, strict=True):
            assert other.seen == plain.seen, f"{name}, gamma {gamma}"
            drafted += other.speculation.draft_tokens
        if plain.reason == FinishReason.STOP:
            ended += 1
            assert plain.ids[-1] == END
            assert is_of_form(name, plain.text), plain.text
        else:
            assert len(plain.ids) == TOKENS
            assert END not in plain.ids
    assert ended >= 3  # an object may go on for long
    assert drafted > 0


def test_a_greedy_draft_that_is_the_target_is_always_accepted(same_channel: grpc.Channel) -> None:
    """The draft draws from the tokens that the form allows, too."""
    for name, results in at_every_gamma(same_channel, tuple(FORMS), "greedy"):
        for result in results:
            assert result.speculation.accepted_tokens == result.speculation.draft_tokens, name


def law(reference: Reference, matcher: LLMatcher, output: list[int]) -> dict[int, float]:
    """What may follow, by a matcher of llguidance that only ever goes forward, with the model's own weights."""
    for token in output:
        assert matcher.consume_token(token)
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
    ids = np.flatnonzero(bits)
    weights = np.exp(np.array(reference.logprobs([*PROMPT, *output])[-1])[ids])
    return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


@pytest.fixture(scope="module")
def matcher() -> Callable[[str], LLMatcher]:
    tokenizer = from_tokenizer(AutoTokenizer.from_pretrained(MODELS / "tiny-target"))
    return lambda regex: LLMatcher(tokenizer, LLMatcher.grammar_from_regex(regex))


def test_greedy_output_is_the_likeliest_allowed_token_each_time(
    tiny_channel: grpc.Channel, matcher: Callable[[str], LLMatcher]
) -> None:
    reference = Reference(MODELS / "tiny-target")
    ((_, results),) = at_every_gamma(tiny_channel, ("regex",), "greedy")
    for place, token in enumerate(results[0].ids):
        found = law(reference, matcher(REGEX), results[0].ids[:place])
        assert token == max(found, key=found.__getitem__)
    assert [result.ids for result in results] == [results[0].ids] * len(GAMMAS)


def test_sampled_output_has_the_targets_law_among_what_is_allowed(
    tiny_channel: grpc.Channel, matcher: Callable[[str], LLMatcher]
) -> None:
    """REJECTION, the first two tokens of blocks of three: against the product of the two rows' laws."""
    reference, regex = Reference(MODELS / "tiny-target"), "[a-c][e-h]z"
    wanted = {
        (first, second): p * q
        for first, p in law(reference, matcher(regex), []).items()
        for second, q in law(reference, matcher(regex), [first]).items()
    }
    fields = {"temperature": 1.0, "max_tokens": 8, "num_speculative_tokens": 3}
    form_ = sampling_pb2.StructuredOutput(regex=regex)
    requests = [request(PROMPT, seed=seed, structured_output=form_, **fields) for seed in range(300)]
    found = [
        tuple(result.ids[:2])
        for at in range(0, 300, 25)
        for result in generate_all(tiny_channel, requests[at : at + 25])
    ]
    common = [pair for pair, p in wanted.items() if len(found) * p >= 5]
    counts, expected = [found.count(pair) for pair in common], [len(found) * wanted[pair] for pair in common]
    assert set(found) <= wanted.keys()
    assert len(common) > 2
    rest = len(found) - sum(expected)
    assert chisquare([*counts, len(found) - sum(counts)], [*expected, rest]).pvalue > 1e-4


def test_a_resumed_request_keeps_its_form(tiny_channel: grpc.Channel) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(tiny_channel)
    whole = request(
        PROMPT, max_tokens=TOKENS, structured_output=form("grammar"), num_speculative_tokens=2, **MODES["coupled"]
    )
    undisturbed = gather(stub.Generate(whole, timeout=60))
    whole.request_id = "form-resumed"
    call = stub.Generate(whole, timeout=60)
    tokens = 0
    while tokens < 4:
        tokens += len(next(call).tokens)
    call.cancel()
    again = request("", request_id="form-resumed", token_offset=0)
    again.ClearField("prompt")
    assert gather(stub.Generate(again, timeout=60)).ids == undisturbed.ids


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"structured_output": {"regex": "["}}, "structured_output.regex"),
        ({"structured_output": {"json_schema": '{"type": "nothing"}'}}, "structured_output.json_schema"),
        ({"structured_output": {"grammar": "start: missing"}}, "structured_output.grammar"),
        ({"structured_output": {"regex": "a" * 32_769}}, "structured_output.regex"),
        ({"structured_output": {}}, "structured_output"),
        ({"structured_output": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"structured_output": {"regex": "a"}, "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_is_no_form_is_refused_by_name(tiny_channel: grpc.Channel, fields: dict[str, Any], field: str) -> None:
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(tiny_channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(request(PROMPT, max_tokens=4, **fields), timeout=60))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details().startswith(f"{field}: ")
    assert len(caught.value.details()) < 350


@pytest.fixture(scope="module")
def faulty_channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    """A target whose rows of one block all have the first one's mask: see tests/support/faulty_service.py."""
    faults = {"target_service": "form_inside_blocks"}
    folder = tmp_path_factory.mktemp("faulty")
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", faults=faults) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield channel


def test_a_planted_fault_is_found_by_the_same_comparison(faulty_channel: grpc.Channel) -> None:
    for name, (plain, *others) in at_every_gamma(faulty_channel, ("regex", "json_schema"), "greedy"):
        assert any(other.seen != plain.seen for other in others), name
