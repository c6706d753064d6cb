"""One long-lived, packed, bidirectional stream to one replica of a worker service.

All items that become ready in one turn of the event loop leave in one message, with those of the turns after it as long as more come in
each: a round of 64 requests costs 0.7 ms this way and 12-18 ms with unary calls. The stream reconnects by itself; what was in flight when it broke fails with
StreamLost, and `generation` tells sessions that the replica has forgotten them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.transport_security import ClientFiles
from tandem.v1 import worker_pb2

from .bench import Bench

log = logging.getLogger(__name__)

MAX_ITEMS_PER_BATCH = 256
MAX_BATCH_BYTES = 8 << 20
"""Of one message, but for an item that is larger by itself: prefixes of long prompts that are all read anew would come to more than
gRPC sends, and as often as they are tried."""
MAX_MESSAGE_BYTES = 64 << 20
MAX_ERROR_CHARACTERS = 300
DESCRIBE_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Workers are this deployment's own; a proxy that the environment names is for the world outside, such as a model's host.
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A peer that vanishes without a word (a lost node, a cut network) is noticed by an unanswered ping, within two
    # seconds: its sessions are rebuilt elsewhere, and a caller waits no longer than that. A ping a second is the most that
    # gRPC sends. It is the ping's own timeout that counts: grpc.keepalive_timeout_ms alone leaves it at a minute.
    ("grpc.keepalive_time_ms", 900),
    ("grpc.keepalive_timeout_ms", 900),
    ("grpc.http2.ping_timeout_ms", 900),
    ("grpc.http2.max_pings_without_data", 0),
]


PLAIN_TEXT = ClientFiles()


class StreamLost(Exception):
    """The stream to the replica broke, or isn't up: the item may or may not have been worked on."""


class AnswerLate(TimeoutError):
    """The item's time is up. Its answer may still come."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        super().__init__("no answer in time")
        self.answer = answer
        """What it will be in; may be dropped."""


class ItemFailed(Exception):
    """The worker answered the item with an error."""

    def __init__(self, error: worker_pb2.ItemError) -> None:
        self.error = error
        super().__init__(f"{self.reason_name}: {error.message[:MAX_ERROR_CHARACTERS]}")

    @property
    def reason(self) -> worker_pb2.ErrorReason.ValueType:
        """The typed reason."""
        return self.error.reason

    @property
    def reason_name(self) -> str:
        """One word for it, out of a bounded set: a newer worker may have reasons that are unknown here."""
        if self.reason not in worker_pb2.ErrorReason.values():
            return "ERROR_REASON_UNKNOWN"
        return worker_pb2.ErrorReason.Name(self.reason)


class IncompatibleWorker(Exception):
    """The worker's model can't be used with this orchestrator's; the message says why."""


class Item(Protocol):
    """What both kinds of items have."""

    request_id: str
    cache_epoch: int

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Of the message that it is."""


ItemT = TypeVar("ItemT", bound=Item)
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class WorkerKind(Generic[ItemT, AnswerT]):
    """How a draft differs from a target, as far as the stream is concerned."""

    role: str
    stub: Callable[[grpc.aio.Channel], Any]
    open_stream: Callable[[Any], Any]
    pack: Callable[[list[ItemT], list[str]], Any]
    """Builds a batch from items and from request ids to release."""
    reader: Callable[[], Callable[[Any, Any], AnswerT | None]]
    """Makes what reads the items of one message: of an item, and of what was submitted with the one that it answers, the answer; None
    where it holds an error."""


@dataclass(slots=True)
class _Pending(Generic[AnswerT]):
    """An item that is not answered."""

    answer: asyncio.Future[AnswerT]
    deadline: float
    """On the loop's clock; infinite once it has passed."""
    about: Any


