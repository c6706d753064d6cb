"""A scrape of a Prometheus endpoint, over HTTP."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples at one instant."""

    def __init__(self, text: str) -> None:
        self._samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.families = list(text_string_to_metric_families(text))
        for family in self.families:
            for sample in family.samples:
                self._samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self._samples}

    def value(self, name: str, **labels: str) -> float:
        """One sample; 0 where there is none yet."""
        return self._samples.get((name, tuple(sorted(labels.items()))), 0.0)

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for (sample, _), value in self._samples.items() if sample == name)


def scrape(address: str) -> Scrape:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as response:
        return Scrape(response.read().decode())
