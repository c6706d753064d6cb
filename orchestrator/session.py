"""A request's state in the store and this orchestrator's right to go on with it: created, resumed, given up.

A resumption reads before it takes over, so that a call that asks for the wrong thing doesn't disturb the owner.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import grpc

from tandem.v1 import orchestrator_pb2 as api
from tandem.wire import TOKEN_BYTES

from . import stored_request
from .errors import (
    Aborted,
    AlreadyKnown,
    Finished,
    InvalidArgument,
    NotFound,
    Overloaded,
    RequestFailed,
    Unavailable,
)
from .request import GenerationPlan, is_known_id
from .session_store import (
    AlreadyExists,
    AlreadyFinished,
    ChangedTooSoon,
    ConfigChanged,
    EpochConflict,
    FencedOff,
    Ownership,
    SessionStatus,
    SessionStore,
    Snapshot,
    StateLost,
    Stored,
    StoreFull,
    StoreUnavailable,
    Update,
)

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 2.0
CHANGE_AFTER_SECONDS = 0.1
"""About a round, of a target that isn't fast."""
_MAY_PASS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""After another failure a resumption would end as the request did."""
STORE_FAULTS = (FencedOff, EpochConflict, StateLost, StoreFull, StoreUnavailable)


@dataclass(frozen=True, slots=True)
class Session:
    """A request, what of it is committed, and the right to go on, which nobody has once it is finished."""

    plan: GenerationPlan
    model: str
    ownership: Ownership | None
    committed: bytes = b""
    """The completion so far, as encoded ids."""
    offset: int = 0
    """Tokens of it that the caller has."""
    finish: api.GenerationFinish | None = None
    resumable: bool = False
    """Whether the caller knew the id from the start, and so may come back should its connection break."""

    @property
    def worker_session(self) -> str:
        """The session's name at the workers. Each ownership has its own: the one before may still run here, and would
        release this one's cache with its own."""
        if self.ownership is None or self.ownership.fence == 1:
            return self.plan.request_id
        return f"{self.plan.request_id}~{self.ownership.fence}"


class Sessions:
    """The sessions of one orchestrator. Every method raises RequestFailed, unless it says otherwise."""

    def __init__(self, store: SessionStore, owner: str, resume_seconds: float) -> None:
        self._store = store
        self._owner = owner
        self._resume_seconds = resume_seconds

    async def create(self, plan: GenerationPlan, request: api.GenerateRequest, model: str, caller: str) -> Session:
        """Stores a new request."""
        content = stored_request.fingerprint(request)
        try:
            ownership = await self._store.create(
                plan.request_id, content, stored_request.encode(plan, model, caller), plan.prompt, self._owner
            )
        except AlreadyExists as error:
            if error.request_fingerprint == content:
                raise AlreadyKnown(
                    "the request is known; set token_offset to go on with it", "REQUEST_KNOWN"
                ) from error
            raise AlreadyKnown("request_id belongs to another request", "REQUEST_ID_TAKEN") from error
        except STORE_FAULTS as fault:
            raise as_failure(fault) from fault
        return Session(plan, model, ownership, resumable=bool(request.request_id))

    async def resume(
        self, request: api.GenerateRequest, caller: str, before_take_over: Callable[[], object]
    ) -> Session:
        """Takes a running request over, or reads a finished one. `before_take_over` may raise: the owner is left alone."""
        if not request.request_id:
            raise InvalidArgument("request_id", "must be set to resume a request")
        if not is_known_id(request.request_id):
            raise _not_found()
        try:
            known = await self._store.read(request.request_id)
            session = _checked(known, request, caller)
            if session.finish is None:
                before_take_over()
                session = _checked(await self._store.take_over(request.request_id, self._owner), request, caller)
        except StateLost as lost:
            raise _not_found() from lost
        except STORE_FAULTS as fault:
            raise as_failure(fault) from fault
        return session

    async def update(
        self, request_id: str, caller: str, change: Callable[[GenerationPlan], Awaitable[GenerationPlan]]
    ) -> tuple[api.UpdateSamplingResponse, bool]:
        """Changes the plan of a running request, whoever runs it. Returns what is in force then, and whether it was this call that
        brought it. `change` may raise: nothing is done."""
        if not is_known_id(request_id):
            raise _not_found()
        try:
            while True:
                known = await self._store.read(request_id)
                if known is None:
                    raise _not_found()
                try:
                    update = await self._update_once(known, caller, change)
                except ConfigChanged:
                    continue  # another change came first, and this one is made of what that has left
                response = api.UpdateSamplingResponse(
                    config_version=update.config_version, completion_tokens=update.config_length - known.prompt_length
                )
                return response, update.took_effect
        except StateLost as lost:
            raise _not_found() from lost
        except ChangedTooSoon as early:
            raise Overloaded(
                "no token was committed since the request's last change", "CHANGED_TOO_SOON", CHANGE_AFTER_SECONDS
            ) from early
        except AlreadyFinished as finished:
            raise _finished() from finished
        except STORE_FAULTS as fault:
            raise as_failure(fault) from fault

    async def _update_once(
        self, known: Snapshot, caller: str, change: Callable[[GenerationPlan], Awaitable[GenerationPlan]]
    ) -> Update:
        stored = stored_request.decode(known.config)
        if stored.caller != caller:
            raise _not_found()
        if known.status is SessionStatus.FINISHED:
            raise _finished()
        plan = stored_request.plan_of(stored, known.request_id, known.tokens[: known.prompt_length * TOKEN_BYTES])
        config = stored_request.encode(await change(plan), stored.model, stored.caller)
        if stored_request.decode(config) == stored:
            config = known.config
        return await self._store.update(known, config)

    async def reread(self, session: Session, ownership: Ownership, told: Stored) -> Session:
        """The session as it is now, after a commit was refused because its plan has changed, and the store told where it was. The store's
        errors pass through, StateLost too where it has gone back in time since."""
        known = await self._store.reread(ownership)
        if known.epoch < told.epoch or known.length < told.length:
            raise StateLost("the store has lost what it told", Stored(known.fence, known.epoch, known.length))
        stored = stored_request.decode(known.config)
        prompt_bytes = known.prompt_length * TOKEN_BYTES
        return replace(
            session,
            plan=stored_request.plan_of(stored, known.request_id, known.tokens[:prompt_bytes]),
            ownership=known.ownership,
            committed=known.tokens[prompt_bytes:],
        )

    async def abandon(self, session: Session, *, may_return: bool, failure: RequestFailed | None = None) -> None:
        """The caller is gone, or gets the `failure`: its state goes too, at once or, where the caller may come back, after a
        while."""
        if session.ownership is None:
            return
        try:
            may_return = may_return or session.ownership.fence > 1  # who resumed once may do it again
            in_vain = failure is not None and failure.code not in _MAY_PASS
            if may_return and not in_vain and session.resumable and self._resume_seconds > 0:
                await self._store.abandon(session.ownership, self._resume_seconds)
            else:
                await self._store.delete(session.ownership)
        except STORE_FAULTS as fault:
            log.warning("state is left to expire: %s", fault, extra={"request_id": session.plan.request_id})


