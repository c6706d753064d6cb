"""The law of the rule, computed and not sampled, for arbitrary p, q and supports."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.acceptance import (
    DraftContractError,
    Drafted,
    TargetRow,
    TokenKind,
    accept,
    check_drafted,
    residual_weights,
)

VOCABULARY = 64
HIGHEST = 1.0 - 2.0**-53

weights = st.one_of(st.just(0.0), st.floats(1e-6, 1.0), st.sampled_from([0.25, 0.5, 1.0]))
units = st.one_of(st.floats(0.0, HIGHEST), st.sampled_from([0.0, HIGHEST]))


@dataclass(frozen=True)
class Case:
    """p over the whole vocabulary, q on a support, in float32 as they cross the wire."""

    support: NDArray[np.uint32]
    q: NDArray[np.float32]
    p: NDArray[np.float32]
    """p on the support"""
    outside_mass: float

    @property
    def row(self) -> TargetRow:
        return TargetRow(self.p, self.outside_mass, VOCABULARY)


def normalised(values: list[float]) -> NDArray[np.float32]:
    array = np.array(values, dtype=np.float32)
    total = array.sum(dtype=np.float64)
    assume(total > 1e-3)
    return (array / total).astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 8))
    ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=size, max_size=size, unique=True))
    p = normalised(draw(st.lists(weights, min_size=size + 1, max_size=size + 1)))
    q = normalised(draw(st.lists(weights, min_size=size, max_size=size)))
    if draw(st.booleans()) and draw(st.booleans()):  # often enough: nothing outside, q = p
        p = np.append(q, np.float32(0.0))
    return Case(np.array(ids, dtype=np.uint32), q, p[:-1], float(p[-1]))


def accept_probability(case: Case, index: int) -> float:
    """The measure of the u in [0, 1) that accept, read off the code by bisection."""
    drafted = Drafted(int(case.support[index]), case.support, case.q, index)

    def accepted(u: float) -> bool:
        outcome = accept([drafted], [case.row, TargetRow(case.p[:0], 1.0, 0)], [(u, 0.5), (0.5, 0.5)])
        return outcome.kinds[0] == TokenKind.ACCEPTED

    low, high = 0.0, 1.0
    if not accepted(0.0):
        return 0.0
    if accepted(HIGHEST):
        return 1.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle) else (low, middle)
    return low


@given(cases())
@settings(max_examples=150, deadline=None)
def test_the_law_of_one_token_is_p(case: Case) -> None:
    """For each x in S: q(x) a(x) + (mass of all rejections) * residual(x) = p(x); and so outside of S."""
    law = np.zeros(case.q.size + 1)
    rejected = 0.0
    for index, q in enumerate(case.q.astype(np.float64)):
        if q == 0.0:
            continue
        probability = accept_probability(case, index)
        assert probability == pytest.approx(min(1.0, float(case.p[index]) / q), abs=1e-8)
        law[index] += q * probability
        rejected += q * (1.0 - probability)
    residual = residual_weights(case.p, case.q, case.outside_mass)
    law += rejected * residual / residual.sum()
    assert law[:-1] == pytest.approx(case.p, abs=1e-6)
    assert law[-1] == pytest.approx(case.outside_mass, abs=1e-6)


@given(cases(), st.lists(units, min_size=1, max_size=20), units)
@settings(max_examples=150, deadline=None)
def test_a_rejection_draws_from_the_residual(case: Case, residual_draws: list[float], u_accept: float) -> None:
    """The token is the one at which the cumulative residual passes u, and it always has mass in p."""
    residual = residual_weights(case.p, case.q, case.outside_mass)
    assert np.isfinite(residual).all()
    assert residual.sum() > 0.0
    index = int(case.q.argmax())
    assume(u_accept * float(case.q[index]) >= float(case.p[index]))
    drafted = Drafted(int(case.support[index]), case.support, case.q, index)
    outcomes = np.append(case.support, VOCABULARY)
    cumulative = np.cumsum(residual) / residual.sum()
    for u in residual_draws:
        outcome = accept([drafted], [case.row, TargetRow(case.p[:0], 1.0, 0)], [(u_accept, u), (0.5, 0.5)])
        [token] = outcome.token_ids
        place = int(np.flatnonzero(outcomes == token)[0])
        assert residual[place] > 0.0
        below = cumulative[place - 1] if place else 0.0
        assert below - 1e-12 <= u <= cumulative[place] + 1e-12


@given(cases())
@settings(max_examples=100, deadline=None)
def test_the_expected_acceptance_is_the_overlap(case: Case) -> None:
    index = int(case.q.argmax())
    drafted = Drafted(int(case.support[index]), case.support, case.q, index)
    outcome = accept([drafted], [case.row, TargetRow(case.p[:0], 1.0, 0)], [(0.5, 0.5)] * 2)
    overlap = sum(
        float(q) * accept_probability(case, index) for index, q in enumerate(case.q.astype(np.float64)) if q > 0.0
    )
    assert outcome.expected_acceptance == pytest.approx([overlap], abs=1e-6)


@given(cases(), units, units)
@settings(max_examples=100, deadline=None)
def test_q_equal_to_p_accepts_all_and_never_yields_nan(case: Case, u_accept: float, u_residual: float) -> None:
    same = Case(case.support, case.q, case.q, 0.0)
    index = int(case.q.argmax())
    drafted = Drafted(int(case.support[index]), case.support, case.q, index)
    residual = residual_weights(same.p, same.q, 0.0)
    assert np.isfinite(residual).all()
    assert residual[:-1] == pytest.approx(case.q)
    outcome = accept([drafted], [same.row, TargetRow(case.p[:0], 1.0, 0)], [(u_accept, u_residual), (0.5, 0.5)])
    assert outcome.token_ids[0] in case.support
    if u_accept <= 1.0 - 2.0**-50:
        assert outcome.accepted == 1


@given(cases(), units, units)
@settings(max_examples=100, deadline=None)
def test_a_look_ahead_has_the_law_of_a_drafted_token(case: Case, u_accept: float, u_residual: float) -> None:
    index = int(case.q.argmax())
    drafted = Drafted(int(case.support[index]), case.support, case.q, index)
    draws = (u_accept, u_residual)
    as_block = accept([drafted], [case.row, TargetRow(case.p[:0], 1.0, 0)], [draws, (0.5, 0.5)])
    as_bonus = accept([], [case.row], [draws], look_ahead=drafted)
    assert as_bonus.token_ids == as_block.token_ids[:1]
    assert as_bonus.kinds == [TokenKind.BONUS]


@given(cases(), units)
@settings(max_examples=100, deadline=None)
def test_a_drafted_token_without_mass_is_a_broken_contract(case: Case, u: float) -> None:
    q = np.append(case.q, np.float32(0.0))
    p = np.append(case.p, np.float32(0.0))
    drafted = Drafted(VOCABULARY, np.append(case.support, np.uint32(VOCABULARY)), q, q.size - 1)
    with pytest.raises(DraftContractError):
        accept([drafted], [TargetRow(p, case.outside_mass, 0), case.row], [(u, u)] * 2)


# --- check_drafted ---------------------------------------------------------------------------------------------------


@given(cases(), st.data())
@settings(max_examples=100, deadline=None)
def test_check_drafted_takes_every_distribution(case: Case, data: st.DataObject) -> None:
    index = data.draw(st.sampled_from(np.flatnonzero(case.q).tolist()))
    checked = check_drafted(int(case.support[index]), case.support, case.q, VOCABULARY)
    assert checked == Drafted(int(case.support[index]), case.support, case.q, index)


@given(cases(), st.data())
@settings(max_examples=300, deadline=None)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_check_drafted_catches_every_kind_of_lie(case: Case, data: st.DataObject) -> None:
    ids, q = case.support.copy(), case.q.copy()
    token_id = int(ids[int(q.argmax())])
    place = data.draw(st.integers(0, q.size - 1))
    lie = data.draw(
        st.sampled_from(["range", "twice", "sum", "nan", "infinite", "negative", "outside", "size", "empty"])
    )
    if lie == "range":
        ids[place] = data.draw(st.integers(VOCABULARY, 2**32 - 1))
    elif lie == "twice":
        ids, q = np.append(ids, ids[place]), np.append(q, np.float32(0.0))
    elif lie == "sum":
        factor = data.draw(st.one_of(st.floats(0.0, 0.999), st.floats(1.001, 1e6)))
        q = (q * factor).astype(np.float32)
    elif lie in ("nan", "infinite"):
        q[place] = math.nan if lie == "nan" else data.draw(st.sampled_from([math.inf, -math.inf]))
    elif lie == "negative":
        amount = np.float32(data.draw(st.floats(1e-3, 0.5)))
        ids = np.append(ids, np.setdiff1d(np.arange(VOCABULARY, dtype=np.uint32), ids)[:1])
        q = np.append(q, -amount)
        q[int(q.argmax())] += amount  # the sum stays one
    elif lie == "outside":
        token_id = data.draw(st.integers(-10, 2**33).filter(lambda chosen: chosen not in ids))
    elif lie == "size":
        q = data.draw(st.sampled_from([q[:-1], np.append(q, np.float32(0.0))]))
    else:
        ids, q = ids[:0], q[:0]
    with pytest.raises(DraftContractError):
        check_drafted(token_id, ids, q, VOCABULARY)
