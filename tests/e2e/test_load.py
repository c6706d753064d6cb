"""More callers than there is room for, and callers that misbehave: bounds hold, the others notice nothing, and in the end
everything is back where it was.

`TANDEM_SOAK_REQUESTS` sets the length of the soak; `make soak` runs the long one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
import redis
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tandem.v1 import orchestrator_pb2_grpc
from tests.engine.models import random_ids
from tests.support.channels import open_async_channel, open_channel
from tests.support.generation import generate, generate_all, paced_channel, request
from tests.support.ledger import StackLedger
from tests.support.ports import free_port
from tests.support.services import MODELS, Stack, running_stack
from tests.support.tcp_proxy import TcpProxy
from tests.telemetry.scrape import Scrape, scrape

SLOTS = 4
WAITING = 4
TTL_SECONDS = 2
SOAK_REQUESTS = int(os.environ.get("TANDEM_SOAK_REQUESTS", "250"))
PROMPT = [5, 6, 7]
CANARY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "num_speculative_tokens": 3}
UNSEEN = itertools.count(77)
"""Seeds of prompts that no cache has: a test that is run again needs another one."""


@dataclass(frozen=True)
class Watched:
    """A stack whose three services can be scraped."""

    stack: Stack
    metrics: dict[str, str]
    channel: grpc.Channel

    def scrapes(self) -> dict[str, Scrape]:
        return {service: scrape(address) for service, address in self.metrics.items()}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    metrics = {service: f"127.0.0.1:{free_port()}" for service in ("orchestrator", "draft", "target")}
    environment = {f"TANDEM_{service.upper()}_METRICS_LISTEN": address for service, address in metrics.items()}
    environment |= {
        "TANDEM_TARGET_SLOTS": str(SLOTS),
        "TANDEM_TARGET_MAX_WAITING": str(WAITING),
        "TANDEM_TARGET_MAX_WAITING_SECONDS": "20",
        "TANDEM_DRAFT_SLOTS": str(SLOTS),
        "TANDEM_READER_TIMEOUT_SECONDS": "3",
        "TANDEM_RUNNING_TTL_SECONDS": "30",
        "TANDEM_FINISHED_TTL_SECONDS": str(TTL_SECONDS),
    }
    folder = tmp_path_factory.mktemp("load")
    with (
        running_stack(folder, MODELS / "tiny-target", MODELS / "tiny-draft", environment) as stack,
        open_channel(stack.orchestrator.address) as channel,
    ):
        yield Watched(stack, metrics, channel)


LEVELS = {
    "orchestrator": ("tandem_num_requests_running", "tandem_num_requests_waiting"),
    "draft": ("tandem_sessions", "tandem_items_running", "tandem_kv_cache_usage_perc", "tandem_sessions_waiting"),
    "target": ("tandem_sessions", "tandem_items_running", "tandem_kv_cache_usage_perc", "tandem_sessions_waiting"),
}


def busy(watched: Watched) -> dict[str, float]:
    """What is held by requests now: nothing, where none runs."""
    found = watched.scrapes()
    levels = {f"{service} {name}": found[service].value(name) for service, names in LEVELS.items() for name in names}
    for role in ("draft", "target"):
        for name in ("tandem_worker_sessions", "tandem_worker_items_pending"):
            levels[f"{name} {role}"] = found["orchestrator"].value(name, role=role)
    store = redis.Redis.from_url(watched.stack.redis_url)
    levels["keys"] = store.dbsize()
    return {name: level for name, level in levels.items() if level}


def wait_until_idle(watched: Watched, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while held := busy(watched):
        assert time.monotonic() < deadline, held
        time.sleep(0.1)


def test_requests_wait_for_slots_and_all_are_served(watched: Watched) -> None:
    """Twice as many as there are slots, which is what may run and wait at the target: none is refused or scored again."""
    before = watched.scrapes()["orchestrator"]
    fields = {**CANARY, "max_tokens": 30}
    alone = [generate(watched.channel, [5, 6, number], **fields).seen for number in range(SLOTS + WAITING)]
    crowd = generate_all(watched.channel, [request([5, 6, number], **fields) for number in range(SLOTS + WAITING)])
    assert [each.seen for each in crowd] == alone
    after = watched.scrapes()["orchestrator"]
    assert after.value("tandem_rounds_rescored_total") == before.value("tandem_rounds_rescored_total")


def _refusal_of_one_too_many(watched: Watched) -> Any:
    """What one more is told, or None where the others were over before it came, since this process was held up."""
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(watched.channel)
    long = {**CANARY, "max_tokens": 900}
    calls = [stub.Generate(request([5, 6, number], **long), timeout=120) for number in range(SLOTS)]
    try:
        for call in calls:
            next(call)
        calls += [stub.Generate(request([5, 7, number], **long), timeout=120) for number in range(WAITING)]
        deadline = time.monotonic() + 10
        while watched.scrapes()["target"].value("tandem_sessions_waiting") < WAITING:
            if time.monotonic() > deadline:
                return None
        calls.append(stub.Generate(request([5, 8], **long), timeout=120))
        try:
            next(calls[-1])
        except grpc.RpcError as error:
            return error
        assert watched.scrapes()["orchestrator"].value("tandem_num_requests_running") <= SLOTS + WAITING
        return None
    finally:
        for call in calls:
            call.cancel()
        wait_until_idle(watched)


def test_one_too_many_is_told_when_to_come_again(watched: Watched) -> None:
    error = next(filter(None, (_refusal_of_one_too_many(watched) for _ in range(5))), None)
    assert error is not None, "the others were over each time"
    status = rpc_status.from_call(error)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status is not None
    assert any(detail.Unpack(info) for detail in status.details)
    assert any(detail.Unpack(retry) for detail in status.details)
    assert (info.reason, retry.retry_delay.seconds) == ("TARGET_FULL", 2)


def test_a_caller_that_stops_reading_is_ended_and_slows_nobody(watched: Watched) -> None:
    """Its window holds next to nothing; another one's requests go on meanwhile."""
    canary = generate(watched.channel, PROMPT, **CANARY)
    with paced_channel(watched.stack.orchestrator.address) as channel:
        call = orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(
            request(PROMPT, **{**CANARY, "max_tokens": 900}), timeout=180
        )
        next(call)
        before = watched.scrapes()["orchestrator"].value("process_resident_memory_bytes")
        deadline = time.monotonic() + 150
        while watched.scrapes()["orchestrator"].value("tandem_num_requests_running"):
            assert time.monotonic() < deadline
            assert generate(watched.channel, PROMPT, **CANARY).seen == canary.seen
        after = watched.scrapes()["orchestrator"].value("process_resident_memory_bytes")
        assert after - before < 16 << 20
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    wait_until_idle(watched)


