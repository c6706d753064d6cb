"""Prompts of several classes, since what a draft gains depends on how predictable the text is."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.v1 import orchestrator_pb2 as api

_PASSAGE = (
    "The lighthouse at the end of the bay was built in 1874 by the engineer Ada Thornton. It has 112 steps, a lamp of "
    "4,000 candles, and walls two metres thick. On clear nights its light can be seen from the island of Skerry, "
    "thirty kilometres away. The last keeper, Tom Alder, left the tower in the spring of 1988, when the lamp was made "
    "automatic."
)


@dataclass(frozen=True, slots=True)
class PromptClass:
    """A kind of text to generate."""

    name: str
    messages: tuple[str, ...]
    """User messages of chats of one turn."""

    def request(self, index: int) -> api.GenerateRequest:
        """A request with one of the messages as its prompt."""
        content = self.messages[index % len(self.messages)]
        return api.GenerateRequest(messages=api.ChatMessages(messages=[api.ChatMessage(role="user", content=content)]))


PROMPT_CLASSES = (
    PromptClass(
        "chat",
        (
            "Write a polite email asking for a day off.",
            "Give me five tips for sleeping better, with one sentence on each.",
            "Explain to a ten-year-old how a rainbow comes about.",
        ),
    ),
    PromptClass(
        "code",
        (
            "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example.",
            "Write a Python class for a stack with push, pop and peek methods, and show how to use it.",
            "Write a Python function that counts the words in a text file and returns a dictionary.",
        ),
    ),
    PromptClass(
        "copying",
        (
            f"Repeat the following text word for word, without any change:\n\n{_PASSAGE}",
            f"Copy this text exactly:\n\n{_PASSAGE}",
            f"Here is a text:\n\n{_PASSAGE}\n\nWrite the same text again.",
        ),
    ),
    PromptClass(
        "prose",
        (
            "Write a surreal story full of strange images, in which nothing happens that a reader would expect.",
            "Describe a market in a city that does not exist: its smells, its names, its quarrels.",
            "Write the diary of an old sea captain on the day he found something impossible in his net.",
        ),
    ),
)


def prompt_class(name: str) -> PromptClass:
    """The one of that name."""
    return next(each for each in PROMPT_CLASSES if each.name == name)
