"""The draft's side of a round: a block of proposed tokens, or an empty one when the draft can't give it.

The draft is optional. Whatever goes wrong with it (slow, gone, out of room, wrong) degrades the round to plain decoding,
with a reason that is counted and logged; the request tries again after a while. One that is late is first asked for less.

What a draft sends is `Proposed`: its ids are checked, so that a target takes it. Only `Drafting.confirm` makes a `Block` of it, of which
tokens can be accepted, and that checks q. It has the time of the verification for it: what turns out to be no block is verified in vain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from tandem import wire
from tandem.acceptance import DraftContractError, Drafted
from tandem.v1 import draft_pb2, draft_pb2_grpc, sampling_pb2, worker_pb2

from . import proposals
from .block_limit import BlockLimit
from .gamma_controller import Choice
from .prefix import Prefix
from .proposals import ReceivedProposal
from .recorder import RoundRecorder
from .replica_pool import ReplicaPool, WorkerSession
from .round_costs import ORDINARY_TOKENS, WorkerTime
from .worker_stream import AnswerLate, ItemFailed, Replica, StreamLost, WorkerKind

log = logging.getLogger(__name__)

DraftPool = ReplicaPool[draft_pb2.ProposeItem, ReceivedProposal]

DraftReplica = Replica[draft_pb2.ProposeItem, ReceivedProposal]

DRAFT: WorkerKind[draft_pb2.ProposeItem, ReceivedProposal] = WorkerKind(
    role="draft",
    stub=draft_pb2_grpc.DraftServiceStub,
    open_stream=lambda stub: stub.Propose(),
    pack=lambda items, releases: draft_pb2.ProposeBatch(items=items, release_request_ids=releases),
    reader=proposals.reader,
)

SHORT_READ = 512
"""Tokens of a prefix that a draft should have read within the time of a round."""

_REBUILD_REASONS = frozenset(
    {
        worker_pb2.ERROR_REASON_CACHE_MISS,
        worker_pb2.ERROR_REASON_PREFIX_DIVERGED,
        worker_pb2.ERROR_REASON_INTERNAL,
        worker_pb2.ERROR_REASON_STALE_CACHE_EPOCH,
    }
)


@dataclass(slots=True)
class Block:
    """gamma draft tokens, and perhaps the draft's proposal for the position after them."""

    drafted: tuple[Drafted, ...] = ()
    look_ahead: Drafted | None = None


@dataclass(slots=True)
class Proposed:
    """A draft's answer as far as a target has to know it."""

    token_ids: Sequence[int] = ()
    """gamma of them."""
    supports: Sequence[bytes] = ()
    """Encoded ids: one for each token, and perhaps one for the position after them."""
    drafted: Callable[[], list[Drafted]] = list
    """One for each support; raises DraftContractError or WireError."""
    replica: DraftReplica | None = None
    asked: int = 0
    """Tokens that the draft was asked for."""
    wanted: int = 0
    """Tokens that it would have been asked for, had it not been late."""
    longest: int = 0
    """The most that it may be asked for."""
    unread_tokens: int = 0
    block: Block | None = None
    """None until it is confirmed."""


PLAIN = Proposed(block=Block())
DECLINED = Proposed(block=Block())
"""The draft has nothing to propose."""


class _Blame(Enum):
    """What a fault says about the replica."""

    NONE = 0
    SILENCE = 1
    """Nobody's fault if an answer comes yet, and then less is asked for."""
    STRIKE = 2
    """May be nobody's fault; several in a row are."""
    PROOF = 3


class _Degraded(Exception):
    """No block this round; `final` if this request needs not try again."""

    def __init__(self, reason: str, detail: str = "", *, final: bool = False, blame: _Blame = _Blame.NONE) -> None:
        super().__init__(detail)
        self.reason = reason
        self.final = final
        self.blame = blame


@dataclass(frozen=True, slots=True)
class DraftingPolicy:
    """How long the draft is waited for, and how long a request leaves it alone after a fault; seconds."""

    timeout: float
    backoff: float
    look_ahead: bool


