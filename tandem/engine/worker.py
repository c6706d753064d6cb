"""The life of a worker process: bind, load, check, serve, drain, end.

The port is bound at once and health answers NOT_SERVING while the model loads in a thread of its own. A model that
can't be served ends the process with status 1 and one line that names the variable.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from tandem import grpc_server
from tandem.config import ConfigError
from tandem.engine.faults import ModelError
from tandem.engine.packed_stream import PackedStream, StreamLimits
from tandem.engine.stream import Answer
from tandem.sampling_limits import SAMPLING_VERSION
from tandem.transport_security import ServerFiles
from tandem.v1 import worker_pb2

if TYPE_CHECKING:
    from tandem.engine.engine import Engine, EngineStats
    from tandem.engine.loading import ServedModel
    from tandem.engine.observer import WorkerObserver

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and the engine at work on it."""

    model: ServedModel
    engine: Engine[Any]
    end: Callable[[bool], None] = lambda _: None
    """Called once the engine has been stopped, with whether its thread has ended: ends what else belongs to the model."""
    reads_later: bool = False
    """Whether blocks may come before the model has read the prefix."""


class WorkerState:
    """What the servicer answers from: nothing at first, then a loaded model; the streams that are open."""

    def __init__(
        self, max_speculative_tokens: int, limits: StreamLimits, observer: WorkerObserver | None = None
    ) -> None:
        self.loaded: Loaded | None = None
        self.closed = ""
        """Why there is no service any more."""
        self.over = asyncio.Event()
        """Set once there is none."""
        self._max_speculative_tokens = max_speculative_tokens
        self._limits = limits
        self._observer = observer
        self._streams: set[PackedStream] = set()

    async def model_info(self, context: grpc.aio.ServicerContext[Any, Any]) -> worker_pb2.GetModelInfoResponse:
        """Answers GetModelInfo, or aborts with UNAVAILABLE."""
        loaded = await self._ready(context)
        model = loaded.model
        return worker_pb2.GetModelInfoResponse(
            model=model.name,
            vocabulary_size=model.vocabulary_size,
            padded_vocabulary_size=model.padded_vocabulary_size,
            vocabulary_fingerprint=model.vocabulary_fingerprint,
            context_length=model.context_length,
            end_token_ids=model.end_token_ids,
            dtype=model.dtype,
            device=model.device,
            slots=model.slots,
            max_speculative_tokens=self._max_speculative_tokens,
            sampling_version=SAMPLING_VERSION,
            reads_later=loaded.reads_later,
        )

    async def serve_stream(
        self,
        batches: Any,
        context: grpc.aio.ServicerContext[Any, Any],
        pack: Callable[[Sequence[Answer]], Any],
    ) -> None:
        """Serves one packed stream to its end, or aborts with UNAVAILABLE."""
        engine = (await self._ready(context)).engine
        stream = PackedStream(engine, self._limits, pack, self._observer.spans() if self._observer else None)
        self._streams.add(stream)
        try:
            await stream.serve(batches, context)
        finally:
            self._streams.discard(stream)

    def engine_stats(self) -> tuple[EngineStats, int] | None:
        """The engine's counters and its number of cache slots; None before the model is loaded."""
        return (self.loaded.engine.stats, self.loaded.model.slots) if self.loaded is not None else None

    def end_streams(self, message: str) -> None:
        """Ends all open streams with UNAVAILABLE, and refuses new calls."""
        self.closed = message
        self.over.set()
        for stream in self._streams:
            stream.end(grpc.StatusCode.UNAVAILABLE, message)

    async def _ready(self, context: grpc.aio.ServicerContext[Any, Any]) -> Loaded:
        if self.loaded is None or self.closed:
            problem = self.closed or "the model is not loaded yet"
            await context.abort(grpc.StatusCode.UNAVAILABLE, problem)
            raise AssertionError("abort returned")
        return self.loaded


class WorkerServicer:
    """What the gRPC services of both workers have in common."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state

    async def GetModelInfo(  # noqa: N802 - the name of an RPC
        self, _request: worker_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> worker_pb2.GetModelInfoResponse:
        """The model's description."""
        return await self.state.model_info(context)


