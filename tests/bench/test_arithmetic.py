"""What the benchmark computes from what it hears."""

from __future__ import annotations

import json

import numpy as np
import pytest

from bench import acceptance
from bench.__main__ import _plain
from bench.acceptance import AcceptanceRow
from bench.arguments import cases_from, options_from, parse
from bench.caller import Heard
from bench.fixed_answers import FixedAnswers
from bench.pair import PairOptions
from bench.pair_results import Costs, Trial, pair_row
from bench.prompts import PROMPT_CLASSES
from bench.round_bytes import round_bytes
from bench.statistic import median, quantile
from tandem import wire
from tandem.acceptance import check_drafted
from tandem.v1 import orchestrator_pb2 as api


def heard(tokens: tuple[int, ...], seconds: float, reason: int = api.FINISH_REASON_LENGTH, **counts: object) -> Heard:
    """Rounds of equal length, the first after twice the time."""
    return Heard(
        asked=0.0,
        arrivals=tuple(seconds * (index + 2) for index in range(len(tokens))),
        tokens=tokens,
        start=api.GenerationStart(),
        finish=api.GenerationFinish(reason=reason, speculation=api.SpeculationStats(**counts)),  # type: ignore[arg-type]
        text="",
    )


def test_intervals_leave_out_both_ends() -> None:
    assert heard((1,) * 6, 0.5).intervals(1, 2) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("tokens", "reason", "expected"),
    [
        # 3 + 3 + 2 + 2 of 10 tokens: before the last round 8 are known, and its block has room for one draft token only.
        ((3, 3, 2, 2), api.FINISH_REASON_LENGTH, (2, 5)),
        ((3, 3, 1, 3), api.FINISH_REASON_LENGTH, (3, 7)),
        ((3, 3, 1, 1), api.FINISH_REASON_STOP, (2, 4)),
        ((3,), api.FINISH_REASON_STOP, (0, 0)),
    ],
)
def test_only_full_rounds_after_the_first_count(
    tokens: tuple[int, ...], reason: int, expected: tuple[int, int]
) -> None:
    rounds, counted, seconds = heard(tokens, 0.25, reason).full_rounds(gamma=2, max_tokens=10)
    assert (rounds, counted) == expected
    assert seconds == pytest.approx(0.25 * rounds)


def test_a_row_compares_with_the_plain_runs_around_it() -> None:
    plain = [heard((1,) * 21, seconds) for seconds in (0.010, 0.030)]
    fast = heard(
        (2,) * 10, 0.016, draft_tokens_per_position=[10, 10], accepted_tokens_per_position=[8, 2], draft_tokens=20
    )
    costs = Costs(plain_step=15.0, draft=4.0, verify=10.0, overhead=1.0)
    row = pair_row("chat", 0.0, 2, 21, [Trial(plain[0], fast, plain[1])], costs)
    assert row.tokens_per_second == pytest.approx(125.0)
    assert row.speedup == pytest.approx(125.0 / ((100 + 1000 / 30) / 2))
    assert row.tokens_per_round == 2.0
    assert row.acceptance_per_position == (0.8, 0.2)
    assert row.predicted_speedup == pytest.approx(2.0)
    assert row.rest == pytest.approx(2.0)
    assert row.of_prediction == pytest.approx(row.speedup / 2.0)


@pytest.mark.parametrize("vocabulary_size", [512, 49_152, 151_936])
def test_a_round_is_small_whatever_the_vocabulary(vocabulary_size: int) -> None:
    found = round_bytes(vocabulary_size, gamma=5, support_size=64)
    # 5 * 64 ids twice, q and p once, 4 bytes each.
    assert 5 * 64 * 4 * 4 < found.total < 10_000
    assert found.total - round_bytes(512, gamma=5, support_size=64).total < 32
    assert round_bytes(vocabulary_size, gamma=5, support_size=64, first=True).total > found.total


def test_fixed_answers_are_valid_and_have_the_acceptance_asked_for() -> None:
    ids = list(range(10, 200))
    answers = FixedAnswers(ids, 64, 0.7)
    rows = answers.verdict(3, 3).rows
    for token, row in zip(answers.proposal(3).tokens, rows, strict=False):
        support = wire.decode_ids(token.support_ids)
        q = wire.decode_probs(token.support_probs, 64)
        p = wire.decode_probs(row.support_probs, 64)
        check_drafted(token.token_id, support, q, 200)
        assert np.minimum(p, q).sum() == pytest.approx(0.7, abs=1e-5)
        assert p.sum() + row.outside_mass == pytest.approx(1.0, abs=1e-5)
        assert row.outside_token_id not in support
    assert rows[3].outside_mass == 1.0


def test_too_few_ids_for_the_support_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        FixedAnswers(range(64), 64, 0.7)


def test_quantiles() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert quantile([0.0, 1.0], 0.95) == pytest.approx(0.95)
    assert np.isnan(median([]))


def test_results_become_json_with_what_follows_from_them() -> None:
    found = _plain({"bytes": [round_bytes(512, gamma=1, support_size=4)]})
    assert json.loads(json.dumps(found))["bytes"][0]["total"] == sum(
        found["bytes"][0][name] for name in ("propose", "proposal", "verify", "verdict")
    )


def test_what_has_no_number_in_json_is_null() -> None:
    assert json.dumps(_plain({"round": float("nan"), "limit": float("inf"), "rest": 1.5})) == (
        '{"round": null, "limit": null, "rest": 1.5}'
    )


@pytest.mark.parametrize(
    ("arguments", "expected"), [([], "all"), (["--json", "x"], "all"), (["pair", "--quick"], "pair")]
)
def test_all_is_measured_by_default(arguments: list[str], expected: str) -> None:
    assert parse(arguments).command == expected


def test_the_command_line_wins_over_quick_over_the_default() -> None:
    default = PairOptions(overhead=1.0)
    quick = options_from(parse(["pair", "--quick", "--overhead-ms", "1", "--gamma", "7"]), PairOptions)
    assert quick.gammas == (7,)
    assert quick.max_tokens < default.max_tokens
    assert options_from(parse(["pair", "--overhead-ms", "1"]), PairOptions) == default


def test_cases_are_all_combinations() -> None:
    assert cases_from(parse(["pair", "--classes", "chat,code", "--temperature", "1"])) == (("chat", 1.0), ("code", 1.0))
    assert cases_from(parse(["pair"])) is None


@pytest.mark.parametrize(
    ("accepted", "recorded", "fell"), [(0.30, 0.34, False), (0.30, 0.36, True), (0.3, None, True), (0.5, 0.3, False)]
)
def test_acceptance_falls_by_more_than_five_points(accepted: float, recorded: float | None, fell: bool) -> None:
    assert AcceptanceRow("chat T=0", accepted, accepted, recorded).fell is fell


def test_acceptance_is_recorded_for_every_row() -> None:
    rows = {f"{each.name} T={temperature:g}" for each in PROMPT_CLASSES for temperature in acceptance.TEMPERATURES}
    rows |= {"all"}
    assert set(acceptance.recorded()) == rows | {f"tiny: {row}" for row in rows}
    assert all(0.0 < value < 1.0 for value in acceptance.recorded().values())
