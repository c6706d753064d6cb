"""Garbage on every inner wire, and in the store: the process lives, other requests are untouched, and what a caller sees
is either the true output or a typed error.

The lies go through `LyingWorker`, a real gRPC server that asks a true worker and tells what it likes. It also hears what workers
are asked for a caller who has left.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
import redis

from orchestrator.admission import Admission
from orchestrator.drafting import SHORT_READ
from orchestrator.replica_pool import ReplicaPool
from orchestrator.worker_stream import AnswerLate, ItemFailed, Replica, StreamLost, WorkerKind
from tandem.acceptance import MAX_SUPPORT_SIZE, DraftContractError, are_supports, check_drafted
from tandem.v1 import draft_pb2, orchestrator_pb2_grpc, target_pb2, worker_pb2
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1.sampling_pb2 import ACCEPTANCE_METHOD_COUPLED as COUPLED
from tandem.wire import decode_ids, decode_probs, encode_ids, encode_probs
from tests.engine.harness import propose_item, sampled, verify_item
from tests.support.channels import open_channel
from tests.support.generation import Generation, generate, paced_channel, request
from tests.support.liars import METHODS, Lie, LyingWorker, StreamEnds, honest
from tests.support.ports import free_port
from tests.support.proxy_thread import ProxyThread
from tests.support.redis_servers import RedisServer, kinds
from tests.support.services import MODELS, ServiceProcess, Stack, running_stack
from tests.support.tcp_proxy import TcpProxy
from tests.telemetry.scrape import scrape
from tests.workers.client import PackedClient, propose_stream, reason, verify_stream

VOCABULARY = 512
SLOTS = 8
PROMPT = [5, 6, 7]
TOKENS = list(range(10, 30))
CANARY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "num_speculative_tokens": 3}
RETRY_SECONDS = 4.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    environment = {
        "TANDEM_TARGET_SLOTS": str(SLOTS),
        "TANDEM_DRAFT_SLOTS": str(SLOTS),
        "TANDEM_TARGET_MAX_WAITING": "0",
    }
    for role in METHODS:
        environment[f"TANDEM_{role.upper()}_METRICS_LISTEN"] = f"127.0.0.1:{free_port()}"
    folder = tmp_path_factory.mktemp("garbage")
    with running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as running:
        running.environment = environment
        yield running


@pytest.fixture(scope="module")
def liars(stack: Stack) -> Iterator[dict[str, LyingWorker]]:
    workers = {role: LyingWorker(role, getattr(stack, role).address) for role in METHODS}
    yield workers
    for worker in workers.values():
        worker.stop()


@pytest.fixture(scope="module")
def orchestrator(
    stack: Stack, liars: dict[str, LyingWorker], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServiceProcess]:
    """An orchestrator whose workers lie."""
    address = f"127.0.0.1:{free_port()}"
    environment = {
        "TANDEM_ORCHESTRATOR_LISTEN": address,
        "TANDEM_DRAFT_ADDRESSES": liars["draft"].address,
        "TANDEM_TARGET_ADDRESSES": liars["target"].address,
        "TANDEM_TOKENIZER": str(MODELS / "tiny-target"),
        "TANDEM_REDIS_URL": stack.redis_url,
        "TANDEM_DRAFT_BACKOFF_SECONDS": "0.1",
        "TANDEM_DRAFT_TIMEOUT_SECONDS": "1",
        "TANDEM_TARGET_RETRY_SECONDS": str(RETRY_SECONDS),
    }
    process = ServiceProcess("orchestrator", address, environment, tmp_path_factory.mktemp("lied-to") / "log")
    process.start()
    try:
        process.wait_serving()
        yield process
        assert process.process is not None
        assert process.process.poll() is None
    finally:
        process.stop()


@pytest.fixture(scope="module")
def channel(stack: Stack) -> Iterator[grpc.Channel]:
    with open_channel(stack.orchestrator.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def lied_to(orchestrator: ServiceProcess) -> Iterator[grpc.Channel]:
    with open_channel(orchestrator.address) as channel:
        _wait_for_the_draft(channel)
        yield channel


@pytest.fixture(scope="module")
def truth(channel: grpc.Channel) -> tuple[Any, ...]:
    return generate(channel, PROMPT, **{**CANARY, "num_speculative_tokens": 0}).seen


def assert_nothing_is_left(stack: Stack, seconds: float = 60.0) -> None:
    """No session and no cache slot is held at either worker."""
    deadline = time.monotonic() + seconds
    while True:
        scrapes = [scrape(stack.environment[f"TANDEM_{role.upper()}_METRICS_LISTEN"]) for role in METHODS]
        left = [each.value(name) for each in scrapes for name in ("tandem_sessions", "tandem_kv_cache_usage_perc")]
        if not any(left):
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.fixture
def canary(stack: Stack, channel: grpc.Channel, truth: tuple[Any, ...]) -> Iterator[None]:
    """After the test, a request has the same answer as ever, and all slots are free."""
    yield
    assert_nothing_is_left(stack)  # nobody may wait for a slot here
    assert generate(channel, PROMPT, **CANARY).seen == truth
    assert_nothing_is_left(stack)


@pytest.fixture(params=sorted(METHODS))
def role(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def worker_channel(stack: Stack, role: str) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1)]
    with open_channel(getattr(stack, role).address, options=options) as channel:
        yield channel


@pytest.fixture
def stream(worker_channel: grpc.Channel, role: str) -> PackedClient:
    return verify_stream(worker_channel) if role == "target" else propose_stream(worker_channel)


def good_item(role: str, request_id: str, epoch: int = 0) -> Any:
    if role == "target":
        return verify_item(request_id, epoch, TOKENS, 0, [5, 6], [[5, 7], [6, 8]], sampled(3))
    return propose_item(request_id, epoch, TOKENS, 0, 3, sampling=sampled(3))


# Garbage to a worker.


NO_BATCH = {
    "noise": b"\xff" * 50,
    "a string that is no UTF-8": b"\x0a\x05\x0a\x03\xff\xfe\xfd",
    "a length beyond the end": b"\x0a\xff\xff\xff\xff\x0f",
}


@pytest.mark.parametrize("name", NO_BATCH)
@pytest.mark.usefixtures("canary")
def test_a_message_that_is_no_batch_ends_its_stream(role: str, worker_channel: grpc.Channel, name: str) -> None:
    done = threading.Event()

    def messages() -> Iterator[bytes]:
        batch = draft_pb2.ProposeBatch if role == "draft" else target_pb2.VerifyBatch
        yield batch(items=[good_item(role, "before")]).SerializeToString()
        yield NO_BATCH[name]
        done.wait(60)

    raw: Any = worker_channel.stream_stream(METHODS[role])
    with pytest.raises(grpc.RpcError) as caught:
        list(raw(messages(), timeout=50))
    done.set()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def _scramble(message: Any, rng: random.Random) -> None:
    """Puts nonsense into up to three fields, however deep."""
    for _ in range(rng.randint(1, 3)):
        field = rng.choice([field for field in message.DESCRIPTOR.fields if field.name != "request_id"])
        if field.message_type is not None and field.is_repeated:
            del getattr(message, field.name)[:]
            for _ in range(rng.randint(0, 4)):
                _scramble(getattr(message, field.name).add(), rng)
        elif field.message_type is not None:
            _scramble(getattr(message, field.name), rng)
        elif field.is_repeated:
            del getattr(message, field.name)[:]
            getattr(message, field.name).extend(_nonsense(field, rng) for _ in range(rng.randint(0, 4)))
        else:
            setattr(message, field.name, _nonsense(field, rng))


def _nonsense(field: Any, rng: random.Random) -> Any:
    match field.type:
        case field.TYPE_BYTES:
            ids = encode_ids([rng.randrange(VOCABULARY + 88) for _ in range(rng.randint(0, 30))])
            return rng.choice([b"", rng.randbytes(rng.randint(0, 40)), ids])
        case field.TYPE_STRING:
            return "x" * rng.randint(0, 300)
        case field.TYPE_FLOAT:
            return rng.choice([math.nan, math.inf, -1.0, 0.0, 1e-45, 1e30, 0.5, 1.0])
        case field.TYPE_BOOL:
            return rng.random() < 0.5
        case field.TYPE_ENUM:
            return rng.choice([-1, 0, 1, 2, 3, 77])
        case field.TYPE_UINT64 | field.TYPE_FIXED64:
            return rng.choice([0, 1, 2**64 - 1])
        case _:
            return rng.choice([0, 1, 2, 3, 16, 20, 21, 10**6, 2**32 - 1])


@pytest.mark.usefixtures("canary")
def test_scrambled_items_are_each_answered_once(role: str, stream: PackedClient) -> None:
    rng, reasons = random.Random(17), set()
    for number in range(400):
        item = good_item(role, f"scrambled{number}")
        _scramble(item, rng)
        answer = stream.ask(item)
        assert answer.request_id == item.request_id
        assert len(answer.error.message) < 300
        reasons.add(reason(answer))
        stream.send([], [item.request_id])
    assert stream.close() == []
    assert {"", "INVALID_ARGUMENT", "CACHE_MISS"} <= reasons


@pytest.mark.usefixtures("canary")
def test_one_batch_of_contradictions(role: str, stream: PackedClient) -> None:
    """The same request several times, epochs that fall, and a release beside the items of the same request."""
    items = [good_item(role, "a", epoch) for epoch in (0, 0, 1, 0)] + [good_item(role, "b", 3), good_item(role, "b", 2)]
    stream.send(items, ["a", "b", "never heard of"])
    stream.send([good_item(role, "a", 2)], ["a"])
    answers = {(answer.request_id, answer.cache_epoch, reason(answer)) for answer in stream.close()}
    assert answers >= {
        ("a", 0, "STALE_CACHE_EPOCH"),
        ("a", 2, ""),
        ("b", 2, "STALE_CACHE_EPOCH"),
        ("b", 3, ""),
    }
    assert {request_id for request_id, _, why in answers if why not in ("", "CANCELLED", "STALE_CACHE_EPOCH")} == set()


@pytest.mark.usefixtures("canary")
def test_more_sessions_than_slots_and_more_items_than_a_batch(role: str, worker_channel: grpc.Channel) -> None:
    open_stream = verify_stream if role == "target" else propose_stream
    crowd = open_stream(worker_channel)
    crowd.send([good_item(role, str(number)) for number in range(500)])
    reasons = [reason(answer) for answer in crowd.close()]
    assert (reasons.count(""), reasons.count("RESOURCE_EXHAUSTED")) == (SLOTS, 500 - SLOTS)
    flood = open_stream(worker_channel)
    flood.send([good_item(role, str(number)) for number in range(10_000)])
    with pytest.raises(grpc.RpcError) as caught:
        flood.close()
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


# A draft that lies.


def _each(change: Callable[[Any], None]) -> Lie:
    def lie(batch: Any) -> Iterable[Any]:
        for item in batch.items:
            change(item)
        yield batch

    return lie


def _each_token(change: Callable[[draft_pb2.DraftedToken], None]) -> Lie:
    def changed(item: draft_pb2.ProposalItem) -> None:
        for token in item.proposal.tokens:
            change(token)

    return _each(changed)


def _set(**fields: Any) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def _scaled_q(factor: float) -> Lie:
    def change(token: draft_pb2.DraftedToken) -> None:
        count = decode_ids(token.support_ids).size
        token.support_probs = encode_probs(decode_probs(token.support_probs, count) * np.float32(factor))

    return _each_token(change)


def _foreign_token(token: draft_pb2.DraftedToken) -> None:
    token.token_id = (token.token_id + 1) % VOCABULARY


def _out_of_vocabulary(token: draft_pb2.DraftedToken) -> None:
    token.token_id = 10**6
    token.support_ids, token.support_probs = encode_ids([10**6]), encode_probs([1.0])


def _other_tokens(token: draft_pb2.DraftedToken) -> None:
    """Nothing wrong with it but that it's nonsense."""
    token.token_id = 499
    token.support_ids, token.support_probs = encode_ids([499, 3]), encode_probs([0.5, 0.5])


