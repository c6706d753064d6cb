"""The rounds of one request: propose -> verify -> accept -> commit -> emit.

The commit is the only point where tokens become real, and only what the caller sees waits for it: the next round's
proposal and verification run beside it. If the commit fails, the round that ran ahead is thrown away. It fails too where the
request's sampling was changed since the round began: neither round counts then, and a new decoder goes on from what is committed.

A block is checked while the target verifies it, and the verification of what turns out to be no block is void.

The next round's first item leaves as soon as the tokens are known: their text is made while it is answered. Only where they may end
the completion, which the text may have to tell, it is made first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

from tandem import wire
from tandem.acceptance import Outcome, TargetRow, accept
from tandem.randomness import UniformsAhead

from .completion import Completion, EmittedToken
from .drafting import DECLINED, PLAIN, Block, Drafting, Proposed
from .errors import DeadEnd
from .gamma_controller import Choice, GammaPolicy
from .logprobs import with_logprobs
from .metrics import RoundReport
from .prefix import Prefix
from .recorder import RequestRecorder, RoundRecorder
from .request import GenerationPlan
from .round_costs import RoundTimes
from .scoring import Scoring
from .session_store import ConfigChanged, Ownership, SessionStore

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Scored:
    """A block and the target's rows for it."""

    block: Block
    rows: list[TargetRow]
    record: RoundRecorder
    choice: Choice
    times: RoundTimes


@dataclass(slots=True)
class _Round:
    """What one round adds to the completion."""

    scored: _Scored
    outcome: Outcome
    emitted: list[EmittedToken] | None
    """None until the tokens have their text."""
    encoded: bytes


