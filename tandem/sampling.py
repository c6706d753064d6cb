"""Logits to distributions: the sampling contract that draft and target share (torch).

The order of processing and the meaning of each step are those of transformers' `generate` (its temperature, top-k,
top-p and min-p warpers), ties included. Speed comes from what is left out: a row never crosses to the CPU, no full
vocabulary is sorted where a few hundred candidates decide, and one transfer brings all rows back.

Three ways to read a row, chosen from its parameters:

- greedy: one argmax;
- top: top_k or top_p leave few tokens, so a `topk` prefilter of candidates decides, and everything after it works on
  those; a row whose candidates turn out too few is read again, with more of them, and at last the third way;
- all: every token may have mass, so passes over the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from tandem import host_rows
from tandem.acceptance import Drafted, RowLogprobs, TargetRow
from tandem.logit_adjustments import Adjustments, adjust
from tandem.logprobs import LogprobParams, LogprobsMode, row_logprobs
from tandem.randomness import Lane, gumbel_noise, gumbel_noise_at, lane_uniforms
from tandem.sampling_limits import check_form_alone
from tandem.structured_output import Form, FormError, Forms
from tandem.token_masks import mask
from tandem.v1 import sampling_pb2
from tandem.wire import IdArray

_PREFILTERS = (256, 2048)
"""Candidates that usually hold the mass of top_p, and that nearly always do. On a CPU `topk` of 256 in 49,152 takes
0.12 ms, of 1,024 or 2,048 0.5 ms, a full sort 4.3 ms."""
_MOST_TOP_K = 1024
"""The largest top_k for which candidates are worth it."""
_TIE_SLACK = 16
"""Candidates beyond top_k: transformers keeps all tokens that tie with the last one."""
_BLOCK = 512
"""Width of the blocks in which a whole row is summed and drawn from."""
_NO_LOGIT = -math.inf


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The sampling processing of one request, every field resolved."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    coupled: bool
    min_length: int
    end_token_ids: tuple[int, ...]
    adjustments: Adjustments | None = None
    logprobs: LogprobParams | None = None
    form: Form | None = None

    @property
    def reads_context(self) -> bool:
        """Whether a row's distribution depends on more than its logits and its position."""
        return self.form is not None or (self.adjustments is not None and self.adjustments.reads_context)

    @classmethod
    def from_proto(cls, message: sampling_pb2.Sampling, forms: Forms | None = None) -> SamplingParams:
        """Raises ValueError, naming the field, for a value that is out of range or not resolved. Without `forms` there can be no
        structured_output."""
        if not (math.isfinite(message.temperature) and message.temperature >= 0.0):
            raise ValueError(f"temperature must be finite and not negative, got {message.temperature}")
        if not 0.0 < message.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {message.top_p}")
        if not 0.0 <= message.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {message.min_p}")
        methods = (sampling_pb2.ACCEPTANCE_METHOD_REJECTION, sampling_pb2.ACCEPTANCE_METHOD_COUPLED)
        if message.acceptance_method not in methods:
            raise ValueError(f"acceptance_method must be REJECTION or COUPLED, got {message.acceptance_method}")
        return cls(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            coupled=message.acceptance_method == sampling_pb2.ACCEPTANCE_METHOD_COUPLED,
            min_length=message.min_length,
            end_token_ids=tuple(message.end_token_ids),
            adjustments=Adjustments.from_proto(message),
            logprobs=LogprobParams.from_proto(message),
            form=_form(message, forms) if message.HasField("structured_output") else None,
        )


def _form(message: sampling_pb2.Sampling, forms: Forms | None) -> Form:
    check_form_alone(message)
    if forms is None:
        raise ValueError("structured_output: this model's tokenizer can't be used for it")
    try:
        return forms.form(message)
    except FormError as error:
        raise ValueError(f"structured_output: {error}") from error