class Drafting:
    """One request's use of the draft."""

    def __init__(
        self,
        request_id: str,
        pool: DraftPool,
        sampling: sampling_pb2.Sampling,
        policy: DraftingPolicy,
        vocabulary_size: int,
        cache_salt: str = "",
        prompt_digests: Iterable[bytes] = (),
    ) -> None:
        """`prompt_digests`: see `placement.block_digests`."""
        self._session = WorkerSession(request_id, pool, prompt_digests)
        self._sampling = sampling
        self._policy = policy
        self._longest = 0
        self._stop_below = 0.0
        self._vocabulary_size = vocabulary_size
        self._cache_salt = cache_salt
        self._pool = pool
        self._announced = False
        """Whether the draft has this sampling, if it has the session."""
        self._block_length = 0
        self._unread = 0
        """Tokens that the draft knows, and whose reading its model had before it when it answered last."""
        self._late: tuple[asyncio.Future[ReceivedProposal], int] | None = None
        self._limit = BlockLimit()
        self._limited: DraftReplica | None = None
        """The replica that the limit is for."""
        self._asks_for_less = False
        self._asked_at = 0.0
        self._resume_at = 0.0
        self._standing: _Degraded | None = None
        self._unconfirmed: Proposed | None = None
        self.ordinary = False
        """Whether the draft had no more to read for its last block than it has in any round."""
        self.asked = 0
        """Tokens that the draft was asked for in this round."""
        self.worker_time: WorkerTime | None = None
        """What the draft says that its last block took."""

    @property
    def limit(self) -> int | None:
        """The most tokens that the draft is asked for at present, since it was late; None where that is whatever is wanted."""
        return self._limit.tokens if self._limited is self._session.replica else None

    async def propose(
        self, prefix: Prefix, epoch: int, choice: Choice, longest: int, record: RoundRecorder
    ) -> Proposed:
        """Up to gamma tokens that continue the prefix, where other rounds may want `longest`; never raises for a fault of the draft."""
        gamma = choice.gamma
        self.ordinary, self.asked, self._longest, self._stop_below = False, 0, longest, choice.stop_below
        if gamma == 0:
            return PLAIN
        try:
            self._check_yield(record)
            self._check_standing()
            proposed = self._unconfirmed = await self._ask(prefix, epoch, gamma, record)
            return proposed
        except _Degraded as degraded:
            self._degrade(degraded, epoch, record)
            return PLAIN

    def look_at(self, proposed: Proposed, epoch: int, record: RoundRecorder) -> None:
        """Confirms it if its round still goes on, while the target is at work."""
        if proposed is self._unconfirmed:
            self.confirm(proposed, epoch, record)

    def confirm(self, proposed: Proposed, epoch: int, record: RoundRecorder) -> Block:
        """The block that it is, an empty one if the draft has lied; asked again, the same one."""
        if proposed.block is None:
            self._unconfirmed = None
            try:
                proposed.block = _checked(proposed)
            except (DraftContractError, wire.WireError) as lie:
                proposed.block = Block()
                self._session.forget()
                self._degrade(_lied(lie), epoch, record)
            else:
                self._block_length = len(proposed.token_ids)
                self._good(proposed, epoch, record)
        return proposed.block

    def _good(self, proposed: Proposed, epoch: int, record: RoundRecorder) -> None:
        """It was in time, and is a block."""
        if proposed.replica is not None:
            proposed.replica.bench.answered()
        if proposed.asked < proposed.wanted:
            record.short(proposed.asked)
        if not proposed.unread_tokens:  # else it took no time, and the model's next one will
            self._in_time(proposed.asked, proposed.longest, epoch, record)

    def settle(self, prefix_length: int, accepted: int) -> None:
        """After a round on a prefix of `prefix_length` tokens: what the draft's cache still shares with the output."""
        self._session.cached_length = min(self._session.cached_length, prefix_length + accepted)
        if self._block_length and self._session.replica is not None:
            self._session.replica.bench.yielded(self._block_length, min(accepted, self._block_length))
        self._block_length = 0

    def change(self, sampling: sampling_pb2.Sampling, length: int) -> None:
        """Another sampling, from the token after the first `length` on. No round may be under way."""
        self._sampling, self._announced = sampling, False
        self._session.cached_length = min(self._session.cached_length, length)
        self._block_length, self._unconfirmed = 0, None
        if self._late is not None:
            answer, prefix_length = self._late
            self._late = (answer, min(prefix_length, length))
        if self._standing is not None and self._standing.reason == "draft_refused":
            self._standing = None  # what it has refused is gone

    def release(self) -> None:
        """Ends the session at the draft."""
        self._unconfirmed = None
        self._session.leave()

    def _check_standing(self) -> None:
        if self._standing is None:
            return
        again = time.monotonic() >= self._resume_at or self._may_ask_for_less or self._may_ask_elsewhere
        if self._standing.final or not again:
            raise _Degraded(self._standing.reason, final=self._standing.final)
        self._standing = None

    @property
    def _may_ask_for_less(self) -> bool:
        """Whether a draft that was late with its last block has answered after all: it lives, and may manage a shorter one."""
        if self._late is None or not self._asks_for_less:
            return False
        answer, _ = self._late
        return answer.done() and not answer.cancelled() and answer.exception() is None

    @property
    def _may_ask_elsewhere(self) -> bool:
        """Whether another session has had the draft benched meanwhile, and there is another one."""
        return self._session.displaced and self._session.can_move

    def _degrade(self, degraded: _Degraded, epoch: int, record: RoundRecorder) -> None:
        record.degraded(degraded.reason, newly=self._standing is None)
        if self._standing is not None:
            return
        # Not the exception as it was raised: its frames would keep this request, and it them.
        self._standing = _Degraded(degraded.reason, final=degraded.final)
        moves = self._accuse(degraded, record)
        self._resume_at = time.monotonic() + (0.0 if moves else self._policy.backoff)
        if degraded.blame is _Blame.SILENCE and self.limit is not None:
            record.shortened(self.limit)
            self._log_limit("it was late", self.limit, epoch, record)
        log.warning(
            "no block from the draft (%s): %s",
            degraded.reason,
            degraded,
            extra={"request_id": self._session.request_id, "trace_id": record.trace_id, "cache_epoch": epoch},
        )

    def _accuse(self, degraded: _Degraded, record: RoundRecorder) -> bool:
        """Benches the replica where the fault is its own; returns whether the next round can go to another one."""
        replica = self._session.replica
        if self._session.displaced:
            return self._move()  # another session has benched it, for what may be the same incident
        if replica is None or degraded.blame is _Blame.NONE:
            return False
        if degraded.blame is not _Blame.PROOF and not self._session.can_move:
            return False  # a slow draft is better than none, and its cache is dear
        reason, backoff = degraded.reason, self._policy.backoff
        if degraded.blame is _Blame.SILENCE:
            benched = replica.bench.silent(reason, backoff, self._asked_at)
        else:
            benched = replica.bench.fault(reason, backoff, at_once=degraded.blame is _Blame.PROOF)
        if not benched:
            return False
        record.benched(degraded.reason)
        return self._move()

    def _check_yield(self, record: RoundRecorder) -> None:
        replica, peers = self._session.replica, self._pool.replicas
        if replica is None or len(peers) < 2 or self._session.displaced:
            return
        if not replica.bench.collapsed(each.bench for each in peers if each.ready):
            return
        replica.bench.fault("draft_collapsed", self._policy.backoff, at_once=True)
        record.benched("draft_collapsed")
        self._move()

    def _move(self) -> bool:
        """Gives the seat up, with whatever it is still owed; whether there is another."""
        moves = self._session.can_move
        self._leave()
        return moves

    def _leave(self) -> None:
        self._late = None
        self._session.leave()

    async def _ask(self, prefix: Prefix, epoch: int, gamma: int, record: RoundRecorder) -> Proposed:
        if self._session.displaced:
            self._leave()  # and await nothing from it
        elif self._session.should_move:
            self._leave()
            record.rebuilding("draft", "REPLICA_LEAVING")
        self._collect_late_answer(prefix)
        for attempt in (1, 2):
            try:
                return await self._ask_once(prefix, epoch, gamma, record)
            except ItemFailed as failed:
                self._session.forget()
                if attempt == 1 and failed.reason in _REBUILD_REASONS:
                    if failed.reason == worker_pb2.ERROR_REASON_STALE_CACHE_EPOCH:
                        self._leave()  # the session there is an earlier request's, whose id the store has forgotten
                    record.rebuilding("draft", failed.reason_name)
                    continue
                raise _degraded_by(failed) from failed
            except StreamLost as lost:
                self._session.forget()
                raise _Degraded("draft_unavailable", str(lost)) from lost
            except (DraftContractError, wire.WireError) as lie:
                self._session.forget()
                raise _lied(lie) from lie
        raise AssertionError("the second attempt returns or raises")

    async def _ask_once(self, prefix: Prefix, epoch: int, gamma: int, record: RoundRecorder) -> Proposed:
        replica = self._session.seat()
        if replica is None or replica.info is None:
            raise self._nobody()
        gamma = min(gamma, replica.info.context_length - prefix.length, replica.info.max_speculative_tokens)
        if gamma < 1:
            self._leave()
            raise _Degraded("draft_context", "the draft's context is full", final=True)
        if replica is not self._limited:
            # How long one takes says nothing of another one.
            self._limit, self._limited = BlockLimit(), replica
        wanted, gamma = gamma, self._limit.of(gamma)
        opened = self._session.opened
        item = self._item(prefix, epoch, gamma, record.traceparent)
        item.look_ahead = self._policy.look_ahead and prefix.length + gamma < replica.info.context_length
        self.asked, self._asked_at = gamma, time.monotonic()
        try:
            received = await replica.submit(item, self._policy.timeout)
        except AnswerLate as late:
            # The draft may still be reading a long prompt: its answer is collected when it comes, and its cache kept.
            self._late, blame = (late.answer, prefix.length), self._blame_for_time(prefix)
            self._asks_for_less = blame is _Blame.STRIKE and self._bears_with(replica) and self._limit.late(gamma) > 0
            if self._asks_for_less:
                blame = _Blame.SILENCE
            raise _Degraded("draft_timeout", f"no answer within {self._policy.timeout:g} s", blame=blame) from None
        self._announced, proposal = True, received.message
        # What was unread after a block at no time is mostly read since, but for a long prompt.
        few = prefix.length - self._session.cached_length <= ORDINARY_TOKENS
        self.ordinary = opened and few and self._to_read(prefix) <= SHORT_READ
        self._unread = proposal.unread_tokens
        self.worker_time = WorkerTime.of(proposal)
        self._session.cached_length = proposal.cached_length
        if proposal.declined and not received.token_ids:
            replica.bench.answered()
            return DECLINED
        proposed = self._readable(received, gamma, item.look_ahead)
        proposed.replica, proposed.asked, proposed.wanted = replica, gamma, wanted
        proposed.longest = min(self._longest, replica.info.max_speculative_tokens)
        return proposed

    def _item(self, prefix: Prefix, epoch: int, gamma: int, traceparent: str) -> draft_pb2.ProposeItem:
        item = draft_pb2.ProposeItem(
            request_id=self._session.request_id, cache_epoch=epoch, num_speculative_tokens=gamma
        )
        # In place: a message that is put into another is encoded and decoded for it. What a round mostly does without isn't even named.
        prefix.tell(item.prefix, self._session.cached_length)
        opened = self._session.opened
        if not (opened and self._announced):
            item.sampling.CopyFrom(self._sampling)
        if not opened:
            item.cache_salt = self._cache_salt
        if traceparent:
            item.traceparent = traceparent
        if self._stop_below:
            item.stop_below = self._stop_below
        return item

    def _bears_with(self, replica: DraftReplica) -> bool:
        """Whether to stay with a draft that is late: not after another session had it benched, nor where this is its trial."""
        return not self._session.displaced and not (replica.bench.reason and self._session.can_move)

    def _in_time(self, asked: int, longest: int, epoch: int, record: RoundRecorder) -> None:
        longer = self._limit.in_time(asked, longest)
        if longer is not None:
            record.lengthened(longer)
            self._log_limit("it keeps its time", longer, epoch, record)

    def _log_limit(self, why: str, limit: int, epoch: int, record: RoundRecorder) -> None:
        log.info(
            "the draft is asked for blocks of up to %d tokens: %s",
            limit,
            why,
            extra={"request_id": self._session.request_id, "trace_id": record.trace_id, "cache_epoch": epoch},
        )

    def _blame_for_time(self, prefix: Prefix) -> _Blame:
        """One that has much to read may take its time."""
        return _Blame.STRIKE if self._to_read(prefix) <= SHORT_READ else _Blame.NONE

    def to_read(self, prefix: Prefix) -> int:
        """Tokens that a block would have to wait for its model to read, as far as is known: none where it may come without, or
        where they are being read."""
        replica = self._session.replica
        infos = [each.info for each in ([replica] if replica is not None else self._pool.replicas)]
        if self._late is not None or any(info is not None and info.reads_later for info in infos):
            return 0
        return self._to_read(prefix)

    def _to_read(self, prefix: Prefix) -> int:
        """Tokens that the draft's model may have to read before its block."""
        return min(prefix.length, prefix.length - self._session.cached_length + self._unread)

    def _collect_late_answer(self, prefix: Prefix) -> None:
        if self._late is None:
            return
        answer, prefix_length = self._late
        if not answer.done():
            blame = self._blame_for_time(prefix)
            raise _Degraded("draft_timeout", "the answer is still outstanding", blame=blame)
        self._late = None
        if answer.cancelled() or answer.exception() is not None:
            self._session.forget()
        else:
            proposal = answer.result().message
            self._session.cached_length = min(proposal.cached_length, prefix_length)
            self._unread = proposal.unread_tokens

    def _nobody(self) -> _Degraded:
        if self._pool.benched:
            return _Degraded(self._pool.benched, "all draft replicas are benched")
        if refusals := self._pool.refusals:
            return _Degraded("draft_incompatible", "; ".join(refusals))
        return _Degraded("draft_unavailable", "no draft replica is connected")

    def _readable(self, received: ReceivedProposal, gamma: int, look_ahead: bool) -> Proposed:
        """Raises DraftContractError or WireError for what no target would take."""
        token_ids = received.token_ids
        if not 1 <= len(token_ids) <= gamma + look_ahead:
            raise DraftContractError(f"{len(token_ids)} tokens where {gamma + look_ahead} were asked for")
        drafted = received.readable(self._vocabulary_size)
        return Proposed(token_ids[:gamma], received.supports, drafted, unread_tokens=received.message.unread_tokens)


def _checked(proposed: Proposed) -> Block:
    """Raises DraftContractError or WireError."""
    drafted, count = proposed.drafted(), len(proposed.token_ids)
    return Block(tuple(drafted[:count]), drafted[count] if len(drafted) > count else None)


def _lied(lie: Exception) -> _Degraded:
    return _Degraded("draft_invalid", str(lie), blame=_Blame.PROOF)


def _degraded_by(failed: ItemFailed) -> _Degraded:
    if failed.reason == worker_pb2.ERROR_REASON_INVALID_ARGUMENT:
        return _Degraded("draft_refused", str(failed), final=True)
    if failed.reason == worker_pb2.ERROR_REASON_CONTEXT_EXCEEDED:
        return _Degraded("draft_context", str(failed), final=True)
    # One that is full or shuts down is well, and says so.
    well = failed.reason in (worker_pb2.ERROR_REASON_RESOURCE_EXHAUSTED, worker_pb2.ERROR_REASON_DRAINING)
    return _Degraded("draft_unavailable", str(failed), blame=_Blame.NONE if well else _Blame.STRIKE)
