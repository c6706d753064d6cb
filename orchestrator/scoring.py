"""The target's side of a round: its distribution at every position of a block.

The target is the authority. When a replica goes, or has lost the session's cache, the block is scored again, by another
replica or by the same one when it is back, with the cache rebuilt from the tokens so far. Nothing of a round counts
before it is committed, and the target's draws are a function of (seed, position), so a repeated round is the same round.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem import wire
from tandem.acceptance import RowLogprobs, TargetRow
from tandem.v1 import sampling_pb2, target_pb2, target_pb2_grpc, worker_pb2

from . import verdicts
from .drafting import Proposed
from .errors import Overloaded, Unavailable
from .logprobs import decode_row
from .prefix import Prefix
from .recorder import RoundRecorder
from .replica_pool import ReplicaPool, WorkerSession
from .round_costs import ORDINARY_TOKENS, WorkerTime
from .verdicts import P_SUM_TOLERANCE, ReceivedVerdict
from .worker_stream import AnswerLate, ItemFailed, StreamLost, WorkerKind

log = logging.getLogger(__name__)

TargetPool = ReplicaPool[target_pb2.VerifyItem, ReceivedVerdict]

TARGET: WorkerKind[target_pb2.VerifyItem, ReceivedVerdict] = WorkerKind(
    role="target",
    stub=target_pb2_grpc.TargetServiceStub,
    open_stream=lambda stub: stub.Verify(),
    pack=lambda items, releases: target_pb2.VerifyBatch(items=items, release_request_ids=releases),
    reader=verdicts.reader,
)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 1.0
RETRY_AFTER_SECONDS = 5.0
FULL_RETRY_SECONDS = 2.0

_HOPELESS_REASONS = frozenset(
    {
        worker_pb2.ERROR_REASON_INVALID_ARGUMENT,
        worker_pb2.ERROR_REASON_CONTEXT_EXCEEDED,
    }
)
_AFRESH_REASONS = frozenset(
    {
        worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED,
        worker_pb2.ERROR_REASON_DRAINING,
        # The session is an earlier request's, whose id the store has forgotten.
        worker_pb2.ERROR_REASON_STALE_CACHE_EPOCH,
    }
)
"""The session is given up, and a new one opened, elsewhere if there is another replica."""


_NOTHING: wire.ProbArray = np.empty(0, dtype=np.float32)


class TargetContractError(ValueError):
    """The target's answer isn't a distribution over what it was asked for."""


@dataclass(frozen=True, slots=True)
class ScoringPolicy:
    """How long one answer may take, and how long a target that went is waited for; seconds."""

    timeout: float
    retry: float


class Scoring:
    """One request's use of the target."""

    def __init__(
        self,
        request_id: str,
        pool: TargetPool,
        sampling: sampling_pb2.Sampling,
        policy: ScoringPolicy,
        vocabulary_size: int,
        cache_salt: str = "",
        prompt_digests: Iterable[bytes] = (),
    ) -> None:
        """`prompt_digests`: see `placement.block_digests`."""
        self._session = WorkerSession(request_id, pool, prompt_digests)
        self._pool = pool
        self._sampling = sampling
        self._announced = False
        """Whether the target has this sampling, if it has the session."""
        self._policy = policy
        self._vocabulary_size = vocabulary_size
        self._cache_salt = cache_salt
        self.ordinary = False
        """Whether the last block was scored at once, without more to read than in any round."""
        self.worker_time: WorkerTime | None = None
        """What the target says that it took."""

    async def verify(
        self,
        prefix: Prefix,
        epoch: int,
        proposed: Proposed,
        record: RoundRecorder,
        meanwhile: Callable[[], None] | None = None,
    ) -> list[TargetRow]:
        """The len(token_ids) + 1 target rows; raises Unavailable when no target scored them within the retry time. `meanwhile` is
        called once they are asked for, each time."""
        give_up_at: float | None = None
        pause = FIRST_PAUSE_SECONDS
        full: set[str] = set()
        while True:
            if self._session.should_move:
                self._session.leave()
                record.rebuilding("target", "REPLICA_LEAVING")
            had_cache = self._session.opened
            try:
                return await self._verify_once(prefix, epoch, proposed, record.traceparent, meanwhile)
            except ItemFailed as failed:
                if failed.reason in _HOPELESS_REASONS:
                    self._refused(failed)
                elif failed.reason == worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED:
                    full.add(self._session.replica.address if self._session.replica is not None else "")
                    self._refuse_if_all_are(full, epoch, failed)
                if failed.reason in _AFRESH_REASONS:
                    self._session.leave()
                fault: Exception = failed
            except (StreamLost, TargetContractError, TimeoutError) as error:
                self._session.leave()
                fault = error
            self._session.forget()  # and a session that starts afresh is not ordinary
            if had_cache:
                record.rebuilding("target", _reason(fault))
            record.rescoring(_reason(fault))
            self._log_retry(fault, epoch, record.trace_id)
            if give_up_at is None:
                # From the first fault on: one answer may take longer than all of the retrying.
                give_up_at = time.monotonic() + self._policy.retry
            try:
                await self._pause(pause, give_up_at, fault)
            finally:
                del fault  # whose frames are this one too
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _refused(self, failed: ItemFailed) -> None:
        """A replica that doesn't take what another one of the pool would, such as one with a smaller context. Gives the seat
        up; raises Unavailable where no other replica is left to ask."""
        if self._session.replica is not None:
            self._session.refusing.add(self._session.replica)
        self._session.leave()
        ready = {replica for replica in self._pool.replicas if replica.ready}
        if ready and ready <= self._session.refusing:
            raise Unavailable(
                f"the target refused the round: {failed}", "TARGET_REFUSED", RETRY_AFTER_SECONDS
            ) from failed

    def settle(self, prefix_length: int, accepted: int) -> None:
        """After a round on a prefix of `prefix_length` tokens: what the target's cache still shares with the output."""
        self._session.cached_length = min(self._session.cached_length, prefix_length + accepted)

    def change(self, sampling: sampling_pb2.Sampling, length: int) -> None:
        """Another sampling, from the token after the first `length` on. No round may be under way."""
        self._sampling, self._announced = sampling, False
        self._session.cached_length = min(self._session.cached_length, length)

    def release(self) -> None:
        """Ends the session at the target."""
        self._session.leave()

    def _refuse_if_all_are(self, full: set[str], epoch: int, failed: ItemFailed) -> None:
        """A request that has nothing yet is better told to come again; one under way goes on trying."""
        if epoch == 0 and full >= self._pool.ready_addresses:
            raise Overloaded("all cache slots of the target are in use", "TARGET_FULL", FULL_RETRY_SECONDS) from failed

    def _log_retry(self, fault: Exception, epoch: int, trace_id: str | None) -> None:
        log.warning(
            "the round is scored again: %s: %s",
            type(fault).__name__,
            fault,
            extra={"request_id": self._session.request_id, "trace_id": trace_id, "cache_epoch": epoch},
        )

    async def _pause(self, seconds: float, give_up_at: float, fault: Exception) -> None:
        left = give_up_at - time.monotonic()
        if left <= 0:
            what = "no target scored the round" if self._pool.ready else "no target is connected: none came back"
            message = f"{what} within {self._policy.retry:g} s"
            raise Unavailable(message, "TARGET_UNAVAILABLE", RETRY_AFTER_SECONDS) from fault
        if self._pool.ready:
            await asyncio.sleep(min(seconds, left))
        else:
            await self._pool.wait_for_change(left)

    async def _verify_once(
        self,
        prefix: Prefix,
        epoch: int,
        proposed: Proposed,
        traceparent: str,
        meanwhile: Callable[[], None] | None,
    ) -> list[TargetRow]:
        replica = self._session.seat()
        if replica is None:
            raise StreamLost("no target replica is connected")
        item = target_pb2.VerifyItem(
            request_id=self._session.request_id,
            cache_epoch=epoch,
            draft_token_ids=wire.encode_ids(proposed.token_ids),
            support_ids=proposed.supports,
        )
        # In place: a message that is put into another is encoded and decoded for it. What a round mostly does without isn't even named.
        prefix.tell(item.prefix, self._session.cached_length)
        if not (self._session.opened and self._announced):
            item.sampling.CopyFrom(self._sampling)
        if not self._session.opened:
            item.cache_salt = self._cache_salt
        if traceparent:
            item.traceparent = traceparent
        try:
            # Not kept: a failure in it would keep this frame, and with it the request's tokens.
            received = await replica.submit(item, self._policy.timeout, proposed, meanwhile)
        except AnswerLate:
            raise TimeoutError(f"the target did not answer within {self._policy.timeout:g} s") from None
        sizes = [len(ids) // wire.TOKEN_BYTES for ids in proposed.supports]
        rows = self._checked(received, sizes, len(proposed.token_ids) + 1)
        self._announced, verdict = True, received.message
        self.ordinary = self._session.opened and prefix.length - self._session.cached_length <= ORDINARY_TOKENS
        self.worker_time = WorkerTime.of(verdict)
        self._session.cached_length = verdict.cached_length
        return rows

    def _checked(self, received: ReceivedVerdict, sizes: Sequence[int], count: int) -> list[TargetRow]:
        answered = received.rows
        if len(answered) != count:
            raise TargetContractError(f"{len(answered)} rows where {count} were asked for")
        sizes = [*sizes, 0][:count]
        with_logprobs = self._sampling.logprobs
        rows = received.together(sizes, self._vocabulary_size) if not with_logprobs else []
        for row, size in zip(answered[len(rows) :], sizes[len(rows) :], strict=True):
            rows.append(self._decoded(row, size, with_logprobs))
        return rows

    def _decoded(self, row: target_pb2.TargetRow, size: int, with_logprobs: bool) -> TargetRow:
        try:
            data = row.support_probs
            p = wire.decode_probs(data, size) if data or size else _NOTHING
            logprobs = self._decoded_logprobs(row, size) if with_logprobs else None
        except wire.WireError as error:
            raise TargetContractError(str(error)) from error
        outside_mass, outside_token_id = row.outside_mass, row.outside_token_id
        total = (float(np.add.reduce(p)) if size else 0.0) + outside_mass  # `p.sum()` costs twice as much
        if not abs(total - 1.0) <= P_SUM_TOLERANCE or outside_mass < 0.0:
            raise TargetContractError(f"p sums to {total:.6g}")
        if outside_mass > 0.0 and outside_token_id >= self._vocabulary_size:
            raise TargetContractError("a token outside of the vocabulary")
        return TargetRow(p, outside_mass, outside_token_id, logprobs, row.dead_end)

    def _decoded_logprobs(self, row: target_pb2.TargetRow, size: int) -> RowLogprobs:
        return decode_row(row, size, self._sampling.top_logprobs, self._vocabulary_size)


def _reason(fault: Exception) -> str:
    """A fault in one word, out of a bounded set."""
    if isinstance(fault, ItemFailed):
        return fault.reason_name
    return type(fault).__name__
