"""Token ids, distributions and digests as bytes."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from tandem.wire import (
    DIGEST_BYTES,
    TOKEN_BYTES,
    PrefixDigest,
    WireError,
    decode_ids,
    decode_probs,
    encode_ids,
    encode_probs,
)


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [2**32 - 1, 0, 151_935]])
def test_ids_round_trip(ids: list[int]) -> None:
    data = encode_ids(ids)
    assert len(data) == TOKEN_BYTES * len(ids)
    assert decode_ids(data).tolist() == ids
    assert encode_ids(decode_ids(data)) == data


def test_ids_are_little_endian() -> None:
    assert encode_ids([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])


def test_decoded_ids_are_a_view_that_cannot_be_written_to() -> None:
    ids = decode_ids(encode_ids([1, 2]))
    assert ids.dtype == np.uint32
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 5


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_an_id_beyond_32_bits_overflows(token_id: int) -> None:
    with pytest.raises(OverflowError):
        encode_ids([token_id])


@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_a_torn_id_is_an_error(size: int) -> None:
    with pytest.raises(WireError, match=f"{size} bytes"):
        decode_ids(bytes(size))


def test_probabilities_round_trip_bit_for_bit() -> None:
    probs = np.random.default_rng(1).random(64, dtype=np.float32)
    decoded = decode_probs(encode_probs(probs), 64)
    assert decoded.dtype == np.float32
    assert decoded.tobytes() == probs.tobytes()
    assert encode_probs([0.5, 0.25]) == bytes.fromhex("0000003f0000803e")


@pytest.mark.parametrize(("size", "count"), [(0, 1), (4, 0), (4, 2), (7, 2), (12, 2)])
def test_probabilities_of_another_count_are_an_error(size: int, count: int) -> None:
    with pytest.raises(WireError, match=f"{count} probabilities"):
        decode_probs(bytes(size), count)


def test_wire_errors_are_value_errors() -> None:
    assert issubclass(WireError, ValueError)


def digest_of(ids: list[int]) -> PrefixDigest:
    digest = PrefixDigest()
    digest.append(encode_ids(ids))
    return digest


def test_a_digest_depends_on_the_tokens_and_not_on_how_they_came() -> None:
    once, stepwise = digest_of([1, 2, 3]), PrefixDigest()
    for token_id in (1, 2, 3):
        stepwise.append(encode_ids([token_id]))
    assert once.digest() == stepwise.digest()
    assert once.length == stepwise.length == 3
    assert len(once.digest()) == DIGEST_BYTES
    assert digest_of([1, 2, 4]).digest() != once.digest()
    assert digest_of([2, 1, 3]).digest() != once.digest()


def test_the_digest_is_blake2b_of_the_encoded_ids() -> None:
    """Both ends may be of different releases: what is hashed is part of the protocol."""
    assert digest_of([1, 2]).digest() == hashlib.blake2b(encode_ids([1, 2]), digest_size=8).digest()
    assert PrefixDigest().digest() == hashlib.blake2b(b"", digest_size=8).digest()


def test_a_copy_is_the_place_to_roll_back_to() -> None:
    digest = digest_of([1, 2])
    mark = digest.copy()
    digest.append(encode_ids([3]))
    assert (mark.length, digest.length) == (2, 3)
    assert mark.digest() == digest_of([1, 2]).digest()
    mark.append(encode_ids([4]))
    assert mark.digest() == digest_of([1, 2, 4]).digest()
    assert digest.digest() == digest_of([1, 2, 3]).digest()


def test_reading_a_digest_does_not_end_it() -> None:
    digest = digest_of([1])
    assert digest.digest() == digest.digest()
    digest.append(encode_ids([2]))
    assert digest.digest() == digest_of([1, 2]).digest()
