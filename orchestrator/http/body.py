"""A request's body: of a bounded size, in JSON, an object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from .failures import HttpFailure

MAX_BODY_BYTES = 8 << 20
"""As much as a gRPC request may have."""
BODY_SECONDS = 60.0
INLINE_BODY_BYTES = 16 << 10
"""Reading this much takes well under a millisecond; more goes to a thread."""

ReadT = TypeVar("ReadT")


async def read_body(request: Request, read: Callable[[dict[str, Any]], ReadT]) -> ReadT:
    """What `read` makes of the body, off the event loop where it is long. Raises HttpFailure, and what `read` raises."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # So that no web page of another origin can send requests with its visitor's browser.
        raise HttpFailure(415, "the content type must be application/json", "unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpFailure(415, "a compressed body is not supported", "unsupported_media_type")
    body = await _bytes(request)
    if len(body) <= INLINE_BODY_BYTES:
        return read(_object(body))
    return await asyncio.to_thread(lambda: read(_object(body)))


async def _bytes(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except ClientDisconnect:
        raise HttpFailure(400, "the body ended too early", "incomplete_body") from None
    except TimeoutError:
        raise HttpFailure(408, f"the body did not come within {BODY_SECONDS:g} s", "request_timeout") from None
    return bytes(body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        # The parser's own words may quote the body.
        raise HttpFailure(400, "the body is not JSON", "invalid_json") from None
    if not isinstance(value, dict):
        raise HttpFailure(400, "the body must be a JSON object", "invalid_json")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity, which JSON doesn't have


def _too_large() -> HttpFailure:
    return HttpFailure(413, f"the body has more than {MAX_BODY_BYTES} bytes", "body_too_large")
