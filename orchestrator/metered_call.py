"""A call whose new tokens count towards its caller's budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tandem.v1 import orchestrator_pb2 as api

from .call import Call


class MeteredCall:
    """Tells `spend` of the tokens of each response before it is sent. Those that are sent again were paid for."""

    def __init__(self, call: Call, spend: Callable[[int], None]) -> None:
        self._call = call
        self._spend = spend

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
        """Counts, and sends."""
        self._spend(sum(token.kind != api.TOKEN_KIND_REPLAYED for token in response.tokens))
        await self._call.write(response)
