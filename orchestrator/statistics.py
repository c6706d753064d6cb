"""What happened in the rounds of one request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundStatistics:
    """Counted per token that was really emitted or drafted; a bonus token is never counted as accepted."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    rounds: int = 0
    drafted_rounds: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    expected_accepted: float = 0.0
    degraded: dict[str, int] = field(default_factory=dict)
    rebuilds: int = 0
    benched_drafts: int = 0
    shortened_rounds: int = 0
    """Whose block was shorter than wanted, since the draft had been late."""
    completion_tokens: int = 0
    estimates: int = 0
    estimated_speedup: float = 0.0
    """Sum over the rounds whose gamma was chosen with costs known."""

    def round_done(self, drafted: int, accepted: int, expected_acceptance: Sequence[float]) -> None:
        """Records a round of `drafted` tokens of which the first `accepted` stand."""
        self.rounds += 1
        if drafted:
            self.drafted_rounds += 1
        while len(self.drafted_per_position) < drafted:
            self.drafted_per_position.append(0)
            self.accepted_per_position.append(0)
        for position in range(drafted):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1
        self.expected_accepted += sum(expected_acceptance)

    def chosen(self, speedup: float) -> None:
        """Records the choice of an adaptive gamma; 0 where the gain was not known."""
        if speedup > 0.0:
            self.estimates += 1
            self.estimated_speedup += speedup

    def degraded_round(self, reason: str) -> None:
        """Records that a round went on without the block it wanted."""
        self.degraded[reason] = self.degraded.get(reason, 0) + 1

    def committed(self, tokens: int) -> None:
        """Counts committed tokens, and notes the time of the first."""
        self.completion_tokens += tokens
        if self.first_token is None:
            self.first_token = time.monotonic()

    @property
    def degraded_reasons(self) -> list[str]:
        """Of the rounds without a block, and of those with a shorter one."""
        return sorted([*self.degraded, *(["draft_shortened"] if self.shortened_rounds else [])])

    @property
    def drafted(self) -> int:
        """Draft tokens scored."""
        return sum(self.drafted_per_position)

    @property
    def accepted(self) -> int:
        """Draft tokens that became output."""
        return sum(self.accepted_per_position)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds that had a block; 1 when none had."""
        return 1.0 + self.accepted / self.drafted_rounds if self.drafted_rounds else 1.0

    @property
    def expected_speedup(self) -> float:
        """Mean of what the choices of gamma were expected to gain over plain decoding; 0 where none was made."""
        return self.estimated_speedup / self.estimates if self.estimates else 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds; 0 before the first token."""
        return self.first_token - self.started if self.first_token is not None else 0.0
