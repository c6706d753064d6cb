"""What a draft's blocks were, beyond what the engine itself counts: for the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SourceStats:
    """Of one source of blocks; counters since the start."""

    blocks: int = 0
    """Blocks proposed from it."""
    tokens: int = 0
    """Tokens of those blocks that stood or fell; not those behind one that fell, nor those of a request that ended before."""
    accepted: int = 0
    """How many of them stood."""


@dataclass(slots=True)
class DraftStats:
    """Counters since the start; written by the step thread, to be read from anywhere."""

    sources: dict[str, SourceStats] = field(default_factory=dict)
    """By the source's name, where a draft has more than one."""
    trials: int = 0
    """Blocks drafted only to learn how a source does by now."""
    read_tokens: int = 0
    """Tokens that the model read after an answer that was not its own, while nothing was asked."""
    stopped_blocks: int = 0
    """Blocks that ended early since the next token was not worth drafting."""
    failed_reads: int = 0
    """Such forwards that raised."""
