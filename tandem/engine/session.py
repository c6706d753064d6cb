"""What a worker knows of one request: its tokens, how many of them the cache holds, and the rule that updates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tandem.engine.faults import ItemFault, invalid
from tandem.engine.invariants import require
from tandem.v1 import worker_pb2
from tandem.wire import DIGEST_BYTES, IdArray, PrefixDigest, WireError, decode_ids, encode_ids

if TYPE_CHECKING:
    from tandem.sampling import SamplingParams

_FIRST_CAPACITY = 256


class TokenBuffer:
    """Token ids that grow at the end and are cropped in O(1)."""

    __slots__ = ("_ids", "length")

    def __init__(self) -> None:
        self._ids: NDArray[np.uint32] = np.empty(_FIRST_CAPACITY, dtype=np.uint32)
        self.length = 0

    def crop(self, length: int) -> None:
        """Forgets all tokens from `length` on."""
        self.length = length

    def extend(self, token_ids: IdArray) -> None:
        """Appends tokens."""
        end = self.length + token_ids.size
        if end > self._ids.size:
            grown = np.empty(max(end, 2 * self._ids.size), dtype=np.uint32)
            grown[: self.length] = self._ids[: self.length]
            self._ids = grown
        self._ids[self.length : end] = token_ids
        self.length = end

    def append(self, token_id: int) -> None:
        """Appends one token."""
        if self.length == self._ids.size:
            self.extend(np.array([token_id], dtype=np.uint32))
            return
        self._ids[self.length] = token_id
        self.length += 1

    def view(self, start: int, end: int) -> IdArray:
        """The tokens from start to end, valid until the buffer changes."""
        return self._ids[start:end]


class Session:
    """The state of one request on one stream. Owned by the step thread.

    `tokens` holds the prefix of the last update and the block after it; the cache holds the keys and values of the
    first `cached_length` of them.
    """

    __slots__ = (
        "_at_base",
        "_at_prefix",
        "cached_length",
        "epoch",
        "notes",
        "prefix_length",
        "request_id",
        "salt",
        "sampling",
        "slot",
        "tokens",
    )

    def __init__(self, request_id: str, salt: str = "") -> None:
        """`salt` tells caches apart: the session shares its tokens' keys and values with those of the same salt only."""
        self.request_id = request_id
        self.salt = salt
        self.slot: int | None = None
        self.epoch = 0
        self.cached_length = 0
        self.prefix_length = 0
        self.sampling: SamplingParams | None = None
        self.tokens = TokenBuffer()
        self.notes: Any = None
        """What the method remembers of the request from one item to the next."""
        # Digests can only be extended, so two are kept: a round starts from the last prefix or, as a retry, from the
        # base before it. Any other base is hashed from the start.
        self._at_base = PrefixDigest()
        self._at_prefix = PrefixDigest()

    def check_epoch(self, epoch: int) -> None:
        """Notes the epoch; raises ItemFault STALE_CACHE_EPOCH if a higher one was seen."""
        if epoch < self.epoch:
            raise ItemFault(
                worker_pb2.ERROR_REASON_STALE_CACHE_EPOCH, f"cache_epoch {epoch} is below {self.epoch}, already seen"
            )
        self.epoch = epoch

    def apply(self, update: worker_pb2.PrefixUpdate, block: int, context_length: int, embeddings: int) -> None:
        """Crops to base_length and appends the tokens, where they fit with a block of `block` tokens after them.

        The base may lie beyond what the cache holds, as far as the tokens are known: what is not cached is run then.
        Raises ItemFault: INVALID_ARGUMENT and CONTEXT_EXCEEDED leave the session as it was, CACHE_MISS and
        PREFIX_DIVERGED empty it.
        """
        token_ids = decode_token_ids("prefix.token_ids", update.token_ids, embeddings)
        if token_ids.size == 0:
            raise invalid("prefix.token_ids", "empty: the last committed token is always fed again")
        if len(update.digest) != DIGEST_BYTES:
            raise invalid("prefix.digest", f"{len(update.digest)} bytes instead of {DIGEST_BYTES}")
        base = update.base_length
        length = base + token_ids.size
        if length + block > context_length:
            raise ItemFault(
                worker_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
                f"a prefix of {length} and a block of {block} tokens exceed the context of {context_length}",
            )
        if base > self.tokens.length:
            held = self.tokens.length
            self.drop()
            raise ItemFault(worker_pb2.ERROR_REASON_CACHE_MISS, f"base_length {base}, but {held} tokens are held")
        self._append(base, token_ids, update.token_ids)
        if self._at_prefix.digest() != update.digest:
            self.drop()
            raise ItemFault(
                worker_pb2.ERROR_REASON_PREFIX_DIVERGED, f"the digest of the {length} tokens of the prefix differs"
            )

    def check(self) -> None:
        """The invariants of an idle session, in O(length); raises InvariantError."""
        require(self.cached_length <= self.tokens.length, "the cache holds no more than the tokens")
        require(self.prefix_length <= self.tokens.length, "the tokens begin with the prefix")
        digest = PrefixDigest()
        digest.append(encode_ids(self.tokens.view(0, self.prefix_length)))
        require(digest.digest() == self._at_prefix.digest(), "the digest is that of the prefix")

    def drop(self) -> None:
        """Forgets all tokens; the slot stays."""
        self.cached_length = self.prefix_length = 0
        self.tokens.crop(0)
        self._at_base = PrefixDigest()
        self._at_prefix = PrefixDigest()

    def _append(self, base: int, token_ids: IdArray, encoded: bytes) -> None:
        self._at_base = self._digest_at(base)
        self._at_prefix = self._at_base.copy()
        self._at_prefix.append(encoded)
        self.tokens.crop(base)
        self.tokens.extend(token_ids)
        self.cached_length = min(self.cached_length, base)
        self.prefix_length = base + token_ids.size

    def _digest_at(self, length: int) -> PrefixDigest:
        nearest = next(
            (digest for digest in (self._at_prefix, self._at_base) if digest.length <= length), PrefixDigest()
        )
        digest = nearest.copy()
        digest.append(encode_ids(self.tokens.view(nearest.length, length)))
        return digest


def decode_token_ids(field: str, data: bytes, vocabulary: int) -> IdArray:
    """Ids that the model can embed; raises ItemFault INVALID_ARGUMENT that names the field, without the ids."""
    try:
        token_ids = decode_ids(data)
    except WireError as error:
        raise invalid(field, str(error)) from error
    if token_ids.size and int(np.maximum.reduce(token_ids)) >= vocabulary:
        raise invalid(field, f"holds an id outside of the vocabulary of {vocabulary}")
    return token_ids
