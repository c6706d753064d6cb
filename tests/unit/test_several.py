"""What becomes of the other completions of a call when one of them fails."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.call import GrpcCall
from orchestrator.errors import Aborted, AlreadyKnown, Overloaded, RequestFailed, Unavailable
from orchestrator.several import SharedCall


@pytest.mark.parametrize(
    ("failure", "kept"),
    [
        (AlreadyKnown("taken", "REQUEST_ID_TAKEN"), False),
        (Overloaded("full", "QUEUE_FULL", 1.0), False),
        (Unavailable("away", "TARGET_UNAVAILABLE", 1.0), True),
        (Aborted("resumed", "TAKEN_OVER"), True),
    ],
)
async def test_only_what_can_be_resumed_is_kept(failure: RequestFailed, kept: bool) -> None:
    shared = SharedCall(GrpcCall(None), 3)  # type: ignore[arg-type]
    may_return: list[bool] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise failure

    async def runs(index: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            may_return.append(shared.of(index).may_return)

    assert shared.of(0).may_return
    with pytest.raises(type(failure)) as raised:
        await shared.run([runs(0), fails(), runs(2)])
    assert raised.value is failure
    assert may_return == [kept, kept]
