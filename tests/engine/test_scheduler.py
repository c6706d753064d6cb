"""What runs in a step: short feeds together, at most one chunk of prefill beside them, everybody in turn."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from tandem.engine.forward_cost import FREE_TOKENS, ForwardCost, measure
from tandem.engine.job import Job
from tandem.engine.scheduler import Batch, Scheduler, StepLimits
from tandem.engine.session import Session
from tandem.engine.stream import Stream
from tests.engine.models import random_ids

ONLY = Stream(lambda _: None)


def job(slot: int, pending: int, rows: int = 1, cached: int = 0, stream: Stream = ONLY) -> Job:
    made = Job(0, rows - 1, rows)
    made.stream = stream
    made.session = Session(f"request-{slot}")
    made.session.slot = slot
    made.session.tokens.extend(random_ids(slot, cached + pending))
    made.session.cached_length = cached
    return made


def run(batch: Batch[Job]) -> None:
    for each, feed in zip(batch.jobs, batch.feeds, strict=True):
        assert feed.start == each.session.cached_length
        each.session.cached_length += feed.token_ids.size


def schedule(jobs: list[Job], limits: StepLimits | None = None) -> Scheduler[Job]:
    scheduler: Scheduler[Job] = Scheduler(limits or StepLimits())
    for each in jobs:
        scheduler.add(each)
    return scheduler


def test_nothing_to_do_is_no_forward() -> None:
    assert schedule([]).plan() == []


def test_short_feeds_share_a_forward_in_order_of_slots() -> None:
    jobs = [job(2, 6, rows=6), job(0, 1), job(1, 17, rows=3)]
    [batch] = schedule(jobs, StepLimits(short_feed=17)).plan()
    assert [feed.slot for feed in batch.feeds] == [0, 1, 2]
    assert [feed.token_ids.size for feed in batch.feeds] == [1, 17, 6]
    assert [feed.rows for feed in batch.feeds] == [1, 3, 6]


def test_a_verification_is_never_padded_to_a_prefill() -> None:
    short, long = schedule([job(0, 6, rows=6), job(1, 500)], StepLimits(short_feed=17, prefill_chunk=100)).plan()
    assert [feed.slot for feed in short.feeds] == [0]
    assert [feed.slot for feed in long.feeds] == [1]
    assert long.feeds[0].token_ids.size == 100
    assert long.feeds[0].rows == 0


@pytest.mark.parametrize("pending", [18, 99, 100, 101, 103, 117, 200, 205, 1000])
def test_chunks_cover_the_prefill_and_leave_all_rows_to_the_last(pending: int) -> None:
    one = job(0, pending, rows=17, cached=5)
    scheduler = schedule([one], StepLimits(short_feed=17, prefill_chunk=100))
    sizes = []
    while one.pending:
        [batch] = scheduler.plan()
        [feed] = batch.feeds
        run(batch)
        sizes.append(feed.token_ids.size)
        assert feed.rows == (0 if one.pending else 17)
    assert sum(sizes) == pending
    assert max(sizes) <= 100
    assert len(sizes) <= pending // 100 + 2


def test_short_prefills_share_a_forward_within_the_budget() -> None:
    [batch] = schedule([job(slot, 30) for slot in range(5)], StepLimits(short_feed=17, prefill_chunk=100)).plan()
    assert len(batch.feeds) == 3


def test_prefills_take_turns() -> None:
    jobs = [job(slot, 1000) for slot in range(3)]
    scheduler = schedule(jobs, StepLimits(short_feed=17, prefill_chunk=100))
    served: Counter[int] = Counter()
    for step in range(1, 13):
        [batch] = scheduler.plan()
        run(batch)
        served.update(feed.slot for feed in batch.feeds)
        assert max(served.values()) - min(served[slot] for slot in range(3)) <= 1, step


def test_an_orchestrator_with_many_prefills_leaves_another_one_every_other_chunk() -> None:
    other = Stream(lambda _: None)
    jobs = [*(job(slot, 2000) for slot in range(9)), job(9, 2000, stream=other)]
    scheduler = schedule(jobs, StepLimits(short_feed=17, prefill_chunk=100))
    served: Counter[int] = Counter()
    for _ in range(18):
        [batch] = scheduler.plan()
        run(batch)
        served.update(feed.slot for feed in batch.feeds)
    assert served == {9: 9, **dict.fromkeys(range(9), 1)}


def test_streams_take_turns_in_decode_forwards_and_chunks_apart() -> None:
    """Turns at the one don't count for the other: else one stream would have all of the one, and the other all of the other."""
    streams = [Stream(lambda _: None) for _ in range(2)]
    shorts = [job(slot, 10, rows=10, stream=streams[slot % 2]) for slot in range(8)]
    longs = [job(8 + slot, 3000, stream=streams[slot % 2]) for slot in range(2)]
    scheduler = schedule([*shorts, *longs], StepLimits(short_feed=17, prefill_chunk=100, decode_tokens=30))
    served: Counter[int] = Counter()
    for _ in range(16):
        decode, prefill = scheduler.plan()  # the decode forward is not run: each stays as it is
        run(prefill)
        served.update(feed.slot for feed in (*decode.feeds, *prefill.feeds))
    assert [served[8], served[9]] == [8, 8]
    assert {served[slot] for slot in range(8)} == {6}


