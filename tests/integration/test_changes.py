"""What a decoder makes of a change of the sampling, with a real store: the round whose commit was stored is emitted, the others are not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from orchestrator.completion import Completion, FinishReason
from orchestrator.decoder import Decoder
from orchestrator.drafting import DRAFT, Drafting, DraftingPolicy, DraftPool
from orchestrator.gamma_controller import FixedGamma
from orchestrator.generation import Generations
from orchestrator.metrics import Metrics
from orchestrator.recorder import RequestRecorder
from orchestrator.request import GenerationPlan
from orchestrator.round_costs import RoundCosts
from orchestrator.session import Session
from orchestrator.session_store import ConfigChanged, Ownership, SessionStore, StoreConfig
from orchestrator.speed_estimate import SpeedEstimate
from tandem import wire
from tandem.acceptance import TargetRow
from tandem.transport_security import ClientFiles
from tandem.v1 import sampling_pb2
from tests.support.redis_servers import RedisServer

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


def decoder(store: SessionStore, ownership: Ownership, completion: Completion, scoring: Counting) -> Decoder:
    gamma = FixedGamma(0, SpeedEstimate(RoundCosts()))
    return Decoder(PLAN, completion, drafting(), scoring, gamma, store, ownership, b"", recorder())  # type: ignore[arg-type]


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
    stretch = Generations(runtime, SimpleNamespace())._stretch(  # type: ignore[arg-type]
        Session(PLAN, "model", ownership),
        ownership,
        completion,
        drafting(),
        Counting(),
        recorder(),
        limits,  # type: ignore[arg-type]
    )
    ids: list[int] = []
    try:
        async for response in stretch:
            ids += [token.token_id for token in response.tokens]
    except ConfigChanged:
        assert changed
    assert ids == [3, 4, 5, 6][: 2 if changed else 4]
    assert gamma.observed == (3 if changed else 4), "its acceptance was known before its commit failed"
    assert gamma.handed_on == (None if changed else 4)
    await store.delete(ownership)
