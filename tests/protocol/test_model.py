"""Every order of events up to the bounds keeps the promises; every planted fault breaks one, and the shortest way is shown."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.protocol.model import Bounds, Broken, Rules, explore

BOUNDS = Bounds()
TWO_TOKENS = Bounds(tokens_per_round=2, resumes=1)
CHANGED = Bounds(crashes=0, resumes=1, sends=4, updates=1)
CHANGED_TWICE = Bounds(resumes=1, updates=2)
# What each rule is there for: the promise that falls without it.
FAULTS = {
    "checks_fence": "the rightful owner is refused",
    "checks_position": "goes back|lost or changed",
    "knows_retries": "the rightful owner is refused",
    "raises_fence": "the rightful owner is refused",
    "emits_after_commit": "not committed",
    "replays_from_store": "the rightful owner is refused",
    "retries_the_same_tokens": "not committed",
    "checks_version": "the rightful owner is refused",
    "drops_the_round": "a token of the former sampling behind the change",
    "rereads_what_is_committed": "the rightful owner is refused",
    "changes_wait_for_a_commit": "keep the request from going on",
}
OF_CHANGES = ("checks_version", "drops_the_round", "rereads_what_is_committed")


@pytest.mark.parametrize(
    "bounds",
    [BOUNDS, TWO_TOKENS, CHANGED, CHANGED_TWICE],
    ids=["two take-overs", "two tokens a round", "a change", "two changes"],
)
def test_no_order_of_events_breaks_a_promise(bounds: Bounds) -> None:
    states = explore(Rules(), bounds)
    print(f"{states} states")
    assert states > 5_000, "the bounds leave nothing to explore"


def test_every_rule_has_its_fault() -> None:
    assert set(FAULTS) == {field.name for field in fields(Rules)}


@pytest.mark.parametrize("rule", FAULTS)
def test_a_planted_fault_is_found(rule: str) -> None:
    others = {"retries_the_same_tokens": TWO_TOKENS, "changes_wait_for_a_commit": CHANGED_TWICE}
    bounds = {**others, **dict.fromkeys(OF_CHANGES, CHANGED)}.get(rule, BOUNDS)
    with pytest.raises(Broken, match=FAULTS[rule]) as caught:
        explore(replace(Rules(), **{rule: False}), bounds)
    print(caught.value)
