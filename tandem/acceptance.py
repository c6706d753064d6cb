"""The acceptance rule of speculative sampling, on supports.

Leviathan et al., "Fast inference from transformers via speculative decoding", ICML 2023; Chen et al., "Accelerating
large language model decoding with speculative sampling", 2023. p is the target's next-token distribution, q the
draft's. A draft token d ~ q is accepted with probability min(1, p(d)/q(d)); at the first rejection a token is drawn
from the residual distribution max(0, p - q), normalised, and the rest of the block is dropped.

q lives on a small support S. The target sends p on S, the mass of p outside S, and one token it drew from p restricted
to the outside. That is all the rule needs: outside S the residual *is* p, so the outside mass is one more outcome of the
residual draw, which stands for the token already drawn.

Greedy decoding is not a branch (p and q are one-hot), nor is plain decoding (an empty block, an empty support).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tandem.wire import IdArray, ProbArray


class TokenKind(IntEnum):
    """Where a committed token came from; the values are those of the public API."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3
    REPLAYED = 4


class DraftContractError(ValueError):
    """The draft broke its contract: the block can't be used, the output stays right without it."""


# These three are not frozen: a round makes a dozen, and making a frozen one takes three times as long.
@dataclass(slots=True)
class Drafted:
    """A draft token and the distribution q it was drawn from."""

    token_id: int
    support_ids: IdArray
    """S, shape [k], all different."""
    q: ProbArray
    """q on S, shape [k], summing to one."""
    index: int
    """Where token_id stands in S."""


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities at one position: of every token that may come out of it, and of the likeliest."""

    support: ProbArray
    """Of S, shape [k]; -inf without mass."""
    outside: float
    """Of the outside token."""
    top_ids: IdArray
    """The likeliest tokens, falling, shape [n]."""
    top: ProbArray


@dataclass(slots=True)
class TargetRow:
    """The target's distribution p at one position, seen from a support S."""

    p: ProbArray
    """p on S, shape [k]; k is 0 where nothing was drafted."""
    outside_mass: float
    outside_token_id: int
    """A draw from p restricted to the outside of S."""
    logprobs: RowLogprobs | None = None
    """If asked for; the rule doesn't read it."""
    dead_end: bool = False
    """The output has a form, and that allows nothing here: not to be drawn from."""
    overlap: float | None = None
    """sum_x min(p(x), q(x)), where it was worked out for many rows at once; the rule decides nothing by it."""


@dataclass(slots=True)
class Outcome:
    """What survives of one round: `accepted` draft tokens, then one recovered or bonus token."""

    token_ids: list[int]
    kinds: list[TokenKind]
    accepted: int
    expected_acceptance: list[float]
    """sum_x min(p(x), q(x)), the exact acceptance probability, for each drafted position that was reached."""


Q_SUM_TOLERANCE = 1e-4
MAX_SUPPORT_SIZE = 1024
"""Most ids of a support: the target refuses more."""


def check_drafted(token_id: int, support_ids: IdArray, q: ProbArray, vocabulary_size: int) -> Drafted:
    """One proposal of a draft, which is not trusted: q must be a distribution on ids of the vocabulary, drawn token
    included. Raises DraftContractError with the fault."""
    if support_ids.size == 0 or support_ids.size != q.size:
        raise DraftContractError(f"support of {support_ids.size} ids with {q.size} probabilities")
    if support_ids.size > MAX_SUPPORT_SIZE:
        raise DraftContractError(f"support of {support_ids.size} ids, at most {MAX_SUPPORT_SIZE} allowed")
    ordered = np.sort(support_ids)
    if int(ordered[-1]) >= vocabulary_size:
        raise DraftContractError("support holds an id outside of the vocabulary")
    if (ordered[1:] == ordered[:-1]).any():
        raise DraftContractError("support holds an id twice")
    total = float(q.sum(dtype=np.float64))
    if not abs(total - 1.0) <= Q_SUM_TOLERANCE or float(q.min()) < 0.0:
        raise DraftContractError(f"q sums to {total:.6g} or has a negative value")
    index = int(np.argmax(support_ids == token_id))
    if int(support_ids[index]) != token_id or not q[index] > 0.0:
        raise DraftContractError("the draft token has no mass in q")
    return Drafted(token_id, support_ids, q, index)


def are_supports(support_ids: IdArray, vocabulary_size: int) -> bool:
    """The half of the check of proposals whose supports have one size, [n, k], that a target wants too: whether each row holds ids of the
    vocabulary, all different, not too many. At a fraction of the cost of one by one."""
    ordered = support_ids.copy()
    ordered.sort(axis=1)
    return bool(
        ordered.shape[1] <= MAX_SUPPORT_SIZE
        and max(ordered[:, -1].tolist()) < vocabulary_size
        and not np.logical_or.reduce(ordered[:, 1:] == ordered[:, :-1], None)
    )


