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
    """Answers as one message, made in place: a message that is put into another is encoded and decoded for it."""
    batch = target_pb2.VerdictBatch()
    for answer in answers:
        item = batch.items.add(request_id=answer.request_id, cache_epoch=answer.cache_epoch)
        if answer.error is not None:
            item.error.CopyFrom(answer.error)
            continue
        verdict = item.verdict
        verdict.cached_length = answer.cached_length
        for row in answer.result:
            _add_row(verdict, row)
        if answer.work is not None:
            answer.work.write_to(verdict.time)
    return batch


def _add_row(verdict: target_pb2.Verdict, row: TargetRow) -> None:
    message = verdict.rows.add(
        support_probs=encode_probs(row.p), outside_mass=row.outside_mass, outside_token_id=row.outside_token_id
    )
    if row.dead_end:
        message.dead_end = True
    if row.logprobs is not None:
        message.support_logprobs = encode_probs(row.logprobs.support)
        message.outside_logprob = row.logprobs.outside
        message.top_token_ids = encode_ids(row.logprobs.top_ids)
        message.top_logprobs = encode_probs(row.logprobs.top)


def add_to_server(state: WorkerState, server: grpc.aio.Server) -> None:
    """Registers the servicer."""
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetServicer(state), server)
