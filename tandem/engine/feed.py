"""What one session runs in one forward."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.wire import IdArray


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens that one session runs in a step."""

    slot: int
    start: int
    """Position of the first token; the cache holds all tokens before it."""
    token_ids: IdArray
    """Never empty."""
    rows: int
    """How many of the last tokens' logits are wanted; 0 for a piece of a longer prefill."""
