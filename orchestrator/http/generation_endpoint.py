"""POST of a completion or a chat: read, checked, generated, answered."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from functools import partial

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ..callers import Callers
from ..errors import RequestFailed, let_go
from ..generation import Generations
from ..recorder import Recorders
from .body import BodyRoom, read_body
from .failures import HttpFailure, http_failure
from .http_call import StreamCall, WholeCall, until_disconnect
from .inquiry import Inquiry, Kind, read_inquiry
from .reply import REQUEST_ID, Reply
from .served_model import ServedModel

LAST_WORD_SECONDS = 1.0
"""For the error at the end of a stream that its caller may have stopped reading."""

_OPERATIONS = {"chat": "chat", "completion": "text_completion"}
_CALLERS_ID = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class GenerationEndpoint:
    """An ASGI application for one kind of request."""

    def __init__(
        self,
        kind: Kind,
        generations: Generations,
        recorders: Recorders,
        callers: Callers,
        model: ServedModel,
        room: BodyRoom,
    ) -> None:
        self._kind = kind
        self._generations = generations
        self._recorders = recorders
        self._callers = callers
        self._model = model
        self._room = room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        request = Request(scope, receive)
        reply = Reply(send, _request_id(request))
        try:
            inquiry = await self._read(request, reply.request_id)
            await self._answer(request, inquiry, reply)
        except HttpFailure as failure:
            let_go(failure)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    await reply.fail(failure)

    async def _read(self, request: Request, request_id: str) -> Inquiry:
        status = "INVALID_ARGUMENT"
        try:
            # Nothing is read for a caller who isn't known.
            with self._callers.admit(request.headers.items()):
                inquiry = await read_body(request, partial(self._checked, request_id=request_id), self._room)
            self._model.check(inquiry.model)
        except RequestFailed as failure:
            status, found = failure.code.name, http_failure(failure)
        except HttpFailure as failure:
            status, found = "NOT_FOUND" if failure.status == 404 else status, failure
        else:
            return inquiry
        # It never becomes a request of the orchestrator, but is counted and logged as one.
        recorder = self._recorders.begin(request_id, request.headers.items(), _OPERATIONS[self._kind])
        recorder.end(status, found.message, None)
        raise found

    def _checked(self, values: dict[str, object], *, request_id: str) -> Inquiry:
        return read_inquiry(self._kind, values, request_id)

    async def _answer(self, request: Request, inquiry: Inquiry, reply: Reply) -> None:
        make = StreamCall if inquiry.stream else WholeCall
        call = make(request.headers, inquiry, self._model, reply)
        try:
            stayed = await until_disconnect(self._generations.run(inquiry.request, call), request.receive)
        except RequestFailed as failure:
            raise http_failure(failure, inquiry.name_for_caller) from None
        except asyncio.CancelledError:
            raise HttpFailure(503, "the server is shutting down", "shutting_down") from None
        if stayed:
            await call.end()


def _request_id(request: Request) -> str:
    """Begins with the caller's id, if it sent one that can be a name: proxies give the same to each of their tries."""
    own = uuid.uuid4().hex
    sent = request.headers.get(REQUEST_ID, "")
    return f"{sent}-{own[:8]}" if _CALLERS_ID.fullmatch(sent) else own
