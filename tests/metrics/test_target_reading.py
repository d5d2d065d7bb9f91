"""Readings of targets: however many addresses there are, few are named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from iserblk.metrics.exposition import expose
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.target_reading import (
    MOST_ADDRESSES,
    OTHER,
    AddressReading,
    TargetReading,
    largest_addresses,
)


def test_of_1000_addresses_the_largest_are_named_and_the_others_summed() -> None:
    held = {f"10.0.{n // 256}.{n % 256}": n for n in range(1, 1001)}
    found = largest_addresses(held)
    assert [each.memory for each in found[:-1]] == list(range(1000, 1000 - MOST_ADDRESSES, -1))
    assert found[0] == AddressReading("10.0.3.232", 1000)
    assert found[-1] == AddressReading(OTHER, sum(range(1, 1001 - MOST_ADDRESSES)))
    target = TargetReading("iqn", "url", addresses=found)
    lines = expose(lambda: ProcessReading(1, "1", (), (target,))).decode().splitlines()
    assert sum("address=" in each for each in lines) == MOST_ADDRESSES + 1


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 2**40)))
def test_no_byte_is_left_out(held: dict[str, int]) -> None:
    found = largest_addresses(held)
    assert sum(each.memory for each in found) == sum(held.values())
    assert len(found) <= MOST_ADDRESSES + 1
