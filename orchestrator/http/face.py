"""The HTTP face of a running orchestrator."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from tandem.grpc_server import warn_of_plain_text

from ..config import OrchestratorConfig
from ..generation import Generations
from ..recorder import Recorders
from ..runtime import Runtime
from .app import build_app
from .served_model import ServedModel
from .server import HttpServer, bind

CLOSE_SECONDS = 1


def start(
    settings: OrchestratorConfig,
    runtime: Runtime,
    generations: Generations,
    recorders: Recorders,
    registry: CollectorRegistry,
    ready: Callable[[], bool],
) -> HttpServer:
    """Listens as the settings say; raises PortError."""
    listener = bind(settings.http_listen, "TANDEM_HTTP_LISTEN", settings.reader_timeout_seconds)
    files = settings.server_files()
    if not files.certificate:
        warn_of_plain_text(settings.http_listen, "TANDEM_HTTP_LISTEN")
    model = ServedModel(runtime, settings.served_model_name)
    # Where metrics have a port of their own, whoever may call need not see them.
    exposed = None if settings.metrics_listen else registry
    app = build_app(generations, recorders, runtime.callers, model, exposed, ready)
    return HttpServer(app, listener, files, CLOSE_SECONDS)
