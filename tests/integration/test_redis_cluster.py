"""The session store on a real Redis Cluster: every node is used, slots that move and primaries that die are followed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from orchestrator.session_store import Durability, Ownership, SessionStore, StoreConfig, StoreCounters, StoreUnavailable
from tandem import wire
from tests.support.redis_cluster import RedisCluster, node_id, running_cluster
from tests.support.redis_servers import RedisServer, ServerKind

pytest_plugins = ("tests.support.redis_fixtures",)

PROMPT = (1, 2, 3)


@pytest.fixture(scope="module")
def cluster(redis_kind: ServerKind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    if redis_kind.image is not None:
        pytest.skip("the nodes of a cluster in containers would not be reached by the addresses they know")
    with running_cluster(redis_kind, tmp_path_factory.mktemp("cluster")) as running:
        yield running


@contextlib.asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[SessionStore]:
    settings = {"socket_timeout": 30.0, "retry_seconds": 60.0, "retry_attempts": 10_000, **settings}
    store = await SessionStore.connect(StoreConfig(url=url, **settings))
    try:
        yield store
    finally:
        await store.close()


async def create(store: SessionStore, request_id: str) -> Ownership:
    return await store.create(request_id, b"fingerprint", b"request", wire.encode_ids(PROMPT), "A")


async def tokens_of(store: SessionStore, request_id: str) -> list[int]:
    snapshot = await store.read(request_id)
    assert snapshot is not None
    return [int(token) for token in wire.decode_ids(snapshot.tokens)]


async def answered(ask: Callable[[], Awaitable[object]]) -> None:
    """Until there is an answer; who serves what is known then."""
    deadline = time.monotonic() + 60
    while True:
        try:
            await ask()
            return
        except StoreUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


def slot_of(request_id: str) -> int:
    return key_slot(f"tandem:{{{request_id}}}:state".encode())


def name_at(cluster: RedisCluster, node: RedisServer, prefix: str) -> str:
    """A request id whose keys are at this primary."""
    names = (f"{prefix}{number}" for number in range(1_000))
    return next(name for name in names if cluster.owner(slot_of(name)) is node)


async def test_every_primary_takes_sessions(cluster: RedisCluster) -> None:
    names = [f"spread{number}" for number in range(60)]
    before = [node.command("DBSIZE") for node in cluster.primaries]
    async with connected(cluster.url) as store:
        await store.ping()
        owners = await asyncio.gather(*(create(store, name) for name in names))
        for epoch in range(3):
            for node in cluster.primaries:
                node.command("SCRIPT", "FLUSH")
            await asyncio.gather(*(store.commit(o, epoch, 3 + epoch, wire.encode_ids([epoch])) for o in owners))
        for name in names:
            assert await tokens_of(store, name) == [*PROMPT, 0, 1, 2]
        stored = [node.command("DBSIZE") - had for node, had in zip(cluster.primaries, before, strict=True)]
        assert sum(stored) == 2 * len(names)
        assert min(stored) > 0
        assert isinstance(store.observer, StoreCounters)
        assert store.observer.retries == 0, "each went to the right node at once"
        await asyncio.gather(*(store.finish(owner, 3, b"result") for owner in owners))
        taken = await store.take_over(names[0], "B")
        assert taken.finish == b"result"


async def test_a_commit_can_wait_for_the_replica_of_its_primary(cluster: RedisCluster) -> None:
    first, second, _ = cluster.primaries
    async with connected(cluster.url, durability=Durability(replicas=1), retry_seconds=0.0) as store:
        ownership = await create(store, name_at(cluster, first, "held"))
        await store.commit(ownership, 0, 3, wire.encode_ids([4]))
    async with connected(
        cluster.url, durability=Durability(replicas=1), retry_seconds=0.0, socket_timeout=0.6
    ) as store:
        await answered(lambda: store.read(ownership.request_id))
        with pytest.raises(StoreUnavailable, match=r"wanted 1|no answer"):
            await create(store, name_at(cluster, second, "alone"))


async def test_a_session_is_followed_while_its_slot_moves(cluster: RedisCluster) -> None:
    old, new = cluster.primaries[1], cluster.primaries[2]
    name = name_at(cluster, old, "moving")
    slot = slot_of(name)
    async with connected(cluster.url) as store:
        counters = store.observer
        assert isinstance(counters, StoreCounters)
        ownership = await create(store, name)
        new.command("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(old))
        old.command("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(new))
        await store.commit(ownership, 0, 3, wire.encode_ids([4]))
        assert counters.retries == 0
        old.command("MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *ownership.keys)
        await store.commit(ownership, 1, 4, wire.encode_ids([5]))  # ASK
        new.command("SCRIPT", "FLUSH")
        await store.commit(ownership, 2, 5, wire.encode_ids([6]))  # ASK, and the script isn't there
        assert counters.retries == 2
        for node in (new, old, cluster.primaries[0]):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", node_id(new))
        await store.commit(ownership, 3, 6, wire.encode_ids([7]))  # MOVED, or by the map that was fetched after ASK
        had = counters.retries
        await store.commit(ownership, 4, 7, wire.encode_ids([8]))
        assert counters.retries == had
        assert await tokens_of(store, name) == [*PROMPT, 4, 5, 6, 7, 8]


async def test_commits_go_on_at_the_replica_of_a_primary_that_died(cluster: RedisCluster) -> None:
    first = cluster.primaries[0]
    names = [name_at(cluster, node, "failing") for node in cluster.primaries]
    async with connected(cluster.url, durability=Durability(replicas=1)) as careful:
        # What the replica has is what goes on.
        owners = [await create(careful, names[0])]
    async with connected(cluster.url, socket_timeout=0.5) as store:
        owners += [await create(store, name) for name in names[1:]]
        cluster.lose_patience()
        first.kill()
        with pytest.raises(StoreUnavailable):
            await store.ping()
        await asyncio.gather(*(store.commit(owner, 0, 3, wire.encode_ids([4])) for owner in owners))
        for name in names:
            assert await tokens_of(store, name) == [*PROMPT, 4]
        assert cluster.replica.info("replication")["role"] == "master"
        await answered(store.ping)
        for owner in owners:
            await store.commit(owner, 1, 4, wire.encode_ids([5]))


async def test_an_address_of_the_wrong_kind_is_named(cluster: RedisCluster, one_redis_server: RedisServer) -> None:
    node = cluster.primaries[1]
    async with connected(f"redis://{node.host}:{node.port}") as store:
        with pytest.raises(StoreUnavailable, match=r"redis\+cluster://"):
            await create(store, name_at(cluster, cluster.primaries[2], "elsewhere"))
    url = f"redis+cluster://{one_redis_server.host}:{one_redis_server.port}"
    async with connected(url, retry_seconds=0.0) as store:
        with pytest.raises(StoreUnavailable, match="cluster support disabled"):
            await store.ping()
