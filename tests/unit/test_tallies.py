"""The orchestrator's own counters and histograms read as those of prometheus_client do, to the byte."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from orchestrator.tallies import Spread, TallyFamily, tally

BOUNDS = (0, 0.005, 0.01, 2.5)


def exposed(registry: CollectorRegistry) -> str:
    return re.sub(r"(?m)(_created(\{.*\})?) .*$", r"\1 then", generate_latest(registry).decode())


def test_they_are_exposed_as_the_clients_own() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain, family, spread = (
        tally("plain", "p", ours),
        TallyFamily("kinds", "k", ours, "kind"),
        Spread("s", "s", BOUNDS, ours),
    )
    their_plain = Counter("plain", "p", registry=theirs)
    their_family = Counter("kinds", "k", ["kind"], registry=theirs)
    their_spread = Histogram("s", "s", buckets=BOUNDS, registry=theirs)
    for kind in ("one", "other"):
        their_family.labels(kind=kind)
        family.child(kind)
    assert exposed(ours) == exposed(theirs)
    for amount in (1, 2.5):
        plain.inc(amount)
        their_plain.inc(amount)
    family.child("other").inc()
    their_family.labels(kind="other").inc()
    for value in (0, 0.005, 0.0051, 2.5, 7):  # those on a bound, between two, and above all
        spread.observe(value, 3)
        for _ in range(3):
            their_spread.observe(value)
    assert exposed(ours) == exposed(theirs)


def test_a_label_has_one_child() -> None:
    family = TallyFamily("kinds", "k", CollectorRegistry(), "kind")
    assert family.child("one") is family.child("one")
