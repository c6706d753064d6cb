"""A change of the sampling, with a real store: the round whose commit was stored is emitted, the others are not; a request goes on
however often it is changed, and its caller pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from orchestrator import callers, stored_request
from orchestrator.call import GrpcCall
from orchestrator.completion import Completion, FinishReason
from orchestrator.decoder import Decoder
from orchestrator.drafting import DRAFT, Drafting, DraftingPolicy, DraftPool
from orchestrator.errors import InvalidArgument, NotFound, Overloaded, RequestFailed, Unavailable
from orchestrator.gamma_controller import FixedGamma
from orchestrator.generation import Generations
from orchestrator.metrics import Metrics
from orchestrator.recorder import RequestRecorder
from orchestrator.request import GenerationPlan, Limits
from orchestrator.round_costs import RoundCosts
from orchestrator.sampling_update import SamplingUpdate
from orchestrator.session import Session, Sessions
from orchestrator.session_store import (
    ChangedTooSoon,
    ConfigChanged,
    Ownership,
    SessionStore,
    StoreConfig,
    StoreUnavailable,
)
from orchestrator.speed_estimate import SpeedEstimate
from orchestrator.token_budget import TokenBudget
from orchestrator.updates import SamplingUpdates
from orchestrator.vocabulary import Vocabulary
from tandem import wire
from tandem.acceptance import TargetRow, TokenKind
from tandem.transport_security import ClientFiles
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2
from tests.support.redis_servers import RedisServer
from tests.support.services import MODELS

pytest_plugins = ("tests.support.redis_fixtures",)

FORMER, LATTER = b"former", b"latter"
PLAN = GenerationPlan(
    request_id="r",
    prompt=wire.encode_ids([5, 6, 7]),
    prompt_tokens=3,
    sampling=sampling_pb2.Sampling(),
    num_speculative_tokens=0,
    adaptive=False,
    max_tokens=4,
    min_tokens=0,
    end_token_ids=frozenset(),
    stop=(),
    include_stop=False,
    cache_salt="",
)


@dataclass
class Counting:
    """In the target's place: every token is the length of what comes before it."""

    ordinary = True
    worker_time = None
    epochs: list[int] = field(default_factory=list)

    async def verify(self, prefix: Any, epoch: int, *_: Any) -> list[TargetRow]:
        self.epochs.append(epoch)
        return [TargetRow(np.empty(0, dtype=np.float32), 1.0, prefix.length)]

    def settle(self, prefix_length: int, accepted: int) -> None:
        """Holds nothing."""


@pytest.fixture
async def store(one_redis_server: RedisServer) -> AsyncIterator[SessionStore]:
    connected = await SessionStore.connect(StoreConfig(url=one_redis_server.url, socket_timeout=30))
    yield connected
    await connected.close()


def decoder(
    store: SessionStore, ownership: Ownership, completion: Completion, scoring: Counting, committed: bytes = b""
) -> Decoder:
    gamma = FixedGamma(0, SpeedEstimate(RoundCosts()))
    return Decoder(PLAN, completion, drafting(), scoring, gamma, store, ownership, committed, recorder())  # type: ignore[arg-type]


def drafting() -> Drafting:
    drafts = DraftPool([], DRAFT, lambda _: None, lambda: None, ClientFiles())
    return Drafting("r", drafts, PLAN.sampling, DraftingPolicy(1.0, 1.0, look_ahead=False), 512)


def recorder() -> RequestRecorder:
    return RequestRecorder("r", Metrics(CollectorRegistry()), None)


def changed_in(store: SessionStore, epoch: int, *, stored: bool) -> Callable[..., Any]:
    """A commit amid which the sampling is changed: before it comes to the store, or after it, where its answer is lost and it is repeated."""
    commit = store.commit

    async def disturbed(ownership: Ownership, at: int, *rest: Any) -> None:
        if at == epoch:
            if stored:
                await commit(ownership, at, *rest)
            before = await store.read("r")
            assert before is not None
            await store.update(before, LATTER)
        await commit(ownership, at, *rest)

    return disturbed


@pytest.mark.parametrize(("stored", "expected"), [(False, [3, 4]), (True, [3, 4, 5])])
async def test_what_is_stored_is_emitted_and_what_is_not_is_dropped(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, stored: bool, expected: list[int]
) -> None:
    ownership = await store.create("r", b"print", FORMER, PLAN.prompt, "A")
    monkeypatch.setattr(store, "commit", changed_in(store, 2, stored=stored))
    completion, scoring = Completion(PLAN, lambda ids: "x" * len(ids)), Counting()
    emitted: list[int] = []
    with pytest.raises(ConfigChanged):
        async for tokens in decoder(store, ownership, completion, scoring).rounds():
            emitted += [token.token_id for token in tokens]
    known = await store.reread(ownership)
    assert emitted == expected == wire.decode_ids(known.tokens).tolist()[3:]
    # No answer to a round that was under way can be taken for one of a round after the change.
    assert known.epoch > max(scoring.epochs)
    await store.delete(ownership)


