"""When speculation pays: tokens per round, and what a round costs.

Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023: the expected tokens of a round
are their equation (1), generalised from one acceptance probability to one per position; the speedup is their theorem 3.8
with measured times in place of a cost ratio. All times are in one unit, whichever.
"""

from __future__ import annotations

from collections.abc import Iterable


def expected_tokens(acceptances: Iterable[float]) -> float:
    """Expected tokens of one round, `1 + sum_i prod_{j<=i} a_j`, for the acceptance probability of each draft position.

    The one is the recovered or bonus token. For a constant a it is `(1 - a^(gamma+1)) / (1 - a)`.
    """
    expected = reached = 1.0
    for acceptance in acceptances:
        reached *= acceptance
        expected += reached
    return expected


def time_per_token(tokens_per_round: float, draft: float, verify: float, overhead: float) -> float:
    """Time for one token where a round yields `tokens_per_round`.

    `draft` is the time that the round waits for gamma draft tokens, 0 where they are hidden behind verification;
    `verify` that of one target step over gamma + 1 positions; `overhead` all else.
    """
    return (draft + verify + overhead) / tokens_per_round


def speedup(tokens_per_round: float, plain_step: float, draft: float, verify: float, overhead: float) -> float:
    """How many times faster than plain decoding, where each token costs one target step of `plain_step`; below 1 it is
    slower."""
    return plain_step / time_per_token(tokens_per_round, draft, verify, overhead)
