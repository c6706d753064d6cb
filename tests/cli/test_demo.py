"""What the demo says of its two runs."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from tandem.cli import demo
from tandem.cli.completion import Completion
from tandem.cli.demo import _averaged, _Caller, _doubts
from tandem.cli.interruptions import Interruptions
from tandem.client import (
    FinishReason,
    GeneratedToken,
    GenerationFinish,
    GenerationOptions,
    GenerationStart,
    Speculation,
    TandemClient,
    TokenKind,
)

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


@pytest.mark.parametrize(("seconds", "gammas"), [(float("inf"), [2, 2, 0, 0, 2]), (0.0, [2, 2, 0])])
def test_where_there_is_time_both_run_twice_in_turns_and_are_shown_once(
    orchestrator, monkeypatch, capsys, seconds, gammas
):
    monkeypatch.setattr(demo, "_TURNS_SECONDS", seconds)
    table = io.StringIO()
    screen = demo._Screen(Console(file=table), colour=False)
    with TandemClient(orchestrator.address) as client:
        caller = _Caller(client, "Why?", 60.0, Interruptions())
        demo._compare(caller, "Why?", GenerationOptions(num_speculative_tokens=2), screen)
    assert [request.num_speculative_tokens for request in orchestrator.requests] == gammas  # the first one warms up
    assert {request.seed for request in orchestrator.requests[2:]} == {7}
    shown = capsys.readouterr().out
    assert shown.count("The[A] sky[A] is[B]") == 2
    assert ("over two runs of each, in turns" in shown) == (len(gammas) == 5)


def test_two_runs_are_as_fast_as_both_together():
    once, longer = completion(10, 1.0), completion(30, 2.0)
    assert _averaged(once, completion(10, 2.0)).tokens_per_second == pytest.approx(20 / 3)
    assert _averaged(once, longer).tokens_per_second == pytest.approx(40 / 3)
    assert _averaged(once, longer).tokens == once.tokens
    assert _averaged(completion(0, 1.0), completion(0, 2.0)).total_seconds == 1.0
