"""The session store against real servers over TCP: every refusal, lost replies, restarts, stalls, evictions, cancels."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from orchestrator.redis_scripts import Patience, Script, ScriptPipeline
from orchestrator.session_store import (
    AlreadyExists,
    ConfigChanged,
    Durability,
    EpochConflict,
    FencedOff,
    Ownership,
    SessionStatus,
    SessionStore,
    Snapshot,
    StateLost,
    StoreConfig,
    StoreCounters,
    StoreError,
    StoreFull,
    StoreObserver,
    StoreUnavailable,
    Update,
    _nodes,
)
from tandem import wire
from tests.support.ports import free_port
from tests.support.redis_servers import RedisServer, ServerKind
from tests.support.tcp_proxy import Direction, TcpProxy

pytest_plugins = ("tests.support.redis_fixtures",)

PROMPT = (1, 2, 3)
FINGERPRINT = b"fingerprint"
REQUEST = b"\x00serialised request"


def encode(*tokens: int) -> bytes:
    return wire.encode_ids(tokens)


def tokens_of(snapshot: Snapshot | None) -> list[int]:
    assert snapshot is not None
    return [int(token) for token in wire.decode_ids(snapshot.tokens)]


def keys_of(request_id: str) -> tuple[str, str]:
    return f"tandem:{{{request_id}}}:state", f"tandem:{{{request_id}}}:tokens"


async def create(store: SessionStore, request_id: str = "r", owner: str = "A") -> Ownership:
    return await store.create(request_id, FINGERPRINT, REQUEST, encode(*PROMPT), owner)


@contextlib.asynccontextmanager
async def connected(url: str, observer: StoreObserver | None = None, **settings: Any) -> AsyncIterator[SessionStore]:
    store = await SessionStore.connect(StoreConfig(url=url, **settings), observer)
    try:
        yield store
    finally:
        await store.close()


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[SessionStore]:
    async with connected(redis_server.url) as connected_store:
        yield connected_store


@pytest.fixture
async def proxy(redis_server: RedisServer) -> AsyncIterator[TcpProxy]:
    async with TcpProxy(redis_server.host, redis_server.port) as running:
        yield running


def url_of(proxy: TcpProxy) -> str:
    return f"redis://{proxy.host}:{proxy.port}"


def counters(store: SessionStore) -> StoreCounters:
    assert isinstance(store.observer, StoreCounters)
    return store.observer


class Recorder:
    """An observer that remembers everything in order."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.problems: list[str] = []

    def committed(self, seconds: float) -> None:
        assert 0 < seconds < 60
        self.heard.append("committed")

    def retried(self, problem: str) -> None:
        self.problems.append(problem)
        self.heard.append("retried")

    def refused(self, error: StoreError) -> None:
        self.heard.append(type(error).__name__)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """The same, while the event loop goes on."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def in_the_end(attempt: Callable[[], Awaitable[None]], seconds: float = 60.0) -> None:
    """Repeats what may be repeated until the store answers: a busy machine may need longer than the little time it is given here."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await attempt()
        except StoreUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


async def sudo(server: RedisServer, *words: str | bytes | float) -> Any:
    """A command to the server that doesn't hold up the event loop, in which the proxy lives."""
    return await asyncio.to_thread(server.command, *words)


class TestSession:
    async def test_a_new_session_is_read_back_whole(self, store: SessionStore) -> None:
        ownership = await create(store)
        assert (ownership.fence, ownership.epoch, ownership.length) == (1, 0, 3)
        snapshot = await store.read("r")
        assert snapshot is not None
        assert tokens_of(snapshot) == [1, 2, 3]
        assert (snapshot.fence, snapshot.epoch, snapshot.length, snapshot.prompt_length) == (1, 0, 3, 3)
        assert (snapshot.status, snapshot.finish, snapshot.owner) == (SessionStatus.RUNNING, None, "A")
        assert (snapshot.config, snapshot.request_fingerprint) == (REQUEST, FINGERPRINT)
        assert snapshot.ownership is None

    async def test_an_unknown_session_is_none(self, store: SessionStore) -> None:
        assert await store.read("r") is None

    async def test_commits_append(self, store: SessionStore) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4, 5))
        await store.commit(ownership, 1, 5, encode(2**32 - 1))
        snapshot = await store.read("r")
        assert tokens_of(snapshot) == [1, 2, 3, 4, 5, 2**32 - 1]
        assert snapshot is not None
        assert (snapshot.epoch, snapshot.length, snapshot.prompt_length) == (2, 6, 3)

    async def test_an_empty_prompt_is_a_prompt(self, store: SessionStore) -> None:
        ownership = await store.create("r", FINGERPRINT, REQUEST, b"", "A")
        assert tokens_of(await store.read("r")) == []
        await store.commit(ownership, 0, 0, encode(7))
        assert tokens_of(await store.read("r")) == [7]

    async def test_a_taken_id_is_refused_with_its_fingerprint(self, store: SessionStore) -> None:
        await create(store)
        with pytest.raises(AlreadyExists) as refusal:
            await store.create("r", b"another", REQUEST, encode(9), "B")
        assert refusal.value.request_fingerprint == FINGERPRINT
        assert tokens_of(await store.read("r")) == [1, 2, 3]

    async def test_one_owner_can_not_create_an_id_twice(self, store: SessionStore) -> None:
        outcomes = await asyncio.gather(*(create(store) for _ in range(5)), return_exceptions=True)
        assert sum(isinstance(outcome, Ownership) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, AlreadyExists) for outcome in outcomes) == 4

    @pytest.mark.parametrize("request_id", ["plain", "with space", "}x", "a{b}c", "{", "%7D", "ü", "\r\n", "x" * 300])
    async def test_any_id_keeps_its_keys_in_one_slot(self, store: SessionStore, request_id: str) -> None:
        ownership = await create(store, request_id)
        state, tokens = ownership.keys
        assert key_slot(state) == key_slot(tokens)
        assert tokens_of(await store.read(request_id)) == [1, 2, 3]

    async def test_similar_ids_are_different_sessions(self, store: SessionStore) -> None:
        ids = ["}x", "%7Dx", "%257Dx", "{}x"]
        assert len({(await create(store, request_id)).keys for request_id in ids}) == len(ids)

    @pytest.mark.parametrize("tokens", [b"", b"abc"])
    async def test_a_commit_is_at_least_one_whole_token(self, store: SessionStore, tokens: bytes) -> None:
        ownership = await create(store)
        with pytest.raises(ValueError, match="token"):
            await store.commit(ownership, 0, 3, tokens)

    async def test_expiry_starts_anew_with_each_commit(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url, running_ttl=1000.0, finished_ttl=200.0) as store:
            ownership = await create(store)
            for key in keys_of("r"):
                assert 900_000 < redis_server.command("PTTL", key) <= 1_000_000
                redis_server.command("PEXPIRE", key, 100_000)
            await store.commit(ownership, 0, 3, encode(4))
            assert all(900_000 < redis_server.command("PTTL", key) <= 1_000_000 for key in keys_of("r"))
            await store.finish(ownership, 1, b"result")
            assert all(100_000 < redis_server.command("PTTL", key) <= 200_000 for key in keys_of("r"))
            await store.commit(ownership, 0, 3, encode(4))  # a late repetition must not revive it
            assert all(redis_server.command("PTTL", key) <= 200_000 for key in keys_of("r"))


