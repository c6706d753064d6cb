"""Draft and target services that lie: real gRPC servers that ask a true worker and tell what they like."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from tandem.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc, worker_pb2
from tests.support.channels import open_channel

METHODS = {"draft": "/tandem.v1.DraftService/Propose", "target": "/tandem.v1.TargetService/Verify"}

Lie = Callable[[Any], Iterable[Any]]


def honest(batch: Any) -> Iterable[Any]:
    """The truth."""
    yield batch


class LyingWorker:
    """A draft or target service in this process: true answers of a true worker, changed by `lie`."""

    def __init__(self, role: str, upstream: str) -> None:
        self.lie: Lie = honest
        self.heard: Callable[[Any], None] = lambda batch: None
        """Is told of each batch that the orchestrator sends."""
        self.describe: Callable[[worker_pb2.GetModelInfoResponse], None] = lambda info: None
        channel = open_channel(upstream)
        stub: Any
        batch: Any
        if role == "draft":
            stub, batch = draft_pb2_grpc.DraftServiceStub(channel), draft_pb2.ProposeBatch
        else:
            stub, batch = target_pb2_grpc.TargetServiceStub(channel), target_pb2.VerifyBatch
        service, method = METHODS[role][1:].split("/")
        self._exchange = getattr(stub, method)
        self._info = stub.GetModelInfo
        self._executor = ThreadPoolExecutor(16)
        self._server = grpc.server(self._executor)
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            method: grpc.stream_stream_rpc_method_handler(self._serve, batch.FromString, _serialized),
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(
                self._model_info, worker_pb2.GetModelInfoRequest.FromString, _serialized
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def _serve(self, batches: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        call = self._exchange(self._overheard(batches))
        context.add_callback(call.cancel)
        with contextlib.suppress(grpc.RpcError, StreamEnds):
            for batch in call:
                yield from self.lie(batch)

    def _overheard(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.heard(batch)
            yield batch

    def _model_info(self, message: Any, context: grpc.ServicerContext) -> worker_pb2.GetModelInfoResponse:
        info: worker_pb2.GetModelInfoResponse = self._info(message)
        self.describe(info)
        return info


class StreamEnds(Exception):
    """Raised by a lie that ends the stream."""


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()
