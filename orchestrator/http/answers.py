"""What was generated, as OpenAI's objects: in one piece, or as the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tandem.v1 import orchestrator_pb2 as api

from .inquiry import Inquiry
from .logprobs import Logprobs

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
    """The answer to one inquiry, with a choice for each completion."""

    def __init__(self, inquiry: Inquiry, model: str, token_text: Callable[[int], str]) -> None:
        self._inquiry = inquiry
        self._head = {
            "id": _ID_PREFIXES[inquiry.kind] + inquiry.request.request_id,
            "created": int(time.time()),
            "model": model,
        }
        self._choices = [_Choice(inquiry, index, token_text) for index in range(max(inquiry.request.n, 1))]

    def chunks(self, response: api.GenerateResponse) -> Iterator[dict[str, Any]]:
        """The chunks of one response, without those that would say nothing."""
        for choice in self._choices[response.index].pieces(response):
            chunk = {**self._head, "object": _CHUNK_OBJECTS[self._inquiry.kind], "choices": [choice]}
            # OpenAI's: null in all chunks but the last, where it was asked for.
            yield {**chunk, "usage": None} if self._inquiry.include_usage else chunk

    def last_chunks(self, last: api.GenerateResponse) -> Iterator[dict[str, Any]]:
        """What follows the last response."""
        if self._inquiry.include_usage:
            head = {**self._head, "object": _CHUNK_OBJECTS[self._inquiry.kind]}
            yield {**head, "choices": [], "usage": _usage(last.finish)}

    def whole(self, responses: Sequence[api.GenerateResponse]) -> dict[str, Any]:
        """The object of an answer in one piece."""
        of_choice: list[list[api.GenerateResponse]] = [[] for _ in self._choices]
        for response in responses:
            of_choice[response.index].append(response)
        choices = [choice.whole(own) for choice, own in zip(self._choices, of_choice, strict=True)]
        return {
            **self._head,
            "object": _OBJECTS[self._inquiry.kind],
            "choices": choices,
            "usage": _usage(responses[-1].finish),
        }


class _Choice:
    """One completion."""

    def __init__(self, inquiry: Inquiry, index: int, token_text: Callable[[int], str]) -> None:
        self._inquiry = inquiry
        self._chat = inquiry.kind == "chat"
        self._head = {"index": index, "logprobs": None, "finish_reason": None}
        self._logprobs = Logprobs(token_text)
        self._seed = 0

    def pieces(self, response: api.GenerateResponse) -> Iterator[dict[str, Any]]:
        """The choices of the chunks of one response."""
        text = response.text
        if response.HasField("start"):
            self._seed = response.start.seed
            if self._chat:
                yield {**self._head, "delta": {"role": "assistant", "content": ""}}
            else:
                text = response.start.prompt_text + text
        told = self._told(response.tokens) if response.tokens else {}
        if told and self._inquiry.return_tokens:
            told["draft_tokens"] = response.draft_tokens
        if text or told:
            yield {**self._head, **({"delta": {"content": text}} if self._chat else {"text": text}), **told}
        if response.HasField("finish"):
            yield {**self._head, **({"delta": {}} if self._chat else {"text": ""}), **self._end(response.finish)}

    def whole(self, responses: Sequence[api.GenerateResponse]) -> dict[str, Any]:
        """The choice of an answer in one piece."""
        start = responses[0].start
        self._seed = start.seed
        text = "".join(response.text for response in responses)
        content = (
            {"message": {"role": "assistant", "content": text, "refusal": None}}
            if self._chat
            else {"text": start.prompt_text + text}
        )
        told = self._told([token for response in responses for token in response.tokens])
        return {**self._head, **content, **told, **self._end(responses[-1].finish)}

    def _told(self, tokens: Sequence[api.GeneratedToken]) -> dict[str, Any]:
        """What is said of the tokens, as far as it was asked for."""
        told: dict[str, Any] = {}
        if self._inquiry.request.logprobs:
            told["logprobs"] = self._logprobs.chat(tokens) if self._chat else self._logprobs.completion(tokens)
        if self._inquiry.return_tokens:
            told["tokens"] = [
                {"id": token.token_id, "kind": _KINDS[token.kind], "text": token.text} for token in tokens
            ]
        return told

    def _end(self, finish: api.GenerationFinish) -> dict[str, Any]:
        """With our own addition: what repeats the request, and how speculation went."""
        stats = finish.speculation
        about = {
            "seed": self._seed,
            "completion_tokens": finish.usage.completion_tokens,
            "rounds": stats.rounds,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "degraded_reasons": list(stats.degraded_reasons),
            "shortened_rounds": stats.shortened_rounds,
            "time_to_first_token_seconds": stats.time_to_first_token_seconds,
            "total_seconds": stats.total_seconds,
        }
        return {"finish_reason": _REASONS[finish.reason], "tandem": about}


def _usage(finish: api.GenerationFinish) -> dict[str, int]:
    usage = finish.total_usage if finish.HasField("total_usage") else finish.usage
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
