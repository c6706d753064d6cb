"""TargetService over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from tandem.acceptance import TargetRow
from tandem.engine.stream import Answer
from tandem.engine.worker import WorkerServicer, WorkerState
from tandem.v1 import target_pb2, target_pb2_grpc
from tandem.wire import encode_ids, encode_probs

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name


class TargetServicer(WorkerServicer, target_pb2_grpc.TargetServiceServicer):
    """Packed verification streams and the model's description."""

    async def Verify(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyBatch],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        await self.state.serve_stream(request_iterator, context, pack)


def pack(answers: Sequence[Answer]) -> target_pb2.VerdictBatch:
    """Answers as one message."""
    return target_pb2.VerdictBatch(items=[_item(answer) for answer in answers])


def _item(answer: Answer) -> target_pb2.VerdictItem:
    item = target_pb2.VerdictItem(request_id=answer.request_id, cache_epoch=answer.cache_epoch)
    if answer.error is not None:
        item.error.CopyFrom(answer.error)
        return item
    rows = [_row(row) for row in answer.result]
    item.verdict.rows.extend(rows)
    item.verdict.cached_length = answer.cached_length
    if answer.work is not None:
        item.verdict.time.CopyFrom(answer.work.to_proto())
    return item


def _row(row: TargetRow) -> target_pb2.TargetRow:
    message = target_pb2.TargetRow(
        support_probs=encode_probs(row.p), outside_mass=row.outside_mass, outside_token_id=row.outside_token_id
    )
    if row.dead_end:
        message.dead_end = True
    if row.logprobs is not None:
        message.support_logprobs = encode_probs(row.logprobs.support)
        message.outside_logprob = row.logprobs.outside
        message.top_token_ids = encode_ids(row.logprobs.top_ids)
        message.top_logprobs = encode_probs(row.logprobs.top)
    return message


def add_to_server(state: WorkerState, server: grpc.aio.Server) -> None:
    """Registers the servicer."""
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(state), server)
