"""Counter-based randomness: every draw is a function of (seed, position, lane), never of order, batch or process.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) as numpy implements it. One block
of four 64-bit words belongs to each (seed, position); each word is the lane of one draw, so that draft, target and
orchestrator draw independently without a message between them. A second stream per (seed, position) gives one word per
token id, for the Gumbel noise of the coupled acceptance method.

A position may be drafted in several rounds, with the same lanes. That is sound: a draw at a position is only ever
compared with what precedes that position, and nothing that was committed depended on a draw at a later one.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_LANES_STREAM = 0
_GUMBEL_STREAM = 1
_SEED_MASK = (1 << 64) - 1


class Lane(IntEnum):
    """Who draws: one word of the block of a (seed, position)."""

    DRAFT = 0
    OUTSIDE = 1
    ACCEPT = 2
    RESIDUAL = 3


def uniforms(seed: int, position: int, count: int = 1) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for `count` consecutive token positions, shape [count, lanes]; index columns with `Lane`."""
    counter = [position, 0, _LANES_STREAM, 0]
    words = _philox(seed, counter).random_raw(count * len(Lane))
    return ((words >> np.uint64(11)) * 2.0**-53).reshape(count, len(Lane))


def gumbel_noise(seed: int, position: int, vocabulary_size: int) -> NDArray[np.float64]:
    """Standard Gumbel noise for the token ids 0 .. vocabulary_size-1 at a position, shape [vocabulary_size].

    The noise of a token id doesn't depend on vocabulary_size, so that models of unequal padding agree.
    """
    words = _philox(seed, [0, position, _GUMBEL_STREAM, 0]).random_raw(vocabulary_size)
    open_unit = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(open_unit))


def _philox(seed: int, counter: list[int]) -> np.random.Philox:
    return np.random.Philox(key=seed & _SEED_MASK, counter=np.array(counter, dtype=np.uint64))
