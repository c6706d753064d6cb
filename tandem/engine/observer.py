"""What a worker process shows of itself: its metrics endpoint, and the spans of the items it works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tandem import metrics_endpoint, tracing
from tandem.engine.item_spans import ItemSpans, SpanVocabulary
from tandem.engine.metrics import EngineCollector

if TYPE_CHECKING:
    from tandem.engine.engine import EngineStats


class WorkerObserver:
    """Made at the start of the process; `stop` at its end, when nothing else is left to do."""

    def __init__(
        self,
        role: str,
        vocabulary: SpanVocabulary,
        environment: Mapping[str, str],
        metrics_listen: str,
        metrics_variable: str,
    ) -> None:
        """For the draft or the target; traces are on if the OTEL_* variables say so."""
        self._vocabulary = vocabulary
        self._tracing = tracing.start(role, environment)
        self._metrics_listen = metrics_listen
        self._metrics_variable = metrics_variable
        self._registry = metrics_endpoint.registry_for(
            role, self._tracing.counts if self._tracing is not None else None
        )

    def serve_metrics(self, stats: Callable[[], tuple[EngineStats, int] | None]) -> None:
        """Serves the engine's metrics; `stats` gives its counters and slots. Raises PortError."""
        self._registry.register(EngineCollector(stats))
        metrics_endpoint.serve(self._metrics_listen, self._registry, self._metrics_variable)

    def spans(self) -> ItemSpans | None:
        """The spans of a new stream; None where tracing is off."""
        return ItemSpans(self._tracing, self._vocabulary) if self._tracing is not None else None

    def stop(self) -> None:
        """Exports the spans that are left, within the limit."""
        if self._tracing is not None:
            self._tracing.shutdown()
