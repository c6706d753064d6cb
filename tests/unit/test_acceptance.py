"""The acceptance rule on worked numbers: p = .5 .3 .2 and q = .25 .5 .25 on the tokens A, B, C."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.acceptance import (
    DraftContractError,
    Drafted,
    TargetRow,
    TokenKind,
    accept,
    are_supports,
    check_drafted,
    drawn_from_laws,
    residual_weights,
)

A, B, C, D, OUTSIDE = 10, 11, 12, 13, 99
SUPPORT = np.array([A, B, C], dtype=np.uint32)
P = np.array([0.5, 0.3, 0.2], dtype=np.float32)
Q = np.array([0.25, 0.5, 0.25], dtype=np.float32)
ACCEPTANCE = {A: 1.0, B: 0.6, C: 0.8}
NOTHING = np.zeros(0, dtype=np.float32)
OF_SUPPORTS = ("outside of the vocabulary", "twice")
"""Lies that a target refuses."""
LOWEST, HIGHEST = 0.0, 1.0 - 2.0**-53


def drafted(token_id: int, q: np.ndarray = Q, support: np.ndarray = SUPPORT) -> Drafted:
    return Drafted(token_id, support, q, support.tolist().index(token_id))


def row(p: np.ndarray = P, outside_mass: float = 0.0, outside: int = OUTSIDE) -> TargetRow:
    return TargetRow(p, outside_mass, outside)


def one_hot(token_id: int) -> np.ndarray:
    return np.equal(SUPPORT, token_id).astype(np.float32)


@pytest.mark.parametrize("token_id", [A, B, C])
def test_a_token_is_accepted_just_below_its_ratio(token_id: int) -> None:
    for u, accepted in ((ACCEPTANCE[token_id] - 1e-6, True), (ACCEPTANCE[token_id] + 1e-6, False)):
        outcome = accept([drafted(token_id)], [row(), row(NOTHING, 1.0)], [(min(u, HIGHEST), 0.5), (0.5, 0.5)])
        expected = accepted or token_id == A
        assert outcome.accepted == expected
        assert outcome.kinds == ([TokenKind.ACCEPTED, TokenKind.BONUS] if expected else [TokenKind.RECOVERED])


@pytest.mark.parametrize("u", [LOWEST, 0.3, 0.7, HIGHEST])
@pytest.mark.parametrize("token_id", [B, C])
def test_the_residual_is_all_on_a(token_id: int, u: float) -> None:
    assert residual_weights(P, Q, 0.0) == pytest.approx([0.25, 0.0, 0.0, 0.0])
    outcome = accept([drafted(token_id)], [row(), row(NOTHING, 1.0)], [(HIGHEST, u), (0.5, 0.5)])
    assert outcome.token_ids == [A]


def test_the_acceptance_probability_is_the_overlap() -> None:
    outcome = accept([drafted(A)], [row(), row(NOTHING, 1.0)], [(0.5, 0.5), (0.5, 0.5)])
    assert outcome.expected_acceptance == pytest.approx([0.75])
    assert sum(float(q) * ACCEPTANCE[int(i)] for i, q in zip(SUPPORT, Q, strict=True)) == pytest.approx(0.75)


def test_acceptance_is_strict() -> None:
    """u = p/q exactly rejects, and so u = 0 rejects a token that the target can't produce."""
    p = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    assert accept([drafted(B)], [row(p), row(NOTHING, 1.0)], [(0.0, 0.0), (0.0, 0.0)]).token_ids == [A]
    p = np.array([0.75, 0.25, 0.0], dtype=np.float32)
    assert accept([drafted(B)], [row(p), row(NOTHING, 1.0)], [(0.5, 0.0), (0.0, 0.0)]).token_ids == [A]


def test_the_outside_mass_is_the_last_outcome_of_the_residual() -> None:
    p = np.array([0.35, 0.2, 0.2], dtype=np.float32)
    weights = residual_weights(p, Q, 0.25)
    assert weights == pytest.approx([0.1, 0.0, 0.0, 0.25])
    share = 0.1 / 0.35
    for u, token in ((LOWEST, A), (share - 1e-6, A), (share + 1e-6, OUTSIDE), (HIGHEST, OUTSIDE)):
        rows = [row(p, 0.25), row(NOTHING, 1.0)]
        assert accept([drafted(B)], rows, [(HIGHEST, u), (0.0, 0.0)]).token_ids == [token]


