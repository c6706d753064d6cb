"""A synchronous client of the public API: plain dataclasses in, plain dataclasses out, typed errors.

It hides the generated stubs and nothing else: every default stays the server's, so that an option left unset here means
what the contract says it means.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.transport_security import ClientFiles
from tandem.v1 import orchestrator_pb2, orchestrator_pb2_grpc, sampling_pb2


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
    logprobs: bool = False
    top_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    cache_salt: str | None = None


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
    rebuilds: int
    time_to_first_token_seconds: float
    total_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class GenerationFinish:
    """The end of a generation."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """One response of the stream: the tokens of a round, or the end. `text` may lag behind the tokens."""

    start: GenerationStart | None
    tokens: tuple[GeneratedToken, ...]
    text: str
    finish: GenerationFinish | None
    index: int = 0
    """Which of several completions this belongs to."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field that the server refused, and why."""

    field: str
    description: str


class TandemError(Exception):
    """A call failed; `code` is the gRPC status, `violations` the fields at fault."""

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        violations: tuple[FieldViolation, ...] = (),
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.violations = violations
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(TandemError):
    """A field is out of range. Nothing was done; sending it again fails again."""


class UnavailableError(TandemError):
    """The service, its target or its store can't be reached. What was received stays valid."""


class OverloadedError(TandemError):
    """Too many requests; try again after `retry_after_seconds`."""


class TakenOverError(TandemError):
    """The request was resumed by another call, which goes on with it."""


class UnauthenticatedError(TandemError):
    """The server doesn't know the token, or wants one."""


class NotFoundError(TandemError):
    """There is no request of this id to resume (any more)."""


class DeadlineError(TandemError):
    """The caller's own time limit ran out."""


class CancelledCallError(TandemError):
    """The call was cancelled, by this client or on the way."""


class ProtocolError(TandemError):
    """The stream broke the contract, for example by ending with OK before it was finished."""


_ERROR_CLASSES: dict[grpc.StatusCode, type[TandemError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.ABORTED: TakenOverError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledCallError,
}


class _Call(Protocol):
    """The part of a gRPC call that is used here."""

    def __next__(self) -> orchestrator_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Generation(Iterator[Chunk]):
    """A running generation: iterate over its chunks, or cancel it."""

    def __init__(self, call: _Call, completions: int = 1) -> None:
        self._call = call
        self._unfinished = completions

    def __next__(self) -> Chunk:
        try:
            chunk = _to_chunk(next(self._call))
        except StopIteration:
            if self._unfinished > 0:
                raise ProtocolError(grpc.StatusCode.INTERNAL, "the stream ended before the generation did") from None
            raise
        except grpc.RpcError as error:
            raise _to_tandem_error(error) from error
        self._unfinished -= chunk.finish is not None
        return chunk

    def cancel(self) -> None:
        """Ends the call; the server drops the request. Harmless when it is over."""
        self._call.cancel()


class TandemClient:
    """One connection to an orchestrator; safe to share between threads."""

    def __init__(self, address: str, *, token: str = "", tls: ClientFiles = ClientFiles()) -> None:  # noqa: B008 - frozen
        """`token` names the caller, where the orchestrator asks for one; `tls` has a CA where it speaks TLS."""
        self.address = address
        # Local addresses must not go through a proxy that the environment may name.
        options = [("grpc.enable_http_proxy", 0)]
        credentials = tls.credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Generation:
        """Starts a generation. Errors are raised by the iteration, as TandemError."""
        request = build_request(prompt, options or GenerationOptions(), request_id)
        return Generation(self._stub.Generate(request, timeout=timeout, metadata=self._metadata), max(request.n, 1))

    def resume(self, request_id: str, token_offset: int, *, timeout: float | None = None) -> Generation:
        """Goes on with a request, on any orchestrator, behind the tokens that the caller has. Errors are raised by the
        iteration: NotFoundError, and InvalidRequestError where fewer tokens are committed, among them."""
        request = orchestrator_pb2.GenerateRequest(request_id=request_id, token_offset=token_offset)
        return Generation(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_OPTIONAL_FLAGS = frozenset({"adaptive_speculative_tokens"})
"""Where false is not the same as unset."""
_CONVERTED = frozenset({"method", "bad_words_token_ids", "logprobs_mode"})


def build_request(prompt: Prompt, options: GenerationOptions, request_id: str) -> orchestrator_pb2.GenerateRequest:
    """The wire form of a request; raises ValueError where a value doesn't fit its field at all."""
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


def _set_prompt(request: orchestrator_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    messages = [part for part in prompt if isinstance(part, Message)]
    if messages:
        request.messages.messages.extend(
            orchestrator_pb2.ChatMessage(role=message.role, content=message.content) for message in messages
        )
    else:
        request.token_ids.ids.extend(part for part in prompt if isinstance(part, int))


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


def _to_chunk(response: orchestrator_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        start=_to_start(response.start) if response.HasField("start") else None,
        tokens=tuple(_to_token(token) for token in response.tokens),
        text=response.text,
        finish=_to_finish(response.finish) if response.HasField("finish") else None,
        index=response.index,
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
    )


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
        rebuilds=stats.rebuilds,
        time_to_first_token_seconds=stats.time_to_first_token_seconds,
        total_seconds=stats.total_seconds,
    )


def _to_tandem_error(error: grpc.RpcError) -> TandemError:
    """The typed form of a failed call, with what its google.rpc details say."""
    code = error.code()
    details = _Details.of(error)
    return _ERROR_CLASSES.get(code, TandemError)(
        code,
        error.details() or "no message",
        reason=details.reason,
        violations=details.violations,
        retry_after_seconds=details.retry_after_seconds,
    )


@dataclasses.dataclass(slots=True)
class _Details:
    reason: str = ""
    violations: tuple[FieldViolation, ...] = ()
    retry_after_seconds: float | None = None

    @classmethod
    def of(cls, call: Any) -> _Details:  # the error of a call is the call; the type stubs don't say so
        found = cls()
        try:
            status = rpc_status.from_call(call)
        except ValueError:  # details that contradict the status, from something in between
            return found
        bad_request, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        for detail in status.details if status is not None else ():
            if detail.Unpack(bad_request):
                found.violations = tuple(
                    FieldViolation(violation.field, violation.description) for violation in bad_request.field_violations
                )
            elif detail.Unpack(info):
                found.reason = info.reason
            elif detail.Unpack(retry):
                found.retry_after_seconds = retry.retry_delay.ToTimedelta().total_seconds()
        return found
