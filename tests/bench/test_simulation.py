"""The simulation beside closed forms: what it must come to where the answer is known."""

from __future__ import annotations

import itertools
import math

import pytest

from bench.simulation import Constants, Curve, Layout, simulate
from tandem.cost_model import expected_tokens, time_per_token

FLAT = Constants(
    draft_step=Curve(((1.0, 0.002),)),
    target_forward=Curve(((1.0, 0.030), (5.0, 0.034))),
    overhead=0.003,
    acceptance=(0.8, 0.7),
)
FREE = Curve(((1.0, 0.0),))


def linear(seconds: float) -> Curve:
    """A device that gains nothing from batching."""
    return Curve(((1.0, seconds), (2.0, 2 * seconds)))


@pytest.mark.parametrize(("gamma", "drafts"), list(itertools.product((0, 1, 2, 5), (0, 1))))
def test_one_request_is_the_cost_model(gamma: int, drafts: int) -> None:
    layout = Layout(drafts=drafts, draft_round_trip=0.004, target_round_trip=0.006)
    crossing = 0.006 + (0.004 if gamma and drafts else 0.0)
    tokens = expected_tokens([0.8, 0.7, 0.7, 0.7, 0.7][:gamma])
    expected = time_per_token(tokens, gamma * 0.002, FLAT.target_forward.seconds(gamma + 1), FLAT.overhead + crossing)
    found = simulate(FLAT, layout, requests=1, gamma=gamma)
    assert found.tokens_per_second == pytest.approx(1 / expected, rel=0.01)
    assert found.tokens_per_round == pytest.approx(tokens, rel=0.01)


def test_a_draft_that_is_always_ahead_costs_its_crossing_alone() -> None:
    found = simulate(FLAT, Layout(ahead=1.0, draft_round_trip=0.004), requests=1, gamma=2)
    expected = time_per_token(expected_tokens([0.8, 0.7]), 0.0, FLAT.target_forward.seconds(3), 0.007)
    assert found.tokens_per_second == pytest.approx(1 / expected, rel=0.01)
    assert found.draft_busy == 0.0


def test_half_of_the_blocks_ahead_is_halfway() -> None:
    rounds = [
        2.36 / simulate(FLAT, Layout(ahead=share), requests=1, gamma=2).tokens_per_second for share in (0.0, 0.5, 1.0)
    ]
    assert rounds[1] == pytest.approx((rounds[0] + rounds[2]) / 2, rel=0.02)


@pytest.mark.parametrize("targets", [1, 3])
def test_a_full_target_sets_the_rate(targets: int) -> None:
    costs = Constants(draft_step=FREE, target_forward=linear(0.01), overhead=0.001, acceptance=())
    found = simulate(costs, Layout(targets=targets), requests=24, gamma=0)
    assert found.tokens_per_second == pytest.approx(targets * 100, rel=0.02)
    assert found.target_busy == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("drafts", [1, 2])
def test_a_full_draft_sets_the_rate(drafts: int) -> None:
    costs = Constants(draft_step=linear(0.01), target_forward=FREE, overhead=0.001, acceptance=(0.5,))
    found = simulate(costs, Layout(drafts=drafts), requests=24, gamma=2)
    assert found.tokens_per_second == pytest.approx(drafts * 100 / 2 * expected_tokens([0.5, 0.5]), rel=0.03)
    assert found.draft_busy == pytest.approx(1.0, abs=0.02)


def test_a_busy_orchestrator_sets_the_rate() -> None:
    costs = Constants(draft_step=FREE, target_forward=FREE, overhead=0.004, orchestrator=0.002, acceptance=())
    assert simulate(costs, Layout(), requests=1, gamma=0).tokens_per_second == pytest.approx(250, rel=0.01)
    assert simulate(costs, Layout(), requests=40, gamma=0).tokens_per_second == pytest.approx(500, rel=0.02)


def test_requests_share_a_forward_that_costs_the_same_for_all() -> None:
    costs = Constants(draft_step=FREE, target_forward=Curve(((1.0, 0.02),)), overhead=0.0, acceptance=())
    together = simulate(costs, Layout(), requests=8, gamma=0, spread=0.0)
    assert together.tokens_per_second == pytest.approx(400, rel=0.01)
    # One that is late by a little misses the forward, and goes on with whoever else did: half of them run at a time.
    in_turns = simulate(costs, Layout(), requests=8, gamma=0, spread=0.5)
    assert in_turns.tokens_per_second == pytest.approx(200, rel=0.02)


def test_one_device_for_both_models_is_shared_in_time() -> None:
    costs = Constants(draft_step=linear(0.002), target_forward=linear(0.005), overhead=0.001, acceptance=(1.0,))
    found = simulate(costs, Layout(drafts=0), requests=20, gamma=3)
    # A round takes the device for three draft tokens and four verified ones, and gives four.
    assert found.tokens_per_second == pytest.approx(4 / (3 * 0.002 + 4 * 0.005), rel=0.03)
    assert found.draft_busy == 0.0


def test_the_same_question_has_the_same_answer() -> None:
    assert len({simulate(FLAT, Layout(), requests=5, gamma=3) for _ in range(2)}) == 1


def test_curves_go_on_beyond_what_was_measured() -> None:
    curve = Curve(((1.0, 2.0), (3.0, 3.0), (5.0, 7.0)))
    assert [curve.seconds(size) for size in (0.0, 1.0, 2.0, 4.0, 6.0)] == pytest.approx([1.5, 2.0, 2.5, 5.0, 9.0])
    assert Curve(((4.0, 2.0),)).seconds(100.0) == 2.0
    assert Curve(((1.0, 1.0), (2.0, 3.0))).seconds(0.0) == 0.0


def test_a_block_needs_an_acceptance() -> None:
    with pytest.raises(ValueError, match="acceptance"):
        simulate(
            Constants(draft_step=FREE, target_forward=FREE, overhead=math.inf, acceptance=()),
            Layout(),
            requests=1,
            gamma=1,
        )
