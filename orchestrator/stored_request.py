"""A request as it is kept in the store: all that another orchestrator needs to go on with it exactly."""

from __future__ import annotations

import hashlib

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import stored_request_pb2
from tandem.wire import TOKEN_BYTES

from .request import GenerationPlan


def fingerprint(request: api.GenerateRequest) -> bytes:
    """Names what a request asks for, whatever its id: the first call and its resumptions have the same."""
    content = api.GenerateRequest()
    content.CopyFrom(request)
    content.ClearField("request_id")
    content.ClearField("token_offset")
    content.ClearField("token_by_token")  # how it is told, not what
    return hashlib.sha256(content.SerializeToString(deterministic=True)).digest()


def names_only(request: api.GenerateRequest) -> bool:
    """Whether a request says nothing but which one to resume, and from where."""
    bare = api.GenerateRequest(
        request_id=request.request_id, token_offset=request.token_offset, token_by_token=request.token_by_token
    )
    return request == bare


def encode(plan: GenerationPlan, model: str, caller: str) -> bytes:
    """The plan without its id and prompt, which the store has already."""
    return stored_request_pb2.StoredRequest(
        sampling=plan.sampling,
        num_speculative_tokens=plan.num_speculative_tokens,
        adaptive_speculative_tokens=plan.adaptive,
        max_tokens=plan.max_tokens,
        min_tokens=plan.min_tokens,
        end_token_ids=sorted(plan.end_token_ids),
        stop=plan.stop,
        include_stop_str_in_output=plan.include_stop,
        cache_salt=plan.cache_salt,
        echo=plan.echo,
        keep_special_tokens=plan.keep_special_tokens,
        model=model,
        caller=caller,
    ).SerializeToString()


def decode(data: bytes) -> stored_request_pb2.StoredRequest:
    """What `encode` wrote; raises google.protobuf.message.DecodeError."""
    return stored_request_pb2.StoredRequest.FromString(data)


def plan_of(stored: stored_request_pb2.StoredRequest, request_id: str, prompt: bytes) -> GenerationPlan:
    """The plan that was encoded, with its id and its encoded prompt."""
    return GenerationPlan(
        request_id=request_id,
        prompt=prompt,
        prompt_tokens=len(prompt) // TOKEN_BYTES,
        sampling=stored.sampling,
        num_speculative_tokens=stored.num_speculative_tokens,
        adaptive=stored.adaptive_speculative_tokens,
        max_tokens=stored.max_tokens,
        min_tokens=stored.min_tokens,
        end_token_ids=frozenset(stored.end_token_ids),
        stop=tuple(stored.stop),
        include_stop=stored.include_stop_str_in_output,
        cache_salt=stored.cache_salt,
        echo=stored.echo,
        keep_special_tokens=stored.keep_special_tokens,
    )
