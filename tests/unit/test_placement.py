"""Which replica a new session goes to, and which addresses there are."""

from __future__ import annotations

import socket
from dataclasses import dataclass

import pytest

from orchestrator.placement import BLOCK_TOKENS, MAX_BLOCKS, Placement, block_digests
from orchestrator.resolver import is_name, joined, resolve_by_dns, resolved, split
from tandem import wire


@dataclass
class Worker:
    address: str
    sessions: int = 0
    slots: int = 8


def digests(tokens: int, first: int = 0, salt: str = "") -> tuple[bytes, ...]:
    return block_digests(wire.encode_ids([first, *range(1, tokens)]), salt)


def test_digests_are_of_whole_blocks_and_all_before_them() -> None:
    assert digests(BLOCK_TOKENS - 1) == ()
    assert len(digests(3 * BLOCK_TOKENS + 5)) == 3
    assert digests(3 * BLOCK_TOKENS)[:2] == digests(2 * BLOCK_TOKENS)
    assert not set(digests(3 * BLOCK_TOKENS)) & set(digests(3 * BLOCK_TOKENS, first=9))
    assert not set(digests(3 * BLOCK_TOKENS)) & set(digests(3 * BLOCK_TOKENS, salt="x"))
    assert len(digests(2 * MAX_BLOCKS * BLOCK_TOKENS)) == MAX_BLOCKS


def test_the_least_loaded_is_chosen_and_equals_take_turns() -> None:
    placement = Placement[Worker]()
    workers = [Worker("a", 3), Worker("b", 1), Worker("c", 1), Worker("large", 3, slots=64)]
    assert placement.choose(workers, ()).address == "large"
    workers[3].sessions = 60
    assert [placement.choose(workers, ()).address for _ in range(4)] == ["b", "c", "b", "c"]


def test_a_prefix_is_followed_until_its_replica_has_too_much_to_do() -> None:
    placement = Placement[Worker]()
    workers = [Worker("a"), Worker("b"), Worker("c")]
    home = placement.choose(workers, digests(200))
    assert [placement.choose(workers, digests(300)) for _ in range(3)] == [home] * 3
    assert placement.choose(workers, digests(300, first=7)) is not home
    home.sessions = 2
    assert placement.choose(workers, digests(200)) is home
    home.sessions = 3
    assert placement.choose(workers, digests(200)) is not home


def test_a_replica_without_a_free_slot_is_passed_over() -> None:
    placement = Placement[Worker]()
    workers = [Worker("a"), Worker("b")]
    home = placement.choose(workers, digests(200))
    other = next(worker for worker in workers if worker is not home)
    home.sessions, other.sessions = 8, 7
    assert placement.choose(workers, digests(200)) is other
    home.sessions, other.sessions = 8, 9
    assert placement.choose(workers, digests(200, first=3)) is home


def test_what_is_remembered_goes_with_the_replica() -> None:
    placement = Placement[Worker]()
    only = Worker("a", 2)
    placement.choose([only], digests(200))
    fresh = Worker("b", 1)
    assert placement.choose([only, fresh], digests(200)) is only
    placement.forget("a")
    assert placement.choose([only, fresh], digests(200)) is fresh


@pytest.mark.parametrize(
    ("address", "name", "parts"),
    [
        ("10.0.0.1:50", False, ("10.0.0.1", 50)),
        ("[::1]:50", False, ("::1", 50)),
        ("draft.tandem.svc:50", True, ("draft.tandem.svc", 50)),
    ],
)
def test_addresses_and_names(address: str, name: bool, parts: tuple[str, int]) -> None:
    assert is_name(address) == name
    assert split(address) == parts
    assert joined(*parts) == address


async def test_an_address_is_not_looked_up_and_a_name_is() -> None:
    async def two(host: str, port: int) -> list[str]:
        assert (host, port) == ("draft", 50)
        return ["10.0.0.1", "fd00::1"]

    assert await resolved("10.0.0.9:50", two) == {"10.0.0.9:50"}
    assert await resolved("draft:50", two) == {"10.0.0.1:50", "[fd00::1]:50"}


async def test_a_name_of_this_machine() -> None:
    assert await resolve_by_dns("localhost", 50) == ["127.0.0.1"]
    with pytest.raises(socket.gaierror):
        await resolve_by_dns("no-such-host.invalid", 50)
