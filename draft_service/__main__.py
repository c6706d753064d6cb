"""`python -m draft_service`: see --help for the settings."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from draft_service import servicer
from draft_service.config import DraftConfig
from tandem import config, grpc_server, telemetry
from tandem.engine.item_spans import SpanVocabulary
from tandem.engine.observer import WorkerObserver
from tandem.engine.worker import Loaded, WorkerSpec, serve


def main() -> int:
    """Runs the service and returns its exit status."""
    try:
        settings = config.load(DraftConfig, sys.argv[1:], os.environ)
    except config.ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    telemetry.configure_logging("draft", settings.log_level, settings.log_format)

    def load(loop: asyncio.AbstractEventLoop, on_death: Callable[[], None]) -> Loaded:
        # torch and transformers take seconds to import, and health answers meanwhile.
        from draft_service.methods import prepare
        from tandem.engine.engine import Engine

        prepared = prepare(settings)
        engine = Engine(
            prepared.model.lm,
            prepared.drafter,
            loop,
            limits=prepared.limits,
            on_death=on_death,
            reuse_prefixes=settings.prefix_reuse,
            idle=prepared.ahead,
            debug_invariants=settings.debug_invariants,
        )
        return Loaded(prepared.model, engine)

    spec = WorkerSpec(
        service=servicer.SERVICE,
        listen_variable="TANDEM_DRAFT_LISTEN",
        health_variable="TANDEM_DRAFT_HEALTH_LISTEN",
        model_variable="TANDEM_DRAFT_MODEL",
        add_servicer=servicer.add_to_server,
        load=load,
    )
    observer = WorkerObserver(
        "draft",
        SpanVocabulary("draft.propose", "tandem.proposed_tokens", "draft.step"),
        os.environ,
        settings.metrics_listen,
        "TANDEM_DRAFT_METRICS_LISTEN",
    )
    return grpc_server.run(serve(settings, spec, observer))


if __name__ == "__main__":
    grpc_server.end_process(main())
