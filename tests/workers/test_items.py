"""Items through a real server in another process: results, every typed error, sessions that belong to their stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import grpc
import numpy as np
import pytest

from tandem.v1 import draft_pb2_grpc, sampling_pb2, target_pb2_grpc, worker_pb2
from tandem.wire import decode_ids, decode_probs
from tests.engine.harness import GREEDY, propose_item, sampled, verify_item
from tests.engine.models import random_ids
from tests.support.channels import open_channel
from tests.support.services import REPOSITORY, ServiceProcess
from tests.workers.client import PackedClient, propose_stream, reason, verify_stream
from tests.workers.conftest import CONTEXT, SLOTS

VOCABULARY = 512
TOKENS = random_ids(1, 20, VOCABULARY)


def first_item(request_id: str = "a", epoch: int = 0, size: int = 20) -> object:
    return verify_item(request_id, epoch, random_ids(1, size, VOCABULARY), 0, sampling=GREEDY)


def assert_all_slots_are_free(channel: grpc.Channel) -> None:
    """Soon as many sessions as there are slots can be opened."""
    deadline = time.monotonic() + 60
    while True:
        stream = verify_stream(channel)
        reasons = [reason(stream.ask(first_item(f"probe{slot}"))) for slot in range(SLOTS)]
        stream.close()
        if set(reasons) == {""}:
            return
        assert time.monotonic() < deadline, reasons
        time.sleep(0.1)


def test_model_info(target_channel: grpc.Channel, draft_channel: grpc.Channel) -> None:
    request = worker_pb2.GetModelInfoRequest()
    info = target_pb2_grpc.TargetServiceStub(target_channel).GetModelInfo(request, timeout=60)
    assert info.model.endswith("tiny-target")
    assert info.vocabulary_size == info.padded_vocabulary_size == VOCABULARY
    assert len(info.vocabulary_fingerprint) == 32
    assert (info.context_length, info.slots) == (CONTEXT, SLOTS)
    assert list(info.end_token_ids) == [0]
    assert (info.dtype, info.device) == ("float32", "cpu")
    assert info.max_speculative_tokens == 16
    of_draft = draft_pb2_grpc.DraftServiceStub(draft_channel).GetModelInfo(request, timeout=60)
    assert of_draft.vocabulary_fingerprint == info.vocabulary_fingerprint


def test_a_verdict(target_channel: grpc.Channel) -> None:
    stream = verify_stream(target_channel)
    supports = [random_ids(seed, VOCABULARY, VOCABULARY) for seed in range(3)]
    unique = [list(dict.fromkeys(support))[:64] for support in supports]
    item = verify_item("a", 7, TOKENS, 0, [5, 6], unique, sampled(3))
    answer = stream.ask(item)
    assert (answer.request_id, answer.cache_epoch) == ("a", 7)
    assert answer.verdict.cached_length == 22
    assert len(answer.verdict.rows) == 3
    for row in answer.verdict.rows:
        p = decode_probs(row.support_probs, 64)
        assert float(p.sum()) + row.outside_mass == pytest.approx(1.0, abs=1e-5)
        assert row.outside_token_id < VOCABULARY
    assert stream.close() == []


def test_a_proposal(draft_channel: grpc.Channel) -> None:
    stream = propose_stream(draft_channel)
    answer = stream.ask(propose_item("a", 7, TOKENS, 0, 3, look_ahead=True, sampling=sampled(3)))
    assert answer.proposal.cached_length == 23
    assert len(answer.proposal.tokens) == 4
    for token in answer.proposal.tokens:
        ids = decode_ids(token.support_ids)
        assert ids.size == 64
        assert token.token_id in ids
        assert float(decode_probs(token.support_probs, 64).sum()) == pytest.approx(1.0, abs=1e-6)
    assert stream.close() == []


def test_many_items_of_all_kinds_in_one_message(target_channel: grpc.Channel) -> None:
    stream = verify_stream(target_channel)
    stream.send([first_item("a"), first_item("b", size=100), verify_item("c", 0, TOKENS, 9, sampling=GREEDY)])
    answers = {answer.request_id: reason(answer) for answer in (stream.read() for _ in range(3))}
    assert answers == {"a": "", "b": "", "c": "CACHE_MISS"}
    stream.send([first_item("a", epoch=1)], release=["a", "b"])  # released first: a new session
    assert reason(stream.read()) == ""
    stream.close()


def test_every_reason(target_channel: grpc.Channel) -> None:
    stream = verify_stream(target_channel)
    ask = stream.ask
    assert reason(ask(verify_item("a", 0, TOKENS, 1, sampling=GREEDY))) == "CACHE_MISS"
    assert reason(ask(first_item("a", epoch=3))) == ""
    stale = ask(verify_item("a", 2, TOKENS, 19))
    assert reason(stale) == "STALE_CACHE_EPOCH"
    assert (stale.error.cache_epoch, stale.error.cached_length) == (3, 20)
    diverged = verify_item("a", 4, TOKENS, 19)
    diverged.prefix.digest = b"nonsense"
    assert reason(ask(diverged)) == "PREFIX_DIVERGED"
    assert reason(ask(verify_item("a", 5, TOKENS, 19))) == "CACHE_MISS"
    assert reason(ask(first_item("a", epoch=6, size=CONTEXT + 1))) == "CONTEXT_EXCEEDED"
    assert reason(ask(first_item("a", epoch=7, size=CONTEXT))) == ""

    bad_id = verify_item("a", 8, [VOCABULARY], 0)
    answer = ask(bad_id)
    assert reason(answer) == "INVALID_ARGUMENT"
    assert "prefix.token_ids" in answer.error.message
    assert str(VOCABULARY - 1) not in answer.error.message

    stream.send([first_item(f"r{slot}") for slot in range(SLOTS)])
    reasons = [reason(stream.read()) for _ in range(SLOTS)]
    assert sorted(reasons) == ["", "", "RESOURCE_EXHAUSTED"]

    everything = sampling_pb2.Sampling(
        temperature=1.0, top_p=1.0, acceptance_method=1, min_length=1000, end_token_ids=range(VOCABULARY)
    )
    refused = ask(verify_item("a", 9, TOKENS, 0, sampling=everything))  # no token is left
    assert reason(refused) == "INVALID_ARGUMENT"
    assert "leaves no token" in refused.error.message
    assert reason(ask(verify_item("a", 10, TOKENS, 0))) == ""  # with the sampling it had

    stream.send([first_item("a", epoch=11, size=CONTEXT)])
    stream.send([], release=["a"])
    assert reason(stream.read()) in ("CANCELLED", "")  # it may have been faster
    stream.close()


def test_a_newer_proposal_cancels_an_older_one(draft_channel: grpc.Channel) -> None:
    stream = propose_stream(draft_channel)
    older = propose_item("a", 0, random_ids(1, 100, VOCABULARY), 0, 16, sampling=GREEDY)
    stream.send([older, propose_item("a", 1, TOKENS, 0, 2)])
    answers = {answer.cache_epoch: reason(answer) for answer in (stream.read() for _ in range(2))}
    assert answers == {0: "CANCELLED", 1: ""}
    stream.close()


def test_streams_do_not_see_one_another(target_channel: grpc.Channel) -> None:
    one, other = verify_stream(target_channel), verify_stream(target_channel)
    assert reason(one.ask(first_item("same", epoch=5))) == ""
    assert reason(other.ask(verify_item("same", 0, TOKENS, 19, sampling=GREEDY))) == "CACHE_MISS"
    assert reason(other.ask(first_item("same", epoch=0))) == ""
    other.close()
    assert reason(one.ask(verify_item("same", 6, TOKENS, 19))) == ""
    one.close()


@pytest.mark.parametrize("end", ["half-close", "cancel", "channel"])
def test_sessions_end_with_their_stream(target: ServiceProcess, target_channel: grpc.Channel, end: str) -> None:
    channel = open_channel(target.address)
    stream = verify_stream(channel)
    for slot in range(SLOTS):
        assert reason(stream.ask(first_item(f"r{slot}"))) == ""
    other = verify_stream(target_channel)
    assert reason(other.ask(first_item("more"))) == "RESOURCE_EXHAUSTED"
    other.close()
    if end == "half-close":
        stream.close()
    elif end == "cancel":
        stream.call.cancel()
    else:
        channel.close()
    assert_all_slots_are_free(target_channel)
    channel.close()


_ORCHESTRATOR_TO_KILL = """
import sys, grpc, time
from tests.workers.test_items import first_item, SLOTS
from tests.workers.client import verify_stream
stream = verify_stream(grpc.insecure_channel(sys.argv[1]))
for slot in range(SLOTS):
    stream.ask(first_item(f"r{slot}"))
