"""Rows of requests whose output has a form: what can't lead there has no mass (torch)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tandem.structured_output import Form
from tandem.wire import IdArray

_NONE: frozenset[int] = frozenset()


def mask(
    scores: Tensor,
    forms: Sequence[Form | None],
    positions: Sequence[int],
    contexts: Sequence[IdArray | None] | None,
) -> tuple[Tensor, frozenset[int]]:
    """Masked scores [R, V], the very same tensor where there is nothing to do, and the rows that are dead ends: nothing of this
    vocabulary can follow there, so that they are left as they were. Arguments are those of `logit_adjustments.adjust`."""
    if not any(forms):
        return scores, _NONE
    rows, forbidden, dead = [], [], set()
    for row, (form, position) in enumerate(zip(forms, positions, strict=True)):
        if form is None:
            continue
        tokens = contexts[row] if contexts is not None else None
        if tokens is None or tokens.size < position:
            raise ValueError(f"row {row}: the tokens before it are missing")
        allowed = form.allowed_after(tokens[:position])
        if allowed is None:
            continue
        known = allowed[: scores.shape[-1]]
        if not known.any():
            dead.add(row)
            continue
        rows.append(row)
        forbidden.append(~np.pad(known, (0, scores.shape[-1] - known.size)))
    if rows:
        index = torch.tensor(rows, device=scores.device)
        without = torch.from_numpy(np.stack(forbidden)).to(scores.device)
        scores = scores.index_copy(0, index, scores[index].masked_fill_(without, -math.inf))
    return scores, frozenset(dead)
