"""What drafting is believed to bring now: tokens a second of one request, with blocks as they are and without any.

Tokens of a round are its expected ones, 1 + the sum of min(p, q); seconds are those of `RoundCosts`, which knows what a
round would take without a block whether or not any round goes without. So the two can be told apart while all requests
draft. Nothing is worked out before it is asked for, and of rounds that nobody chooses a gamma for, a few are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .round_costs import RoundCosts, RoundTimes

_ONE_IN = 8
"""Rounds with a fixed gamma of which one is looked at."""
_KEEP = 0.98
"""Weight left of a round after one more."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second of one request."""

    speculative: float
    """In rounds as they are."""
    plain: float
    """In rounds without a block."""


class SpeedEstimate:
    """Over the recent rounds of all requests of an orchestrator that may draft."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._left_out = _ONE_IN
        self._rounds = self._tokens = self._drafted = 0.0

    def observe_fixed(self, gamma: int, acceptance: Sequence[float], times: RoundTimes) -> None:
        """A round of a request that always drafts `gamma` tokens; one in a few also teaches the costs."""
        self._left_out += 1
        due = self._left_out >= _ONE_IN
        # The last token of such a request has no block, and nothing else may tell what that costs.
        if due or (gamma and not times.block):
            self._costs.observe(times)
        if due:
            self._left_out = 0
            if gamma:
                self.observe(acceptance, times.block)

    def observe(self, acceptance: Sequence[float], block: int) -> None:
        """A round that had so long a block, and the acceptance probability of each position reached."""
        self._rounds = _KEEP * self._rounds + 1.0
        self._tokens = _KEEP * self._tokens + 1.0 + sum(acceptance)
        self._drafted = _KEEP * self._drafted + block

    def now(self) -> Speeds | None:
        """None as long as nothing is known of the draft or the target."""
        if not (self._rounds and self._costs.draft_known and self._costs.target_known):
            return None
        block, share = divmod(self._drafted / self._rounds, 1.0)
        seconds = self._costs.round_seconds(int(block) + 1)
        speculative = (1.0 - share) * seconds[int(block)] + share * seconds[int(block) + 1]
        if speculative <= 0.0 or seconds[0] <= 0.0:
            return None
        return Speeds(self._tokens / self._rounds / speculative, 1.0 / seconds[0])
