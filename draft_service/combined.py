"""Drafting with a model and with n-grams, for each block with the better of the two (`sources`).

A block from n-grams is answered before any forward. The model then has not read the prefix: it does so while nothing is
asked (`catch_up`), or, if its turn comes first, before its block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draft_service.drafter import ModelDrafter, ProposeJob
from draft_service.ngram import NgramDrafter
from draft_service.sources import MODEL, NGRAM, Sources
from tandem.acceptance import check_drafted
from tandem.engine.draft_stats import DraftStats, SourceStats
from tandem.engine.invariants import require
from tandem.v1 import draft_pb2


class CombinedDrafter:
    """A Drafter of two; results are lists of Drafted, never empty."""

    def __init__(self, model: ModelDrafter, ngram: NgramDrafter, vocabulary_size: int, stats: DraftStats) -> None:
        self._model = model
        self._ngram = ngram
        self._vocabulary_size = vocabulary_size
        self._stats = stats
        stats.sources = {MODEL: SourceStats(), NGRAM: SourceStats()}

    def admit(self, item: draft_pb2.ProposeItem) -> ProposeJob:
        """Checks the size of the block; raises ItemFault INVALID_ARGUMENT."""
        return self._model.admit(item)

    def begin(self, job: ProposeJob) -> None:
        """Answers at once where n-grams are better, else leaves the item to the model."""
        session = job.session
        sources = self._sources(job)
        sources.observe(session.tokens.view(0, session.prefix_length))
        found, run = self._ngram.find(job)
        token_ids = [drafted.token_id for drafted in found]
        if not sources.prefers_ngram(session.prefix_length, token_ids, run, job.wanted):
            job.work.source = MODEL
            self._model.begin(job)
            self._note([job])
            return
        self._model.pass_over(job)
        sources.proposed(session.prefix_length, token_ids, run)
        session.tokens.extend(np.array(token_ids, dtype=np.uint32))
        job.from_ngram, job.work.source = True, NGRAM
        job.drafted = job.result = found

    def consume(self, jobs: Sequence[ProposeJob], logits: torch.Tensor) -> None:
        """The model's."""
        self._model.consume(jobs, logits)
        self._note(jobs)

    def check(self, job: ProposeJob) -> None:
        """What holds for the model's blocks; and for the others a block no longer than asked for, unread."""
        if not job.from_ngram:
            self._model.check(job)
            return
        session = job.session
        require(session.cached_length <= session.prefix_length, "nothing but the prefix in the cache")
        require(session.tokens.length == session.prefix_length + len(job.drafted), "the block follows the prefix")
        require(1 <= len(job.drafted) <= job.wanted, "the block is no longer than asked for")
        for drafted in job.drafted:
            check_drafted(drafted.token_id, drafted.support_ids, drafted.q, self._vocabulary_size)

    def _note(self, jobs: Sequence[ProposeJob]) -> None:
        for job in jobs:
            if job.result is not None:
                token_ids = [drafted.token_id for drafted in job.drafted]
                self._sources(job).proposed(job.session.prefix_length, token_ids)

    def _sources(self, job: ProposeJob) -> Sources:
        if job.session.notes is None:
            job.session.notes = Sources(self._stats)
        sources: Sources = job.session.notes
        return sources
