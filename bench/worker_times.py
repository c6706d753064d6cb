"""The times of the cost model over the real wire: a draft's block and a target's step, driven without an orchestrator.

Synthetic sessions of a given length are proposed for and verified again and again, each time cropped back. Proposals and
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


class SyntheticSessions:
    """Sessions of `length` arbitrary tokens on both workers, which move together: all of them in each message."""

    def __init__(self, streams: WorkerStreams, length: int, sampling: sampling_pb2.Sampling, count: int = 1) -> None:
        self._streams = streams
        self._sessions = [_Session(number, length, streams.vocabulary_size, sampling) for number in range(count)]

    async def open(self) -> None:
        """Fills all caches; the prefill isn't measured."""
        await self._verify(await self._propose(1))

    async def sample(self, times: WorkerTimes, gammas: Sequence[int], count: int) -> None:
        """Adds `count` samples of every time, in turns."""
        plain = [draft_pb2.Proposal()] * len(self._sessions)
        for _ in range(count):
            for gamma in gammas:
                started = time.perf_counter()
                proposals = await self._propose(gamma)
                proposed = time.perf_counter()
                await self._verify(proposals)
                verified = time.perf_counter()
                times.draft.setdefault(gamma, []).append(proposed - started)
                times.verify.setdefault(gamma, []).append(verified - proposed)
            started = time.perf_counter()
            await self._verify(plain)
            times.plain_step.append(time.perf_counter() - started)

    async def close(self) -> None:
        """Releases the sessions at both workers."""
        names = [session.name for session in self._sessions]
        await self._streams.propose.write(draft_pb2.ProposeBatch(release_request_ids=names))
        await self._streams.verify.write(target_pb2.VerifyBatch(release_request_ids=names))

    async def _propose(self, gamma: int) -> list[draft_pb2.Proposal]:
        items = [session.propose_item(gamma) for session in self._sessions]
        answers = await _exchange(self._streams.propose, draft_pb2.ProposeBatch(items=items))
        return [answer.proposal for answer in answers]

    async def _verify(self, proposals: Sequence[draft_pb2.Proposal]) -> None:
        items = [session.verify_item(proposal) for session, proposal in zip(self._sessions, proposals, strict=True)]
        await _exchange(self._streams.verify, target_pb2.VerifyBatch(items=items))


class _Session:
    def __init__(self, number: int, length: int, vocabulary_size: int, sampling: sampling_pb2.Sampling) -> None:
        self.name = f"bench-{uuid.uuid4().hex}"
        self._sampling = sampling
        ids = np.random.default_rng((length, number)).integers(0, vocabulary_size, length)
        self._prefix = Prefix(wire.encode_ids(ids))
        self._epoch = 0
        self._cached = {"draft": 0, "target": 0}

    def propose_item(self, gamma: int) -> draft_pb2.ProposeItem:
        self._epoch += 1
        return draft_pb2.ProposeItem(
            request_id=self.name,
            cache_epoch=self._epoch,
            prefix=self._update("draft"),
            sampling=self._sampling,
            num_speculative_tokens=gamma,
        )

    def verify_item(self, proposal: draft_pb2.Proposal) -> target_pb2.VerifyItem:
        self._epoch += 1
        return target_pb2.VerifyItem(
            request_id=self.name,
            cache_epoch=self._epoch,
            prefix=self._update("target"),
            sampling=self._sampling,
            draft_token_ids=wire.encode_ids([token.token_id for token in proposal.tokens]),
            support_ids=[token.support_ids for token in proposal.tokens],
        )

    def _update(self, role: str) -> worker_pb2.PrefixUpdate:
        update = worker_pb2.PrefixUpdate()
        self._prefix.tell(update, self._cached[role])
        self._cached[role] = self._prefix.length
        return update


async def _exchange(stream: Any, batch: Any) -> list[Any]:
    """The answers in the order of the items, of however many messages they come in."""
    await stream.write(batch)
    answers: dict[str, Any] = {}
    while len(answers) < len(batch.items):
        for answer in (await stream.read()).items:
            if answer.HasField("error"):
                raise RuntimeError(f"a worker refused the synthetic session: {answer.error}")
            answers[answer.request_id] = answer
    return [answers[item.request_id] for item in batch.items]
