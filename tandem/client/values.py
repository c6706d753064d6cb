"""What callers give and get: plain values. Every default stays the server's, so that an option left unset here means what the
contract says it means."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence


class TokenKind(enum.StrEnum):
    """Where a committed token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    REPLAYED = "replayed"


class FinishReason(enum.StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


class Method(enum.StrEnum):
    """How the committed token is chosen from the two distributions."""

    REJECTION = "rejection"
    COUPLED = "coupled"


class LogprobsMode(enum.StrEnum):
    """Of which distribution log-probabilities are: the model's own, or the one that tokens are drawn from."""

    RAW = "raw"
    PROCESSED = "processed"


@dataclasses.dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the output has to be; one of them is set."""

    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    grammar: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


# Text is completed as it stands, ids are taken as they are, messages go through the target's chat template.
Prompt = str | Sequence[int] | Sequence[Message]


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationOptions:
    """What a caller may ask for; None leaves a field to the server."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    method: Method | None = None
    num_speculative_tokens: int | None = None
    adaptive_speculative_tokens: bool | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    banned_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    echo: bool = False
    n: int | None = None
    skip_special_tokens: bool | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    cache_salt: str | None = None
    structured_output: StructuredOutput | None = None
    token_by_token: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingChange:
    """What of a running request's sampling is to be another; None leaves a field as it is, and an empty collection unsets it."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    num_speculative_tokens: int | None = None
    adaptive_speculative_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    banned_token_ids: Sequence[int] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    """Together with `bad_words`: where one is set, both take the place of what was."""


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingInForce:
    """What an update has led to."""

    config_version: int
    """How many times the sampling was changed."""
    completion_tokens: int
    """Tokens of the completion from before the last change."""


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationStart:
    """What the server decided before the first token."""

    request_id: str
    seed: int
    prompt_tokens: int
    model: str
    prompt_token_ids: tuple[int, ...] = ()
    """With echo, as `prompt_text`."""
    prompt_text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One committed token and the text that it released."""

    token_id: int
    kind: TokenKind
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """Ids of the likeliest tokens at its place with their log-probabilities, falling."""


@dataclasses.dataclass(frozen=True, slots=True)
class Speculation:
    """How speculation went; see SpeculationStats in the contract for each field."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    draft_tokens_per_position: tuple[int, ...]
    accepted_tokens_per_position: tuple[int, ...]
    expected_accepted_tokens: float
    mean_acceptance_length: float
    degraded_rounds: int
    degraded_reasons: tuple[str, ...]
    benched_drafts: int
    rebuilds: int
    time_to_first_token_seconds: float
    total_seconds: float
    expected_speedup: float = 0.0
    shortened_rounds: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What was read and written, in tokens."""

    prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationFinish:
    """The end of a generation."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation
    total_usage: Usage | None = None
    """In the last one of several completions: the prompt once, and the tokens of all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One response of the stream: the tokens of a round, or the end. `text` may lag behind the tokens."""

    start: GenerationStart | None
    tokens: tuple[GeneratedToken, ...]
    text: str
    finish: GenerationFinish | None
    index: int = 0
    """Which of several completions this belongs to."""
    draft_tokens: int = 0
    """Tokens of this round's block, accepted or not."""
