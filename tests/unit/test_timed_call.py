"""Who reads has so long for each response, and is not charged with what a response waits for before."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.call import CallAround, GrpcCall
from orchestrator.deadlines import Deadlines, Limit
from orchestrator.errors import Overloaded
from orchestrator.several import SharedCall
from orchestrator.timed_call import TimedCall
from orchestrator.tokenwise_call import TokenwiseCall
from tandem.v1 import orchestrator_pb2 as api


class Counted(Deadlines):
    """Counts the limits that were set, in an hour each."""

    begun = 0

    def within(self, seconds: float) -> Limit:
        self.begun += 1
        return super().within(seconds)


class Reader(CallAround):
    """Reads as soon as it may, and notes how many limits were set by then, and how many are open."""

    def __init__(self, deadlines: Counted) -> None:
        super().__init__(GrpcCall(None))  # type: ignore[arg-type]
        self.deadlines = deadlines
        self.may = asyncio.Event()
        self.seen: list[tuple[int, int]] = []

    async def write(self, response: api.GenerateResponse) -> None:
        self.seen.append((self.deadlines.begun, len(self.deadlines._open)))
        await self.may.wait()


def of_tokens(count: int) -> api.GenerateResponse:
    return api.GenerateResponse(tokens=[api.GeneratedToken(token_id=each) for each in range(count)])


async def test_each_token_that_is_sent_alone_has_its_own_time() -> None:
    reader = Reader(Counted())
    reader.may.set()
    await TokenwiseCall(TimedCall(reader, reader.deadlines, 3_600.0)).write(of_tokens(3))
    assert reader.seen == [(1, 1), (2, 1), (3, 1)]


async def test_waiting_for_another_completion_is_not_the_readers_time() -> None:
    reader = Reader(Counted())
    shared = SharedCall(TimedCall(reader, reader.deadlines, 3_600.0), 2)
    writes = [asyncio.create_task(shared.of(index).write(of_tokens(1))) for index in (0, 1)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert reader.seen == [(1, 1)]
    assert reader.deadlines.begun == 1
    reader.may.set()
    await asyncio.gather(*writes)
    assert reader.seen == [(1, 1), (2, 1)]


async def test_who_does_not_read_is_told_so() -> None:
    reader = Reader(Counted())
    with pytest.raises(Overloaded) as caught:
        await TimedCall(reader, reader.deadlines, 0.01).write(of_tokens(1))
    assert caught.value.reason == "READER_TOO_SLOW"
