"""Drafting ahead: while the target verifies a block, the draft goes on for the outcomes that are likely.

A guess is a prefix that the request may have next: j tokens of the block accepted, then some token b, which the draft
finds likely there; or the whole block and the draft's own next token. Each guess is a row of the draft's forwards, with a
cache slot of its own whose first columns are copied from the request's; all rows draft together, one token a step, and
only in steps in which nothing was asked of the draft. When the next item comes, a guess whose tokens *are* its prefix
gives up what it drafted: the answer, or the beginning of it. Any other outcome is drafted as if nothing had been done.

Why the output stays what it is: a guess's tokens are draws from q given exactly its prefix, with the randomness of their
positions, so the block that a true guess hands over is the one that would have been drafted then. Which prefixes are
guessed is decided from q alone, and a wrong guess leaves no trace: a request's own slot is written only with what belongs
to its own tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from draft_service.ahead_gain import AheadGain
from draft_service.outcome_odds import Foreseen, Guess, OutcomeOdds, candidates
from tandem.acceptance import Drafted
from tandem.engine.feed import Feed
from tandem.engine.idle import AheadStats
from tandem.engine.session import Session, TokenBuffer
from tandem.logit_adjustments import adjust
from tandem.token_masks import mask
from tandem.wire import IdArray

if TYPE_CHECKING:
    from draft_service.drafter import Draw, ProposeJob
    from draft_service.early_stop import EarlyStop
    from tandem.engine.idle import SlotWork
    from tandem.sampling import SamplingParams

logger = logging.getLogger(__name__)

_SILENT_SECONDS = 2.0
"""A request from which nothing came for so long leaves its guesses to others that want the room: its caller may have
stalled, and most verifications are over sooner."""
_LEAST_CHANCE = 0.01
"""A guess less likely than this isn't worth its row."""
_ORDINARY_TOKENS = 4
"""Most tokens that are read before the block in a round like any other."""
_FAILURES = 3
"""After so many failed forwards there is no more drafting ahead."""


class _Row:
    """A cache slot, and the guess that it is used for."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.tokens = TokenBuffer()
        """The guessed prefix, and what was drafted after it."""
        self.cached = 0
        """How many of them the slot holds."""
        self.owner: Session | None = None
        """Whose tokens these are, even after the guess is given up: the next guess copies only what differs."""
        self.active = False
        self.clear()

    def clear(self) -> None:
        """Gives the guess up; the slot's contents stay."""
        self.active = False
        self.base = 0
        """Length of the guessed prefix; 0 while the draft's own next token, its last one, is still to be drawn."""
        self.chance = 0.0
        self.since = 0.0
        """When the guess was made, in seconds of the clock."""
        self.chain = False
        self.wanted = 0
        self.stop_below = 0.0
        self.drafted: list[Drafted] = []
        self.reaches: list[float] = []
        """For each of them the chance that it and those before it stand, by the draft's own confidence."""
        self.outlooks: list[torch.Tensor] = []
        self.sampling: SamplingParams | None = None

    @property
    def growing(self) -> bool:
        """Whether there is something left to draft."""
        return self.active and len(self.drafted) < self.wanted