class TestRefusals:
    async def test_a_repeated_commit_is_a_success_and_happens_once(self, store: SessionStore) -> None:
        ownership = await create(store)
        for _ in range(3):
            await store.commit(ownership, 0, 3, encode(4, 5))
        snapshot = await store.read("r")
        assert tokens_of(snapshot) == [1, 2, 3, 4, 5]
        assert snapshot is not None
        assert snapshot.epoch == 1

    @pytest.mark.parametrize("other", [encode(4, 6), encode(4), encode(4, 5, 6)])
    async def test_other_tokens_at_the_same_epoch_are_a_conflict(self, store: SessionStore, other: bytes) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4, 5))
        with pytest.raises(EpochConflict) as conflict:
            await store.commit(ownership, 0, 3, other)
        assert (conflict.value.stored.epoch, conflict.value.stored.length) == (1, 5)
        assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]

    @pytest.mark.parametrize(("epoch", "length"), [(1, 3), (0, 4), (0, 2), (7, 3), (0, 0)])
    async def test_a_commit_from_elsewhere_is_a_conflict(self, store: SessionStore, epoch: int, length: int) -> None:
        ownership = await create(store)
        with pytest.raises(EpochConflict):
            await store.commit(ownership, epoch, length, encode(4))
        assert tokens_of(await store.read("r")) == [1, 2, 3]
        assert counters(store).refusals == {"EpochConflict": 1}

    async def test_a_server_that_went_back_in_time_is_a_conflict(
        self, store: SessionStore, redis_server: RedisServer
    ) -> None:
        ownership = await create(store)
        dumps = [redis_server.command("DUMP", key) for key in keys_of("r")]
        await store.commit(ownership, 0, 3, encode(4))
        for key, dump in zip(keys_of("r"), dumps, strict=True):
            redis_server.command("RESTORE", key, 0, dump, "REPLACE")
        with pytest.raises(EpochConflict) as conflict:
            await store.commit(ownership, 1, 4, encode(5))
        assert conflict.value.stored.epoch == 0

    async def test_the_old_owner_is_fenced_off(self, store: SessionStore) -> None:
        old = await create(store)
        await store.commit(old, 0, 3, encode(4))
        taken = await store.take_over("r", "B")
        assert taken.ownership is not None
        assert (taken.fence, taken.epoch, taken.length, taken.owner) == (2, 1, 4, "B")
        for attempt in (
            store.commit(old, 1, 4, encode(5)),
            store.commit(old, 0, 3, encode(4)),
            store.finish(old, 1, b"result"),
            store.delete(old),
        ):
            with pytest.raises(FencedOff) as refusal:
                await attempt
            assert refusal.value.stored.fence == 2
        await store.commit(taken.ownership, 1, 4, encode(6))
        assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 6]

    async def test_each_take_over_fences_off_the_one_before(self, store: SessionStore) -> None:
        await create(store)
        owners = [(await store.take_over("r", name)).ownership for name in "BCD"]
        assert [owner.fence for owner in owners if owner is not None] == [2, 3, 4]
        *old, current = owners
        assert current is not None
        for owner in old:
            assert owner is not None
            with pytest.raises(FencedOff):
                await store.commit(owner, 0, 3, encode(4))
        await store.commit(current, 0, 3, encode(4))

    async def test_an_id_that_was_created_again_is_another_session(
        self, store: SessionStore, redis_server: RedisServer
    ) -> None:
        old = await create(store)
        redis_server.command("FLUSHALL")
        new = await create(store, owner="B")
        assert old.fence == new.fence
        with pytest.raises(FencedOff):
            await store.commit(old, 0, 3, encode(4))
        with pytest.raises(FencedOff):
            await store.delete(old)
        await store.commit(new, 0, 3, encode(5))

    @pytest.mark.parametrize("gone", [(0, 1), (0,), (1,)], ids=["both keys", "state", "tokens"])
    async def test_a_vanished_key_is_a_lost_state(
        self, store: SessionStore, redis_server: RedisServer, gone: tuple[int, ...]
    ) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4))
        redis_server.command("DEL", *(keys_of("r")[index] for index in gone))
        left = redis_server.command("DBSIZE")
        for attempt in (
            store.commit(ownership, 1, 4, encode(5)),
            store.commit(ownership, 0, 3, encode(4)),
            store.finish(ownership, 1, b"result"),
            store.take_over("r", "B"),
        ):
            with pytest.raises(StateLost):
                await attempt
        if 0 in gone:
            assert await store.read("r") is None
        else:
            with pytest.raises(StateLost):
                await store.read("r")
        assert redis_server.command("DBSIZE") == left
        await store.delete(ownership)

    async def test_what_an_eviction_left_does_not_get_into_a_new_session(
        self, store: SessionStore, redis_server: RedisServer
    ) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4, 5, 6))
        redis_server.command("DEL", keys_of("r")[0])
        await create(store)
        assert tokens_of(await store.read("r")) == [1, 2, 3]


class TestEnd:
    async def test_a_finished_session_keeps_its_result_and_takes_no_more(self, store: SessionStore) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4))
        for _ in range(2):
            await store.finish(ownership, 1, b"\x00result")
        snapshot = await store.read("r")
        assert snapshot is not None
        assert (snapshot.status, snapshot.finish, snapshot.epoch) == (SessionStatus.FINISHED, b"\x00result", 1)
        with pytest.raises(EpochConflict):
            await store.commit(ownership, 1, 4, encode(5))
        with pytest.raises(EpochConflict):
            await store.finish(ownership, 1, b"another result")
        assert tokens_of(await store.read("r")) == [1, 2, 3, 4]

    async def test_taking_over_a_finished_session_only_reads_it(self, store: SessionStore) -> None:
        ownership = await create(store)
        await store.finish(ownership, 0, b"result")
        snapshot = await store.take_over("r", "B")
        assert (snapshot.fence, snapshot.owner, snapshot.ownership, snapshot.finish) == (1, "A", None, b"result")

    async def test_a_change_that_has_the_number_of_one_that_was_lost_is_another_one(
        self, store: SessionStore, redis_server: RedisServer
    ) -> None:
        """The server goes back to before a change that was answered, and gets another: as after a failover."""
        await create(store)
        before = await store.read("r")
        kept = {key: redis_server.command("DUMP", key) for key in keys_of("r")}
        assert before is not None
        assert await store.update(before, b"lost") == Update(1, 3, took_effect=True)
        owner = (await store.take_over("r", "B")).ownership
        assert owner is not None
        for key, dump in kept.items():
            redis_server.command("RESTORE", key, 60_000, dump, "REPLACE")
        redis_server.command("HSET", keys_of("r")[0], "fence", owner.fence, "claim", owner.claim)
        assert await store.update(before, b"second") == Update(1, 3, took_effect=True)
        for call in (store.commit(owner, owner.epoch, 3, encode(4)), store.finish(owner, owner.epoch, b"result")):
            with pytest.raises(EpochConflict):
                await call
        # A further one, once a token was committed, is beyond all that the owner may have sent to its workers.
        meanwhile = (await store.reread(owner)).ownership
        assert meanwhile is not None
        await store.commit(meanwhile, meanwhile.epoch, 3, encode(4))
        second = await store.read("r")
        assert second is not None
        await store.update(second, b"third")
        with pytest.raises(ConfigChanged):
            await store.commit(owner, owner.epoch, 3, encode(4))
        again = (await store.reread(owner)).ownership
        assert again is not None
        await store.commit(again, again.epoch, 4, encode(5))

    async def test_finish_needs_the_last_epoch(self, store: SessionStore) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4))
        with pytest.raises(EpochConflict):
            await store.finish(ownership, 0, b"result")

    async def test_a_deleted_session_leaves_nothing(self, store: SessionStore, redis_server: RedisServer) -> None:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4))
        await store.delete(ownership)
        await store.delete(ownership)
        assert redis_server.command("DBSIZE") == 0
        with pytest.raises(StateLost):
            await store.commit(ownership, 1, 4, encode(5))
        assert redis_server.command("DBSIZE") == 0


