"""The short form of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

import grpc

from tandem.v1 import orchestrator_pb2 as api
from tests.fuzz import public_api
from tests.support.services import MODELS, running_stack

REQUESTS = 300


def test_random_requests_are_answered_or_refused_by_name(tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, MODELS / "tiny-target", MODELS / "tiny-draft", public_api.ENVIRONMENT) as stack,
        grpc.insecure_channel(stack.orchestrator.address) as channel,
    ):
        fuzz = public_api.run(channel, REQUESTS, always_the_same=True)
    assert sum(fuzz.outcomes.values()) >= REQUESTS
    assert fuzz.canaries > REQUESTS // public_api.CANARY_EVERY
    assert fuzz.outcomes["OK"] > 0
    assert fuzz.outcomes["INVALID_ARGUMENT"] > 0


def test_no_field_of_the_message_is_left_out() -> None:
    fields = {field.name for field in api.GenerateRequest.DESCRIPTOR.fields}
    assert fields - public_api.FIELDS.keys() == {"text", "token_ids", "messages"}
