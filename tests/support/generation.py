"""One call of the public API, its responses gathered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc
from tests.support.channels import open_channel


@dataclass(frozen=True)
class Generation:
    """What a caller saw."""

    ids: list[int]
    kinds: list[int]
    pieces: list[str]
    text: str
    reason: int
    usage: tuple[int, int]
    speculation: api.SpeculationStats
    start: api.GenerationStart
    logprobs: list[float]
    """Empty where they were not asked for."""
    top_logprobs: list[dict[int, float]]

    @property
    def seen(self) -> tuple[Any, ...]:
        """Everything that must not depend on gamma."""
        return (self.ids, self.text, self.reason, self.usage)


def request(prompt: str | Sequence[int], **fields: Any) -> api.GenerateRequest:
    """A request for text or token ids."""
    if isinstance(prompt, str):
        return api.GenerateRequest(text=prompt, **fields)
    return api.GenerateRequest(token_ids=api.TokenIds(ids=prompt), **fields)


def gather(responses: Iterable[api.GenerateResponse]) -> Generation:
    """Reads a stream to its end and checks its shape."""
    received = list(responses)
    assert received
    assert received[0].HasField("start")
    assert [response.HasField("finish") for response in received] == [False] * (len(received) - 1) + [True]
    tokens = [token for response in received for token in response.tokens]
    finish = received[-1].finish
    text = "".join(response.text for response in received)
    assert text == "".join(token.text for token in tokens)
    assert len(tokens) == finish.usage.completion_tokens
    return Generation(
        ids=[token.token_id for token in tokens],
        kinds=[token.kind for token in tokens],
        pieces=[response.text for response in received],
        text=text,
        reason=finish.reason,
        usage=(finish.usage.prompt_tokens, finish.usage.completion_tokens),
        speculation=finish.speculation,
        start=received[0].start,
        logprobs=[token.logprob for token in tokens if token.HasField("logprob")],
        top_logprobs=[{each.token_id: each.logprob for each in token.top_logprobs} for token in tokens],
    )


PACED = (("grpc.http2.lookahead_bytes", 1), ("grpc.http2.bdp_probe", 0))


def paced_channel(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    """A connection that holds next to nothing back: a request is never more than a round or two ahead of what was read of it,
    however long the test takes to do something in its midst."""
    return open_channel(address, PACED, credentials, patient=False)


def generate(channel: grpc.Channel, prompt: str | Sequence[int], **fields: Any) -> Generation:
    """One blocking generation."""
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    return gather(stub.Generate(request(prompt, **fields), timeout=120))


def generate_several(channel: grpc.Channel, prompt: str | Sequence[int], n: int, **fields: Any) -> list[Generation]:
    """One call for n completions; in the order of their indices."""
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    responses = list(stub.Generate(request(prompt, n=n, **fields), timeout=120))
    assert {response.index for response in responses} == set(range(n))
    assert [response.finish.HasField("total_usage") for response in responses] == [False] * (len(responses) - 1) + [
        True
    ]
    completions = [gather(each for each in responses if each.index == index) for index in range(n)]
    total = responses[-1].finish.total_usage
    assert total.prompt_tokens == completions[0].usage[0]
    assert total.completion_tokens == sum(each.usage[1] for each in completions)
    return completions


def generate_all(channel: grpc.Channel, requests: Iterable[api.GenerateRequest]) -> list[Generation]:
    """Runs all requests at the same time; results in their order."""
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    calls = [stub.Generate(each, timeout=600) for each in requests]
    return [gather(call) for call in calls]


def refused_field(channel: grpc.Channel, **fields: Any) -> str:
    """Which field a request is refused by, in an answer that is as short as one should be."""
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    try:
        list(stub.Generate(api.GenerateRequest(**fields), timeout=60))
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    else:
        raise AssertionError("the request was served")
    assert status is not None
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], status
    assert status.ByteSize() < 1024
    violations = error_details_pb2.BadRequest()
    assert any(detail.Unpack(violations) for detail in status.details)
    (violation,) = violations.field_violations
    return violation.field
