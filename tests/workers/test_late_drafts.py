"""Drafts that are late for several requests at once: they are asked for less first, one incident benches one of them once, and how
long one takes is not held against another.

A real draft, behind two servers that keep its answers back while the test wants them late.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest

from orchestrator.bench import STRIKES
from orchestrator.drafting import DRAFT, Block, Drafting, DraftingPolicy, DraftPool
from orchestrator.gamma_controller import Choice
from orchestrator.prefix import Prefix
from tandem import wire
from tests.engine.harness import GREEDY
from tests.engine.models import random_ids
from tests.support.liars import LyingWorker
from tests.support.services import ServiceProcess
from tests.workers.conftest import running, worker_process

VOCABULARY = 512
LONGEST = 8
LATE = DraftingPolicy(timeout=0.05, backoff=600, look_ahead=False)
PATIENT = dataclasses.replace(LATE, timeout=60)


class Record:
    """What a round tells its recorder, as far as late drafts make a difference to it."""

    traceparent = ""
    trace_id = None

    def __init__(self) -> None:
        self.told: list[Any] = []

    def degraded(self, reason: str, *, newly: bool) -> None:
        self.told.append(reason if newly else f"still {reason}")

    def benched(self, reason: str) -> None:
        self.told.append(f"benched: {reason}")

    def shortened(self, limit: int) -> None:
        self.told.append(limit)

    def short(self, asked: int) -> None:
        self.told.append(f"short: {asked}")

    def rebuilding(self, role: str, reason: str) -> None:
        self.told.append(f"{role}: {reason}")


class Request:
    """Rounds that a target would end with a token of its own, whatever the draft says."""

    def __init__(self, name: str, pool: DraftPool) -> None:
        self.drafting = Drafting(name, pool, GREEDY, LATE, VOCABULARY)
        self.record = Record()
        self._prefix = Prefix(wire.encode_ids(random_ids(1, 20, VOCABULARY)))
        self._epoch = 0

    async def round(self, gamma: int, *, patient: bool) -> Block:
        self.drafting._policy = PATIENT if patient else LATE
        record: Any = self.record
        choice = Choice(gamma, "fixed", 0.0)
        proposed = await self.drafting.propose(self._prefix, self._epoch, choice, LONGEST, record)
        block = self.drafting.confirm(proposed, self._epoch, record)
        self.drafting.settle(self._prefix.length, 0)
        self._prefix.append(wire.encode_ids([7]))
        self._epoch += 1
        return block

    async def late_answer(self) -> None:
        assert self.drafting._late is not None
        await asyncio.wait([self.drafting._late[0]], timeout=60)
        assert self.drafting._late[0].done()

    @property
    def to_read(self) -> int:
        return self.drafting.to_read(self._prefix)

    @property
    def replica(self) -> Any:
        return self.drafting._session.replica


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with running(worker_process("draft", tmp_path_factory.mktemp("draft"), SLOTS="16")) as process:
        yield process


@pytest.fixture
def answers_pass() -> Iterator[threading.Event]:
    """Cleared: what the drafts answer is kept back."""
    event = threading.Event()
    event.set()
    yield event
    event.set()


@pytest.fixture
def servers(draft: ServiceProcess, answers_pass: threading.Event) -> Iterator[list[LyingWorker]]:
    def kept_back(batch: Any) -> Iterable[Any]:
        answers_pass.wait(60)
        yield batch

    made = [LyingWorker("draft", draft.address) for _ in range(2)]
    for server in made:
        server.lie = kept_back
    yield made
    answers_pass.set()
    for server in made:
        server.stop()


@pytest.fixture
async def pool(servers: list[LyingWorker]) -> AsyncIterator[DraftPool]:
    made = DraftPool(tuple(server.address for server in servers), DRAFT, lambda _: None, lambda: None)
    await _until(lambda: len(made.ready_addresses) == len(servers))
    yield made
    await made.close()


async def _until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not what():  # noqa: ASYNC110 - these changes are announced to nobody
            await asyncio.sleep(0.01)


async def _all_late(requests: list[Request], gamma: int, answers_pass: threading.Event) -> None:
    """One round of each at the same time, without a block; the answers come afterwards."""
    answers_pass.clear()
    blocks = await asyncio.gather(*(request.round(gamma, patient=False) for request in requests))
    assert blocks == [Block()] * len(requests)
    answers_pass.set()


async def test_two_drafts_with_many_to_serve_are_asked_for_less_and_not_benched(
    pool: DraftPool, answers_pass: threading.Event
) -> None:
    requests = [Request(f"crowd-{number}", pool) for number in range(4)]
    for limit in (4, 2, 1):
        await _all_late(requests, LONGEST, answers_pass)
        for request in requests:
            await request.late_answer()
            assert request.drafting.limit == limit
    assert [request.record.told for request in requests] == [
        ["draft_timeout", 4, "draft_timeout", 2, "draft_timeout", 1]
    ] * 4
    assert [replica.sessions for replica in pool.replicas] == [2, 2]
    blocks = await asyncio.gather(*(request.round(LONGEST, patient=True) for request in requests))
    assert [len(block.drafted) for block in blocks] == [1] * 4
    assert [request.record.told[-1] for request in requests] == ["short: 1"] * 4
    assert [replica.bench.benchings for replica in pool.replicas] == [0, 0]


async def test_what_a_block_would_have_to_wait_for_the_model_to_read(
    pool: DraftPool, answers_pass: threading.Event
) -> None:
    fresh, known, late = (Request(f"reader-{number}", pool) for number in range(3))
    assert fresh.to_read == 20
    await known.round(2, patient=True)
    assert known.to_read <= 2
    await _all_late([late], LONGEST, answers_pass)
    assert late.to_read == 0, "it is at it"
    assert fresh.to_read == 20
    for replica in pool.replicas:
        assert replica.info is not None
        replica.info.reads_later = True
    assert fresh.to_read == 0


async def test_a_silent_draft_is_benched_by_those_who_ask_again(pool: DraftPool, answers_pass: threading.Event) -> None:
    requests = [Request(f"silence-{number}", pool) for number in range(8)]
    answers_pass.clear()
    await asyncio.gather(*(request.round(LONGEST, patient=False) for request in requests))
    assert [replica.bench.benchings for replica in pool.replicas] == [0, 0]
    for request in requests:
        request.drafting._resume_at = 0.0
        await request.round(LONGEST, patient=False)
    # The other one is no better, but the only one that is left.
    assert sorted(replica.bench.benchings for replica in pool.replicas) == [0, 1]


async def test_a_silent_draft_is_benched_by_requests_that_end_before_they_could_ask_again(
    pool: DraftPool, answers_pass: threading.Event
) -> None:
    answers_pass.clear()
    for number in range(2 * STRIKES):
        request = Request(f"short-{number}", pool)
        assert await request.round(LONGEST, patient=False) == Block()
        request.drafting.release()
    assert sorted(replica.bench.benchings for replica in pool.replicas) == [0, 1]


async def test_one_incident_benches_a_draft_once_and_the_other_one_is_asked_for_whole_blocks(
    pool: DraftPool, answers_pass: threading.Event
) -> None:
    requests = [Request(f"incident-{number}", pool) for number in range(8)]
    seats = {}
    answers_pass.clear()
    rounds = asyncio.gather(*(request.round(1, patient=False) for request in requests))
    await asyncio.sleep(0)
    seats = {request: request.replica for request in requests}
    assert await rounds == [Block()] * 8
    answers_pass.set()
    benched, other = sorted(pool.replicas, key=lambda replica: -replica.bench.benchings)
    assert (benched.bench.benchings, other.bench.benchings) == (1, 0)
    assert sum(request.record.told.count("benched: draft_timeout") for request in requests) == 1
    movers = [request for request in requests if seats[request] is benched]
    assert len(movers) == 4
    for request in movers:
        assert len((await request.round(LONGEST, patient=True)).drafted) == LONGEST
        assert request.drafting.limit is None
        assert request.replica is other
    assert benched.bench.benchings == 1


async def test_a_draft_that_is_late_when_it_is_tried_again_is_left_at_once(
    pool: DraftPool, answers_pass: threading.Event
) -> None:
    tried, other = pool.replicas
    tried.bench.fault("draft_timeout", 0.0, at_once=True)
    request = Request("trial", pool)
    await _all_late([request], LONGEST, answers_pass)
    assert (tried.bench.benchings, other.bench.benchings) == (2, 0)
    assert request.record.told == ["draft_timeout", "benched: draft_timeout"]
    assert len((await request.round(LONGEST, patient=True)).drafted) == LONGEST
    assert request.replica is other


@pytest.mark.parametrize("way", ["drains", "is benched by another", "is lost"])
async def test_another_draft_starts_with_whole_blocks(
    pool: DraftPool, servers: list[LyingWorker], answers_pass: threading.Event, way: str
) -> None:
    request = Request(f"{way}", pool)
    await _all_late([request], LONGEST, answers_pass)
    await request.late_answer()
    assert len((await request.round(LONGEST, patient=True)).drafted) == LONGEST // 2
    first = request.replica
    if way == "drains":
        first.draining = True
    elif way == "is benched by another":
        first.bench.fault("draft_invalid", 600, at_once=True)
    else:
        next(server for server in servers if server.address == first.address).stop()
        await _until(lambda: not first.ready)
    assert len((await request.round(LONGEST, patient=True)).drafted) == LONGEST
    assert request.replica not in (None, first)
    assert request.drafting.limit is None


async def test_a_session_of_an_earlier_request_of_the_same_name_is_no_fault_of_the_draft(pool: DraftPool) -> None:
    earlier, between, later = Request("same", pool), Request("between", pool), Request("same", pool)
    earlier._epoch = 5
    for request in (earlier, between, later):
        assert (await request.round(LONGEST, patient=True)).drafted
    assert later.record.told == ["draft: ERROR_REASON_STALE_CACHE_EPOCH"]
    assert later.replica is between.replica is not earlier.replica


async def test_a_seat_is_kept_while_all_others_are_benched(pool: DraftPool) -> None:
    request = Request("stays", pool)
    await request.round(LONGEST, patient=True)
    mine = request.replica
    [other] = [replica for replica in pool.replicas if replica is not mine]
    mine.retired = True
    assert request.drafting._session.should_move
    other.bench.fault("draft_invalid", 600, at_once=True)
    assert (await request.round(LONGEST, patient=True)).drafted
    assert request.record.told == []
    assert request.replica is mine
