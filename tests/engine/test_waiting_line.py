"""Whose turn it is for a slot: an orchestrator that floods a worker waits for what it holds itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.engine.session import Session
from tandem.engine.stream import Stream
from tandem.engine.waiting_line import SlotShares, WaitingLimits, WaitingLine


def stream() -> Stream:
    return Stream(lambda _: None)


def join(line: WaitingLine, owner: Stream, *names: str, now: float = 0.0) -> list[Session]:
    sessions = [Session(name) for name in names]
    for session in sessions:
        line.join(owner, session, now)
    return sessions


def seat_first(line: WaitingLine, shares: SlotShares) -> tuple[Stream, str]:
    found = line.first()
    assert found is not None
    owner, session = found
    line.leave(owner, session)
    shares.took(owner)
    return owner, session.request_id


def test_within_a_stream_first_come_first_served() -> None:
    shares = SlotShares()
    line = WaitingLine(WaitingLimits(9), shares)
    only = stream()
    join(line, only, "a", "b", "c")
    assert [seat_first(line, shares)[1] for _ in range(3)] == ["a", "b", "c"]
    assert (line.first(), len(line)) == (None, 0)
    assert shares.held(only) == 3


def test_the_stream_with_the_fewest_slots_comes_first() -> None:
    shares = SlotShares()
    line = WaitingLine(WaitingLimits(99), shares)
    many, few = stream(), stream()
    join(line, many, "m0", "m1", "m2", "m3", "m4")
    assert [seat_first(line, shares)[1] for _ in range(3)] == ["m0", "m1", "m2"]
    join(line, few, "f0", "f1", "f2", "f3")
    order = [seat_first(line, shares)[1] for _ in range(6)]
    assert order[:3] == ["f0", "f1", "f2"]
    assert sorted(order[3:5]) == ["f3", "m3"]
    assert (shares.held(many), shares.held(few)) == (5, 4)


def test_of_equals_the_one_whose_last_seat_was_longest_ago() -> None:
    """A single slot, which each gives back at once: nobody ever holds more than another, and yet they take turns."""
    shares = SlotShares()
    line = WaitingLine(WaitingLimits(99), shares)
    streams = {name: stream() for name in ("a", "b", "c")}
    for name, count in (("a", 8), ("b", 3), ("c", 2)):
        join(line, streams[name], *[f"{name}{number}" for number in range(count)])
    served = []
    while len(line):
        owner, session = seat_first(line, shares)
        shares.gave_back(owner)
        served.append(session)
    assert served == ["a0", "b0", "c0", "a1", "b1", "c1", "a2", "b2", "a3", "a4", "a5", "a6", "a7"]


def test_a_stream_that_holds_all_that_it_may_has_no_turn() -> None:
    shares = SlotShares(most=2)
    line = WaitingLine(WaitingLimits(9), shares)
    many, few = stream(), stream()
    join(line, many, "m0", "m1", "m2")
    assert [seat_first(line, shares)[1] for _ in range(2)] == ["m0", "m1"]
    assert shares.has_all(many)
    assert line.first() is None, "m2 waits, though there may be a slot"
    join(line, few, "f0")
    assert seat_first(line, shares) == (few, "f0")
    shares.gave_back(many)
    assert seat_first(line, shares) == (many, "m2")


def test_the_last_of_the_longest_line_makes_room() -> None:
    line = WaitingLine(WaitingLimits(5), SlotShares())
    many, few, other = stream(), stream(), stream()
    *_, last = join(line, many, "m0", "m1", "m2", "m3", "m4")
    assert line.is_full()
    assert line.last_of_many(many) is None, "nobody makes room for its own orchestrator's next one"
    assert line.last_of_many(few) == (many, last)
    line.leave(many, last)
    join(line, few, "f0")
    victim = line.last_of_many(few)
    assert victim is not None
    assert victim[1].request_id == "m3"
    line.leave(*victim)
    join(line, few, "f1")
    assert line.last_of_many(few) is None, "three and two are as equal as five can be"
    assert line.last_of_many(other) is not None


def test_nobody_makes_room_where_nobody_may_wait() -> None:
    line = WaitingLine(WaitingLimits(0), SlotShares())
    assert line.is_full()
    assert line.last_of_many(stream()) is None


def test_how_long_each_has_waited_is_its_own() -> None:
    line = WaitingLine(WaitingLimits(9), SlotShares())
    one, other = stream(), stream()
    [early] = join(line, one, "early", now=1.0)
    [middle] = join(line, other, "middle", now=2.0)
    join(line, one, "late", now=3.0)
    assert line.came_before(2.0) == [(one, early), (other, middle)]
    line.leave(one, early)
    line.leave(one, early)
    assert early not in line
    assert line.came_before(2.0) == [(other, middle)]
    assert len(line.all()) == len(line) == 2


@pytest.mark.parametrize("seed", range(10))
def test_a_modest_stream_waits_for_few_seats_whatever_a_flood_does(seed: int) -> None:
    """Slots come free at random, and the flood always has its line full: no session of the modest stream, which never wants
    more than half of them, sees more than two seats go to the flood before its own."""
    chooser = random.Random(seed)
    slots, room = chooser.randint(4, 8), chooser.randint(3, 12)
    shares = SlotShares()
    line = WaitingLine(WaitingLimits(room), shares)
    flood, modest = stream(), stream()
    holders: list[Stream] = []
    names = iter(range(10_000))
    overtaken: dict[str, int] = {}
    most, seats = 0, Counter[Stream]()
    for _ in range(2_000):
        while not line.is_full():
            join(line, flood, f"flood{next(names)}")
        if holders.count(modest) + len(overtaken) < 2 and chooser.random() < 0.3:
            victim = line.last_of_many(modest)
            assert victim is not None, "the flood makes room"
            line.leave(*victim)
            [session] = join(line, modest, f"modest{next(names)}")
            overtaken[session.request_id] = 0
        if len(holders) == slots:
            owner = holders.pop(chooser.randrange(slots))
            shares.gave_back(owner)
        owner, name = seat_first(line, shares)
        holders.append(owner)
        seats[owner] += 1
        if owner is modest:
            most = max(most, overtaken.pop(name))
        for waiting in overtaken:
            overtaken[waiting] += owner is flood
    assert most <= 2
    assert min(seats.values()) > 200, "both are served all the time"
