"""The cost model on worked numbers."""

from __future__ import annotations

import pytest

from tandem.cost_model import expected_tokens, speedup, time_per_token


def test_expected_tokens_of_a_constant_acceptance() -> None:
    assert expected_tokens([0.8] * 4) == pytest.approx(3.3616)
    assert expected_tokens([0.8] * 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_expected_tokens_multiply_along_the_block() -> None:
    assert expected_tokens([0.9, 0.5]) == pytest.approx(1 + 0.9 + 0.45)


@pytest.mark.parametrize(("acceptances", "tokens"), [([], 1.0), ([0.0, 1.0], 1.0), ([1.0] * 5, 6.0)])
def test_expected_tokens_at_the_ends(acceptances: list[float], tokens: float) -> None:
    assert expected_tokens(acceptances) == tokens


@pytest.mark.parametrize(
    ("tokens", "draft", "per_token", "times"),
    [(3.2, 8.0, 6.875, 1.4545), (3.2, 15.0, 9.0625, 1.1034), (2.0, 15.0, 14.5, 0.6897)],
)
def test_worked_rounds(tokens: float, draft: float, per_token: float, times: float) -> None:
    assert time_per_token(tokens, draft, verify=12.0, overhead=2.0) == pytest.approx(per_token)
    assert speedup(tokens, 10.0, draft, verify=12.0, overhead=2.0) == pytest.approx(times, abs=1e-4)


def test_a_hidden_draft_tends_to_the_expected_tokens() -> None:
    tokens = expected_tokens([0.8] * 200)
    assert speedup(tokens, plain_step=10.0, draft=0.0, verify=10.0, overhead=0.0) == pytest.approx(1 / (1 - 0.8))
