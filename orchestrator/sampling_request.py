"""The sampling fields of a GenerateRequest: each checked by name, defaults resolved, as the Sampling that the workers get."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Collection, Iterable, Sequence

from tandem import sampling_limits as limits
from tandem.structured_output import FormError
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import sampling_pb2

from .errors import InvalidArgument
from .vocabulary import Vocabulary

MIN_TEMPERATURE = 1e-3
"""Below it, and above 0, logits divided by it leave float32; greedy is what the caller wants then."""
MAX_BAD_WORD_TEXTS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_SEQUENCES = 256
MAX_BAD_WORD_SEQUENCE_IDS = 32
_NOT_WITH_A_FORM = (
    "ignore_eos", "min_tokens", "banned_token_ids", "allowed_token_ids", "bad_words", "bad_words_token_ids",
)  # fmt: skip
INLINE_CHARACTERS = 1024
"""Bad words are encoded twice; this much takes well under a millisecond, more goes to a thread."""


def check_sampling(request: api.GenerateRequest, vocabulary_size: int) -> None:
    """Everything that can be checked without the prompt; raises InvalidArgument."""
    _check_numbers(request)
    _check_biases(request, vocabulary_size)
    check_ids("banned_token_ids", request.banned_token_ids, limits.MAX_BANNED, vocabulary_size)
    check_ids("allowed_token_ids", request.allowed_token_ids, limits.MAX_ALLOWED, vocabulary_size)
    _check_bad_words(request, vocabulary_size)
    _check_logprobs(request)


def check_beside_form(request: api.GenerateRequest) -> None:
    """What could leave no token where the output has to be of a form; raises InvalidArgument."""
    for field in _NOT_WITH_A_FORM:
        if getattr(request, field):
            raise InvalidArgument(field, "can't be combined with structured_output")


async def check_form(request: api.GenerateRequest, vocabulary: Vocabulary, end_token_ids: Collection[int]) -> None:
    """What the output has to be, compiled as the workers will; raises InvalidArgument."""
    if not request.HasField("structured_output"):
        return
    check_beside_form(request)
    if not end_token_ids:
        raise InvalidArgument("structured_output", "the model has no end token to end it with")
    form = request.structured_output
    try:
        await vocabulary.check_form(form)
    except FormError as error:
        kind = form.WhichOneof("form")
        field = f"structured_output.{kind}" if kind else "structured_output"
        raise InvalidArgument(field, str(error), quotes=True) from error


async def resolve_sampling(
    request: api.GenerateRequest,
    vocabulary: Vocabulary,
    vocabulary_size: int,
    prompt_tokens: int,
    end_token_ids: frozenset[int],
    model_end_token_ids: frozenset[int],
) -> sampling_pb2.Sampling:
    """The Sampling of a checked request; raises InvalidArgument where no token would be left, or a text becomes too many ids."""
    with_form = request.HasField("structured_output")
    defaults = vocabulary.defaults
    temperature = request.temperature if request.HasField("temperature") else defaults.temperature
    biases = {token_id: bias for token_id, bias in sorted(request.logit_bias.items()) if bias}
    sampling = sampling_pb2.Sampling(
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=request.top_k if request.HasField("top_k") else defaults.top_k,
        top_p=request.top_p if request.HasField("top_p") else defaults.top_p,
        min_p=request.min_p if request.HasField("min_p") else defaults.min_p,
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        acceptance_method=request.acceptance_method or sampling_pb2.ACCEPTANCE_METHOD_REJECTION,
        min_length=prompt_tokens + request.min_tokens if request.min_tokens else 0,
        end_token_ids=sorted(model_end_token_ids if with_form else end_token_ids if request.min_tokens else ()),
        repetition_penalty=(
            request.repetition_penalty if request.HasField("repetition_penalty") else defaults.repetition_penalty
        ),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        prompt_length=prompt_tokens,
        bias_token_ids=biases.keys(),
        biases=biases.values(),
        banned_token_ids=sorted(set(request.banned_token_ids)),
        allowed_token_ids=sorted(set(request.allowed_token_ids)),
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        logprobs_mode=_logprobs_mode(request),
        structured_output=request.structured_output if with_form else None,
        bad_words=[*request.bad_words_token_ids, *await _encode_bad_words(request.bad_words, vocabulary)],
    )
    _check_counts(sampling)
    if not limits.leaves_a_token(sampling, vocabulary_size):
        field = "allowed_token_ids" if request.allowed_token_ids else "banned_token_ids"
        raise InvalidArgument(field, "with bad_words and min_tokens leaves no token that may always be generated")
    return sampling


def _check_counts(sampling: sampling_pb2.Sampling) -> None:
    """As the workers will: how many ids a text becomes is the tokenizer's doing."""
    try:
        limits.check_counts(sampling)
    except ValueError as error:
        field, _, problem = str(error).partition(": ")
        raise InvalidArgument(field, problem) from error


