"""Ending a block early: a token that the target will hardly get to is not worth a step of the draft and a row of the target.

How likely the target gets beyond a token is taken for the probability of the draft's likeliest token there, and of all
tokens of the block together for their product. Once that is below the threshold, nothing more is drafted. The threshold
is the service's, or that of an orchestrator which has learnt what one more token costs, and what a round brings.

Only the blocks of requests whose output can't depend on it end early: greedy ones, and those of COUPLED, whose text is a
function of the seed alone. Under REJECTION every block has the length that was asked for. Whether token i is drafted would
depend on the tokens before it only, which is no harm by itself; but how long the block is then depends on what was drawn in
it, and so does when it is answered. A block that is late is dropped and its positions are drawn again: long blocks would be
dropped more often than short ones, and with them the tokens that made them long. The choice of gamma, too, would learn from
the times and lengths of blocks whose tokens were cut off. Either tilts the law.
"""

from __future__ import annotations

from tandem.sampling import SamplingParams


class EarlyStop:
    """When a block has enough tokens."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: from 0, where blocks never end early, to 1; for items that have none of their own."""
        self._threshold = threshold

    def threshold(self, own: float) -> float:
        """Below which chance to stand the block of an item ends, whose own threshold is `own`, 0 if it has none. Of a caller that
        knows what a token costs it, that is the better one; but whether blocks end early at all, the service says."""
        return (own or self._threshold) if self._threshold else 0.0

    def concerns(self, params: SamplingParams) -> bool:
        """Whether blocks of such a request may end early."""
        return self._threshold > 0.0 and (params.temperature == 0.0 or params.coupled)

    def ends(self, params: SamplingParams, reach: float, threshold: float) -> bool:
        """Whether a request's block ends that the target accepts as a whole with a chance of `reach`."""
        return self.concerns(params) and reach < threshold
