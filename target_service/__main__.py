"""`python -m target_service`: see --help for the settings."""

from __future__ import annotations

import os

from tandem import grpc_server
from tandem.engine import worker_process
from tandem.engine.item_spans import SpanVocabulary
from tandem.engine.ranks import ranks_from
from tandem.engine.worker_process import Prepared, Worker
from target_service import servicer
from target_service.config import TENSOR_PARALLEL, TargetConfig


def _prepare(settings: TargetConfig) -> Prepared:
    from target_service.preparation import prepare

    return prepare(settings)


def _follow(settings: TargetConfig) -> int | None:
    if not ranks_from(os.environ, settings.tensor_parallel, TENSOR_PARALLEL).rank:
        return None
    from target_service.preparation import run_part

    return run_part(settings)


TARGET = Worker(
    settings=TargetConfig,
    service=servicer.SERVICE,
    add_servicer=servicer.add_to_server,
    spans=SpanVocabulary("target.verify", "tandem.target_rows", "target.step"),
    prepare=_prepare,
    follow=_follow,
)

if __name__ == "__main__":
    grpc_server.end_process(worker_process.main(TARGET))
