"""What the demo says of its two runs."""

from __future__ import annotations

import dataclasses

import pytest

from tandem.cli.completion import Completion
from tandem.cli.demo import _doubts
from tandem.client import FinishReason, GeneratedToken, GenerationFinish, GenerationStart, Speculation, TokenKind

BOUND = "can't bring more than its 2.00 tokens"


def completion(tokens: int, seconds: float, **stats: object) -> Completion:
    empty = Speculation(tokens, 0, 0, (), (), 0.0, 1.0, 0, (), 0, 0, 0.0, 0.0)
    return Completion(
        GenerationStart("r", 7, 1, "m"),
        tuple(GeneratedToken(index, TokenKind.BONUS, "x") for index in range(tokens)),
        "x" * tokens,
        GenerationFinish(FinishReason.LENGTH, 1, tokens, dataclasses.replace(empty, **stats)),
        0.0,
        seconds,
    )


@pytest.mark.parametrize(
    ("stats", "plain_seconds", "said"),
    [
        ({"rounds": 10, "draft_tokens": 20}, 1.9, ""),
        ({"rounds": 10, "draft_tokens": 20}, 2.1, BOUND),
        ({"rounds": 10, "draft_tokens": 20, "degraded_rounds": 1, "degraded_reasons": ("draft_timeout",)}, 1.9, ""),
        (
            {"rounds": 20, "degraded_rounds": 20, "degraded_reasons": ("draft_incompatible",)},
            1.0,
            "(draft_incompatible)",
        ),
        ({"rounds": 20}, 1.0, ""),
    ],
)
def test_what_the_comparison_does_not_show_is_said(stats, plain_seconds, said):
    doubts = list(_doubts(completion(20, 1.0, **stats), completion(20, plain_seconds)))
    assert (len(doubts), said in "".join(doubts)) == (bool(said), True)


def test_tokens_of_a_round_count_what_was_made_in_one():
    whole = completion(10, 1.0, rounds=4)
    replayed = tuple(dataclasses.replace(token, kind=TokenKind.REPLAYED) for token in whole.tokens[:4])
    assert dataclasses.replace(whole, tokens=(*replayed, *whole.tokens[4:])).tokens_per_round == 1.5
