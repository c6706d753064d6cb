"""The short form of `make chaos`."""

from __future__ import annotations

from pathlib import Path

import redis

from tests.chaos import schedule
from tests.chaos.epochs import EpochWatch
from tests.support.redis_servers import RedisServer

pytest_plugins = ("tests.support.redis_fixtures",)

REQUESTS = 30
FAULTS = 5
SEED = 5
"""Always the same here: what other seeds find is for `make chaos`, not for whoever changes something else."""


def test_random_faults_under_load(tmp_path: Path) -> None:
    report = schedule.run(tmp_path, SEED, REQUESTS, max_tokens=40, least_faults=FAULTS, links=False)
    print(report.text())
    assert report.failures == [], report.text()
    assert report.finished == report.asked >= REQUESTS
    assert report.survived.total() == report.faults.total() >= FAULTS
    assert report.commits > REQUESTS


def test_a_failure_is_charged_to_all_faults_that_the_request_lived_through() -> None:
    report = schedule.Report(SEED)
    report.injected = [("before", 0, 1), ("hung by it", 2, 3), ("beside it", 4, 5), ("after", 6, 7)]
    assert report.survived.total() == 4
    report.failed_lives = [(2.5, 5.5)]
    assert sorted(report.survived) == ["after", "before"]


def test_a_skipped_epoch_would_be_seen(one_redis_server: RedisServer) -> None:
    client = redis.Redis.from_url(one_redis_server.url)
    commit = client.register_script("return redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'length', ARGV[2])")
    with EpochWatch(one_redis_server.url) as watch:
        for epoch, length in ((1, 3), (2, 4), (4, 9), (5, 9)):
            commit(keys=["tandem:{watched}:state"], args=[epoch, length])
    assert watch.commits == 4
    assert [violation.rpartition("to ")[2] for violation in watch.violations] == ["(4, 9)", "(5, 9)"]
