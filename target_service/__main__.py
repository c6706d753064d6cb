"""`python -m target_service`: see --help for the settings."""

from __future__ import annotations

from tandem import grpc_server
from tandem.engine import worker_process
from tandem.engine.item_spans import SpanVocabulary
from tandem.engine.worker_process import Prepared, Worker
from target_service import servicer
from target_service.config import TargetConfig


def _prepare(settings: TargetConfig) -> Prepared:
    from target_service.preparation import prepare

    return prepare(settings)


TARGET = Worker(
    settings=TargetConfig,
    service=servicer.SERVICE,
    add_servicer=servicer.add_to_server,
    spans=SpanVocabulary("target.verify", "tandem.target_rows", "target.step"),
    prepare=_prepare,
)

if __name__ == "__main__":
    grpc_server.end_process(worker_process.main(TARGET))
