"""Random bytes for the decoders of what workers and orchestrators send each other, guided by coverage (atheris):
python -m tests.fuzz.wire_decoder [libFuzzer's options].

Whatever the bytes are: decoded to what encodes to the same bytes, or refused with the decoder's own error.
"""

from __future__ import annotations

import sys

import atheris
import numpy as np

with atheris.instrument_imports(include=["tandem.wire", "tandem.acceptance"]):
    from tandem import wire
    from tandem.acceptance import DraftContractError, are_supports, check_drafted, drawn_from_laws

VOCABULARY = 64


def one(data: bytes) -> None:
    """One input."""
    provider = atheris.FuzzedDataProvider(data)
    rows, size = provider.ConsumeIntInRange(1, 3), provider.ConsumeIntInRange(0, 6)
    whole = wire.TOKEN_BYTES * rows * size
    ids_data = provider.ConsumeBytes(whole + provider.ConsumeIntInRange(0, 1))
    if provider.ConsumeBool():
        probs_data = provider.ConsumeBytes(whole + provider.ConsumeIntInRange(0, 1))
    else:  # random floats hardly ever sum to one
        weights = np.array([provider.ConsumeIntInRange(0, 9) for _ in range(rows * size)], dtype=np.float32)
        sums = weights.reshape(rows, size).sum(axis=-1, keepdims=True)
        probs_data = wire.encode_probs(weights.reshape(rows, size) / np.maximum(sums, 1))
    token_ids = [provider.ConsumeIntInRange(0, 2 * VOCABULARY) for _ in range(rows)]
    try:
        ids = wire.decode_ids(ids_data)
        assert wire.encode_ids(ids) == ids_data
        probs = wire.decode_probs(probs_data, ids.size)
        assert wire.encode_probs(probs) == probs_data
        if size and ids.size == rows * size:
            with np.errstate(all="ignore"):
                check_all(token_ids, ids.reshape(rows, size), probs.reshape(rows, size))
    except (wire.WireError, DraftContractError):
        pass


def check_all(token_ids: list[int], ids: wire.IdArray, probs: wire.ProbArray) -> None:
    """A block is what its tokens are one by one, and each of them a draw from a distribution."""
    if not are_supports(ids, VOCABULARY):
        for each in zip(token_ids, ids, probs, strict=True):
            check_drafted(*each, VOCABULARY)
        raise AssertionError("good supports one by one, and none together")
    block = drawn_from_laws(token_ids, ids, probs)
    if block is None:
        for each in zip(token_ids, ids, probs, strict=True):
            check_drafted(*each, VOCABULARY)
        raise AssertionError("good laws one by one, and none together")
    for drafted, token_id in zip(block, token_ids, strict=True):
        alone = check_drafted(token_id, drafted.support_ids, drafted.q, VOCABULARY)
        assert alone.index == drafted.index
        assert drafted.support_ids[drafted.index] == token_id < VOCABULARY
        assert drafted.q[drafted.index] > 0
        assert abs(float(drafted.q.sum(dtype=np.float64)) - 1.0) < 1e-3


def main() -> None:
    """Until a fault is found, or as long as the options say."""
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
