"""Drafting: a block is gamma steps of the draft model, which the blocks of other requests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from draft_service.ahead import DraftAhead
from draft_service.early_stop import EarlyStop
from tandem import sampling
from tandem.acceptance import Drafted, check_drafted
from tandem.engine.draft_stats import DraftStats
from tandem.engine.faults import invalid
from tandem.engine.invariants import require
from tandem.engine.job import Job, Method
from tandem.engine.sampling_fields import check_sampling
from tandem.sampling import SamplingParams
from tandem.v1 import draft_pb2
from tandem.wire import IdArray


class ProposeJob(Job):
    """A block under way."""

    __slots__ = ("drafted", "from_ngram", "outlooks", "reach", "stop_below", "wanted")

    def __init__(self, cache_epoch: int, block: int, wanted: int) -> None:
        super().__init__(cache_epoch, block, rows=1)
        self.wanted = wanted
        """Tokens to draw, the look-ahead included."""
        self.from_ngram = False
        """Whether the block came from n-grams beside a model, which then has not read the prefix."""
        self.drafted: list[Drafted] = []
        self.reach = 1.0
        """The chance, by the draft's own confidence, that all of that stands."""
        self.stop_below = 0.0
        """The chance below which that is enough."""
        self.outlooks: list[torch.Tensor] = []
        """What else was likely where each was drawn, [2, candidates], where it is of use for drafting ahead."""

    @property
    def proposed_block(self) -> int:
        """Tokens of the block, without the look-ahead; fewer than asked for where it ended early."""
        return min(self.block, len(self.drafted))

    @property
    def held(self) -> int:
        """The cache's tokens; for a block from n-grams all that are known, whether the model has read them or not."""
        return self.session.tokens.length if self.from_ngram else self.session.cached_length

    @property
    def unread(self) -> int:
        """What of the prefix the model has not read where the block is not its own; 1 at least then."""
        return self.session.prefix_length - self.session.cached_length if self.from_ngram else 0

    @classmethod
    def of(cls, item: draft_pb2.ProposeItem, vocabulary_size: int, max_speculative_tokens: int) -> ProposeJob:
        """Checks the item's own fields; raises ItemFault INVALID_ARGUMENT."""
        check_sampling(item, vocabulary_size)
        block = item.num_speculative_tokens
        if not 1 <= block <= max_speculative_tokens:
            raise invalid("num_speculative_tokens", f"{block}, expected 1 to {max_speculative_tokens}")
        if not 0.0 <= item.stop_below <= 1.0:
            raise invalid("stop_below", f"{item.stop_below}, expected 0 to 1")
        job = cls(item.cache_epoch, block, block + item.look_ahead)
        job.stop_below = item.stop_below
        return job


class Draw(Protocol):
    """Draws one token for each row of logits."""

    def __call__(
        self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, IdArray]], confident: Sequence[int]
    ) -> tuple[list[Drafted], list[float]]:
        """`rows`: parameters, and all tokens before the one to draw; `confident`: the rows whose confidence is wanted. Returns
        the tokens and the confidences, 1.0 where none was asked for."""


class Drafter(Method[draft_pb2.ProposeItem, ProposeJob], Protocol):
    """A way to draft: from the logits of a draft model, or from `job.session.tokens` alone."""


class ModelDrafter:
    """Draws from the draft model's logits; results are lists of Drafted."""

    def __init__(
        self,
        vocabulary_size: int,
        support_size: int,
        max_speculative_tokens: int,
        ahead: DraftAhead | None = None,
        *,
        stop_below: float = 0.0,
        stats: DraftStats | None = None,
    ) -> None:
        """`stop_below`: see EarlyStop."""
        self._vocabulary_size = vocabulary_size
        self._stop = EarlyStop(stop_below)
        self._stats = stats or DraftStats()
        self._ahead = ahead
        if ahead is not None:
            ahead.draws_with(self._draw, self._stop)
        self._support_size = support_size
        self._max_speculative_tokens = max_speculative_tokens

    def admit(self, item: draft_pb2.ProposeItem) -> ProposeJob:
        """Checks the size of the block; raises ItemFault INVALID_ARGUMENT."""
        job = ProposeJob.of(item, self._vocabulary_size, self._max_speculative_tokens)
        job.stop_below = self._stop.threshold(job.stop_below)
        return job

    def begin(self, job: ProposeJob) -> None:
        """The first step runs the prefix alone, unless what follows it was drafted ahead."""
        if self._ahead is None:
            return
        job.drafted = self._ahead.claim(job)
        job.session.tokens.extend(np.array([drafted.token_id for drafted in job.drafted], dtype=np.uint32))
        if job.drafted:
            self._end(job)

    def pass_over(self, job: ProposeJob) -> None:
        """The item is answered from elsewhere."""
        if self._ahead is not None:
            self._ahead.pass_over(job.session)

    def consume(self, jobs: Sequence[ProposeJob], logits: torch.Tensor) -> None:
        """Draws one token for each job; it is run in the next step, but for the last one of the block."""
        rows = [(job.sampling, job.session.tokens.view(0, job.session.tokens.length)) for job in jobs]
        unfinished = [index for index, job in enumerate(jobs) if self._may_end_early(job)]
        drawn, confidences = self._draw(logits, rows, unfinished)
        if self._ahead is not None and self._ahead.working and len(jobs) <= self._ahead.slots:
            for job, outlook in zip(jobs, self._ahead.outlooks(logits, rows), strict=True):
                job.outlooks.append(outlook)
        for job, drafted, confidence in zip(jobs, drawn, confidences, strict=True):
            job.session.tokens.append(drafted.token_id)
            job.drafted.append(drafted)
            job.reach *= confidence
            self._end(job)

    def _may_end_early(self, job: ProposeJob) -> bool:
        """Whether the token that is drawn now could be the last one, though more are wanted."""
        return len(job.drafted) + 1 < job.wanted and self._stop.concerns(job.sampling)

    def _end(self, job: ProposeJob) -> None:
        """Sets the result where nothing more is to be drafted."""
        complete = len(job.drafted) == job.wanted
        if complete or self._stop.ends(job.sampling, job.reach, job.stop_below):
            job.result = job.drafted
            self._stats.stopped_blocks += len(job.drafted) < job.block  # one that lacks the look-ahead alone is whole

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, IdArray]], confident: Sequence[int]
    ) -> tuple[list[Drafted], list[float]]:
        """One token for each row of logits, given its parameters and all tokens before it; and confidences, see Draw."""
        return sampling.draft_tokens_and_confidences(
            logits,
            [params for params, _ in rows],
            [before.size for _, before in rows],
            self._vocabulary_size,
            self._support_size,
            [before if params.reads_context else None for params, before in rows],
            confident,
        )

    def check(self, job: ProposeJob) -> None:
        """The block as asked for, each token drawn from a distribution, and all of it but the last in the cache."""
        session = job.session
        require(session.cached_length == session.prefix_length + len(job.drafted) - 1, "the last token is not run")
        whole = len(job.drafted) == job.wanted
        ended = 1 <= len(job.drafted) < job.wanted and self._stop.ends(job.sampling, job.reach, job.stop_below)
        require(whole or ended, "the block is whole")
        for drafted in job.drafted:
            check_drafted(drafted.token_id, drafted.support_ids, drafted.q, self._vocabulary_size)
