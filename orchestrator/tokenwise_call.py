"""A call that gets each token in a response of its own."""

from __future__ import annotations

from tandem.v1 import orchestrator_pb2 as api

from .call import CallAround


class TokenwiseCall(CallAround):
    """Takes responses apart: what is there once for a round stands where it begins, and the end where it ends."""

    async def write(self, response: api.GenerateResponse) -> None:
        """Sends as many responses as there are tokens."""
        if len(response.tokens) <= 1:
            await self._call.write(response)
            return
        last = len(response.tokens) - 1
        for place, token in enumerate(response.tokens):
            part = api.GenerateResponse(tokens=[token], text=token.text, index=response.index)
            if place == 0:
                part.draft_tokens = response.draft_tokens
                if response.HasField("start"):
                    part.start.CopyFrom(response.start)
            if place == last and response.HasField("finish"):
                part.finish.CopyFrom(response.finish)
            await self._call.write(part)
