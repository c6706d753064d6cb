"""Counter-based randomness: every draw is a function of (seed, position, lane), never of order, batch or process.

Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) as numpy implements it. One block
of four 64-bit words belongs to each (seed, position); each word is the lane of one draw, so that draft, target and
orchestrator draw independently without a message between them. A second stream per (seed, position) gives one word per
token id, for the Gumbel noise of the coupled acceptance method.

A position may be drafted in several rounds, with the same lanes. That is sound: a draw at a position is only ever
compared with what precedes that position, and nothing that was committed depended on a draw at a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_LANES_STREAM = 0
_GUMBEL_STREAM = 1
_SEED_STREAM = 2
_ROUNDING = np.float32(1e-3)
"""More than the rounding of a sum of noise and score, neither of which that decides is above 40."""
_SEED_MASK = (1 << 64) - 1


class Lane(IntEnum):
    """Who draws: one word of the block of a (seed, position)."""

    DRAFT = 0
    OUTSIDE = 1
    ACCEPT = 2
    RESIDUAL = 3


_LANES = len(Lane)


def uniforms(seed: int, position: int, count: int = 1) -> NDArray[np.float64]:
    """Uniforms in [0, 1) for `count` consecutive token positions, shape [count, lanes]; index columns with `Lane`."""
    words = _philox(seed, _lanes_counter(position)).random_raw(count * _LANES)
    return _unit(words).reshape(count, _LANES)


class UniformsAhead:
    """The `uniforms` of one seed that decide on draft tokens, for someone whose positions mostly go forward: drawn for many positions
    at a time, because making the generator is most of the cost."""

    _CHUNK = 64

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._first = 0
        self._drawn: list[tuple[float, float]] = []

    def at(self, position: int, count: int) -> list[tuple[float, float]]:
        """Those of ACCEPT and RESIDUAL in `uniforms(seed, position, count)`, a pair for each position."""
        start = position - self._first
        if not 0 <= start <= len(self._drawn) - count:
            self._first, start = position, 0
            drawn = uniforms(self._seed, position, max(count, self._CHUNK))
            pairs = zip(drawn[:, Lane.ACCEPT].tolist(), drawn[:, Lane.RESIDUAL].tolist(), strict=True)
            self._drawn = list(pairs)
        return self._drawn[start : start + count]


def lane_uniforms(seeds: Sequence[int], positions: Sequence[int], lane: Lane) -> NDArray[np.float64]:
    """One uniform for each (seed, position), those of `uniforms`, shape [n].

    Making a generator costs several times what moving it does, and the next position needs not even that.
    """
    words = np.empty(len(seeds), dtype=np.uint64)
    generator, last = None, (0, 0)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        if generator is None:
            generator = _philox(seed, _lanes_counter(position))
        elif last != (seed, position - 1):
            _move(generator, seed, _lanes_counter(position))
        words[row] = generator.random_raw(_LANES)[lane]
        last = (seed, position)
    return _unit(words)


def gumbel_noise(seed: int, position: int, vocabulary_size: int) -> NDArray[np.float32]:
    """Standard Gumbel noise for the token ids 0 .. vocabulary_size-1 at a position, shape [vocabulary_size].

    The noise of a token id doesn't depend on vocabulary_size, so that models of unequal padding agree.
    """
    return _gumbel(_philox(seed, _gumbel_counter(position)).random_raw(vocabulary_size))


def gumbel_noise_at(
    seeds: Sequence[int], positions: Sequence[int], token_ids: NDArray[np.integer]
) -> NDArray[np.float32]:
    """The `gumbel_noise` of some token ids for each (seed, position), both of shape [n, k].

    The logarithms, most of its cost, are taken for these ids alone.
    """
    words = np.empty(token_ids.shape, dtype=np.uint64)
    generator = None
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        if generator is None:
            generator = _philox(seed, _gumbel_counter(position))
        else:
            _move(generator, seed, _gumbel_counter(position))
        words[row] = generator.random_raw(int(token_ids[row].max(initial=0)) + 1)[token_ids[row]]
    return _gumbel(words)


def gumbel_argmax(scores: NDArray[np.float32], seed: int, position: int) -> int:
    """The argmax of scores [V] plus `gumbel_noise(seed, position, V)`. No score is above 0, and one is 0.

    Noise grows with the words that it is made of, so the logarithms, most of its cost, are taken only for the scores that
    the largest noise could lift above a sum that is there.
    """
    words = _philox(seed, _gumbel_counter(position)).random_raw(scores.size)
    likeliest, loudest = scores.argmax(), words.argmax()
    noise = _gumbel(words[[likeliest, loudest]])
    reached = max(noise[0], scores[loudest] + noise[1])
    places = np.flatnonzero(scores >= reached - noise[1] - _ROUNDING)
    return int(places[(scores[places] + _gumbel(words[places])).argmax()])


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion `index` of a request for several: the request's own for the first, else a word that is a function of
    (seed, index)."""
    if index == 0:
        return seed
    counter = [index, 0, _SEED_STREAM, 0]
    return int(_philox(seed, counter).random_raw())


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


def _unit(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniforms in [0, 1) of 53 bits."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _lanes_counter(position: int) -> list[int]:
    return [position, 0, _LANES_STREAM, 0]


def _gumbel_counter(position: int) -> list[int]:
    return [0, position, _GUMBEL_STREAM, 0]


def _key(seed: int) -> NDArray[np.uint64]:
    return np.array([seed & _SEED_MASK, 0], dtype=np.uint64)


def _philox(seed: int, counter: list[int]) -> np.random.Philox:
    return np.random.Philox(key=_key(seed), counter=np.array(counter, dtype=np.uint64))


def _move(generator: np.random.Philox, seed: int, counter: list[int]) -> None:
    """Leaves `generator` as `_philox(seed, counter)` would make it."""
    generator.state = {
        "bit_generator": "Philox",
        "state": {"counter": np.array(counter, dtype=np.uint64), "key": _key(seed)},
        "buffer": np.zeros(_LANES, dtype=np.uint64),
        "buffer_pos": _LANES,  # nothing is buffered
        "has_uint32": 0,
        "uinteger": 0,
    }