def as_failure(fault: Exception) -> RequestFailed:
    """What a fault of the store means for the request."""
    if isinstance(fault, FencedOff):
        return Aborted("the request was resumed by another call", "TAKEN_OVER")
    if isinstance(fault, StoreFull):
        return Overloaded("the store is full", "STORE_FULL", RETRY_AFTER_SECONDS)
    if isinstance(fault, StoreUnavailable):
        return Unavailable("the store is not available", "STORE_UNAVAILABLE", RETRY_AFTER_SECONDS)
    return Unavailable("the request's state was lost in the store", "STATE_LOST", RETRY_AFTER_SECONDS)


def _checked(snapshot: Snapshot | None, request: api.GenerateRequest, caller: str) -> Session:
    """What is stored, if it is what the call asks for."""
    if snapshot is None:
        raise _not_found()
    stored = stored_request.decode(snapshot.config)
    if stored.caller != caller:
        # As if it weren't there: ids of other callers are none of this one's business.
        raise _not_found()
    if not stored_request.names_only(request) and stored_request.fingerprint(request) != snapshot.request_fingerprint:
        raise AlreadyKnown("request_id belongs to another request", "REQUEST_ID_TAKEN")
    completion_tokens = snapshot.length - snapshot.prompt_length
    if request.token_offset > completion_tokens:
        raise InvalidArgument("token_offset", f"is above the {completion_tokens} tokens that are committed")
    prompt_bytes = snapshot.prompt_length * TOKEN_BYTES
    return Session(
        plan=stored_request.plan_of(stored, snapshot.request_id, snapshot.tokens[:prompt_bytes]),
        model=stored.model,
        ownership=snapshot.ownership,
        committed=snapshot.tokens[prompt_bytes:],
        offset=request.token_offset,
        finish=api.GenerationFinish.FromString(snapshot.finish) if snapshot.finish is not None else None,
        resumable=True,
    )


def _finished() -> Finished:
    return Finished("the request is finished", "REQUEST_FINISHED")


def _not_found() -> NotFound:
    return NotFound("no request of this id is known", "REQUEST_UNKNOWN")
