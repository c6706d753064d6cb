"""A request's trace: its root span, one span per round, and the spans and events below those.

docs/trace-schema.json is the source of truth for names and attributes. Neither text nor ids of tokens get here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from enum import Enum

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, get_current_span

from tandem.tracing import TRACEPARENT, TRACESTATE, Tracing, context_from, context_of, trace_id_of, traceparent_of

from .gamma_controller import Choice
from .metrics import RoundReport
from .request import GenerationPlan

SERVER_FAULTS = frozenset(
    {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "RESOURCE_EXHAUSTED"}
)
"""Statuses that are no fault of the caller; a cancelled request is no error."""
_MAX_INT = 2**63 - 1


class NoticedReason(Enum):
    """Why a request is exported whatever the sampler said."""

    ERROR = "error"
    DEGRADED = "degraded"
    SLOW = "slow"


class RequestTrace:
    """A request. Where the sampler left it out, it is told of afterwards, without its rounds, if it deserves notice."""

    def __init__(self, tracing: Tracing, metadata: Iterable[tuple[str, str | bytes]], operation: str) -> None:
        self._tracing = tracing
        self._caller = _caller(metadata)
        self._operation = operation
        self._began_ns = time.time_ns()
        self._plan: tuple[GenerationPlan, str] | None = None
        self._span = self._start(tracing.start_span)
        self._context = context_of(self._span)
        self._open: set[RoundTrace] = set()

    def _start(self, start_span: Callable[..., Span]) -> Span:
        attributes = {"gen_ai.operation.name": self._operation, "gen_ai.provider.name": "tandem"}
        return start_span("generate", SpanKind.SERVER, self._caller, attributes, start_ns=self._began_ns)

    @property
    def recording(self) -> bool:
        """Whether the sampler took it."""
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """For logs; valid even where the trace is not sampled."""
        return trace_id_of(self._span)

    def planned(self, plan: GenerationPlan, model: str) -> None:
        """The request's parameters, defaults resolved."""
        self._plan = (plan, model)
        if self.recording:
            self._span.set_attributes(_parameters(plan, model))

    def admitted(self, queue_seconds: float) -> None:
        """The request has a place among those running."""
        self._span.set_attribute("tandem.queue_seconds", queue_seconds)

    def resumed(self, committed: int, offset: int) -> None:
        """The call goes on with a request that is known."""
        self._span.add_event("tandem.resume", {"tandem.committed_tokens": committed, "tandem.token_offset": offset})

    def sampling_changed(self, version: int, committed: int) -> None:
        """The rounds that are open come to nothing."""
        self._abandon_rounds()
        attributes = {"tandem.config_version": version, "tandem.committed_tokens": committed}
        self._span.add_event("tandem.sampling_changed", attributes)

    def first_token(self) -> None:
        """The first tokens are committed."""
        self._span.add_event("tandem.first_token")

    def begin_round(self, index: int, epoch: int) -> RoundTrace:
        """A round starts; it ends by itself, or with the request."""
        opened = RoundTrace(self, index, epoch)
        self._open.add(opened)
        return opened

    def end(
        self, status: str, detail: str, completion_tokens: int, finish_reason: str, noticed: NoticedReason | None
    ) -> None:
        """Ends the rounds that are still open, then the request."""
        self._abandon_rounds()
        span = self._span
        if noticed is not None and not self._span.is_recording() and not self._left_out_by_caller:
            span = self._span = self._start(self._tracing.start_span_anyway)  # a trace of its own
            span.set_attribute("tandem.noticed", noticed.value)
            if self._plan is not None:
                span.set_attributes(_parameters(*self._plan))
        span.set_attributes({"tandem.status": status, "gen_ai.usage.output_tokens": completion_tokens})
        if finish_reason:
            span.set_attribute("gen_ai.response.finish_reasons", (finish_reason,))
        if status in SERVER_FAULTS:
            span.set_status(Status(StatusCode.ERROR, detail))
        if status != "OK":
            span.set_attribute("error.type", status)
        span.end()

    def _abandon_rounds(self) -> None:
        for opened in list(self._open):
            opened.abandoned()

    @property
    def _left_out_by_caller(self) -> bool:
        """A caller that has decided is followed."""
        return get_current_span(self._caller).get_span_context().is_valid


