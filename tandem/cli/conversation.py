"""What was said, as the messages of the next request."""

from __future__ import annotations

from tandem.client import Message


class Conversation:
    """Turns of user and assistant, after a system message if there is one."""

    def __init__(self, system: str | None) -> None:
        self._system = [Message("system", system)] if system else []
        self._turns: list[Message] = []

    def asking(self, line: str) -> list[Message]:
        """All messages, with a new one of the user's."""
        return [*self._system, *self._turns, Message("user", line)]

    def answered(self, line: str, answer: str) -> None:
        """Keeps a turn."""
        self._turns += [Message("user", line), Message("assistant", answer)]

    def reset(self) -> None:
        """Forgets the turns; the system message stays."""
        self._turns.clear()