def target_rows(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    supports: Sequence[IdArray],
    vocabulary_size: int,
    contexts: Sequence[IdArray | None] | None = None,
) -> list[TargetRow]:
    """The target's side of the rule for R rows.

    `logits` is [R, V_padded], where ids from `vocabulary_size` on are padding; `positions[i]` is the absolute position
    of the token that row i predicts; `supports[i]` the ids that the draft sent for it, [k_i], empty where nothing was
    drafted, in which case the outside draw is a draw from p. `contexts[i]` begins with the `positions[i]` tokens before
    row i; it may be None where its parameters don't read it, and is best the same array for rows of one block. Raises
    ValueError for logits that make no distribution.
    """
    if len(params) == 0:
        return []
    _check_supports(supports, vocabulary_size)
    scores, dead_ends = _scores(logits, params, positions, vocabulary_size, contexts)
    here, there = _split(scores, [host_rows.reads(each, vocabulary_size) for each in params])
    rows: dict[int, TargetRow] = {}
    if here:
        host = scores.numpy()
        rows = {row: host_rows.read(row, host[row], params[row], positions[row], supports[row]) for row in here}
    if there:
        rows |= zip(there, _target_rows(scores, params, positions, supports, there), strict=True)
    for row in dead_ends:
        rows[row].dead_end = True
    for row, logprobs in _logprobs(logits, scores, params, positions, rows, supports).items():
        rows[row].logprobs = logprobs
    return [rows[row] for row in range(len(params))]


def _target_rows(
    scores: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    supports: Sequence[IdArray],
    chosen: list[int],
) -> list[TargetRow]:
    """The chosen ones of the rows."""
    support = _pad_supports([supports[row] for row in chosen], scores.shape[-1])
    batch = _Batch.make(
        [params[row] for row in chosen],
        [positions[row] for row in chosen],
        Lane.OUTSIDE,
        scores,
        torch.from_numpy(support),
    )
    readings = _readings(_take(scores, chosen), batch)
    _check_finite(readings[:, _Column.STATUS] == _Status.NOT_FINITE, chosen)
    on_support = readings[:, len(_Column) :].astype(np.float32)
    return [
        TargetRow(
            probs[: supports[row].size],
            float(reading[_Column.OUTSIDE_MASS]),
            int(reading[_Column.OUTSIDE_TOKEN]),
        )
        for row, probs, reading in zip(chosen, on_support, readings, strict=True)
    ]


def draft_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    vocabulary_size: int,
    support_size: int,
    contexts: Sequence[IdArray | None] | None = None,
) -> list[Drafted]:
    """One draft token for each of R rows, with the distribution it was drawn from.

    q is the processed distribution, cut to its `support_size` most likely tokens and renormalised in float32; the token
    is drawn from exactly those float32 values. Arguments and errors are those of `target_rows`.
    """
    return draft_tokens_and_confidences(logits, params, positions, vocabulary_size, support_size, contexts)[0]


def draft_tokens_and_confidences(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    vocabulary_size: int,
    support_size: int,
    contexts: Sequence[IdArray | None] | None = None,
    confident: Sequence[int] = (),
) -> tuple[list[Drafted], list[float]]:
    """The draft tokens, and for the rows `confident`, in rising order, the probability of the likeliest token at the row's
    temperature, before anything is cut; at 1 where that is 0. 1.0 for all others."""
    if len(params) == 0:
        return [], []
    scores, _ = _scores(logits, params, positions, vocabulary_size, contexts)
    size = min(support_size, vocabulary_size)
    here, there = _split(scores, [host_rows.drafts(each) for each in params])
    drawn: dict[int, tuple[Drafted, float]] = {}
    if here:
        host = scores.numpy()
        drawn = {
            row: host_rows.draft(row, host[row], params[row], positions[row], size, confident=row in confident)
            for row in here
        }
    if there:
        drawn |= zip(there, _draft_tokens(scores, params, positions, size, confident, there), strict=True)
    drafted, confidences = zip(*(drawn[row] for row in range(len(params))), strict=True)
    return list(drafted), list(confidences)


