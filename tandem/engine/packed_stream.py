"""The server side of a packed bidirectional stream: batches of items in, whatever is ready out, in one message.

Memory is bounded: the stream is not read while more than a limit of its items are unanswered or their answers unread,
so that an orchestrator that sends without reading meets gRPC's own flow control.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tandem.engine.job import WorkItem
from tandem.engine.stream import Answer, Stream

if TYPE_CHECKING:
    from tandem.engine.item_spans import ItemSpans

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of one stream."""

    items_per_batch: int = 512
    """A larger message ends the stream: its sender is at fault."""
    items_in_flight: int = 1024
    """Items that are unanswered, or whose answer was not yet taken, before reading pauses."""
    large_message_bytes: int = 1 << 20
    """After a larger message, reading waits until its items are admitted."""
    answers_per_message: int = 64
    """Keeps messages far below the size limit, whatever the supports."""


class Batch(Protocol):
    """What ProposeBatch and VerifyBatch have in common."""

    @property
    def items(self) -> Sequence[Any]: ...
    @property
    def release_request_ids(self) -> Sequence[str]: ...
    def ByteSize(self) -> int: ...  # noqa: N802 - protobuf's name


class StreamEngine(Protocol):
    """The part of the engine that a stream needs."""

    def submit(self, stream: Stream, items: Sequence[WorkItem]) -> None: ...
    def release(self, stream: Stream, request_ids: Sequence[str]) -> None: ...
    def close(self, stream: Stream) -> None: ...
    async def admitted(self) -> None: ...


class PackedStream:
    """One call: reads batches into the engine, writes answers out, and closes the sessions at the end of either."""

    def __init__(
        self,
        engine: StreamEngine,
        limits: StreamLimits,
        pack: Callable[[Sequence[Answer]], Any],
        spans: ItemSpans | None = None,
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._pack = pack
        self._spans = spans
        self._stream = Stream(self._deliver)
        self._answers: list[Answer] = []
        self._in_flight = 0
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._end: tuple[grpc.StatusCode, str] | None = None

    async def serve(self, batches: AsyncIterator[Batch], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Returns when the client has sent all and received all; whatever happens, the sessions end."""
        reader = asyncio.create_task(self._read(batches))
        try:
            while await self._ready():
                taken = self._answers[: self._limits.answers_per_message]
                del self._answers[: len(taken)]
                await self._write(context, taken)
                self._in_flight -= len(taken)
                self._has_room.set()
            assert self._end is not None
            code, message = self._end
            if code is not grpc.StatusCode.OK:
                await context.abort(code, message)
        finally:
            reader.cancel()
            self._engine.close(self._stream)
            if self._spans is not None:
                self._spans.close()

    def end(self, code: grpc.StatusCode, message: str) -> None:
        """Ends the stream, whatever is in flight; the sessions go with it."""
        if self._end is None or self._end[0] is grpc.StatusCode.OK:
            self._end = (code, message)
        self._changed.set()

    async def _write(self, context: grpc.aio.ServicerContext[Any, Any], answers: Sequence[Answer]) -> None:
        try:
            await context.write(self._pack(answers))
        except grpc.aio.InternalError as broken:
            # The orchestrator is gone. gRPC ends a write under way before it cancels the call's task.
            raise asyncio.CancelledError from broken

    async def _read(self, batches: AsyncIterator[Batch]) -> None:
        """Reads to the end of the stream. Whatever ends the reading ends the stream: a client would wait for ever."""
        try:
            await self._read_batches(batches)
        except grpc.aio.UsageError:
            # The call is over; `serve` is being cancelled.
            self.end(grpc.StatusCode.CANCELLED, "the call ended")
        except DecodeError:
            self.end(grpc.StatusCode.INVALID_ARGUMENT, "a message that is no batch")
        except Exception:
            logger.exception("reading a stream failed")
            self.end(grpc.StatusCode.INTERNAL, "a fault inside the worker; its log has the details")

    async def _read_batches(self, batches: AsyncIterator[Batch]) -> None:
        async for batch in batches:
            if batch.release_request_ids:
                self._engine.release(self._stream, batch.release_request_ids)
            if not batch.items:
                continue
            if len(batch.items) > self._limits.items_per_batch:
                problem = f"items: {len(batch.items)} in one batch, at most {self._limits.items_per_batch} allowed"
                self.end(grpc.StatusCode.INVALID_ARGUMENT, problem)
                return
            self._in_flight += len(batch.items)
            if self._spans is not None:
                self._spans.received(batch.items)
            self._engine.submit(self._stream, batch.items)
            if batch.ByteSize() > self._limits.large_message_bytes:
                await self._engine.admitted()
            while self._in_flight > self._limits.items_in_flight:
                self._has_room.clear()
                await self._has_room.wait()
        self.end(grpc.StatusCode.OK, "")

    def _deliver(self, answers: Sequence[Answer]) -> None:
        final = [answer for answer in answers if answer.result is not None or answer.error is not None]
        self._in_flight -= len(answers) - len(final)  # a retry took the place of the others, and has the answer
        self._answers += final
        if self._spans is not None:
            self._spans.answered(final)
        self._changed.set()

    async def _ready(self) -> bool:
        """Waits for answers; False at the end of the stream."""
        while not self._answers:
            if self._end is not None and (self._end[0] is not grpc.StatusCode.OK or self._in_flight <= 0):
                return False
            self._changed.clear()
            await self._changed.wait()
        return self._end is None or self._end[0] is grpc.StatusCode.OK
