"""Answers of a draft and a target without a model, made in advance: real distributions, a known acceptance.

p is `acceptance` times q on the support, and the rest of its mass is outside. So each draft token is accepted with that
probability, whichever it is, and a rejection always recovers the outside token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem import wire
from tandem.v1 import draft_pb2, target_pb2

VARIANTS = 8


class FixedAnswers:
    """Proposals and verdicts over some token ids, of which the first is kept for the outside of every support."""

    def __init__(self, ids: Sequence[int], support_size: int, acceptance: float, seed: int = 0) -> None:
        if len(ids) <= support_size:
            raise ValueError(f"{len(ids)} token ids are too few for a support of {support_size}")
        generator = np.random.default_rng(seed)
        q = generator.dirichlet(np.full(support_size, 0.3)).astype(np.float32)
        p = (acceptance * q).astype(np.float32)
        supports = [generator.choice(ids[1:], support_size, replace=False) for _ in range(VARIANTS)]
        self._tokens = [
            draft_pb2.DraftedToken(
                token_id=int(support[int(q.argmax())]),
                support_ids=wire.encode_ids(support),
                support_probs=wire.encode_probs(q),
            )
            for support in supports
        ]
        self._row = target_pb2.TargetRow(
            support_probs=wire.encode_probs(p), outside_mass=1.0 - float(p.sum()), outside_token_id=ids[0]
        )
        self._plain_row = target_pb2.TargetRow(outside_mass=1.0, outside_token_id=ids[0])
        self._proposals: dict[int, draft_pb2.Proposal] = {}
        self._verdicts: dict[tuple[int, int], target_pb2.Verdict] = {}

    def proposal(self, count: int) -> draft_pb2.Proposal:
        """`count` drafted tokens; the cached length is left to the caller. Don't change it."""
        found = self._proposals.get(count)
        if found is None:
            tokens = [self._tokens[position % VARIANTS] for position in range(count)]
            found = self._proposals[count] = draft_pb2.Proposal(tokens=tokens)
        return found

    def verdict(self, block: int, supports: int) -> target_pb2.Verdict:
        """The rows for a block with so many supports; the cached length is left to the caller. Don't change it."""
        found = self._verdicts.get((block, supports))
        if found is None:
            rows = [self._row] * supports + [self._plain_row] * (block + 1 - supports)
            found = self._verdicts[block, supports] = target_pb2.Verdict(rows=rows)
        return found