def _draft_tokens(
    scores: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    size: int,
    confident: Sequence[int],
    chosen: list[int],
) -> list[tuple[Drafted, float]]:
    """Of the chosen ones of the rows."""
    scores, params = _take(scores, chosen), [params[row] for row in chosen]
    no_support = torch.empty(len(params), 0, dtype=torch.int64)
    batch = _Batch.make(params, [positions[row] for row in chosen], Lane.DRAFT, scores, no_support)
    asked = [index for index, row in enumerate(chosen) if row in confident]
    # [:, 0] ids, [:, 1] log-weights; what a row leaves unused has no weight. Beside them confidences, if any are wanted.
    packed = torch.full((len(params), 2, size + bool(asked)), _NO_LOGIT, dtype=torch.float64, device=scores.device)
    for propose, rows in (
        (_propose_greedy, [row for row, each in enumerate(params) if each.temperature == 0.0]),
        (_propose_sampled, [row for row, each in enumerate(params) if each.temperature != 0.0]),
    ):
        if rows:
            proposal = propose(_take(scores, rows), batch.take(rows), size)
            packed[torch.tensor(rows, device=scores.device), :, : proposal.shape[-1]] = proposal
    if asked:
        packed[torch.tensor(asked, device=scores.device), 1, size] = _log_confidences(
            _take(scores, asked), batch.take(asked)
        )
    host: NDArray[np.float64] = packed.cpu().numpy()
    _check_finite(~np.isfinite(host[:, 1, 0]), chosen)
    confidences = np.ones(len(params))
    if asked:
        confidences[asked] = np.exp(host[asked, 1, size])
    return list(zip(_draw_drafted(host[:, 0, :size], host[:, 1, :size], batch), confidences.tolist(), strict=True))


# --- Rows and their parameters ---------------------------------------------------------------------------------------


class _Way(Enum):
    GREEDY = 0
    TOP = 1
    ALL = 2


class _Column(IntEnum):
    """What a reading of a row holds in its first columns; p on the support follows."""

    STATUS = 0
    OUTSIDE_TOKEN = 1
    OUTSIDE_MASS = 2


class _Status(IntEnum):
    GOOD = 0
    INCOMPLETE = 1
    NOT_FINITE = 2


def _way(params: SamplingParams, top_k: int) -> _Way:
    if params.temperature == 0.0:
        return _Way.GREEDY
    if top_k:
        return _Way.TOP if top_k <= _MOST_TOP_K else _Way.ALL
    return _Way.TOP if params.top_p < 1.0 else _Way.ALL


@dataclass(frozen=True, slots=True)
class _Batch:
    """Parameters of n rows: where the CPU decides, as they came; where the device does, as tensors."""

    params: list[SamplingParams]
    positions: list[int]
    top_k: list[int]
    """0 where it cuts nothing: then there is no need to look."""
    uniform: NDArray[np.float64]
    """[n]"""
    columns: Tensor
    """[n, 5] float64: temperature, top_k, top_p, min_p, uniform."""
    support: Tensor
    """[n, K] int64, padded with the vocabulary size."""

    @classmethod
    def make(
        cls,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        lane: Lane,
        scores: Tensor,
        support: Tensor,
    ) -> _Batch:
        vocabulary_size, device = scores.shape[-1], scores.device
        top_k = [each.top_k if each.top_k < vocabulary_size else 0 for each in params]
        uniform = lane_uniforms([each.seed for each in params], positions, lane)
        columns = np.array([(each.temperature, 0.0, each.top_p, each.min_p, 0.0) for each in params])
        columns[:, 1] = top_k
        columns[:, 4] = uniform
        on_device = torch.from_numpy(columns).to(device)
        return cls(list(params), list(positions), top_k, uniform, on_device, support.to(device))

    def take(self, rows: list[int]) -> _Batch:
        if len(rows) == len(self.params):
            return self
        return _Batch(
            [self.params[row] for row in rows],
            [self.positions[row] for row in rows],
            [self.top_k[row] for row in rows],
            self.uniform[rows],
            _take(self.columns, rows),
            _take(self.support, rows),
        )

    def column(self, index: int) -> Tensor:
        """[n, 1] float32, so that arithmetic with scores stays in float32."""
        return self.columns[:, index, None].float()

    def scaled(self, scores: Tensor) -> Tensor:
        """Scores over the temperature, [n, V]; the very same tensor where there is nothing to do."""
        if all(each.temperature == 1.0 for each in self.params):
            return scores
        return scores / self.column(0)

    def uniform_column(self) -> Tensor:
        """[n, 1] float64."""
        return self.columns[:, 4, None]

    def noise(self, vocabulary_size: int, device: torch.device) -> Tensor:
        """Gumbel noise, [n, V] float32."""
        noise = np.empty((len(self.params), vocabulary_size), dtype=np.float32)
        for row, (each, position) in enumerate(zip(self.params, self.positions, strict=True)):
            noise[row] = gumbel_noise(each.seed, position, vocabulary_size)
        return torch.from_numpy(noise).to(device)