def drawn_from_laws(token_ids: Sequence[int], support_ids: IdArray, q: ProbArray) -> list[Drafted] | None:
    """The other half of `check_drafted`: of what `are_supports`, whether each row of q is a distribution, and its token has mass. None where
    anything is wrong with any of them, which the check one by one tells."""
    try:
        tokens = np.array(token_ids, dtype=np.uint32)  # as the ids are, or all of those would be made what these are
    except OverflowError:
        return None
    # The reductions are called by their ufuncs: the methods of arrays cost twice as much for so few numbers.
    places = (support_ids == tokens[:, None]).ravel().nonzero()[0]
    totals = np.add.reduce(q, 1, np.float64).tolist()
    if (
        max(totals) - 1.0 <= Q_SUM_TOLERANCE
        and 1.0 - min(totals) <= Q_SUM_TOLERANCE
        and np.minimum.reduce(q.ravel()) >= 0.0  # nor is one NaN, nor a total
        and places.size == len(token_ids)  # one in each row, since no row has an id twice
        and min(q.ravel()[places].tolist()) > 0.0
    ):
        return list(map(Drafted, token_ids, support_ids, q, (places % support_ids.shape[1]).tolist()))
    return None


def accept(
    block: Sequence[Drafted],
    rows: Sequence[TargetRow],
    uniforms: Sequence[tuple[float, float]],
    look_ahead: Drafted | None = None,
) -> Outcome:
    """Applies the rule to a block of gamma draft tokens.

    `rows` are the gamma + 1 target rows; `uniforms[i]` are the (acceptance, residual) uniforms in [0, 1) of position i.
    `look_ahead` is the draft's proposal for the position after the block, scored on the last row: it becomes the bonus
    token where it would be accepted. Raises DraftContractError if a reached draft token has no mass in q.
    """
    token_ids: list[int] = []
    kinds: list[TokenKind] = []
    expected: list[float] = []
    for drafted, row, (u_accept, u_residual) in zip(block, rows, uniforms, strict=False):
        token, accepted = _decide(drafted, row, u_accept, u_residual)
        token_ids.append(token)
        kinds.append(TokenKind.ACCEPTED if accepted else TokenKind.RECOVERED)
        expected.append(row.overlap if row.overlap is not None else _overlap(row.p, drafted.q))
        if not accepted:
            return Outcome(token_ids, kinds, len(token_ids) - 1, expected)
    token_ids.append(_bonus(look_ahead, rows[len(block)], *uniforms[len(block)]))
    kinds.append(TokenKind.BONUS)
    return Outcome(token_ids, kinds, len(block), expected)


def overlaps(p: ProbArray, q: Sequence[ProbArray]) -> list[float]:
    """`TargetRow.overlap` of rows on supports of one size, p of shape [n, k], q n times [k]."""
    alike: list[float] = np.add.reduce(np.minimum(p, np.concatenate(q).reshape(p.shape)), 1, np.float64).tolist()
    return alike


def _overlap(p: ProbArray, q: ProbArray) -> float:
    return float(np.add.reduce(np.minimum(p, q), 0, np.float64))


def residual_weights(p: ProbArray, q: ProbArray, outside_mass: float) -> NDArray[np.float64]:
    """Unnormalised residual distribution over S and, last, the outside; p itself where p = q leaves no mass at all."""
    weights = np.empty(p.size + 1)
    np.maximum(p.astype(np.float64) - q, 0.0, out=weights[:-1])
    weights[-1] = outside_mass
    if outside_mass > 0.0 or np.add.reduce(weights) > 0.0:
        return weights
    # p = q up to rounding: a rejection has probability zero, and p is the law to draw from.
    weights[:-1] = p
    return weights


def _decide(drafted: Drafted, row: TargetRow, u_accept: float, u_residual: float) -> tuple[int, bool]:
    p, q = row.p.item(drafted.index), drafted.q.item(drafted.index)  # at half the cost of float(row.p[...])
    if q <= 0.0:
        raise DraftContractError("the draft token has no mass in q")
    if u_accept * q < p:  # u < p/q, without the division
        return drafted.token_id, True
    return _draw_residual(drafted, row, u_residual), False


def _draw_residual(drafted: Drafted, row: TargetRow, uniform: float) -> int:
    cumulative = residual_weights(row.p, drafted.q, row.outside_mass).cumsum()
    # side="right" skips outcomes of zero weight; the bound guards against uniform * total rounding up to the total.
    index = int(cumulative.searchsorted(uniform * cumulative[-1], side="right"))
    if index >= cumulative.size:
        index = int(cumulative.searchsorted(cumulative[-1], side="left"))
    return row.outside_token_id if index == drafted.support_ids.size else int(drafted.support_ids[index])


def _bonus(look_ahead: Drafted | None, row: TargetRow, u_accept: float, u_residual: float) -> int:
    if look_ahead is None:
        return row.outside_token_id
    return _decide(look_ahead, row, u_accept, u_residual)[0]
