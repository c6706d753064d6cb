"""How much a Sampling message may ask for: checked by the orchestrator before any work, and by the workers again, which
don't trust it. Without torch, so that the orchestrator can."""

from __future__ import annotations

import struct

from tandem.v1 import sampling_pb2

SAMPLING_VERSION = 3
"""The fields of Sampling that this release applies; see GetModelInfoResponse."""

MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_ADDITIVE_PENALTY = 2.0
"""Of presence and frequency, either sign."""
MAX_LOGIT_BIAS = 100.0
MAX_BIASES = 1024
MAX_BANNED = 1024
MAX_ALLOWED = 1024
MAX_BAD_WORDS = 384
"""Sequences after texts have become tokens: 256 of ids, and two for each of 64 texts."""
MAX_BAD_WORD_IDS = 1028
"""Of one sequence; 256 characters, and a space before them, may be four tokens each."""
MAX_END_TOKEN_IDS = 1024
MAX_TOP_LOGPROBS = 20


def in_range(value: float, low: float, high: float) -> bool:
    """Whether a float32 is finite and between bounds, which are rounded to float32 as the value was."""
    return _as_float32(low) <= value <= _as_float32(high)


def _as_float32(value: float) -> float:
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def check_counts(message: sampling_pb2.Sampling) -> None:
    """Raises ValueError, naming the field, where there is more than a request may hold."""
    for field, count, most in (
        ("end_token_ids", len(message.end_token_ids), MAX_END_TOKEN_IDS),
        ("bias_token_ids", len(message.bias_token_ids), MAX_BIASES),
        ("banned_token_ids", len(message.banned_token_ids), MAX_BANNED),
        ("allowed_token_ids", len(message.allowed_token_ids), MAX_ALLOWED),
        ("bad_words", len(message.bad_words), MAX_BAD_WORDS),
    ):
        if count > most:
            raise ValueError(f"{field}: {count}, at most {most} allowed")
    if any(not 1 <= len(word.ids) <= MAX_BAD_WORD_IDS for word in message.bad_words):
        raise ValueError(f"bad_words: a sequence must have 1 to {MAX_BAD_WORD_IDS} ids")


_COULD_LEAVE_NOTHING = ("min_length", "banned_token_ids", "allowed_token_ids", "bad_words")


def check_form_alone(message: sampling_pb2.Sampling) -> None:
    """Raises ValueError, naming the field, where structured_output stands beside what could take the tokens that it needs."""
    for field in _COULD_LEAVE_NOTHING:
        if getattr(message, field):
            raise ValueError(f"{field}: can't be combined with structured_output")


def leaves_a_token(message: sampling_pb2.Sampling, vocabulary_size: int) -> bool:
    """Whether some token of the vocabulary may have mass at every position, whatever comes before: else a row could be left
    without any, and that can't be decoded."""
    masked = set(message.banned_token_ids)
    masked.update(word.ids[-1] for word in message.bad_words)
    if message.min_length:
        masked.update(message.end_token_ids)
    if message.allowed_token_ids:
        return any(each < vocabulary_size and each not in masked for each in message.allowed_token_ids)
    return sum(each < vocabulary_size for each in masked) < vocabulary_size