def _check_supports(supports: Sequence[IdArray], vocabulary_size: int) -> None:
    for row, ids in enumerate(supports):
        if ids.size and int(np.maximum.reduce(ids)) >= vocabulary_size:
            raise ValueError(f"row {row}: the support holds an id outside of the vocabulary")


def _pad_supports(supports: Sequence[IdArray], vocabulary_size: int) -> NDArray[np.int64]:
    """[R, max k], padded with an id just outside of the vocabulary."""
    width = max(ids.size for ids in supports)
    padded = np.full((len(supports), width), vocabulary_size, dtype=np.int64)
    for row, ids in enumerate(supports):
        padded[row, : ids.size] = ids
    return padded


def _split(scores: Tensor, readable: list[bool]) -> tuple[list[int], list[int]]:
    """Which rows `host_rows` reads, of those that it could, and which are read here."""
    if not _on_host(scores):
        return [], list(range(len(readable)))
    return [row for row, yes in enumerate(readable) if yes], [row for row, yes in enumerate(readable) if not yes]


def _on_host(scores: Tensor) -> bool:
    return bool(scores.device.type == "cpu")


def _scores(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    vocabulary_size: int,
    contexts: Sequence[IdArray | None] | None,
) -> tuple[Tensor, frozenset[int]]:
    """Logits without padding, adjusted, without suppressed tokens, [R, V] float32, and the rows in which a form allows none;
    the caller's tensor is never written to."""
    adjustments = [each.adjustments for each in params]
    scores = adjust(logits[:, :vocabulary_size].float(), adjustments, positions, contexts)
    scores, dead_ends = mask(scores, [each.form for each in params], positions, contexts)
    suppressed = [
        (row, token_id)
        for row, (each, position) in enumerate(zip(params, positions, strict=True))
        if position < each.min_length
        for token_id in each.end_token_ids
        if token_id < vocabulary_size
    ]
    if suppressed:
        rows, ids = torch.tensor(suppressed, device=scores.device).unbind(-1)
        scores = scores.index_put((rows, ids), torch.tensor(_NO_LOGIT, device=scores.device))
    return scores, dead_ends


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    """Some rows of a tensor, in rising order; without a copy where they are all of them."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor[torch.tensor(rows, device=tensor.device)]


def _check_finite(faulty: NDArray[np.bool_], rows: list[int]) -> None:
    """Raises ValueError with the first of `rows` that is faulty."""
    if faulty.any():
        raise host_rows.no_distribution(rows[int(np.argmax(faulty))])


# --- Distributions ---------------------------------------------------------------------------------------------------
#
# Weights come from softmax, even where any common factor would do: on a CPU torch.exp takes ten times as long for -inf,
# and forty times for what underflows, which most of a row does at a low temperature.


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The most likely tokens of n rows in falling order; the kept ones are a prefix."""

    ids: Tensor
    """[n, M] int64"""
    scores: Tensor
    """[n, M] float32, relative to the largest; -inf where not kept. The first is NaN for a faulty row."""
    complete: Tensor
    """[n] bool: no token beyond the candidates may be kept."""


