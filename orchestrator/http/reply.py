"""The response of one exchange, as ASGI sends it: one JSON object, or a stream of events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Send

from .failures import HttpFailure

REQUEST_ID = "x-request-id"
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Reply:
    """Nothing is sent until it is known whether the answer is one."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self._started = False

    async def whole(self, status: int, value: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Sends one object, and ends."""
        await self.whole_body(status, encode(value), headers)

    async def whole_body(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Sends one object that is encoded already, and ends."""
        head = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        await self._start(status, head)
        await self._body(body, more=False)

    async def events(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Sends events of a stream, which begins with the first of them."""
        data = b"".join(b"data: " + encode(value) + b"\n\n" for value in values)
        if not self._started:
            await self._start(200, _EVENTS)
        if data:
            await self._body(data, more=True)

    async def end_events(self) -> None:
        """The end of a stream in OpenAI's form."""
        await self._body(b"data: [DONE]\n\n", more=False)

    async def fail(self, failure: HttpFailure) -> None:
        """Sends the error as the answer, or as the last event of a stream that has begun."""
        if not self._started:
            await self.whole(failure.status, failure.body(), failure.headers())
            return
        await self._body(b"data: " + encode(failure.body()) + b"\n\n", more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        head = {**headers, REQUEST_ID: self.request_id}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in head.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def encode(value: Mapping[str, Any]) -> bytes:
    """JSON on one line, in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