async def test_a_commit_and_a_round_ahead_that_fail_together_fail_once(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's failure that nobody asks for is a traceback in the log."""
    ahead_failed = asyncio.Event()

    class Away(Counting):
        async def verify(self, prefix: Any, epoch: int, *rest: Any) -> list[TargetRow]:
            if epoch > 0:
                ahead_failed.set()
                raise Unavailable("no target", "TARGET_UNAVAILABLE")
            return await super().verify(prefix, epoch, *rest)

    async def commit(*_: Any) -> None:
        await ahead_failed.wait()
        await asyncio.sleep(0)
        raise StoreUnavailable("no store")

    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
    monkeypatch.setattr(store, "commit", commit)
    ownership = Ownership("r", 1, b"", 0, 3, (b"", b""))
    with pytest.raises(StoreUnavailable):
        async for _ in decoder(store, ownership, Completion(PLAN, lambda ids: "x" * len(ids)), Away()).rounds():
            raise AssertionError("nothing is committed")
    gc.collect()
    await asyncio.sleep(0)
    assert unheard == []


async def test_keys_that_never_expire_outlive_a_change(store: SessionStore, one_redis_server: RedisServer) -> None:
    """An operator's PERSIST, for example. What is written for those who hold the change must not set a time."""
    ownership = await store.create("r", b"print", FORMER, PLAN.prompt, "A")
    async with Redis.from_url(one_redis_server.url) as operator:
        for key in ownership.keys:
            assert await operator.persist(key)
        before = await store.read("r")
        assert before is not None
        for _ in range(2):  # the second time, it is in force already
            await store.update(before, LATTER)
        with pytest.raises(ConfigChanged):
            await store.commit(ownership, 0, 3, wire.encode_ids([7]))
        with pytest.raises(ConfigChanged):
            await store.finish(ownership, 0, b"")
        assert [await operator.pttl(key) for key in ownership.keys] == [-1, -1]
    await store.delete(ownership)


def test_a_prompt_is_counted_once_however_often_its_request_is_gone_on_with() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    for again in (False, True, True):
        RequestRecorder("r", metrics, None).planned(PLAN, "m", again=again)
    assert registry.get_sample_value("tandem_prompt_tokens_total") == 3


async def test_a_last_round_that_is_stored_ends_the_request(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ownership = await store.create("r", b"print", FORMER, PLAN.prompt, "A")
    monkeypatch.setattr(store, "commit", changed_in(store, 3, stored=True))
    completion = Completion(PLAN, lambda ids: "x" * len(ids))
    rounds = [tokens async for tokens in decoder(store, ownership, completion, Counting()).rounds()]
    assert [token.token_id for tokens in rounds for token in tokens] == [3, 4, 5, 6]
    assert completion.finish_reason is FinishReason.LENGTH
    with pytest.raises(ConfigChanged):
        await store.finish(ownership, 4, b"finish")
    again = (await store.reread(ownership)).ownership
    assert again is not None
    await store.finish(again, again.epoch, b"finish")
    await store.delete(again)


class Learning(FixedGamma):
    """Notes how many rounds it had observed when it handed on what it had learnt."""

    observed = 0
    handed_on: int | None = None

    def observe(self, *_: Any) -> None:
        self.observed += 1

    def finish(self) -> None:
        self.handed_on = self.observed


@pytest.mark.parametrize("changed", [True, False])
async def test_what_was_seen_of_a_dropped_round_is_not_handed_on(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    ownership = await store.create("r", b"print", FORMER, PLAN.prompt, "A")
    if changed:
        monkeypatch.setattr(store, "commit", changed_in(store, 2, stored=False))
    gamma = Learning(0, SpeedEstimate(RoundCosts()))
    runtime = SimpleNamespace(store=store, gamma_policy=lambda _: gamma)
    limits = SimpleNamespace(max_speculative_tokens=0)
    completion = Completion(PLAN, lambda ids: "x" * len(ids))
    ids: list[int] = []

    async def send(response: api.GenerateResponse) -> None:
        ids.extend(token.token_id for token in response.tokens)

    stretch = Generations(runtime, SimpleNamespace())._stretch(  # type: ignore[arg-type]
        Session(PLAN, "model", ownership),
        ownership,
        completion,
        drafting(),
        Counting(),
        recorder(),
        limits,  # type: ignore[arg-type]
        send,
    )
    try:
        await stretch
    except ConfigChanged:
        assert changed
    assert ids == [3, 4, 5, 6][: 2 if changed else 4]
    assert gamma.observed == (3 if changed else 4), "its acceptance was known before its commit failed"
    assert gamma.handed_on == (None if changed else 4)
    await store.delete(ownership)


async def test_a_request_that_is_changed_whenever_it_can_be_comes_to_its_end(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each commit, so that none would ever be stored if it always could."""
    ownership = await store.create("r", b"print", FORMER, PLAN.prompt, "A")
    commit, changes = store.commit, 0

    async def disturbed(owner: Ownership, *rest: Any) -> None:
        nonlocal changes
        before = await store.read("r")
        assert before is not None
        with contextlib.suppress(ChangedTooSoon):
            await store.update(before, LATTER if before.config == FORMER else FORMER)
            changes += 1
        await commit(owner, *rest)

    monkeypatch.setattr(store, "commit", disturbed)
    completion, scoring = Completion(PLAN, lambda ids: "x" * len(ids)), Counting()
    emitted: list[int] = []
    stretches = 0
    while completion.finish_reason is None or len(emitted) < PLAN.max_tokens:
        stretches += 1
        assert stretches <= PLAN.max_tokens + 1, "it never goes on"
        known = await store.reread(ownership)
        assert known.ownership is not None
        ownership, committed = known.ownership, known.tokens[len(PLAN.prompt) :]
        completion.restart()
        completion.take(wire.decode_ids(committed).tolist(), [TokenKind.REPLAYED] * len(emitted))
        with contextlib.suppress(ConfigChanged):
            async for tokens in decoder(store, ownership, completion, scoring, committed).rounds():
                emitted += [token.token_id for token in tokens]
    assert emitted == [3, 4, 5, 6]
    assert changes == PLAN.max_tokens
    assert len(scoring.epochs) <= 3 * PLAN.max_tokens
    await store.delete(ownership)


TOKEN = "a-token-of-sixteen-or-more"
LIMITS = Limits(
    context_length=64,
    vocabulary_size=512,
    max_tokens=8,
    max_prompt_characters=64,
    max_speculative_tokens=8,
    default_speculative_tokens=0,
    adaptive_by_default=False,
    end_token_ids=frozenset(),
)


class CallOfAlice(GrpcCall):
    """With her token, and no certificate."""

    def __init__(self) -> None:
        super().__init__(None)  # type: ignore[arg-type]

    def metadata(self) -> list[tuple[str, str | bytes]]:
        return [("authorization", f"Bearer {TOKEN}")]

    def certificate_name(self) -> str:
        return ""


async def test_a_change_costs_its_caller_tokens_and_what_changes_nothing_costs_none(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(callers, "TokenBudget", partial(TokenBudget, lambda: 0.0))
    path = tmp_path / "callers.toml"
    path.write_text(f"[callers.alice]\ntoken = '{TOKEN}'\nmax_tokens_per_minute = 3\n")
    known, vocabulary = callers.Callers(str(path)), Vocabulary.load(str(MODELS / "tiny-target"), "")
    sessions = Sessions(store, "A", 60.0)
    runtime = SimpleNamespace(callers=known, sessions=sessions, vocabulary=vocabulary, limits=lambda: LIMITS)
    updates = SamplingUpdates(runtime, Metrics(CollectorRegistry()))  # type: ignore[arg-type]

    async def change(request_id: str = "r", **fields: Any) -> api.UpdateSamplingResponse:
        return await updates.run(api.UpdateSamplingRequest(request_id=request_id, **fields), CallOfAlice())

    async def refusal(request_id: str = "r", **fields: Any) -> RequestFailed:
        with pytest.raises(RequestFailed) as caught:
            await change(request_id, **fields)
        return caught.value

    def left() -> float:
        return known._budgets["alice"]._left

    plan = await SamplingUpdate(api.UpdateSamplingRequest(), vocabulary, LIMITS).change(PLAN)  # every default resolved
    ownership = await store.create("r", b"print", stored_request.encode(plan, "model", "alice"), plan.prompt, "A")
    assert await change() == api.UpdateSamplingResponse(), "nothing is asked for"
    assert left() == 3
    first = await change(temperature=0.5)
    assert (first.config_version, first.completion_tokens, left()) == (1, 0, 1)
    assert await change(temperature=0.5) == first
    early = await refusal(temperature=0.7)
    assert isinstance(early, Overloaded)
    assert early.reason == "CHANGED_TOO_SOON"
    assert early.retry_after
    assert isinstance(await refusal("another", temperature=0.7), NotFound)
    assert isinstance(await refusal(temperature=-1.0), InvalidArgument)
    assert left() == 1
    again = (await store.reread(ownership)).ownership
    assert again is not None
    await store.commit(again, again.epoch, 3, wire.encode_ids([9]))
    second = await change(temperature=0.7)
    assert (second.config_version, second.completion_tokens, left()) == (2, 1, -1)
    # Before any work: nobody looks whether there is such a request.
    for request_id in ("r", "another"):
        refused = await refusal(request_id, temperature=0.7)
        assert isinstance(refused, Overloaded)
        assert (refused.reason, refused.retry_after) == ("CALLER_TOKENS", 40.0)
    assert left() == -1
    await store.delete(again)
