"""What a method may do in steps in which nothing was asked of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tandem.engine.job import RaggedModel
from tandem.engine.session import Session

if TYPE_CHECKING:
    import torch

    from tandem.engine.feed import Feed
    from tandem.engine.slot_ledger import SlotLedger
    from tandem.engine.slot_pool import SlotPool


class SlotWork:
    """A model's forwards and copies, entered in the ledger where one is kept."""

    def __init__(
        self, lm: RaggedModel, ledger: SlotLedger | None, pool: SlotPool, most_tokens: Callable[[], int]
    ) -> None:
        """`most_tokens`: padded tokens of a forward of several feeds that the memory holds, as far as is known."""
        self.max_length = lm.max_length
        self._lm = lm
        self._ledger = ledger
        self._pool = pool
        self._most_tokens = most_tokens

    @property
    def most_tokens(self) -> int:
        """Padded tokens of a forward of several feeds, at most."""
        return self._most_tokens()

    def take_over(self, session: Session) -> None:
        """Copies what other slots hold of the session's prefix, where that is more than its own does."""
        move = self._pool.more_shared(session)
        if move is not None:
            self.copy(move.source, move.target, move.start, move.end)
            session.cached_length = move.end

    def forward(self, feeds: Sequence[Feed]) -> torch.Tensor:
        """The wanted logits, float32 [sum of rows, padded vocabulary]."""
        logits = self._lm.forward(feeds)
        if self._ledger is not None:
            for feed in feeds:
                self._ledger.ran(feed)
        return logits

    def read(self, feeds: Sequence[Feed]) -> None:
        """Runs feeds whose logits nobody wants; returns once that is done, so that what fails in it fails here."""
        self.forward(feeds)
        self._lm.synchronize()

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Lets slot `target` hold what slot `source` holds for the tokens start to end."""
        self._lm.copy_tokens(source, target, start, end)
        if self._ledger is not None:
            self._ledger.copied(source, target, start, end)

    def clear(self, slot: int) -> None:
        """Leaves nothing of what was computed in the slot."""
        self._lm.clear_slot(slot)


@dataclass(slots=True)
class AheadStats:
    """Counters since the start; written by the step thread, to be read from anywhere."""

    chain_hits: int = 0
    """Items whose prefix was the whole block and the draft's own next token."""
    branch_hits: int = 0
    """Items whose prefix was another guess."""
    misses: int = 0
    """Items whose prefix was not among the guesses that had been made."""
    tokens: int = 0
    """Tokens drafted ahead."""
    used_tokens: int = 0
    forwards: int = 0
    failed_forwards: int = 0
    paused: bool = False
    """Whether nothing is drafted ahead since rounds are longer with it, but for a look now and then."""
    pauses: int = 0
    """How often that began."""
    round_ratio: float = 1.0
    """Seconds of a round with it over those of one without; 1 where that was not looked at."""


class IdleWork(Protocol):
    """Called by the step thread only. It must not raise, and write nothing to a session's slot but what belongs to the
    session's own tokens."""

    @property
    def stats(self) -> AheadStats:
        """What came of it."""

    @property
    def slots(self) -> int:
        """Slots it needs for itself."""

    @property
    def wanted(self) -> bool:
        """Whether there is anything to do."""

    def attach(self, work: SlotWork, first_slot: int) -> None:
        """Before anything else: what to work with, and which slots are its own."""

    def step(self) -> None:
        """One forward at most: whatever is asked meanwhile waits for it."""

    def answered(self, job: Any) -> None:
        """A job is done; its session stays as it is until the next item."""

    def ended(self, session: Session) -> None:
        """The session is gone, and its slot with it."""
