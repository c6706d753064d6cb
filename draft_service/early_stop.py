"""Ending a block early: a token that the target will hardly get to is not worth a step of the draft and a row of the target.

How likely the target gets beyond a token is taken for the probability of the draft's likeliest token there, and of all
tokens of the block together for their product. Once that is below the threshold, nothing more is drafted.

Only the blocks of requests whose output can't depend on it end early: greedy ones, and those of COUPLED, whose text is a
function of the seed alone. Under REJECTION every block has the length that was asked for. Whether token i is drafted would
depend on the tokens before it only, which is no harm by itself; but how long the block is then depends on what was drawn in
it, and so does when it is answered. A block that is late is dropped and its positions are drawn again: long blocks would be
dropped more often than short ones, and with them the tokens that made them long. The choice of gamma, too, would learn from
the times and lengths of blocks whose tokens were cut off. Either tilts the law.
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

    def concerns(self, params: SamplingParams) -> bool:
        """Whether blocks of such a request may end early."""
        return self.active and (params.temperature == 0.0 or params.coupled)

    def confidences(self, logits: torch.Tensor, rows: Sequence[tuple[SamplingParams, IdArray]]) -> list[float]:
        """The probability of the likeliest token of each of R rows, at the row's temperature, at 1 where that is 0; 1.0 for
        all where no row is of a request that this concerns.
        `logits` [R, padded vocabulary]; `rows`: parameters, and all tokens before the one to draw."""
        if not any(self.concerns(params) for params, _ in rows):
            return [1.0] * len(rows)
        params, befores = [each for each, _ in rows], [before for _, before in rows]
        adjustments, positions = [each.adjustments for each in params], [before.size for before in befores]
        scores = adjust(logits[:, : self._vocabulary_size], adjustments, positions, befores)
        scores, _ = mask(scores, [each.form for each in params], positions, befores)
        temperatures = torch.tensor([[each.temperature or 1.0] for each in params], dtype=torch.float32)
        scores = scores / temperatures.to(scores.device, non_blocking=True)
        likeliest: list[float] = (scores.amax(-1) - scores.logsumexp(-1)).exp().tolist()
        return likeliest

    def ends(self, params: SamplingParams, reach: float) -> bool:
        """Whether a request's block ends that the target accepts as a whole with a chance of `reach`."""
        return self.concerns(params) and reach < self.threshold
