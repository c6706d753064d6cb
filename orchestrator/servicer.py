"""The public API: from a call to a plan, a place, an ownership in the store, the rounds, and a stream of responses."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from tandem.v1 import orchestrator_pb2 as api
from tandem.v1 import orchestrator_pb2_grpc

from .completion import Completion, EmittedToken, FinishReason
from .decoder import Decoder
from .drafting import Drafting
from .errors import Aborted, AlreadyRunning, Context, Overloaded, RequestFailed, Unavailable, abort
from .recorder import Recorders, RequestRecorder
from .request import GenerationPlan, plan_generation
from .runtime import Runtime
from .scoring import Scoring
from .session_store import AlreadyExists, EpochConflict, FencedOff, Ownership, StateLost, StoreFull, StoreUnavailable
from .statistics import RoundStatistics

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 2.0
DEADLINE_SLACK_SECONDS = 0.05
"""The caller's clock runs ahead of the one here by the time of the way: its cancellation may come before the deadline."""


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves OrchestratorService."""

    def __init__(self, runtime: Runtime, recorders: Recorders) -> None:
        self._runtime = runtime
        self._recorders = recorders

    async def Generate(  # type: ignore[override]
        self, request: api.GenerateRequest, context: Context
    ) -> None:
        """See proto/tandem/v1/orchestrator.proto."""
        recorder = self._recorders.begin(request.request_id, context.invocation_metadata() or (), _operation(request))
        status, detail, finish = "UNKNOWN", "", None
        try:
            finish = await self._generate(request, context, recorder)
            status = "OK"
        except RequestFailed as failure:
            status, detail = failure.code.name, str(failure)
            await abort(context, failure)
        except asyncio.CancelledError:
            status = _cancelled_status(context.time_remaining())
            raise
        finally:
            recorder.end(status, detail, finish)

    async def _generate(
        self, request: api.GenerateRequest, context: Context, recorder: RequestRecorder
    ) -> FinishReason | None:
        limits = self._runtime.limits()
        plan = await plan_generation(request, self._runtime.vocabulary, limits)
        recorder.planned(plan, self._runtime.target_model())
        completion = Completion(plan, self._runtime.vocabulary.decode)
        async with self._runtime.admission.place():
            recorder.admitted()
            ownership = await self._create(plan, request)
            try:
                async with aclosing(self._responses(plan, completion, ownership, recorder)) as responses:
                    async for response in responses:
                        if response.HasField("start"):
                            # Else it goes with the first message, and while that is unread no status can be sent.
                            await context.send_initial_metadata(())
                        await self._write(context, response)
            except _STORE_FAULTS as fault:
                raise _as_failure(fault) from fault
            except asyncio.CancelledError:
                # The caller is gone for good: it cancelled, or its deadline passed.
                await asyncio.shield(self._forget(ownership))
                raise
        return completion.finish_reason

    async def _create(self, plan: GenerationPlan, request: api.GenerateRequest) -> Ownership:
        encoded = request.SerializeToString(deterministic=True)
        fingerprint = hashlib.sha256(encoded).digest()
        try:
            return await self._runtime.store.create(
                plan.request_id, fingerprint, plan.sampling.SerializeToString(), plan.prompt, self._runtime.owner
            )
        except AlreadyExists as error:
            raise AlreadyRunning("request_id belongs to another request", "REQUEST_ID_TAKEN") from error
        except _STORE_FAULTS as fault:
            raise _as_failure(fault) from fault

    async def _responses(
        self, plan: GenerationPlan, completion: Completion, ownership: Ownership, recorder: RequestRecorder
    ) -> AsyncGenerator[api.GenerateResponse]:
        runtime = self._runtime
        size = runtime.limits().vocabulary_size
        drafting = Drafting(
            plan.request_id, runtime.drafts, plan.sampling, runtime.drafting_policy, size, plan.cache_salt
        )
        scoring = Scoring(
            plan.request_id, runtime.targets, plan.sampling, runtime.scoring_policy, size, plan.cache_salt
        )
        gamma = runtime.gamma_policy(plan)
        decoder = Decoder(plan, completion, drafting, scoring, gamma, runtime.store, ownership, recorder)
        start: api.GenerationStart | None = _start(plan, runtime.target_model())
        try:
            async with aclosing(decoder.rounds()) as rounds:
                async for emitted in rounds:
                    response = _response(emitted, start)
                    start = None
                    if completion.finish_reason is not None:
                        response.finish.CopyFrom(_finish(plan, completion, recorder.statistics))
                        await runtime.store.finish(ownership, decoder.epoch, response.finish.SerializeToString())
                    yield response
        finally:
            gamma.finish()
            drafting.release()
            scoring.release()

    async def _write(self, context: Context, response: api.GenerateResponse) -> None:
        try:
            async with asyncio.timeout(self._runtime.reader_timeout):
                await context.write(response)
        except TimeoutError:
            raise Overloaded("the stream was left unread for too long", "READER_TOO_SLOW") from None

    async def _forget(self, ownership: Ownership) -> None:
        try:
            await self._runtime.store.delete(ownership)
        except _STORE_FAULTS as fault:
            log.warning("state is left to expire: %s", fault, extra={"request_id": ownership.request_id})


_STORE_FAULTS = (FencedOff, EpochConflict, StateLost, StoreFull, StoreUnavailable)


def _as_failure(fault: Exception) -> RequestFailed:
    if isinstance(fault, FencedOff):
        return Aborted("another orchestrator has taken the request over", "TAKEN_OVER")
    if isinstance(fault, StoreFull):
        return Overloaded("the store is full", "STORE_FULL", RETRY_AFTER_SECONDS)
    if isinstance(fault, StoreUnavailable):
        return Unavailable("the store is not available", "STORE_UNAVAILABLE", RETRY_AFTER_SECONDS)
    return Unavailable("the request's state was lost in the store", "STATE_LOST", RETRY_AFTER_SECONDS)


def _operation(request: api.GenerateRequest) -> str:
    return "chat" if request.WhichOneof("prompt") == "messages" else "text_completion"


def _cancelled_status(seconds_left: float | None) -> str:
    """By the caller, or by its deadline: gRPC doesn't say, but the clock does."""
    return "DEADLINE_EXCEEDED" if seconds_left is not None and seconds_left <= DEADLINE_SLACK_SECONDS else "CANCELLED"


def _start(plan: GenerationPlan, model: str) -> api.GenerationStart:
    return api.GenerationStart(
        request_id=plan.request_id, seed=plan.sampling.seed, prompt_tokens=plan.prompt_tokens, model=model
    )


def _response(emitted: list[EmittedToken], start: api.GenerationStart | None) -> api.GenerateResponse:
    return api.GenerateResponse(
        start=start,
        tokens=[api.GeneratedToken(token_id=t.token_id, kind=int(t.kind), text=t.text) for t in emitted],  # type: ignore[arg-type]
        text="".join(token.text for token in emitted),
    )


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
            degraded_reasons=sorted(statistics.degraded),
            expected_speedup=statistics.expected_speedup,
        ),
    )
