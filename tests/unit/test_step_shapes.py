"""Which shape a step is padded to, and which steps run as they are."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.feed import Feed
from tandem.engine.step_shapes import MOST_TOKENS, StepShape, StepShapes


def feed(slot: int, size: int, start: int = 0, rows: int = 1) -> Feed:
    return Feed(slot, start, np.zeros(size, dtype=np.uint32), rows)


def test_sizes_double_up_to_the_limits() -> None:
    shapes = StepShapes(slots=32, longest_feed=17, longest_rows=17, max_length=1500).all()
    assert sorted({shape.rows for shape in shapes}) == [1, 2, 4, 8, 16, 32]
    assert sorted({shape.width for shape in shapes}) == [1, 2, 4, 8, 17], "16 is nearly 17"
    assert sorted({shape.columns for shape in shapes}) == [256, 512, 1024, 1500]
    assert len(set(shapes)) == len(shapes)
    assert max(shape.tokens for shape in shapes) <= MOST_TOKENS
    assert shapes[0].columns == 1500, "the largest is first"
    tiny = StepShapes(slots=1, longest_feed=17, longest_rows=1, max_length=5).all()
    assert {(shape.rows, shape.columns) for shape in tiny} == {(1, 5)}
    assert max(shape.width for shape in tiny) == 5


@pytest.mark.parametrize(
    ("feeds", "expected"),
    [
        ([feed(0, 1)], StepShape(1, 1, 256)),
        ([feed(3, 1)], StepShape(4, 1, 256)),
        ([feed(0, 1, 255), feed(1, 3, rows=3)], StepShape(2, 4, 256)),
        ([feed(1, 1, 256), feed(0, 9)], StepShape(2, 17, 512)),
        ([feed(2, 17, 1483), feed(7, 2)], StepShape(8, 17, 1500)),
        ([feed(slot, 1) for slot in (1, 9, 30, 31)], None),
        ([feed(slot, 1) for slot in range(8, 32, 3)], StepShape(32, 1, 256)),
        ([feed(4, 1)], None),
        ([feed(0, 18)], None),
        ([feed(slot, 17) for slot in range(31)], None),
        ([feed(0, 6, rows=6)], StepShape(1, 8, 256)),
    ],
)
def test_the_smallest_that_holds_the_feeds(feeds: list[Feed], expected: StepShape | None) -> None:
    shapes = StepShapes(slots=32, longest_feed=17, longest_rows=17, max_length=1500)
    found = shapes.holding(feeds)
    assert found == expected
    assert found is None or found in shapes.all()


def test_a_draft_has_room_for_one_row_of_logits() -> None:
    shapes = StepShapes(slots=4, longest_feed=17, longest_rows=1, max_length=64)
    assert shapes.holding([feed(0, 2, rows=1), feed(1, 4, rows=0)]) == StepShape(2, 4, 64)
    assert shapes.holding([feed(0, 2, rows=2)]) is None


def test_whoever_is_in_a_step_there_are_four_rows_for_a_feed_at_most() -> None:
    shapes = StepShapes(slots=24, longest_feed=6, longest_rows=6, max_length=1024)
    choose = np.random.default_rng(1)
    found = 0
    for _ in range(2000):
        slots = choose.choice(24, size=choose.integers(1, 12), replace=False)
        feeds = [feed(int(slot), int(choose.integers(1, 7)), int(choose.integers(0, 1018))) for slot in slots]
        shape = shapes.holding(feeds)
        if shape is None:
            continue
        found += 1
        assert shape.rows <= 4 * len(feeds)
        assert all(each.slot < shape.rows and each.token_ids.size <= shape.width for each in feeds)
        assert all(each.start + each.token_ids.size <= shape.columns for each in feeds)
    assert found > 500
