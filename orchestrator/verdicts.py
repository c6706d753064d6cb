"""What a target answers in one message, for several requests, checked at once: a call of numpy takes as long for a few numbers as for a few
thousand.

Together a message's rows are found to be good, or nothing is said of any of them. Then each is checked by itself, which finds what is
wrong, and whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from tandem import wire
from tandem.acceptance import TargetRow, overlaps
from tandem.v1 import target_pb2

from .drafting import PLAIN, Proposed

P_SUM_TOLERANCE = 1e-3


class ReceivedVerdict:
    """One verdict, and the rows of others in its message that can be checked with its own."""

    __slots__ = ("_alike", "_count", "_first", "message", "rows")

    def __init__(self, message: target_pb2.Verdict, proposed: Proposed, alike: dict[int, _Alike]) -> None:
        """`proposed`: what it is on; `alike`: of its message, the rows that came before, by their size in bytes."""
        self.message = message
        self.rows = rows = list(message.rows)  # each walk through a repeated field makes its messages anew
        self._alike: _Alike | None = None
        self._first = self._count = 0
        data = [row.support_probs for row in rows]
        if not data:
            return
        size = len(data[0])
        if len(data[-1]) != size:  # the last one has no support where there is no look-ahead
            del data[-1]
        if size and size % wire.TOKEN_BYTES == 0 and set(map(len, data)) == {size}:
            self._alike = alike.get(size) or alike.setdefault(size, _Alike(size // wire.TOKEN_BYTES))
            self._count = len(data)
            self._first = self._alike.add(rows[: self._count], data, proposed)

    @classmethod
    def alone(cls, message: target_pb2.Verdict, proposed: Proposed = PLAIN) -> ReceivedVerdict:
        """In a message of its own."""
        return cls(message, proposed, {})

    def together(self, sizes: Sequence[int], vocabulary_size: int) -> list[TargetRow]:
        """The first rows, as many as are on supports of one size, which is all but the last one at least; `sizes` are those of all rows'
        supports. None of them where anything is wrong with any in the message, or these are not on what they should be."""
        alike, count = self._alike, self._count
        if alike is None or list(sizes[:count]) != [alike.size] * count:
            return []
        of_all = alike.rows(vocabulary_size)
        return of_all[self._first : self._first + count] if of_all is not None else []


def reader() -> Callable[[Any, Any], ReceivedVerdict | None]:
    """Reads the items of one message; None where one holds an error."""
    alike: dict[int, _Alike] = {}

    def read(item: target_pb2.VerdictItem, proposed: Proposed) -> ReceivedVerdict | None:
        return ReceivedVerdict(item.verdict, proposed, alike) if item.HasField("verdict") else None

    return read


class _Alike:
    """Rows of one message whose supports have one size, `size`. Looked at when all of them are there."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._rows: list[target_pb2.TargetRow] = []
        self._data: list[bytes] = []
        self._proposed: list[tuple[Proposed, int]] = []
        """What they are on, and how many rows are on it."""
        self._vocabulary_size = 0
        """For which the rows were looked at; 0 before."""
        self._checked: list[TargetRow] | None = None

    def add(self, rows: Sequence[target_pb2.TargetRow], data: Sequence[bytes], proposed: Proposed) -> int:
        """Those of one more verdict; returns the number of the first."""
        first = len(self._rows)
        self._rows += rows
        self._data += data
        self._proposed.append((proposed, len(data)))
        return first

    def rows(self, vocabulary_size: int) -> list[TargetRow] | None:
        """All of them; None where something is wrong with any, and for more than one size of the vocabulary."""
        if self._vocabulary_size == 0:
            self._vocabulary_size = vocabulary_size
            self._checked = self._look()
        return self._checked if self._vocabulary_size == vocabulary_size else None

    def _look(self) -> list[TargetRow] | None:
        rows = self._rows
        p = wire.decode_probs(b"".join(self._data), len(rows) * self.size).reshape(len(rows), self.size)
        masses = [row.outside_mass for row in rows]
        tokens = [row.outside_token_id for row in rows]
        totals = np.add.reduce(p, 1).tolist()
        sums = [total + mass - 1.0 for total, mass in zip(totals, masses, strict=True)]
        if not all(abs(excess) <= P_SUM_TOLERANCE for excess in sums):  # NaN is not
            return None
        if min(masses) < 0.0 or max(tokens) >= self._vocabulary_size:
            return None
        dead_ends = [row.dead_end for row in rows]
        return list(map(TargetRow, p, masses, tokens, repeat(None), dead_ends, self._overlaps(p)))

    def _overlaps(self, p: wire.ProbArray) -> Iterable[float | None]:
        """Nothing is known of them while any of the blocks is unconfirmed, or where rows are not on what was proposed."""
        q: list[wire.ProbArray] = []
        size = {self.size * wire.TOKEN_BYTES}
        for proposed, count in self._proposed:
            if proposed.block is None or set(map(len, proposed.supports)) != size:
                return repeat(None)
            q += [drafted.q for drafted in proposed.block.drafted]
            if proposed.block.look_ahead is not None:
                q.append(proposed.block.look_ahead.q)
            if count != len(proposed.supports):
                return repeat(None)
        return overlaps(p, q) if len(q) == len(p) else repeat(None)
