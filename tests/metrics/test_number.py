"""Tables of metrics: the names that their samples have."""

from __future__ import annotations

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from iserblk.metrics.number import Number


@pytest.mark.parametrize(
    ("counter", "kind", "sample"), [(True, "counter", "x_total"), (False, "gauge", "x")]
)
def test_the_name_of_a_sample(counter: bool, kind: str, sample: str) -> None:
    number = Number("field", "x", "Words.", counter)
    assert number.sample == sample
    family = number.family(("a",))
    family.add_metric(("1",), 7)

    class One(Collector):
        def collect(self) -> list[Metric]:
            return [family]

    text = generate_latest(One()).decode().splitlines()
    assert text == [f"# HELP {sample} Words.", f"# TYPE {sample} {kind}", f'{sample}{{a="1"}} 7.0']
