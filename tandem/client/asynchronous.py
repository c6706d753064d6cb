"""The client for asyncio: the same calls, values and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from tandem.transport_security import ClientFiles
from tandem.v1 import orchestrator_pb2, orchestrator_pb2_grpc

from .errors import CancelledCallError, ProtocolError, to_tandem_error
from .messages import build_request, build_update, to_chunk, to_sampling_in_force
from .values import Chunk, GenerationOptions, Prompt, SamplingChange, SamplingInForce


async def _heard(answer: Awaitable[Any]) -> Any:
    """What the server answers; raises TandemError."""
    try:
        return await answer
    except grpc.aio.AioRpcError as error:
        raise to_tandem_error(error) from error
    except asyncio.CancelledError:
        # gRPC raises it for a cancelled call too, which is no reason to end this task.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise CancelledCallError(grpc.StatusCode.CANCELLED, "the call was cancelled") from None


class AsyncGeneration(AsyncIterator[Chunk]):
    """A running generation: iterate over its chunks, or cancel it. As a context manager it is cancelled when it is left,
    and so is one whose task is cancelled while it waits for a chunk."""

    def __init__(self, call: Any, completions: int = 1) -> None:
        self._call = call
        self._unfinished = completions

    async def __anext__(self) -> Chunk:
        response = await self._read()
        if response is grpc.aio.EOF:
            if self._unfinished > 0:
                raise ProtocolError(grpc.StatusCode.INTERNAL, "the stream ended before the generation did")
            raise StopAsyncIteration
        chunk = to_chunk(response)
        self._unfinished -= chunk.finish is not None
        return chunk

    async def _read(self) -> Any:
        return await _heard(self._call.read())

    def cancel(self) -> None:
        """Ends the call; the server drops the request. Harmless when it is over."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class AsyncTandemClient:
    """One connection to an orchestrator, for one event loop: make it where that runs."""

    def __init__(self, address: str, *, token: str = "", tls: ClientFiles = ClientFiles()) -> None:  # noqa: B008 - frozen
        """`token` names the caller, where the orchestrator asks for one; `tls` has a CA where it speaks TLS."""
        self.address = address
        # Local addresses must not go through a proxy that the environment may name.
        options = [("grpc.enable_http_proxy", 0)]
        credentials = tls.credentials()
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._stub: Any = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> AsyncGeneration:
        """Starts a generation. What the server says is raised by the iteration, as TandemError; what can't be sent at all here, as
        ValueError or TypeError."""
        request = build_request(prompt, options or GenerationOptions(), request_id)
        return self._start(request, timeout)

    def resume(self, request_id: str, token_offset: int, *, timeout: float | None = None) -> AsyncGeneration:
        """Goes on with a request, on any orchestrator, behind the tokens that the caller has. Errors are raised by the
        iteration: NotFoundError, and InvalidRequestError where fewer tokens are committed, among them."""
        request = orchestrator_pb2.GenerateRequest(request_id=request_id, token_offset=token_offset)
        return self._start(request, timeout)

    async def update_sampling(
        self,
        request_id: str,
        change: SamplingChange,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the deadline that the server is told of
    ) -> SamplingInForce:
        """Changes the sampling of a running request, on any orchestrator, for the tokens after those that are committed; the answer
        says how many these are. Repeating it is harmless. Raises InvalidRequestError, NotFoundError, FinishedError among others, and
        OverloadedError where no token was committed since the last change."""
        update = build_update(request_id, change)
        return to_sampling_in_force(
            await _heard(self._stub.UpdateSampling(update, timeout=timeout, metadata=self._metadata))
        )

    def _start(self, request: orchestrator_pb2.GenerateRequest, timeout: float | None) -> AsyncGeneration:
        call = self._stub.Generate(request, timeout=timeout, metadata=self._metadata)
        return AsyncGeneration(call, max(request.n, 1))

    async def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