class TestLostReplies:
    """The server did it, the caller doesn't hear of it: nothing may happen twice, and the caller gets a success."""

    @pytest.fixture(params=[True, False], ids=["connection closed", "silence"])
    def lose_reply(self, request: pytest.FixtureRequest, proxy: TcpProxy) -> Callable[[], None]:
        return lambda: proxy.lose_next(Direction.TO_CLIENT, close=request.param)

    @pytest.fixture
    async def far_store(self, proxy: TcpProxy) -> AsyncIterator[SessionStore]:
        async with connected(url_of(proxy), socket_timeout=0.4, retry_seconds=60.0, retry_attempts=100) as store:
            await store.read("nothing")  # the connection is there
            yield store
            assert proxy.faults[Direction.TO_CLIENT].lost_chunks == 1
            assert counters(store).retries >= 1  # on a busy machine an answer may be late as well

    async def test_create(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        lose_reply()
        ownership = await create(far_store)
        await far_store.commit(ownership, 0, 3, encode(4))
        assert tokens_of(await far_store.read("r")) == [1, 2, 3, 4]

    async def test_commit(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        ownership = await create(far_store)
        lose_reply()
        await far_store.commit(ownership, 0, 3, encode(4))
        await far_store.commit(ownership, 1, 4, encode(5))
        snapshot = await far_store.read("r")
        assert tokens_of(snapshot) == [1, 2, 3, 4, 5]
        assert snapshot is not None
        assert snapshot.epoch == 2

    async def test_take_over(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        await create(far_store)
        lose_reply()
        taken = await far_store.take_over("r", "B")
        assert taken.fence == 2
        assert taken.ownership is not None
        await far_store.commit(taken.ownership, 0, 3, encode(4))

    async def test_update(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        ownership = await create(far_store)
        before = await far_store.read("r")
        assert before is not None
        lose_reply()
        assert await far_store.update(before, b"another") == Update(1, 3, took_effect=True)
        with pytest.raises(ConfigChanged):
            await far_store.commit(ownership, 0, 3, encode(4))
        again = (await far_store.reread(ownership)).ownership
        assert again is not None
        await far_store.commit(again, again.epoch, 3, encode(4))

    async def test_create_before_a_change(self, store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """It had succeeded, its answer was lost, and somebody was faster with an update than its caller with the repetition."""
        claim = b"c" * 16
        monkeypatch.setattr(secrets, "token_bytes", lambda _: claim)
        first = await create(store)
        before = await store.read("r")
        assert before is not None
        await store.update(before, b"another")
        assert await create(store) == first
        with pytest.raises(ConfigChanged):
            await store.commit(first, 0, 3, encode(4))
        assert (await store.reread(first)).config == b"another"
        claim = b"d" * 16
        with pytest.raises(AlreadyExists):
            await create(store)

    async def test_a_commit_from_before_a_change(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        """Stored, its answer lost, then a change: who repeats it is told of the change, and where the tokens end."""
        ownership = await create(far_store)
        lose_reply()
        await far_store.commit(ownership, 0, 3, encode(4, 5))
        before = await far_store.read("r")
        assert before is not None
        await far_store.update(before, b"another")
        with pytest.raises(ConfigChanged) as changed:
            await far_store.commit(ownership, 0, 3, encode(4, 5))
        assert changed.value.stored.length == 5

    async def test_finish(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        ownership = await create(far_store)
        lose_reply()
        await far_store.finish(ownership, 0, b"result")

    async def test_delete(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        ownership = await create(far_store)
        lose_reply()
        await far_store.delete(ownership)
        assert await far_store.read("r") is None

    async def test_64_commits(self, far_store: SessionStore, lose_reply: Callable[[], None]) -> None:
        owners = await asyncio.gather(*(create(far_store, f"r{index}") for index in range(64)))
        lose_reply()
        await asyncio.gather(*(far_store.commit(owner, 0, 3, encode(index)) for index, owner in enumerate(owners)))
        for index in range(64):
            assert tokens_of(await far_store.read(f"r{index}")) == [1, 2, 3, index]


async def test_a_lost_command_is_repeated(proxy: TcpProxy) -> None:
    async with connected(url_of(proxy), socket_timeout=0.4, retry_seconds=60.0, retry_attempts=100) as store:
        ownership = await create(store)
        for close in (True, False):
            proxy.lose_next(Direction.TO_SERVER, close=close)
            await store.commit(ownership, int(not close), 3 + int(not close), encode(4))
        assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 4]


class TestPipeline:
    async def test_64_commits_of_one_tick_are_one_pipeline(
        self, store: SessionStore, redis_server: RedisServer
    ) -> None:
        owners = [await create(store, f"r{index}") for index in range(65)]
        reads = []
        for some in (owners[:1], owners[1:]):
            redis_server.command("CONFIG", "RESETSTAT")
            await asyncio.gather(*(store.commit(owner, 0, 3, encode(4)) for owner in some))
            calls = redis_server.info("commandstats")
            reads.append(redis_server.info("stats")["total_reads_processed"])
            assert calls["cmdstat_evalsha"]["calls"] == len(some)
            assert "cmdstat_multi" not in calls
        # Some reads are those of the commands above; 64 commits are 12 kB, which arrive in one piece or two.
        assert reads[1] - reads[0] <= 1
        clients = redis_server.command("CLIENT", "LIST")
        assert str(clients).count("tandem-orchestrator") == 1

    async def test_commits_of_different_ticks_do_not_wait_for_one_another(self, proxy: TcpProxy) -> None:
        async with connected(url_of(proxy), socket_timeout=60.0, retry_seconds=60.0) as store:
            owners = [await create(store, f"r{index}") for index in range(20)]
            proxy.delay(0.5)
            started = time.monotonic()
            commits = []
            for owner in owners:
                commits.append(asyncio.ensure_future(store.commit(owner, 0, 3, encode(4))))
                await asyncio.sleep(0.01)
            await asyncio.gather(*commits)
            assert time.monotonic() - started < 15  # one after the other they would take 20 s

    async def test_each_caller_gets_its_own_outcome(self, store: SessionStore, redis_server: RedisServer) -> None:
        good, fenced, early, lost = [await create(store, name) for name in ("good", "fenced", "early", "lost")]
        await store.take_over("fenced", "B")
        redis_server.command("DEL", *keys_of("lost"))
        outcomes = await asyncio.gather(
            store.commit(good, 0, 3, encode(4)),
            store.commit(fenced, 0, 3, encode(4)),
            store.commit(early, 1, 3, encode(4)),
            store.commit(lost, 0, 3, encode(4)),
            store.read("good"),
            return_exceptions=True,
        )
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [type(None), FencedOff, EpochConflict, StateLost, Snapshot]
        assert counters(store).commits == 1

    async def test_scripts_come_back_after_a_flush(self, store: SessionStore, redis_server: RedisServer) -> None:
        redis_server.command("SCRIPT", "FLUSH")
        ownership = await create(store)
        steps: list[Callable[[], Awaitable[Any]]] = [
            lambda: store.commit(ownership, 0, 3, encode(4)),
            lambda: store.read("r"),
            lambda: store.finish(ownership, 1, b"result"),
            lambda: store.take_over("r", "B"),
            lambda: store.delete(ownership),
            store.ping,
        ]
        for step in steps:
            redis_server.command("SCRIPT", "FLUSH")
            await step()
        assert counters(store).retries == 0
        assert counters(store).refusals == {}

    async def test_a_flush_amid_64_commits(self, store: SessionStore, redis_server: RedisServer) -> None:
        owners = [await create(store, f"r{index}") for index in range(64)]
        for epoch in range(10):
            flushes = [sudo(redis_server, "SCRIPT", "FLUSH") for _ in range(3)]
            commits = [store.commit(owner, epoch, 3 + epoch, encode(epoch)) for owner in owners]
            await asyncio.gather(*flushes, *commits)
        for index in range(64):
            assert tokens_of(await store.read(f"r{index}")) == [1, 2, 3, *range(10)]

    async def test_a_large_prompt_and_a_large_batch(self, store: SessionStore) -> None:
        prompt = list(range(200_000))
        ownerships = await asyncio.gather(
            store.create("large", FINGERPRINT, REQUEST, encode(*prompt), "A"),
            *(create(store, f"r{index}") for index in range(500)),
        )
        await asyncio.gather(
            *(store.commit(ownership, 0, ownership.length, encode(4, 5)) for ownership in ownerships),
        )
        assert tokens_of(await store.read("large")) == [*prompt, 4, 5]

    async def test_few_connections_are_waited_for(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url, pool_size=1) as store:

            async def session(name: str) -> None:
                ownership = await create(store, name)
                for epoch in range(20):
                    await store.commit(ownership, epoch, 3 + epoch, encode(epoch))
                    await asyncio.sleep(0)

            await asyncio.gather(*(session(f"r{index}") for index in range(30)))
            assert counters(store).refusals == {}
            assert counters(store).commits == 600

    async def test_a_pool_that_stays_exhausted_is_unavailable(self, proxy: TcpProxy) -> None:
        async with connected(url_of(proxy), pool_size=1, socket_timeout=0.15, retry_seconds=1.0) as store:
            owners = [await create(store, f"r{index}") for index in range(4)]
            proxy.stall()
            commits = []
            for owner in owners:
                commits.append(asyncio.ensure_future(store.commit(owner, 0, 3, encode(4))))
                await asyncio.sleep(0.02)
            outcomes = await asyncio.wait_for(asyncio.gather(*commits, return_exceptions=True), 30)
            assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
            proxy.resume()
            for owner in owners:
                await in_the_end(partial(store.commit, owner, 0, 3, encode(4)))


class TestCancel:
    async def test_220_callers_of_whom_200_cancel(self, proxy: TcpProxy, redis_server: RedisServer) -> None:
        """A cancelled caller must never leave its reply to somebody else."""
        chance = random.Random(20)
        async with connected(url_of(proxy), pool_size=4) as store:
            owners = await asyncio.gather(*(create(store, f"r{index}") for index in range(220)))
            proxy.delay(0.003)

            async def session(index: int) -> None:
                owner = owners[index]
                for epoch in range(12):
                    await store.commit(owner, epoch, 3 + epoch, encode(1000 * index + epoch))
                    snapshot = await store.read(f"r{index}")
                    assert tokens_of(snapshot) == [1, 2, 3, *(1000 * index + old for old in range(epoch + 1))]
                    await asyncio.sleep(chance.random() * 0.01)

            tasks = [asyncio.ensure_future(session(index)) for index in range(220)]
            for index in chance.sample(range(20, 220), 200):
                await asyncio.sleep(chance.random() * 0.003)
                tasks[index].cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert outcomes[:20] == [None] * 20
            assert sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes) > 100
            proxy.delay(0.0)
            for index in range(220):
                stored = tokens_of(await store.read(f"r{index}"))
                assert stored == [1, 2, 3, *(1000 * index + epoch for epoch in range(len(stored) - 3))]
            assert counters(store).refusals == {}

    async def test_a_commit_under_way_goes_on_without_its_caller(self, proxy: TcpProxy) -> None:
        async with connected(url_of(proxy)) as store:
            ownership = await create(store)
            proxy.delay(0.05)
            commit = asyncio.ensure_future(store.commit(ownership, 0, 3, encode(4)))
            await asyncio.sleep(0.02)
            commit.cancel()
            with pytest.raises(asyncio.CancelledError):
                await commit
            deadline = time.monotonic() + 60
            while tokens_of(await store.read("r")) != [1, 2, 3, 4]:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)
            await store.commit(ownership, 0, 3, encode(4))

    async def test_a_commit_that_is_cancelled_at_once_is_not_sent(
        self, store: SessionStore, redis_server: RedisServer
    ) -> None:
        ownership = await create(store)
        commit = asyncio.ensure_future(store.commit(ownership, 0, 3, encode(4)))
        await asyncio.sleep(0)
        commit.cancel()
        await asyncio.sleep(0.05)
        assert tokens_of(await store.read("r")) == [1, 2, 3]

    @pytest.mark.parametrize("after", [0.0, 0.01, 0.06, 0.11])
    async def test_a_cancelled_create_is_undone(self, proxy: TcpProxy, redis_server: RedisServer, after: float) -> None:
        async with connected(url_of(proxy)) as store:
            await store.ping()
            proxy.delay(0.05)
            creation = asyncio.ensure_future(create(store))
            await asyncio.sleep(after)
            too_late = creation.done()  # on a busy machine as well
            creation.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await creation
            assert creation.cancelled() or too_late or after > 0.1
        assert redis_server.command("DBSIZE") == (0 if creation.cancelled() else 2)


class TestAwayServer:
    async def test_nobody_listens(self) -> None:
        async with connected(f"redis://127.0.0.1:{free_port()}", retry_seconds=1.0) as store:
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await create(store)
            assert time.monotonic() - started < 30
            assert counters(store).retries > 0
            with pytest.raises(StoreUnavailable):
                await store.ping()

    async def test_no_retry_time_means_one_attempt(self) -> None:
        async with connected(f"redis://127.0.0.1:{free_port()}", retry_seconds=0) as store:
            with pytest.raises(StoreUnavailable):
                await create(store)
            assert counters(store).retries == 0

    async def test_a_wrong_password_is_unavailable_and_not_repeated_to_the_reader(
        self, make_redis_server: Callable[..., RedisServer]
    ) -> None:
        server = make_redis_server()
        server.command("CONFIG", "SET", "requirepass", "correct horse")
        url = f"redis://:battery-staple@{server.host}:{server.port}"
        async with connected(url, retry_seconds=0.1) as store:
            with pytest.raises(StoreUnavailable) as failure:
                await create(store)
        assert "battery-staple" not in str(failure.value)
        assert "battery-staple" not in repr(StoreConfig(url=url))
        async with connected(f"redis://:correct%20horse@{server.host}:{server.port}/3") as store:
            await create(store)

    async def test_committed_tokens_survive_a_restart(self, make_redis_server: Callable[..., RedisServer]) -> None:
        server = make_redis_server({"appendonly": "yes", "appendfsync": "always"})
        async with connected(server.url, retry_seconds=1.5) as store:
            ownership = await create(store)
            await store.commit(ownership, 0, 3, encode(4))
            server.kill()
            with pytest.raises(StoreUnavailable):
                await store.commit(ownership, 1, 4, encode(5))
            server.start()
            await in_the_end(partial(store.commit, ownership, 1, 4, encode(5)))
            assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]

    async def test_a_commit_waits_for_a_quick_restart(self, make_redis_server: Callable[..., RedisServer]) -> None:
        server = make_redis_server({"appendonly": "yes", "appendfsync": "always"})
        async with connected(server.url, retry_seconds=60.0, retry_attempts=1000) as store:
            owners = await asyncio.gather(*(create(store, f"r{index}") for index in range(20)))
            server.kill()
            commits = [asyncio.ensure_future(store.commit(owner, 0, 3, encode(4))) for owner in owners]
            await asyncio.sleep(0.2)
            await asyncio.to_thread(server.start)
            await asyncio.gather(*commits)
            for index in range(20):
                assert tokens_of(await store.read(f"r{index}")) == [1, 2, 3, 4]

    async def test_a_server_that_forgot_everything_has_lost_the_state(
        self, make_redis_server: Callable[..., RedisServer]
    ) -> None:
        server = make_redis_server()
        async with connected(server.url) as store:
            ownership = await create(store)
            server.kill()
            server.start()
            with pytest.raises(StateLost):
                await store.commit(ownership, 0, 3, encode(4))

    async def test_a_stall_longer_than_the_timeout(self, make_redis_server: Callable[..., RedisServer]) -> None:
        server = make_redis_server()
        async with connected(server.url, socket_timeout=0.1, retry_seconds=60.0, retry_attempts=500) as store:
            ownership = await create(store)
            server.pause()
            commit = asyncio.ensure_future(store.commit(ownership, 0, 3, encode(4)))
            await until(lambda: counters(store).retries >= 3)
            assert not commit.done()
            server.resume()
            await commit
            await store.commit(ownership, 1, 4, encode(5))
            # Attempts that lay in the paused server's buffers have run late, without effect.
            assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]

    async def test_a_stall_longer_than_all_retries(self, make_redis_server: Callable[..., RedisServer]) -> None:
        server = make_redis_server()
        async with connected(server.url, socket_timeout=0.2, retry_seconds=1.0) as store:
            ownership = await create(store)
            server.pause()
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await store.commit(ownership, 0, 3, encode(4))
            assert time.monotonic() - started < 30
            retries = counters(store).retries
            with pytest.raises(StoreUnavailable):
                await store.ping()
            assert counters(store).retries == retries, "a ping is not repeated"
            server.resume()
            await in_the_end(partial(store.commit, ownership, 0, 3, encode(4)))
            snapshot = await store.read("r")
            assert tokens_of(snapshot) == [1, 2, 3, 4]
            assert snapshot is not None
            assert snapshot.epoch == 1

    async def test_a_cut_network(self, proxy: TcpProxy) -> None:
        """Half-open connections: nothing is refused, nothing comes back."""
        async with connected(url_of(proxy), socket_timeout=0.2, retry_seconds=1.0) as store:
            owners = await asyncio.gather(*(create(store, f"r{index}") for index in range(8)))
            proxy.cut()
            with pytest.raises(StoreUnavailable):
                await store.commit(owners[0], 0, 3, encode(4))
            proxy.cut(False)
            for owner in owners:
                await in_the_end(partial(store.commit, owner, 0, 3, encode(4)))

    @pytest.mark.parametrize("direction", Direction)
    async def test_half_closed_connections(self, proxy: TcpProxy, direction: Direction) -> None:
        async with connected(url_of(proxy)) as store:
            ownership = await create(store)
            for epoch in range(5):
                proxy.half_close(direction)
                await store.commit(ownership, epoch, 3 + epoch, encode(epoch))
            assert tokens_of(await store.read("r")) == [1, 2, 3, 0, 1, 2, 3, 4]

    async def test_resets_at_any_time(self, proxy: TcpProxy) -> None:
        chance = random.Random(5)
        async with connected(url_of(proxy), retry_seconds=60.0, retry_attempts=10_000) as store:
            owners = await asyncio.gather(*(create(store, f"r{index}") for index in range(16)))

            async def session(index: int) -> None:
                for epoch in range(40):
                    await store.commit(owners[index], epoch, 3 + epoch, encode(1000 * index + epoch))

            async def saboteur() -> None:
                while True:
                    await asyncio.sleep(chance.random() * 0.02)
                    proxy.reset()

            sabotage = asyncio.ensure_future(saboteur())
            await asyncio.gather(*(session(index) for index in range(16)))
            sabotage.cancel()
            for index in range(16):
                snapshot = await store.read(f"r{index}")
                assert tokens_of(snapshot) == [1, 2, 3, *(1000 * index + epoch for epoch in range(40))]
                assert snapshot is not None
                assert snapshot.epoch == 40
            assert counters(store).retries > 0


class TestRefusingServer:
    async def test_a_primary_that_becomes_a_replica_and_a_primary_again(
        self, redis_server: RedisServer, make_redis_server: Callable[..., RedisServer]
    ) -> None:
        other = make_redis_server()
        async with connected(redis_server.url, retry_seconds=0.2) as store:
            ownership = await create(store)
            redis_server.command("REPLICAOF", *other.peer_address)
            for attempt in (
                store.commit(ownership, 0, 3, encode(4)),
                create(store, "new"),
                store.read("r"),
                store.take_over("r", "B"),
                store.ping(),
            ):
                with pytest.raises(StoreUnavailable):
                    await attempt
            redis_server.command("REPLICAOF", "NO", "ONE")
            await in_the_end(store.ping)

    async def test_a_commit_follows_the_address_to_the_promoted_replica(
        self, make_redis_server: Callable[..., RedisServer]
    ) -> None:
        old, new = (make_redis_server({"repl-diskless-sync-delay": "0"}) for _ in range(2))
        async with (
            TcpProxy(old.host, old.port) as proxy,
            connected(url_of(proxy), socket_timeout=30.0, retry_seconds=60.0) as store,
        ):
            ownership = await create(store)
            new.command("REPLICAOF", *old.peer_address)
            wait_until(lambda: bool(new.info("replication").get("master_link_status") == "up"))
            await store.commit(ownership, 0, 3, encode(4))
            wait_until(lambda: bool(new.command("HGET", keys_of("r")[0], "epoch") == b"1"))
            await self.open_connections(store, proxy, 4)
            new.command("REPLICAOF", "NO", "ONE")
            old.command("REPLICAOF", *new.peer_address)
            # Open connections still lead to the old primary, and work; only new ones go to the promoted one.
            proxy.server_host, proxy.server_port = new.host, new.port
            await store.commit(ownership, 1, 4, encode(5))
            await self.open_connections(store, proxy, 4)
            assert counters(store).retries == 1, "an idle connection still led to the old primary"
            assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]

    async def open_connections(self, store: SessionStore, proxy: TcpProxy, count: int) -> None:
        proxy.stall()  # so that each takes a connection of its own
        reads = []
        for _ in range(count):
            reads.append(asyncio.ensure_future(store.read("r")))
            await asyncio.sleep(0.01)
        await until(lambda: proxy.open_connections >= count)
        proxy.resume()
        await asyncio.gather(*reads)
        assert proxy.open_connections >= count

    async def test_a_full_server(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url) as store:
            running, finishing, dropped = [await create(store, name) for name in ("running", "finishing", "dropped")]
            redis_server.command("CONFIG", "SET", "maxmemory", 1)
            with pytest.raises(StoreFull):
                await create(store, "new")
            with pytest.raises(StoreFull):
                await store.commit(running, 0, 3, encode(4))
            with pytest.raises(StoreFull):
                await store.ping()
            assert tokens_of(await store.read("running")) == [1, 2, 3]
            await store.finish(finishing, 0, b"result")
            await store.delete(dropped)
            await store.delete(running)
            assert redis_server.command("DBSIZE") == 2
            assert counters(store).retries == 0
            redis_server.command("CONFIG", "SET", "maxmemory", 0)
            await create(store, "new")

    async def test_a_live_key_that_is_evicted(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url) as store:
            ownership = await create(store)
            used = redis_server.info("memory")["used_memory"]
            redis_server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru", "maxmemory", used + 2**20)
            with redis_server.client() as client, client.pipeline(transaction=False) as filler:
                for number in range(1_500):  # what was of use longest ago goes at random, of those of one second
                    filler.set(f"filler{number}", "x" * 10_000)
                filler.execute()
            assert any(not redis_server.command("EXISTS", key) for key in keys_of("r"))
            with pytest.raises(StateLost):
                await store.commit(ownership, 0, 3, encode(4))

    async def test_a_busy_server(self, redis_server: RedisServer) -> None:
        redis_server.command("CONFIG", "SET", "busy-reply-threshold", 50)
        async with connected(redis_server.url, socket_timeout=0.5, retry_seconds=60.0, retry_attempts=1000) as store:
            ownership = await create(store)
            spinning = asyncio.ensure_future(asyncio.to_thread(_spin, redis_server))
            await until(lambda: _is_busy(redis_server))
            commit = asyncio.ensure_future(store.commit(ownership, 0, 3, encode(4)))
            await until(lambda: counters(store).retries > 0)
            assert not commit.done()
            await sudo(redis_server, "SCRIPT", "KILL")
            await commit
            await spinning

    async def test_a_loading_server(self, make_redis_server: Callable[..., RedisServer]) -> None:
        # While it loads, a server looks at its connections once in 1,024 commands.
        server = make_redis_server({"appendonly": "yes", "key-load-delay": "200"})
        observer = Recorder()
        async with connected(server.url, observer, retry_seconds=60.0, retry_attempts=1000) as store:
            ownership = await create(store)
            with server.client() as client, client.pipeline(transaction=False) as filler:
                for number in range(6_000):
                    filler.set(f"filler{number}", "x")
                filler.execute()
            server.stop()
            server.start(wait=False)
            await store.commit(ownership, 0, 3, encode(4))
        assert any("Loading" in problem for problem in observer.problems)


def _spin(server: RedisServer) -> None:
    with contextlib.suppress(Exception):
        server.command("EVAL", "while true do end", 0, timeout=60.0)


def _is_busy(server: RedisServer) -> bool:
    try:
        server.command("PING")
    except redis.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


class TestAddresses:
    async def test_a_unix_socket(
        self, redis_kind: ServerKind, make_redis_server: Callable[..., RedisServer], tmp_path: Path
    ) -> None:
        if redis_kind.image is not None:
            pytest.skip("the socket would be inside the container")
        path = tmp_path / "server.sock"
        make_redis_server({"unixsocket": str(path)})
        async with connected(f"unix://{path}?db=2") as store:
            await create(store)
            assert tokens_of(await store.read("r")) == [1, 2, 3]

    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("redis+sentinel://:secret@host:26379", "service"),
            ("redis+sentinel://:secret@host/mymaster", "host:port"),
            ("redis+sentinel://:secret@host:26379,/mymaster", "host:port"),
            ("redis+sentinel://host:26379/mymaster/secret", "service"),
            ("sentinel://host", "Sentinel"),
            ("sentinels://:secret@host:26379/mymaster", r"redis\+sentinel://"),
            ("redis+cluster://:secret@host", "host:port"),
            ("redis+cluster://:secret@one:6379,two:port", "host:port"),
            ("redis+cluster://:secret@host:6379/3", "database 0"),
            ("rediss+sentinel://host:26379/mymaster?ssl_cert_reqs=secret", r"^rediss\+sentinel://.* '\?'"),
            ("redis+cluster://host:6379?sentinel_password=secret", "no settings"),
            ("redis+sentinel://host:26379/main?password=secret", "sentinel_username and sentinel_password"),
            ("redis+sentinel://host:26379/main?secret", r"'\?'"),
            ("redis+sentinel://host:26379/main?sentinel_username=secret", "needs sentinel_password"),
            ("redis+sentinel://host:26379/main?sentinel_password=", "sentinel_password must not be empty"),
            ("redis+sentinel://host:26379/main?sentinel_password", "sentinel_password must not be empty"),
            (
                "redis+sentinel://host:26379/main?sentinel_username=secret&sentinel_password=",
                "sentinel_password must not be empty",
            ),
            (
                "rediss+sentinel://host:26379/main?sentinel_username=&sentinel_password=secret",
                "sentinel_username must not be empty",
            ),
            ("redis+sentinel://:sec?ret@host:26379/main", "percent-encoded"),
            (
                "redis+sentinel://host:26379/main?sentinel_password=secret&sentinel_password=secret2",
                "sentinel_username and",
            ),
            ("rediss+cluster://host:6379?ssl_cert_reqs=secret", r"^rediss\+cluster://.* '\?'"),
            ("redis+cluster://:sec?ret@host:6379", "percent-encoded"),
            ("cluster://host:6379", r"redis\+cluster://"),
            ("redis://one:6379,two:6379", r"redis\+cluster://"),
            ("http://user:secret@host", "redis://"),
            ("redis://default:secret#def@host", "percent-encoded"),
            ("redis://:secret\uff1a@host:6379", "can't be read"),  # its normal form is a colon
            ("redis://host:6379#secret", "percent-encoded"),
            ("redis://host:6379/secret", "database's number"),
            ("redis://host:6379?socket_timeot=secret", "setting 1 .* none that the client library takes"),
            ("rediss://host:6379/0?db=1&ssl_cert_reqs=secret", "setting 2 .* no value that it takes"),
            ("redis://host:6379?socket_timeout=secret", "no value that it takes"),
            ("redis://host:6379?retry=secret", "no value that it takes"),
            ("redis://:6?secret@host:6379", "name=value"),
            ("unix:///a/socket?secret=1", "none that the client library takes"),
            ("", "redis://"),
        ],
    )
    def test_other_addresses_are_refused_in_words(self, url: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as refusal:
            StoreConfig(url=url)
        assert "secret" not in str(refusal.value)

    @pytest.mark.parametrize(
        "url",
        [
            "redis://host",
            "redis://user:pass%3Fword@host:6379/",
            "redis://host:6379/3?socket_read_size=4096&protocol=3",
            "rediss://host:6379/0?ssl_cert_reqs=none&ssl_check_hostname=no",
            "unix://user:password@/a/socket?db=3",
        ],
    )
    def test_addresses_of_one_server_with_settings_of_the_client_library(self, url: str) -> None:
        assert StoreConfig(url=url).url == url

    @pytest.mark.parametrize(
        "setting",
        [
            {"socket_timeout": 0.0},
            {"connect_timeout": -1.0},
            {"running_ttl": float("inf")},
            {"finished_ttl": float("nan")},
            {"retry_seconds": -0.1},
            {"retry_attempts": 0},
            {"pool_size": 0},
            {"health_check_interval": -1.0},
        ],
    )
    def test_settings_that_can_not_work_are_refused(self, setting: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(setting))):
            StoreConfig(url="redis://localhost", **setting)

    async def test_the_url_can_not_undo_the_settings(self, redis_server: RedisServer) -> None:
        query = "decode_responses=true&protocol=3&retry_on_timeout=true&max_connections=1&socket_timeout=100"
        async with connected(f"{redis_server.url}/0?{query}") as store:
            ownership = await create(store)
            await store.commit(ownership, 0, 3, encode(4))
            assert tokens_of(await store.read("r")) == [1, 2, 3, 4]


