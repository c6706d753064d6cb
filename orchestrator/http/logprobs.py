"""Log-probabilities in OpenAI's two forms: a chat's list of tokens, and the parallel lists of a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tandem.v1 import orchestrator_pb2 as api

LEAST = -9999.0
"""OpenAI's word for no probability at all: JSON has no infinity."""
_NOT_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Logprobs:
    """Tells tokens, in the order of the text; `token_text` gives a token's own text by its id."""

    def __init__(self, token_text: Callable[[int], str]) -> None:
        self._token_text = token_text
        self._characters = 0

    def chat(self, tokens: Sequence[api.GeneratedToken]) -> dict[str, Any]:
        """The object of a chat's choice."""
        content = [
            {
                **self._entry(token.token_id, token.logprob),
                "top_logprobs": [self._entry(top.token_id, top.logprob) for top in token.top_logprobs],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def completion(self, tokens: Sequence[api.GeneratedToken]) -> dict[str, Any]:
        """The object of a completion's choice. The token itself is always among the likeliest, as there too."""
        offsets = []
        for token in tokens:
            offsets.append(self._characters)
            self._characters += len(token.text)
        return {
            "tokens": [self._token_text(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprob, LEAST) for token in tokens],
            "top_logprobs": [self._likeliest(token) for token in tokens],
            "text_offset": offsets,
        }

    def _likeliest(self, token: api.GeneratedToken) -> dict[str, float]:
        # Different ids may have one text, halves of characters above all; the likeliest stands for it.
        found: dict[str, float] = {}
        for top in token.top_logprobs:
            found.setdefault(self._token_text(top.token_id), max(top.logprob, LEAST))
        found.setdefault(self._token_text(token.token_id), max(token.logprob, LEAST))
        return found

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token_id)
        encoded = None if _NOT_A_CHARACTER in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": encoded}
