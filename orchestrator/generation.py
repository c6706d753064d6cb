"""One request of the public API: from a call to a plan, a place, a session in the store, the rounds, and a stream of responses."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial

from tandem import wire
from tandem.acceptance import TokenKind
from tandem.v1 import orchestrator_pb2 as api

from . import several
from .call import Call
from .callers import Caller
from .completion import Completion, EmittedToken, FinishReason
from .deadlines import Deadlines
from .decoder import Decoder
from .drafting import Drafting
from .errors import InvalidArgument, RequestFailed, Unavailable
from .metered_call import MeteredCall
from .placement import block_digests
from .recorder import Recorders, RequestRecorder
from .request import MAX_COMPLETIONS, GenerationPlan, Limits, is_known_id, plan_generation
from .runtime import Runtime
from .scoring import Scoring
from .session import STORE_FAULTS, Session, as_failure
from .session_store import ConfigChanged, Ownership, Stored, StoreFull
from .statistics import RoundStatistics
from .timed_call import TimedCall
from .tokenwise_call import TokenwiseCall

DRAINING_RETRY_AFTER_SECONDS = 1.0
REPLAY_TOKENS = 64
"""In one response of a resumption: turning them into text takes about a millisecond of the event loop."""
DEADLINE_SLACK_SECONDS = 0.05
"""The caller's clock runs ahead of the one here by the time of the way: its cancellation may come before the deadline."""

_Send = Callable[[api.GenerateResponse], Awaitable[None]]


