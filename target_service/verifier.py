"""Verification: a block of draft tokens is run in one forward and becomes gamma + 1 target rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tandem import sampling
from tandem.acceptance import TargetRow
from tandem.engine.faults import invalid
from tandem.engine.job import Job
from tandem.engine.session import decode_token_ids
from tandem.v1 import target_pb2
from tandem.wire import IdArray

MAX_SUPPORT_SIZE = 1024

_NOTHING = np.empty(0, dtype=np.uint32)


class VerifyJob(Job):
    """A block, and the supports that p is wanted on: one for each row, the last maybe empty."""

    __slots__ = ("draft_token_ids", "supports")

    def __init__(self, cache_epoch: int, draft_token_ids: IdArray, supports: list[IdArray]) -> None:
        super().__init__(cache_epoch, block=draft_token_ids.size, rows=draft_token_ids.size + 1)
        self.draft_token_ids = draft_token_ids
        self.supports = supports


class Verifier:
    """The target's method: its results are lists of TargetRow."""

    def __init__(self, vocabulary_size: int, max_speculative_tokens: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._max_speculative_tokens = max_speculative_tokens

    def admit(self, item: target_pb2.VerifyItem) -> VerifyJob:
        """Checks the block and its supports; raises ItemFault INVALID_ARGUMENT."""
        block = decode_token_ids("draft_token_ids", item.draft_token_ids, self._vocabulary_size)
        if block.size > self._max_speculative_tokens:
            raise invalid("draft_token_ids", f"{block.size} tokens, at most {self._max_speculative_tokens} allowed")
        given = len(item.support_ids)
        if given not in (block.size, block.size + 1):
            raise invalid("support_ids", f"{given} supports for a block of {block.size}")
        supports = [
            _support(f"support_ids[{index}]", data, self._vocabulary_size)
            for index, data in enumerate(item.support_ids)
        ]
        if given == block.size:
            supports.append(_NOTHING)
        return VerifyJob(item.cache_epoch, block, supports)

    def begin(self, job: VerifyJob) -> None:
        """The block is run with the prefix."""
        job.session.tokens.extend(job.draft_token_ids)

    def consume(self, jobs: Sequence[VerifyJob], logits: torch.Tensor) -> None:
        """All rows of all jobs at once."""
        rows = sampling.target_rows(
            logits,
            [job.sampling for job in jobs for _ in range(job.rows)],
            [job.session.prefix_length + index for job in jobs for index in range(job.rows)],
            [support for job in jobs for support in job.supports],
            self._vocabulary_size,
        )
        start = 0
        for job in jobs:
            result: list[TargetRow] = rows[start : start + job.rows]
            job.result = result
            start += job.rows


def _support(field: str, data: bytes, vocabulary_size: int) -> IdArray:
    support = decode_token_ids(field, data, vocabulary_size)
    if support.size > MAX_SUPPORT_SIZE:
        raise invalid(field, f"{support.size} ids, at most {MAX_SUPPORT_SIZE} allowed")
    ordered = np.sort(support)
    if (ordered[1:] == ordered[:-1]).any():
        raise invalid(field, "holds an id twice")
    return support