@pytest.mark.parametrize("u", [LOWEST, 0.5, HIGHEST])
def test_a_residual_without_mass_falls_back_to_p(u: float) -> None:
    """p = q: a rejection has probability zero, and the weights are p's, not NaN."""
    assert residual_weights(P, P, 0.0) == pytest.approx([0.5, 0.3, 0.2, 0.0])
    outcome = accept([drafted(C, P)], [row(), row(NOTHING, 1.0)], [(HIGHEST, u), (0.5, 0.5)])
    assert outcome.token_ids[0] in (A, B, C)


def test_outcomes_without_weight_are_never_drawn() -> None:
    p = np.array([0.0, 1.0, 0.0], dtype=np.float32)
    q = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    for u in (LOWEST, 0.5, HIGHEST):
        assert accept([drafted(A, q)], [row(p), row(NOTHING, 1.0)], [(0.5, u), (0.5, 0.5)]).token_ids == [B]


def test_what_follows_a_rejection_is_dropped() -> None:
    block = [drafted(A), drafted(B), drafted(A)]
    rows = [row(), row(), row(), row(NOTHING, 1.0)]
    outcome = accept(block, rows, [(0.5, 0.5), (0.9, 0.5), (0.5, 0.5), (0.5, 0.5)])
    assert outcome.token_ids == [A, A]
    assert outcome.kinds == [TokenKind.ACCEPTED, TokenKind.RECOVERED]
    assert outcome.accepted == 1
    assert outcome.expected_acceptance == pytest.approx([0.75, 0.75])


def test_a_whole_block_earns_a_bonus_token() -> None:
    outcome = accept([drafted(A), drafted(B)], [row(), row(), row(NOTHING, 1.0, D)], [(0.5, 0.5)] * 3)
    assert outcome.token_ids == [A, B, D]
    assert outcome.kinds == [TokenKind.ACCEPTED, TokenKind.ACCEPTED, TokenKind.BONUS]
    assert outcome.accepted == 2


@pytest.mark.parametrize(("u", "token"), [(0.59, B), (0.61, A)])
def test_the_look_ahead_is_the_bonus_token_where_it_is_accepted(u: float, token: int) -> None:
    outcome = accept([drafted(A)], [row(), row()], [(0.5, 0.5), (u, 0.5)], look_ahead=drafted(B))
    assert outcome.token_ids == [A, token]
    assert outcome.kinds == [TokenKind.ACCEPTED, TokenKind.BONUS]
    # The bonus token is not counted as accepted, wherever it came from.
    assert outcome.accepted == 1
    assert len(outcome.expected_acceptance) == 1


def test_the_look_ahead_of_a_rejected_block_is_dropped() -> None:
    outcome = accept([drafted(B)], [row(), row()], [(0.9, 0.5), (0.0, 0.5)], look_ahead=drafted(B))
    assert outcome.token_ids == [A]


def test_plain_decoding_is_an_empty_block() -> None:
    outcome = accept([], [row(NOTHING, 1.0, D)], [(0.5, 0.5)])
    assert outcome.token_ids == [D]
    assert outcome.kinds == [TokenKind.BONUS]
    assert outcome.accepted == 0
    assert outcome.expected_acceptance == []


@pytest.mark.parametrize("u", [LOWEST, HIGHEST])
def test_greedy_is_one_hot(u: float) -> None:
    for target, expected in ((A, [A, D]), (B, [B])):
        rows = [row(one_hot(target)), row(NOTHING, 1.0, D)]
        assert accept([drafted(A, one_hot(A))], rows, [(u, u), (u, u)]).token_ids == expected
    rows = [row(one_hot(D), 1.0, D), row(NOTHING, 1.0, D)]
    assert accept([drafted(A, one_hot(A))], rows, [(u, u), (u, u)]).token_ids == [D]


