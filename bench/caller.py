"""A caller of the public API that notes when each response arrives, and looks into it only afterwards."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from tandem.v1 import orchestrator_pb2 as api

LONGEST_SECONDS = 600.0
GENERATE = "/tandem.v1.OrchestratorService/Generate"


@dataclass(frozen=True, slots=True)
class Heard:
    """One generation: a response, and so an arrival, for each round."""

    asked: float
    """Seconds on this process's clock, like the arrivals."""
    arrivals: tuple[float, ...]
    tokens: tuple[int, ...]
    """Tokens of each response."""
    start: api.GenerationStart
    finish: api.GenerationFinish
    text: str
    token_ids: tuple[int, ...] = ()

    @property
    def first_token_seconds(self) -> float:
        """Time to the first response."""
        return self.arrivals[0] - self.asked

    def intervals(self, skip_first: int, skip_last: int) -> list[float]:
        """Seconds between responses, without so many of the first and the last ones."""
        kept = self.arrivals[skip_first : len(self.arrivals) - skip_last]
        return [later - earlier for earlier, later in itertools.pairwise(kept)]

    def full_rounds(self, gamma: int, max_tokens: int) -> tuple[int, int, float]:
        """Rounds, their tokens and their seconds: those after the first response whose block was not cut short by the
        end of the completion."""
        known = list(itertools.accumulate(self.tokens))
        ends = self.finish.reason != api.FINISH_REASON_LENGTH
        last = max((index for index in range(1, len(known)) if known[index - 1] + gamma + 1 <= max_tokens), default=0)
        if ends and last == len(known) - 1:
            last -= 1  # this round's tokens end with the completion
        if last < 1:
            return 0, 0, 0.0
        return last, known[last] - known[0], self.arrivals[last] - self.arrivals[0]


async def generate(channel: grpc.aio.Channel, request: api.GenerateRequest) -> Heard:
    """Runs one request to its end."""
    # No deserializer: with many requests at once the caller's own work would be measured along.
    method: Any = channel.unary_stream(GENERATE, request_serializer=api.GenerateRequest.SerializeToString)
    arrivals: list[float] = []
    received: list[bytes] = []
    asked = time.perf_counter()
    async for raw in method(request, timeout=LONGEST_SECONDS):
        arrivals.append(time.perf_counter())
        received.append(raw)
    responses = [api.GenerateResponse.FromString(raw) for raw in received]
    return Heard(
        asked=asked,
        arrivals=tuple(arrivals),
        tokens=tuple(len(response.tokens) for response in responses),
        start=responses[0].start,
        finish=responses[-1].finish,
        text="".join(response.text for response in responses),
        token_ids=tuple(token.token_id for response in responses for token in response.tokens),
    )


async def generate_together(channel: grpc.aio.Channel, requests: Sequence[api.GenerateRequest]) -> list[Heard]:
    """Runs requests at the same time."""
    return list(await asyncio.gather(*(generate(channel, request) for request in requests)))
