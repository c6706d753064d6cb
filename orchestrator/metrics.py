"""Prometheus metrics of the orchestrator, under the names that vLLM gave them where it has one.

Updated as a request goes, round by round. Children of labels are looked up once, since a round has little time to spare.
docs/observability.md has the definitions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tandem.acceptance import TokenKind

from .tallies import Spread, Tally, TallyFamily, tally

if TYPE_CHECKING:
    from .gamma_controller import Choice
    from .replica_pool import ReplicaPool
    from .runtime import Runtime
    from .session_store import StoreError
    from .speed_estimate import SpeedEstimate

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GAMMAS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16)

ROUND_OUTCOMES = ("plain", "degraded", "rejected", "accepted")
BENCH_REASONS = ("draft_unavailable", "draft_timeout", "draft_invalid", "draft_collapsed")
DEGRADED_REASONS = (*BENCH_REASONS, "draft_incompatible", "draft_context", "draft_refused")
LIMIT_DIRECTIONS = ("shorter", "longer")
ROLES = ("draft", "target")
GAMMA_REASONS = ("best", "trial", "unknown_cost")


@dataclass(slots=True)
class RoundReport:
    """A round whose tokens are committed, counted up to the end of the completion where that lies in it."""

    drafted: int
    accepted: int
    emitted: int
    last_kind: TokenKind
    expected_accepted: float
    degraded_reason: str

    @property
    def outcome(self) -> str:
        """One of ROUND_OUTCOMES."""
        if self.drafted:
            return "accepted" if self.accepted == self.drafted else "rejected"
        return "degraded" if self.degraded_reason else "plain"


class Metrics:
    """One set of metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._requests = Counter("tandem_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._resumed = Counter("tandem_requests_resumed", "Calls that went on with a known request", registry=registry)
        self._replayed = Counter("tandem_replayed_tokens", "Tokens read back for such calls", registry=registry)
        self._make_token_counters(registry)
        self._make_round_counters(registry)
        self._make_times(registry)

    def _make_token_counters(self, registry: CollectorRegistry) -> None:
        self._prompt_tokens = Counter("tandem_prompt_tokens", "Tokens of accepted prompts", registry=registry)
        self._generation_tokens = tally("tandem_generation_tokens", "Committed tokens", registry)
        emitted = TallyFamily("tandem_emitted_tokens", "Committed tokens by their kind", registry, "kind")
        drawn = [kind for kind in TokenKind if kind is not TokenKind.REPLAYED]
        self._emitted: dict[int, Tally] = {kind.value: emitted.child(kind.name.lower()) for kind in drawn}
        self._accepted_emitted = self._emitted[TokenKind.ACCEPTED.value]
        self._drafts = tally("tandem_spec_decode_num_drafts", "Rounds that had a block", registry)
        self._draft_tokens = tally("tandem_spec_decode_num_draft_tokens", "Draft tokens scored", registry)
        self._accepted = tally("tandem_spec_decode_num_accepted_tokens", "Draft tokens that became output", registry)
        self._per_position = TallyFamily(
            "tandem_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that became output, by position in the block",
            registry,
            "position",
        )
        self._positions = [self._per_position.child("0")]
        self._expected = tally(
            "tandem_expected_accepted_tokens",
            "Sum of min(p, q) over the draft positions reached: what the accepted tokens are expected to be",
            registry,
        )

    def _make_round_counters(self, registry: CollectorRegistry) -> None:
        rounds = TallyFamily("tandem_rounds", "Committed rounds by outcome", registry, "outcome")
        self._rounds = {outcome: rounds.child(outcome) for outcome in ROUND_OUTCOMES}
        degraded = Counter(
            "tandem_degraded_rounds",
            "Rounds decoded plainly although a block was wanted",
            ["reason"],
            registry=registry,
        )
        self._degraded = {reason: degraded.labels(reason=reason) for reason in DEGRADED_REASONS}
        benchings = Counter(
            "tandem_draft_benchings", "Draft replicas left alone for a while", ["reason"], registry=registry
        )
        self._benchings = {reason: benchings.labels(reason=reason) for reason in BENCH_REASONS}
        limits = Counter(
            "tandem_block_limits",
            "Times that a request's blocks were made shorter since the draft was late, or longer again",
            ["direction"],
            registry=registry,
        )
        self._block_limits = {direction: limits.labels(direction=direction) for direction in LIMIT_DIRECTIONS}
        self._shortened = Counter(
            "tandem_shortened_rounds",
            "Rounds with a shorter block than wanted, after the draft was late",
            registry=registry,
        )
        rebuilds = Counter(
            "tandem_cache_rebuilds", "Caches rebuilt from the tokens so far", ["role"], registry=registry
        )
        self._rebuilds = {role: rebuilds.labels(role=role) for role in ROLES}
        self._rescored = Counter(
            "tandem_rounds_rescored", "Rounds that the target had to score again", registry=registry
        )
        self._gamma = Spread(
            "tandem_num_speculative_tokens", "Draft tokens of a round, 0 for one without a block", _GAMMAS, registry
        )

        self._sampling_updates = Counter(
            "tandem_sampling_updates", "Calls of UpdateSampling, by outcome", ["outcome"], registry=registry
        )
        self._sampling_changes = Counter(
            "tandem_sampling_changes", "Times that a request here went on under another sampling", registry=registry
        )
        self._declined = tally(
            "tandem_declined_proposals", "Proposals without a token: the draft found nothing", registry
        )
        chosen = TallyFamily(
            "tandem_gamma_choices", "Rounds whose gamma was chosen for them, by reason", registry, "reason"
        )
        self._gamma_chosen = {reason: chosen.child(reason) for reason in GAMMA_REASONS}

    def _make_times(self, registry: CollectorRegistry) -> None:
        def spread(name: str, text: str, bounds: Iterable[float]) -> Spread:
            return Spread(f"tandem_{name}_seconds", text, bounds, registry)

        self.queue_time = spread("request_queue_time", "From the call to a place among those running", _LONG)
        self.first_token = spread("time_to_first_token", "From the call to the commit of the first token", _LONG)
        self.inter_token = spread(
            "inter_token_latency", "Time since the tokens before, shared out over the tokens of a round", _SHORT
        )
        self._e2e = spread("e2e_request_latency", "From the call to the end of its stream", _LONG)
        self.propose = spread("propose", "A round's wait for the draft", _SHORT)
        self.verify = spread("verify", "A round's wait for the target", _LONG)

    def observe_runtime(self, runtime: Runtime) -> None:
        """Adds the levels that are read when asked for."""
        running = Gauge("tandem_num_requests_running", "Requests being decoded", registry=self._registry)
        running.set_function(lambda: runtime.admission.running)
        waiting = Gauge("tandem_num_requests_waiting", "Requests waiting for a place", registry=self._registry)
        waiting.set_function(lambda: runtime.admission.waiting)
        benched = Gauge("tandem_draft_replicas_benched", "Draft replicas left alone now", registry=self._registry)
        benched.set_function(lambda: sum(bool(replica.bench.reason) for replica in runtime.drafts.replicas))
        ready = Gauge("tandem_replicas_ready", "Connected, compatible workers", ["role"], registry=self._registry)
        seats = Gauge("tandem_worker_sessions", "Sessions at the workers", ["role"], registry=self._registry)
        pending = Gauge(
            "tandem_worker_items_pending",
            "Items sent to the workers and not answered",
            ["role"],
            registry=self._registry,
        )
        for role, pool in (("draft", runtime.drafts), ("target", runtime.targets)):
            ready.labels(role=role).set_function(partial(_ready_replicas, pool))
            seats.labels(role=role).set_function(partial(_seats, pool))
            pending.labels(role=role).set_function(partial(_pending_items, pool))
        tasks = Gauge("tandem_event_loop_tasks", "Tasks of the event loop", registry=self._registry)
        tasks.set_function(partial(_tasks, asyncio.get_running_loop()))
        self._registry.register(SpeedCollector(runtime.speed))

    def declined(self) -> None:
        """A draft had nothing to propose."""
        self._declined.inc()

    def gamma_chosen(self, choice: Choice) -> None:
        """A round of an adaptive request begins."""
        self._gamma_chosen[choice.reason].inc()

    def request_planned(self, prompt_tokens: int) -> None:
        """A request was found to be good."""
        self._prompt_tokens.inc(prompt_tokens)

    def request_resumed(self, replayed: int) -> None:
        """A call goes on with a known request, and is sent so many of its tokens first."""
        self._resumed.inc()
        self._replayed.inc(replayed)

    def request_ended(self, status: str, seconds: float) -> None:
        """A request ended with a gRPC status."""
        self._requests.labels(outcome=status).inc()
        if status == "OK":
            self._e2e.observe(seconds)

    def round_committed(self, report: RoundReport) -> None:
        """The tokens of a round have become output."""
        drafted, accepted = report.drafted, report.accepted
        self._rounds[report.outcome].value += 1
        self._gamma.observe(drafted)
        self._generation_tokens.value += report.emitted
        self._accepted_emitted.value += accepted
        if report.last_kind is not TokenKind.ACCEPTED:
            self._emitted[int(report.last_kind)].value += 1  # an enum's own hash is as dear as all of this
        if drafted:
            self._drafts.value += 1
            self._draft_tokens.value += drafted
            self._accepted.value += accepted
            self._expected.value += report.expected_accepted
            while len(self._positions) < accepted:
                self._positions.append(self._per_position.child(str(len(self._positions))))
            for position in self._positions[:accepted]:
                position.value += 1
        if report.degraded_reason:
            self._degraded[report.degraded_reason].inc()

    def rebuilt(self, role: str) -> None:
        """A cache of a worker is filled again from the tokens so far."""
        self._rebuilds[role].inc()

    def draft_benched(self, reason: str) -> None:
        """A draft replica is left alone for a while."""
        self._benchings[reason].inc()

    def block_limited(self, direction: str) -> None:
        """A request's blocks become shorter, or longer again."""
        self._block_limits[direction].inc()

    def shortened(self) -> None:
        """A round has a shorter block than wanted."""
        self._shortened.inc()

    def sampling_updated(self, status: str) -> None:
        """A call of UpdateSampling ended with a gRPC status."""
        self._sampling_updates.labels(outcome=status).inc()

    def sampling_changed(self) -> None:
        """A request drops its rounds under way, and goes on under another sampling."""
        self._sampling_changes.inc()

    def rescored(self) -> None:
        """The target is asked again for a round."""
        self._rescored.inc()


class SpeedCollector(Collector):
    """What drafting is believed to bring; nothing before rounds were timed."""

    def __init__(self, speed: SpeedEstimate) -> None:
        self._speed = speed

    def collect(self) -> Iterable[Metric]:
        """Both speeds, and their quotient."""
        speeds = self._speed.now()
        rates = GaugeMetricFamily(
            "tandem_expected_tokens_per_second", "Tokens a second that a request is believed to get", labels=["rounds"]
        )
        speedup = GaugeMetricFamily("tandem_expected_speedup", "What drafting is believed to gain over plain decoding")
        if speeds is not None:
            rates.add_metric(["speculative"], speeds.speculative)
            rates.add_metric(["plain"], speeds.plain)
            speedup.add_metric([], speeds.speculative / speeds.plain)
        yield from (rates, speedup)


class StoreMetrics:
    """The StoreObserver that feeds Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._commit = Spread("tandem_commit_seconds", "A successful commit, retries included", _SHORT, registry)
        self._retries = Counter(
            "tandem_store_retries", "Exchanges with the store that were repeated", registry=registry
        )
        self._refusals = Counter(
            "tandem_store_refusals", "Calls of the store that failed, by error", ["error"], registry=registry
        )

    def committed(self, seconds: float) -> None:
        """Observes."""
        self._commit.observe(seconds)

    def retried(self, problem: str) -> None:  # noqa: ARG002 - a label of free text has no bound
        """Counts."""
        self._retries.inc()

    def refused(self, error: StoreError) -> None:
        """Counts by class: EpochConflict, ConfigChanged, FencedOff, StateLost, StoreFull, StoreUnavailable, AlreadyExists,
        AlreadyFinished."""
        self._refusals.labels(error=type(error).__name__).inc()


def _ready_replicas(pool: ReplicaPool[Any, Any]) -> int:
    return sum(replica.ready for replica in pool.replicas)


def _seats(pool: ReplicaPool[Any, Any]) -> int:
    return sum(replica.sessions for replica in pool.replicas)


def _pending_items(pool: ReplicaPool[Any, Any]) -> int:
    return sum(replica.pending_items for replica in pool.replicas)


def _tasks(loop: asyncio.AbstractEventLoop) -> int:
    return len(asyncio.all_tasks(loop))
