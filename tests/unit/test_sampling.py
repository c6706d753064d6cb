"""The sampling contract, against the warpers of transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandem import sampling
from tandem.acceptance import Drafted, TargetRow, check_drafted
from tandem.randomness import Lane, gumbel_noise, uniforms
from tandem.sampling import SamplingParams, draft_tokens, draft_tokens_and_confidences, target_rows
from tandem.v1 import sampling_pb2

NO_SUPPORT = np.zeros(0, dtype=np.uint32)


def make_params(**overrides: object) -> SamplingParams:
    fields: dict[str, object] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 7,
        "coupled": False,
        "min_length": 0,
        "end_token_ids": (),
    }
    return SamplingParams(**(fields | overrides))  # type: ignore[arg-type]


def oracle(scores: Tensor, params: SamplingParams, position: int = 0) -> NDArray[np.float64]:
    """p over the vocabulary for one row of logits [V], as transformers' generate makes it."""
    steps = LogitsProcessorList()
    if params.min_length and params.end_token_ids:
        steps.append(MinLengthLogitsProcessor(params.min_length, list(params.end_token_ids)))
    if params.temperature not in (0.0, 1.0):
        steps.append(TemperatureLogitsWarper(params.temperature))
    if params.temperature and params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.temperature and params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.temperature and params.min_p:
        steps.append(MinPLogitsWarper(params.min_p))
    processed = steps(torch.zeros(1, position, dtype=torch.long), scores[None].float())[0]
    if params.temperature == 0.0:
        processed = torch.full_like(processed, -torch.inf).index_fill(0, processed.argmax(), 0.0)
    # In float32 this softmax alone is wrong by more than 1e-6.
    return processed.double().softmax(-1).numpy()


@pytest.fixture(autouse=True)
def stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of several equal tokens top_p keeps depends on transformers' sort, which isn't stable from 17 elements on,
    so arbitrary. Ours is the choice of a stable one."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))


