"""How many bytes one round of one request puts on the wire."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchestrator.prefix import Prefix
from tandem import wire
from tandem.v1 import draft_pb2, sampling_pb2, target_pb2, worker_pb2

from .fixed_answers import FixedAnswers

REQUEST_ID = "0123456789abcdef" * 2
CONTEXT = 1000
"""Tokens before the round; they don't travel, the epoch and the lengths grow with them by a byte or two."""


@dataclass(frozen=True, slots=True)
class RoundBytes:
    """Serialized sizes of the four messages of a round, in bytes."""

    vocabulary_size: int
    propose: int
    proposal: int
    verify: int
    verdict: int

    @property
    def total(self) -> int:
        """All four."""
        return self.propose + self.proposal + self.verify + self.verdict


def round_bytes(vocabulary_size: int, gamma: int, support_size: int, *, first: bool = False) -> RoundBytes:
    """A round after a wholly accepted one, whose gamma + 1 tokens both workers are told; `first`: with the sampling
    parameters too, as in a request's first round (but without a prompt)."""
    ids = list(range(vocabulary_size - 4 * support_size, vocabulary_size))  # the widest ids
    answers = FixedAnswers(ids, support_size, acceptance=0.8)
    prefix = Prefix(wire.encode_ids(np.full(CONTEXT, ids[0])))
    update = worker_pb2.PrefixUpdate()
    prefix.tell(update, CONTEXT - gamma - 1)
    sampling = sampling_pb2.Sampling(temperature=0.7, top_p=0.9, top_k=50, seed=2**63) if first else None
    proposal = draft_pb2.Proposal(tokens=answers.proposal(gamma).tokens, cached_length=CONTEXT + gamma - 1)
    verdict = target_pb2.Verdict(rows=answers.verdict(gamma, gamma).rows, cached_length=CONTEXT + gamma)
    messages = (
        draft_pb2.ProposeBatch(
            items=[
                draft_pb2.ProposeItem(
                    request_id=REQUEST_ID,
                    cache_epoch=CONTEXT,
                    prefix=update,
                    sampling=sampling,
                    num_speculative_tokens=gamma,
                )
            ]
        ),
        draft_pb2.ProposalBatch(
            items=[draft_pb2.ProposalItem(request_id=REQUEST_ID, cache_epoch=CONTEXT, proposal=proposal)]
        ),
        target_pb2.VerifyBatch(
            items=[
                target_pb2.VerifyItem(
                    request_id=REQUEST_ID,
                    cache_epoch=CONTEXT,
                    prefix=update,
                    sampling=sampling,
                    draft_token_ids=wire.encode_ids([token.token_id for token in proposal.tokens]),
                    support_ids=[token.support_ids for token in proposal.tokens],
                )
            ]
        ),
        target_pb2.VerdictBatch(
            items=[target_pb2.VerdictItem(request_id=REQUEST_ID, cache_epoch=CONTEXT, verdict=verdict)]
        ),
    )
    return RoundBytes(vocabulary_size, *(message.ByteSize() for message in messages))