class Generations:
    """Runs the requests of one orchestrator, through whichever face they come."""

    def __init__(self, runtime: Runtime, recorders: Recorders) -> None:
        self._runtime = runtime
        self._recorders = recorders
        self._readers = Deadlines()

    async def run(self, request: api.GenerateRequest, call: Call) -> None:
        """Writes the responses to the call. Raises RequestFailed; cancel it when the caller is gone."""
        # What is no id has no place in logs.
        request_id = request.request_id if is_known_id(request.request_id) else ""
        recorder = self._recorders.begin(request_id, call.metadata(), _operation(request))
        await self._recorded(recorder, call, self._of_known_caller(request, call, recorder))

    async def _of_known_caller(
        self, request: api.GenerateRequest, call: Call, recorder: RequestRecorder
    ) -> FinishReason | None:
        completions = max(1, min(request.n, MAX_COMPLETIONS))
        callers = self._runtime.callers
        call = TimedCall(call, self._readers, self._runtime.reader_timeout)
        with callers.admit(call.metadata(), completions) as caller:
            if caller.max_tokens_per_minute:
                call = MeteredCall(call, partial(callers.spend, caller))
            if request.token_by_token:
                call = TokenwiseCall(call)
            return await self._generate(request, call, recorder, caller)

    async def _recorded(
        self, recorder: RequestRecorder, call: Call, generation: Awaitable[FinishReason | None]
    ) -> FinishReason | None:
        status, detail, finish = "UNKNOWN", "", None
        try:
            finish = await generation
            status = "OK"
        except RequestFailed as failure:
            status, detail = failure.code.name, failure.for_log
            raise
        except asyncio.CancelledError:
            status = _cancelled_status(call.seconds_left())
            raise
        finally:
            recorder.end(status, detail, finish)
        return finish

    async def _generate(
        self, request: api.GenerateRequest, call: Call, recorder: RequestRecorder, caller: Caller
    ) -> FinishReason | None:
        sessions, name = self._runtime.sessions, caller.name or call.certificate_name()
        if request.HasField("token_offset"):
            async with self._runtime.admission.place():
                recorder.admitted()
                # A target must be there before the owner is fenced off.
                session = await sessions.resume(request, name, self._runtime.limits_of_new)
                recorder.planned(session.plan, session.model, again=True)
                recorder.resumed(len(session.committed) // wire.TOKEN_BYTES, session.offset)
                return await self._stream(session, call, recorder)
        if request.n > self._runtime.admission.capacity:
            # Else one of them would be told to come again, and each time.
            raise InvalidArgument("n", f"must be at most {self._runtime.admission.capacity}: no more can run and wait")
        limits = self._runtime.limits_of_new()
        if caller.max_tokens_per_request:
            limits = dataclasses.replace(limits, max_tokens=min(limits.max_tokens, caller.max_tokens_per_request))
        with self._runtime.admission.planning():
            plan = await plan_generation(request, self._runtime.vocabulary, limits)
        # Before any work of a model, so that who cancels has paid for it, and only here: a resumption's was paid for.
        self._runtime.callers.spend(caller, plan.prompt_tokens)
        if request.n > 1:
            return await self._generate_several(plan, request, call, recorder, name)
        return await self._generate_one(plan, request, call, recorder, name)

    async def _generate_one(
        self, plan: GenerationPlan, request: api.GenerateRequest, call: Call, recorder: RequestRecorder, caller: str
    ) -> FinishReason | None:
        model = self._runtime.target_model()
        recorder.planned(plan, model)
        async with self._runtime.admission.place():
            recorder.admitted()
            return await self._stream(await self._runtime.sessions.create(plan, request, model, caller), call, recorder)

    async def _generate_several(
        self, plan: GenerationPlan, request: api.GenerateRequest, call: Call, recorder: RequestRecorder, caller: str
    ) -> FinishReason | None:
        """The first completion is recorded as the request itself, the others beside it."""
        shared = several.SharedCall(call, request.n)
        completions = []
        for index in range(request.n):
            one = several.plan_of(plan, index)
            alone, its_call = several.request_of(request, one, index), shared.of(index)
            if index == 0:
                completions.append(self._generate_one(one, alone, its_call, recorder, caller))
                continue
            its_recorder = self._recorders.begin(one.request_id, call.metadata(), _operation(request))
            generation = self._generate_one(one, alone, its_call, its_recorder, caller)
            completions.append(self._recorded(its_recorder, its_call, generation))
        return (await shared.run(completions))[0]

    async def _stream(self, session: Session, call: Call, recorder: RequestRecorder) -> FinishReason | None:
        vocabulary = self._runtime.vocabulary
        decode = vocabulary.decode_all if session.plan.keep_special_tokens else vocabulary.decode
        completion = Completion(session.plan, decode)
        try:
            send = _Reader(call, await self._start(session)).send
            await self._respond(session, completion, recorder, send)
        except STORE_FAULTS as fault:
            if isinstance(fault, StoreFull):
                await self._give_up(session, call, recorder, as_failure(fault))
            raise as_failure(fault) from fault
        except RequestFailed as failure:
            await self._give_up(session, call, recorder, failure)
            raise
        except asyncio.CancelledError:
            if self._runtime.admission.cut_off:
                # Its state stays, so that another orchestrator can go on.
                raise Unavailable("the service is shutting down", "DRAINING", DRAINING_RETRY_AFTER_SECONDS) from None
            # The caller is gone: it cancelled, its deadline passed, or its connection broke.
            await asyncio.shield(self._runtime.sessions.abandon(session, may_return=call.may_return))
            raise
        return completion.finish_reason

    async def _give_up(self, session: Session, call: Call, recorder: RequestRecorder, failure: RequestFailed) -> None:
        """Told to come again, or ended in mid stream: only what can be resumed is kept."""
        committed = bool(session.committed) or recorder.statistics.completion_tokens > 0
        may_return = call.may_return and committed
        await asyncio.shield(self._runtime.sessions.abandon(session, may_return=may_return, failure=failure))

    async def _start(self, session: Session) -> api.GenerationStart:
        plan = session.plan
        start = api.GenerationStart(
            request_id=plan.request_id, seed=plan.sampling.seed, prompt_tokens=plan.prompt_tokens, model=session.model
        )
        if plan.echo:
            start.prompt_token_ids.extend(wire.decode_ids(plan.prompt).tolist())
            # A long prompt takes a while.
            start.prompt_text = await asyncio.to_thread(self._runtime.vocabulary.decode, list(start.prompt_token_ids))
        return start

    async def _respond(self, session: Session, completion: Completion, recorder: RequestRecorder, send: _Send) -> None:
        # No generators that pass on each other's responses: each wait in a round would be resumed through all of them.
        async for response in _replay(session, completion):
            await send(response)
        if session.ownership is None:
            await send(api.GenerateResponse(finish=session.finish))
        elif completion.finish_reason is not None:
            # Its owner was lost between the last commit and the end.
            response = api.GenerateResponse(finish=_finish(session.plan, completion, recorder.statistics))
            await self._end(session, session.ownership, session.ownership.epoch, response)
            await send(response)
        else:
            await self._rounds(session, session.ownership, completion, recorder, send)

    async def _rounds(
        self,
        session: Session,
        ownership: Ownership,
        completion: Completion,
        recorder: RequestRecorder,
        send: _Send,
    ) -> None:
        runtime, name, plan = self._runtime, session.worker_session, session.plan
        # Once: the only target may be away for a moment when the sampling is changed.
        limits = runtime.limits()
        size = limits.vocabulary_size
        digests = block_digests(plan.prompt, plan.cache_salt)
        drafting = Drafting(
            name, runtime.drafts, plan.sampling, runtime.drafting_policy, size, plan.cache_salt, digests
        )
        scoring = Scoring(name, runtime.targets, plan.sampling, runtime.scoring_policy, size, plan.cache_salt, digests)
        try:
            while True:
                try:
                    return await self._stretch(
                        session, ownership, completion, drafting, scoring, recorder, limits, send
                    )
                except ConfigChanged as changed:
                    session, ownership = await self._reread(session, ownership, changed.stored)
                    await _take_again(session, completion)
                    committed = session.plan.prompt_tokens + completion.length
                    drafting.change(session.plan.sampling, committed)
                    scoring.change(session.plan.sampling, committed)
                    recorder.sampling_changed(ownership.config_version, completion.length)
        finally:
            drafting.release()
            scoring.release()

    async def _stretch(
        self,
        session: Session,
        ownership: Ownership,
        completion: Completion,
        drafting: Drafting,
        scoring: Scoring,
        recorder: RequestRecorder,
        limits: Limits,
        send: _Send,
    ) -> None:
        """The rounds under one sampling. Raises ConfigChanged where it is changed."""
        runtime, plan, statistics = self._runtime, session.plan, recorder.statistics
        # The targets of another orchestrator, where the request began or was changed, may take longer blocks.
        gamma_limit = min(plan.num_speculative_tokens, limits.max_speculative_tokens)
        plan = dataclasses.replace(plan, num_speculative_tokens=gamma_limit)
        gamma = runtime.gamma_policy(plan)
        decoder = Decoder(
            plan, completion, drafting, scoring, gamma, runtime.store, ownership, session.committed, recorder
        )
        before = statistics.drafted
        try:
            async with aclosing(decoder.rounds()) as rounds:
                async for emitted in rounds:
                    response = _response(emitted)
                    drafted = statistics.drafted
                    response.draft_tokens, before = drafted - before, drafted
                    if completion.finish_reason is not None:
                        response.finish.CopyFrom(_finish(plan, completion, statistics))
                        await self._end(session, ownership, decoder.epoch, response)
                    await send(response)
        except BaseException:
            # Rounds were dropped that it has observed: those that follow a change, or a resumption, draw the same positions with the same
            # randomness, on which their choice may not depend.
            gamma.withdraw()
            raise
        gamma.finish()

    async def _reread(self, session: Session, ownership: Ownership, stored: Stored) -> tuple[Session, Ownership]:
        session = await self._runtime.sessions.reread(session, ownership, stored)
        if session.ownership is None:
            raise AssertionError("only its owner finishes a session")
        return session, session.ownership

    async def _end(self, session: Session, ownership: Ownership, epoch: int, response: api.GenerateResponse) -> None:
        finish = response.finish.SerializeToString()
        while True:
            try:
                return await self._runtime.store.finish(ownership, epoch, finish)
            except ConfigChanged as changed:
                # Too late to change a token: all are committed.
                session, ownership = await self._reread(session, ownership, changed.stored)
                epoch = ownership.epoch


class _Reader:
    """Who gets the responses, the first one with what the request is."""

    def __init__(self, call: Call, start: api.GenerationStart) -> None:
        self._call = call
        self._start: api.GenerationStart | None = start

    def send(self, response: api.GenerateResponse) -> Awaitable[None]:
        """To be awaited at once."""
        if self._start is not None:
            response.start.CopyFrom(self._start)
            self._start = None
        return self._call.write(response)


async def _replay(session: Session, completion: Completion) -> AsyncGenerator[api.GenerateResponse]:
    """The committed tokens again, a few at a time: the completion takes them all, the caller gets those it lacks."""
    token_ids = wire.decode_ids(session.committed).tolist()
    for start in range(0, len(token_ids), REPLAY_TOKENS):
        chunk = token_ids[start : start + REPLAY_TOKENS]
        emitted = completion.take(chunk, [TokenKind.REPLAYED] * len(chunk))
        if missing := emitted[max(session.offset - start, 0) :]:
            yield _response(missing)
        await asyncio.sleep(0)


async def _take_again(session: Session, completion: Completion) -> None:
    """The completion as it was when the last of the committed tokens was taken."""
    completion.restart()
    known = dataclasses.replace(session, offset=len(session.committed) // wire.TOKEN_BYTES)
    async for _ in _replay(known, completion):
        raise AssertionError("the caller has all of them")


def _operation(request: api.GenerateRequest) -> str:
    return "chat" if request.WhichOneof("prompt") == "messages" else "text_completion"


def _cancelled_status(seconds_left: float | None) -> str:
    """By the caller, or by its deadline: gRPC doesn't say, but the clock does."""
    return "DEADLINE_EXCEEDED" if seconds_left is not None and seconds_left <= DEADLINE_SLACK_SECONDS else "CANCELLED"


def _response(emitted: list[EmittedToken]) -> api.GenerateResponse:
    response = api.GenerateResponse(text="".join([token.text for token in emitted]))
    for each in emitted:
        # In place: a message that is put into another is encoded and decoded for it.
        token = response.tokens.add(token_id=each.token_id, kind=int(each.kind), text=each.text)
        if each.logprobs is not None:
            token.logprob = each.logprobs.logprob
            for token_id, logprob in each.logprobs.top:
                token.top_logprobs.add(token_id=token_id, logprob=logprob)
    return response


def _finish(plan: GenerationPlan, completion: Completion, statistics: RoundStatistics) -> api.GenerationFinish:
    if completion.finish_reason is None:
        raise AssertionError("a completion that goes on has no finish")
    return api.GenerationFinish(
        reason=int(completion.finish_reason),  # type: ignore[arg-type]
        usage=api.Usage(prompt_tokens=plan.prompt_tokens, completion_tokens=completion.length),
        speculation=api.SpeculationStats(
            rounds=statistics.rounds,
            draft_tokens=statistics.drafted,
            accepted_tokens=statistics.accepted,
            draft_tokens_per_position=statistics.drafted_per_position,
            accepted_tokens_per_position=statistics.accepted_per_position,
            expected_accepted_tokens=statistics.expected_accepted,
            mean_acceptance_length=statistics.mean_acceptance_length,
            degraded_rounds=sum(statistics.degraded.values()),
            rebuilds=statistics.rebuilds,
            time_to_first_token_seconds=statistics.time_to_first_token,
            total_seconds=time.monotonic() - statistics.started,
            degraded_reasons=statistics.degraded_reasons,
            shortened_rounds=statistics.shortened_rounds,
            benched_drafts=statistics.benched_drafts,
            expected_speedup=statistics.expected_speedup,
        ),
    )