def _candidates(scaled: Tensor, batch: _Batch, count: int) -> _Candidates:
    """top_k, top_p and min_p on the `count` best of each row of `scaled` [n, V]."""
    values, ids = _best(scaled, count)
    relative = values - values.amax(-1, keepdim=True)  # unlike values[:, :1], NaN if any is
    keep = torch.ones_like(values, dtype=torch.bool)
    complete = torch.ones_like(values[:, :1], dtype=torch.bool)
    if any(batch.top_k):
        top_k = batch.columns[:, 1, None].long()
        kth = values.gather(-1, (top_k - 1).clamp(0, count - 1))
        keep &= (values >= kth) | (top_k == 0) | (top_k > count)
        # More ties with the last of top_k than candidates would add to the mass that top_p is a share of.
        complete &= (values[:, -1:] < kth) | (top_k == 0)
    if any(each.top_p < 1.0 for each in batch.params):
        left = torch.where(keep, relative, _NO_LOGIT).softmax(-1).double()
        left = left / left[:, :1]
        before = left.cumsum(-1) - left
        top_p = batch.columns[:, 2, None]
        keep &= (before < top_p * _mass_before_top_p(scaled, values, left, batch)) | (top_p >= 1.0)
    if any(each.min_p > 0.0 for each in batch.params):
        keep &= relative >= batch.column(3).log()
    keep[:, 0] = True
    last_kept = values.gather(-1, keep.sum(-1, keepdim=True) - 1)
    complete &= values[:, -1:] < last_kept
    # Nor is there anything beyond them where fewer have any mass, as behind a form or a short list of allowed ids.
    complete |= (values[:, -1:] == _NO_LOGIT) | (count == scaled.shape[-1])
    return _Candidates(ids, relative.masked_fill(~keep, _NO_LOGIT), complete[:, 0])