def _error(**fields: Any) -> Lie:
    return _each(lambda item: item.error.CopyFrom(worker_pb2.ItemError(**fields)))


def _twice(batch: Any) -> Iterable[Any]:
    yield from (batch, batch)


def _never(batch: Any) -> Iterable[Any]:
    return ()


def _late(batch: Any) -> Iterable[Any]:
    time.sleep(1.3)
    yield batch


def _no_message(batch: Any) -> Iterable[Any]:
    yield b"\xff" * 50


def _end(batch: Any) -> Iterable[Any]:
    raise StreamEnds


def _of_proposal(change: Callable[[draft_pb2.Proposal], Any]) -> Lie:
    return _each(lambda item: change(item.proposal))


DRAFT_LIES: dict[str, tuple[Lie, str]] = {
    "a token out of the vocabulary": (_each_token(_out_of_vocabulary), "draft_invalid"),
    "a token outside of its support": (_each_token(_foreign_token), "draft_invalid"),
    "q sums to a half": (_scaled_q(0.5), "draft_invalid"),
    "q sums to two": (_scaled_q(2.0), "draft_invalid"),
    "q is not a number": (_scaled_q(math.nan), "draft_invalid"),
    "q is negative": (_scaled_q(-1.0), "draft_invalid"),
    "an odd support": (_each_token(_set(support_ids=b"123")), "draft_invalid"),
    "no support": (_each_token(_set(support_ids=b"", support_probs=b"")), "draft_invalid"),
    "supports without q": (_each_token(_set(support_probs=b"")), "draft_invalid"),
    "no tokens": (_of_proposal(lambda proposal: proposal.ClearField("tokens")), "draft_invalid"),
    "too many tokens": (_of_proposal(lambda proposal: proposal.tokens.extend([*proposal.tokens] * 5)), "draft_invalid"),
    "nonsense": (_each_token(_other_tokens), ""),
    "fewer tokens": (_of_proposal(lambda proposal: proposal.tokens.__delitem__(slice(1, None))), ""),
    "a longer cache": (_of_proposal(_set(cached_length=2**32 - 1)), ""),
    "a shorter cache": (_of_proposal(_set(cached_length=2)), ""),
    "an empty cache": (_of_proposal(_set(cached_length=0)), ""),
    "nothing read": (_of_proposal(_set(unread_tokens=2**32 - 1)), ""),
    "every answer twice": (_twice, ""),
    "another epoch": (_each(_set(cache_epoch=77)), "draft_timeout"),
    "another request": (_each(_set(request_id="x")), "draft_timeout"),
    "no answer": (_never, "draft_timeout"),
    "late answers": (_late, "draft_timeout"),
    "neither result nor error": (_each(lambda item: item.ClearField("proposal")), "draft_unavailable"),
    "an unknown error": (_error(reason=99, message="x" * 10_000), "draft_unavailable"),
    "a cache miss each time": (_error(reason=worker_pb2.ERROR_REASON_CACHE_MISS), "draft_unavailable"),
    "a message that is none": (_no_message, "draft_unavailable"),
    "the stream ends": (_end, "draft_unavailable"),
}


