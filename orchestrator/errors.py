"""Why a request fails, as the caller sees it: a gRPC status with typed details, under 1 kB, never with the prompt."""

from __future__ import annotations

import traceback
from typing import Any, TypeAlias

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

DOMAIN = "tandem"
MAX_MESSAGE_BYTES = 300


class RequestFailed(Exception):
    """Ends a request with a status. `reason` is machine-readable; `retry_after` in seconds, where it makes sense."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, reason: str, retry_after: float | None = None) -> None:
        super().__init__(_cut(message))
        self.reason = reason
        self.retry_after = retry_after

    @property
    def for_log(self) -> str:
        """What may be written down of it."""
        return str(self)

    def details(self) -> list[Message]:
        """The google.rpc details of the status."""
        details: list[Message] = [error_details_pb2.ErrorInfo(reason=self.reason, domain=DOMAIN)]
        if self.retry_after is not None:
            delay = duration_pb2.Duration()
            delay.FromMilliseconds(int(self.retry_after * 1000))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        return details


class InvalidArgument(RequestFailed):
    """A field of the request is out of range; nothing was done."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str, *, quotes: bool = False) -> None:
        """`quotes`: whether the problem may repeat what the field holds, which is the caller's."""
        super().__init__(f"{field}: {problem}", "INVALID_ARGUMENT")
        self.field = field
        self.problem = _cut(problem)
        self._quotes = quotes

    @property
    def for_log(self) -> str:
        """Without what is the caller's."""
        return f"{self.field}: can't be used" if self._quotes else str(self)

    def details(self) -> list[Message]:
        """Adds the BadRequest that names the field."""
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.problem)
        return [*super().details(), error_details_pb2.BadRequest(field_violations=[violation])]


class AlreadyKnown(RequestFailed):
    """The request id is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Unauthenticated(RequestFailed):
    """The caller is nobody that is known."""

    code = grpc.StatusCode.UNAUTHENTICATED


class NotFound(RequestFailed):
    """There is no request to resume."""

    code = grpc.StatusCode.NOT_FOUND


class Overloaded(RequestFailed):
    """No room: try again later."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(RequestFailed):
    """Something the request needs is away."""

    code = grpc.StatusCode.UNAVAILABLE


class DeadEnd(RequestFailed):
    """The output's form allows no further token; asking again ends there again."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Finished(RequestFailed):
    """There is nothing left of the request to change."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(RequestFailed):
    """Another call has taken the request over."""

    code = grpc.StatusCode.ABORTED


def _cut(text: str) -> str:
    return text.encode()[:MAX_MESSAGE_BYTES].decode(errors="ignore")


async def tell(context: Context, failure: RequestFailed) -> None:
    """Ends the call with the failure's status and details: what follows it in the handler, the caller doesn't get. gRPC keeps what its
    `abort` raises, and with that the handler's frames and the request, in a circle that only the garbage collector would find."""
    details = []
    for message in failure.details():
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)
    status = status_pb2.Status(code=failure.code.value[0], message=str(failure), details=details)
    trailers = (("grpc-status-details-bin", status.SerializeToString()),)
    try:
        await context.abort(failure.code, str(failure), trailing_metadata=trailers)
    except grpc.aio.AbortError as ended:
        let_go(ended)  # gRPC raises it again by itself


def let_go(failure: BaseException) -> None:
    """Makes a failure that has come to its end forget the frames that it has come through, and what it came from. A frame that keeps it in
    a variable, or a group of failures that it is one of, would be kept by it in turn: with the request, which may have megabytes, and
    until the garbage collector comes, which may be after hundreds of them. Only for a failure that nobody else was given: before Python 3.13
    a coroutine that it has come through, and that waits for something again, would be ended."""
    left: list[BaseException | None] = [failure]
    known: dict[int, BaseException] = {}
    while left:
        error = left.pop()
        if error is None or id(error) in known:
            continue
        known[id(error)] = error
        left += [
            error.__cause__,
            error.__context__,
            *(error.exceptions if isinstance(error, BaseExceptionGroup) else ()),
        ]
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__cause__ = error.__context__ = None
