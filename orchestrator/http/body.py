"""A request's body: of a bounded size, in JSON, an object."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from ..admission import RETRY_AFTER_SECONDS
from ..errors import Overloaded
from .failures import HttpFailure

MAX_BODY_BYTES = 8 << 20
"""As much as a gRPC request may have."""
MAX_BYTES_BEING_READ = 256 << 20
"""Of all bodies together, before anything is known of what they ask for."""
BODY_SECONDS = 60.0
INLINE_BODY_BYTES = 16 << 10
"""Reading this much takes well under a millisecond; more goes to a thread."""

ReadT = TypeVar("ReadT")


class BodyRoom:
    """Memory for the bodies that are being read."""

    def __init__(self, most: int = MAX_BYTES_BEING_READ) -> None:
        self._left = most

    @contextmanager
    def held(self) -> Iterator[Callable[[int], None]]:
        """What it gives takes so many more bytes for one body, until its end; raises Overloaded where there are none left."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            if count > self._left:
                raise Overloaded("too many bodies are being read", "QUEUE_FULL", RETRY_AFTER_SECONDS)
            self._left -= count
            taken += count

        try:
            yield take
        finally:
            self._left += taken


async def read_body(request: Request, read: Callable[[dict[str, Any]], ReadT], room: BodyRoom) -> ReadT:
    """What `read` makes of the body, off the event loop where it is long. Raises HttpFailure, Overloaded where there is no room
    for it, and what `read` raises."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        # So that no web page of another origin can send requests with its visitor's browser.
        raise HttpFailure(415, "the content type must be application/json", "unsupported_media_type")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpFailure(415, "a compressed body is not supported", "unsupported_media_type")
    with room.held() as take:
        body = await _bytes(request, take)
        if len(body) <= INLINE_BODY_BYTES:
            return read(_object(body))
        return await asyncio.to_thread(lambda: read(_object(body)))


async def _bytes(request: Request, take: Callable[[int], None]) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                if len(body) + len(part) > MAX_BODY_BYTES:
                    raise _too_large()
                if len(body) + len(part) > INLINE_BODY_BYTES:  # ordinary ones need no room, and get in whoever holds it
                    take(len(part))
                body += part
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
