"""A finished generation with its times, as the caller saw them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from tandem.cli.interruptions import Interruptions
from tandem.client import (
    Chunk,
    FinishReason,
    GeneratedToken,
    Generation,
    GenerationFinish,
    GenerationOptions,
    GenerationStart,
    TokenKind,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """What came back, and when."""

    start: GenerationStart
    tokens: tuple[GeneratedToken, ...]
    text: str
    finish: GenerationFinish
    first_token_seconds: float
    total_seconds: float

    @property
    def seconds_per_output_token(self) -> float:
        """Time for each token after the first; 0 if there is none."""
        later = len(self.tokens) - 1
        return (self.total_seconds - self.first_token_seconds) / later if later > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the whole time, waiting for the first included."""
        return len(self.tokens) / self.total_seconds if self.total_seconds > 0 else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens for each pass of the target, those without a block included; no speed-up can be more."""
        rounds = self.finish.speculation.rounds
        made = sum(token.kind is not TokenKind.REPLAYED for token in self.tokens)
        return made / rounds if rounds else 0.0

    def acceptance_per_position(self) -> list[float]:
        """How often a drafted token was accepted, by its position in the block."""
        stats = self.finish.speculation
        pairs = zip(stats.draft_tokens_per_position, stats.accepted_tokens_per_position, strict=True)
        return [accepted / drafted if drafted else 0.0 for drafted, accepted in pairs]

    def cut_off(self, options: GenerationOptions) -> str:
        """What a person should know of an answer that was asked for with `options` and isn't whole; empty if it is."""
        if self.finish.reason is not FinishReason.LENGTH:
            return ""
        cause = " by --max-tokens" if options.max_tokens is not None else ", the most that it may have"
        said = f"cut off after {self.finish.completion_tokens} tokens{cause} (finish reason: length)"
        return said if options.structured_output is None else f"{said}: only the beginning of the form asked for"

    def to_json(self) -> dict[str, Any]:
        """One object for programs; seconds are this client's."""
        return {
            "request_id": self.start.request_id,
            "model": self.start.model,
            "seed": self.start.seed,
            "text": self.text,
            "token_ids": [token.token_id for token in self.tokens],
            "kinds": [str(token.kind) for token in self.tokens],
            **self._logprobs(),
            "finish_reason": str(self.finish.reason),
            "usage": {
                "prompt_tokens": self.finish.prompt_tokens,
                "completion_tokens": self.finish.completion_tokens,
            },
            "speculation": dataclasses.asdict(self.finish.speculation),
            "time_to_first_token_seconds": round(self.first_token_seconds, 6),
            "total_seconds": round(self.total_seconds, 6),
        }

    def _logprobs(self) -> dict[str, Any]:
        if all(token.logprob is None for token in self.tokens):
            return {}
        return {
            "logprobs": [token.logprob for token in self.tokens],
            "top_logprobs": [dict(token.top_logprobs) for token in self.tokens],
        }


def collect(
    start: Callable[[], Generation], on_chunk: Callable[[Chunk], None], interruptions: Interruptions
) -> Completion:
    """Starts a generation and runs it to its end, showing each chunk on the way. The call is cancelled if that is interrupted."""
    (completion,) = collect_all(start, on_chunk, interruptions)
    return completion


def collect_all(
    start: Callable[[], Generation], on_chunk: Callable[[Chunk], None], interruptions: Interruptions
) -> list[Completion]:
    """The same for a generation of several completions, in the order of their indices."""
    with interruptions.held():
        return _collect(start, on_chunk, interruptions)


def _collect(
    start: Callable[[], Generation], on_chunk: Callable[[Chunk], None], interruptions: Interruptions
) -> list[Completion]:
    """In a hold, at whose end the call is gone from here too: what frees it is gRPC's code as well."""
    generation = start()
    began = time.monotonic()
    gatherings: dict[int, _Gathering] = {}
    try:
        with interruptions.cancelling(generation.cancel):
            for chunk in generation:
                if chunk.index not in gatherings:
                    gatherings[chunk.index] = _Gathering(began)
                gatherings[chunk.index].add(chunk)
                with interruptions.released():
                    on_chunk(chunk)
    finally:
        generation.cancel()
    return [gathering.completion() for _, gathering in sorted(gatherings.items())]


class _Gathering:
    """The chunks of one completion."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._first: float | None = None
        self._last = 0.0
        self._start: GenerationStart | None = None
        self._finish: GenerationFinish | None = None
        self._tokens: list[GeneratedToken] = []
        self._text: list[str] = []

    def add(self, chunk: Chunk) -> None:
        self._last = time.monotonic() - self._began
        if chunk.tokens and self._first is None:
            self._first = self._last
        self._start, self._finish = self._start or chunk.start, self._finish or chunk.finish
        self._tokens.extend(chunk.tokens)
        self._text.append(chunk.text)

    def completion(self) -> Completion:
        # The client has checked that the stream was finished; a start comes with the first response.
        assert self._finish is not None
        return Completion(
            start=self._start or GenerationStart("", 0, self._finish.prompt_tokens, ""),
            tokens=tuple(self._tokens),
            text="".join(self._text),
            finish=self._finish,
            first_token_seconds=self._last if self._first is None else self._first,
            total_seconds=self._last,
        )