stream.send([first_item("r0", epoch=1, size=100)])
print("ready", flush=True)
time.sleep(100)
"""


def test_sessions_end_when_the_orchestrator_is_killed(target: ServiceProcess, target_channel: grpc.Channel) -> None:
    command = [sys.executable, "-c", _ORCHESTRATOR_TO_KILL, target.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert_all_slots_are_free(target_channel)


def test_a_batch_out_of_bounds_ends_the_stream(target_channel: grpc.Channel) -> None:
    stream = verify_stream(target_channel)
    stream.send([first_item(f"r{number}") for number in range(513)])
    with pytest.raises(grpc.RpcError) as raised:
        stream.read()
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "513" in raised.value.details()
    assert_all_slots_are_free(target_channel)


def test_a_message_over_grpcs_default_limit_is_an_items_error(target: ServiceProcess) -> None:
    stream = PackedClient.__new__(PackedClient)
    with open_channel(target.address, options=[("grpc.max_send_message_length", 64 << 20)]) as channel:
        stream = verify_stream(channel)
        huge = verify_item("a", 0, np.full(2_000_000, 5, dtype=np.uint32), 0, sampling=GREEDY)
        assert reason(stream.ask(huge)) == "CONTEXT_EXCEEDED"
        assert reason(stream.ask(first_item("a", epoch=1))) == ""
        stream.close()


def test_a_client_that_does_not_read_is_not_read_from(target: ServiceProcess, target_channel: grpc.Channel) -> None:
    """Thousands of items without reading: memory stays bounded, others are served, all is answered in the end."""
    stream = verify_stream(target_channel)
    count = 5000
    for epoch in range(count // 50):
        stream.send([first_item("a", epoch=50 * epoch + index, size=2) for index in range(50)])
    other = verify_stream(target_channel)
    assert reason(other.ask(first_item("b"))) == ""
    other.close()
    answers = [stream.read() for _ in range(count)]
    assert {reason(answer) for answer in answers} <= {"", "CANCELLED"}
    assert sorted(answer.cache_epoch for answer in answers) == list(range(count))
    stream.close()