def _best(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their ids, falling; of equal values the higher id comes first, as if read
    from the end of a stable ascending sort: that decides which of several equal tokens top_p keeps."""
    values, ids = scaled.topk(count, dim=-1, sorted=False)
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 makes one zero of two
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = ((rising << 32) | ids).argsort(dim=-1, descending=True)
    return values.gather(-1, order), ids.gather(-1, order)


def _mass_before_top_p(scaled: Tensor, values: Tensor, left: Tensor, batch: _Batch) -> Tensor:
    """Mass of all tokens that top_k has left, relative to the best one's, [n, 1] float64; `left` [n, M] is that of the
    candidates."""
    mass = left.sum(-1, keepdim=True)
    if values.shape[-1] == scaled.shape[-1]:
        return mass
    # Only a row without top_k has mass beyond its candidates.
    rows = [row for row, each in enumerate(batch.params) if each.top_p < 1.0 and not batch.top_k[row]]
    if rows:
        index = torch.tensor(rows, device=scaled.device)
        weights = _take(scaled, rows).softmax(-1)
        mass = mass.index_copy(0, index, (weights.sum(-1, keepdim=True) / weights.amax(-1, keepdim=True)).double())
    return mass


def _shaped(scaled: Tensor, batch: _Batch) -> Tensor:
    """top_k, top_p and min_p on whole rows [n, V], step by step as transformers does; -inf where a token is cut."""
    for wanted, cut in (
        (batch.top_k, _cut_top_k),
        ([each.top_p < 1.0 for each in batch.params], _cut_top_p),
        ([each.min_p > 0.0 for each in batch.params], _cut_min_p),
    ):
        rows = [row for row, yes in enumerate(wanted) if yes]
        if len(rows) == len(wanted):
            scaled = cut(scaled, batch)
        elif rows:
            index = torch.tensor(rows, device=scaled.device)
            scaled = scaled.index_copy(0, index, cut(scaled[index], batch.take(rows)))
    return scaled


def _cut_top_k(scaled: Tensor, batch: _Batch) -> Tensor:
    largest = scaled.topk(max(batch.top_k), dim=-1).values
    return torch.where(scaled < largest.gather(-1, batch.columns[:, 1, None].long() - 1), _NO_LOGIT, scaled)


def _cut_top_p(scaled: Tensor, batch: _Batch) -> Tensor:
    ascending, order = scaled.sort(dim=-1, stable=True)
    cut = ascending.softmax(-1).cumsum(-1) <= (1.0 - batch.columns[:, 2, None]).float()
    cut[:, -1] = False
    return torch.where(cut.scatter(-1, order, cut), _NO_LOGIT, scaled)


def _cut_min_p(scaled: Tensor, batch: _Batch) -> Tensor:
    return torch.where(scaled < scaled.amax(-1, keepdim=True) + batch.column(3).log(), _NO_LOGIT, scaled)


# --- Reading the target's rows ---------------------------------------------------------------------------------------


def _readings(scores: Tensor, batch: _Batch) -> NDArray[np.float64]:
    """Readings of all rows, [R, columns + K]."""
    ways = [_way(each, top_k) for each, top_k in zip(batch.params, batch.top_k, strict=True)]
    readings = _read(scores, batch, ways, _PREFILTERS[0])
    for prefilter in _PREFILTERS[1:]:
        _read_again(readings, scores, batch, _Way.TOP, prefilter)
    _read_again(readings, scores, batch, _Way.ALL, 0)
    return readings


def _read_again(readings: NDArray[np.float64], scores: Tensor, batch: _Batch, way: _Way, prefilter: int) -> None:
    rows = np.flatnonzero(readings[:, _Column.STATUS] == _Status.INCOMPLETE).tolist()
    if rows:
        readings[rows] = _read(_take(scores, rows), batch.take(rows), [way] * len(rows), prefilter)


def _read(scores: Tensor, batch: _Batch, ways: list[_Way], prefilter: int) -> NDArray[np.float64]:
    """Readings of all rows, one way after the other, then one transfer."""
    width = len(_Column) + batch.support.shape[-1]
    readings = torch.empty(scores.shape[0], width, dtype=torch.float64, device=scores.device)
    for way, coupled, reader in (
        (_Way.GREEDY, None, _read_greedy),
        (_Way.TOP, False, partial(_read_top, prefilter=prefilter)),
        (_Way.TOP, True, partial(_read_top_coupled, prefilter=prefilter)),
        (_Way.ALL, False, _read_all),
        (_Way.ALL, True, _read_all_coupled),
    ):
        rows = [row for row, each in enumerate(batch.params) if ways[row] is way and coupled in (None, each.coupled)]
        if len(rows) == len(ways):
            readings = reader(scores, batch)
        elif rows:
            index = torch.tensor(rows, device=scores.device)
            readings.index_copy_(0, index, reader(scores[index], batch.take(rows)))
    host: NDArray[np.float64] = readings.cpu().numpy()
    return host


def _read_greedy(scores: Tensor, batch: _Batch) -> Tensor:
    winner = scores.argmax(-1, keepdim=True)
    return _one_hot(winner, scores.gather(-1, winner), batch.support)


def _read_top(scores: Tensor, batch: _Batch, prefilter: int) -> Tensor:
    vocabulary_size = scores.shape[-1]
    candidates = _candidates(batch.scaled(scores), batch, _count(batch, prefilter, vocabulary_size))
    # The last column has no weight: it is where ids that are no candidates are found.
    weights = pad(candidates.scores.softmax(-1), (0, 1))
    found = _find(batch.support, candidates.ids)
    outside = weights.scatter(-1, found, 0.0).cumsum(-1, dtype=torch.float64)
    drawn = _search(outside, batch.uniform_column() * outside[:, -1:]).clamp_(max=candidates.ids.shape[-1] - 1)
    reading = _reading(outside[:, -1:], candidates.ids.gather(-1, drawn), weights.gather(-1, found))
    return _mark_incomplete(reading, candidates)


def _read_top_coupled(scores: Tensor, batch: _Batch, prefilter: int) -> Tensor:
    vocabulary_size = scores.shape[-1]
    candidates = _candidates(batch.scaled(scores), batch, _count(batch, prefilter, vocabulary_size))
    noise = batch.noise(vocabulary_size, scores.device).gather(-1, candidates.ids)
    winner = candidates.ids.gather(-1, (candidates.scores + noise).argmax(-1, keepdim=True))
    return _mark_incomplete(_one_hot(winner, candidates.scores[:, :1], batch.support), candidates)


def _read_all(scores: Tensor, batch: _Batch) -> Tensor:
    rows, vocabulary_size = scores.shape
    # Whole blocks, and at least one column more than ids, with no weight: the padding of the support finds it.
    blocks = vocabulary_size // _BLOCK + 1
    shaped = pad(_shaped(batch.scaled(scores), batch), (0, blocks * _BLOCK - vocabulary_size), value=_NO_LOGIT)
    weights = shaped.softmax(-1)
    inside = weights.gather(-1, batch.support)
    weights.scatter_(-1, batch.support, 0.0)
    mass, token = _draw_in_blocks(weights.view(rows, blocks, _BLOCK), batch.uniform_column())
    return _reading(mass, token.clamp_(max=vocabulary_size - 1), inside)


def _read_all_coupled(scores: Tensor, batch: _Batch) -> Tensor:
    shaped = _shaped(batch.scaled(scores), batch)
    best = shaped.amax(-1, keepdim=True)
    noisy = batch.noise(scores.shape[-1], scores.device).add_(shaped - best)
    return _one_hot(noisy.argmax(-1, keepdim=True), best, batch.support)


def _count(batch: _Batch, prefilter: int, vocabulary_size: int) -> int:
    """How many candidates to look at: enough for the largest top_k, and for top_p where no top_k bounds it."""
    unbounded = 0 in batch.top_k
    return min(max(prefilter if unbounded else 0, max(batch.top_k) + _TIE_SLACK), vocabulary_size)


def _find(support: Tensor, ids: Tensor) -> Tensor:
    """Where each id of the support [n, K] stands in `ids` [n, M]; M for an id that is not there, or is padding."""
    rising, order = ids.sort(dim=-1)
    place = torch.searchsorted(rising, support).clamp_(max=ids.shape[-1] - 1)
    return torch.where(rising.gather(-1, place) == support, order.gather(-1, place), ids.shape[-1])


def _draw_in_blocks(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The total of `weights` [n, blocks, width] and an index drawn from them, both [n, 1].

    A block first, then within it: two short cumulative sums in place of one over the vocabulary.
    """
    rows, _, width = weights.shape
    sums = weights.sum(-1).cumsum(-1, dtype=torch.float64)
    mass = sums[:, -1:]
    target = uniform * mass
    block = _search(sums, target).clamp_(max=sums.shape[-1] - 1)
    below = pad(sums, (1, 0)).gather(-1, block)
    share = (target - below) / (sums.gather(-1, block) - below)
    within = weights[torch.arange(rows, device=weights.device), block[:, 0]].cumsum(-1, dtype=torch.float64)
    index = _search(within, share * within[:, -1:]).clamp_(max=width - 1)
    return mass, block * width + index


def _search(cumulative: Tensor, target: Tensor) -> Tensor:
    """The first index whose cumulative weight exceeds `target`: never one without weight, unless none has any."""
    # The bound guards against uniform * total rounding up to the total.
    below_total = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(cumulative, torch.minimum(target, below_total), right=True)


def _one_hot(winner: Tensor, best: Tensor, support: Tensor) -> Tensor:
    """The reading of a distribution with all mass on `winner` [n, 1]; `best` is the row's largest score, or NaN."""
    inside = support == winner
    weightless = best - best  # 0, or NaN
    return _reading(~inside.any(-1, keepdim=True) + weightless, winner, inside)


def _reading(outside: Tensor, token: Tensor, inside: Tensor) -> Tensor:
    """Columns, then p on the support; `outside` [n, 1] and `inside` [n, K] are weights, normalised here."""
    weights = torch.cat((outside.double(), inside.double()), dim=-1)
    total = weights.sum(-1, keepdim=True)
    # A faulty logit, or a row of none, has made NaN of its weights by now.
    status = torch.where(total.isfinite(), int(_Status.GOOD), int(_Status.NOT_FINITE))
    return torch.cat((status.double(), token.double(), weights / total), dim=-1)


def _mark_incomplete(reading: Tensor, candidates: _Candidates) -> Tensor:
    status = reading[:, _Column.STATUS]
    unfinished = (status == int(_Status.GOOD)) & ~candidates.complete
    status.masked_fill_(unfinished, float(_Status.INCOMPLETE))
    return reading


def _logprobs(
    logits: Tensor,
    scores: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    rows: Mapping[int, TargetRow],
    supports: Sequence[IdArray],
) -> dict[int, RowLogprobs]:
    """For the rows that ask for them. `logits` are the model's, `scores` adjusted and without suppressed tokens."""
    found: dict[int, RowLogprobs] = {}
    wanted = {row: each.logprobs for row, each in enumerate(params) if each.logprobs is not None}
    if not wanted:
        return found
    batch = _Batch.make(
        params, positions, Lane.OUTSIDE, scores, torch.empty(len(params), 0, dtype=torch.int64)
    )  # of which no draw is made
    warm = [each.temperature > 0.0 for each in params]
    raw = [row for row, each in wanted.items() if each.mode is LogprobsMode.RAW]
    drawn_from = [row for row in wanted if row not in raw and warm[row]]
    greedy = [row for row in wanted if row not in raw and not warm[row]]
    for chosen, scores_of in ((raw, _raw_scores), (drawn_from, _drawn_scores), (greedy, _greedy_scores)):
        if chosen:
            asked = [(supports[row], rows[row].outside_token_id, wanted[row]) for row in chosen]
            found.update(zip(chosen, row_logprobs(scores_of(logits, scores, batch, chosen), asked), strict=True))
    return found


def _raw_scores(logits: Tensor, scores: Tensor, _batch: _Batch, rows: list[int]) -> Tensor:
    return _take(logits, rows)[:, : scores.shape[-1]].float()


def _drawn_scores(_logits: Tensor, scores: Tensor, batch: _Batch, rows: list[int]) -> Tensor:
    some = batch.take(rows)
    return _shaped(some.scaled(_take(scores, rows)), some)


def _greedy_scores(_logits: Tensor, scores: Tensor, _batch: _Batch, rows: list[int]) -> Tensor:
    return _take(scores, rows)


# --- Drawing the draft's tokens --------------------------------------------------------------------------------------


def _log_confidences(scores: Tensor, batch: _Batch) -> Tensor:
    """Of the likeliest token, [n] float64."""
    temperatures = torch.where(batch.column(0) > 0.0, batch.column(0), 1.0)
    scaled = scores if all(each.temperature in (0.0, 1.0) for each in batch.params) else scores / temperatures
    return (scaled.amax(-1) - scaled.logsumexp(-1)).double()


def _propose_greedy(scores: Tensor, _batch: _Batch, _size: int) -> Tensor:
    """Ids and log-weights, [n, 2, 1] float64."""
    winner = scores.argmax(-1, keepdim=True)
    best = scores.gather(-1, winner)
    return torch.stack((winner.double(), (best - best).double()), dim=1)  # 0, or NaN


def _propose_sampled(scores: Tensor, batch: _Batch, size: int) -> Tensor:
    """Ids and log-weights of the `size` best, [n, 2, size] float64."""
    # With top_p the mass of all that top_k keeps must be known; otherwise the support is enough.
    of_top_k = [k + _TIE_SLACK for each, k in zip(batch.params, batch.top_k, strict=True) if k and each.top_p < 1.0]
    count = min(max([size, *of_top_k]), scores.shape[-1])
    candidates = _candidates(batch.scaled(scores), batch, count)
    return torch.stack((candidates.ids[:, :size].double(), candidates.scores[:, :size].double()), dim=1)


def _draw_drafted(ids: NDArray[np.float64], log_weights: NDArray[np.float64], batch: _Batch) -> list[Drafted]:
    """Draft tokens from log-weights [R, k] in falling order, their largest 0."""
    weights = np.exp(log_weights, dtype=np.float32)
    q = weights / weights.sum(-1, keepdims=True)
    sizes = np.count_nonzero(q, axis=-1)  # what has mass comes first
    cumulative = q.cumsum(-1, dtype=np.float64)
    totals = cumulative[:, -1:]
    targets = np.minimum(batch.uniform[:, None] * totals, np.nextafter(totals, 0.0))
    indices = (cumulative <= targets).sum(-1)
    supports = np.where(q > 0.0, ids, 0).astype(np.uint32)
    coupled = [row for row, each in enumerate(batch.params) if each.coupled]
    if coupled:
        supports[coupled, 0] = _coupled_winners(supports[coupled], log_weights[coupled], batch.take(coupled))
        q[coupled, 0], sizes[coupled], indices[coupled] = 1.0, 1, 0
    return [
        Drafted(int(support[index]), support[:size], probs[:size], int(index))
        for support, probs, size, index in zip(supports, q, sizes, indices, strict=True)
    ]


def _coupled_winners(ids: NDArray[np.uint32], log_weights: NDArray[np.float64], batch: _Batch) -> NDArray[np.uint32]:
    """The argmax of each row with the target's noise: its token is drafted wherever it is in the support."""
    noise = gumbel_noise_at([each.seed for each in batch.params], batch.positions, ids)
    indices = (log_weights.astype(np.float32) + noise).argmax(-1)
    winners: NDArray[np.uint32] = ids[np.arange(len(ids)), indices]
    return winners
