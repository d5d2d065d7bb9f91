"""Metrics that are one number of a reading each: a table of them makes the text and reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily


@dataclass(slots=True, frozen=True)
class Number:
    """``field``: the attribute of a reading; ``words``: help."""

    field: str
    name: str
    words: str
    counter: bool = False

    @property
    def sample(self) -> str:
        """The name that its samples have."""
        return f"{self.name}_total" if self.counter else self.name

    def family(self, labels: Sequence[str]) -> CounterMetricFamily | GaugeMetricFamily:
        """The metric, without samples yet."""
        kind = CounterMetricFamily if self.counter else GaugeMetricFamily
        return kind(self.name, self.words, labels=labels)
