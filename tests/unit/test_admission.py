"""What finds no room is refused before anything is done for it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.admission import Admission
from orchestrator.errors import Overloaded, Unavailable


async def test_no_more_is_read_than_can_run_or_wait() -> None:
    admission = Admission(max_running=2, max_waiting=1, max_waiting_seconds=30)
    with admission.planning(), admission.planning():
        async with admission.place():
            with pytest.raises(Overloaded, match="1 requests run and 0 wait"), admission.planning():
                raise AssertionError("there was room")
        with admission.planning():
            pass
    async with admission.place(), admission.place():
        waiter = asyncio.create_task(admission.place().__aenter__())
        await asyncio.sleep(0)
        assert admission.waiting == 1
        with pytest.raises(Overloaded) as caught, admission.planning():
            raise AssertionError("there was room")
        assert (caught.value.reason, caught.value.retry_after) == ("QUEUE_FULL", 1.0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
    with admission.planning():
        pass


async def test_nothing_is_read_while_shutting_down() -> None:
    admission = Admission(max_running=1, max_waiting=0, max_waiting_seconds=30)
    assert await admission.drain(30)
    with pytest.raises(Unavailable), admission.planning():
        raise AssertionError("nothing may begin")
