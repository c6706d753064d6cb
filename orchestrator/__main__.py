"""`python -m orchestrator`: see --help for the settings."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import sys
from typing import TYPE_CHECKING

import grpc.aio

from tandem import config, grpc_server, metrics_endpoint, telemetry, tracing

from .callers import Callers, CallersFileError
from .config import OrchestratorConfig
from .generation import Generations
from .metrics import Metrics, StoreMetrics
from .recorder import Recorders
from .runtime import Runtime
from .servicer import SERVICE, OrchestratorServicer, add_to_server
from .session_store import Durability, SessionStore, StoreConfig
from .updates import SamplingUpdates
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from .http.server import HttpServer

log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
LAST_WORDS_SECONDS = 0.5
"""For the last responses to leave, after their requests have ended."""
STORE_ATTEMPTS = 10_000
"""No bound: the setting is a time, and a store that refuses connections uses up a few attempts in half a second."""
STORE_CLOSE_SECONDS = 1.0
"""For what the store is still to be told. Where it hangs, what is left there expires."""
SPARE_CALLS = 256
"""Beyond the requests that run and wait: for refusals that say more than gRPC's own, updates, health."""
COLLECT_AFTER_OBJECTS = 50_000
"""Made beyond those that went, after which Python looks for garbage that refers to itself, of which a round leaves none and a fault little
(`errors.let_go` sees to it).
By its own 700 it looks again and again at what is in the hands of a few dozen requests: a tenth of the orchestrator's CPU time at 64."""
MAX_REQUEST_BYTES = 8 << 20
"""Room for the longest prompt at four bytes a character, and the rest of a request."""


def main() -> int:
    """Runs the service and returns its exit status."""
    try:
        settings = config.load(OrchestratorConfig, sys.argv[1:], os.environ)
        store_config = _store_config(settings)
        settings.worker_files().check("TANDEM_TLS_WORKER")
        callers = Callers(settings.callers_file)
    except config.ConfigError as error:
        return _give_up(str(error))
    except CallersFileError as error:
        return _give_up(f"TANDEM_CALLERS_FILE: {error}")
    telemetry.configure_logging("orchestrator", settings.log_level, settings.log_format)
    try:
        vocabulary = Vocabulary.load(settings.tokenizer, settings.tokenizer_revision, settings.tokenizer_gguf_file)
    except (OSError, ValueError, ImportError) as error:
        return _give_up(f"TANDEM_TOKENIZER: no tokenizer at {settings.tokenizer!r}: {_first_line(error)}")
    gc.set_threshold(COLLECT_AFTER_OBJECTS)
    return grpc_server.run(serve(settings, store_config, vocabulary, callers))


async def serve(
    settings: OrchestratorConfig, store_config: StoreConfig, vocabulary: Vocabulary, callers: Callers
) -> int:
    """Serves until SIGTERM or SIGINT, then drains; returns the exit status."""
    server = make_server(settings)
    health = grpc_server.HealthSwitch(SERVICE)
    await health.attach(server)
    grpc_server.add_reflection(server, SERVICE)
    traces = tracing.start("orchestrator", os.environ)
    registry = metrics_endpoint.registry_for("orchestrator", traces.counts if traces is not None else None)
    store = await SessionStore.connect(store_config, StoreMetrics(registry))
    runtime = Runtime(settings, vocabulary, store, callers)
    metrics = Metrics(registry)
    metrics.observe_runtime(runtime)
    recorders = Recorders(metrics, traces, settings.trace_slow_seconds)
    generations = Generations(runtime, recorders)
    servicer = OrchestratorServicer(generations, SamplingUpdates(runtime, metrics))
    add_to_server(servicer, server)
    http: HttpServer | None = None
    try:
        grpc_server.bind(server, settings.listen, "TANDEM_ORCHESTRATOR_LISTEN", settings.server_files())
        await health.serve_apart(settings.health_listen, "TANDEM_ORCHESTRATOR_HEALTH_LISTEN")
        metrics_endpoint.serve(settings.metrics_listen, registry, "TANDEM_ORCHESTRATOR_METRICS_LISTEN")
        if settings.http_listen:
            from .http import face  # only now: most of a start's time is imports

            http = face.start(settings, runtime, generations, recorders, registry, lambda: health.serving)
    except (grpc_server.PortError, config.ConfigError) as error:
        await runtime.close()
        return _give_up(str(error))
    stop = grpc_server.stop_event()
    await server.start()
    vocabulary.prepare_forms()
    log.info("listening on %s%s", settings.listen, f", HTTP on {settings.http_listen}" if http is not None else "")
    watcher = asyncio.create_task(
        runtime.watch_readiness(lambda ready, note, refusal: health.set(serving=ready, note=note, refusal=refusal))
    )
    await stop.wait()
    watcher.cancel()
    await health.set(serving=False)
    log.info("draining: %d requests, at most %g s", runtime.admission.running, settings.drain_seconds)
    if not await runtime.admission.drain(settings.drain_seconds):
        log.warning("%d requests are cut off; they can be resumed elsewhere", runtime.admission.running)
        await runtime.admission.end_all(CLOSE_SECONDS)
    # Not server.stop(): what arrives while it runs ends as CANCELLED, which no caller asks again after. Until the process
    # ends, and with it the connections, calls are refused as UNAVAILABLE, which is why it ends inside the event loop.
    await asyncio.gather(asyncio.sleep(LAST_WORDS_SECONDS), *([http.close()] if http is not None else []))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STORE_CLOSE_SECONDS):
            await runtime.close()
    await health.close()
    if traces is not None:
        traces.shutdown()
    log.info("stopped")
    return 0


def make_server(settings: OrchestratorConfig) -> grpc.aio.Server:
    """For the public API. Of a call beyond those that may run and wait, and some more, no message is read: it would be held before
    anybody looked at it."""
    most = settings.max_running_requests + settings.max_waiting_requests + SPARE_CALLS
    return grpc.aio.server(options=grpc_server.server_options(MAX_REQUEST_BYTES), maximum_concurrent_rpcs=most)


def _store_config(settings: OrchestratorConfig) -> StoreConfig:
    files = settings.redis_files()
    files.check("TANDEM_TLS_REDIS")
    try:
        return StoreConfig(
            url=settings.redis_url,
            tls=files,
            socket_timeout=settings.store_timeout_seconds,
            running_ttl=settings.running_ttl_seconds,
            finished_ttl=settings.finished_ttl_seconds,
            retry_seconds=settings.store_retry_seconds,
            retry_attempts=STORE_ATTEMPTS,
            durability=Durability.parse(settings.store_durability),
        )
    except ValueError as error:
        raise config.ConfigError(f"TANDEM_REDIS_URL: {error}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _give_up(problem: str) -> int:
    print(f"error: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    grpc_server.end_process(main())
