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
    return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(count, len(Lane))


def gumbel_noise(seed: int, position: int, vocabulary_size: int) -> NDArray[np.float32]:
    """Standard Gumbel noise for the token ids 0 .. vocabulary_size-1 at a position, shape [vocabulary_size].

    The noise of a token id doesn't depend on vocabulary_size, so that models of unequal padding agree.
    """
    return _gumbel(_gumbel_words(seed, position, vocabulary_size))


def gumbel_noise_at(seed: int, position: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float32]:
    """`gumbel_noise` of some token ids, in their order; the logarithms, most of its cost, are taken for these alone."""
    return _gumbel(_gumbel_words(seed, position, int(token_ids.max(initial=0)) + 1)[token_ids])


def _gumbel_words(seed: int, position: int, count: int) -> NDArray[np.uint64]:
    return _philox(seed, [0, position, _GUMBEL_STREAM, 0]).random_raw(count)


def _gumbel(words: NDArray[np.uint64]) -> NDArray[np.float32]:
    """-log(-log(u)) for u in the open unit interval.

    The inner logarithm is taken in float64, because the largest noise, which decides, comes from u next to 1; the outer
    one has no such cancellation.
    """
    # 52 bits and a half are exact in float64, with 53 the largest u would round to 1.
    unit = (words >> np.uint64(12)).astype(np.float64)
    unit += 0.5
    unit *= 2.0**-52
    exponential = np.log(unit, out=unit).astype(np.float32)
    np.negative(exponential, out=exponential)
    np.log(exponential, out=exponential)
    return np.negative(exponential, out=exponential)


def _philox(seed: int, counter: list[int]) -> np.random.Philox:
    return np.random.Philox(key=seed & _SEED_MASK, counter=np.array(counter, dtype=np.uint64))
