"""The prefix update: one rule for prefill, the ordinary round, rollback, resync and retry."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.faults import ItemFault
from tandem.engine.session import Session
from tandem.v1 import worker_pb2
from tandem.wire import IdArray, PrefixDigest, encode_ids
from tests.engine.models import random_ids

CONTEXT, EMBEDDINGS = 64, 100


def update(tokens: IdArray, base: int, digest: bytes | None = None) -> worker_pb2.PrefixUpdate:
    running = PrefixDigest()
    running.append(encode_ids(tokens))
    return worker_pb2.PrefixUpdate(
        base_length=base, token_ids=encode_ids(tokens[base:]), digest=running.digest() if digest is None else digest
    )


def apply(session: Session, tokens: IdArray, base: int, block: int = 0, digest: bytes | None = None) -> None:
    session.apply(update(tokens, base, digest), block, CONTEXT, EMBEDDINGS)


def run(session: Session, block: IdArray | tuple[int, ...] = ()) -> None:
    """What a verification does: the block is appended and everything pending is run."""
    session.tokens.extend(np.asarray(block, dtype=np.uint32))
    session.cached_length = session.tokens.length
    session.check()


def reason(raised: pytest.ExceptionInfo[ItemFault]) -> str:
    return worker_pb2.ErrorReason.Name(raised.value.reason).removeprefix("ERROR_REASON_")


def started(tokens: IdArray, block: IdArray | tuple[int, ...] = ()) -> Session:
    session = Session("a")
    apply(session, tokens, 0)
    run(session, block)
    return session


def test_rounds_that_accept_all_some_and_none_of_the_block() -> None:
    tokens, block = random_ids(1, 10, EMBEDDINGS), random_ids(2, 4, EMBEDDINGS)
    for accepted in range(5):
        session = started(tokens, block)
        committed = np.concatenate([tokens, block[:accepted], [7]]).astype(np.uint32)
        apply(session, committed, 10 + accepted)
        assert session.cached_length == 10 + accepted
        assert session.prefix_length == session.tokens.length == committed.size
        assert (session.tokens.view(0, committed.size) == committed).all()
        run(session)


def test_a_retry_starts_from_the_base_again() -> None:
    tokens, block = random_ids(1, 10, EMBEDDINGS), random_ids(2, 4, EMBEDDINGS)
    session = started(tokens[:6])
    for _ in range(3):
        apply(session, tokens, 6)
        run(session, block)
    apply(session, tokens[:4], 3)  # below any digest that was kept
    run(session)
    apply(session, tokens, 0)
    run(session)


def test_long_sequences_outgrow_the_first_buffer() -> None:
    tokens = random_ids(1, 2000, EMBEDDINGS)
    session = Session("a")
    for end in range(100, 2001, 100):
        session.apply(update(tokens[:end], end - 100), 0, 4096, EMBEDDINGS)
        run(session)
    for token in range(50):
        session.tokens.append(token)
    assert (session.tokens.view(0, 2000) == tokens).all()
    assert list(session.tokens.view(2000, 2050)) == list(range(50))


def test_a_base_beyond_the_cache_is_a_miss_and_empties_the_session() -> None:
    tokens = random_ids(1, 20, EMBEDDINGS)
    session = started(tokens[:10])
    with pytest.raises(ItemFault, match="base_length 11, but 10 tokens") as raised:
        apply(session, tokens, 11)
    assert reason(raised) == "CACHE_MISS"
    assert session.cached_length == 0
    apply(session, tokens, 0)
    run(session)


def test_another_digest_empties_the_session() -> None:
    tokens = random_ids(1, 20, EMBEDDINGS)
    session = started(tokens[:10])
    with pytest.raises(ItemFault) as raised:
        apply(session, tokens, 10, digest=b"12345678")
    assert reason(raised) == "PREFIX_DIVERGED"
    assert session.cached_length == session.tokens.length == 0


def test_a_base_within_a_block_that_was_not_accepted_as_said_is_noticed() -> None:
    tokens, block = random_ids(1, 10, EMBEDDINGS), random_ids(2, 4, EMBEDDINGS)
    session = started(tokens, block)
    other = np.concatenate([tokens, (block[:2] + 1) % EMBEDDINGS, [7]]).astype(np.uint32)
    with pytest.raises(ItemFault) as raised:
        apply(session, other, 12)
    assert reason(raised) == "PREFIX_DIVERGED"


def test_the_context_holds_prefix_and_block_exactly() -> None:
    tokens = random_ids(1, 60, EMBEDDINGS)
    session = started(tokens[:50])
    with pytest.raises(ItemFault, match="prefix of 60 and a block of 5") as raised:
        apply(session, tokens, 50, block=5)
    assert reason(raised) == "CONTEXT_EXCEEDED"
    assert session.cached_length == 50
    apply(session, tokens, 50, block=4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"token_ids": b""}, "prefix.token_ids: empty"),
        ({"token_ids": b"abcde"}, "prefix.token_ids: 5 bytes"),
        ({"token_ids": encode_ids([EMBEDDINGS])}, "prefix.token_ids: holds an id outside"),
        ({"token_ids": encode_ids([2**32 - 1])}, "prefix.token_ids: holds an id outside"),
        ({"digest": b""}, "prefix.digest: 0 bytes"),
        ({"digest": b"123456789"}, "prefix.digest: 9 bytes"),
    ],
)
def test_a_broken_update_names_its_field_and_changes_nothing(change: dict[str, bytes], problem: str) -> None:
    tokens = random_ids(1, 12, EMBEDDINGS)
    session = started(tokens[:10])
    message = update(tokens, 10)
    for name, value in change.items():
        setattr(message, name, value)
    with pytest.raises(ItemFault, match=problem) as raised:
        session.apply(message, 0, CONTEXT, EMBEDDINGS)
    assert reason(raised) == "INVALID_ARGUMENT"
    apply(session, tokens, 10)
    run(session)


def test_epochs_rise() -> None:
    session = Session("a")
    for epoch in (3, 3, 8):
        session.check_epoch(epoch)
    with pytest.raises(ItemFault, match="cache_epoch 7 is below 8") as raised:
        session.check_epoch(7)
    assert reason(raised) == "STALE_CACHE_EPOCH"
