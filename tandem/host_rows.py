"""Rows of logits in a CPU's memory, read and drawn from with numpy: greedy ones, and sampled ones that no cut needs sorted.

The contract is that of `sampling`, which reads all other rows, and those of other devices, with torch. For a few rows its dozens of
small operations take longer than the passes over a row, and several times as long where another model has had the caches since
(docs/decisions.md has the times). Here a row takes a handful.

A row is float32 [V], adjusted and masked; its number is for messages alone. Raises ValueError where it makes no distribution.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.acceptance import Drafted, TargetRow
from tandem.randomness import Lane, gumbel_argmax, gumbel_noise_at, lane_uniforms
from tandem.wire import IdArray, ProbArray

if TYPE_CHECKING:
    from tandem.sampling import SamplingParams

    Row = NDArray[np.float32]

_GROUPS = 1024
"""Into so many groups a row is divided where its largest numbers are looked for; or into four for each of them."""
_BLOCK = 512
"""Width of the blocks in which a row is summed and drawn from."""
_CERTAIN: ProbArray = np.ones(1, dtype=np.float32)


def no_distribution(number: int) -> ValueError:
    """What a faulty row is refused with."""
    return ValueError(f"row {number}: the logits make no distribution: NaN, +inf, or no token left")


def drafts(params: SamplingParams) -> bool:
    """Whether `draft` knows such rows."""
    return params.temperature == 0.0 or params.top_p >= 1.0


def reads(params: SamplingParams, vocabulary_size: int) -> bool:
    """Whether `read` knows such rows of a vocabulary."""
    uncut = params.top_p >= 1.0 and not 0 < params.top_k < vocabulary_size
    return params.temperature == 0.0 or uncut


def draft(
    number: int, row: Row, params: SamplingParams, position: int, support_size: int, *, confident: bool
) -> tuple[Drafted, float]:
    """A draft token, and its confidence if that is wanted, else 1: see `sampling.draft_tokens_and_confidences`."""
    if params.temperature == 0.0:
        token = int(row.argmax())
        _check(number, row[token])
        drafted = _certainly(token)
        return drafted, _confidence(row) if confident else 1.0
    row = _scaled(row, params)
    _check(number, np.maximum.reduce(row))
    drafted = _sampled(row, params, position, support_size)
    return drafted, _confidence(row) if confident else 1.0


def read(number: int, row: Row, params: SamplingParams, position: int, support: IdArray) -> TargetRow:
    """The target's side of the rule for a row: see `sampling.target_rows`. All ids of the support are in the vocabulary."""
    if params.temperature == 0.0:
        winner = int(row.argmax())
        _check(number, row[winner])
        return _all_on(winner, support)
    row = _scaled(row, params)
    best = np.maximum.reduce(row)
    _check(number, best)
    relative = row - best
    if params.min_p > 0.0:
        relative[row < best + np.log(np.float32(params.min_p))] = -math.inf
    if params.coupled:
        return _all_on(gumbel_argmax(relative, params.seed, position), support)
    weights = np.exp(relative, out=relative)
    inside = weights[support]
    weights[support] = 0.0
    mass, token = _draw(weights, float(lane_uniforms([params.seed], [position], Lane.OUTSIDE)[0]))
    total = mass + float(np.add.reduce(inside, 0, np.float64))
    return TargetRow(inside / np.float32(total), mass / total, token)


def _check(number: int, best: np.float32) -> None:
    """`best` is the largest number of the row, or NaN if any is."""
    if not math.isfinite(best):
        raise no_distribution(number)


def _scaled(row: Row, params: SamplingParams) -> Row:
    if params.temperature == 1.0:
        return row
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):  # what comes of that makes no distribution
        return row / np.float32(params.temperature)


def _confidence(row: Row) -> float:
    """The probability of the likeliest token."""
    weights = np.exp(row - np.maximum.reduce(row))
    return 1.0 / float(np.add.reduce(weights))


def _certainly(token_id: int) -> Drafted:
    return Drafted(token_id, np.array([token_id], dtype=np.uint32), _CERTAIN, 0)


def _sampled(row: Row, params: SamplingParams, position: int, support_size: int) -> Drafted:
    ids = _largest(row, support_size)
    values = row[ids]
    relative = values - values[0]
    weights = np.exp(relative)
    weights[_kept(values, relative, params) :] = 0.0
    q = weights / np.add.reduce(weights)
    size = int(np.count_nonzero(q))  # what has mass comes first
    if params.coupled:
        # The argmax with the target's noise: its token is drafted wherever it is in the support.
        noise = gumbel_noise_at([params.seed], [position], ids[None, :size])[0]
        return _certainly(int(ids[(relative[:size] + noise).argmax()]))
    q = q[:size]
    cumulative = q.cumsum(dtype=np.float64)
    index = _search(cumulative, float(lane_uniforms([params.seed], [position], Lane.DRAFT)[0]))
    return Drafted(int(ids[index]), ids[:size].astype(np.uint32), q, index)


def _largest(row: Row, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest numbers, falling, or of all but -inf where there are fewer; of equal ones the higher id comes first.

    That many groups have numbers that reach the count-th of the groups' largest, and hardly any number does beside those.
    """
    groups = max(_GROUPS, 4 * count)
    least: np.float32 | float = -math.inf
    if row.size >= 2 * groups:
        largest_of_each = np.maximum.reduce(row[: row.size // groups * groups].reshape(-1, groups))
        least = np.partition(largest_of_each, groups - count)[groups - count]
    ids = (row >= least if least > -math.inf else row > -math.inf).nonzero()[0]
    return ids[row[ids].argsort(kind="stable")[: -count - 1 : -1]]


def _kept(values: Row, relative: Row, params: SamplingParams) -> int:
    """How many of the largest numbers, falling, top_k and min_p leave; 1 at least."""
    kept = values.size
    if 0 < params.top_k < kept:
        kept = int(np.count_nonzero(values >= values[params.top_k - 1]))
    if params.min_p > 0.0:
        kept = min(kept, int(np.count_nonzero(relative >= np.log(np.float32(params.min_p)))))
    return max(kept, 1)


def _all_on(winner: int, support: IdArray) -> TargetRow:
    """The reading of a distribution with all mass on one token."""
    inside = support == winner
    return TargetRow(inside.astype(np.float32), 0.0 if inside.any() else 1.0, winner)


def _draw(weights: Row, uniform: float) -> tuple[float, int]:
    """The total of the weights and an id drawn from them: a block first, then within it."""
    whole = weights.size // _BLOCK * _BLOCK
    sums = np.add.reduce(weights[:whole].reshape(-1, _BLOCK), 1)
    if whole < weights.size:
        sums = np.append(sums, np.add.reduce(weights[whole:]))
    totals = sums.cumsum(dtype=np.float64)
    mass = float(totals[-1])
    if mass <= 0.0:
        return 0.0, weights.size - 1
    block = _search(totals, uniform)
    below = float(totals[block - 1]) if block else 0.0
    share = (uniform * mass - below) / (float(totals[block]) - below)
    within = weights[block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
    return mass, block * _BLOCK + _search(within, share)


def _search(cumulative: NDArray[np.float64], share: float) -> int:
    """The first index whose cumulative weight exceeds that share of the total: never one without weight."""
    total = float(cumulative[-1])
    # The bound guards against share * total rounding up to the total.
    return int(cumulative.searchsorted(min(share * total, math.nextafter(total, 0.0)), side="right"))
