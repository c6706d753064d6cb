"""A worker's process, from its command line to its exit status: draft and target say only what is their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc.aio

from tandem import config, grpc_server, telemetry
from tandem.engine.item_spans import SpanVocabulary
from tandem.engine.observer import WorkerObserver
from tandem.engine.worker import Loaded, WorkerSpec, WorkerState, serve
from tandem.engine.worker_settings import WorkerSettings

if TYPE_CHECKING:
    from tandem.engine.draft_stats import DraftStats
    from tandem.engine.idle import IdleWork
    from tandem.engine.job import Method
    from tandem.engine.loading import ServedModel
    from tandem.engine.scheduler import StepLimits
    from tandem.engine.waiting_line import WaitingLimits

logger = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=WorkerSettings)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A loaded model, and what its engine does with it."""

    model: ServedModel
    method: Method[Any, Any]
    limits: StepLimits
    waiting: WaitingLimits | None = None
    """None: who finds no cache slot is refused."""
    displace: bool = False
    """Whether a request that finds none takes one from an orchestrator that holds more."""
    idle: IdleWork | None = None
    stats: DraftStats | None = None
    """What the method counts, for the metrics."""
    reads_later: bool = False
    """Whether blocks may come before the model has read the prefix."""
    gather: bool = False
    """Whether steps wait a moment for sessions that are about to come back."""


@dataclass(frozen=True, slots=True)
class Worker(Generic[SettingsT]):
    """What makes a process a draft or a target."""

    settings: type[SettingsT]
    service: str
    """Full name of the gRPC service."""
    add_servicer: Callable[[WorkerState, grpc.aio.Server], None]
    spans: SpanVocabulary
    prepare: Callable[[SettingsT], Prepared]
    """Blocking: loads the model. Raises ModelError. Imports torch, hence is called in a thread: that takes seconds, and
    health answers meanwhile."""
    follow: Callable[[SettingsT], int | None] | None = None
    """Does what another process says, where this one has a part of the model that another one serves, and returns the exit
    status; None where this one serves. Blocking. Raises ConfigError."""


def prepare_torch(environ: MutableMapping[str, str]) -> None:
    """Sets what torch and its OpenMP look up once, when they are imported; who has set it knows better.

    A model's weights are read from end to end in each step: with large pages a CPU does so 5 to 9 % faster, where the kernel leaves
    them to who asks. And a thread that waits for the next product keeps its core for 20 ms by default, in which the other worker's
    step and the commit of the round want it; 10,000 turns are long enough for what lies between two products (docs/decisions.md).
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", "10000")


def main(worker: Worker[Any]) -> int:
    """Runs the service and returns its exit status."""
    prepare_torch(os.environ)
    try:
        settings: WorkerSettings = config.load(worker.settings, sys.argv[1:], os.environ)
        telemetry.configure_logging(settings.role, settings.log_level, settings.log_format)
        followed = worker.follow(settings) if worker.follow is not None else None
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if followed is not None:
        return followed

    def load(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Loaded:
        from tandem.engine.engine import Engine
        from tandem.engine.waiting_line import NO_WAITING

        prepared = worker.prepare(settings)
        engine = Engine(
            prepared.model.lm,
            prepared.method,
            loop,
            limits=prepared.limits,
            waiting=prepared.waiting or NO_WAITING,
            slots_per_stream=settings.slots_per_orchestrator,
            displace=prepared.displace,
            on_death=on_death,
            reuse_prefixes=settings.prefix_reuse,
            idle=prepared.idle,
            forms=prepared.model.forms,
            gather=prepared.gather,
            debug_invariants=settings.debug_invariants,
        )
        if prepared.stats is not None:
            engine.stats.draft = prepared.stats
        if prepared.model.compile_stats is not None:
            engine.stats.compiled = prepared.model.compile_stats
        if prepared.model.group is not None:
            prepared.model.group.watch(partial(_rank_lost, loop, on_death))
        return Loaded(prepared.model, engine, lambda stopped: prepared.model.end(stopped=stopped), prepared.reads_later)

    prefix = f"TANDEM_{settings.role.upper()}"
    spec = WorkerSpec(
        service=worker.service,
        listen_variable=f"{prefix}_LISTEN",
        health_variable=f"{prefix}_HEALTH_LISTEN",
        model_variable=f"{prefix}_MODEL",
        add_servicer=worker.add_servicer,
        load=load,
    )
    observer = WorkerObserver(
        settings.role, worker.spans, os.environ, settings.metrics_listen, f"{prefix}_METRICS_LISTEN"
    )
    return grpc_server.run(serve(settings, spec, observer))


def _rank_lost(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None], reason: str) -> None:
    logger.critical("%s: the model can't be run without it", reason)
    with contextlib.suppress(RuntimeError):  # the loop may be closed
        loop.call_soon_threadsafe(on_death)