def check_ids(field: str, ids: Collection[int], most: int, vocabulary_size: int) -> None:
    """A bounded number of ids of the vocabulary; raises InvalidArgument."""
    if len(ids) > most:
        raise InvalidArgument(field, f"at most {most} ids")
    if any(token_id >= vocabulary_size for token_id in ids):
        raise InvalidArgument(field, f"ids must be below the vocabulary's {vocabulary_size}")


def _check_numbers(request: api.GenerateRequest) -> None:
    _check_range(request, "temperature", 0.0, limits.MAX_TEMPERATURE)
    _check_range(request, "top_p", 0.0, 1.0, low_allowed=False)
    _check_range(request, "min_p", 0.0, 1.0)
    _check_range(request, "repetition_penalty", limits.MIN_REPETITION_PENALTY, limits.MAX_REPETITION_PENALTY)
    _check_range(request, "presence_penalty", -limits.MAX_ADDITIVE_PENALTY, limits.MAX_ADDITIVE_PENALTY)
    _check_range(request, "frequency_penalty", -limits.MAX_ADDITIVE_PENALTY, limits.MAX_ADDITIVE_PENALTY)
    if request.acceptance_method not in sampling_pb2.AcceptanceMethod.values():
        raise InvalidArgument("acceptance_method", "must be REJECTION or COUPLED")


def _check_range(
    request: api.GenerateRequest, field: str, low: float, high: float, *, low_allowed: bool = True
) -> None:
    value: float = getattr(request, field)
    if request.DESCRIPTOR.fields_by_name[field].has_presence and not request.HasField(field):  # type: ignore[arg-type]
        return
    if not (limits.in_range(value, low, high) and (low_allowed or value > low)):
        raise InvalidArgument(field, f"must be {'in [' if low_allowed else 'in ('}{low:g}, {high:g}]")


def _check_biases(request: api.GenerateRequest, vocabulary_size: int) -> None:
    check_ids("logit_bias", request.logit_bias, limits.MAX_BIASES, vocabulary_size)
    most = limits.MAX_LOGIT_BIAS
    if any(not (math.isfinite(bias) and abs(bias) <= most) for bias in request.logit_bias.values()):
        raise InvalidArgument("logit_bias", f"values must be in [{-most:g}, {most:g}]")


def _check_bad_words(request: api.GenerateRequest, vocabulary_size: int) -> None:
    if len(request.bad_words) > MAX_BAD_WORD_TEXTS:
        raise InvalidArgument("bad_words", f"at most {MAX_BAD_WORD_TEXTS} texts")
    if any(not text.strip() or len(text) > MAX_BAD_WORD_CHARACTERS for text in request.bad_words):
        raise InvalidArgument(
            "bad_words", f"texts must have 1 to {MAX_BAD_WORD_CHARACTERS} characters, not only blanks"
        )
    if len(request.bad_words_token_ids) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidArgument("bad_words_token_ids", f"at most {MAX_BAD_WORD_SEQUENCES} sequences")
    for word in request.bad_words_token_ids:
        if not word.ids:
            raise InvalidArgument("bad_words_token_ids", "a sequence is empty")
        check_ids("bad_words_token_ids.ids", word.ids, MAX_BAD_WORD_SEQUENCE_IDS, vocabulary_size)


def _check_logprobs(request: api.GenerateRequest) -> None:
    if request.top_logprobs > limits.MAX_TOP_LOGPROBS:
        raise InvalidArgument("top_logprobs", f"must be 0 to {limits.MAX_TOP_LOGPROBS}")
    if request.top_logprobs and not request.logprobs:
        raise InvalidArgument("top_logprobs", "needs logprobs")
    if request.logprobs_mode not in sampling_pb2.LogprobsMode.values():
        raise InvalidArgument("logprobs_mode", "must be RAW or PROCESSED")


def _logprobs_mode(request: api.GenerateRequest) -> sampling_pb2.LogprobsMode.ValueType:
    if not request.logprobs:
        return sampling_pb2.LOGPROBS_MODE_UNSPECIFIED
    return request.logprobs_mode or sampling_pb2.LOGPROBS_MODE_RAW


async def _encode_bad_words(texts: Sequence[str], vocabulary: Vocabulary) -> Iterable[sampling_pb2.TokenSequence]:
    def encode() -> list[list[int]]:
        return [ids for text in texts for ids in vocabulary.encode_bad_word(text) if ids]

    inline = sum(map(len, texts)) <= INLINE_CHARACTERS
    sequences = encode() if inline else await asyncio.to_thread(encode)
    return [sampling_pb2.TokenSequence(ids=ids) for ids in sequences]