class Replica(Generic[ItemT, AnswerT]):
    """One replica: its connection, its description, and the items in flight."""

    def __init__(
        self,
        address: str,
        kind: WorkerKind[ItemT, AnswerT],
        check: Callable[[worker_pb2.GetModelInfoResponse], None],
        on_change: Callable[[], None],
        security: ClientFiles = PLAIN_TEXT,
        server_name: str = "",
    ) -> None:
        """`server_name` is what the replica's certificate is for, where that is not the host of `address`."""
        self.address = address
        self._server_name = server_name
        self._security = security
        self.role = kind.role
        self.generation = 0
        self.sessions = 0
        self.retired = False
        """No address leads to it any more: it takes no new session."""
        self.draining = False
        """It has said that it is shutting down."""
        self.info: worker_pb2.GetModelInfoResponse | None = None
        self.refusal = ""
        self.bench = Bench(f"{kind.role} {address}")
        self._kind = kind
        self._check = check
        self._on_change = on_change
        self._ready = False
        self._lost_at = -math.inf
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._outbox: list[ItemT] = []
        self._meanwhile: list[Callable[[], None]] = []
        """What is to be done while the replica is at work on them."""
        self._releases: list[str] = []
        self._pending: dict[tuple[str, int], _Pending[AnswerT]] = {}
        """In the order in which they were sent, which is that of their deadlines: all have the same time."""
        self._deadline_timer: asyncio.TimerHandle | None = None
        """One for all items, since one for each would cost more than the items."""
        self._task = asyncio.create_task(self._stay_connected(), name=f"{kind.role} {address}")

    @property
    def ready(self) -> bool:
        """Whether the stream is up and the model is compatible."""
        return self._ready

    @property
    def away_seconds(self) -> float:
        """How long it has not been ready; 0 while it is, and infinite before it was for the first time."""
        return 0.0 if self._ready else time.monotonic() - self._lost_at

    @property
    def leaving(self) -> bool:
        """Whether it is on its way out, and its sessions should be."""
        return self.retired or self.draining

    @property
    def pending_items(self) -> int:
        """Items that are not answered."""
        return len(self._pending)

    @property
    def slots(self) -> int:
        """Sessions that its cache has room for."""
        return self.info.slots if self.info is not None else 0

    def submit(
        self,
        item: ItemT,
        seconds: float = math.inf,
        about: Any = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> asyncio.Future[AnswerT]:
        """Sends an item with this turn's batch. The future fails with ItemFailed, StreamLost or, after `seconds`, the same for
        all items, with AnswerLate. `about` is for who reads the answer. `meanwhile` is called once the batch is on its way, if it
        gets that far."""
        if not self._ready:
            raise StreamLost(f"{self.role} {self.address} is not connected")
        key = (item.request_id, item.cache_epoch)
        self._give_up(key, "a later item took its place")
        loop = self._loop
        future: asyncio.Future[AnswerT] = loop.create_future()
        deadline = loop.time() + seconds
        self._pending[key] = _Pending(future, deadline, about)
        if self._deadline_timer is None and seconds < math.inf:
            self._deadline_timer = loop.call_at(deadline, self._end_waits)
        self._outbox.append(item)
        if meanwhile is not None:
            self._meanwhile.append(meanwhile)
        self._wake.set()
        return future

    def release(self, request_id: str, generation: int) -> None:
        """Tells the replica to forget a session that it opened in stream `generation`; never waits."""
        if self._ready and generation == self.generation:
            self._withdraw(request_id)
            self._releases.append(request_id)
            self._wake.set()

    def _withdraw(self, request_id: str) -> None:
        """Takes back what is not sent yet, and awaits no answer to what is. The releases of a message go before its items: an
        item of the same request would open the session anew, for nobody, and hold its cache slot for as long as the stream lasts."""
        for key in [key for key in self._pending if key[0] == request_id]:
            self._give_up(key, "its request was released")
        self._outbox = [item for item in self._outbox if item.request_id != request_id]

    def _give_up(self, key: tuple[str, int], why: str) -> None:
        """No answer is awaited for this any more. Not a cancellation: whoever still waits, a second request of the same
        id for example, was not cancelled."""
        pending = self._pending.pop(key, None)
        if pending is not None and not pending.answer.done():
            _fail(pending.answer, StreamLost(why))

    def _end_waits(self) -> None:
        """Fails what has waited for too long, and sets the timer for the next one."""
        loop = self._loop
        now, self._deadline_timer = loop.time(), None
        for pending in self._pending.values():
            if pending.deadline == math.inf:
                continue
            if pending.deadline > now:
                self._deadline_timer = loop.call_at(pending.deadline, self._end_waits)
                return
            waited, pending.answer, pending.deadline = pending.answer, loop.create_future(), math.inf
            if not waited.done():
                _fail(waited, AnswerLate(pending.answer))

    async def close(self) -> None:
        """Ends the stream."""
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _stay_connected(self) -> None:
        backoff, fault = FIRST_BACKOFF_SECONDS, ""
        while True:
            try:
                async with self._open_channel() as channel:
                    stub = self._kind.stub(channel)
                    await self._describe(stub)
                    backoff = FIRST_BACKOFF_SECONDS
                    async with self._health_watched(channel):
                        await self._exchange(self._kind.open_stream(stub))
                fault = ""
            except grpc.aio.AioRpcError as error:
                log.debug("%s %s: %s %s", self.role, self.address, error.code().name, error.details())
                self._set_refusal("")  # of what is away nothing is known
                fault = ""
            except IncompatibleWorker as error:
                self.info = None
                self._set_refusal(str(error))
                backoff, fault = MAX_BACKOFF_SECONDS, ""
            except Exception as error:
                if fault != repr(error):  # a file that isn't there would fill the log
                    fault = repr(error)
                    log.exception("%s %s: the stream failed", self.role, self.address)
            finally:
                self._disconnected()
            await asyncio.sleep(backoff * random.uniform(0.8, 1.2))  # noqa: S311 - spreads reconnections, guards nothing
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    def _set_refusal(self, refusal: str) -> None:
        if self.refusal == refusal:
            return
        self.refusal = refusal
        if refusal:
            log.error("%s %s is refused: %s", self.role, self.address, refusal)
        self._on_change()

    def _open_channel(self) -> grpc.aio.Channel:
        credentials = self._security.credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        named = [("grpc.ssl_target_name_override", self._server_name)] if self._server_name else []
        return grpc.aio.secure_channel(self.address, credentials, options=[*CHANNEL_OPTIONS, *named])

    async def _describe(self, stub: Any) -> None:
        info = await stub.GetModelInfo(worker_pb2.GetModelInfoRequest(), timeout=DESCRIBE_SECONDS, wait_for_ready=True)
        await asyncio.to_thread(self._check, info)
        self.info = info
        self.refusal = ""

    @contextlib.asynccontextmanager
    async def _health_watched(self, channel: grpc.aio.Channel) -> AsyncIterator[None]:
        watch = asyncio.create_task(self._watch_health(channel))
        try:
            yield
        finally:
            watch.cancel()
            self.draining = False

    async def _watch_health(self, channel: grpc.aio.Channel) -> None:
        """A worker that is told to stop says NOT_SERVING first. One without a health service is taken to be well."""
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest())
        try:
            async for answer in call:
                draining = answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
                if draining != self.draining:
                    self.draining = draining
                    log.info("%s %s %s", self.role, self.address, "is draining" if draining else "serves again")
                    self._on_change()
        except grpc.aio.AioRpcError as error:
            log.debug("%s %s: no health: %s", self.role, self.address, error.code().name)
        finally:
            call.cancel()

    async def _exchange(self, call: Any) -> None:
        self.generation += 1
        self._ready = True
        log.info("%s %s is connected", self.role, self.address)
        self._on_change()
        tasks = {asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()

    async def _read(self, call: Any) -> None:
        while (batch := await call.read()) is not grpc.aio.EOF:
            read = self._kind.reader()
            for result in batch.items:
                self._resolve(result, read)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            await self._gathered()
            count = _first_batch(self._outbox)
            items = self._outbox[:count]
            del self._outbox[:count]
            releases, self._releases = self._releases, []
            if not self._outbox:
                self._wake.clear()
            if self._meanwhile:
                # Behind the write, which is handed to gRPC before it waits for anything.
                for meanwhile in self._meanwhile:
                    self._loop.call_soon(meanwhile)
                self._meanwhile = []
            await call.write(self._kind.pack(items, releases))

    async def _gathered(self) -> None:
        """Returns as soon as a turn brings no more items; at once for a lone one. A message costs as much as several items, at either end."""
        seen = 1
        while seen < len(self._outbox) < MAX_ITEMS_PER_BATCH:
            seen = len(self._outbox)
            await asyncio.sleep(0)

    def _resolve(self, result: Any, read: Callable[[Any, Any], AnswerT | None]) -> None:
        pending = self._pending.pop((result.request_id, result.cache_epoch), None)
        if pending is None or pending.answer.done():
            return
        if pending.deadline == math.inf:
            self.bench.answered_late()
        answer = read(result, pending.about)
        if answer is not None:
            pending.answer.set_result(answer)
        else:
            _fail(pending.answer, ItemFailed(result.error))

    def _disconnected(self) -> None:
        was_ready, self._ready = self._ready, False
        if was_ready:
            self._lost_at = time.monotonic()
        self._outbox.clear()
        self._meanwhile.clear()
        self._releases.clear()
        self._wake.clear()
        lost, self._pending = self._pending, {}
        for pending in lost.values():
            if not pending.answer.done():
                _fail(pending.answer, StreamLost(f"the stream to {self.role} {self.address} broke"))
        if was_ready:
            log.warning("%s %s is lost", self.role, self.address)
            self._on_change()


def _first_batch(items: list[ItemT]) -> int:
    """How many of the items, from the first on, leave in one message."""
    if len(items) < 2:
        return len(items)
    size = 0
    for index, item in enumerate(items[:MAX_ITEMS_PER_BATCH]):
        size += item.ByteSize()
        if size > MAX_BATCH_BYTES:
            return max(index, 1)
    return min(len(items), MAX_ITEMS_PER_BATCH)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    future.set_exception(error)
    future.exception()  # the request may have gone; a failure that nobody reads is no news
