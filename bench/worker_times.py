"""The times of the cost model over the real wire: a draft's block and a target's step, driven without an orchestrator.

A synthetic session of a given length is proposed for and verified again and again, each time cropped back. Proposals and
verifications take turns, as in real rounds, so that neither finds the caches warmer than it would there.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np

from orchestrator.prefix import Prefix
from tandem import wire
from tandem.v1 import draft_pb2, draft_pb2_grpc, sampling_pb2, target_pb2, target_pb2_grpc, worker_pb2

from .statistic import median

MESSAGE_BYTES = 64 << 20
OPTIONS = [("grpc.max_receive_message_length", MESSAGE_BYTES), ("grpc.max_send_message_length", MESSAGE_BYTES)]


@dataclass(slots=True)
class WorkerTimes:
    """Samples in seconds."""

    plain_step: list[float] = field(default_factory=list)
    """C_t(1)."""
    draft: dict[int, list[float]] = field(default_factory=dict)
    """C_d(gamma), by gamma."""
    verify: dict[int, list[float]] = field(default_factory=dict)
    """C_t(gamma + 1), by gamma."""

    def medians(self, gamma: int) -> tuple[float, float, float]:
        """C_t(1), C_d(gamma), C_t(gamma + 1) in seconds."""
        return median(self.plain_step), median(self.draft[gamma]), median(self.verify[gamma])


@dataclass(frozen=True, slots=True)
class WorkerStreams:
    """One packed stream to a draft and one to a target."""

    propose: Any
    verify: Any
    vocabulary_size: int


@contextlib.asynccontextmanager
async def worker_streams(draft: str, target: str) -> AsyncIterator[WorkerStreams]:
    """Streams to the workers at these addresses; their end releases all sessions."""
    async with (
        grpc.aio.insecure_channel(draft, options=OPTIONS) as draft_channel,
        grpc.aio.insecure_channel(target, options=OPTIONS) as target_channel,
    ):
        target_stub = target_pb2_grpc.TargetServiceStub(target_channel)
        info = await target_stub.GetModelInfo(worker_pb2.GetModelInfoRequest())
        propose: Any = draft_pb2_grpc.DraftServiceStub(draft_channel).Propose()
        verify: Any = target_stub.Verify()
        try:
            yield WorkerStreams(propose, verify, info.vocabulary_size)
        finally:
            propose.cancel()
            verify.cancel()


class SyntheticSession:
    """A session of `length` arbitrary tokens on both workers."""

    def __init__(self, streams: WorkerStreams, length: int, sampling: sampling_pb2.Sampling) -> None:
        self._streams = streams
        self._sampling = sampling
        self._id = f"bench-{uuid.uuid4().hex}"
        ids = np.random.default_rng(length).integers(0, streams.vocabulary_size, length)
        self._prefix = Prefix(wire.encode_ids(ids))
        self._epoch = 0
        self._cached = {"draft": 0, "target": 0}

    async def open(self) -> None:
        """Fills both caches; the prefill isn't measured."""
        await self._verify(await self._propose(1))

    async def sample(self, times: WorkerTimes, gammas: Sequence[int], count: int) -> None:
        """Adds `count` samples of every time, in turns."""
        for _ in range(count):
            for gamma in gammas:
                started = time.perf_counter()
                proposal = await self._propose(gamma)
                proposed = time.perf_counter()
                await self._verify(proposal)
                verified = time.perf_counter()
                times.draft.setdefault(gamma, []).append(proposed - started)
                times.verify.setdefault(gamma, []).append(verified - proposed)
            started = time.perf_counter()
            await self._verify(draft_pb2.Proposal())
            times.plain_step.append(time.perf_counter() - started)

    async def close(self) -> None:
        """Releases the session at both workers."""
        await self._streams.propose.write(draft_pb2.ProposeBatch(release_request_ids=[self._id]))
        await self._streams.verify.write(target_pb2.VerifyBatch(release_request_ids=[self._id]))

    async def _propose(self, gamma: int) -> draft_pb2.Proposal:
        self._epoch += 1
        item = draft_pb2.ProposeItem(
            request_id=self._id,
            cache_epoch=self._epoch,
            prefix=self._update("draft"),
            sampling=self._sampling,
            num_speculative_tokens=gamma,
        )
        answer = await _exchange(self._streams.propose, draft_pb2.ProposeBatch(items=[item]))
        proposal: draft_pb2.Proposal = answer.proposal
        return proposal

    async def _verify(self, proposal: draft_pb2.Proposal) -> None:
        self._epoch += 1
        item = target_pb2.VerifyItem(
            request_id=self._id,
            cache_epoch=self._epoch,
            prefix=self._update("target"),
            sampling=self._sampling,
            draft_token_ids=wire.encode_ids([token.token_id for token in proposal.tokens]),
            support_ids=[token.support_ids for token in proposal.tokens],
        )
        await _exchange(self._streams.verify, target_pb2.VerifyBatch(items=[item]))

    def _update(self, role: str) -> worker_pb2.PrefixUpdate:
        update = self._prefix.update_from(self._cached[role])
        self._cached[role] = self._prefix.length
        return update


async def _exchange(stream: Any, batch: Any) -> Any:
    await stream.write(batch)
    answer = (await stream.read()).items[0]
    if answer.HasField("error"):
        raise RuntimeError(f"a worker refused the synthetic session: {answer.error}")
    return answer
