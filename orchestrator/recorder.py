"""What is observed of one request, in one place: its statistics, the metrics, its trace, and its line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tandem.acceptance import Outcome
from tandem.tracing import Tracing

from .completion import FinishReason
from .metrics import Metrics, RoundReport
from .request import GenerationPlan
from .statistics import RoundStatistics

if TYPE_CHECKING:
    from .drafting import Block
    from .gamma_controller import Choice
    from .request_trace import NoticedReason, RequestTrace, RoundTrace

log = logging.getLogger(__name__)


class Recorders:
    """Makes the recorder of each request."""

    def __init__(self, metrics: Metrics, tracing: Tracing | None, slow_seconds: float) -> None:
        """A request that takes longer than `slow_seconds` is traced whatever the sampler says."""
        self._metrics = metrics
        self._tracing = tracing
        self._slow_seconds = slow_seconds

    def begin(self, request_id: str, metadata: Iterable[tuple[str, str | bytes]], operation: str) -> RequestRecorder:
        """A call arrived; `metadata` may continue the caller's trace."""
        if self._tracing is None:
            return RequestRecorder(request_id, self._metrics, None)
        from .request_trace import RequestTrace

        trace = RequestTrace(self._tracing, metadata, operation)
        return RequestRecorder(request_id, self._metrics, trace, self._slow_seconds)


class RequestRecorder:
    """One request. `end` must be called once, whatever happens."""

    def __init__(
        self, request_id: str, metrics: Metrics, trace: RequestTrace | None, slow_seconds: float = 0.0
    ) -> None:
        self.statistics = RoundStatistics()
        self.metrics = metrics
        self.trace = trace if trace is not None and trace.recording else None
        self.trace_id = trace.trace_id if trace is not None else None
        self.request_id = request_id
        self._root = trace
        self._slow_seconds = slow_seconds
        self._prompt_tokens = 0
        self._queue_seconds: float | None = None
        self._last_commit: float | None = None
        self._replayed: int | None = None
        self._sampling_changes = 0
        self.missed_a_block = False
        """Whether a round had no block although it wanted one, be the round committed or not."""

    def planned(self, plan: GenerationPlan, model: str, *, again: bool = False) -> None:
        """The request is good; `again`: as it was found before, by the call that this one goes on with."""
        self.request_id = plan.request_id
        self._prompt_tokens = plan.prompt_tokens
        if not again:
            self.metrics.request_planned(plan.prompt_tokens)
        if self._root is not None:
            self._root.planned(plan, model)

    def admitted(self) -> None:
        """The request has a place among those running."""
        self._queue_seconds = time.monotonic() - self.statistics.started
        self.metrics.queue_time.observe(self._queue_seconds)
        if self.trace is not None:
            self.trace.admitted(self._queue_seconds)

    def resumed(self, committed: int, offset: int) -> None:
        """The call goes on with a request that has so many tokens, of which the caller has those before `offset`."""
        self._replayed = committed - offset
        self.metrics.request_resumed(self._replayed)
        if self.trace is not None:
            self.trace.resumed(committed, offset)

    def sampling_changed(self, version: int, committed: int) -> None:
        """The rounds under way are dropped: after so many tokens the request goes on under another sampling."""
        self._sampling_changes += 1
        self.metrics.sampling_changed()
        if self.trace is not None:
            self.trace.sampling_changed(version, committed)

    def begin_round(self, epoch: int) -> RoundRecorder:
        """A round is about to ask for its proposal."""
        return RoundRecorder(self, self.trace.begin_round(epoch, epoch) if self.trace is not None else None)

    def committed(self, report: RoundReport) -> None:
        """The tokens of a round are real now."""
        now, before = time.monotonic(), self._last_commit
        self._last_commit = now
        self.statistics.committed(report.emitted)
        self.metrics.round_committed(report)
        if before is not None:
            self.metrics.inter_token.observe((now - before) / report.emitted, report.emitted)
            return
        self.metrics.first_token.observe(self.statistics.time_to_first_token)
        if self.trace is not None:
            self.trace.first_token()

    def end(self, status: str, detail: str, finish: FinishReason | None) -> None:
        """The call is over, with this gRPC status."""
        seconds = time.monotonic() - self.statistics.started
        reason = finish.name.lower() if finish is not None and status == "OK" else ""
        self.metrics.request_ended(status, seconds)
        if self._root is not None:
            tokens = self.statistics.completion_tokens
            self._root.end(status, detail, tokens, reason, self._noticed(status, seconds))
            self.trace_id = self._root.trace_id
        self._write_line(status, detail, reason, seconds)

    def _noticed(self, status: str, seconds: float) -> NoticedReason | None:
        from .request_trace import SERVER_FAULTS, NoticedReason

        if status in SERVER_FAULTS:
            return NoticedReason.ERROR
        if self.missed_a_block:
            return NoticedReason.DEGRADED
        return NoticedReason.SLOW if seconds > self._slow_seconds else None

    def _write_line(self, status: str, detail: str, reason: str, seconds: float) -> None:
        statistics = self.statistics
        fields = {
            "request_id": self.request_id or None,
            "trace_id": self.trace_id,
            "status": status,
            "error": detail or None,
            "finish_reason": reason or None,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": statistics.completion_tokens,
            "replayed_tokens": self._replayed,
            "rounds": statistics.rounds,
            "draft_tokens": statistics.drafted,
            "accepted_tokens": statistics.accepted,
            "expected_accepted_tokens": round(statistics.expected_accepted, 3),
            "rebuilds": statistics.rebuilds or None,
            "degraded": dict(statistics.degraded) or None,
            "shortened_rounds": statistics.shortened_rounds or None,
            "benched_drafts": statistics.benched_drafts or None,
            "sampling_changes": self._sampling_changes or None,
            "queue_seconds": _rounded(self._queue_seconds),
            "time_to_first_token_seconds": _rounded(statistics.time_to_first_token or None),
            "total_seconds": _rounded(seconds),
        }
        log.info("request ended", extra=fields)