def test_what_is_left_behind_is_found(watched: Watched) -> None:
    """By the check that follows each test here: a request that still runs, and a key that nothing would ever delete."""
    assert any("target_service tandem_sessions 1" in _said_of_one_that_runs(watched) for _ in range(10))
    with redis.Redis.from_url(watched.stack.redis_url) as store:
        store.set("left", 1)
        try:
            with pytest.raises(AssertionError, match="never expire"):
                StackLedger(watched.stack).check()
        finally:
            store.delete("left")


def _said_of_one_that_runs(watched: Watched) -> str:
    """Nothing where it was over before it was looked at: its reader has three seconds."""
    with paced_channel(watched.stack.orchestrator.address) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        call = stub.Generate(request(PROMPT, **{**CANARY, "max_tokens": 900}), timeout=60)
        next(call)
        try:
            StackLedger(watched.stack, settle_seconds=0).check()
        except AssertionError as error:
            return str(error)
        finally:
            call.cancel()
            wait_until_idle(watched)
    return ""


def test_a_prompt_that_was_seen_is_not_run_again_unless_its_salt_is_another(watched: Watched) -> None:
    """At draft and target; the text is the same."""
    prompt = [int(token) for token in random_ids(next(UNSEEN), 100, 512)]

    def hits(**fields: object) -> tuple[list[float], object]:
        before = watched.scrapes()
        seen = generate(watched.channel, prompt, **{**CANARY, **fields}).seen
        after = watched.scrapes()
        name = "tandem_prefix_cache_hits_total"
        return [after[role].value(name) - before[role].value(name) for role in ("draft", "target")], seen

    first, seen = hits()
    assert first == [0, 0]
    assert hits() == ([99, 99], seen)
    assert hits(cache_salt="another tenant") == ([0, 0], seen)
    assert hits(cache_salt="another tenant") == ([99, 99], seen)


