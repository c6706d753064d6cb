"""A call whose new tokens count towards its caller's budget."""

from __future__ import annotations

from collections.abc import Callable

from tandem.v1 import orchestrator_pb2 as api

from .call import Call, CallAround


class MeteredCall(CallAround):
    """Tells `spend` of the tokens of each response before it is sent. Those that are sent again were paid for."""

    def __init__(self, call: Call, spend: Callable[[int], None]) -> None:
        super().__init__(call)
        self._spend = spend

    async def write(self, response: api.GenerateResponse) -> None:
        """Counts, and sends."""
        self._spend(sum(token.kind != api.TOKEN_KIND_REPLAYED for token in response.tokens))
        await self._call.write(response)
