"""Where a new session goes: to the replica with the least to do, or to one that has its prompt's beginning in the cache.

A prompt is cut into blocks, and each block's digest covers all before it: two prompts share their first n blocks exactly
if they share the n-th digest. Which replica was given which digests is remembered for the latest of them. That is a guess
at what the replica still holds, and costs nothing but time where it is wrong.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from tandem import wire

BLOCK_TOKENS = 64
"""Less shared than this is not worth a longer queue."""
MAX_BLOCKS = 64
REMEMBERED_DIGESTS = 1 << 16
PATIENCE = 1.5
"""How many times the load of the least loaded replica a replica with the prefix may have, and still be chosen ..."""
HEAD_START_SESSIONS = 2
"""... once it has so many sessions more."""


class Candidate(Protocol):
    """What is known of a replica's load."""

    @property
    def address(self) -> str: ...
    @property
    def sessions(self) -> int: ...
    @property
    def slots(self) -> int: ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


def block_digests(encoded_ids: bytes, salt: str) -> tuple[bytes, ...]:
    """A digest for each whole block of a prompt, the first MAX_BLOCKS of them; none for a short prompt."""
    size = BLOCK_TOKENS * wire.TOKEN_BYTES
    running = hashlib.blake2b(salt.encode(), digest_size=16)
    digests = []
    for start in range(0, min(len(encoded_ids) // size, MAX_BLOCKS) * size, size):
        running.update(encoded_ids[start : start + size])
        digests.append(running.digest())
    return tuple(digests)


class Placement(Generic[CandidateT]):
    """Chooses among replicas, and remembers what it chose."""

    def __init__(self) -> None:
        self._places: OrderedDict[Hashable, str] = OrderedDict()
        self._turns: dict[str, int] = {}
        self._turn = 0

    def choose(self, candidates: Sequence[CandidateT], digests: Sequence[bytes]) -> CandidateT:
        """One of the candidates, of which there must be some, for a session whose prompt has these digests."""
        least = min(candidates, key=self._busy)
        chosen = self._with_prefix(candidates, digests)
        if chosen is None or not _is_worth_it(chosen, least):
            chosen = least
        self._turn += 1
        self._turns[chosen.address] = self._turn
        for digest in digests:
            self._places[digest] = chosen.address
            self._places.move_to_end(digest)
        while len(self._places) > REMEMBERED_DIGESTS:
            self._places.popitem(last=False)
        return chosen

    def forget(self, address: str) -> None:
        """The replica is gone, and its cache with it."""
        self._turns.pop(address, None)
        for digest in [digest for digest, place in self._places.items() if place == address]:
            del self._places[digest]

    def _busy(self, candidate: CandidateT) -> tuple[float, int]:
        """Of equally loaded ones, the one whose last turn is longest ago."""
        return _load(candidate), self._turns.get(candidate.address, 0)

    def _with_prefix(self, candidates: Sequence[CandidateT], digests: Sequence[bytes]) -> CandidateT | None:
        """The candidate that was given most of the prompt's beginning."""
        by_address = {candidate.address: candidate for candidate in candidates}
        for digest in reversed(digests):
            place = self._places.get(digest)
            if place in by_address:
                return by_address[place]
        return None


def _load(candidate: Candidate) -> float:
    return candidate.sessions / max(1, candidate.slots)


def _is_worth_it(with_prefix: Candidate, least: Candidate) -> bool:
    if with_prefix.sessions >= with_prefix.slots and least.sessions < least.slots:
        return False  # it would wait for a slot
    head_start = HEAD_START_SESSIONS / max(1, with_prefix.slots)
    return _load(with_prefix) <= PATIENCE * _load(least) + head_start