class TestDurability:
    async def test_a_commit_counts_once_a_replica_holds_it(self, make_redis_server: Callable[..., RedisServer]) -> None:
        primary, replica = (make_redis_server({"repl-diskless-sync-delay": "0"}) for _ in range(2))
        replica.command("REPLICAOF", *primary.peer_address)
        wait_until(lambda: bool(replica.info("replication").get("master_link_status") == "up"))
        async with connected(
            primary.url, durability=Durability(replicas=1), retry_seconds=60.0, retry_attempts=1000
        ) as store:
            ownership = await create(store)
            await store.commit(ownership, 0, 3, encode(4))
            assert replica.command("HGET", keys_of("r")[0], "epoch") == b"1"
            replica.pause()
            commit = asyncio.ensure_future(store.commit(ownership, 1, 4, encode(5)))
            await asyncio.sleep(1.2)
            assert not commit.done(), "the primary alone isn't enough"
            replica.resume()
            await commit
            assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]
            # What was acknowledged outlives the primary.
            primary.kill()
            replica.command("REPLICAOF", "NO", "ONE")
        async with connected(replica.url) as promoted:
            assert tokens_of(await promoted.read("r")) == [1, 2, 3, 4, 5]

    async def test_what_is_told_of_a_change_lasts_though_nothing_is_stored_by_it(
        self, make_redis_server: Callable[..., RedisServer]
    ) -> None:
        """A first attempt had stored the change, or somebody else, and those who have to hold it may not do so yet."""
        primary, replica = (make_redis_server({"repl-diskless-sync-delay": "0"}) for _ in range(2))
        replica.command("REPLICAOF", *primary.peer_address)
        wait_until(lambda: bool(replica.info("replication").get("master_link_status") == "up"))
        durable = Durability(replicas=1)
        async with (
            connected(primary.url, durability=durable, retry_seconds=60.0, retry_attempts=1000) as patient,
            connected(primary.url, durability=durable, socket_timeout=0.3, retry_seconds=0.0) as hasty,
        ):
            ownership = await create(patient)
            before = await patient.read("r")
            assert before is not None
            await patient.update(before, b"another")
            after = await patient.read("r")
            assert after is not None
            calls: list[Callable[[SessionStore], Awaitable[Any]]] = [
                lambda store: store.commit(ownership, 0, 3, encode(4)),
                lambda store: store.finish(ownership, 0, b"result"),
                lambda store: store.update(before, b"another"),
                lambda store: store.update(after, b"another"),
            ]
            replica.pause()
            for call in calls:
                with pytest.raises(StoreUnavailable):
                    await call(hasty)
            replica.resume()
            for call in calls[:2]:
                with pytest.raises(ConfigChanged):
                    await call(patient)
            for call in calls[2:]:
                assert await call(patient) == Update(1, 3, took_effect=False)

    async def test_a_commit_counts_once_it_is_on_disk(self, make_redis_server: Callable[..., RedisServer]) -> None:
        server = make_redis_server({"appendonly": "yes", "appendfsync": "everysec"})
        async with connected(
            server.url, durability=Durability(disk=True), socket_timeout=30.0, retry_seconds=60.0
        ) as store:
            if server.info("server")["redis_version"].startswith("7.0."):
                # It came with 7.2: said in words, at the first ping.
                with pytest.raises(StoreUnavailable, match="WAITAOF"):
                    await store.ping()
                return
            ownership = await create(store)
            for epoch in range(5):
                await store.commit(ownership, epoch, 3 + epoch, encode(10 + epoch))
        server.kill()
        server.start()
        async with connected(server.url) as store:
            assert tokens_of(await store.read("r")) == [1, 2, 3, 10, 11, 12, 13, 14]

    @pytest.mark.parametrize("beside", ["return redis.error_reply('READONLY of late')", "return 2"])
    async def test_nothing_of_a_batch_counts_before_it_is_held(self, redis_server: RedisServer, beside: str) -> None:
        """Though another call of the batch was refused, or its script wasn't known."""
        known, other = Script.of(b"return 1"), Script.of(beside.encode())
        config = StoreConfig(url=redis_server.url)
        redis_server.command("SCRIPT", "FLUSH")
        redis_server.command("SCRIPT", "LOAD", known.body)
        if "READONLY" in beside:
            redis_server.command("SCRIPT", "LOAD", other.body)
        for replicas, outcomes in ((0, {1, 2}), (1, set())):
            wanted = Durability(replicas=replicas).wait(0.2)
            pipeline = ScriptPipeline(_nodes(config), Patience(30.0, 1, 0.0), lambda problem: None, wanted)
            replies = await asyncio.gather(
                pipeline.run(known, (), ()), pipeline.run(other, (), ()), return_exceptions=True
            )
            await pipeline.close()
            held = {reply for reply in replies if isinstance(reply, int)}
            assert held == outcomes - ({2} if "READONLY" in beside else set())
            assert all(isinstance(reply, StoreUnavailable) for reply in replies if not isinstance(reply, int))

    @pytest.mark.parametrize(
        "text", ["", "+", "disk+disk", "replicas", "replicas=x", "replicas=-1", "memory+disk", "replicas=1+replicas=2"]
    )
    def test_other_words_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=r".*"):
            Durability.parse(text)

    def test_the_words(self) -> None:
        words = ["memory", "disk", "replicas=2", "disk+replicas=1"]
        read = [(each.disk, each.replicas) for each in map(Durability.parse, words)]
        assert read == [(False, 0), (True, 0), (False, 2), (True, 1)]


