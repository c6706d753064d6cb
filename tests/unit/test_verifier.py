"""What the target's service takes as the supports of a block, before any work."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tandem.acceptance import MAX_SUPPORT_SIZE
from tandem.engine.faults import ItemFault
from tandem.v1 import target_pb2, worker_pb2
from tandem.wire import encode_ids
from target_service.verifier import Verifier

VOCABULARY = 2048


def item(sizes: Sequence[int], draft: int) -> target_pb2.VerifyItem:
    supports = [encode_ids(range(size)) for size in sizes]
    return target_pb2.VerifyItem(draft_token_ids=encode_ids(range(draft)), support_ids=supports)


@pytest.mark.parametrize(
    "sizes", [(1024,), (1024, 1024), (1024, 1), (1, 1024, 7)], ids=["one", "two", "falling", "rising"]
)
def test_supports_of_the_largest_size_pass(sizes: Sequence[int]) -> None:
    assert MAX_SUPPORT_SIZE == 1024
    job = Verifier(VOCABULARY, 16).admit(item(sizes, len(sizes)))
    assert [support.tolist() for support in job.supports] == [list(range(size)) for size in (*sizes, 0)]


@pytest.mark.parametrize(
    ("sizes", "draft", "message"),
    [
        ((1025,), 1, "1025 ids in one, at most 1024"),
        ((1025, 1025), 2, "1025 ids in one, at most 1024"),
        ((1, 1025), 2, "1025 ids in one, at most 1024"),
        ((1025, 1, 1), 2, "1025 ids in one, at most 1024"),
        ((2048, 1, 1, 1), 4, "2048 ids in one, at most 1024"),
        ((1,), 2, "1 supports for a block of 2"),
        ((1, 1, 1, 1), 2, "4 supports for a block of 2"),
        ((1,) * 100_000, 2, "100000 supports for a block of 2"),
    ],
)
def test_supports_beyond_the_limits_are_refused(sizes: Sequence[int], draft: int, message: str) -> None:
    with pytest.raises(ItemFault, match=f"support_ids: {message}") as caught:
        Verifier(VOCABULARY, 16).admit(item(sizes, draft))
    assert caught.value.reason == worker_pb2.ERROR_REASON_INVALID_ARGUMENT