class DraftAhead:
    """The guesses of all requests. Called by the step thread only."""

    def __init__(
        self,
        rows: int,
        vocabulary_size: int,
        clock: Callable[[], float] = time.monotonic,
        gain: AheadGain | None = None,
    ) -> None:
        """`rows` is the budget: guesses at a time, of all requests together. `gain` says when not to guess; None: always do."""
        self.slots = rows
        self._clock = clock
        self._gain = gain
        self.stats = AheadStats()
        self._vocabulary_size = vocabulary_size
        self._work: SlotWork | None = None
        self._draw: Draw | None = None
        self._stop: EarlyStop | None = None
        self._rows: list[_Row] = []
        self._answered: dict[Session, ProposeJob] = {}
        self._odds = OutcomeOdds()
        self._foreseen: dict[Session, Foreseen] = {}
        """What was thought of each request's last block, until its next item tells what became of it."""

    def attach(self, work: SlotWork, first_slot: int) -> None:
        """The engine's: what runs feeds and copies columns, and the first of the slots that are not for sessions."""
        self._work = work
        self._rows = [_Row(first_slot + index) for index in range(self.slots)]

    def draws_with(self, draw: Draw, stop: EarlyStop) -> None:
        """The drafter's: how a token is drawn from logits, and when a block has enough of them."""
        self._draw, self._stop = draw, stop

    @property
    def working(self) -> bool:
        """Whether it pays at present, as far as that is looked at."""
        return self._gain is None or self._gain.working

    # What the drafter tells.

    def outlooks(self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, IdArray]]) -> list[torch.Tensor]:
        """What is kept of logits [R, padded vocabulary] for guessing once the block is answered: for each row the likeliest
        tokens and their log-probabilities at its temperature, float64 [2, candidates], on the device. `rows`: parameters, and
        all tokens before the one that was drawn."""
        params, befores = [each for each, _ in rows], [before for _, before in rows]
        adjustments, positions = [each.adjustments for each in params], [before.size for before in befores]
        scores = adjust(logits[:, : self._vocabulary_size], adjustments, positions, befores)
        scores, _ = mask(scores, [each.form for each in params], positions, befores)
        temperatures = torch.tensor([[each.temperature or 1.0] for each in params], dtype=torch.float32)
        scores = scores / temperatures.to(scores.device, non_blocking=True)
        wanted = [candidates(each) for each in params]
        best = scores.topk(min(max(wanted), scores.shape[-1]))
        packed = torch.stack(
            [best.indices.double(), (best.values - scores.logsumexp(-1, keepdim=True)).double()], dim=1
        )
        return [row[:, :count] for row, count in zip(packed, wanted, strict=True)]

    def claim(self, job: ProposeJob) -> list[Drafted]:
        """What was drafted ahead after exactly the tokens of the item's prefix, its keys and values in the session's slot;
        empty where there was no such guess. Ends all guesses of the session."""
        session = job.session
        self._answered.pop(session, None)
        self._learn(session)
        rows = [row for row in self._rows if row.active and row.owner is session]
        if not rows:
            return []
        found = next((row for row in rows if row.drafted and _came_true(row, job)), None)
        drafted: list[Drafted] = []
        if found is not None and self._hand_over(found, session, min(len(found.drafted), job.wanted)):
            drafted = found.drafted[: job.wanted]
            job.outlooks = found.outlooks[: job.wanted]
            job.reach = found.reaches[len(drafted) - 1]
            self._count_hit(found, job, len(drafted))
        else:
            self.stats.misses += 1
            job.work.ahead = "miss"
        for row in rows:
            row.clear()
        return drafted

    def pass_over(self, session: Session) -> None:
        """The session's item is answered from elsewhere: its guesses are for a prefix that is gone."""
        self._answered.pop(session, None)
        self._learn(session)
        for row in self._rows:
            if row.owner is session:
                row.clear()

    def _learn(self, session: Session) -> None:
        """From the next item's prefix."""
        foreseen = self._foreseen.pop(session, None)
        if foreseen is not None:
            self._odds.saw(foreseen, session.tokens.view(0, session.prefix_length))

    def _hand_over(self, row: _Row, session: Session, drafted: int) -> bool:
        """False where copying failed: the session's slot then holds what it held, as far as its length says."""
        held = row.base + drafted - 1  # the last one drafted was not run
        try:
            self._copy(row.slot, session.slot, session.cached_length, held)
        except Exception:
            self.stats.failed_forwards += 1
            logger.warning("what was drafted ahead can't be handed over", exc_info=True)
            return False
        session.cached_length = held
        return True

    def _count_hit(self, row: _Row, job: ProposeJob, drafted: int) -> None:
        self.stats.used_tokens += drafted
        if row.chain:
            self.stats.chain_hits += 1
        else:
            self.stats.branch_hits += 1
        job.work.ahead = "chain" if row.chain else "branch"

    # What the engine tells.

    def answered(self, job: ProposeJob) -> None:
        """The block is on its way to the target."""
        if self._gain is not None:
            ordinary = not job.from_ngram and job.work.prefill_tokens <= _ORDINARY_TOKENS
            self._gain.answered(job.session, job.proposed_block, ordinary=ordinary)
            self.stats.pauses, self.stats.paused = self._gain.pauses, not self._gain.preferred
            self.stats.round_ratio = self._gain.ratio
        if self.working and job.drafted and len(job.outlooks) == len(job.drafted):
            self._answered[job.session] = job

    def ended(self, session: Session) -> None:
        """The request is over."""
        if self._gain is not None:
            self._gain.ended(session)
        self._answered.pop(session, None)
        self._foreseen.pop(session, None)
        for row in self._rows:
            if row.owner is session:
                row.clear()
                row.owner, row.cached = None, 0

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do while the draft is idle."""
        return bool(self._answered) or any(row.growing for row in self._rows)

    def step(self) -> None:
        """One forward at most, for all guesses together."""
        try:
            self._plan_all()
            rows = [row for row in self._rows if row.growing]
            if rows:
                self._grow(rows)
        except Exception:
            # What was guessed is lost, and nothing else: the requests' own slots are not touched here.
            self.stats.failed_forwards += 1
            logger.warning("drafting ahead failed", exc_info=True)
            self._give_up()

    def _give_up(self) -> None:
        self._answered.clear()
        self._foreseen.clear()
        for row in self._rows:
            row.clear()
            row.owner, row.cached = None, 0
            if self._work is not None:
                self._work.clear(row.slot)  # where even that fails, the device is beyond repair, and the thread ends
        if self.stats.failed_forwards >= _FAILURES:
            logger.error("no more drafting ahead, after %d failures", self.stats.failed_forwards)
            self._rows = []

    # Guessing.

    def _plan_all(self) -> None:
        """Starts the guesses for all blocks that were answered; what is known of their positions comes in one transfer."""
        jobs = [
            job
            for session, job in self._answered.items()
            if session.cached_length == session.prefix_length + len(job.drafted) - 1  # else it was dropped since
        ]
        if jobs:
            outlooks = iter(_brought_over([outlook for job in jobs for outlook in job.outlooks]))
            for job in jobs:
                self._plan(job, [next(outlooks) for _ in job.drafted])
        self._answered.clear()

    def _plan(self, job: ProposeJob, outlooks: Sequence[NDArray[np.float64]]) -> None:
        """Starts the guesses for one block, from the outlooks [2, candidates] of its positions."""
        session = job.session
        foreseen = self._foreseen[session] = Foreseen.of(
            session.prefix_length, [drafted.token_id for drafted in job.drafted], outlooks, job.sampling
        )
        others = self._odds.rejections(foreseen, job.proposed_block)
        # The draft's own way comes first: without it a block that stands, the best outcome, would find nothing ready.
        guesses = [self._own_token(job, foreseen), *(guess for guess in others if guess.chance >= _LEAST_CHANCE)]
        for row, guess in zip(self._free_rows(session, len(guesses)), guesses, strict=False):
            self._start(row, guess, session, job)

    def _own_token(self, job: ProposeJob, foreseen: Foreseen) -> Guess:
        """The guess that the whole block stands, and that the draft's own next token follows: known where the block came
        with a look-ahead, else still to be drawn, which is written as -1."""
        chance = self._odds.standing(foreseen, job.proposed_block)
        if len(job.drafted) > job.block:
            return Guess(job.block, job.drafted[job.block].token_id, chance)
        return Guess(job.proposed_block, -1, chance)

    def _free_rows(self, session: Session, count: int) -> list[_Row]:
        """Rows without a guess, those first whose slots hold the session's tokens; if need be, from requests that are
        silent, and from those that have more than their share."""
        if not self._rows:
            return []
        free = [row for row in self._rows if not row.active]
        latest = self._clock() - _SILENT_SECONDS
        silent = sorted((row for row in self._rows if row.active and row.since <= latest), key=lambda row: row.since)
        for row in silent[: max(0, count - len(free))]:
            row.clear()
            free.append(row)
        owners = {id(row.owner) for row in self._rows if row.active}
        share = max(1, len(self._rows) // (len(owners) + 1))
        while len(free) < min(count, share):
            held = [row for row in self._rows if row.active]
            counts = {id(row.owner): sum(other.owner is row.owner for other in held) for row in held}
            victim = max(held, key=lambda row: (counts[id(row.owner)], -row.chance))
            if counts[id(victim.owner)] <= share:
                break
            victim.clear()
            free.append(victim)
        return sorted(free, key=lambda row: row.owner is not session)

    def _start(self, row: _Row, guess: Guess, session: Session, job: ProposeJob) -> None:
        length = session.prefix_length + guess.accepted
        assert self._work is not None
        wanted = min(job.wanted, self._work.max_length - length - 1)
        if wanted < 1:
            return
        own = guess.token_id < 0
        shared = min(length, session.cached_length)
        self._fill(row, session, session.tokens.view(0, length), shared)
        if not own:
            row.tokens.append(guess.token_id)
        row.base = 0 if own else row.tokens.length
        row.chain = guess.accepted == job.proposed_block and (own or guess.token_id == job.drafted[-1].token_id)
        row.chance, row.wanted, row.sampling, row.active = guess.chance, wanted, job.sampling, True
        row.stop_below = job.stop_below
        row.since = self._clock()

    def _fill(self, row: _Row, session: Session, token_ids: IdArray, shared: int) -> None:
        """Lets the row hold `token_ids`, the first `shared` of them with the keys and values of the session's slot."""
        keep = 0
        if row.owner is session:
            keep = _common(row.tokens.view(0, min(row.cached, shared)), token_ids[:shared])
        row.clear()
        self._copy(session.slot, row.slot, keep, shared)
        row.owner = session
        row.tokens.crop(0)
        row.tokens.extend(token_ids)
        row.cached = shared

    # Growing.

    def _grow(self, rows: list[_Row]) -> None:
        """Runs what is pending in each row, and draws its next token."""
        assert self._work is not None
        assert self._draw is not None
        assert self._stop is not None
        logits = self._work.forward(
            [Feed(row.slot, row.cached, row.tokens.view(row.cached, row.tokens.length), rows=1) for row in rows]
        )
        before = [(row.sampling, row.tokens.view(0, row.tokens.length)) for row in rows if row.sampling is not None]
        confident = [index for index, (params, _) in enumerate(before) if self._stop.concerns(params)]
        (drawn, confidences), outlooks = self._draw(logits, before, confident), self.outlooks(logits, before)
        self.stats.forwards += 1
        for index, (row, drafted) in enumerate(zip(rows, drawn, strict=True)):
            row.cached = row.tokens.length
            row.tokens.append(drafted.token_id)
            if row.base:
                row.drafted.append(drafted)
                row.reaches.append(confidences[index] * (row.reaches[-1] if row.reaches else 1.0))
                if row.sampling is not None and self._stop.ends(row.sampling, row.reaches[-1], row.stop_below):
                    row.wanted = len(row.drafted)
                row.outlooks.append(outlooks[index])
                self.stats.tokens += 1
            else:
                row.base = row.tokens.length

    def _copy(self, source: int | None, target: int | None, start: int, end: int) -> None:
        assert self._work is not None
        assert source is not None
        assert target is not None
        if end > start:
            self._work.copy(source, target, start, end)


def _came_true(row: _Row, job: ProposeJob) -> bool:
    """Whether the row drafted after exactly the tokens of the item's prefix, and as the item asks."""
    session = job.session
    return (
        row.base == session.prefix_length
        and row.sampling == job.sampling
        and bool(np.array_equal(row.tokens.view(0, row.base), session.tokens.view(0, row.base)))
    )


def _brought_over(outlooks: Sequence[torch.Tensor]) -> list[NDArray[np.float64]]:
    """Outlooks [2, candidates] of any widths, in one transfer."""
    ends = np.cumsum([outlook.shape[1] for outlook in outlooks])
    return np.split(torch.cat(list(outlooks), dim=1).cpu().numpy(), ends[:-1], axis=1)


def _common(one: IdArray, other: IdArray) -> int:
    size = min(one.size, other.size)
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size
