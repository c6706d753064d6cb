"""DraftService over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from tandem.engine.stream import Answer
from tandem.engine.worker import WorkerServicer, WorkerState
from tandem.v1 import draft_pb2, draft_pb2_grpc
from tandem.wire import encode_ids, encode_probs

SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name


class DraftServicer(WorkerServicer, draft_pb2_grpc.DraftServiceServicer):
    """Packed proposal streams and the model's description."""

    async def Propose(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[draft_pb2.ProposeBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await self.state.serve_stream(request_iterator, context, pack)


def pack(answers: Sequence[Answer]) -> draft_pb2.ProposalBatch:
    """Answers as one message."""
    return draft_pb2.ProposalBatch(items=[_item(answer) for answer in answers])


def _item(answer: Answer) -> draft_pb2.ProposalItem:
    item = draft_pb2.ProposalItem(request_id=answer.request_id, cache_epoch=answer.cache_epoch)
    if answer.error is not None:
        item.error.CopyFrom(answer.error)
        return item
    tokens = [
        draft_pb2.DraftedToken(
            token_id=drafted.token_id,
            support_ids=encode_ids(drafted.support_ids),
            support_probs=encode_probs(drafted.q),
        )
        for drafted in answer.result
    ]
    item.proposal.tokens.extend(tokens)
    item.proposal.declined = not tokens
    item.proposal.cached_length = answer.cached_length
    if answer.work is not None:
        item.proposal.time.CopyFrom(answer.work.to_proto())
    return item


def add_to_server(state: WorkerState, server: grpc.aio.Server) -> None:
    """Registers the servicer."""
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(state), server)
