"""A call whose caller has so long to read each response."""

from __future__ import annotations

from tandem.v1 import orchestrator_pb2 as api

from .call import Call, CallAround
from .deadlines import Deadlines
from .errors import Overloaded


class TimedCall(CallAround):
    """Stands next to the call itself: what responses wait for before they are sent, such as their turn, is not the reader's time."""

    def __init__(self, call: Call, deadlines: Deadlines, seconds: float) -> None:
        super().__init__(call)
        self._deadlines = deadlines
        self._seconds = seconds

    async def write(self, response: api.GenerateResponse) -> None:
        """Sends; raises Overloaded where it takes too long."""
        try:
            with self._deadlines.within(self._seconds):
                await self._call.write(response)
        except TimeoutError:
            raise Overloaded("the stream was left unread for too long", "READER_TOO_SLOW") from None
