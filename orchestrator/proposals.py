"""What a draft proposes in one message, for several requests, checked at once: a call of numpy takes as long for a few numbers as for a few
thousand.

Together a message's blocks are found to be good, or nothing is said of any of them. Then each is checked by itself, which finds who lied
and how, so that one that lies is nothing to the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tandem import wire
from tandem.acceptance import MAX_SUPPORT_SIZE, Drafted, are_supports, check_drafted, drawn_from_laws
from tandem.v1 import draft_pb2

_MOST_BYTES = MAX_SUPPORT_SIZE * wire.TOKEN_BYTES


class ReceivedProposal:
    """One proposal, and the others of its message that can be checked with it."""

    __slots__ = ("_alike", "_first", "_tokens", "message", "supports", "token_ids")

    def __init__(self, message: draft_pb2.Proposal, alike: dict[int, _Alike]) -> None:
        """`alike`: of its message, those that came before, by the size of their supports in bytes."""
        self.message = message
        self._tokens = tokens = list(message.tokens)  # each walk through a repeated field makes its messages anew
        self.token_ids = [token.token_id for token in tokens]
        self.supports = [token.support_ids for token in tokens]
        """Encoded ids."""
        self._alike: _Alike | None = None
        self._first = 0
        probs = [token.support_probs for token in tokens]
        sizes = set(map(len, self.supports + probs))
        if len(sizes) == 1:
            [size] = sizes
            if 0 < size <= _MOST_BYTES and size % wire.TOKEN_BYTES == 0:
                self._alike = alike.get(size) or alike.setdefault(size, _Alike(size // wire.TOKEN_BYTES))
                self._first = self._alike.add(self.token_ids, self.supports, probs)

    @classmethod
    def alone(cls, message: draft_pb2.Proposal) -> ReceivedProposal:
        """In a message of its own."""
        return cls(message, {})

    def readable(self, vocabulary_size: int) -> Callable[[], list[Drafted]]:
        """What checks the probabilities of tokens whose ids are good. Raises DraftContractError or WireError where these are not."""
        alike = self._alike
        if alike is not None and max(self.token_ids) < vocabulary_size and alike.are_supports(vocabulary_size):
            return partial(self._of_all, alike, vocabulary_size)
        alone = self._by_itself(vocabulary_size)
        return lambda: alone

    def _of_all(self, alike: _Alike, vocabulary_size: int) -> list[Drafted]:
        drafted = alike.drafted()
        if drafted is None:
            return self._by_itself(vocabulary_size)
        return drafted[self._first : self._first + len(self.token_ids)]

    def _by_itself(self, vocabulary_size: int) -> list[Drafted]:
        return [_decoded(token, vocabulary_size) for token in self._tokens]


def reader() -> Callable[[Any, Any], ReceivedProposal | None]:
    """Reads the items of one message; None where one holds an error."""
    alike: dict[int, _Alike] = {}

    def read(item: draft_pb2.ProposalItem, _: Any) -> ReceivedProposal | None:
        return ReceivedProposal(item.proposal, alike) if item.HasField("proposal") else None

    return read


class _Alike:
    """Proposals of one message whose supports have one size, `size`, one row for each token. Looked at when all of them are there."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._token_ids: list[int] = []
        self._supports: list[bytes] = []
        self._probs: list[bytes] = []
        self._ids: wire.IdArray | None = None
        self._vocabulary_size = 0
        """For which the supports were looked at; 0 before."""
        self._good = False
        self._drafted: list[Drafted] | None = None

    def add(self, token_ids: list[int], supports: list[bytes], probs: list[bytes]) -> int:
        """One more; returns its first row."""
        first = len(self._token_ids)
        self._token_ids += token_ids
        self._supports += supports
        self._probs += probs
        return first

    def are_supports(self, vocabulary_size: int) -> bool:
        """Whether a target would take all of them; of more than one size of the vocabulary nothing is said."""
        if self._vocabulary_size == 0:
            self._vocabulary_size = vocabulary_size
            self._ids = wire.decode_ids(b"".join(self._supports)).reshape(-1, self._size)
            self._good = are_supports(self._ids, vocabulary_size)
        return self._good and self._vocabulary_size == vocabulary_size

    def drafted(self) -> list[Drafted] | None:
        """All rows, None where something is wrong with any; the supports must be good."""
        if self._good and self._drafted is None and self._ids is not None:
            q = wire.decode_probs(b"".join(self._probs), self._ids.size).reshape(self._ids.shape)
            self._drafted = drawn_from_laws(self._token_ids, self._ids, q)
            self._good = self._drafted is not None
        return self._drafted


def _decoded(token: draft_pb2.DraftedToken, vocabulary_size: int) -> Drafted:
    ids = wire.decode_ids(token.support_ids)
    q = wire.decode_probs(token.support_probs, ids.size)
    return check_drafted(token.token_id, ids, q, vocabulary_size)
