"""Failed calls as exceptions, by what a caller can do about them."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


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
    """Too many requests: try again after `retry_after_seconds`. Where that is None, the server was too busy to say,
    or one thing was too large, such as the message: the words tell which."""


class TakenOverError(TandemError):
    """The request was resumed by another call, which goes on with it."""


class UnauthenticatedError(TandemError):
    """The server doesn't know the token, or wants one."""


class NotFoundError(TandemError):
    """There is no request of this id to resume (any more)."""


class AlreadyExistsError(TandemError):
    """The id belongs to a request that is known already; `resume` goes on with it."""


class FinishedError(TandemError):
    """The request has come to its end: there is nothing left to change."""


class DeadEndError(TandemError):
    """The form of the output has become too complex to go on with; asking again ends there again."""


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
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: DeadEndError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    grpc.StatusCode.CANCELLED: CancelledCallError,
}

_BY_REASON: dict[str, type[TandemError]] = {"REQUEST_FINISHED": FinishedError}
"""Where one status stands for two."""


def to_tandem_error(error: grpc.RpcError) -> TandemError:
    """The typed form of a failed call, with what its google.rpc details say."""
    code = error.code()
    details = _Details.of(error)
    kind = _BY_REASON.get(details.reason) or _ERROR_CLASSES.get(code, TandemError)
    return kind(
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