class TestSentinel:
    async def test_commits_follow_a_failover(
        self, make_redis_server: Callable[..., RedisServer], redis_kind: ServerKind, tmp_path: Path
    ) -> None:
        old, new = (make_redis_server({"repl-diskless-sync-delay": "0"}) for _ in range(2))
        new.command("REPLICAOF", *old.peer_address)
        wait_until(lambda: bool(new.info("replication").get("master_link_status") == "up"))
        with running_sentinel(redis_kind, old, tmp_path) as port:
            url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main/0"
            async with connected(
                url, durability=Durability(replicas=1), retry_seconds=60.0, retry_attempts=1000
            ) as store:
                ownership = await create(store)
                await store.commit(ownership, 0, 3, encode(4))
            async with connected(url, retry_seconds=60.0, retry_attempts=1000) as store:
                await store.ping()
                old.kill()
                await store.commit(ownership, 1, 4, encode(5))
                assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]
            await _only_with_the_sentinels_own_password(url, port)
        assert new.info("replication")["role"] == "master"
        assert new.command("HGET", keys_of("r")[0], "epoch") == b"2"


async def _only_with_the_sentinels_own_password(url: str, port: int) -> None:
    """Which isn't the primary's: that has none."""
    with redis.Redis(host="127.0.0.1", port=port) as client:
        client.execute_command("ACL", "SETUSER", "tandem", "on", ">pass&word", "+@all")
        client.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
    login = "?sentinel_password=another", "?sentinel_username=tandem&sentinel_password=pass%26word"
    for right in login:
        async with connected(f"{url}{right}", retry_seconds=60.0, retry_attempts=1000) as store:
            assert tokens_of(await store.read("r")) == [1, 2, 3, 4, 5]
    for wrong in ("", "?sentinel_password=pass%26word", login[1].replace("tandem", "nobody")):
        with pytest.raises(StoreUnavailable) as refusal:
            async with connected(f"{url}{wrong}", retry_seconds=0.0) as store:
                await store.read("r")
        assert "word" not in str(refusal.value)


