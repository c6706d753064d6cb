"""What was generated, as OpenAI's objects: in one piece, or as the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.v1 import orchestrator_pb2 as api

from .inquiry import Inquiry

_OBJECTS = {"chat": "chat.completion", "completion": "text_completion"}
_CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completion": "text_completion"}
_ID_PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-"}
_REASONS = {api.FINISH_REASON_STOP: "stop", api.FINISH_REASON_LENGTH: "length"}
_KINDS = {
    api.TOKEN_KIND_ACCEPTED: "accepted",
    api.TOKEN_KIND_RECOVERED: "recovered",
    api.TOKEN_KIND_BONUS: "bonus",
    api.TOKEN_KIND_REPLAYED: "replayed",
}


class Answer:
    """What all objects of one answer have in common."""

    def __init__(self, inquiry: Inquiry, start: api.GenerationStart, model: str) -> None:
        self._inquiry = inquiry
        self._start = start
        self._head = {
            "id": _ID_PREFIXES[inquiry.kind] + start.request_id,
            "created": int(time.time()),
            "model": model,
        }

    def chunks(self, response: api.GenerateResponse) -> Iterator[dict[str, Any]]:
        """The chunks of one response, without those that would say nothing."""
        chat = self._inquiry.kind == "chat"
        if chat and response.HasField("start"):
            yield self._chunk({"delta": {"role": "assistant", "content": ""}})
        told: dict[str, Any] = {"tokens": _tokens(response.tokens)} if self._inquiry.return_tokens else {}
        if response.text or any(told.values()):
            yield self._chunk({**({"delta": {"content": response.text}} if chat else {"text": response.text}), **told})
        if response.HasField("finish"):
            reason = _REASONS[response.finish.reason]
            yield self._chunk({**({"delta": {}} if chat else {"text": ""}), "finish_reason": reason})
            yield from self._usage_chunk(response.finish)

    def whole(self, responses: Sequence[api.GenerateResponse]) -> dict[str, Any]:
        """The object of an answer in one piece."""
        finish = responses[-1].finish
        text = "".join(response.text for response in responses)
        choice: dict[str, Any] = {
            "index": 0,
            **(
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self._inquiry.kind == "chat"
                else {"text": text}
            ),
            "logprobs": None,
            "finish_reason": _REASONS[finish.reason],
        }
        if self._inquiry.return_tokens:
            choice["tokens"] = [told for response in responses for told in _tokens(response.tokens)]
        return {
            **self._head,
            "object": _OBJECTS[self._inquiry.kind],
            "choices": [choice],
            "usage": _usage(finish),
            "tandem": self._about(finish),
        }

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {
            **self._head,
            "object": _CHUNK_OBJECTS[self._inquiry.kind],
            "choices": [{"index": 0, "logprobs": None, "finish_reason": None, **choice}],
        }
        # OpenAI's: null in all chunks but the last, where it was asked for.
        return {**chunk, "usage": None} if self._inquiry.include_usage else chunk

    def _usage_chunk(self, finish: api.GenerationFinish) -> Iterator[dict[str, Any]]:
        if self._inquiry.include_usage:
            head = {**self._head, "object": _CHUNK_OBJECTS[self._inquiry.kind]}
            yield {**head, "choices": [], "usage": _usage(finish), "tandem": self._about(finish)}

    def _about(self, finish: api.GenerationFinish) -> dict[str, Any]:
        """Our own addition: what repeats the request, and how speculation went."""
        stats = finish.speculation
        return {
            "seed": self._start.seed,
            "rounds": stats.rounds,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "degraded_reasons": list(stats.degraded_reasons),
            "time_to_first_token_seconds": stats.time_to_first_token_seconds,
            "total_seconds": stats.total_seconds,
        }


def _tokens(tokens: Sequence[api.GeneratedToken]) -> list[dict[str, Any]]:
    return [{"id": token.token_id, "kind": _KINDS[token.kind], "text": token.text} for token in tokens]


def _usage(finish: api.GenerationFinish) -> dict[str, int]:
    prompt, completion = finish.usage.prompt_tokens, finish.usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
