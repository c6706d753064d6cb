"""`python -m draft_service`: see --help for the settings."""

from __future__ import annotations

from draft_service import servicer
from draft_service.config import DraftConfig
from tandem import grpc_server
from tandem.engine import worker_process
from tandem.engine.item_spans import SpanVocabulary
from tandem.engine.worker_process import Prepared, Worker


def _prepare(settings: DraftConfig) -> Prepared:
    from draft_service.methods import prepare

    return prepare(settings)


DRAFT = Worker(
    settings=DraftConfig,
    service=servicer.SERVICE,
    add_servicer=servicer.add_to_server,
    spans=SpanVocabulary("draft.propose", "tandem.proposed_tokens", "draft.step"),
    prepare=_prepare,
)

if __name__ == "__main__":
    grpc_server.end_process(worker_process.main(DRAFT))
