"""A real Redis Cluster on this machine: three primaries, and a replica of the first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from tests.support.redis_servers import RedisServer, ServerKind, free_port

SLOTS = 16_384
PRIMARIES = 3
START_SECONDS = 60.0


class RedisCluster:
    """Its nodes; the last one is the replica."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes
        self.primaries = nodes[:PRIMARIES]
        self.replica = nodes[PRIMARIES]

    @property
    def url(self) -> str:
        """Names two of the nodes, the first of which doesn't exist."""
        return f"redis+cluster://127.0.0.1:{free_port()},127.0.0.1:{self.nodes[1].port}"

    def owner(self, slot: int) -> RedisServer:
        """The primary of a slot, before anything has moved."""
        return self.primaries[min(slot // (SLOTS // PRIMARIES), PRIMARIES - 1)]

    def lose_patience(self) -> None:
        """A node that doesn't answer for a second is given up."""
        for node in self.nodes:
            node.command("CONFIG", "SET", "cluster-node-timeout", 1000)

    def wait_until_whole(self) -> None:
        """Until each node says that all slots are served."""
        _until(lambda: all(b"cluster_state:ok" in _ask(node, "INFO") for node in self.nodes))


@contextlib.contextmanager
def running_cluster(kind: ServerKind, folder: Path) -> Iterator[RedisCluster]:
    """Takes two to three seconds: a node waits for two before it takes writes."""
    with contextlib.ExitStack() as stack:
        nodes = []
        for index in range(PRIMARIES + 1):
            node = kind.create(folder / str(index), node_options())
            stack.callback(node.close)
            node.start()
            nodes.append(node)
        cluster = RedisCluster(nodes)
        share = SLOTS // PRIMARIES
        for index, node in enumerate(cluster.primaries):
            last = SLOTS - 1 if index == PRIMARIES - 1 else share * (index + 1) - 1
            node.command("CLUSTER", "ADDSLOTSRANGE", share * index, last)
        for index, node in enumerate(nodes):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            bus = int(node.command("CONFIG", "GET", "cluster-port")[b"cluster-port"])
            if node is not nodes[0]:
                nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port, bus)
        _until(lambda: all(_ask(node, "INFO").count(b"cluster_known_nodes:4") == 1 for node in nodes))
        first = node_id(nodes[0])
        _until(lambda: first.encode() in _ask(cluster.replica, "NODES"))
        cluster.replica.command("CLUSTER", "REPLICATE", first)
        cluster.wait_until_whole()
        _until(lambda: cluster.replica.info("replication").get("master_link_status") == "up")
        yield cluster


def node_options() -> dict[str, str]:
    """Of a node whose bus may have any port, and which the others have patience with, so that a busy machine is no fault."""
    return {
        "cluster-enabled": "yes",
        "cluster-port": str(free_port()),
        "cluster-node-timeout": "30000",
        "repl-diskless-sync-delay": "0",
    }


def node_id(node: RedisServer) -> str:
    """By which the nodes know one another."""
    name: bytes = node.command("CLUSTER", "MYID")
    return name.decode()


def _ask(node: RedisServer, what: str) -> bytes:
    """What it says, unparsed: the client would take it for its own cluster's."""
    try:
        with node.client() as client:
            client.response_callbacks.clear()
            answer: Any = client.execute_command("CLUSTER", what)
            return bytes(answer)
    except redis.ConnectionError:
        return b""


def _until(condition: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the cluster does not come up"
        time.sleep(0.02)