@pytest.fixture
def draft(liars: dict[str, LyingWorker], lied_to: grpc.Channel) -> Iterator[LyingWorker]:
    yield liars["draft"]
    liars["draft"].lie = honest
    _wait_for_the_draft(lied_to)


def _wait_for_the_draft(lied_to: grpc.Channel) -> Generation:
    """Until a request is speculated without a fault."""
    deadline = time.monotonic() + 60
    while (generation := generate(lied_to, PROMPT, **CANARY)).speculation.degraded_rounds:
        assert time.monotonic() < deadline, generation.speculation
        time.sleep(0.1)
    return generation


SEEN_IN_THE_PROBABILITIES = {
    "a token outside of its support",
    "q sums to a half",
    "q sums to two",
    "q is not a number",
    "q is negative",
}
"""Which are looked at while the target verifies the block."""


@pytest.mark.parametrize("name", DRAFT_LIES)
def test_a_draft_that_lies(
    lied_to: grpc.Channel, liars: dict[str, LyingWorker], draft: LyingWorker, truth: tuple[Any, ...], name: str
) -> None:
    draft.lie, expected = DRAFT_LIES[name]
    verified: list[tuple[int, bool]] = []
    liars["target"].heard = lambda batch: verified.extend(
        (item.cache_epoch, bool(item.draft_token_ids)) for item in batch.items
    )
    try:
        generation = generate(lied_to, PROMPT, **CANARY)
    finally:
        liars["target"].heard = lambda batch: None
    assert generation.seen == truth
    if expected == "draft_invalid":
        # What is seen at once is not verified at all, the rest in vain: the round is scored again, without a block.
        in_vain = [epoch for epoch, with_block in verified if with_block]
        assert bool(in_vain) == (name in SEEN_IN_THE_PROBABILITIES)
        assert all((epoch, False) in verified for epoch in in_vain)
        assert generation.speculation.draft_tokens == 0
    reasons = set(generation.speculation.degraded_reasons)
    if expected:
        assert expected in reasons
        assert generation.speculation.degraded_rounds > 0
    else:
        assert reasons <= {"draft_timeout", "draft_shortened"}  # a slow machine
    if name == "a longer cache":
        # What the draft claims is believed as far as it can be true, and its CACHE_MISS mends the rest.
        assert generation.speculation.rebuilds <= generation.speculation.rounds


