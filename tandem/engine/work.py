"""How much work an item was: noted by the step thread as it goes, read once the item is answered."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Step:
    """One forward, the same for all items in it."""

    began_ns: int
    """Since the epoch."""
    items: int
    tokens: int
    seconds: float
    """With what was made of its logits."""


@dataclass(slots=True)
class Work:
    """Of one item."""

    prefill_tokens: int = 0
    """Tokens of the prefix that had to be run; one or two in an ordinary round."""
    reused_tokens: int = 0
    """Tokens of the prefix that were taken over from another session's slot instead."""
    began_ns: int = 0
    """Start of the first forward, since the epoch; 0 before it."""
    steps: int = 0
    """Forwards that the item was in."""
    companions: int = 0
    """Items in these forwards, this one included: divided by `steps`, its batch size."""
    tokens: int = 0
    """Tokens in these forwards, of all their items."""
    seconds: float = 0.0
    """Time of these forwards, with what was made of their logits."""
    last: Step | None = None
    """The last of these forwards."""

    ahead: str = ""
    """How a proposal fared with what was drafted ahead: chain, branch or miss; empty where there was nothing."""

    source: str = ""
    """Where a block came from, if the draft has more than one source: model or ngram."""

    def ran(self, began_ns: int, batch_size: int) -> None:
        """A forward is over."""
        if not self.steps:
            self.began_ns = began_ns
        self.steps += 1
        self.companions += batch_size

    def took(self, step: Step) -> None:
        """The logits of that forward are used."""
        self.seconds += step.seconds
        self.tokens += step.tokens
        self.last = step

    def write_to(self, time: worker_pb2.WorkerTime) -> None:
        """For the answer."""
        time.seconds = self.seconds
        time.forwards = self.steps
        time.tokens = self.tokens
        time.items = self.companions