class RoundTrace:
    """One round: open from its proposal to its commit, beside the end of the round before it."""

    def __init__(self, request: RequestTrace, index: int, epoch: int) -> None:
        self._request = request
        self._tracing = request._tracing
        self._span = self._tracing.start_span(
            "tandem.round", SpanKind.INTERNAL, request._context, {"tandem.round": index, "tandem.epoch": epoch}
        )
        self.traceparent = traceparent_of(self._span)
        self._began_ns: int | None = None

    def chosen(self, choice: Choice) -> None:
        """The gamma of an adaptive request."""
        self._span.set_attributes(
            {
                "tandem.gamma_chosen": choice.gamma,
                "tandem.gamma_reason": choice.reason,
                "tandem.gamma_speedup": choice.speedup,
            }
        )

    def limited(self, limit: int) -> None:
        """A longer block was wanted."""
        self._span.set_attribute("tandem.block_limit", limit)

    def event(self, name: str, **attributes: str | int) -> None:
        """Something out of the ordinary."""
        self._span.add_event(name, {f"tandem.{key}": value for key, value in attributes.items()})

    def accept_began(self) -> None:
        """Proposal and target rows are there."""
        self._began_ns = time.time_ns()

    def accepted(self, report: RoundReport) -> None:
        """The rule has been applied; the commit begins."""
        self._child("tandem.accept", {"tandem.accepted": report.accepted})
        attributes: dict[str, str | int | float] = {
            "tandem.gamma": report.drafted,
            "tandem.accepted": report.accepted,
            "tandem.emitted": report.emitted,
            "tandem.expected_acceptance": report.expected_accepted,
        }
        if report.degraded_reason:
            attributes["tandem.degraded_reason"] = report.degraded_reason
        self._span.set_attributes(attributes)
        if report.accepted < report.drafted:
            self._span.add_event("tandem.rollback", {"tandem.rejected_tokens": report.drafted - report.accepted})
        self._began_ns = time.time_ns()

    def committed(self, emitted: int) -> None:
        """Ends the round."""
        self._child("tandem.commit", {"tandem.emitted": emitted})
        self._end("committed")

    def abandoned(self) -> None:
        """Ends a round whose tokens were not committed, as far as is known."""
        self._end("abandoned")

    def _child(self, name: str, attributes: dict[str, int]) -> None:
        # Made when it is over, so that it can't be left open.
        self._tracing.start_span(name, SpanKind.INTERNAL, context_of(self._span), attributes, self._began_ns).end()
        self._began_ns = None

    def _end(self, outcome: str) -> None:
        if self in self._request._open:
            self._request._open.discard(self)
            self._span.set_attribute("tandem.outcome", outcome)
            self._span.end()


def _caller(metadata: Iterable[tuple[str, str | bytes]]) -> Context:
    sent = {key: value for key, value in metadata if key in (TRACEPARENT, TRACESTATE) and isinstance(value, str)}
    return context_from(sent.get(TRACEPARENT, ""), sent.get(TRACESTATE, ""))


def _parameters(plan: GenerationPlan, model: str) -> dict[str, str | int | float]:
    sampling = plan.sampling
    attributes: dict[str, str | int | float] = {
        "tandem.request_id": plan.request_id,
        "tandem.seed": str(sampling.seed),
        "tandem.num_speculative_tokens": plan.num_speculative_tokens,
        "tandem.adaptive_speculative_tokens": plan.adaptive,
        "gen_ai.request.model": model,
        "gen_ai.request.max_tokens": plan.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.usage.input_tokens": plan.prompt_tokens,
    }
    if sampling.seed <= _MAX_INT:
        attributes["gen_ai.request.seed"] = sampling.seed
    return attributes