def _certain_of(token_id: int) -> Lie:
    def change(token: draft_pb2.DraftedToken) -> None:
        token.token_id = token_id
        token.support_ids, token.support_probs = encode_ids([token_id]), encode_probs([1.0])

    return _each_token(change)


def _half_elsewhere(token: draft_pb2.DraftedToken) -> None:
    """Half of q on what the form forbids, whatever it was."""
    if token.token_id != LINE_END:
        token.support_ids, token.support_probs = encode_ids([token.token_id, LINE_END]), encode_probs([0.5, 0.5])


END, LINE_END = 0, 202
SCHEMA = """{"type": "object", "properties": {"kind": {"enum": ["def", "class"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
"required": ["kind", "size"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}"""
FORMED: dict[str, Any] = {"max_tokens": 40, "structured_output": {"json_schema": SCHEMA}}
OF_A_FORM: dict[str, tuple[Lie, str, set[int] | None]] = {
    "the truth": (honest, "", None),
    "what the form forbids": (_certain_of(LINE_END), "", set()),
    "the end all the time": (_certain_of(END), "", {END}),
    "half of q on what the form forbids": (_each_token(_half_elsewhere), "", None),
    "q sums to two": (_scaled_q(2.0), "draft_invalid", set()),
    "a token outside of its support": (_each_token(_foreign_token), "draft_invalid", set()),
}
"""Lies about what has a form: what the orchestrator blames the draft for, and which of its tokens can stand; None: true ones do."""


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5, "acceptance_method": COUPLED}]
)
@pytest.mark.parametrize("name", OF_A_FORM)
def test_a_draft_that_lies_about_what_has_a_form(
    channel: grpc.Channel, lied_to: grpc.Channel, draft: LyingWorker, name: str, fields: dict[str, Any]
) -> None:
    draft.lie, blame, standing = OF_A_FORM[name]
    plain = generate(channel, PROMPT, **FORMED, **fields, num_speculative_tokens=0)
    assert json.loads(plain.text)["kind"] in ("def", "class")
    deadline = time.monotonic() + 60
    heard = False
    while not heard:  # on a slow machine the draft may be late for all of one request
        assert time.monotonic() < deadline
        told = generate(lied_to, PROMPT, **FORMED, **fields, num_speculative_tokens=3)
        assert told.seen == plain.seen
        stats = told.speculation
        accepted = [token for token, kind in zip(told.ids, told.kinds, strict=True) if kind == api.TOKEN_KIND_ACCEPTED]
        assert len(accepted) == stats.accepted_tokens
        if blame:
            assert stats.draft_tokens == 0
            heard = blame in stats.degraded_reasons and stats.degraded_rounds > 0
        else:
            assert set(stats.degraded_reasons) <= {"draft_timeout", "draft_shortened"}
            heard = bool(accepted) if standing is None else stats.draft_tokens > 0
        assert standing is None or set(accepted) <= standing


class _LateWithLongBlocks:
    """A lie that keeps back the first `count` blocks of more than one token until their rounds go on without them, once
    `before` others have passed. All answers say that so many tokens are `unread`, as blocks do that no model made."""

    def __init__(self, count: int, before: int = 0, unread: int = 0) -> None:
        self._left = count
        self._before = before
        self._unread = unread
        self._verified = 0
        self._heard = threading.Condition()

    def verifies(self, batch: target_pb2.VerifyBatch) -> None:
        """To be told of what the target is asked for."""
        with self._heard:
            self._verified += len(batch.items)
            self._heard.notify_all()

    def __call__(self, batch: draft_pb2.ProposalBatch) -> Iterable[draft_pb2.ProposalBatch]:
        for item in batch.items:
            item.proposal.unread_tokens = self._unread
        if self._before:
            self._before -= 1
        elif self._left and any(len(item.proposal.tokens) > 1 for item in batch.items):
            self._left -= 1
            with self._heard:
                before = self._verified
                assert self._heard.wait_for(lambda: self._verified > before, 60)
        yield batch


def _assert_climbs(asked: list[int], longest: int) -> None:
    """From one length to the next: twice as long after four in time at the least, or half as long where one was late by itself."""
    runs = [(length, len(list(blocks))) for length, blocks in itertools.groupby(asked)]
    for (length, count), (following, _) in itertools.pairwise(runs):
        if following > length:
            assert following == min(2 * length, longest), asked
            assert count >= 4, asked
        else:
            assert following == max(length // 2, 1), asked


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 5, "acceptance_method": COUPLED}])
def test_a_draft_that_is_late_is_asked_for_shorter_blocks_and_for_longer_ones_again(
    lied_to: grpc.Channel,
    liars: dict[str, LyingWorker],
    draft: LyingWorker,
    channel: grpc.Channel,
    fields: dict[str, Any],
) -> None:
    fields = {**CANARY, "max_tokens": 120, **fields}
    truth = generate(channel, PROMPT, **{**fields, "num_speculative_tokens": 0}).seen
    deadline = time.monotonic() + 60
    while True:
        asked: list[int] = []
        draft.lie = lie = _LateWithLongBlocks(2)
        draft.heard = lambda batch, asked=asked: asked.extend(item.num_speculative_tokens for item in batch.items)
        liars["target"].heard = lie.verifies
        try:
            result = generate(lied_to, PROMPT, **{**fields, "num_speculative_tokens": 5})
        finally:
            draft.heard = liars["target"].heard = lambda batch: None
        assert result.seen == truth
        stats = result.speculation
        assert {"draft_timeout", "draft_shortened"} <= set(stats.degraded_reasons)
        assert stats.degraded_rounds >= 2
        assert asked[:3] == [5, 2, 1]
        if 5 in asked[1:]:  # otherwise too many of the others were late by themselves, on a slow machine
            _assert_climbs(asked[2 : asked.index(5, 1) + 1], 5)
            assert stats.shortened_rounds >= 12
            return
        assert time.monotonic() < deadline, asked


