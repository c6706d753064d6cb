"""A call of the public API that came over HTTP: the responses are collected, or leave as events."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive

from tandem.v1 import orchestrator_pb2 as api

from .answers import Answer
from .inquiry import Inquiry
from .reply import Reply, encode
from .served_model import ServedModel


class HttpCall:
    """What both ways have in common; see orchestrator/call.py. HTTP has no deadline, only callers that leave."""

    may_return = False

    def __init__(self, headers: Headers, inquiry: Inquiry, model: ServedModel, reply: Reply) -> None:
        self._headers = headers
        self._reply = reply
        self._answer = Answer(inquiry, model.name(), model.token_text)

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """The headers."""
        return self._headers.items()

    def certificate_name(self) -> str:
        """Not known here. It decides who may resume a request, and over HTTP nobody can."""
        return ""

    def seconds_left(self) -> float | None:
        """None: there is no deadline."""
        return None


class WholeCall(HttpCall):
    """Keeps the responses until all are there."""

    def __init__(self, headers: Headers, inquiry: Inquiry, model: ServedModel, reply: Reply) -> None:
        super().__init__(headers, inquiry, model, reply)
        self._responses: list[api.GenerateResponse] = []

    async def write(self, response: api.GenerateResponse) -> None:
        """Keeps one."""
        self._responses.append(response)

    async def end(self) -> None:
        """Sends the answer. With the likeliest tokens of thousands of places, to make it takes a tenth of a second."""
        body = await asyncio.to_thread(lambda: encode(self._answer.whole(self._responses)))
        await self._reply.whole_body(200, body)


class StreamCall(HttpCall):
    """Sends each response on, as events."""

    def __init__(self, headers: Headers, inquiry: Inquiry, model: ServedModel, reply: Reply) -> None:
        super().__init__(headers, inquiry, model, reply)
        self._last = api.GenerateResponse()

    async def write(self, response: api.GenerateResponse) -> None:
        """Sends one; waits where the caller doesn't read."""
        self._last = response
        await self._reply.events(self._answer.chunks(response))

    async def end(self) -> None:
        """Ends the stream."""
        await self._reply.events(self._answer.last_chunks(self._last))
        await self._reply.end_events()


async def until_disconnect(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Runs `work`; cancels it when the caller leaves, and returns False then. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    working = True

    def left(watcher: asyncio.Task[None]) -> None:
        if working and not watcher.cancelled():
            task.cancel()

    watcher = asyncio.create_task(_disconnected(receive))
    watcher.add_done_callback(left)
    try:
        await work
    except asyncio.CancelledError:
        if watcher.done() and task.uncancel() == 0:
            return False
        raise
    finally:
        working = False  # a caller that left just now must not cancel what comes after
        watcher.cancel()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
