"""The short form of `make chaos`."""

from __future__ import annotations

import random
from pathlib import Path

from tests.chaos import schedule

REQUESTS = 30


def test_random_faults_under_load(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    report = schedule.run(tmp_path, seed, REQUESTS, max_tokens=40)
    print(report.text())
    assert report.failures == [], report.text()
    assert report.finished == REQUESTS
    assert sum(report.faults.values()) >= 3, "hardly anything happened"