class Decoder:
    """Runs one request to its end, from the tokens that are committed already."""

    def __init__(
        self,
        plan: GenerationPlan,
        completion: Completion,
        drafting: Drafting,
        scoring: Scoring,
        gamma: GammaPolicy,
        store: SessionStore,
        ownership: Ownership,
        committed: bytes,
        recorder: RequestRecorder,
    ) -> None:
        self._plan = plan
        self._completion = completion
        self._drafting = drafting
        self._scoring = scoring
        self._gamma = gamma
        self._store = store
        self._ownership = ownership
        self._recorder = recorder
        self._prefix = Prefix(plan.prompt + committed)
        self._uniforms = UniformsAhead(plan.sampling.seed)
        self._epoch = ownership.epoch

    async def rounds(self) -> AsyncGenerator[list[EmittedToken]]:
        """Yields the committed tokens of each round. Raises RequestFailed; the store's errors pass through, ConfigChanged with no
        round under way any more."""
        loop = asyncio.get_running_loop()
        scored = await self._propose_and_verify()
        while True:
            finished_round = self._accept(scored)
            ahead = None if self._finished else loop.create_task(self._propose_and_verify())
            try:
                await self._commit(finished_round)
                yield self._committed(finished_round)
                if ahead is None:
                    return
                scored = await ahead
            except ConfigChanged as changed:
                await _ended(ahead)
                if changed.stored.length != self._prefix.length:
                    raise
                # It was stored before the change, by an attempt whose answer was lost.
                yield self._committed(finished_round)
                if ahead is not None:
                    raise
                return
            finally:
                if ahead is not None:
                    _drop(ahead)

    @property
    def epoch(self) -> int:
        """Commits so far, the one in flight included."""
        return self._epoch

    @property
    def _finished(self) -> bool:
        return self._completion.finish_reason is not None

    @property
    def _remaining(self) -> int:
        """Tokens that may still come after those of the prefix, of which the completion may not have the last ones yet."""
        return self._plan.max_tokens - (self._prefix.length - self._plan.prompt_tokens)

    async def _propose_and_verify(self) -> _Scored:
        # One token comes from the target's own row, so a block longer than the rest is work for nothing.
        drafting = self._drafting
        choice = self._gamma.choose(self._remaining - 1, drafting.limit, drafting.to_read(self._prefix))
        record = self._recorder.begin_round(self._epoch)
        record.chosen(choice)
        began = perf_counter()
        longest = self._plan.num_speculative_tokens
        proposed = await drafting.propose(self._prefix, self._epoch, choice, longest, record)
        asked = perf_counter()
        if proposed is DECLINED:
            record.declined()
        record.proposed(len(proposed.token_ids))
        block, rows = await self._verify(proposed, record)
        record.verified()
        times = self._times(len(block.drafted), asked - began, perf_counter() - asked)
        return _Scored(block, rows, record, choice, times)

    async def _verify(self, proposed: Proposed, record: RoundRecorder) -> tuple[Block, list[TargetRow]]:
        """The block and the target's rows for it; of what turns out to be no block, those for none."""
        if not proposed.token_ids:
            return Block(), await self._scoring.verify(self._prefix, self._epoch, proposed, record)
        look = partial(self._drafting.look_at, proposed, self._epoch, record)
        rows = await self._scoring.verify(self._prefix, self._epoch, proposed, record, look)
        block = self._drafting.confirm(proposed, self._epoch, record)
        if not block.drafted:
            rows = await self._scoring.verify(self._prefix, self._epoch, PLAIN, record)
        return block, rows

    def _times(self, block: int, propose_seconds: float, verify_seconds: float) -> RoundTimes:
        drafting, scoring = self._drafting, self._scoring
        return RoundTimes(
            block,
            propose_seconds if drafting.ordinary else None,
            verify_seconds if scoring.ordinary else None,
            drafting.worker_time,
            scoring.worker_time,
            drafting.asked,
        )

    def _accept(self, scored: _Scored) -> _Round:
        block, record, length = scored.block, scored.record, self._prefix.length
        record.accept_began()
        draws = self._uniforms.at(length, len(block.drafted) + 1)
        outcome = before_dead_end(accept(block.drafted, scored.rows, draws, block.look_ahead), scored.rows)
        if bool(block.drafted) == bool(scored.choice.gamma):
            self._gamma.observe(outcome.expected_acceptance, scored.times)
        token_ids, emitted = outcome.token_ids, None
        if self._completion.may_end_in(token_ids):
            emitted = self._take(scored, outcome)
            token_ids = token_ids[: len(emitted)]
        self._log(record.accepted(block, outcome, len(token_ids)))
        encoded = wire.encode_ids(token_ids)
        self._drafting.settle(length, outcome.accepted)
        self._scoring.settle(length, outcome.accepted)
        self._prefix.append(encoded)
        self._epoch += 1
        return _Round(scored, outcome, emitted, encoded)

    def _take(self, scored: _Scored, outcome: Outcome) -> list[EmittedToken]:
        """What the completion takes of the outcome, with its text."""
        emitted = self._completion.take(outcome.token_ids, outcome.kinds)
        return with_logprobs(emitted, scored.block, scored.rows) if self._plan.sampling.logprobs else emitted

    def _log(self, report: RoundReport) -> None:
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "round: drafted %d, accepted %d, emitted %d",
                report.drafted,
                report.accepted,
                report.emitted,
                extra={
                    "request_id": self._plan.request_id,
                    "trace_id": self._recorder.trace_id,
                    "cache_epoch": self._epoch,
                },
            )

    async def _commit(self, finished_round: _Round) -> None:
        length = self._prefix.length - len(finished_round.encoded) // wire.TOKEN_BYTES
        recommitting = finished_round.scored.record.recommitting
        await self._store.commit(self._ownership, self._epoch - 1, length, finished_round.encoded, recommitting)

    def _committed(self, finished_round: _Round) -> list[EmittedToken]:
        """The tokens, which are real now."""
        finished_round.scored.record.committed()
        if finished_round.emitted is not None:
            return finished_round.emitted
        return self._take(finished_round.scored, finished_round.outcome)


def _drop(ahead: asyncio.Task[_Scored]) -> None:
    """Nobody waits for it any more, nor wants to know how it failed."""
    if ahead.done():
        _hear(ahead)  # at once: a callback would be a turn of the event loop for each round
        return
    ahead.cancel()
    ahead.add_done_callback(_hear)


def _hear(ahead: asyncio.Task[_Scored]) -> None:
    if not ahead.cancelled():
        ahead.exception()


async def _ended(ahead: asyncio.Task[_Scored] | None) -> None:
    """Gives the round that ran ahead up, and waits until it has let go of draft and target."""
    if ahead is not None:
        ahead.cancel()
        await asyncio.gather(ahead, return_exceptions=True)


def before_dead_end(outcome: Outcome, rows: Sequence[TargetRow]) -> Outcome:
    """The outcome up to a row where the output's form allows nothing, which the next round meets again; so what is emitted
    doesn't depend on blocks. Raises DeadEnd where that is the first row."""
    dead_ends = [row.dead_end for row in rows[: len(outcome.token_ids)]]
    if True not in dead_ends:
        return outcome
    dead = dead_ends.index(True)
    if dead == 0:
        raise DeadEnd("structured_output: it is too complex to go on with", "DEAD_END")
    return replace(outcome, token_ids=outcome.token_ids[:dead], kinds=outcome.kinds[:dead], accepted=dead)
