"""The client for ordinary code: it waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol, Self

import grpc

from tandem.transport_security import ClientFiles
from tandem.v1 import orchestrator_pb2, orchestrator_pb2_grpc

from .errors import ProtocolError, to_tandem_error
from .messages import build_request, build_update, to_chunk, to_sampling_in_force
from .values import Chunk, GenerationOptions, Prompt, SamplingChange, SamplingInForce


class _Call(Protocol):
    """The part of a gRPC call that is used here."""

    def __next__(self) -> orchestrator_pb2.GenerateResponse: ...

    def cancel(self) -> bool: ...


class Generation(Iterator[Chunk]):
    """A running generation: iterate over its chunks, or cancel it. As a context manager it is cancelled when it is left."""

    def __init__(self, call: _Call, completions: int = 1) -> None:
        self._call = call
        self._unfinished = completions

    def __next__(self) -> Chunk:
        try:
            chunk = to_chunk(next(self._call))
        except StopIteration:
            if self._unfinished > 0:
                raise ProtocolError(grpc.StatusCode.INTERNAL, "the stream ended before the generation did") from None
            raise
        except grpc.RpcError as error:
            raise to_tandem_error(error) from error
        self._unfinished -= chunk.finish is not None
        return chunk

    def cancel(self) -> None:
        """Ends the call; the server drops the request. Harmless when it is over."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()


class TandemClient:
    """One connection to an orchestrator; safe to share between threads."""

    def __init__(self, address: str, *, token: str = "", tls: ClientFiles = ClientFiles()) -> None:  # noqa: B008 - frozen
        """`token` names the caller, where the orchestrator asks for one; `tls` has a CA where it speaks TLS."""
        self.address = address
        # Local addresses must not go through a proxy that the environment may name.
        options = [("grpc.enable_http_proxy", 0)]
        credentials = tls.credentials()
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        options: GenerationOptions | None = None,
        *,
        request_id: str = "",
        timeout: float | None = None,
    ) -> Generation:
        """Starts a generation. What the server says is raised by the iteration, as TandemError; what can't be sent at all here, as
        ValueError or TypeError."""
        request = build_request(prompt, options or GenerationOptions(), request_id)
        return Generation(self._stub.Generate(request, timeout=timeout, metadata=self._metadata), max(request.n, 1))

    def resume(self, request_id: str, token_offset: int, *, timeout: float | None = None) -> Generation:
        """Goes on with a request, on any orchestrator, behind the tokens that the caller has. Errors are raised by the
        iteration: NotFoundError, and InvalidRequestError where fewer tokens are committed, among them."""
        request = orchestrator_pb2.GenerateRequest(request_id=request_id, token_offset=token_offset)
        return Generation(self._stub.Generate(request, timeout=timeout, metadata=self._metadata))

    def update_sampling(
        self, request_id: str, change: SamplingChange, *, timeout: float | None = None
    ) -> SamplingInForce:
        """Changes the sampling of a running request, on any orchestrator, for the tokens after those that are committed; the answer
        says how many these are. Repeating it is harmless. Raises InvalidRequestError, NotFoundError, FinishedError among others, and
        OverloadedError where no token was committed since the last change."""
        try:
            response = self._stub.UpdateSampling(
                build_update(request_id, change), timeout=timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise to_tandem_error(error) from error
        return to_sampling_in_force(response)

    def close(self) -> None:
        """Closes the connection; running generations are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
