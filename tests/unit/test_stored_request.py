"""A request in the store holds everything that its plan does."""

from __future__ import annotations

import dataclasses

from orchestrator import stored_request
from orchestrator.request import GenerationPlan
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2
from tandem.wire import encode_ids

PROMPT = encode_ids([5, 6, 7])
PLAN = GenerationPlan(
    request_id="r",
    prompt=PROMPT,
    prompt_tokens=3,
    sampling=sampling_pb2.Sampling(temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, seed=2**64 - 1, min_length=9),
    num_speculative_tokens=3,
    adaptive=True,
    max_tokens=70,
    min_tokens=6,
    end_token_ids=frozenset({1, 2}),
    stop=("x", "\u20ac"),
    include_stop=True,
    cache_salt="salt",
    echo=True,
    keep_special_tokens=True,
)


def test_the_plan_comes_back_whole() -> None:
    for field in dataclasses.fields(PLAN):
        assert getattr(PLAN, field.name), f"{field.name}: a default would come back even if it weren't stored"
    stored = stored_request.decode(stored_request.encode(PLAN, "model", "caller"))
    assert stored_request.plan_of(stored, "r", PROMPT) == PLAN
    assert (stored.model, stored.caller) == ("model", "caller")


def test_the_fingerprint_is_of_the_content() -> None:
    request = api.GenerateRequest(text="a", top_k=3)
    named = api.GenerateRequest(text="a", top_k=3, request_id="r", token_offset=0)
    assert stored_request.fingerprint(request) == stored_request.fingerprint(named)
    assert stored_request.fingerprint(request) != stored_request.fingerprint(api.GenerateRequest(text="a"))
    assert not stored_request.names_only(named)
    assert stored_request.names_only(api.GenerateRequest(request_id="r", token_offset=5))
