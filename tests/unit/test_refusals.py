"""A call that is refused reaches its caller as one without an answer: a status that gRPC may try again after."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orchestrator.errors import Unavailable
from orchestrator.servicer import OrchestratorServicer, add_to_server
from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc

TRIES = 3
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "tandem.v1.OrchestratorService"}],
            "retryPolicy": {
                "maxAttempts": TRIES,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}


@pytest.mark.parametrize("name", ["Generate", "UpdateSampling"])
async def test_the_callers_grpc_tries_again(name: str) -> None:
    tries = 0

    async def refuse(*_: Any) -> None:
        nonlocal tries
        tries += 1
        raise Unavailable("the service is shutting down", "DRAINING", 1.0)

    server = grpc.aio.server()
    port, part = server.add_insecure_port("127.0.0.1:0"), SimpleNamespace(run=refuse)
    add_to_server(OrchestratorServicer(part, part), server)  # type: ignore[arg-type]
    await server.start()
    options = [("grpc.service_config", json.dumps(RETRIES)), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            if name == "Generate":
                async for _ in stub.Generate(api.GenerateRequest(request_id="r"), timeout=60):
                    pass
            else:
                await stub.UpdateSampling(api.UpdateSamplingRequest(request_id="r"), timeout=60)
    await server.stop(0)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert tries == TRIES
