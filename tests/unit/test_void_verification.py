"""A block is checked while the target verifies it: of one that turns out to be none the verdict is not used, be it there first or not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from orchestrator.completion import Completion
from orchestrator.decoder import Decoder
from orchestrator.drafting import DRAFT, Drafting, DraftingPolicy, DraftPool, Proposed, _lied
from orchestrator.gamma_controller import FixedGamma
from orchestrator.metrics import Metrics
from orchestrator.proposals import ReceivedProposal
from orchestrator.recorder import RequestRecorder
from orchestrator.request import GenerationPlan
from orchestrator.round_costs import RoundCosts
from orchestrator.session_store import Ownership
from orchestrator.speed_estimate import SpeedEstimate
from tandem import wire
from tandem.acceptance import DraftContractError, TargetRow
from tandem.v1 import draft_pb2, sampling_pb2

VOCABULARY, GAMMA, DRAFTED, PLAINLY = 100, 2, 5, 7
SUPPORT = [3, DRAFTED, 9]
PLAN = GenerationPlan(
    request_id="r",
    prompt=wire.encode_ids([1, 2]),
    prompt_tokens=2,
    sampling=sampling_pb2.Sampling(),
    num_speculative_tokens=GAMMA,
    adaptive=False,
    max_tokens=6,
    min_tokens=0,
    end_token_ids=frozenset(),
    stop=(),
    include_stop=False,
    cache_salt="",
)
PROBABILITIES: dict[str, list[float]] = {
    "good": [0.25, 0.5, 0.25],
    "sums to a half": [0.125, 0.25, 0.125],
    "sums to two": [0.5, 1.0, 0.5],
    "not a number": [0.25, float("nan"), 0.25],
    "negative": [-0.25, 0.75, 0.5],
    "nothing on the token": [0.5, 0.0, 0.5],
    "of another length": [0.5, 0.5],
}


class Liar(Drafting):
    """A draft that answers at once, with the same probabilities each time."""

    def __init__(self, q: list[float], token_id: int) -> None:
        pool = DraftPool([], DRAFT, lambda _: None, lambda: None)
        super().__init__("r", pool, PLAN.sampling, DraftingPolicy(1.0, 0.0, look_ahead=False), VOCABULARY)
        token = draft_pb2.DraftedToken(
            token_id=token_id, support_ids=wire.encode_ids(SUPPORT), support_probs=wire.encode_probs(q)
        )
        self._proposal = draft_pb2.Proposal(tokens=[token] * GAMMA)

    async def _ask(self, *_: Any) -> Proposed:
        try:
            return self._readable(ReceivedProposal.alone(self._proposal), GAMMA, look_ahead=False)
        except (DraftContractError, wire.WireError) as lie:
            raise _lied(lie) from lie


class Scored:
    """In the target's place: it is certain of the drafted tokens where there are some, and else of another one."""

    ordinary = True
    worker_time = None

    def __init__(self, *, looks: bool) -> None:
        self.blocks: list[list[int]] = []
        self._looks = looks

    async def verify(
        self, _prefix: Any, _epoch: int, proposed: Proposed, _record: Any, meanwhile: Callable[[], None] | None = None
    ) -> list[TargetRow]:
        self.blocks.append(list(proposed.token_ids))
        if self._looks and meanwhile is not None:
            meanwhile()
        certain = np.array([0.0, 1.0, 0.0], dtype=np.float32)
        return [*(TargetRow(certain, 0.0, 0) for _ in proposed.token_ids), TargetRow(certain[:0], 1.0, PLAINLY)]

    def settle(self, prefix_length: int, accepted: int) -> None:
        """Holds nothing."""


async def outcome(
    q: list[float], token_id: int = DRAFTED, *, looks: bool
) -> tuple[list[int], list[list[int]], RequestRecorder]:
    """The text's tokens, what the target was asked for, and what was recorded."""

    async def commit(*_: Any) -> None:
        """Takes it."""

    recorder, scored = RequestRecorder("r", Metrics(CollectorRegistry()), None), Scored(looks=looks)
    completion, gamma = Completion(PLAN, lambda ids: "x" * len(ids)), FixedGamma(GAMMA, SpeedEstimate(RoundCosts()))
    store, ownership = SimpleNamespace(commit=commit), Ownership("r", 1, b"", 0, 2, (b"", b""))
    parts: Any = (completion, Liar(q, token_id), scored, gamma, store, ownership, b"", recorder)
    emitted: list[int] = []
    async for tokens in Decoder(PLAN, *parts).rounds():
        emitted += [token.token_id for token in tokens]
    return emitted, scored.blocks, recorder


@pytest.mark.parametrize("looks", [True, False])
async def test_a_good_block_is_verified_once(looks: bool) -> None:
    emitted, blocks, recorder = await outcome(PROBABILITIES["good"], looks=looks)
    assert emitted == [DRAFTED, DRAFTED, PLAINLY] * 2
    assert blocks == [[DRAFTED] * GAMMA] * 2
    assert (recorder.statistics.accepted, recorder.statistics.degraded) == (4, {})


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("name", [name for name in PROBABILITIES if name != "good"])
async def test_the_verdict_on_a_lie_is_not_used(name: str, looks: bool) -> None:
    emitted, blocks, recorder = await outcome(PROBABILITIES[name], looks=looks)
    assert emitted == [PLAINLY] * PLAN.max_tokens
    sent = [] if name == "of another length" else [[DRAFTED] * GAMMA]  # which is seen before anything is sent
    assert blocks[: len(sent) + 1] == [*sent, []]
    # Each round but the last, which has room for one token and wants no block.
    assert recorder.statistics.degraded == {"draft_invalid": PLAN.max_tokens - 1}
    assert recorder.statistics.drafted == 0
    assert recorder.missed_a_block


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize(("token_id", "sent"), [(VOCABULARY, []), (8, [[8] * GAMMA])])
async def test_a_token_that_was_not_drawn_is_not_used(token_id: int, sent: list[list[int]], looks: bool) -> None:
    """One that is out of the vocabulary is not even sent."""
    emitted, blocks, _ = await outcome(PROBABILITIES["good"], token_id, looks=looks)
    assert emitted == [PLAINLY] * PLAN.max_tokens
    assert blocks[: len(sent) + 1] == [*sent, []]


@pytest.mark.parametrize("change", [True, False])
async def test_a_round_that_is_given_up_is_not_looked_at(change: bool) -> None:
    """Its block counts for nothing, nor does its lie."""
    liar = Liar(PROBABILITIES["sums to two"], DRAFTED)
    record = RequestRecorder("r", Metrics(CollectorRegistry()), None)
    proposed = liar._unconfirmed = await liar._ask()
    if change:
        liar.change(PLAN.sampling, 2)
    else:
        liar.release()
    liar.look_at(proposed, 0, record.begin_round(0))
    assert proposed.block is None
    assert not record.missed_a_block
