"""Which outcomes of a verification a draft guesses at: from what it thinks of its block, and from what became of others."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from draft_service.outcome_odds import ALTERNATIVES, Foreseen, Guess, OutcomeOdds, candidates
from tandem.randomness import gumbel_noise
from tandem.sampling import SamplingParams

START = 10


def params(temperature: float = 0.0, *, coupled: bool = False, seed: int = 1) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        coupled=coupled,
        min_length=0,
        end_token_ids=(),
    )


def outlook(*weights: float) -> NDArray[np.float64]:
    """Of tokens 0, 1, ..., in falling order."""
    return np.array([np.arange(len(weights)), np.log(weights)])


def foreseen(sampling: SamplingParams, block: int = 3, confidence: float = 0.6) -> Foreseen:
    """A block of tokens 0, each with the same outlook."""
    rest = 1.0 - confidence
    each = outlook(confidence, 0.5 * rest, 0.3 * rest, 0.2 * rest)
    return Foreseen.of(START, [0] * block, [each] * block, sampling)


def prefix(*token_ids: int) -> NDArray[np.uint32]:
    return np.array([*[9] * START, *token_ids], dtype=np.uint32)


def chances(odds: OutcomeOdds, block: Foreseen) -> dict[tuple[int, int], float]:
    return {(each.accepted, each.token_id): each.chance for each in odds.rejections(block, len(block.positions))}


def test_before_anything_was_seen_the_draft_is_believed() -> None:
    odds, block = OutcomeOdds(), foreseen(params())
    found = odds.rejections(block, 3)
    assert found[0] == Guess(
        0, 1, pytest.approx(0.375 * 0.5)
    )  # tokens of that confidence are taken to stand in 5 of 8 cases
    assert [each.chance for each in found] == sorted((each.chance for each in found), reverse=True)
    assert chances(odds, block)[1, 2] == pytest.approx(0.625 * 0.375 * 0.3)
    assert odds.standing(block, 3) == pytest.approx(0.625**3)


def test_all_outcomes_together_are_no_more_than_certain() -> None:
    odds, block = OutcomeOdds(), foreseen(params())
    for recovered in (1, 1, 2, 7):
        odds.saw(block, prefix(0, recovered))
    assert sum(chances(odds, block).values()) + odds.standing(block, 3) <= 1.0


def test_what_stood_is_likelier_to_stand_again() -> None:
    odds, block = OutcomeOdds(), foreseen(params())
    for _ in range(20):
        odds.saw(block, prefix(0, 0, 0, 5))
    assert odds.standing(block, 3) > 0.8
    # A late rejection is as likely as an early one then, and no longer hopeless.
    late, early = chances(odds, block)[2, 1], chances(odds, block)[0, 1]
    assert late > 0.9 * early


def test_the_token_in_place_of_a_rejected_one_is_counted_by_its_rank() -> None:
    odds, block = OutcomeOdds(), foreseen(params())
    for _ in range(40):
        odds.saw(block, prefix(0, 2))  # the second of the others, and never the first
    found = chances(odds, block)
    assert found[0, 2] > 2 * found[0, 1]
    for _ in range(40):
        odds.saw(block, prefix(0, 99))
    assert max(chances(odds, block).values()) < found[0, 2] / 2


def test_behind_a_rejection_nothing_is_learnt() -> None:
    once, more = OutcomeOdds(), OutcomeOdds()
    block = foreseen(params())
    once.saw(block, prefix(5))
    more.saw(block, prefix(5, 0, 0, 0))
    assert chances(once, block) == chances(more, block)


def test_confident_tokens_are_counted_apart() -> None:
    odds = OutcomeOdds()
    doubtful, sure = foreseen(params(), confidence=0.3), foreseen(params(), confidence=0.9)
    before = odds.standing(sure, 1)
    for _ in range(20):
        odds.saw(doubtful, prefix(5))
    assert odds.standing(doubtful, 1) < 0.2
    assert odds.standing(sure, 1) == before


@pytest.mark.parametrize(
    ("one", "other"),
    [(params(), params(1.0)), (params(), params(1.0, coupled=True)), (params(1.0), params(1.0, coupled=True))],
)
def test_kinds_of_sampling_are_counted_apart(one: SamplingParams, other: SamplingParams) -> None:
    odds, block = OutcomeOdds(), foreseen(other)
    before = chances(odds, block)
    for _ in range(20):
        odds.saw(foreseen(one), prefix(5))
    assert chances(odds, block) == before


def test_under_coupled_the_noise_says_what_is_likely() -> None:
    """Of a flat outlook the tokens that the noise lifts, wherever they are among many candidates."""
    sampling = params(1.0, coupled=True, seed=7)
    count = candidates(sampling)
    assert count > 4 * candidates(params(1.0))
    flat = outlook(*[1.0 / count] * count)
    best = np.argsort(-gumbel_noise(7, START, count))
    block = Foreseen.of(START, [int(best[0])], [flat], sampling)
    guesses = OutcomeOdds().rejections(block, 1)
    assert [each.token_id for each in guesses] == best[1 : ALTERNATIVES + 1].tolist()


def test_without_mass_a_token_is_no_alternative_of_note() -> None:
    """Where a form allows two tokens, the rest of the candidates have none."""
    block = Foreseen.of(START, [0], [np.array([[0, 1, 2, 3], [np.log(0.7), np.log(0.3), -np.inf, -np.inf]])], params())
    found = chances(OutcomeOdds(), block)
    assert found[0, 1] > 0.3
    assert found[0, 2] == found[0, 3] == 0.0
