"""Which outcomes of a verification are likely: what the draft thinks of its own block, set right by what became of others.

A draft's confidence is no acceptance: a greedy target agrees more often than the draft believes, a sampled token is accepted by
p/q, which doesn't fall with q, and how far a draft is off differs from pair to pair. So outcomes are counted: how often a token of such a
confidence stood, and how often the token in place of a rejected one was the draft's first, second, ... other choice. Greedy,
sampled and COUPLED requests are counted apart.

What is guessed has no influence on any token, only on what is ready in time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from draft_service.share import Share
from tandem.randomness import gumbel_noise_at
from tandem.wire import IdArray

if TYPE_CHECKING:
    from tandem.sampling import SamplingParams

ALTERNATIVES = 3
"""Tokens besides the drafted one that are guessed at for each position."""
_CANDIDATES, _NOISY_CANDIDATES = 16, 256
"""Tokens that are looked at for them; under COUPLED the noise may lift any of many."""
_BINS = 4
"""Of confidence, equally wide."""
_LEAST_ACCEPTANCE = 0.5
"""Of a token that the draft finds less likely, before anything was seen."""
_PRIOR_WEIGHT = 8.0
"""Rejections that the draft's own opinion of the other tokens stands for."""
_FADE = 0.95
"""Weight left of the rejections that were seen, after one more."""


class _Kind(Enum):
    GREEDY = 0
    SAMPLED = 1
    COUPLED = 2


@dataclass(frozen=True, slots=True)
class Guess:
    """j tokens of the block, then `token_id`."""

    accepted: int
    token_id: int
    chance: float


@dataclass(frozen=True, slots=True)
class _Position:
    """One position of a block: the draft's own idea of what it drew there, and of what else was likely."""

    token_id: int
    confidence: float
    others: tuple[tuple[int, float], ...]
    """The likeliest ones besides, and for each its share of what the drawn one leaves."""


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What the draft thinks of a block, the look-ahead included."""

    start: int
    """Length of the prefix that it continues."""
    kind: _Kind
    positions: tuple[_Position, ...]

    @classmethod
    def of(
        cls, start: int, drawn: Sequence[int], outlooks: Sequence[NDArray[np.float64]], sampling: SamplingParams
    ) -> Foreseen:
        """From the outlooks [2, candidates] of the positions, see `DraftAhead.outlooks`, and the tokens drawn there."""
        pairs = enumerate(zip(drawn, outlooks, strict=True))
        positions = [_position(outlook, token_id, sampling, start + index) for index, (token_id, outlook) in pairs]
        return cls(start, _kind(sampling), tuple(positions))


class OutcomeOdds:
    """Of all requests of one draft. Called by the step thread only."""

    def __init__(self) -> None:
        self._of: defaultdict[_Kind, _Odds] = defaultdict(_Odds)

    def standing(self, foreseen: Foreseen, block: int) -> float:
        """The chance that the first `block` tokens stand, and the look-ahead too, if there is one."""
        odds, chance = self._of[foreseen.kind], 1.0
        for position in foreseen.positions[: block + 1]:
            chance *= odds.acceptance(position)
        return chance

    def rejections(self, foreseen: Foreseen, block: int) -> list[Guess]:
        """Rejections among the first `block` tokens, each with a token that may be in place of the rejected one; likely ones first."""
        guesses = self._of[foreseen.kind].rejections(foreseen.positions[:block])
        return sorted(guesses, key=lambda guess: guess.chance, reverse=True)

    def saw(self, foreseen: Foreseen, prefix: IdArray) -> None:
        """The next prefix, which tells what became of the block."""
        odds = self._of[foreseen.kind]
        for position, token_id in zip(foreseen.positions, prefix[foreseen.start :].tolist(), strict=False):
            odds.saw(position, token_id)
            if token_id != position.token_id:
                return


class _Odds:
    """Of one kind of sampling."""

    def __init__(self) -> None:
        self._stood = [Share(max((index + 0.5) / _BINS, _LEAST_ACCEPTANCE)) for index in range(_BINS)]
        self._ranks = [0.0] * ALTERNATIVES
        self._rejections = 0.0

    def acceptance(self, position: _Position) -> float:
        """The chance that its token stands, if those before it do."""
        return self._bin(position).value

    def rejections(self, positions: Sequence[_Position]) -> Iterator[Guess]:
        """At each position, each of the other tokens."""
        reached = 1.0
        for accepted, position in enumerate(positions):
            acceptance = self.acceptance(position)
            rejected = reached * (1.0 - acceptance)
            for seen, (token_id, share) in zip(self._ranks, position.others, strict=False):
                chance = (_PRIOR_WEIGHT * share + seen) / (_PRIOR_WEIGHT + self._rejections)
                yield Guess(accepted, token_id, rejected * chance)
            reached *= acceptance

    def saw(self, position: _Position, token_id: int) -> None:
        """The token that is at the position now, where those before it stood."""
        stands = token_id == position.token_id
        self._bin(position).add(int(stands), rejected=not stands)
        if not stands:
            recovered = [other == token_id for other, _ in position.others]
            recovered += [False] * (ALTERNATIVES - len(recovered))
            self._ranks = [_FADE * seen + hit for seen, hit in zip(self._ranks, recovered, strict=True)]
            self._rejections = _FADE * self._rejections + 1.0

    def _bin(self, position: _Position) -> Share:
        return self._stood[min(int(position.confidence * _BINS), _BINS - 1)]


def candidates(sampling: SamplingParams) -> int:
    """How many of the likeliest tokens an outlook holds."""
    return _NOISY_CANDIDATES if _kind(sampling) is _Kind.COUPLED else _CANDIDATES


def _kind(sampling: SamplingParams) -> _Kind:
    if sampling.temperature == 0.0:
        return _Kind.GREEDY
    return _Kind.COUPLED if sampling.coupled else _Kind.SAMPLED


def _position(outlook: NDArray[np.float64], drawn: int, sampling: SamplingParams, position: int) -> _Position:
    ids, log_weights = outlook[0].astype(np.int64), outlook[1]
    if _kind(sampling) is _Kind.COUPLED:
        # The target adds the same noise: its choice is among those that stand out with it.
        log_weights = log_weights + gumbel_noise_at([sampling.seed], [position], ids[None])[0]
        log_weights -= np.logaddexp.reduce(log_weights)
    weights = np.exp(log_weights)
    weights[~np.isfinite(weights)] = 0.0
    own = float(weights[ids == drawn].sum())
    rest = max(1.0 - own, 1e-6)
    best = np.argsort(weights)[: -ALTERNATIVES - 2 : -1]
    others = [(int(ids[index]), float(weights[index]) / rest) for index in best if ids[index] != drawn]
    return _Position(drawn, min(own, 1.0), tuple(others[:ALTERNATIVES]))
