"""Between the plain values and the messages of the contract."""

from __future__ import annotations

import dataclasses
import operator

import grpc

from tandem.v1 import orchestrator_pb2, sampling_pb2

from .errors import ProtocolError
from .values import (
    Chunk,
    FinishReason,
    GeneratedToken,
    GenerationFinish,
    GenerationOptions,
    GenerationStart,
    Message,
    Prompt,
    SamplingChange,
    SamplingInForce,
    Speculation,
    TokenKind,
    Usage,
)

_OPTIONAL_FLAGS = frozenset({"adaptive_speculative_tokens", "skip_special_tokens"})
"""Where false is not the same as unset."""
_SEQUENCES = frozenset(
    {"stop", "stop_token_ids", "bad_words", "bad_words_token_ids", "banned_token_ids", "allowed_token_ids"}
)
_CONVERTED = frozenset({"method", "bad_words_token_ids", "logprobs_mode"})


def build_request(prompt: Prompt, options: GenerationOptions, request_id: str) -> orchestrator_pb2.GenerateRequest:
    """The wire form of a request; raises ValueError or TypeError where a value doesn't fit its field at all."""
    _check_sequences(options)
    set_fields = {
        name: value
        for name, value in dataclasses.asdict(options).items()
        if name not in _CONVERTED
        and value is not None
        and (value is not False or name in _OPTIONAL_FLAGS)
        and value != ()
    }
    request = orchestrator_pb2.GenerateRequest(request_id=request_id, **set_fields)
    if options.method is not None:
        request.acceptance_method = sampling_pb2.AcceptanceMethod.Value(
            f"ACCEPTANCE_METHOD_{options.method.name}",
        )
    if options.logprobs_mode is not None:
        request.logprobs_mode = sampling_pb2.LogprobsMode.Value(f"LOGPROBS_MODE_{options.logprobs_mode.name}")
    request.bad_words_token_ids.extend(sampling_pb2.TokenSequence(ids=ids) for ids in options.bad_words_token_ids)
    _set_prompt(request, prompt)
    return request


_CHANGED_NUMBERS = (
    "temperature", "top_k", "top_p", "min_p", "num_speculative_tokens", "adaptive_speculative_tokens",
    "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def build_update(request_id: str, change: SamplingChange) -> orchestrator_pb2.UpdateSamplingRequest:
    """The wire form of a change; raises ValueError or TypeError where a value doesn't fit its field at all."""
    _check_sequences(change)
    numbers = {name: getattr(change, name) for name in _CHANGED_NUMBERS}
    update = orchestrator_pb2.UpdateSamplingRequest(request_id=request_id, **numbers)
    if change.logit_bias is not None:
        update.logit_bias.CopyFrom(orchestrator_pb2.LogitBias(biases=change.logit_bias))
    if change.banned_token_ids is not None:
        update.banned_token_ids.CopyFrom(orchestrator_pb2.TokenIds(ids=change.banned_token_ids))
    if change.allowed_token_ids is not None:
        update.allowed_token_ids.CopyFrom(orchestrator_pb2.TokenIds(ids=change.allowed_token_ids))
    if change.bad_words is not None or change.bad_words_token_ids is not None:
        sequences = [sampling_pb2.TokenSequence(ids=ids) for ids in change.bad_words_token_ids or ()]
        update.bad_words.CopyFrom(orchestrator_pb2.BadWords(texts=change.bad_words or (), token_ids=sequences))
    return update


def _check_sequences(values: GenerationOptions | SamplingChange) -> None:
    """Text is a sequence too, of characters, and nobody means those."""
    for field in dataclasses.fields(values):
        value = getattr(values, field.name)
        if field.name in _SEQUENCES and isinstance(value, str | bytes):
            raise TypeError(f"{field.name}: a sequence is expected, such as [{value!r}]")


def to_sampling_in_force(response: orchestrator_pb2.UpdateSamplingResponse) -> SamplingInForce:
    return SamplingInForce(response.config_version, response.completion_tokens)


def _set_prompt(request: orchestrator_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    parts: list[int | Message] = list(prompt)
    messages = [part for part in parts if isinstance(part, Message)]
    if not messages:
        # Raises TypeError for what is no integer.
        request.token_ids.ids.extend(operator.index(part) for part in parts if not isinstance(part, Message))
    elif len(messages) == len(parts):
        request.messages.messages.extend(
            orchestrator_pb2.ChatMessage(role=message.role, content=message.content) for message in messages
        )
    else:
        raise TypeError("a prompt is text, token ids, or messages, not several of them")


_KINDS = {
    orchestrator_pb2.TOKEN_KIND_ACCEPTED: TokenKind.ACCEPTED,
    orchestrator_pb2.TOKEN_KIND_RECOVERED: TokenKind.RECOVERED,
    orchestrator_pb2.TOKEN_KIND_BONUS: TokenKind.BONUS,
    orchestrator_pb2.TOKEN_KIND_REPLAYED: TokenKind.REPLAYED,
}
_REASONS = {
    orchestrator_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    orchestrator_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def to_chunk(response: orchestrator_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        start=_to_start(response.start) if response.HasField("start") else None,
        tokens=tuple(_to_token(token) for token in response.tokens),
        text=response.text,
        finish=_to_finish(response.finish) if response.HasField("finish") else None,
        index=response.index,
        draft_tokens=response.draft_tokens,
    )


def _to_start(start: orchestrator_pb2.GenerationStart) -> GenerationStart:
    return GenerationStart(
        start.request_id,
        start.seed,
        start.prompt_tokens,
        start.model,
        tuple(start.prompt_token_ids),
        start.prompt_text,
    )


def _to_token(token: orchestrator_pb2.GeneratedToken) -> GeneratedToken:
    kind = _KINDS.get(token.kind)
    if kind is None:
        raise ProtocolError(grpc.StatusCode.INTERNAL, f"a token of unknown kind {token.kind}")
    return GeneratedToken(
        token.token_id,
        kind,
        token.text,
        token.logprob if token.HasField("logprob") else None,
        tuple((each.token_id, each.logprob) for each in token.top_logprobs),
    )


def _to_finish(finish: orchestrator_pb2.GenerationFinish) -> GenerationFinish:
    reason = _REASONS.get(finish.reason)
    if reason is None:
        raise ProtocolError(grpc.StatusCode.INTERNAL, f"an unknown reason {finish.reason} to finish")
    return GenerationFinish(
        reason=reason,
        prompt_tokens=finish.usage.prompt_tokens,
        completion_tokens=finish.usage.completion_tokens,
        speculation=_to_speculation(finish.speculation),
        total_usage=_to_usage(finish.total_usage) if finish.HasField("total_usage") else None,
    )


def _to_usage(usage: orchestrator_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens)


def _to_speculation(stats: orchestrator_pb2.SpeculationStats) -> Speculation:
    return Speculation(
        rounds=stats.rounds,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        draft_tokens_per_position=tuple(stats.draft_tokens_per_position),
        accepted_tokens_per_position=tuple(stats.accepted_tokens_per_position),
        expected_accepted_tokens=stats.expected_accepted_tokens,
        mean_acceptance_length=stats.mean_acceptance_length,
        degraded_rounds=stats.degraded_rounds,
        degraded_reasons=tuple(stats.degraded_reasons),
        benched_drafts=stats.benched_drafts,
        shortened_rounds=stats.shortened_rounds,
        rebuilds=stats.rebuilds,
        time_to_first_token_seconds=stats.time_to_first_token_seconds,
        total_seconds=stats.total_seconds,
        expected_speedup=stats.expected_speedup,
    )
