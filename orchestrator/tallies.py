"""Counters and histograms of one writer, the event loop: a round touches some thirty of them, and the locks and checks
that prometheus_client puts around each change were a twentieth of its time.

They are read by whoever asks for the metrics, in another thread: a number may be one change older than the next one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString


class Tally:
    """A number that only rises."""

    __slots__ = ("_began", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._began = time.time()

    def inc(self, amount: float = 1.0) -> None:
        """Adds."""
        self.value += amount

    def add_to(self, family: CounterMetricFamily, labels: Sequence[str]) -> None:
        """As a sample."""
        family.add_metric(labels, self.value, created=self._began)


class TallyFamily(Collector):
    """A counter with one label, or with none: then it has one child, of the name ""."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry, label: str = "") -> None:
        self._name = name
        self._text = text
        self._labels = [label] if label else []
        self._children: dict[str, Tally] = {}
        registry.register(self)

    def child(self, value: str = "") -> Tally:
        """That of a label's value. Ask once for each, and only for values out of a bounded set."""
        return self._children.setdefault(value, Tally())

    def collect(self) -> Iterable[Metric]:
        """All children as they are now."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for value, tally in list(self._children.items()):
            tally.add_to(family, [value] if self._labels else [])
        yield family


class Spread(Collector):
    """A histogram; of a value on a bucket's bound, that bucket."""

    def __init__(self, name: str, text: str, bounds: Iterable[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = [float(bound) for bound in bounds]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._began = time.time()
        registry.register(self)

    def observe(self, value: float, times: int = 1) -> None:
        """So many observations of one value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> Iterable[Metric]:
        """The buckets as they are now."""
        buckets, total = [], 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))  # type: ignore[no-untyped-call]
        family = HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
        family.add_sample(f"{self._name}_created", {}, self._began)
        yield family


def tally(name: str, text: str, registry: CollectorRegistry) -> Tally:
    """A counter without labels."""
    return TallyFamily(name, text, registry).child()
