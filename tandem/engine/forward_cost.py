"""What a forward costs, measured once, so that the scheduler can weigh padding against another forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SIZES = (1, 8, 32)
"""Tokens that are timed. Kernels change between them: five tokens may cost as much as one, and 32 ten times that."""
_RUNS = 7
_SECONDS = 0.5
"""After this much for one size there is no further run."""


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Seconds of a forward by its tokens: straight lines through the measured points, rising."""

    points: tuple[tuple[int, float], ...]
    """(tokens, seconds), two or more of them in rising order."""
    computes_padding: bool = True
    """Whether feeds of unlike sizes take what as many of the largest size would. Else only little padding is computed."""

    def of(self, sizes: Sequence[int]) -> float:
        """Of feeds of such sizes together."""
        return self.seconds(len(sizes) * max(sizes) if self.computes_padding else sum(sizes))

    def seconds(self, tokens: int) -> float:
        """Of so many tokens: the line between the neighbours of `tokens`, or on from the last two points."""
        low, high = next(
            (pair for pair in zip(self.points, self.points[1:], strict=False) if tokens <= pair[1][0]),
            self.points[-2:],
        )
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return low[1] + slope * (tokens - low[0])


FREE_TOKENS = ForwardCost(((1, 1.0), (2, 1.0)))
"""Padding costs nothing: forwards are never split."""


def measure(run: Callable[[int], object], longest: int, *, computes_padding: bool = True) -> ForwardCost:
    """Times `run(tokens)`, which returns when the device is done, for sizes up to `longest`."""
    sizes = [size for size in SIZES if size <= longest]
    if len(sizes) < 2:
        return FREE_TOKENS
    points: list[tuple[int, float]] = []
    for size in sizes:
        seconds = _shortest(run, size)
        points.append((size, max(seconds, points[-1][1]) if points else seconds))
    return ForwardCost(tuple(points), computes_padding)


def _shortest(run: Callable[[int], object], size: int) -> float:
    """The shortest of a few runs, after one that warms up: what else the machine does only ever adds time."""
    run(size)
    seconds: list[float] = []
    while len(seconds) < _RUNS and sum(seconds) < _SECONDS:
        began = time.perf_counter()
        run(size)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
