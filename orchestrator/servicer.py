"""The public API over gRPC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError, Message

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc

from .call import GrpcCall
from .errors import Context, InvalidArgument, RequestFailed, let_go, tell
from .generation import Generations
from .updates import SamplingUpdates

M = TypeVar("M", bound=Message)

SERVICE = api.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


class Unreadable:
    """Takes the place of a request whose bytes are none."""


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves OrchestratorService."""

    def __init__(self, generations: Generations, updates: SamplingUpdates) -> None:
        self._generations = generations
        self._updates = updates

    async def Generate(  # type: ignore[override]
        self, request: api.GenerateRequest | Unreadable, context: Context
    ) -> None:
        """See proto/tandem/v1/orchestrator.proto."""
        try:
            if isinstance(request, Unreadable):
                raise InvalidArgument("request", "is no GenerateRequest")
            await self._generations.run(request, GrpcCall(context))
        except RequestFailed as failure:
            let_go(failure)
            await tell(context, failure)

    async def UpdateSampling(
        self, request: api.UpdateSamplingRequest | Unreadable, context: Context
    ) -> api.UpdateSamplingResponse:
        """See proto/tandem/v1/orchestrator.proto."""
        try:
            if isinstance(request, Unreadable):
                raise InvalidArgument("request", "is no UpdateSamplingRequest")
            return await self._updates.run(request, GrpcCall(context))
        except RequestFailed as failure:
            let_go(failure)
            await tell(context, failure)
            return api.UpdateSamplingResponse()  # to nobody


def add_to_server(servicer: OrchestratorServicer, server: grpc.aio.Server) -> None:
    """Registers the servicer. Not the generated way: bytes that are no request would end as UNKNOWN, with a traceback in the log."""
    generate = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=_reader(api.GenerateRequest),
        response_serializer=api.GenerateResponse.SerializeToString,
    )
    update = grpc.unary_unary_rpc_method_handler(
        servicer.UpdateSampling,
        request_deserializer=_reader(api.UpdateSamplingRequest),
        response_serializer=api.UpdateSamplingResponse.SerializeToString,
    )
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Generate": generate, "UpdateSampling": update}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _reader(kind: type[M]) -> Callable[[bytes], M | Unreadable]:
    def read(data: bytes) -> M | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Unreadable()

    return read
