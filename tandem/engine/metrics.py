"""Prometheus metrics of a worker, read from the engine's own counters when asked for: the step thread does nothing more.

docs/observability.md has the definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from tandem.engine.compiled_steps import CompileStats
    from tandem.engine.draft_stats import DraftStats
    from tandem.engine.engine import EngineStats
    from tandem.engine.idle import AheadStats
    from tandem.engine.waiting_line import WaitingStats


class EngineCollector(Collector):
    """An engine's counters and levels; nothing before the model is loaded."""

    def __init__(self, stats: Callable[[], tuple[EngineStats, int] | None]) -> None:
        """`stats` gives the counters and the number of cache slots."""
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """One sample of each."""
        found = self._stats()
        if found is None:
            return
        stats, slots = found
        yield GaugeMetricFamily(
            "tandem_kv_cache_usage_perc", "Share of the cache slots in use, 0 to 1", stats.slots_used / slots
        )
        yield GaugeMetricFamily("tandem_sessions", "Requests known", stats.sessions)
        yield GaugeMetricFamily("tandem_sessions_waiting", "Requests that wait for a cache slot", stats.waiting)
        yield GaugeMetricFamily(
            "tandem_slots_of_one_orchestrator",
            "Cache slots of the orchestrator that holds the most",
            stats.line.most_held,
        )
        yield _refused(stats.line)
        yield CounterMetricFamily(
            "tandem_sessions_displaced",
            "Requests whose cache slot went to another orchestrator's",
            stats.line.displaced,
        )
        yield GaugeMetricFamily("tandem_items_running", "Items admitted and not answered: the queue", stats.running)
        yield GaugeMetricFamily(
            "tandem_forward_tokens_limit",
            "Most tokens in a forward of several items; falls when memory runs out",
            stats.most_tokens,
        )
        # A forward's size and time are summed up by the engine anyway: count and sum of a summary without quantiles.
        yield SummaryMetricFamily("tandem_batch_size", "Items in a forward", stats.forwards, stats.feeds)
        yield SummaryMetricFamily("tandem_step_seconds", "Time of a forward", stats.forwards, stats.busy_seconds)
        yield SummaryMetricFamily(
            "tandem_gathering_seconds",
            "Time that steps waited for requests about to come back",
            stats.gatherings,
            stats.gathering_seconds,
        )
        yield CounterMetricFamily("tandem_forwards", "Forwards that succeeded", stats.forwards)
        yield CounterMetricFamily("tandem_forward_tokens", "Tokens run in forwards", stats.tokens)
        yield CounterMetricFamily(
            "tandem_prefix_cache_queries", "Tokens of the prefixes that sessions opened with", stats.prefix_tokens
        )
        yield CounterMetricFamily(
            "tandem_prefix_cache_hits", "Tokens of them that were in the cache of another request", stats.shared_tokens
        )
        yield CounterMetricFamily(
            "tandem_prefix_cache_hit_sessions", "Sessions that began with such tokens", stats.shared_sessions
        )
        yield CounterMetricFamily("tandem_failed_forwards", "Forwards that raised", stats.failed_forwards)
        yield from _compiled(stats.compiled)
        yield from _ahead(stats.ahead)
        yield from _draft(stats.draft)
        yield CounterMetricFamily(
            "tandem_form_recompilations", "Forms compiled anew because a limit was met", stats.forms.recompilations
        )
        yield CounterMetricFamily(
            "tandem_form_dead_ends", "Outputs that their form was too complex to go on after", stats.forms.dead_ends
        )
        yield CounterMetricFamily(
            "tandem_invariant_violations", "Items that broke an invariant", stats.invariant_violations
        )


def _refused(stats: WaitingStats) -> Metric:
    refused = CounterMetricFamily("tandem_sessions_refused", "Requests that got no cache slot", labels=["reason"])
    refused.add_metric(["full"], stats.full)
    refused.add_metric(["late"], stats.late)
    refused.add_metric(["gave_way"], stats.gave_way)
    return refused


def _compiled(stats: CompileStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("tandem_compiled_shapes", "Shapes of forwards prepared before serving", stats.shapes)
    yield CounterMetricFamily("tandem_compiled_forwards", "Forwards run in one of these shapes, padded", stats.forwards)
    compilations = CounterMetricFamily("tandem_compilations", "Graphs compiled for them, by when", labels=["when"])
    compilations.add_metric(["start"], stats.compilations)
    compilations.add_metric(["serving"], stats.late_compilations)
    yield compilations


def _ahead(stats: AheadStats) -> Iterable[Metric]:
    items = CounterMetricFamily(
        "tandem_draft_ahead_items",
        "Items for which something was drafted ahead, by what came of it",
        labels=["outcome"],
    )
    items.add_metric(["chain"], stats.chain_hits)
    items.add_metric(["branch"], stats.branch_hits)
    items.add_metric(["miss"], stats.misses)
    yield items
    yield CounterMetricFamily("tandem_draft_ahead_tokens", "Tokens drafted ahead", stats.tokens)
    yield CounterMetricFamily("tandem_draft_ahead_used_tokens", "Tokens of them that were asked for", stats.used_tokens)
    yield CounterMetricFamily("tandem_draft_ahead_forwards", "Forwards that drafted ahead", stats.forwards)
    yield CounterMetricFamily("tandem_draft_ahead_failures", "Such forwards that raised", stats.failed_forwards)
    yield GaugeMetricFamily(
        "tandem_draft_ahead_paused",
        "1 while nothing is drafted ahead since rounds are longer with it",
        float(stats.paused),
    )
    yield CounterMetricFamily("tandem_draft_ahead_pauses", "Times that this began", stats.pauses)
    yield GaugeMetricFamily(
        "tandem_draft_ahead_round_ratio", "Seconds of a round with it over those of one without", stats.round_ratio
    )


def _draft(stats: DraftStats) -> Iterable[Metric]:
    blocks = CounterMetricFamily("tandem_draft_blocks", "Blocks proposed, by their source", labels=["source"])
    tokens = CounterMetricFamily(
        "tandem_draft_tokens", "Tokens of blocks that stood or fell, by source", labels=["source"]
    )
    accepted = CounterMetricFamily("tandem_draft_accepted_tokens", "How many of them stood", labels=["source"])
    for source, each in stats.sources.items():
        blocks.add_metric([source], each.blocks)
        tokens.add_metric([source], each.tokens)
        accepted.add_metric([source], each.accepted)
    yield from (blocks, tokens, accepted)
    yield CounterMetricFamily("tandem_draft_trials", "Blocks drafted to learn how a source does by now", stats.trials)
    yield CounterMetricFamily(
        "tandem_draft_read_tokens", "Tokens read after answers that were not the model's", stats.read_tokens
    )
    yield CounterMetricFamily("tandem_draft_failed_reads", "Such forwards that raised", stats.failed_reads)
    yield CounterMetricFamily(
        "tandem_draft_stopped_blocks", "Blocks that ended before a token not worth drafting", stats.stopped_blocks
    )