class RoundRecorder:
    """One round, from its proposal to its commit."""

    __slots__ = ("_asked", "_degraded_reason", "_expected", "_report", "_request", "_short", "_speedup", "_trace")

    def __init__(self, request: RequestRecorder, trace: RoundTrace | None) -> None:
        self._request = request
        self._trace = trace
        self._asked = time.monotonic()
        self._degraded_reason = ""
        self._short = False
        self._speedup = 0.0
        self._report: RoundReport | None = None
        self._expected: Sequence[float] = ()

    @property
    def traceparent(self) -> str:
        """What goes to the workers with the round's items; empty where there is no trace."""
        return self._trace.traceparent if self._trace is not None else ""

    @property
    def trace_id(self) -> str | None:
        """For logs; None where traces are off."""
        return self._request.trace_id

    def chosen(self, choice: Choice) -> None:
        """How many tokens the draft will be asked for."""
        if choice.reason == "fixed":
            return
        self._speedup = choice.speedup
        self._request.metrics.gamma_chosen(choice)
        if self._trace is not None:
            self._trace.chosen(choice)

    def declined(self) -> None:
        """The draft has nothing to propose here."""
        self._request.metrics.declined()

    def degraded(self, reason: str, *, newly: bool) -> None:
        """A block was wanted and there is none."""
        self._degraded_reason = reason
        self._request.missed_a_block = True
        if newly and self._trace is not None:
            self._trace.event("tandem.fallback", reason=reason)

    def benched(self, reason: str) -> None:
        """The request's draft replica is left alone for a while, by all requests."""
        self._request.statistics.benched_drafts += 1
        self._request.metrics.draft_benched(reason)
        if self._trace is not None:
            self._trace.event("tandem.bench", reason=reason)

    def shortened(self, limit: int) -> None:
        """The draft was late, and is asked for at most so many tokens from now on."""
        self._limited("shorter", limit)

    def lengthened(self, limit: int) -> None:
        """The draft keeps its time with short blocks, and is asked for up to so many tokens again."""
        self._limited("longer", limit)

    def _limited(self, direction: str, limit: int) -> None:
        self._request.metrics.block_limited(direction)
        if self._trace is not None:
            self._trace.event("tandem.block_limit", limit=limit, direction=direction)

    def short(self, asked: int) -> None:
        """The round has a block of up to so many tokens, where a longer one was wanted."""
        self._short = True
        if self._trace is not None:
            self._trace.limited(asked)

    def rebuilding(self, role: str, reason: str) -> None:
        """The worker's cache is not what it should be, and is filled again."""
        self._request.statistics.rebuilds += 1
        self._request.metrics.rebuilt(role)
        if self._trace is not None:
            self._trace.event("tandem.rebuild", role=role, reason=reason)

    def rescoring(self, reason: str) -> None:
        """The target is asked again."""
        self._request.metrics.rescored()
        if self._trace is not None:
            self._trace.event("tandem.retry", role="target", reason=reason)

    def recommitting(self, reason: str) -> None:
        """The store is asked again for the commit; it counts that itself."""
        if self._trace is not None:
            self._trace.event("tandem.retry", role="store", reason=reason)

    def proposed(self, drafted: int) -> None:
        """The draft has answered, or was given up; nothing to note where it was not asked."""
        now = time.monotonic()
        if drafted or self._degraded_reason:
            self._request.metrics.propose.observe(now - self._asked)
        self._asked = now

    def verified(self) -> None:
        """The target has answered."""
        self._request.metrics.verify.observe(time.monotonic() - self._asked)

    def accept_began(self) -> None:
        """The rule is about to be applied."""
        if self._trace is not None:
            self._trace.accept_began()

    def accepted(self, block: Block, outcome: Outcome, count: int) -> RoundReport:
        """The rule was applied, and the completion takes the first `count` of the tokens that it gave."""
        # What lies past the completion's end was never tried, as far as anyone can see.
        drafted = len(block.drafted) if count == len(outcome.token_ids) else min(len(block.drafted), count)
        self._expected = outcome.expected_acceptance[:drafted]
        report = RoundReport(
            drafted=drafted,
            accepted=min(outcome.accepted, count),
            emitted=count,
            last_kind=outcome.kinds[count - 1],
            expected_accepted=sum(self._expected, 0.0),
            degraded_reason=self._degraded_reason,
        )
        if self._trace is not None:
            self._trace.accepted(report)
        self._report = report
        return report

    def committed(self) -> None:
        """The round's tokens are committed: it is over."""
        if self._report is None:
            raise AssertionError("a round is committed after its acceptance")
        statistics = self._request.statistics
        statistics.round_done(self._report.drafted, self._report.accepted, self._expected)
        statistics.chosen(self._speedup)
        if self._degraded_reason:
            statistics.degraded_round(self._degraded_reason)
        if self._short:
            statistics.shortened_rounds += 1
            self._request.metrics.shortened()
        self._request.committed(self._report)
        if self._trace is not None:
            self._trace.committed(self._report.emitted)


def _rounded(seconds: float | None) -> float | None:
    return round(seconds, 4) if seconds is not None else None