class WorkerConfig(Protocol):
    """What the configs of both workers have in common."""

    @property
    def listen(self) -> str: ...
    @property
    def tls_certificate(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_ca(self) -> str: ...
    @property
    def health_listen(self) -> str: ...
    @property
    def drain_seconds(self) -> float: ...
    @property
    def max_speculative_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What makes a worker a draft or a target."""

    service: str
    """Full name of the gRPC service."""
    listen_variable: str
    health_variable: str
    model_variable: str
    add_servicer: Callable[[WorkerState, grpc.aio.Server], None]
    load: Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Loaded]
    """Blocking: loads the model and makes its engine, given the loop to deliver to and what to call should the engine
    die. Raises ModelError. Imports torch, hence is called in a thread."""


async def serve(config: WorkerConfig, spec: WorkerSpec, observer: WorkerObserver | None = None) -> int:
    """Runs the worker until SIGTERM or SIGINT; returns the exit status."""
    server = grpc.aio.server(options=grpc_server.server_options())
    state = WorkerState(config.max_speculative_tokens, StreamLimits(), observer)
    spec.add_servicer(state, server)
    health = grpc_server.HealthSwitch(spec.service)
    await health.attach(server)
    grpc_server.add_reflection(server, spec.service)
    try:
        files = ServerFiles(config.tls_certificate, config.tls_key, config.tls_client_ca)
        port = grpc_server.bind(server, config.listen, spec.listen_variable, files)
        await health.serve_apart(config.health_listen, spec.health_variable)
        if observer is not None:
            observer.serve_metrics(state.engine_stats)
    except (grpc_server.PortError, ConfigError) as error:
        return _give_up(str(error))
    stop = grpc_server.stop_event()
    await server.start()
    logger.info("listening on %s, port %d; loading the model", config.listen, port)
    try:
        loaded = await _load(spec, stop, state, health)
        if loaded is None:
            return 0
        state.loaded = loaded
        await health.set(serving=True, note=f"context {loaded.model.context_length:,} tokens")
        logger.info("serving %s", loaded.model.name)
        await stop.wait()
        if not state.closed:
            await _drain(state, loaded, health, config.drain_seconds)
    except ModelError as error:
        return _give_up(f"{error.variable or spec.model_variable}: {error}")
    finally:
        await asyncio.gather(server.stop(_CLOSE_SECONDS), health.close())
        if state.loaded is not None:
            state.loaded.end(state.loaded.engine.stop())
        if observer is not None:
            observer.stop()
    logger.info("stopped")
    return 0


async def _load(
    spec: WorkerSpec, stop: asyncio.Event, state: WorkerState, health: grpc_server.HealthSwitch
) -> Loaded | None:
    """Loads in a daemon thread, which doesn't keep a process that is told to stop; None if it was. Raises ModelError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Loaded] = loop.create_future()
    tasks: set[asyncio.Task[None]] = set()

    def on_death() -> None:
        tasks.add(loop.create_task(health.set_dead()))
        state.end_streams("the engine died")

    def load() -> None:
        try:
            loaded = spec.load(loop, on_death)
        except Exception as error:  # noqa: BLE001 - raised by `_load`
            loop.call_soon_threadsafe(_settle, future, None, error)
        else:
            loop.call_soon_threadsafe(_settle, future, loaded, None)

    threading.Thread(target=load, name="load", daemon=True).start()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((future, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not future.done():
        return None
    try:
        loaded = future.result()
        loaded.engine.start()
        tested = asyncio.ensure_future(loaded.engine.call(loaded.model.lm.self_test))
        # Of several ranks one may be lost by now, and the test wait for it.
        await asyncio.wait((tested, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not tested.done():
            tested.cancel()
            return None
        await tested
    except ModelError:
        raise
    except Exception as error:
        logger.exception("loading failed")
        raise ModelError(f"{type(error).__name__}: {error}") from error
    finally:
        stopping.cancel()
    return loaded


def _settle(future: asyncio.Future[Loaded], loaded: Loaded | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        assert loaded is not None
        future.set_result(loaded)


async def _drain(state: WorkerState, loaded: Loaded, health: grpc_server.HealthSwitch, seconds: float) -> None:
    """Refuses new sessions at once, serves those there are until they end, the time is up or the engine dies, then ends the
    streams."""
    await health.set(serving=False)
    logger.info("draining: %d sessions, at most %g s", loaded.engine.stats.sessions, seconds)
    ends = [asyncio.create_task(loaded.engine.drain()), asyncio.create_task(state.over.wait())]
    await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    if state.closed:
        return
    state.end_streams("the service is shutting down")


def _give_up(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 1
