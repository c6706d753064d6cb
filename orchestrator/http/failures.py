"""Why a request fails, as an HTTP caller sees it: a status and OpenAI's error object, under 1 kB, never with the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc

from ..errors import InvalidArgument, RequestFailed

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ALREADY_EXISTS: 409,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.FAILED_PRECONDITION: 422,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class HttpFailure(Exception):
    """Ends an exchange with a status. `param` is the field at fault, `code` a word for programs."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def headers(self) -> dict[str, str]:
        """How to be known, or when to come back: in the whole seconds of the standard and in OpenAI's milliseconds."""
        if self.status == 401:
            return {"www-authenticate": "Bearer"}
        if self.retry_after is None:
            return {}
        milliseconds = math.ceil(self.retry_after * 1000)
        return {"retry-after": str(max(1, math.ceil(self.retry_after))), "retry-after-ms": str(milliseconds)}

    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def http_failure(failure: RequestFailed, name_for_caller: Callable[[str], str] = str) -> HttpFailure:
    """The same failure over HTTP; fields under the names that the caller knows."""
    status = _STATUSES.get(failure.code, 500)
    if isinstance(failure, InvalidArgument):
        param = name_for_caller(failure.field)
        return HttpFailure(status, f"{param}: {failure.problem}", "invalid_value", param)
    return HttpFailure(status, str(failure), failure.reason.lower(), retry_after=failure.retry_after)


def internal_failure() -> HttpFailure:
    """A fault of our own; the log has it."""
    return HttpFailure(500, "the server has failed", "internal_error")
