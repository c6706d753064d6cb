"""Slots are handed out lowest first and come back."""

from tandem.engine.slot_cache import SlotPool


def test_lowest_free_slot_first() -> None:
    pool = SlotPool(4)
    assert [pool.acquire() for _ in range(5)] == [0, 1, 2, 3, None]
    pool.release(2)
    pool.release(0)
    assert pool.used == 2
    assert [pool.acquire() for _ in range(3)] == [0, 2, None]