def test_more_short_feeds_than_the_budget_take_turns() -> None:
    scheduler = schedule([job(slot, 10, rows=10) for slot in range(10)], StepLimits(short_feed=17, decode_tokens=40))
    served: Counter[int] = Counter()
    for _ in range(5):
        [batch] = scheduler.plan()
        served.update(feed.slot for feed in batch.feeds)  # not run: each stays as it is
    assert set(served.values()) == {2}
    assert len(served) == 10


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_overtaken_for_long(seed: int, streams: int) -> None:
    """Wide and narrow jobs that come and stay at random, under budgets that hold a few of them: whoever runs, it is
    served at least once in as many steps as there are jobs, times the streams that they are of."""
    chooser = random.Random(seed)
    owners = [Stream(lambda _: None) for _ in range(streams)]
    scheduler = schedule([], StepLimits(short_feed=17, prefill_chunk=40, decode_tokens=30))
    waited: dict[Job, int] = {}
    longest = 0
    for number in range(600):
        while len(waited) < 20 and chooser.random() < 0.6:
            made = job(number % 64, chooser.choice([1, 2, 9, 17, 18, 60, 300]), stream=chooser.choice(owners))
            scheduler.add(made)
            waited[made] = 0
        batches = scheduler.plan()
        served = {each for batch in batches for each in batch.jobs}
        assert sum(any(each.pending > 17 for each in batch.jobs) for batch in batches) <= 1
        for each in list(waited):
            waited[each] = 0 if each in served else waited[each] + 1
            longest = max(longest, waited[each])
            if each in served and chooser.random() < 0.5:
                scheduler.remove(each)
                del waited[each]
    assert 2 < longest < 20 * streams


def test_a_forward_that_was_too_large_is_not_planned_again() -> None:
    scheduler = schedule([job(slot, 10, rows=10) for slot in range(8)], StepLimits(short_feed=17, prefill_chunk=64))
    [batch] = scheduler.plan()
    scheduler.halve(batch)
    [half] = scheduler.plan()
    assert (len(batch.feeds), len(half.feeds)) == (8, 4)
    scheduler.halve(half)
    scheduler.add(job(9, 300))
    decode, prefill = scheduler.plan()
    assert len(decode.feeds) == 2
    assert prefill.feeds[0].token_ids.size == 64, "one job alone goes on as before"


def test_a_removed_job_is_not_planned() -> None:
    jobs = [job(0, 1), job(1, 1)]
    scheduler = schedule(jobs)
    scheduler.remove(jobs[0])
    scheduler.remove(jobs[0])
    [batch] = scheduler.plan()
    assert batch.jobs == [jobs[1]]
    assert len(scheduler) == 1


def linear(overhead: float) -> ForwardCost:
    """A forward costs `overhead` tokens beside its own."""
    return ForwardCost(((1, overhead + 1), (2, overhead + 2)))


@pytest.mark.parametrize(
    ("cost", "groups"),
    [
        (FREE_TOKENS, [[1, 1, 2, 6, 6, 17]]),
        (linear(1000), [[1, 1, 2, 6, 6, 17]]),
        (linear(30), [[1, 1, 2, 6, 6], [17]]),
        (linear(5), [[1, 1, 2], [6, 6], [17]]),
        (linear(0), [[1, 1], [2], [6, 6], [17]]),
        (ForwardCost(((1, 1.1), (2, 2.1)), computes_padding=False), [[1, 1, 2, 6, 6, 17]]),
    ],
)
def test_unlike_widths_part_where_padding_costs_more_than_a_forward(cost: ForwardCost, groups: list[list[int]]) -> None:
    jobs = [job(slot, size) for slot, size in enumerate([17, 1, 6, 2, 1, 6])]
    batches = schedule(jobs, StepLimits(short_feed=17, forward_cost=cost)).plan()
    assert [sorted(feed.token_ids.size for feed in batch.feeds) for batch in batches] == groups
    for batch in batches:
        assert [feed.slot for feed in batch.feeds] == sorted(feed.slot for feed in batch.feeds)


def test_costs_lie_on_lines_between_measured_points() -> None:
    cost = ForwardCost(((1, 10.0), (8, 10.0), (32, 34.0)))
    assert [cost.seconds(tokens) for tokens in (1, 5, 8, 20, 32, 132)] == [10, 10, 10, 22, 34, 134]


def test_measured_costs_never_fall(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run_for(size: int) -> None:
        nonlocal now
        now += 0.02 if size == 1 else 0.001

    monkeypatch.setattr("tandem.engine.forward_cost.time", SimpleNamespace(perf_counter=lambda: now))
    cost = measure(run_for, 100)
    assert [size for size, _ in cost.points] == [1, 8, 32]
    assert cost.seconds(1) == cost.seconds(32) == pytest.approx(0.02)
    assert measure(lambda _: None, 5) is FREE_TOKENS
