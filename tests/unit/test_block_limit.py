"""How long a block may be, late by late and round by round."""

from __future__ import annotations

from orchestrator.block_limit import BlockLimit


def _blocks_until_longer(limit: BlockLimit, longest: int) -> tuple[int, int]:
    """All in time: how many it takes until longer ones are tried, and how long these are."""
    for count in range(1, 1000):
        longer = limit.in_time(limit.of(longest), longest)
        if longer is not None:
            return count, longer
    raise AssertionError("no longer block was ever tried")


def test_each_late_block_halves_the_next_until_none_is_left() -> None:
    limit, asked, limits = BlockLimit(), 9, []
    assert limit.of(9) == 9
    while asked:
        asked = limit.late(limit.of(9))
        limits.append(asked)
    assert limits == [4, 2, 1, 0]
    assert limit.of(9) == 1, "when it is asked again"


def test_blocks_in_time_make_them_longer_again() -> None:
    limit = BlockLimit()
    assert limit.in_time(5, 5) is None, "nothing to lengthen"
    for asked in (5, 2, 1):
        assert limit.of(5) == asked
        limit.late(asked)
    assert [_blocks_until_longer(limit, 5) for _ in range(3)] == [(4, 2), (4, 4), (4, 5)]
    assert all(limit.in_time(5, 5) is None for _ in range(4))
    assert limit.tokens is None


def test_a_longer_block_that_is_late_again_is_tried_less_often() -> None:
    limit, counts = BlockLimit(), []
    limit.late(4)
    for _ in range(7):
        count, longer = _blocks_until_longer(limit, 4)
        counts.append(count)
        assert longer == 4
        assert limit.late(limit.of(4)) == 2
    assert counts == [4, 8, 16, 32, 64, 64, 64]


def test_a_length_that_holds_is_no_trial_any_more() -> None:
    """What is late long afterwards is late for the first time."""
    limit = BlockLimit()
    limit.late(4)
    for _ in range(3):
        _blocks_until_longer(limit, 4)
        limit.late(4)
    assert _blocks_until_longer(limit, 4) == (32, 4)
    assert all(limit.in_time(4, 4) is None for _ in range(4))
    limit.late(4)
    assert _blocks_until_longer(limit, 4) == (4, 4)


def test_a_round_that_wants_little_lifts_no_limit() -> None:
    """As with adaptive gamma: the next one may want the longest block, which was late."""
    limit = BlockLimit()
    for asked in (16, 8, 4, 2):
        limit.late(asked)
    for _ in range(100):
        limit.in_time(limit.of(2), 16)
    assert limit.of(16) == 4, "one step beyond what has come in time"
    limit.late(2)
    assert limit.of(16) == 1
    assert _blocks_until_longer(limit, 16) == (4, 2), "the trial of 4 was not late: there was none"


def test_blocks_that_are_short_for_another_reason_say_nothing() -> None:
    """As where less is left to generate."""
    limit = BlockLimit()
    limit.late(8)
    assert all(limit.in_time(3, 8) is None for _ in range(100))
    assert limit.of(8) == 4


def test_a_request_that_may_ask_for_less_than_before_is_not_held_by_a_limit_beyond_that() -> None:
    limit = BlockLimit()
    limit.late(8)
    assert all(limit.in_time(2, 2) is None for _ in range(4))
    assert limit.tokens is None