@contextlib.contextmanager
def running_sentinel(kind: ServerKind, primary: RedisServer, folder: Path) -> Iterator[int]:
    """One Sentinel, which is enough to decide; the port it listens on."""
    if kind.binary is None:
        pytest.skip("a Sentinel of a container would not reach this machine's servers")
    port, settings = free_port(), folder / "sentinel.conf"
    lines = [
        f"port {port}",
        "bind 127.0.0.1",
        f"dir {folder}",
        f"sentinel monitor main {primary.host} {primary.port} 1",
        "sentinel down-after-milliseconds main 500",
        "sentinel failover-timeout main 2000",
    ]
    settings.write_text("\n".join(lines) + "\n")
    with (folder / "sentinel.log").open("wb") as log:
        process = subprocess.Popen([str(kind.binary), str(settings), "--sentinel"], stdout=log, stderr=log)
    try:
        with redis.Redis(host="127.0.0.1", port=port) as client:
            wait_until(lambda: _replicas_known(client) == 1)
        yield port
    finally:
        process.kill()
        process.wait()


def _replicas_known(client: redis.Redis) -> int:
    try:
        return len(client.execute_command("SENTINEL", "REPLICAS", "main"))
    except redis.RedisError:
        return 0


class TestClose:
    async def test_a_closed_store_is_unavailable(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url) as store:
            ownership = await create(store)
        with pytest.raises(StoreUnavailable):
            await store.commit(ownership, 0, 3, encode(4))

    async def test_close_waits_for_commits(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url) as store:
            ownership = await create(store)
            commit = asyncio.ensure_future(store.commit(ownership, 0, 3, encode(4)))
            await asyncio.sleep(0)
        await commit
        assert redis_server.command("GETRANGE", keys_of("r")[1], 12, 15) == encode(4)

    async def test_no_connection_is_left(self, redis_server: RedisServer) -> None:
        async with connected(redis_server.url) as store:
            await asyncio.gather(*(create(store, f"r{index}") for index in range(10)))
        await until(lambda: "tandem-orchestrator" not in str(redis_server.command("CLIENT", "LIST")))


async def test_the_observer_hears_of_everything(proxy: TcpProxy) -> None:
    observer = Recorder()
    async with connected(url_of(proxy), observer, socket_timeout=30.0) as store:
        ownership = await create(store)
        await store.commit(ownership, 0, 3, encode(4))
        proxy.lose_next(Direction.TO_CLIENT)
        await store.commit(ownership, 1, 4, encode(5))
        with pytest.raises(EpochConflict):
            await store.commit(ownership, 7, 4, encode(5))
    assert observer.heard == ["committed", "retried", "committed", "EpochConflict"]