def _speculation(
    lied_to: grpc.Channel, liars: dict[str, LyingWorker], lie: _LateWithLongBlocks, prompt: list[int]
) -> Any:
    liars["draft"].lie, liars["target"].heard = lie, lie.verifies
    try:
        return generate(lied_to, prompt, **{**CANARY, "max_tokens": 60, "num_speculative_tokens": 5}).speculation
    finally:
        liars["target"].heard = lambda batch: None


def test_a_draft_whose_model_has_a_long_prompt_to_read_is_not_asked_for_less(
    lied_to: grpc.Channel, liars: dict[str, LyingWorker], draft: LyingWorker
) -> None:
    """The first block came from elsewhere at no time, and for the second the model reads the prompt."""
    prompt = TOKENS * (1 + SHORT_READ // len(TOKENS))
    deadline = time.monotonic() + 60
    while True:
        stats = _speculation(lied_to, liars, _LateWithLongBlocks(1, before=1, unread=len(prompt)), prompt)
        assert "draft_timeout" in stats.degraded_reasons
        if "draft_shortened" not in stats.degraded_reasons:
            assert stats.shortened_rounds == 0
            return
        assert time.monotonic() < deadline, stats  # another one late by itself, on a slow machine


def test_blocks_that_no_model_made_do_not_make_them_longer_again(
    lied_to: grpc.Channel, liars: dict[str, LyingWorker], draft: LyingWorker
) -> None:
    deadline = time.monotonic() + 60
    while not (stats := _speculation(lied_to, liars, _LateWithLongBlocks(2, unread=1), PROMPT)).shortened_rounds:
        assert time.monotonic() < deadline, stats  # late with a single token, too, on a slow machine
    assert len(stats.draft_tokens_per_position) == 1


def test_a_draft_of_another_vocabulary_comes_back(
    lied_to: grpc.Channel, draft: LyingWorker, truth: tuple[Any, ...]
) -> None:
    draft.describe = _set(vocabulary_fingerprint=b"x" * 32)
    try:
        draft.lie = _end
        reasons: set[str] = set()
        ends = time.monotonic() + 60
        # First its stream has ended, then it is known that what is there now is of no use.
        while reasons != {"draft_incompatible"} and time.monotonic() < ends:
            generation = generate(lied_to, PROMPT, **CANARY)
            assert generation.seen == truth
            reasons = set(generation.speculation.degraded_reasons)
            assert reasons != set()
            slow = {"draft_timeout", "draft_shortened"}
            assert reasons <= {"draft_unavailable", "draft_incompatible"} | slow
        assert reasons == {"draft_incompatible"}
    finally:
        draft.describe = lambda info: None


# A target that breaks its contract.


def _each_row(change: Callable[[target_pb2.TargetRow], Any]) -> Lie:
    def changed(item: target_pb2.VerdictItem) -> None:
        for row in item.verdict.rows:
            change(row)

    return _each(changed)


def _of_verdict(change: Callable[[target_pb2.Verdict], Any]) -> Lie:
    return _each(lambda item: change(item.verdict))


TARGET_LIES: dict[str, Lie] = {
    "mass is missing": _each_row(lambda row: _set(outside_mass=row.outside_mass - 0.01)(row)),
    "mass is too much": _each_row(lambda row: _set(outside_mass=row.outside_mass + 0.01)(row)),
    "mass is not a number": _each_row(_set(outside_mass=math.nan)),
    "a row is missing": _of_verdict(lambda verdict: verdict.rows.pop()),
    "a row too many": _of_verdict(lambda verdict: verdict.rows.add(outside_mass=1.0)),
    "no rows": _of_verdict(lambda verdict: verdict.ClearField("rows")),
    "p is too long": _each_row(lambda row: _set(support_probs=row.support_probs + b"\0\0\0\0")(row)),
    "p is odd": _each_row(lambda row: _set(support_probs=row.support_probs + b"\0")(row)),
    "an unknown error": _error(reason=99),
    "a stale epoch": _error(reason=worker_pb2.ERROR_REASON_STALE_CACHE_EPOCH),
    "neither verdict nor error": _each(lambda item: item.ClearField("verdict")),
    "a message that is none": _no_message,
    "the stream ends": _end,
}


@pytest.fixture
def target(liars: dict[str, LyingWorker], lied_to: grpc.Channel) -> Iterator[LyingWorker]:
    yield liars["target"]
    liars["target"].lie = honest
    deadline = time.monotonic() + 60
    while True:
        try:
            generate(lied_to, PROMPT, **CANARY)
        except grpc.RpcError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


def _from_answer(number: int, lie: Lie, count: int) -> Lie:
    """Lies in `count` answers from the `number`th on."""
    seen = iter(range(10**9))

    def sometimes(batch: Any) -> Iterable[Any]:
        return lie(batch) if number <= next(seen) < number + count else honest(batch)

    return sometimes


@pytest.mark.parametrize("name", TARGET_LIES)
def test_a_target_that_lies_once(lied_to: grpc.Channel, target: LyingWorker, truth: tuple[Any, ...], name: str) -> None:
    target.lie = _from_answer(3, TARGET_LIES[name], 1)
    generation = generate(lied_to, PROMPT, **CANARY)
    assert generation.seen == truth
    assert generation.speculation.rebuilds >= 1


@pytest.mark.parametrize("name", ["mass is missing", "a row is missing", "p is too long"])
def test_nothing_is_emitted_from_a_target_that_goes_on_lying(
    lied_to: grpc.Channel, target: LyingWorker, truth: tuple[Any, ...], name: str
) -> None:
    target.lie = _from_answer(3, TARGET_LIES[name], 10**9)
    received: list[int] = []
    with pytest.raises(grpc.RpcError) as caught:
        for response in orchestrator_pb2_grpc.OrchestratorServiceStub(lied_to).Generate(
            request(PROMPT, **CANARY), timeout=120
        ):
            received += [token.token_id for token in response.tokens]
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert 3 <= len(received) < CANARY["max_tokens"]
    assert received == truth[0][: len(received)]


def test_a_target_that_refuses_is_unavailable(lied_to: grpc.Channel, target: LyingWorker) -> None:
    """No other one is left to ask; the request is good, and can be tried again."""
    target.lie = _from_answer(3, _error(reason=worker_pb2.ERROR_REASON_CONTEXT_EXCEEDED), 10**9)
    with pytest.raises(grpc.RpcError) as caught:
        generate(lied_to, PROMPT, **CANARY)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "refused" in caught.value.details()


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x0a\x05abc", bytes(range(1, 200))])
def test_bytes_that_are_no_request(stack: Stack, truth: tuple[Any, ...], data: bytes) -> None:
    with open_channel(stack.orchestrator.address) as channel:
        call = channel.unary_stream("/tandem.v1.OrchestratorService/Generate")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(data, timeout=60))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "request" in caught.value.details()
        assert generate(channel, PROMPT, **CANARY).seen == truth
    assert "Traceback" not in stack.orchestrator.log.read_text()


