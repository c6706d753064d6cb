"""Verification: a block of draft tokens is run in one forward and becomes gamma + 1 target rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem import sampling
from tandem.acceptance import MAX_SUPPORT_SIZE, TargetRow, are_supports
from tandem.engine.faults import invalid
from tandem.engine.invariants import require
from tandem.engine.job import Job
from tandem.engine.sampling_fields import check_sampling, context
from tandem.engine.session import decode_token_ids
from tandem.v1 import target_pb2
from tandem.wire import TOKEN_BYTES, IdArray

_MASS_TOLERANCE = 1e-4
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
        check_sampling(item, self._vocabulary_size)
        block = decode_token_ids("draft_token_ids", item.draft_token_ids, self._vocabulary_size)
        if block.size > self._max_speculative_tokens:
            raise invalid("draft_token_ids", f"{block.size} tokens, at most {self._max_speculative_tokens} allowed")
        given = len(item.support_ids)
        if given not in (block.size, block.size + 1):
            raise invalid("support_ids", f"{given} supports for a block of {block.size}")
        supports = _supports(item.support_ids, self._vocabulary_size)
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
            [tokens for job in jobs for tokens in [context(job)] * job.rows],
        )
        start = 0
        for job in jobs:
            result: list[TargetRow] = rows[start : start + job.rows]
            job.result = result
            start += job.rows

    def check(self, job: VerifyJob) -> None:
        """One row for each position, each a distribution, and the block in the cache."""
        session = job.session
        rows: list[TargetRow] = job.result
        require(session.cached_length == session.prefix_length + job.block, "the cache holds prefix and block")
        require(len(rows) == job.block + 1, "one row for each draft token, and one more")
        for row, support in zip(rows, job.supports, strict=True):
            mass = float(row.p.sum(dtype=np.float64)) + row.outside_mass
            require(row.p.size == support.size, "p has the size of its support")
            require(abs(mass - 1.0) <= _MASS_TOLERANCE, "p sums to one")
            require(0 <= row.outside_token_id < self._vocabulary_size, "the outside token is in the vocabulary")


def _supports(encoded: Sequence[bytes], vocabulary_size: int) -> list[IdArray]:
    """Decodes and checks the supports of a block; raises ItemFault INVALID_ARGUMENT."""
    sizes = {len(data) for data in encoded}
    if len(sizes) != 1 or any(size % TOKEN_BYTES for size in sizes):
        return [_check(data, 1, vocabulary_size)[0] for data in encoded]
    return list(_check(b"".join(encoded), len(encoded), vocabulary_size))


def _check(data: bytes, count: int, vocabulary_size: int) -> NDArray[np.uint32]:
    """`count` supports of one size as a matrix [count, k]; checked at once, since there are thousands in a second."""
    ids = decode_token_ids("support_ids", data, vocabulary_size)
    if ids.size > count * MAX_SUPPORT_SIZE:
        raise invalid("support_ids", f"{ids.size // count} ids in one, at most {MAX_SUPPORT_SIZE} allowed")
    supports = ids.reshape(count, -1)
    if supports.size and not are_supports(supports, vocabulary_size):  # of what it looks for, only this is left
        raise invalid("support_ids", "one holds an id twice")
    return supports