def test_a_request_without_speculation_costs_the_draft_nothing(watched: Watched) -> None:
    before = watched.scrapes()["draft"]
    generate(watched.channel, PROMPT, **{**CANARY, "num_speculative_tokens": 0})
    after = watched.scrapes()["draft"]
    for name in ("tandem_forwards_total", "tandem_forward_tokens_total", "tandem_prefix_cache_queries_total"):
        assert after.value(name) == before.value(name)


def test_a_huge_prompt_holds_up_neither_health_nor_others(watched: Watched) -> None:
    """A million characters are encoded, found to be too long, and refused; meanwhile another one's rounds go on."""
    assert any(_served_beside_a_huge_prompt(watched) >= 2 for _ in range(5)), "nobody was served beside it"


def _served_beside_a_huge_prompt(watched: Watched) -> int:
    """How often. Not at all where this process was held up until the prompt was refused."""
    huge = request("the prompt goes on and on " * 38_000)
    stub = orchestrator_pb2_grpc.OrchestratorServiceStub(watched.channel)
    short = {**CANARY, "max_tokens": 8}
    canary = generate(watched.channel, PROMPT, **short)
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(_status, stub.Generate(huge, timeout=300))
        slowest, polls = 0.0, 0
        while not answer.done():
            began = time.monotonic()
            assert watched.stack.orchestrator.serving(seconds=60)
            assert generate(watched.channel, PROMPT, **short).seen == canary.seen
            slowest, polls = max(slowest, time.monotonic() - began), polls + 1
    print(f"{polls} polls, the slowest with a request took {slowest:.3f} s")
    assert answer.result() is grpc.StatusCode.INVALID_ARGUMENT
    return polls