# A caller that leaves.


class Departure:
    """A request that comes to a point of its course, and what its workers hear of it once they were told that it is over."""

    def __init__(self, stack: Stack, liars: dict[str, LyingWorker], request_id: str, point: str) -> None:
        self.request_id = request_id
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.told: set[str] = set()
        self.late: list[tuple[str, int]] = []
        self._store = redis.Redis.from_url(stack.redis_url)
        self._point = point
        for role, liar in liars.items():
            liar.heard, liar.lie = partial(self._hear, role), partial(self._answer, role)

    def goes_on(self) -> None:
        """What was held is held no longer."""
        self.go_on.set()
        self._store.client_unpause()

    def is_let_go(self) -> bool:
        """Whether its state is no longer that of a running request."""
        seconds = self._store.ttl(f"tandem:{{{self.request_id}}}:state")
        assert isinstance(seconds, int)
        return seconds <= 60

    def _hear(self, role: str, batch: Any) -> None:
        epochs = [item.cache_epoch for item in batch.items if item.request_id == self.request_id]
        if role in self.told:
            self.late += [(role, epoch) for epoch in epochs]
        if self.request_id in batch.release_request_ids:
            self.told.add(role)
        if self._point == "commit" and max(epochs, default=0) > 2:
            self.reached.set()  # the round after the one whose commit the store doesn't answer
        if self._point == "emit" and role == "target" and max(epochs, default=0) > 0:
            self.reached.set()  # the round after the one that its caller doesn't read

    def _answer(self, role: str, batch: Any) -> Iterable[Any]:
        epoch = max((item.cache_epoch for item in batch.items if item.request_id == self.request_id), default=-1)
        held_at = {"prefill": ("target", 0), "propose": ("draft", 2), "verify": ("target", 2)}
        if held_at.get(self._point) == (role, epoch):
            self.reached.set()
            self.go_on.wait(180)
        elif self._point == "commit" and (role, epoch) == ("target", 2):
            self._store.client_pause(180_000, all=False)
        yield batch


TIMEOUTS = {"cancels": (120.0,), "disconnects": (120.0,), "expires": (1.0, 8.0, 60.0)}
"""Seconds that the call has; the next, where the point was not reached before its deadline, on a slow machine."""


@pytest.mark.parametrize("way", TIMEOUTS)
@pytest.mark.parametrize("point", ["prefill", "propose", "verify", "commit", "emit"])
@pytest.mark.usefixtures("canary")
def test_a_caller_that_leaves_ends_the_work_at_once(
    stack: Stack,
    liars: dict[str, LyingWorker],
    orchestrator: ServiceProcess,
    lied_to: grpc.Channel,
    point: str,
    way: str,
) -> None:
    """Of the round that it leaves in, and of the next one, which may be under way: nothing after that."""
    _wait_for_the_draft(lied_to)
    host, _, port = orchestrator.address.rpartition(":")
    with ProxyThread(host, int(port)) as proxy:
        channel = (paced_channel if point == "emit" else _hasty_channel)(f"{host}:{proxy.port}")
        try:
            stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
            for timeout in TIMEOUTS[way]:
                departure = Departure(stack, liars, f"{way}-{point}-{timeout:g}", point)
                call = stub.Generate(request(PROMPT, request_id=departure.request_id, **LONG), timeout=timeout)
                if departure.reached.wait(min(timeout, 60)):
                    break
                departure.goes_on()
            else:
                raise AssertionError("it never got there")
            if way == "cancels":
                call.cancel()
            elif way == "disconnects":
                proxy.do(_break_off)
            _until(lambda: departure.told == set(METHODS))
            departure.goes_on()
            _until(departure.is_let_go)
            _wait_for_the_draft(lied_to)
            assert departure.late == []
        finally:
            channel.close()
            departure.goes_on()
            for liar in liars.values():
                liar.lie, liar.heard = honest, lambda batch: None