def test_a_draft_token_without_mass_breaks_the_contract() -> None:
    q = np.array([0.5, 0.5, 0.0], dtype=np.float32)
    with pytest.raises(DraftContractError, match="no mass"):
        accept([drafted(C, q)], [row(), row(NOTHING, 1.0)], [(0.5, 0.5)] * 2)
    with pytest.raises(DraftContractError, match="no mass"):
        accept([], [row()], [(0.5, 0.5)], look_ahead=drafted(C, q))


def test_a_draft_that_can_never_be_reached_does_no_harm() -> None:
    q = np.array([0.5, 0.5, 0.0], dtype=np.float32)
    outcome = accept([drafted(B), drafted(C, q)], [row(), row(), row(NOTHING, 1.0)], [(0.9, 0.5)] * 3)
    assert outcome.token_ids == [A]


def test_check_drafted_finds_the_token_in_the_support() -> None:
    checked = check_drafted(B, SUPPORT, Q, vocabulary_size=100)
    assert (checked.token_id, checked.index) == (B, 1)
    assert checked.q is Q


@pytest.mark.parametrize(
    ("token_id", "ids", "q", "message"),
    [
        (A, [], [], "0 ids"),
        (A, [A, B], [1.0], "2 ids with 1"),
        (A, [A], [0.5, 0.5], "1 ids with 2"),
        (A, [A, 100], [0.5, 0.5], "outside of the vocabulary"),
        (A, [A, B, A], [0.5, 0.3, 0.2], "twice"),
        (A, [A, B], [0.5, 0.4], "sums to"),
        (A, [A, B], [0.5, 0.501], "sums to"),
        (A, [A, B], [1.5, -0.5], "negative"),
        (A, [A, B], [float("nan"), 0.5], "sums to"),
        (A, [A, B], [float("inf"), 0.5], "sums to"),
        (A, [A, B], [float("inf"), -float("inf")], "sums to"),
        (D, [A, B], [0.5, 0.5], "no mass"),
        (B, [A, B], [1.0, 0.0], "no mass"),
        (2**32 + A, [A, B], [0.5, 0.5], "no mass"),
        (-1, [A, B], [0.5, 0.5], "no mass"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_check_drafted_catches_each_lie(token_id: int, ids: list[int], q: list[float], message: str) -> None:
    support_ids, probs = np.array(ids, dtype=np.uint32), np.array(q, dtype=np.float32)
    with pytest.raises(DraftContractError, match=message):
        check_drafted(token_id, support_ids, probs, vocabulary_size=100)
    if not 0 < support_ids.size == probs.size:
        return
    good = np.arange(support_ids.size, dtype=np.uint32), np.eye(1, support_ids.size, dtype=np.float32)[0]
    for block in ([(token_id, support_ids, probs), (0, *good)], [(0, *good), (token_id, support_ids, probs)]):
        token_ids, all_ids, all_probs = zip(*block, strict=True)
        supports, laws = np.stack(all_ids), np.stack(all_probs)
        if message in OF_SUPPORTS:  # then each is checked by itself, as above
            assert not are_supports(supports, 100)
            continue
        assert are_supports(supports, 100)
        assert drawn_from_laws(token_ids, supports, laws) is None


def test_a_block_is_checked_as_its_tokens_are() -> None:
    generator = np.random.default_rng(5)
    supports = np.stack([generator.permutation(100)[:8] for _ in range(4)]).astype(np.uint32)
    q = generator.dirichlet(np.ones(8), 4).astype(np.float32)
    token_ids = [int(support[index]) for support, index in zip(supports, (3, 0, 7, 3), strict=True)]
    assert are_supports(supports, 100)
    block = drawn_from_laws(token_ids, supports, q)
    assert block is not None
    for checked, *proposal in zip(block, token_ids, supports, q, strict=True):
        alone = check_drafted(*proposal, vocabulary_size=100)
        assert (checked.token_id, checked.index) == (alone.token_id, alone.index)
        assert checked.support_ids.tobytes() == alone.support_ids.tobytes()
        assert checked.q.tobytes() == alone.q.tobytes()
