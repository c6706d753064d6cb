"""The public API over gRPC."""

from __future__ import annotations

import grpc.aio
from google.protobuf.message import DecodeError

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc

from .call import GrpcCall
from .errors import Context, InvalidArgument, RequestFailed, abort
from .generation import Generations

SERVICE = api.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


class Unreadable:
    """Takes the place of a request whose bytes are none."""


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves OrchestratorService."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations

    async def Generate(  # type: ignore[override]
        self, request: api.GenerateRequest | Unreadable, context: Context
    ) -> None:
        """See proto/tandem/v1/orchestrator.proto."""
        try:
            if isinstance(request, Unreadable):
                raise InvalidArgument("request", "is no GenerateRequest")
            await self._generations.run(request, GrpcCall(context))
        except RequestFailed as failure:
            await abort(context, failure)


def add_to_server(servicer: OrchestratorServicer, server: grpc.aio.Server) -> None:
    """Registers the servicer. Not the generated way: bytes that are no request would end as UNKNOWN, with a traceback in the log."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=_read,
        response_serializer=api.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Generate": handler}),))


def _read(data: bytes) -> api.GenerateRequest | Unreadable:
    try:
        return api.GenerateRequest.FromString(data)
    except DecodeError:
        return Unreadable()
