"""Which slot a session gets, and what it need not run."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tandem.engine.session import Session
from tandem.engine.slot_pool import LEAST_SHARED_TOKENS, Move, Seat, SlotPool, shared_length
from tandem.wire import IdArray
from tests.engine.models import random_ids

LONG = LEAST_SHARED_TOKENS + 20


def session(tokens: IdArray, salt: str = "") -> Session:
    made = Session("a", salt)
    made.tokens.extend(tokens)
    made.prefix_length = tokens.size
    return made


def seat(pool: SlotPool, made: Session) -> Seat:
    found = pool.acquire(made)
    assert found is not None
    made.slot, made.cached_length = found.slot, found.shared
    return found


def finish(pool: SlotPool, made: Session) -> None:
    made.cached_length = made.tokens.length
    pool.release(made)


def test_lowest_empty_slot_first() -> None:
    pool = SlotPool(4)
    short = [session(random_ids(number, 3)) for number in range(4)]
    assert [seat(pool, made).slot for made in short] == [0, 1, 2, 3]
    assert pool.acquire(session(random_ids(9, 3))) is None
    pool.release(short[2])
    pool.release(short[0])
    assert pool.used == 2
    assert [seat(pool, session(random_ids(5, 3))).slot for _ in range(2)] == [0, 2]


def test_what_was_of_use_longest_ago_makes_room() -> None:
    pool = SlotPool(3)
    prompts = [random_ids(number, LONG) for number in range(3)]
    for made in [session(prompt) for prompt in prompts]:
        seat(pool, made)
    for slot in range(3):
        finish(pool, pool._held[slot])
    beginning = np.concatenate([prompts[0][: LEAST_SHARED_TOKENS + 1], random_ids(7, 4)])
    # Its own contents were just of use and go to slot 1, whose are the oldest; they are shared where they lay.
    assert seat(pool, session(beginning)) == Seat(0, LEAST_SHARED_TOKENS + 1, (Move(0, 1, 0, LONG),))
    assert shared_by(pool, prompts[1]) == 0
    assert shared_by(pool, prompts[0]) == LONG - 1
    assert shared_by(pool, prompts[2]) == LONG - 1
    # The next one's place is slot 1, whose contents were of use later than those of slot 2.
    assert seat(pool, session(random_ids(8, LONG))) == Seat(1, 0, (Move(1, 2, 0, LONG),))
    assert shared_by(pool, prompts[2]) == 0
    assert shared_by(pool, prompts[0]) == LONG - 1
    assert seat(pool, session(random_ids(9, LONG))) == Seat(2, 0)
    assert shared_by(pool, prompts[0]) == LEAST_SHARED_TOKENS + 1  # of the session that runs


def test_what_could_not_be_copied_is_not_counted_on() -> None:
    pool = SlotPool(3)
    prompt = random_ids(0, LONG)
    made = session(prompt)
    seat(pool, made)
    finish(pool, made)
    newcomer = session(random_ids(1, LONG))
    found = pool.acquire(newcomer)
    assert found is not None
    [move] = found.moves  # the old prompt makes room
    newcomer.slot = found.slot
    pool.release(newcomer)
    pool.forget([move.target])
    assert shared_by(pool, prompt) == 0
    assert pool.used == 0
    assert sorted(seat(pool, session(random_ids(number, 3))).slot for number in range(3)) == [0, 1, 2]


def shared_by(pool: SlotPool, tokens: IdArray) -> int:
    """How much of a prompt the pool could share now."""
    return pool._most_shared(session(tokens))[1]


def test_a_prompt_that_goes_on_where_a_slot_ends_takes_that_slot() -> None:
    pool = SlotPool(4)
    first = session(random_ids(1, LONG))
    seat(pool, first)
    finish(pool, first)
    assert seat(pool, session(np.concatenate([first.tokens.view(0, LONG), random_ids(2, 5)]))) == Seat(0, LONG)


def test_a_running_session_is_copied_from_and_one_token_is_always_left_to_run() -> None:
    pool = SlotPool(4)
    running = session(random_ids(1, LONG))
    seat(pool, running)
    running.cached_length = LONG - 2
    assert seat(pool, session(random_ids(1, LONG))) == Seat(1, LONG - 2, (Move(0, 1, 0, LONG - 2),))
    running.cached_length = LONG
    assert seat(pool, session(random_ids(1, LONG))) == Seat(2, LONG - 1, (Move(0, 2, 0, LONG - 1),))


def test_a_prefill_takes_over_what_another_has_run_meanwhile() -> None:
    pool = SlotPool(4)
    one, other = session(random_ids(1, 3 * LONG)), session(random_ids(1, 3 * LONG))
    seat(pool, one)
    seat(pool, other)
    assert pool.more_shared(other) is None
    one.cached_length = LONG
    assert pool.more_shared(other) == Move(0, 1, 0, LONG)
    other.cached_length = LONG + 1
    assert pool.more_shared(other) is None
    assert pool.more_shared(one) is None  # one token is not worth it


def test_without_reuse_nothing_is_kept() -> None:
    pool = SlotPool(2, reuse=False)
    for _ in range(3):
        made = session(random_ids(1, LONG))
        assert seat(pool, made) == Seat(0, 0)
        finish(pool, made)


@pytest.mark.parametrize("seed", range(5))
def test_against_a_model(seed: int) -> None:
    """Sessions that come and go at random, against the books of what each slot holds: what is shared is the longest that
    there is, of equal tokens and salt, no slot has two holders, and none that is held is written to."""
    chooser = random.Random(seed)
    pool, held = SlotPool(5), dict[int, Session]()
    stems = [random_ids(seed, 60) for seed in range(3)]
    contents: dict[int, tuple[str, IdArray]] = {}
    for _ in range(400):
        if held and (len(held) == 5 or chooser.random() < 0.5):
            slot = chooser.choice(sorted(held))
            made = held.pop(slot)
            made.cached_length = chooser.randint(made.cached_length, made.tokens.length)
            contents[slot] = (made.salt, made.tokens.view(0, made.cached_length).copy())
            pool.release(made)
            continue
        stem = chooser.choice(stems)[: chooser.randint(1, 60)]
        made = session(np.concatenate([stem, random_ids(chooser.randint(0, 99), 4)]), chooser.choice(["", "x"]))
        for slot, other in held.items():
            contents[slot] = (other.salt, other.tokens.view(0, other.cached_length).copy())
        wanted = made.tokens.view(0, made.prefix_length - 1)
        known = [contents[slot] for slot in (*held, *pool._kept)]
        best = max((shared_length(wanted, ids) for salt, ids in known if salt == made.salt), default=0)
        found = seat(pool, made)
        assert found.slot == min(set(range(5)) - set(held))
        assert found.shared == (best if best >= LEAST_SHARED_TOKENS else 0)
        for move in found.moves:
            assert move.target not in held
            assert move.end <= contents[move.source][1].size
            contents[move.target] = (contents[move.source][0], contents[move.source][1][: move.end])
        if found.shared:
            assert contents[found.slot][0] == made.salt
            assert (contents[found.slot][1][: found.shared] == wanted[: found.shared]).all()
        held[found.slot] = made
        for slot, kept in pool._kept.items():
            assert slot not in held
            assert contents[slot][0] == kept.salt
            assert (contents[slot][1] == kept.token_ids).all()
        assert sorted([*pool._empty, *pool._kept, *held]) == list(range(5))
