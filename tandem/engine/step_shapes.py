"""The few shapes of compiled forwards: a step of short feeds is padded to the smallest one that holds it.

Row i of a shape is slot i, so the cache is read as a view, whoever is in the batch, and no slot is written but in its own
columns: a row without a feed writes to the trash column of its slot, as the padding within a row does. The pool gives the
lowest slots first, so the rows of a shape are mostly in use; a step that would leave most of them idle is run as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.feed import Feed

MOST_TOKENS = 512
"""Padded tokens of the largest shape. A larger forward keeps a device busy by itself."""
_FEWEST_COLUMNS = 256
_MOST_IDLE = 4
"""Rows of a shape for each feed, at most: others run for nothing, and a device reads their part of the cache."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """One shape."""

    rows: int
    """The first slots."""
    width: int
    """Tokens of each row."""
    columns: int
    """Of the cache, that the rows may look at."""

    @property
    def tokens(self) -> int:
        """Padding included."""
        return self.rows * self.width


class StepShapes:
    """The shapes for an engine, in doubling sizes up to its limits."""

    def __init__(self, slots: int, longest_feed: int, longest_rows: int, max_length: int) -> None:
        """`longest_rows`: most logits that are wanted of a feed."""
        self._rows = _doubling(1, slots)
        self._widths = _doubling(1, min(longest_feed, max_length))
        self._columns = _doubling(_FEWEST_COLUMNS, max_length)
        self.longest_rows = longest_rows

    def all(self) -> list[StepShape]:
        """The largest first."""
        return [
            StepShape(rows, width, columns)
            for columns in reversed(self._columns)
            for width in reversed(self._widths)
            for rows in reversed(self._rows)
            if rows * width <= MOST_TOKENS
        ]

    def holding(self, feeds: Sequence[Feed]) -> StepShape | None:
        """The smallest shape that holds the feeds; None where there is none that suits them."""
        rows = _at_least(self._rows, 1 + max(feed.slot for feed in feeds))
        width = _at_least(self._widths, max(feed.token_ids.size for feed in feeds))
        columns = _at_least(self._columns, max(feed.start + feed.token_ids.size for feed in feeds))
        if rows is None or width is None or columns is None:
            return None
        too_few = rows > _MOST_IDLE * len(feeds)
        if too_few or rows * width > MOST_TOKENS or max(feed.rows for feed in feeds) > self.longest_rows:
            return None
        return StepShape(rows, width, columns)

    def varying(self) -> tuple[bool, bool, bool]:
        """Whether there is more than one size above 1 of rows, widths and columns."""
        rows, widths, columns = (
            sum(size > 1 for size in sizes) > 1 for sizes in (self._rows, self._widths, self._columns)
        )
        return rows, widths, columns


def _doubling(first: int, last: int) -> list[int]:
    """From `first` to `last`, without a size that is nearly the last one."""
    sizes = []
    while 4 * first <= 3 * last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _at_least(sizes: Sequence[int], wanted: int) -> int | None:
    return next((size for size in sizes if size >= wanted), None)
