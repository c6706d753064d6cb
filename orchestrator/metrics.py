"""Prometheus metrics of the orchestrator, under the names that vLLM gave them where it has one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from .statistics import RoundStatistics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """One set of metrics in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("tandem_requests", "Requests by outcome", ["outcome"], registry=registry)
        self._drafts = Counter("tandem_spec_decode_num_drafts", "Rounds that had a block", registry=registry)
        self._draft_tokens = Counter("tandem_spec_decode_num_draft_tokens", "Draft tokens scored", registry=registry)
        self._accepted = Counter(
            "tandem_spec_decode_num_accepted_tokens", "Draft tokens that became output", registry=registry
        )
        self._accepted_per_position = Counter(
            "tandem_spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that became output, by position in the block",
            ["position"],
            registry=registry,
        )
        self._rounds = Counter("tandem_rounds", "Rounds: one pass of the target each", registry=registry)
        self._degraded = Counter(
            "tandem_degraded_rounds",
            "Rounds decoded plainly although a block was wanted",
            ["reason"],
            registry=registry,
        )
        self._rebuilds = Counter("tandem_cache_rebuilds", "Caches rebuilt from the tokens so far", registry=registry)
        self._first_token = Histogram(
            "tandem_time_to_first_token_seconds",
            "From the call to the first token",
            buckets=_SECONDS,
            registry=registry,
        )

    def request_failed(self, code: str) -> None:
        """Counts a request that ended with a status other than OK."""
        self._requests.labels(outcome=code).inc()

    def request_done(self, statistics: RoundStatistics, finished: bool) -> None:
        """Adds a request's rounds, whether it came to its end or not."""
        if finished:
            self._requests.labels(outcome="OK").inc()
        self._rounds.inc(statistics.rounds)
        self._drafts.inc(statistics.drafted_rounds)
        self._draft_tokens.inc(statistics.drafted)
        self._accepted.inc(statistics.accepted)
        for position, count in enumerate(statistics.accepted_per_position):
            self._accepted_per_position.labels(position=str(position)).inc(count)
        for reason, count in statistics.degraded.items():
            self._degraded.labels(reason=reason).inc(count)
        self._rebuilds.inc(statistics.rebuilds)
        if statistics.first_token is not None:
            self._first_token.observe(statistics.time_to_first_token)
