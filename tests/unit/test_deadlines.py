"""Limits of waits that share one timer."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.deadlines import Deadlines

LONG = 3600.0


async def test_what_takes_too_long_is_broken_off() -> None:
    deadlines = Deadlines()
    for _ in range(2):  # the timer is set again
        with pytest.raises(TimeoutError), deadlines.within(0.01):
            await asyncio.Event().wait()
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_what_ends_in_time_is_left_alone() -> None:
    deadlines = Deadlines()
    for _ in range(3):
        with deadlines.within(0.01):
            pass
    with pytest.raises(TimeoutError), deadlines.within(0.05):
        await asyncio.Event().wait()  # meets the timer of those before


async def test_errors_pass() -> None:
    with pytest.raises(KeyError), Deadlines().within(LONG):
        raise KeyError


@pytest.mark.parametrize("first", [LONG, 0.01])
async def test_each_has_its_own_end(first: float) -> None:
    deadlines, forever, entered = Deadlines(), asyncio.Event(), [asyncio.Event(), asyncio.Event()]

    async def wait(index: int, seconds: float) -> str:
        try:
            with deadlines.within(seconds):
                entered[index].set()
                await forever.wait()
        except TimeoutError:
            return "late"
        return "in time"

    one = asyncio.create_task(wait(0, first))
    await entered[0].wait()
    other = asyncio.create_task(wait(1, LONG + 0.01 - first))
    await entered[1].wait()
    done, [left] = await asyncio.wait((one, other), return_when=asyncio.FIRST_COMPLETED)
    assert {task.result() for task in done} == {"late"}
    forever.set()
    assert await left == "in time"


async def test_a_cancellation_is_no_timeout() -> None:
    deadlines, entered = Deadlines(), asyncio.Event()

    async def wait() -> None:
        with deadlines.within(LONG):
            entered.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await entered.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_cancellation_that_comes_with_the_end_is_passed_on() -> None:
    deadlines, entered = Deadlines(), asyncio.Event()

    async def wait() -> None:
        with deadlines.within(LONG):
            entered.set()
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await entered.wait()
    [limit] = deadlines._open
    limit.expire()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
