"""What nodes of a cluster say that can't be relied on: one that knows nobody, and one that is named but isn't there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import AskError, RedisError, ResponseError

from orchestrator.redis_nodes import Address, ClusterNodes, Connections
from orchestrator.redis_scripts import Patience, Script, ScriptPipeline, StoreUnavailable

SCRIPT = Script.of(b"return 1")
OLD, NEW = ("old", 1), ("new", 2)
ALL_SLOTS = [[0, 16383, [b"old", 1, b"id"]]]


class Node:
    """A pool of one connection to a server that answers each command in turn, or isn't there."""

    is_connected = True

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer
        self.sent: list[bytes] = []
        self._unread = 0

    async def get_connection(self) -> Node:
        return self

    async def ensure_connection(self, connection: Node) -> None:
        assert connection is self

    async def release(self, connection: Node) -> None:
        assert connection is self

    async def can_read(self) -> bool:
        return False

    async def disconnect(self, **_: bool) -> None:
        self._unread = 0

    async def aclose(self) -> None:
        await self.disconnect()

    async def send_command(self, *words: str) -> None:
        self.sent.append(" ".join(words).encode())

    async def send_packed_command(self, packed: bytes) -> None:
        self.sent.append(packed)
        self._unread = packed.count(b"ASKING\r\n")

    async def read_response(self) -> Any:
        if self._unread:
            self._unread -= 1
            return b"OK"
        answer = self._answer()
        if isinstance(answer, Exception):
            raise answer
        return answer


def cluster(nodes: dict[Address, Node]) -> ClusterNodes:
    return ClusterNodes(list(nodes), lambda host, port: nodes[host, port], ask_seconds=60.0)  # type: ignore[return-value, arg-type]


def pipeline(nodes: Any) -> ScriptPipeline:
    return ScriptPipeline(nodes, Patience(exchange=60.0, attempts=6, total=60.0), lambda _: None)


async def test_a_node_that_knows_of_no_slots_is_passed_over() -> None:
    nodes = cluster({OLD: Node(lambda: ALL_SLOTS), NEW: Node(list)})
    for _ in range(20):  # each time in another order
        nodes.located = False
        await nodes.locate()
        assert nodes.located
        assert nodes.serving(b"key") is nodes.at(OLD)
        assert len(nodes.probes()) == 1


async def test_a_cluster_in_which_no_node_knows_of_slots_is_not_there() -> None:
    nodes = cluster({OLD: Node(list), NEW: Node(list)})
    with pytest.raises(RedisError, match="knows of no slots"):
        await nodes.locate()
    assert not nodes.located
    with pytest.raises(StoreUnavailable, match="knows of no slots"):
        await pipeline(nodes).run_everywhere(SCRIPT)


async def test_a_script_that_nobody_could_run_has_not_run_everywhere() -> None:
    class Nobody:
        located = True

        def probes(self) -> Sequence[Sequence[bytes]]:
            return ()

    with pytest.raises(StoreUnavailable, match="no node"):
        await pipeline(Nobody()).run_everywhere(SCRIPT)


@pytest.mark.parametrize("lost", [ConnectionResetError("gone"), ResponseError("READONLY it left")])
async def test_a_node_that_was_named_for_one_exchange_is_asked_once(lost: Exception) -> None:
    """ASK says where to go this once. Should that node be gone, who serves the slot knows more."""
    replies = iter([AskError("1 new:2"), 7])
    old = Node(lambda: ALL_SLOTS if old.sent[-1] == b"CLUSTER SLOTS" else next(replies))
    new = Node(lambda: lost)
    nodes = cluster({OLD: old, NEW: new})
    calls = pipeline(nodes)
    assert await asyncio.wait_for(calls.run(SCRIPT, [b"key"], ()), 60) == 7
    assert [packed.count(b"ASKING") for packed in new.sent if b"EVALSHA" in packed] == [1]
    assert [packed.count(b"ASKING") for packed in old.sent if b"EVALSHA" in packed] == [0, 0]
    assert isinstance(nodes.at(NEW), Connections)
    await calls.close()