def _hasty_channel(address: str) -> grpc.Channel:
    """Whose calls don't wait for a connection that was broken off."""
    return open_channel(address, patient=False)


def _break_off(proxy: TcpProxy) -> None:
    """Without a word: a channel that is closed cancels its calls first."""
    proxy.refusing = True
    proxy.reset()


def _until(condition: Callable[[], bool]) -> None:
    """Longer than any deadline of a call above."""
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# A store that forgets, fills up, hangs and goes away. Tokens already sent are right, and what comes next is well.


class StoreOfOne:
    """An orchestrator with a store of its own."""

    def __init__(self, store: RedisServer, channel: grpc.Channel, process: ServiceProcess) -> None:
        self.store, self.process = store, process
        self._channel = channel

    def disturbed(self, disturb: Callable[[], None]) -> tuple[list[int], grpc.StatusCode]:
        """The tokens and the status of a request in whose course this happens."""
        received: list[int] = []
        responses = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel).Generate(
            request(PROMPT, **LONG), timeout=120
        )
        try:
            for response in responses:
                before = len(received)
                received += [token.token_id for token in response.tokens]
                if before < 20 <= len(received):
                    disturb()
        except grpc.RpcError as error:
            return received, error.code()
        return received, grpc.StatusCode.OK

    def whole(self) -> list[int]:
        """The output when nothing happens."""
        return generate(self._channel, PROMPT, **LONG).ids


LONG = {**CANARY, "max_tokens": 80}


@pytest.fixture(scope="module")
def store_of_one(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreOfOne]:
    folder, address = tmp_path_factory.mktemp("store"), f"127.0.0.1:{free_port()}"
    store = kinds()[0].create(folder, {"appendonly": "yes"})
    environment = {
        "TANDEM_ORCHESTRATOR_LISTEN": address,
        "TANDEM_DRAFT_ADDRESSES": stack.draft.address,
        "TANDEM_TARGET_ADDRESSES": stack.target.address,
        "TANDEM_TOKENIZER": str(MODELS / "tiny-target"),
        "TANDEM_REDIS_URL": store.url,
        "TANDEM_STORE_TIMEOUT_SECONDS": "1",
        "TANDEM_STORE_RETRY_SECONDS": "30",
        "TANDEM_READER_TIMEOUT_SECONDS": "10",
    }
    process = ServiceProcess("orchestrator", address, environment, folder / "log")
    store.start()
    process.start()
    try:
        process.wait_serving()
        with paced_channel(address) as channel:
            yield StoreOfOne(store, channel, process)
    finally:
        process.stop()
        store.close()


