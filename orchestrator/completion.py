"""Where a completion ends, decided token by token: nothing here knows of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from tandem.acceptance import TokenKind

from .detokenizer import Detokenizer, StopStrings
from .request import GenerationPlan


class FinishReason(IntEnum):
    """Why a completion ended; the values are those of the public API."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The logarithm of a token's probability, and those of the likeliest tokens at its place, falling."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Ids and their logarithms."""


@dataclass(slots=True)
class EmittedToken:
    """A token of the completion and the text it released."""

    token_id: int
    kind: TokenKind
    text: str
    logprobs: TokenLogprobs | None = None
    """If asked for."""


class Completion:
    """The completion so far. The first end in token order wins, and nothing comes after it."""

    def __init__(self, plan: GenerationPlan, decode: Callable[[Sequence[int]], str]) -> None:
        self._plan = plan
        self._decode = decode
        self.finish_reason: FinishReason | None
        self.restart()

    def restart(self) -> None:
        """Forgets all tokens, as if none had been taken."""
        self._detokenizer = Detokenizer(self._decode)
        self._stops = StopStrings(self._plan.stop, self._plan.include_stop)
        self.length = 0
        self.finish_reason = None

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self._plan.max_tokens - self.length

    def may_end_in(self, token_ids: Sequence[int]) -> bool:
        """Whether these tokens, if they come next, could end it; False is certain, and costs no text."""
        plan = self._plan
        return bool(plan.stop) or self.remaining <= len(token_ids) or not plan.end_token_ids.isdisjoint(token_ids)

    def take(self, token_ids: Sequence[int], kinds: Sequence[TokenKind]) -> list[EmittedToken]:
        """Takes the tokens of a round, up to the end of the completion if it lies among them."""
        if self.finish_reason is None and not self.may_end_in(token_ids):
            self.length += len(token_ids)
            texts = self._detokenizer.push_all(token_ids)
            return [EmittedToken(*each) for each in zip(token_ids, kinds, texts, strict=True)]
        emitted: list[EmittedToken] = []
        for token_id, kind in zip(token_ids, kinds, strict=True):
            if self.finish_reason is not None:
                break
            emitted.append(EmittedToken(token_id, kind, self._advance(token_id)))
        return emitted

    def _advance(self, token_id: int) -> str:
        self.length += 1
        piece = self._detokenizer.push(token_id)
        text, stopped = self._match_stops(piece)
        if stopped:
            self.finish_reason = FinishReason.STOP
            return text
        if token_id in self._plan.end_token_ids and self.length > self._plan.min_tokens:
            self.finish_reason = FinishReason.STOP
        elif self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        return text if self.finish_reason is None else text + self._flush()

    def _match_stops(self, piece: str) -> tuple[str, bool]:
        if self.length <= self._plan.min_tokens:
            return piece, False
        return self._stops.push(piece)

    def _flush(self) -> str:
        text, stopped = self._stops.push(self._detokenizer.flush())
        if stopped:
            self.finish_reason = FinishReason.STOP
        return text if stopped else text + self._stops.flush()
