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
    from tandem.acceptance import DraftContractError, check_block, check_drafted

VOCABULARY = 64


def one(data: bytes) -> None:
    """One input."""
    provider = atheris.FuzzedDataProvider(data)
    count = provider.ConsumeIntInRange(0, 8)
    token_id = provider.ConsumeIntInRange(0, 2 * VOCABULARY)
    size = provider.ConsumeIntInRange(0, 64)
    ids_data, probs_data = provider.ConsumeBytes(size), provider.ConsumeBytes(64)
    try:
        ids = wire.decode_ids(ids_data)
        assert wire.encode_ids(ids) == ids_data
        probs = wire.decode_probs(probs_data, ids.size)
        assert wire.encode_probs(probs) == probs_data
        drafted = check_drafted(token_id, ids, probs, VOCABULARY)
        assert drafted.support_ids[drafted.index] == token_id < VOCABULARY
        assert np.isfinite(drafted.q).all()
        assert abs(float(drafted.q.sum()) - 1.0) < 1e-3
        if count and ids.size % count == 0:
            shape = (count, -1)
            for each in check_block([token_id] * count, ids.reshape(shape), probs.reshape(shape), VOCABULARY):
                assert each.support_ids[each.index] == token_id
    except (wire.WireError, DraftContractError):
        pass


def main() -> None:
    """Until a fault is found, or as long as the options say."""
    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
