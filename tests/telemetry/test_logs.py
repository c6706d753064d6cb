"""What the services write: a line for each request, however it ends, and one for each round at DEBUG."""

from __future__ import annotations

import json
import time
from typing import Any

import grpc
import pytest

from tandem.v1 import orchestrator_pb2_grpc
from tests.support.generation import gather, paced_channel, request
from tests.telemetry.conftest import Observed
from tests.telemetry.test_traces import new_trace

PROMPT = "def read_lines(path):\n"


def lines_of(observed: Observed, trace_id: str, seconds: float = 60) -> list[dict[str, Any]]:
    """All lines that the orchestrator wrote of a trace, once its request has ended."""
    deadline = time.monotonic() + seconds
    while True:
        lines = [json.loads(line) for line in observed.log_lines() if trace_id in line]
        if any(line["message"] == "request ended" for line in lines):
            return lines
        assert time.monotonic() < deadline, lines
        time.sleep(0.05)


def ended(lines: list[dict[str, Any]]) -> dict[str, Any]:
    [line] = [line for line in lines if line["message"] == "request ended"]
    assert (line["level"], line["logger"]) == ("INFO", "orchestrator.recorder")
    return line


def test_a_finished_request_leaves_one_complete_line_and_one_for_each_round(observed: Observed) -> None:
    trace_id, metadata = new_trace()
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(observed.channel)
    sent = request(PROMPT, max_tokens=12, temperature=0, num_speculative_tokens=3, request_id="one-line")
    result = gather(stub.Generate(sent, timeout=60, metadata=metadata))
    lines = lines_of(observed, trace_id)
    line = ended(lines)
    assert (line["request_id"], line["trace_id"]) == ("one-line", trace_id)
    assert (line["status"], line["finish_reason"]) == ("OK", "length")
    assert (line["prompt_tokens"], line["completion_tokens"]) == result.usage
    assert line["rounds"] == result.speculation.rounds
    assert line["draft_tokens"] == result.speculation.draft_tokens
    assert line["accepted_tokens"] == result.speculation.accepted_tokens
    assert 0 < line["time_to_first_token_seconds"] <= line["total_seconds"]
    rounds = [each for each in lines if each["message"].startswith("round: ")]
    assert [each["cache_epoch"] for each in rounds] == list(range(result.speculation.rounds))
    assert {(each["level"], each["request_id"], each["trace_id"]) for each in rounds} == {
        ("DEBUG", "one-line", trace_id)
    }


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"max_tokens": 0}, "INVALID_ARGUMENT"),
        ({"structured_output": {"regex": "(secret"}}, "INVALID_ARGUMENT"),
        ({"token_offset": 1}, "NOT_FOUND"),
        ({"max_tokens": 400, "ignore_eos": True}, "CANCELLED"),
    ],
)
def test_so_does_one_that_is_refused_or_cancelled(observed: Observed, fields: dict[str, Any], status: str) -> None:
    trace_id, metadata = new_trace()
    with paced_channel(observed.stack.orchestrator.address) as channel:  # or it may be over before it is cancelled
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        call = stub.Generate(request(PROMPT, request_id=f"ends-{status}", **fields), timeout=60, metadata=metadata)
        with pytest.raises(grpc.RpcError):
            for _ in call:
                if status == "CANCELLED":
                    call.cancel()
    line = ended(lines_of(observed, trace_id))
    assert (line["request_id"], line["status"]) == (f"ends-{status}", status)
    assert "finish_reason" not in line
    assert "secret" not in json.dumps(line)
    assert ("error" in line) == (status in ("INVALID_ARGUMENT", "NOT_FOUND"))
    assert line["total_seconds"] > 0