@pytest.fixture(params=["host", "device"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether rows in a CPU's memory are read as such, or all as a device's are."""
    if request.param == "device":
        monkeypatch.setattr(sampling, "_on_host", lambda _: False)


def from_row(row: TargetRow, support: NDArray[np.uint32], reference: NDArray[np.float64]) -> float:
    """Largest deviation of a target row from a whole distribution."""
    outside = np.ones(reference.size, dtype=bool)
    outside[support] = False
    assert row.p.dtype == np.float32
    assert row.p.shape == support.shape
    if reference[outside].sum() > 1e-5:
        assert outside[row.outside_token_id]
        assert reference[row.outside_token_id] > 0.0
    assert 0 <= row.outside_token_id < reference.size
    deviation = abs(row.outside_mass - reference[outside].sum())
    return float(np.abs(row.p - reference[support]).max(initial=deviation))


def random_support(rng: np.random.Generator, size: int, count: int) -> NDArray[np.uint32]:
    return rng.choice(size, count, replace=False).astype(np.uint32)


GRID = [
    make_params(temperature=float(np.float32(temperature)), top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in product(
        (0.0, 0.3, 0.7, 1.0, 1.7),
        (0, 1, 8, 50, 5000),
        (1.0, float(np.float32(0.9)), 0.5, float(np.float32(0.05))),
        (0.0, float(np.float32(0.1)), 1.0),
    )
]


def logits_of_kind(kind: str, rows: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    plain = torch.randn(rows, size, generator=generator) * 3.0
    if kind == "ties":
        return plain.round()
    if kind == "bfloat16":
        return plain.bfloat16()
    if kind == "flat":
        return plain * 0.01
    if kind == "equal":
        return torch.zeros(rows, size)
    if kind == "masked":
        masked = torch.rand(rows, size, generator=generator) < 0.9
        masked[:, 5] = False
        return plain.masked_fill(masked, -torch.inf)
    return plain


@pytest.mark.parametrize("size", [40, 1531, 3001])
@pytest.mark.parametrize("kind", ["plain", "ties", "bfloat16", "flat", "masked"])
def test_target_rows_match_transformers_over_the_grid(kind: str, size: int) -> None:
    rng = np.random.default_rng(11)
    logits = logits_of_kind(kind, len(GRID), size)
    best = logits.float().argsort(dim=-1, descending=True)[:, :8].numpy().astype(np.uint32)
    supports = [
        np.unique(np.concatenate([best[row, : row % 9], random_support(rng, size, row % 5)]))
        for row in range(len(GRID))
    ]
    rows = target_rows(logits, GRID, list(range(len(GRID))), supports, size)
    deviations = [
        from_row(row, support, oracle(scores, params))
        for row, support, scores, params in zip(rows, supports, logits, GRID, strict=True)
    ]
    worst = int(np.argmax(deviations))
    assert max(deviations) <= 1e-6, (deviations[worst], GRID[worst])


class _NoScalars(TorchDispatchMode):
    """Reading one number of a tensor, as `float` and `item` do, waits for the device too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["plain", "flat"])
def test_rows_come_back_from_the_device_together(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transfer waits for all that was computed: one for all rows of a step, and one or two for those among them that need
    another look, however many rows there are."""
    transfers: list[Tensor] = []
    cpu = Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        transfers.append(tensor)
        return cpu(tensor)

    monkeypatch.setattr(Tensor, "cpu", counted)
    size, again = 1531, 3
    counts = []
    for params in (GRID, GRID * again):
        logits = logits_of_kind(kind, len(GRID), size).repeat(len(params) // len(GRID), 1)
        supports = [np.arange(5, dtype=np.uint32)] * len(params)
        positions = list(range(len(params)))
        for step in (
            lambda: target_rows(logits, params, positions, supports, size),  # noqa: B023 - called at once
            lambda: draft_tokens(logits, params, positions, size, 64),  # noqa: B023 - called at once
        ):
            transfers.clear()
            with _NoScalars():
                step()
            counts.append(len(transfers))
    assert counts[:2] == counts[2:], "three times the rows, and not one transfer more"
    assert max(counts) <= 3


def deviation(logits: Tensor, params: SamplingParams, position: int = 0) -> float:
    """How far one row, seen from a few supports, is from transformers."""
    size = logits.shape[-1]
    reference = oracle(logits[0], params, position)
    likely = np.argsort(-reference, kind="stable")[:30].astype(np.uint32)
    anywhere = random_support(np.random.default_rng(1), size, min(size, 9))
    supports = [NO_SUPPORT, likely[:1], likely, likely[::-1].copy(), anywhere]
    count = len(supports)
    rows = target_rows(logits.expand(count, -1), [params] * count, [position] * count, supports, size)
    return max(from_row(row, support, reference) for row, support in zip(rows, supports, strict=True))


@pytest.mark.parametrize("top_k", [1, 3, 20, 40])
@pytest.mark.parametrize("top_p", [0.1113, 0.5113, 0.7613, 1.0])  # off any multiple of 1 / size
@pytest.mark.parametrize("min_p", [0.0, 1.0])
@pytest.mark.parametrize("size", [40, 700, 5000])
def test_rows_of_equal_logits(size: int, top_k: int, top_p: float, min_p: float) -> None:
    """One tie through and through: top_k keeps them all, top_p a part of them."""
    assert deviation(torch.zeros(1, size), make_params(top_k=top_k, top_p=top_p, min_p=min_p)) <= 1e-6


@pytest.mark.parametrize("top_k", [0, 5, 300, 3000])
def test_more_ties_than_candidates(top_k: int) -> None:
    """A few likely tokens over a plateau that is wider than any prefilter."""
    logits = torch.zeros(1, 4000)
    logits[0, [7, 1900, 3999]] = torch.tensor([9.0, 8.0, 8.0])
    for top_p in (1.0, float(np.float32(0.9)), 0.5):
        assert deviation(logits, make_params(top_k=top_k, top_p=top_p)) <= 1e-6


@pytest.mark.parametrize("top_p", [0.5, 0.875, 0.984375])
def test_top_p_on_either_side_of_a_boundary(top_p: float) -> None:
    logits = torch.tensor([[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -6.0]]) * float(np.log(2.0))
    reference = oracle(logits[0], make_params(top_p=top_p + 1e-4))
    assert np.count_nonzero(reference) > np.count_nonzero(oracle(logits[0], make_params(top_p=top_p - 1e-4)))
    assert deviation(logits, make_params(top_p=top_p - 1e-4)) <= 1e-6
    assert deviation(logits, make_params(top_p=top_p + 1e-4)) <= 1e-6


def test_a_prefilter_too_small_is_enlarged() -> None:
    """top_p over a flat row needs more candidates than the first prefilter, and then than the last."""
    flat = logits_of_kind("flat", 1, 30_000)
    for top_p in (0.005, 0.05, 0.5):
        assert deviation(flat, make_params(top_p=top_p)) <= 1e-6


@pytest.mark.parametrize("temperature", [0.01, 0.05, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    logits = logits_of_kind("plain", 1, 3000)
    assert deviation(logits, make_params(temperature=float(np.float32(temperature)))) <= 1e-6


def test_temperature_zero_is_one_hot_at_the_first_argmax() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    # All else is idle at temperature 0, as it is in generate.
    params = make_params(temperature=0.0, top_k=2, top_p=0.5, min_p=0.9)
    inside, outside = target_rows(
        logits.expand(2, -1),
        [params] * 2,
        [0, 0],
        [np.array([2, 1], dtype=np.uint32), np.array([2], dtype=np.uint32)],
        4,
    )
    assert (inside.p.tolist(), inside.outside_mass) == ([0.0, 1.0], 0.0)
    assert (outside.p.tolist(), outside.outside_mass, outside.outside_token_id) == ([0.0], 1.0, 1)
    [drafted] = draft_tokens(logits, [params], [0], 4, support_size=64)
    assert (drafted.token_id, drafted.support_ids.tolist(), drafted.q.tolist()) == (1, [1], [1.0])


PADDED = [
    make_params(temperature=0.0),
    make_params(),
    make_params(top_k=5),
    make_params(top_p=0.5),
    make_params(coupled=True),
    make_params(coupled=True, top_p=0.5),
]


@pytest.mark.parametrize("padding", [1e9, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("params", PADDED)
def test_padding_has_no_say(params: SamplingParams, padding: float) -> None:
    logits = logits_of_kind("plain", 1, 40)
    padded = torch.nn.functional.pad(logits, (0, 24), value=padding)
    support = np.array([3, 39], dtype=np.uint32)
    bare, masked = (target_rows(each, [params], [0], [support], 40)[0] for each in (logits, padded))
    assert_same_row(bare, masked)
    assert_same_draft(*(draft_tokens(each, [params], [0], 40, 64)[0] for each in (logits, padded)))


def assert_same_row(one: TargetRow, other: TargetRow) -> None:
    assert one.p == pytest.approx(other.p, abs=1e-7)
    assert one.outside_mass == pytest.approx(other.outside_mass, abs=1e-7)
    assert one.outside_token_id == other.outside_token_id


def assert_same_draft(one: Drafted, other: Drafted) -> None:
    assert one.token_id == other.token_id
    assert one.support_ids.tolist() == other.support_ids.tolist()
    assert one.q == pytest.approx(other.q, abs=1e-7)
    assert one.index == other.index


@pytest.mark.parametrize("params", PADDED)
def test_min_length_takes_the_end_tokens_until_it_is_reached(params: SamplingParams) -> None:
    logits = torch.zeros(1, 40)
    logits[0, [4, 9]] = 30.0
    logits[0, 7] = 20.0
    params = replace(params, min_length=6, end_token_ids=(4, 9, 4, 1000))
    support = np.array([4, 7, 9], dtype=np.uint32)
    before, after = target_rows(logits.expand(2, -1), [params] * 2, [5, 6], [support] * 2, 40)
    assert before.p[[0, 2]].tolist() == [0.0, 0.0]
    assert before.p[1] > 0.99
    assert after.p[[0, 2]].sum() > 0.99
    drafts = draft_tokens(logits.expand(2, -1), [params] * 2, [5, 6], 40, 64)
    assert drafts[0].token_id == 7
    assert not {4, 9} & set(drafts[0].support_ids.tolist())
    assert drafts[1].token_id in (4, 9)
    assert logits[0, 4] == 30.0  # the caller's logits stay as they were


def test_min_length_matches_transformers() -> None:
    logits = logits_of_kind("plain", 1, 60)
    params = make_params(temperature=float(np.float32(0.7)), top_k=9, min_length=3, end_token_ids=(5, 6))
    for position in (2, 3):
        assert deviation(logits, params, position) <= 1e-6


def mixed_batch() -> list[SamplingParams]:
    kinds = [
        make_params(temperature=0.0),
        make_params(),
        make_params(temperature=float(np.float32(0.7)), top_p=float(np.float32(0.9))),
        make_params(top_k=50),
        make_params(top_k=2000, top_p=0.5),
        make_params(min_p=float(np.float32(0.1))),
        make_params(coupled=True),
        make_params(coupled=True, temperature=0.5, top_k=7),
        make_params(coupled=True, temperature=0.0),
        make_params(temperature=1.5, top_p=float(np.float32(0.99)), min_length=1000, end_token_ids=(1, 2)),
    ]
    return [replace(each, seed=seed) for seed in range(5) for each in kinds]


@pytest.mark.parametrize("spread", [1.0, 8.0])  # 8: most tokens weigh next to nothing
@pytest.mark.parametrize("size", [100, 2600])
def test_a_row_does_not_depend_on_its_neighbours(size: int, spread: float) -> None:
    batch = mixed_batch()
    order = np.random.default_rng(4).permutation(len(batch))
    params = [batch[i] for i in order]
    positions = [int(i) % 7 for i in order]
    logits = logits_of_kind("plain", len(batch), size) * spread
    drafts = draft_tokens(logits, params, positions, size, 16)
    supports = [each.support_ids if i % 4 else NO_SUPPORT for i, each in enumerate(drafts)]
    rows = target_rows(logits, params, positions, supports, size)
    for i in range(len(batch)):
        one = slice(i, i + 1)
        [row] = target_rows(logits[one], params[one], positions[one], supports[one], size)
        [draft] = draft_tokens(logits[one], params[one], positions[one], size, 16)
        assert_same_row(row, rows[i])
        assert_same_draft(draft, drafts[i])


@pytest.mark.parametrize("kind", ["plain", "ties", "masked"])
@pytest.mark.parametrize("size", [100, 2600, 9000])
def test_a_cpu_draws_as_any_device(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed_batch()
    positions = list(range(len(batch)))
    logits = logits_of_kind(kind, len(batch), size)
    # No support may end among equal tokens: which of them are in it is nobody's business.
    support_size = size if kind == "ties" else 16
    drafts: dict[bool, list[Drafted]] = {}
    rows: dict[bool, list[TargetRow]] = {}
    for here in (True, False):
        monkeypatch.setattr(sampling, "_on_host", lambda _, here=here: here)
        drafts[here] = draft_tokens(logits, batch, positions, size, support_size)
        supports = [each.support_ids if i % 4 else NO_SUPPORT for i, each in enumerate(drafts[True])]
        rows[here] = target_rows(logits, batch, positions, supports, size)
    for one, other in zip(drafts[True], drafts[False], strict=True):
        assert (one.token_id, one.index, one.support_ids.tolist()) == (
            other.token_id,
            other.index,
            other.support_ids.tolist(),
        )
        assert one.q == pytest.approx(other.q, abs=3e-7)
    for row, another in zip(rows[True], rows[False], strict=True):
        assert row.p == pytest.approx(another.p, abs=3e-7)
        assert row.outside_mass == pytest.approx(another.outside_mass, abs=3e-7)
        assert row.outside_token_id == another.outside_token_id


@pytest.mark.parametrize("params", GRID[::7])
def test_draft_tokens_come_from_the_cut_oracle(params: SamplingParams) -> None:
    size, support_size = 300, 20
    logits = logits_of_kind("plain", 1, size)
    reference = oracle(logits[0], params)
    [drafted] = draft_tokens(logits, [params], [3], size, support_size)
    likely = np.argsort(-reference, kind="stable")[:support_size]
    likely = likely[reference[likely] > 1e-30]
    assert drafted.support_ids.dtype == np.uint32
    assert drafted.q.dtype == np.float32
    assert drafted.support_ids.tolist() == likely.tolist()
    assert drafted.q == pytest.approx(reference[likely] / reference[likely].sum(), abs=1e-6)
    assert (drafted.q > 0.0).all()
    check_drafted(drafted.token_id, drafted.support_ids, drafted.q, size)
    assert drafted.support_ids[drafted.index] == drafted.token_id
    cumulative = drafted.q.cumsum(dtype=np.float64)
    u = uniforms(params.seed, 3)[0, Lane.DRAFT] * cumulative[-1]
    assert drafted.index == np.searchsorted(cumulative, u, side="right")


@pytest.mark.parametrize("params", [make_params(), make_params(top_k=40), make_params(min_p=float(np.float32(0.01)))])
def test_the_outside_draw_has_the_outside_law(params: SamplingParams) -> None:
    """Candidates or two levels of blocks, the draw is one from p with the support taken out (alpha 1e-3)."""
    size, rows = 1300, 2000
    logits = logits_of_kind("plain", 1, size)
    reference = oracle(logits[0], params)
    support = np.argsort(-reference)[1:4].astype(np.uint32)
    reference[support] = 0.0
    params_of = [replace(params, seed=seed) for seed in range(rows)]
    drawn = target_rows(logits.expand(rows, -1), params_of, [5] * rows, [support] * rows, size)
    tokens = np.array([each.outside_token_id for each in drawn])
    counts = np.bincount(tokens, minlength=size)
    assert counts[reference == 0.0].sum() == 0
    likely = np.argsort(-reference)[:8]
    observed = np.append(counts[likely], rows - counts[likely].sum())
    expected = np.append(reference[likely], reference.sum() - reference[likely].sum()) / reference.sum() * rows
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_a_draw_from_p_is_the_same_however_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exhausted prefilters end in a pass over the whole row, with the same p."""
    logits = logits_of_kind("plain", 20, 3000)
    params = [make_params(top_p=float(np.float32(0.9)), seed=seed) for seed in range(20)]
    support = [np.arange(3, 3000, 7, dtype=np.uint32)] * 20
    few = target_rows(logits, params, [0] * 20, support, 3000)
    monkeypatch.setattr(sampling, "_PREFILTERS", (1, 2))
    for one, other in zip(few, target_rows(logits, params, [0] * 20, support, 3000), strict=True):
        assert one.p == pytest.approx(other.p, abs=1e-6)
        assert one.outside_mass == pytest.approx(other.outside_mass, abs=1e-6)


def test_the_outside_token_is_in_the_vocabulary_even_without_outside_mass() -> None:
    for params in PADDED:
        for size in (511, 512, 513):
            support = np.arange(size, dtype=np.uint32)
            [row] = target_rows(torch.zeros(1, size), [params], [0], [support], size)
            assert row.outside_mass == 0.0
            assert row.p.sum(dtype=np.float64) == pytest.approx(1.0, abs=1e-6)
            assert 0 <= row.outside_token_id < size


@pytest.mark.parametrize("shape", [{}, {"top_k": 30}, {"top_p": 0.5}, {"temperature": 0.5, "min_p": 0.25}])
def test_coupled_is_the_argmax_of_p_with_noise(shape: dict[str, float]) -> None:
    size, rows = 900, 30
    logits = logits_of_kind("plain", rows, size)
    params = [make_params(coupled=True, seed=seed, **shape) for seed in range(rows)]
    everything = np.arange(size, dtype=np.uint32)
    seen = target_rows(logits, params, [8] * rows, [everything] * rows, size)
    unseen = target_rows(logits, params, [8] * rows, [NO_SUPPORT] * rows, size)
    drafts = draft_tokens(logits, params, [8] * rows, size, support_size=64)
    for i in range(rows):
        with np.errstate(divide="ignore"):
            noisy = np.log(oracle(logits[i], params[i])) + gumbel_noise(i, 8, size)
        winner = int(noisy.argmax())
        assert np.flatnonzero(seen[i].p).tolist() == [winner]
        assert (seen[i].p[winner], seen[i].outside_mass) == (1.0, 0.0)
        assert (unseen[i].outside_token_id, unseen[i].outside_mass) == (winner, 1.0)
        assert drafts[i].q.tolist() == [1.0]
        # The same model drafts the same token, unless it fell out of the support.
        if winner in np.argsort(-logits[i].numpy())[:64]:
            assert drafts[i].token_id == winner
    assert sum(draft.token_id == row.outside_token_id for draft, row in zip(drafts, unseen, strict=True)) > rows / 2


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("params", [*PADDED, make_params(min_p=0.5), make_params(top_k=20, top_p=0.5, min_p=0.5)])
@pytest.mark.parametrize("place", [0, 20, 39])
def test_a_faulty_logit_is_an_error(params: SamplingParams, bad: float, place: int) -> None:
    logits = logits_of_kind("plain", 3, 40)
    logits[1, place] = bad
    with pytest.raises(ValueError, match="row 1: the logits"):
        target_rows(logits, [params] * 3, [0] * 3, [np.array([1], dtype=np.uint32)] * 3, 40)
    with pytest.raises(ValueError, match="row 1: the logits"):
        draft_tokens(logits, [params] * 3, [0] * 3, 40, 8)


@pytest.mark.parametrize("params", [*PADDED, make_params(min_p=0.5), make_params(top_k=20, top_p=0.5, min_p=0.5)])
def test_a_row_without_tokens_is_an_error(params: SamplingParams) -> None:
    logits = torch.full((1, 40), -torch.inf)
    with pytest.raises(ValueError, match="row 0: the logits"):
        target_rows(logits, [params], [0], [NO_SUPPORT], 40)
    with pytest.raises(ValueError, match="row 0: the logits"):
        draft_tokens(logits, [params], [0], 40, 8)
    # So is a vocabulary of nothing but suppressed end tokens.
    params = replace(params, min_length=5, end_token_ids=tuple(range(40)))
    with pytest.raises(ValueError, match="row 0: the logits"):
        target_rows(torch.zeros(1, 40), [params], [0], [NO_SUPPORT], 40)


def test_no_rows_are_no_rows() -> None:
    assert target_rows(torch.zeros(0, 40), [], [], [], 40) == []
    assert draft_tokens(torch.zeros(0, 40), [], [], 40, 8) == []


def test_a_support_outside_of_the_vocabulary_is_an_error() -> None:
    with pytest.raises(ValueError, match="outside of the vocabulary"):
        target_rows(torch.zeros(1, 64), [make_params()], [0], [np.array([40], dtype=np.uint32)], 40)


def message(**overrides: object) -> sampling_pb2.Sampling:
    fields: dict[str, object] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.75,
        "min_p": 0.25,
        "seed": 2**64 - 1,
        "acceptance_method": sampling_pb2.ACCEPTANCE_METHOD_COUPLED,
        "min_length": 9,
        "end_token_ids": [4, 5],
    }
    return sampling_pb2.Sampling(**(fields | overrides))  # type: ignore[arg-type]


def test_from_proto_takes_every_field() -> None:
    assert SamplingParams.from_proto(message()) == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.75,
        min_p=0.25,
        seed=2**64 - 1,
        coupled=True,
        min_length=9,
        end_token_ids=(4, 5),
    )
    rejection = message(acceptance_method=sampling_pb2.ACCEPTANCE_METHOD_REJECTION)
    assert not SamplingParams.from_proto(rejection).coupled


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.5),
        ("min_p", 1.5),
        ("min_p", float("nan")),
        ("acceptance_method", sampling_pb2.ACCEPTANCE_METHOD_UNSPECIFIED),
        ("acceptance_method", 7),
    ],
)
def test_from_proto_names_the_field_that_is_wrong(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} "):
        SamplingParams.from_proto(message(**{field: value}))


