"""`python -m target_service`: see --help for the settings."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from tandem import config, grpc_server, telemetry
from tandem.engine.item_spans import SpanVocabulary
from tandem.engine.observer import WorkerObserver
from tandem.engine.worker import Loaded, WorkerSpec, serve
from target_service import servicer
from target_service.config import TargetConfig


def main() -> int:
    """Runs the service and returns its exit status."""
    try:
        settings = config.load(TargetConfig, sys.argv[1:], os.environ)
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    telemetry.configure_logging("target", settings.log_level, settings.log_format)

    def load(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Loaded:
        # torch and transformers take seconds to import, and health answers meanwhile.
        from tandem.engine import loading
        from tandem.engine.engine import Engine, WaitingLimits
        from tandem.engine.scheduler import StepLimits
        from target_service.verifier import Verifier

        model = loading.load(settings.model_options())
        verifier = Verifier(model.vocabulary_size, settings.max_speculative_tokens)
        limits = StepLimits(
            short_feed=settings.max_speculative_tokens + 1,
            prefill_chunk=settings.prefill_chunk,
            forward_cost=model.forward_cost,
        )
        engine = Engine(
            model.lm,
            verifier,
            loop,
            limits=limits,
            waiting=WaitingLimits(settings.max_waiting, settings.max_waiting_seconds),
            on_death=on_death,
            reuse_prefixes=settings.prefix_reuse,
            debug_invariants=settings.debug_invariants,
        )
        return Loaded(model, engine)

    spec = WorkerSpec(
        service=servicer.SERVICE,
        listen_variable="TANDEM_TARGET_LISTEN",
        health_variable="TANDEM_TARGET_HEALTH_LISTEN",
        model_variable="TANDEM_TARGET_MODEL",
        add_servicer=servicer.add_to_server,
        load=load,
    )
    observer = WorkerObserver(
        "target",
        SpanVocabulary("target.verify", "tandem.target_rows", "target.step"),
        os.environ,
        settings.metrics_listen,
        "TANDEM_TARGET_METRICS_LISTEN",
    )
    return grpc_server.run(serve(settings, spec, observer))


if __name__ == "__main__":
    grpc_server.end_process(main())
