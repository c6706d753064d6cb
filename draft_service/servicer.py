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
    """Answers as one message, made in place: a message that is put into another is encoded and decoded for it."""
    batch = draft_pb2.ProposalBatch()
    for answer in answers:
        item = batch.items.add(request_id=answer.request_id, cache_epoch=answer.cache_epoch)
        if answer.error is not None:
            item.error.CopyFrom(answer.error)
            continue
        proposal = item.proposal
        proposal.cached_length = answer.cached_length
        proposal.declined = not answer.result
        proposal.unread_tokens = answer.unread_tokens
        for drafted in answer.result:
            proposal.tokens.add(
                token_id=drafted.token_id,
                support_ids=encode_ids(drafted.support_ids),
                support_probs=encode_probs(drafted.q),
            )
        if answer.work is not None:
            answer.work.write_to(proposal.time)
    return batch


def add_to_server(state: WorkerState, server: grpc.aio.Server) -> None:
    """Registers the servicer."""
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(state), server)
