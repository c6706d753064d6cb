"""A client of one packed stream, synchronous, as simple as can be."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2


class PackedClient:
    """Sends batches and reads answers one by one."""

    def __init__(self, call: Any, batch: Any) -> None:
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._batch = batch
        self.call = call(iter(self._outgoing.get, None), timeout=300)
        self._answers: Iterator[Any] = (item for message in self.call for item in message.items)

    def send(self, items: Sequence[Any], release: Sequence[str] = ()) -> None:
        self._outgoing.put(self._batch(items=items, release_request_ids=release))

    def ask(self, item: Any) -> Any:
        """Sends one item and reads one answer."""
        self.send([item])
        return self.read()

    def read(self) -> Any:
        return next(self._answers)

    def close(self) -> list[Any]:
        """Says that nothing more comes; returns what is still answered."""
        self._outgoing.put(None)
        return list(self._answers)


def verify_stream(channel: grpc.Channel) -> PackedClient:
    return PackedClient(target_pb2_grpc.TargetServiceStub(channel).Verify, target_pb2.VerifyBatch)


def propose_stream(channel: grpc.Channel) -> PackedClient:
    return PackedClient(draft_pb2_grpc.DraftServiceStub(channel).Propose, draft_pb2.ProposeBatch)


def reason(answer: Any) -> str:
    """The reason of an item's error, or "" for a result."""
    if answer.WhichOneof("result") != "error":
        return ""
    return worker_pb2.ErrorReason.Name(answer.error.reason).removeprefix("ERROR_REASON_")
