"""Log-probabilities of the tokens that may come out of a row, and of the likeliest ones (torch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from tandem.acceptance import RowLogprobs
from tandem.sampling_limits import MAX_TOP_LOGPROBS
from tandem.v1 import sampling_pb2
from tandem.wire import IdArray


class LogprobsMode(Enum):
    """Of which distribution; see proto/tandem/v1/sampling.proto."""

    RAW = sampling_pb2.LOGPROBS_MODE_RAW
    PROCESSED = sampling_pb2.LOGPROBS_MODE_PROCESSED


@dataclass(frozen=True, slots=True)
class LogprobParams:
    """What one request asks for."""

    mode: LogprobsMode
    top: int
    """How many of the likeliest tokens; 0 for none."""

    @classmethod
    def from_proto(cls, message: sampling_pb2.Sampling) -> LogprobParams | None:
        """None where nothing is asked for; raises ValueError, naming the field, for a value out of range."""
        if not message.logprobs:
            return None
        if message.top_logprobs > MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs: {message.top_logprobs}, at most {MAX_TOP_LOGPROBS} allowed")
        try:
            return cls(LogprobsMode(message.logprobs_mode), message.top_logprobs)
        except ValueError:
            raise ValueError(f"logprobs_mode must be RAW or PROCESSED, got {message.logprobs_mode}") from None


def row_logprobs(scores: Tensor, wanted: Sequence[tuple[IdArray, int, LogprobParams]]) -> list[RowLogprobs]:
    """Logarithms of the softmax of scores [n, V], where -inf is no mass: for each row of the ids of a support, of one more
    token, and of the likeliest. One transfer brings all back."""
    width = max(support.size for support, _, _ in wanted) + 1
    ids = np.zeros((len(wanted), width), dtype=np.int64)
    for row, (support, token_id, _) in enumerate(wanted):
        ids[row, : support.size] = support
        ids[row, -1] = token_id
    most = min(max(params.top for _, _, params in wanted), scores.shape[-1])
    total = scores.logsumexp(-1, keepdim=True)
    best, best_ids = scores.topk(most, dim=-1)
    asked = scores.gather(-1, torch.from_numpy(ids).to(scores.device))
    # Ids are exact in float64.
    packed = torch.cat((asked - total, best - total, best_ids.double()), dim=-1).cpu().numpy()
    found = []
    for row, (support, _, params) in zip(packed, wanted, strict=True):
        top = row[width : width + params.top].astype(np.float32)
        kept = int(np.count_nonzero(top > -np.inf))
        top_ids = row[width + most : width + most + kept].astype(np.uint32)
        of_support = row[: support.size].astype(np.float32)
        found.append(RowLogprobs(of_support, float(row[width - 1]), top_ids, top[:kept]))
    return found