def test_a_caller_that_reads_nothing_is_told_why_it_was_ended(store_of_one: StoreOfOne) -> None:
    """Not even its first response fits into a window of one byte."""
    with paced_channel(store_of_one.process.address) as channel:
        sent = request(PROMPT, request_id="unread", **LONG)
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(sent, timeout=180)
        deadline = time.monotonic() + 150
        while not re.search("request ended.*request_id=unread", store_of_one.process.log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def _restarted_after(store: RedisServer, seconds: float) -> None:
    store.stop()
    threading.Timer(seconds, store.start).start()


LIVED_THROUGH: dict[str, Callable[[RedisServer], Any]] = {
    "scripts are forgotten": lambda store: store.command("SCRIPT", "FLUSH"),
    "a pause longer than the timeout": lambda store: store.command("CLIENT", "PAUSE", "1500"),
    "a restart": lambda store: _restarted_after(store, 1.5),
}


@pytest.mark.parametrize("name", LIVED_THROUGH)
def test_a_store_that_is_back_in_time(store_of_one: StoreOfOne, name: str) -> None:
    whole = store_of_one.whole()
    received, status = store_of_one.disturbed(lambda: LIVED_THROUGH[name](store_of_one.store))
    assert (received, status) == (whole, grpc.StatusCode.OK)


FATAL: dict[str, tuple[Callable[[RedisServer], Any], grpc.StatusCode]] = {
    "everything is forgotten": (lambda store: store.command("FLUSHALL"), grpc.StatusCode.UNAVAILABLE),
    "no memory is left": (
        lambda store: store.command("CONFIG", "SET", "maxmemory", "100kb"),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
}


@pytest.mark.parametrize("name", FATAL)
def test_a_store_that_takes_no_more(store_of_one: StoreOfOne, name: str) -> None:
    whole = store_of_one.whole()
    disturb, expected = FATAL[name]
    received, status = store_of_one.disturbed(lambda: disturb(store_of_one.store))
    store_of_one.store.command("CONFIG", "SET", "maxmemory", "0")
    assert status == expected
    assert 20 <= len(received) < len(whole)
    assert received == whole[: len(received)]
    store_of_one.process.wait_serving()
    assert store_of_one.whole() == whole


# What only happens when two things come together.


@pytest.mark.parametrize("ticks", range(5))
async def test_a_caller_that_leaves_as_its_place_comes_holds_no_place(ticks: int) -> None:
    admission = Admission(max_running=1, max_waiting=4, max_waiting_seconds=600)
    entered: list[str] = []

    async def hold(name: str) -> None:
        async with admission.place():
            entered.append(name)

    async with admission.place():
        leaver = asyncio.create_task(hold("leaver"))
        stayer = asyncio.create_task(hold("stayer"))
        await asyncio.sleep(0.01)
    for _ in range(ticks):
        await asyncio.sleep(0)
    too_late = leaver.done()
    leaver.cancel()
    await asyncio.wait((leaver, stayer))
    assert leaver.cancelled() is not too_late
    assert entered == ["leaver"] * too_late + ["stayer"]
    assert (admission.running, admission.waiting) == (0, 0)


@pytest.mark.parametrize("ticks", range(5))
async def test_a_request_that_ends_as_a_replica_comes_waits_no_more(ticks: int) -> None:
    pool: ReplicaPool[Any, Any] = ReplicaPool((), _fake_kind(_FakeStream()), lambda info: None, lambda: None)
    waiter = asyncio.create_task(pool.wait_for_change(600))
    await asyncio.sleep(0.01)
    pool._changed.set()
    for _ in range(ticks):
        await asyncio.sleep(0)
    too_late = waiter.done()
    waiter.cancel()
    await asyncio.wait((waiter,))
    assert waiter.cancelled() is not too_late


class _FakeStream:
    """A stream whose writes take as long as the test likes."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.written: asyncio.Queue[Any] = asyncio.Queue()

    async def write(self, message: Any) -> None:
        self.written.put_nowait(message)
        await self.may_write.wait()

    async def read(self) -> Any:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        pass

    async def GetModelInfo(self, *_: Any, **__: Any) -> worker_pb2.GetModelInfoResponse:
        return worker_pb2.GetModelInfoResponse()


def _fake_kind(stream: _FakeStream) -> WorkerKind[Any, Any]:
    return WorkerKind(
        role="draft",
        stub=lambda channel: stream,
        open_stream=lambda stub: stub,
        pack=lambda items, releases: draft_pb2.ProposeBatch(items=items, release_request_ids=releases),
        reader=lambda: lambda item, about: None,
    )


async def test_an_item_that_waits_to_be_sent_goes_with_its_request() -> None:
    """A message's releases come before its items: an item left behind would open a session that nobody ends."""
    stream, connected = _FakeStream(), asyncio.Event()
    replica: Replica[Any, Any] = Replica("127.0.0.1:1", _fake_kind(stream), lambda info: None, connected.set)
    await connected.wait()
    first = replica.submit(good_item("draft", "first"))
    await stream.written.get()
    gone, stays = replica.submit(good_item("draft", "gone")), replica.submit(good_item("draft", "stays"))
    replica.release("gone", replica.generation)
    stream.may_write.set()
    message = await stream.written.get()
    assert list(message.release_request_ids) == ["gone"]
    assert [item.request_id for item in message.items] == ["stays"]
    assert (first.done(), stays.done()) == (False, False)
    assert isinstance(gone.exception(), StreamLost)
    await replica.close()


async def test_a_release_leaves_nothing_to_wait_for() -> None:
    """A draft that never answers, on a stream that stays open, would otherwise be remembered for ever."""
    stream, connected = _FakeStream(), asyncio.Event()
    stream.may_write.set()
    replica: Replica[Any, Any] = Replica("127.0.0.1:1", _fake_kind(stream), lambda info: None, connected.set)
    await connected.wait()
    answer, other = replica.submit(good_item("draft", "silent")), replica.submit(good_item("draft", "other"))
    await stream.written.get()
    replica.release("silent", replica.generation)
    assert isinstance(answer.exception(), StreamLost)
    assert [request_id for request_id, _ in replica._pending] == ["other"]
    assert not other.done()
    await replica.close()


async def test_two_requests_of_one_id_do_not_cancel_one_another() -> None:
    """A store that has forgotten a request takes its id again. A cancellation would pass for the caller's own."""
    stream, connected = _FakeStream(), asyncio.Event()
    replica: Replica[Any, Any] = Replica("127.0.0.1:1", _fake_kind(stream), lambda info: None, connected.set)
    await connected.wait()
    first, second = replica.submit(good_item("draft", "twin")), replica.submit(good_item("draft", "twin"))
    assert isinstance(first.exception(), StreamLost)
    assert not second.done()
    await replica.close()


async def test_an_answer_that_is_late_is_still_to_be_had() -> None:
    """And the ones behind it have their own time."""
    stream, connected = _FakeStream(), asyncio.Event()
    replica: Replica[Any, Any] = Replica("127.0.0.1:1", _fake_kind(stream), lambda info: None, connected.set)
    await connected.wait()
    first, patient = (
        replica.submit(good_item("draft", "first"), 0.02),
        replica.submit(good_item("draft", "patient"), 600),
    )
    with pytest.raises(AnswerLate) as late:
        await first
    assert not patient.done()
    assert not late.value.answer.done()
    error = worker_pb2.ItemError(message="found nothing")
    replica._resolve(draft_pb2.ProposalItem(request_id="first", cache_epoch=0, error=error), replica._kind.reader())
    assert isinstance(late.value.answer.exception(), ItemFailed)
    assert replica.pending_items == 1
    await replica.close()


def test_a_support_that_no_target_takes_is_refused() -> None:
    """The target's refusal would end the request; the draft's fault must not."""
    ids = np.arange(MAX_SUPPORT_SIZE + 1, dtype=np.uint32)
    q = np.full(ids.size, 1 / ids.size, dtype=np.float32)
    assert check_drafted(3, ids[:-1], q[:-1] / q[:-1].sum(), 49_152).index == 3
    with pytest.raises(DraftContractError, match="at most"):
        check_drafted(3, ids, q, 49_152)
    assert are_supports(np.stack([ids[:-1], ids[1:]]), 49_152)
    assert not are_supports(np.stack([ids, ids]), 49_152)
