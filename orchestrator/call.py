"""A call of the public API as the rest of the orchestrator sees it, whichever face it came through."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

import grpc.aio

from tandem.v1 import orchestrator_pb2 as api

from .errors import Context


class Call(Protocol):
    """The near end of a call. Its task is cancelled when the caller is gone."""

    @property
    def may_return(self) -> bool:
        """Whether a caller who is gone may come back for the rest."""

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What came with the request, names in lower case."""

    def certificate_name(self) -> str:
        """The names in the certificate that the caller showed; empty where it showed none."""

    def seconds_left(self) -> float | None:
        """Until the caller's deadline; None where it has none."""

    async def write(self, response: api.GenerateResponse) -> None:
        """Sends one response; returns late where the caller reads late."""


class CallAround:
    """A call that passes on to another one what a subclass doesn't change."""

    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def may_return(self) -> bool:
        """As the call has it."""
        return self._call.may_return

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Those of the call."""
        return self._call.metadata()

    def certificate_name(self) -> str:
        """That of the call."""
        return self._call.certificate_name()

    def seconds_left(self) -> float | None:
        """Those of the call."""
        return self._call.seconds_left()

    async def write(self, response: api.GenerateResponse) -> None:
        """To the call."""
        await self._call.write(response)


class GrpcCall:
    """Over gRPC."""

    may_return = True

    def __init__(self, context: Context) -> None:
        self._context = context
        self._opened = False

    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """The call's metadata."""
        return self._context.invocation_metadata() or ()

    def certificate_name(self) -> str:
        """The peer identities that gRPC checked."""
        if self._context.peer_identity_key() is None:
            return ""
        return ",".join(sorted(name.decode(errors="replace") for name in self._context.peer_identities() or ()))

    def seconds_left(self) -> float | None:
        """By the deadline that came with the call."""
        return self._context.time_remaining()

    async def write(self, response: api.GenerateResponse) -> None:
        """One message of the stream. Raises CancelledError where the call is over."""
        try:
            if not self._opened:
                self._opened = True
                # Else it goes with the first message, and while that is unread no status can be sent.
                await self._context.send_initial_metadata(())
            await self._context.write(response)
        except grpc.aio.InternalError as broken:
            # gRPC ends a write that waits for its reader before it cancels the task: which of both a task sees first is chance.
            raise asyncio.CancelledError from broken
