"""One orchestrator's stream as the engine sees it: the sessions that live and end with it, and where answers go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine.job import WorkItem
from tandem.engine.session import Session
from tandem.engine.work import Work
from tandem.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of one item."""

    request_id: str
    cache_epoch: int
    result: Any
    """The method's result; None if there is an error, or if a retry of the same item took its place."""
    cached_length: int = 0
    """Tokens that the next update may build on, for a result."""
    unread_tokens: int = 0
    """Tokens of the prefix among them that were not run."""
    error: worker_pb2.ItemError | None = None
    work: Work | None = None
    """None where the item was not admitted."""


class Stream:
    """A namespace of sessions. The engine's thread owns `sessions` and `held`; `deliver` is called in the event loop."""

    __slots__ = ("__weakref__", "closed", "deliver", "held", "sessions")

    def __init__(self, deliver: Callable[[Sequence[Answer]], None]) -> None:
        self.deliver = deliver
        self.sessions: dict[str, Session] = {}
        self.held: dict[str, list[WorkItem]] = {}
        """By session: an item whose form is being compiled, and what came behind it."""
        self.closed = False