def test_confidences_come_with_the_tokens_and_change_none() -> None:
    """Of the rows asked for: the likeliest token's probability before anything is cut, at the row's temperature, at 1 where that
    is 0; without end tokens that are too early."""
    logits = logits_of_kind("plain", 5, 300) * 3
    logits[4, 7] = 90.0
    params = [
        make_params(temperature=0.0),
        make_params(coupled=True, temperature=0.5, top_k=4),
        make_params(),
        make_params(coupled=True),
        make_params(temperature=0.0, min_length=9, end_token_ids=(7,)),
    ]
    positions = [1, 2, 3, 4, 5]
    asked = [0, 1, 3, 4]
    drafts, confidences = draft_tokens_and_confidences(logits, params, positions, 300, 64, confident=asked)
    for draft, alone in zip(drafts, draft_tokens(logits, params, positions, 300, 64), strict=True):
        assert_same_draft(draft, alone)
    without_end = logits.clone()
    without_end[4, 7] = -math.inf
    temperatures = torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0])[:, None]
    expected = (without_end / temperatures).softmax(-1).amax(-1).tolist()
    assert confidences == pytest.approx([expected[row] if row in asked else 1.0 for row in range(5)], rel=1e-5)
    assert max(confidences[row] for row in asked) < 0.999
