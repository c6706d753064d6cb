"""How often draft tokens stand, as far as was seen."""

from __future__ import annotations

_PRIOR_WEIGHT = 4.0
"""Tokens that a prior stands for."""
_FADE = 0.95
"""Weight left of what was seen, after one more token."""


class Share:
    """How often a source's next token stood, where those before it did; what was seen last counts most."""

    def __init__(self, prior: float) -> None:
        self._stood = prior * _PRIOR_WEIGHT
        self._seen = _PRIOR_WEIGHT

    def add(self, accepted: int, *, rejected: bool) -> None:
        """The outcome of one block: tokens that stood, and whether one that did not came after them."""
        for stood in [1.0] * accepted + [0.0] * rejected:
            self._stood = _FADE * self._stood + stood
            self._seen = _FADE * self._seen + 1.0

    @property
    def value(self) -> float:
        """Between 0 and 1."""
        return self._stood / self._seen
