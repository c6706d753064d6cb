"""Which of two sources drafts a request's next block: the model, or what followed the last tokens before.

The one that is expected to bring more tokens for the time of a round. What each brings is learnt from this request alone:
the next item's prefix tells what became of the block before it. n-grams cost nothing, so what they would have proposed
is compared with every prefix, whoever drafted: they need no trials. The model, while n-grams are better, gets a block now
and then, at intervals that grow while it disappoints.

Exactness does not depend on any of this. A choice is a function of the item's prefix and of earlier blocks, as far as the
prefix has decided them: of a block that was cut off by a rejection, the tokens behind it are never looked at, since they
were drawn with the randomness of positions that are still to come. So given the prefix, the choice is fixed, the block's
tokens are draws from the q that is sent with them, and each token of the output has the target's law. No clock and no other
request has a say in it either: a request of which no round was late or repeated, and that stayed at one draft, makes the same choices
with the same seed and gamma. One that is resumed, or goes to another draft, begins anew.

Where a request's sampling is changed, rounds are dropped, and their positions drawn again with the same randomness. So a prefix
that ends before the one that came last makes a request forget what it has learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draft_service.ngram import LONGEST_RUN, SHORTEST_RUN
from draft_service.share import Share
from tandem.engine.draft_stats import DraftStats, SourceStats
from tandem.wire import IdArray

MODEL, NGRAM = "model", "ngram"

_MODEL_PRIOR = 0.6
_NGRAM_PRIORS = {2: 0.3, 3: 0.45, 4: 0.6}
"""By the length of the run that was found again."""
_STEP_COST = 0.07
"""A step of the model, in rounds without a draft: about 1/15, as for a large pair. A constant, since a choice that went by
the clock would make a seed's tokens depend on it."""
_FIRST_INTERVAL, _LONGEST_INTERVAL = 8, 64
"""Blocks from n-grams between two trials of the model."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Tokens that were proposed, or would have been, from `start` on."""

    start: int
    token_ids: IdArray
    run: int
    """0 for the model's."""

    def outcome(self, prefix: IdArray) -> tuple[int, bool]:
        """How many tokens stood, as far as the prefix has decided it, and whether the next one fell."""
        decided = prefix[self.start : self.start + self.token_ids.size]
        differs = np.flatnonzero(decided != self.token_ids[: decided.size])
        return (int(differs[0]), True) if differs.size else (decided.size, False)


class Sources:
    """One request's choice between the two."""

    def __init__(self, stats: DraftStats) -> None:
        """`stats` is shared by all requests."""
        self._stats = stats
        self._forget()

    def _forget(self) -> None:
        self._seen = 0
        """Length of the prefix that came last."""
        self._model = Share(_MODEL_PRIOR)
        self._ngram = {run: Share(_NGRAM_PRIORS[run]) for run in range(SHORTEST_RUN, LONGEST_RUN + 1)}
        self._proposed: _Block | None = None
        self._found: _Block | None = None
        """What n-grams had for the same prefix."""
        self._chosen: tuple[tuple[int, int], bool] | None = None
        """The last choice between two, and for which prefix and size of a block: a retry is no other block."""
        self._without_model = 0
        self._interval = _FIRST_INTERVAL

    def observe(self, prefix: IdArray) -> None:
        """The next item's prefix, which tells what became of the last block."""
        if prefix.size < self._seen:
            self._forget()
        self._seen = prefix.size
        if self._proposed is not None and self._proposed.start < prefix.size:
            accepted, rejected = self._proposed.outcome(prefix)
            if not self._proposed.run:
                self._model.add(accepted, rejected=rejected)
            elif rejected and not accepted:
                # What was copied may be over: whether the model does better now is worth knowing sooner.
                self._interval = max(self._interval // 2, _FIRST_INTERVAL)
            counts = self._of(MODEL if not self._proposed.run else NGRAM)
            counts.tokens += accepted + rejected  # what stands behind a rejected token says nothing
            counts.accepted += accepted
            self._proposed = None
        if self._found is not None and self._found.start < prefix.size:
            accepted, rejected = self._found.outcome(prefix)
            self._ngram[self._found.run].add(accepted, rejected=rejected)
            self._found = None

    def prefers_ngram(self, prefix_length: int, found: Sequence[int], run: int, wanted: int) -> bool:
        """Whether the block is to be what n-grams found, tokens after a run of `run`, rather than `wanted` of the model."""
        self._found = _Block(prefix_length, np.array(found, dtype=np.uint32), run) if found else None
        if not found:
            return False
        asked = (prefix_length, wanted)
        if self._chosen is None or self._chosen[0] != asked:
            self._chosen = asked, self._choose(len(found), run, wanted)
        return self._chosen[1]

    def _choose(self, found: int, run: int, wanted: int) -> bool:
        ngram = _rate(self._ngram[run].value, found, 0.0)
        if _rate(self._model.value, wanted, _STEP_COST) > ngram:
            self._without_model, self._interval = 0, _FIRST_INTERVAL
            return False
        if self._without_model >= self._interval and _rate(1.0, wanted, _STEP_COST) > ngram:
            self._without_model, self._interval = 0, min(2 * self._interval, _LONGEST_INTERVAL)
            self._stats.trials += 1
            return False
        self._without_model += 1
        return True

    def proposed(self, prefix_length: int, token_ids: Sequence[int], run: int = 0) -> None:
        """The block that is sent; `run` 0: the model's."""
        self._of(NGRAM if run else MODEL).blocks += 1
        self._proposed = _Block(prefix_length, np.array(token_ids, dtype=np.uint32), run)

    def _of(self, source: str) -> SourceStats:
        return self._stats.sources[source]


def _rate(acceptance: float, tokens: int, step_cost: float) -> float:
    """Expected tokens of a round with a block of `tokens`, over its time in rounds without a draft."""
    expected = reached = 1.0
    for _ in range(tokens):
        reached *= acceptance
        expected += reached
    return expected / (1.0 + step_cost * tokens)
