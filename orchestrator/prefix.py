"""The tokens of one request so far, in the forms that workers and store need them."""

from __future__ import annotations

from tandem import wire
from tandem.v1 import worker_pb2


class Prefix:
    """Prompt and completion as encoded ids, with their running digest; it only ever grows."""

    __slots__ = ("_digest", "_encoded", "length")

    def __init__(self, encoded_ids: bytes) -> None:
        self._encoded = bytearray(encoded_ids)
        self._digest = wire.PrefixDigest()
        self._digest.append(encoded_ids)
        self.length = self._digest.length
        """Tokens so far; a round asks a dozen times."""

    def append(self, encoded_ids: bytes) -> None:
        """Adds tokens at the end."""
        self._encoded += encoded_ids
        self._digest.append(encoded_ids)
        self.length = self._digest.length

    def tell(self, update: worker_pb2.PrefixUpdate, base_length: int) -> None:
        """Fills in, in its place, what a worker that holds the first `base_length` tokens must be told. The last token is always among it."""
        base_length = min(base_length, self.length - 1)
        update.base_length = base_length
        update.token_ids = bytes(self._encoded[base_length * wire.TOKEN_BYTES :])
        update.digest = self._digest.digest()
