"""Ending a block early: a token that the target will hardly get to is not worth a step of the draft and a row of the target.

How likely the target gets beyond a token is taken for the probability of the draft's likeliest token there, and of all
tokens of the block together for their product. Once that is below the threshold, nothing more is drafted.

Why the output stays what it is: whether token i is drafted depends on the distributions at the positions before it, which
depend on the tokens before it, and on nothing else. So once the target gets to position i, that is, has accepted all that
stands before it, it is settled by the prefix whether i was drafted; if it was, it is a draw from the q that is sent with it,
and accepted or replaced by the rule; if it was not, the token comes from the target's own row. Either way it has the
target's law given what precedes it. It would not if the token itself had a say in whether it is sent: a block that leaves
out tokens with a small q gives those that it sends too often (`tests/statistical/test_early_stop.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.logit_adjustments import adjust
from tandem.sampling import SamplingParams
from tandem.token_masks import mask
from tandem.wire import IdArray


class EarlyStop:
    """When a block has enough tokens."""

    def __init__(self, threshold: float, vocabulary_size: int) -> None:
        """`threshold`: from 0, where blocks never end early, to 1."""
        self.threshold = threshold
        self._vocabulary_size = vocabulary_size

    @property
    def active(self) -> bool:
        """Whether blocks can end early at all."""
        return self.threshold > 0.0

    def confidences(self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, IdArray]]) -> list[float]:
        """The probability of the likeliest token of each of R rows, at the row's temperature, at 1 where that is 0.
        `logits` [R, padded vocabulary]; `rows`: parameters, and all tokens before the one to draw."""
        if not self.active:
            return [1.0] * len(rows)
        params, befores = [each for each, _ in rows], [before for _, before in rows]
        adjustments, positions = [each.adjustments for each in params], [before.size for before in befores]
        scores = adjust(logits[:, : self._vocabulary_size], adjustments, positions, befores)
        scores, _ = mask(scores, [each.form for each in params], positions, befores)
        temperatures = torch.tensor([[each.temperature or 1.0] for each in params], dtype=torch.float32)
        scores = scores / temperatures.to(scores.device, non_blocking=True)
        likeliest: list[float] = (scores.amax(-1) - scores.logsumexp(-1)).exp().tolist()
        return likeliest

    def ends(self, reach: float) -> bool:
        """Whether a block ends that the target accepts as a whole with a chance of `reach`."""
        return reach < self.threshold
