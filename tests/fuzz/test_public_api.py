"""The short form of `make fuzz`."""

from __future__ import annotations

from pathlib import Path

from tandem.v1 import orchestrator_pb2 as api
from tests.fuzz import public_api
from tests.support.channels import open_channel
from tests.support.services import MODELS, running_stack

REQUESTS = 200


def test_random_requests_are_answered_or_refused_by_name(tmp_path: Path) -> None:
    with (
        running_stack(tmp_path, MODELS / "tiny-target", MODELS / "tiny-draft", public_api.ENVIRONMENT) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        fuzz = public_api.run(channel, REQUESTS, always_the_same=True)
    assert sum(fuzz.outcomes.values()) >= REQUESTS
    assert fuzz.canaries > REQUESTS // public_api.CANARY_EVERY
    # A canary means something only after requests that were worked on, and refusals are half of the contract.
    assert fuzz.outcomes["OK"] > 0.5 * REQUESTS
    assert fuzz.outcomes["INVALID_ARGUMENT"] > 0.15 * REQUESTS
    assert fuzz.updates["INVALID_ARGUMENT"] > 0
    assert fuzz.updates["FAILED_PRECONDITION"] > 0
    print(dict(fuzz.outcomes), dict(fuzz.updates))


def test_no_field_of_the_messages_is_left_out() -> None:
    changes = {field.name for field in api.UpdateSamplingRequest.DESCRIPTOR.fields}
    assert changes - public_api._CHANGES.keys() == {"request_id"}
    fields = {field.name for field in api.GenerateRequest.DESCRIPTOR.fields}
    assert fields - public_api.FIELDS.keys() == {"text", "token_ids", "messages"}
    assert public_api.FIELDS.keys() - public_api.SOUND.keys() == {"token_offset", "top_logprobs"}
