"""Log-probabilities of the output: decoded from the target's rows, looked up for each token by the row that decided it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from tandem import wire
from tandem.acceptance import RowLogprobs, TargetRow
from tandem.v1 import target_pb2
from tandem.wire import IdArray

from .completion import EmittedToken, TokenLogprobs
from .drafting import Block

_NOTHING = np.empty(0, dtype=np.uint32)


def decode_row(row: target_pb2.TargetRow, size: int, most: int, vocabulary_size: int) -> RowLogprobs:
    """What the target reports beside a row on a support of `size` ids; raises WireError if it can't be."""
    support = wire.decode_probs(row.support_logprobs, size)
    top_ids = wire.decode_ids(row.top_token_ids)
    top = wire.decode_probs(row.top_logprobs, top_ids.size)
    if top_ids.size > most or any(token_id >= vocabulary_size for token_id in top_ids.tolist()):
        raise wire.WireError("more of the likeliest tokens than asked for, or one outside of the vocabulary")
    if np.isnan(support).any() or np.isnan(top).any() or math.isnan(row.outside_logprob):
        raise wire.WireError("a log-probability is not a number")
    return RowLogprobs(support, row.outside_logprob, top_ids, top)


def with_logprobs(emitted: Sequence[EmittedToken], block: Block, rows: Sequence[TargetRow]) -> list[EmittedToken]:
    """The tokens of a round with their log-probabilities: row i decided token i, whatever its kind."""
    supports = [drafted.support_ids for drafted in block.drafted]
    supports.append(block.look_ahead.support_ids if block.look_ahead is not None else _NOTHING)
    return [
        token
        if row.logprobs is None
        else dataclasses.replace(token, logprobs=_of_token(token.token_id, row.logprobs, support))
        for token, row, support in zip(emitted, rows, supports, strict=False)
    ]


def _of_token(token_id: int, row: RowLogprobs, support_ids: IdArray) -> TokenLogprobs:
    places = np.flatnonzero(support_ids == token_id)
    logprob = float(row.support[places[0]]) if places.size else row.outside
    return TokenLogprobs(logprob, tuple(zip(row.top_ids.tolist(), row.top.tolist(), strict=True)))