def _status(call: Iterable[object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    code: grpc.StatusCode = caught.value.code()  # type: ignore[attr-defined]
    return code


@dataclass(frozen=True)
class Ledger:
    """What the three processes hold when nothing runs."""

    threads: dict[str, float]
    files: dict[str, float]
    memory: dict[str, float]
    tasks: float


def ledger(watched: Watched) -> Ledger:
    found = watched.scrapes()
    return Ledger(
        {service: each.value("tandem_process_threads") for service, each in found.items()},
        {service: each.value("process_open_fds") for service, each in found.items()},
        {service: each.value("process_resident_memory_bytes") for service, each in found.items()},
        found["orchestrator"].value("tandem_event_loop_tasks"),
    )


def leaks(before: Ledger, after: Ledger) -> list[str]:
    """What there is more of than there may be."""
    found = [] if after.tasks <= before.tasks + 2 else [f"{after.tasks - before.tasks} tasks"]
    # The store's pool of connections may still grow by a few; a file for each request that broke would be more.
    for name, most in (("threads", 2), ("files", 8), ("memory", 24 << 20)):
        then, now = getattr(before, name), getattr(after, name)
        found += [
            f"{service}: {now[service] - then[service]} {name}"
            for service in now
            if now[service] - then[service] > most
        ]
    return found


class Crowd:
    """Requests at random, of callers that stay, cancel, run out of time, or lose their connection."""

    def __init__(self, address: str, proxy: TcpProxy, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._address = address
        self._proxy = proxy
        self._chooser = random.Random(seed)

    async def run(self, count: int, concurrency: int = 12) -> None:
        pending = iter(range(count))
        async with open_async_channel(self._address) as channel:

            async def caller() -> None:
                for number in pending:
                    await self._one(channel, number)

            await asyncio.gather(*(caller() for _ in range(concurrency)))

    async def _one(self, channel: grpc.aio.Channel, number: int) -> None:
        chooser = self._chooser
        fate = chooser.choices(["stays", "cancels", "deadline", "breaks"], [5, 3, 2, 1])[0]
        patience = chooser.random() * 0.15
        prompt = [int(token) for token in random_ids(number % 7, chooser.choice([3, 30, 120]), 512)]
        what = request(
            prompt,
            temperature=chooser.choice([0.0, 0.8]),
            max_tokens=chooser.randint(1, 20),
            num_speculative_tokens=chooser.choice([0, 2, 5]),
            ignore_eos=True,
        )
        if fate == "breaks":
            await self._broken(what, patience)
            return
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        while True:
            call = stub.Generate(what, timeout=patience + 0.01 if fate == "deadline" else 300)
            reader = asyncio.create_task(self._read(call))
            if fate == "cancels":
                await asyncio.sleep(patience)
                call.cancel()
            outcome = await reader
            self.outcomes[f"{fate} {outcome}"] += 1
            if (fate, outcome) != ("stays", "RESOURCE_EXHAUSTED"):
                return
            await asyncio.sleep(0.2)  # it comes again, as it was told

    async def _broken(self, what: object, patience: float) -> None:
        """A connection of its own, cut in mid stream."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._proxy.port}", options=options) as channel:
            reader = asyncio.create_task(
                self._read(orchestrator_pb2_grpc.OrchestratorServiceStub(channel).Generate(what))
            )
            await asyncio.sleep(patience)
            self._proxy.reset()
            self.outcomes[f"breaks {await reader}"] += 1

    @staticmethod
    async def _read(call: object) -> str:
        try:
            async for _ in call:  # type: ignore[attr-defined]
                pass
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        except asyncio.CancelledError:
            return "CANCELLED"
        return "OK"


async def _crowd(watched: Watched, count: int, seed: int) -> Counter[str]:
    host, _, port = watched.stack.orchestrator.address.rpartition(":")
    async with TcpProxy(host, int(port)) as proxy:
        crowd = Crowd(watched.stack.orchestrator.address, proxy, seed)
        await crowd.run(count)
    return crowd.outcomes


def test_soak_leaves_nothing_behind(watched: Watched) -> None:
    """Slots, sessions, keys, tasks, threads, files and memory are what they were, and a canary says what it said."""
    canary = generate(watched.channel, PROMPT, **CANARY)
    asyncio.run(_crowd(watched, 80, seed=1))  # pools and caches are filled, once
    wait_until_idle(watched)
    before = ledger(watched)
    outcomes = asyncio.run(_crowd(watched, SOAK_REQUESTS, seed=2))
    wait_until_idle(watched)
    assert sum(outcomes.values()) - outcomes["stays RESOURCE_EXHAUSTED"] == SOAK_REQUESTS
    assert {name for name in outcomes if name.startswith("stays")} <= {"stays OK", "stays RESOURCE_EXHAUSTED"}
    assert outcomes["stays OK"] > SOAK_REQUESTS / 3
    assert outcomes["cancels CANCELLED"] > 0
    assert outcomes["deadline DEADLINE_EXCEEDED"] > 0
    assert outcomes["breaks UNAVAILABLE"] > 0
    deadline = time.monotonic() + 120  # broken connections are noticed within this time
    while left := leaks(before, after := ledger(watched)):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    print(f"{outcomes}\nbefore {before}\nafter {after}")
    assert generate(watched.channel, PROMPT, **CANARY).seen == canary.seen
