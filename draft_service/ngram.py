"""Drafting without a model: what followed the last tokens when they stood in the request before.

Prompt lookup (Saxena, "Prompt lookup decoding", 2023; `prompt_lookup_num_tokens` in transformers): the longest run of
last tokens that occurs earlier is found, of several occurrences the latest, and the tokens after it are the block. Good
where text is copied or edited. A proposed token is certain to the draft, so q is one-hot; the block and its length depend
only on the prefix. Where nothing is found the draft declines, and the round is decoded plainly at no cost to the target.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draft_service.drafter import ProposeJob
from tandem.acceptance import Drafted, check_drafted
from tandem.engine.feed import Feed
from tandem.engine.invariants import require
from tandem.v1 import draft_pb2
from tandem.wire import IdArray

LONGEST_RUN = 4
SHORTEST_RUN = 2
"""A single token that occurred before says little about what follows."""
_CERTAIN = np.ones(1, dtype=np.float32)


class TokensAlone:
    """In a model's place in the engine: keeps count of tokens, and computes nothing."""

    def __init__(self, slots: int, max_length: int, padded_vocabulary_size: int) -> None:
        self.slots = slots
        self.max_length = max_length
        self.padded_vocabulary_size = padded_vocabulary_size

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """No logits: [sum of rows, 0]."""
        return torch.empty(sum(feed.rows for feed in feeds), 0)

    def copy_tokens(self, source: int, target: int, start: int, end: int) -> None:
        """There are no keys and values."""

    def clear_slot(self, slot: int) -> None:
        """Nothing to clear."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def self_test(self) -> None:
        """Can't fail."""


class NgramDrafter:
    """A Drafter that reads `job.session.tokens` alone; results are lists of Drafted, empty where it declines."""

    def __init__(self, vocabulary_size: int, max_speculative_tokens: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._max_speculative_tokens = max_speculative_tokens

    def admit(self, item: draft_pb2.ProposeItem) -> ProposeJob:
        """Checks the size of the block; raises ItemFault INVALID_ARGUMENT."""
        return ProposeJob.of(item, self._vocabulary_size, self._max_speculative_tokens)

    def begin(self, job: ProposeJob) -> None:
        """The prefix is run like any other, which costs nothing."""

    def consume(self, jobs: Sequence[ProposeJob], logits: torch.Tensor) -> None:  # noqa: ARG002 - there are none
        """Whole blocks at once."""
        for job in jobs:
            job.drafted, _ = self.find(job)
            job.result = job.drafted

    def find(self, job: ProposeJob) -> tuple[list[Drafted], int]:
        """The block after the item's prefix, empty where nothing is found; and the length of the run that led to it."""
        prefix = job.session.tokens.view(0, job.session.prefix_length)
        found, run = look_up(prefix, job.wanted)
        if job.sampling.form is not None:
            found = found[: job.sampling.form.longest_run(prefix, found)]
        # An id beyond the vocabulary can stand in a prompt, but not in a proposal.
        known = np.flatnonzero(found >= self._vocabulary_size)
        return [_certain(token_id) for token_id in found[: known[0] if known.size else None].tolist()], run

    def check(self, job: ProposeJob) -> None:
        """A block no longer than asked for, and nothing but the prefix in the cache."""
        session = job.session
        require(session.cached_length == session.prefix_length, "the cache holds the prefix")
        require(len(job.drafted) <= job.wanted, "the block is no longer than asked for")
        for drafted in job.drafted:
            check_drafted(drafted.token_id, drafted.support_ids, drafted.q, self._vocabulary_size)


def look_up(token_ids: IdArray, count: int) -> tuple[IdArray, int]:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest run that ends `token_ids`, and the
    length of that run; nothing and 0 where there is none.

    One pass over all tokens for the last one, then only over the places where the run so far was found: the step thread
    does nothing else meanwhile."""
    last = token_ids.size - 1
    ends = np.flatnonzero(token_ids[:last] == token_ids[last:])
    found, run = ends[:0], 0
    for length in range(2, min(LONGEST_RUN, last) + 1):
        ends = ends[ends >= length - 1]
        ends = ends[token_ids[ends - (length - 1)] == token_ids[last - (length - 1)]]
        if not ends.size:
            break
        if length >= SHORTEST_RUN:
            found, run = ends, length
    if not run:
        return token_ids[:0], 0
    start = int(found[-1]) + 1
    return token_ids[start : start + count].copy(), run


def _certain(token_id: int) -> Drafted:
    return Drafted(token_id, np.array([token_id], dtype=np.uint32), _CERTAIN, 0)
