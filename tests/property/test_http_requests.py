"""Whatever JSON a caller sends becomes a request or is refused by a field's name; nothing else happens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InvalidArgument
from orchestrator.http.failures import http_failure
from orchestrator.http.inquiry import Kind, read_inquiry
from tandem.v1 import orchestrator_pb2 as api

OTHERS = (
    *("model", "prompt", "messages", "role", "content", "type", "text", "stream", "stream_options", "include_usage"),
    *(
        "max_completion_tokens",
        "best_of",
        "tools",
        "response_format",
        "structured_outputs",
        "regex",
        "json",
        "choice",
        "user",
        "metadata",
        "return_tokens",
        "name",
    ),
)
NAMES = sorted({*(field.name for field in api.GenerateRequest.DESCRIPTOR.fields), *OTHERS})
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.sampled_from([2**32, 2**64]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | st.text(), inner, max_size=3),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries({}, optional={"role": st.just("user") | ANYTHING, "content": st.text() | ANYTHING})
BODY = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), ANYTHING, max_size=6)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@settings(max_examples=150, deadline=None)
@given(body=BODY, messages=st.lists(MESSAGE, max_size=3), good=st.booleans())
def test_any_object_is_a_request_or_is_refused_by_name(
    kind: Kind, body: dict[str, Any], messages: list[Any], good: bool
) -> None:
    if good:
        body = {**body, **({"messages": messages} if kind == "chat" else {"prompt": "p"})}
    try:
        request = read_inquiry(kind, body, "id").request
    except InvalidArgument as refused:
        failure = http_failure(refused)
    else:
        assert request.WhichOneof("prompt")
        request.SerializeToString()
        return
    assert failure.param
    assert len(json.dumps(failure.body())) < 1000
