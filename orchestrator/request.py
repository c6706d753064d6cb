"""From a GenerateRequest to a plan in which every default is resolved and every limit checked."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tandem import wire
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from .errors import InvalidArgument
from .sampling_request import check_form, check_ids, check_sampling, resolve_sampling
from .vocabulary import PromptNotEncodable, Vocabulary

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SALT_CHARACTERS = 128
MAX_MESSAGES = 1024
MAX_COMPLETIONS = 16
INLINE_PROMPT_CHARACTERS = 2048
"""Encoding this much takes well under a millisecond; more goes to a thread."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KNOWN_ID = re.compile(_REQUEST_ID.pattern + r"(#[0-9]{1,2})?")
_ROLES = frozenset({"system", "user", "assistant"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server and the target's model allow."""

    context_length: int
    vocabulary_size: int
    max_tokens: int
    max_prompt_characters: int
    max_speculative_tokens: int
    default_speculative_tokens: int
    adaptive_by_default: bool
    end_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One request, ready to run."""

    request_id: str
    prompt: bytes
    """Encoded token ids."""
    prompt_tokens: int
    sampling: sampling_pb2.Sampling
    num_speculative_tokens: int
    """gamma; where it is adaptive, the most of it."""
    adaptive: bool
    max_tokens: int
    min_tokens: int
    end_token_ids: frozenset[int]
    """Generation ends after any of these."""
    stop: tuple[str, ...]
    include_stop: bool
    cache_salt: str
    """Requests of different salts share no cached prefix."""
    echo: bool = False
    """Report the prompt."""
    keep_special_tokens: bool = False
    """In the text."""


def is_known_id(text: str) -> bool:
    """Whether a request may be known by this: what a caller may name it, with a number where it is one of several."""
    return _KNOWN_ID.fullmatch(text) is not None


async def plan_generation(request: api.GenerateRequest, vocabulary: Vocabulary, limits: Limits) -> GenerationPlan:
    """Validates everything that costs nothing first, then encodes the prompt. Raises InvalidArgument."""
    request_id = _request_id(request)
    check_numbers(request, limits)
    check_sampling(request, limits.vocabulary_size)
    _check_stops(request, limits)
    if request.HasField("n") and not 1 <= request.n <= MAX_COMPLETIONS:
        raise InvalidArgument("n", f"must be 1 to {MAX_COMPLETIONS}")
    if len(request.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidArgument("cache_salt", f"must be at most {MAX_SALT_CHARACTERS} characters")
    _check_prompt_size(request, limits)
    await check_form(request, vocabulary, limits.end_token_ids)
    prompt = await _encode_prompt(request, vocabulary)
    if not prompt:
        raise InvalidArgument("prompt", "is empty, and the model has no token to start from")
    if request.WhichOneof("prompt") == "token_ids" and max(prompt) >= limits.vocabulary_size:
        raise InvalidArgument("token_ids", f"ids must be below the vocabulary's {limits.vocabulary_size}")
    max_tokens = _max_tokens(request, len(prompt), limits)
    min_tokens = request.min_tokens
    if min_tokens > max_tokens:
        raise InvalidArgument("min_tokens", f"is above max_tokens, {max_tokens}")
    model_ends: frozenset[int] = frozenset() if request.ignore_eos else limits.end_token_ids
    end_token_ids = model_ends | frozenset(request.stop_token_ids)
    gamma, adaptive = _gamma(request, limits)
    return GenerationPlan(
        request_id=request_id,
        prompt=wire.encode_ids(prompt),
        prompt_tokens=len(prompt),
        sampling=await resolve_sampling(
            request, vocabulary, limits.vocabulary_size, len(prompt), end_token_ids, limits.end_token_ids
        ),
        num_speculative_tokens=gamma,
        adaptive=adaptive,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        end_token_ids=end_token_ids,
        stop=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        cache_salt=request.cache_salt,
        echo=request.echo,
        keep_special_tokens=request.HasField("skip_special_tokens") and not request.skip_special_tokens,
    )


def _request_id(request: api.GenerateRequest) -> str:
    if not request.request_id:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidArgument("request_id", "must be 1 to 128 letters, digits, '-', '_', '.' or ':'")
    return request.request_id


def check_numbers(request: api.GenerateRequest, limits: Limits) -> None:
    """What the server limits; raises InvalidArgument."""
    if request.HasField("max_tokens"):
        _check_max_tokens(request.max_tokens, limits)
    if request.HasField("num_speculative_tokens") and request.num_speculative_tokens > limits.max_speculative_tokens:
        raise InvalidArgument("num_speculative_tokens", f"must be 0 to {limits.max_speculative_tokens}")


def _check_max_tokens(max_tokens: int, limits: Limits) -> None:
    """As far as it can be told before the prompt is encoded, which has one token at least."""
    if 1 <= max_tokens <= min(limits.max_tokens, limits.context_length - 1):
        return
    if limits.max_tokens < limits.context_length:
        raise InvalidArgument("max_tokens", f"must be 1 to {limits.max_tokens}")
    raise InvalidArgument(
        "max_tokens",
        f"must be 1 to {limits.context_length - 1}, less with a longer prompt: both share a context of {limits.context_length}",
    )


def _check_stops(request: api.GenerateRequest, limits: Limits) -> None:
    if len(request.stop) > MAX_STOPS:
        raise InvalidArgument("stop", f"at most {MAX_STOPS} strings")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in request.stop):
        raise InvalidArgument("stop", f"strings must have 1 to {MAX_STOP_CHARACTERS} characters")
    check_ids("stop_token_ids", request.stop_token_ids, MAX_STOP_TOKEN_IDS, limits.vocabulary_size)


def _check_prompt_size(request: api.GenerateRequest, limits: Limits) -> None:
    """Encoding takes time that grows with the text, so the text is measured first."""
    if len(request.text) > limits.max_prompt_characters:
        raise InvalidArgument("text", f"has more than {limits.max_prompt_characters} characters")
    if sum(len(message.content) for message in request.messages.messages) > limits.max_prompt_characters:
        raise InvalidArgument("messages", f"have more than {limits.max_prompt_characters} characters")
    if len(request.token_ids.ids) >= limits.context_length:
        raise InvalidArgument("token_ids", f"fill the context of {limits.context_length}")


async def _encode_prompt(request: api.GenerateRequest, vocabulary: Vocabulary) -> Sequence[int]:
    match request.WhichOneof("prompt"):
        case "token_ids":
            return request.token_ids.ids
        case "text":
            if len(request.text) <= INLINE_PROMPT_CHARACTERS:
                return vocabulary.encode_text(request.text)
            return await asyncio.to_thread(vocabulary.encode_text, request.text)
        case "messages":
            return await _encode_messages(request.messages, vocabulary)
        case _:
            raise InvalidArgument("prompt", "one of text, token_ids or messages must be set")


async def _encode_messages(chat: api.ChatMessages, vocabulary: Vocabulary) -> Sequence[int]:
    messages = [(message.role, message.content) for message in chat.messages]
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidArgument("messages", f"must be 1 to {MAX_MESSAGES} messages")
    if any(role not in _ROLES for role, _ in messages):
        raise InvalidArgument("messages.role", "must be system, user or assistant")
    try:
        if sum(len(content) for _, content in messages) <= INLINE_PROMPT_CHARACTERS:
            return vocabulary.encode_chat(messages)
        return await asyncio.to_thread(vocabulary.encode_chat, messages)
    except PromptNotEncodable as error:
        raise InvalidArgument("messages", str(error)) from error


def _max_tokens(request: api.GenerateRequest, prompt_tokens: int, limits: Limits) -> int:
    room = limits.context_length - prompt_tokens
    if room < 1:
        raise InvalidArgument("prompt", f"has {prompt_tokens} tokens, the context holds {limits.context_length}")
    if not request.HasField("max_tokens"):
        return min(room, limits.max_tokens)
    if request.max_tokens > room:
        raise InvalidArgument(
            "max_tokens",
            f"must be 1 to {room} with a prompt of {prompt_tokens} tokens: both share a context of {limits.context_length}",
        )
    return request.max_tokens


def _gamma(request: api.GenerateRequest, limits: Limits) -> tuple[int, bool]:
    """gamma, or the most of it, and whether it is adaptive."""
    given = request.HasField("num_speculative_tokens")
    if request.HasField("adaptive_speculative_tokens"):
        adaptive = request.adaptive_speculative_tokens
    else:
        adaptive = limits.adaptive_by_default and not given
    if given:
        return request.num_speculative_tokens, adaptive
    most = limits.max_speculative_tokens
    return (most if adaptive else min(limits.default_speculative_tokens, most)), adaptive
