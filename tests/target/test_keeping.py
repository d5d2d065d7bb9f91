"""Which lost connections are given up where too many are kept."""

from __future__ import annotations

from functools import partial

from iserblk.target.keeping import KeptConnections


class Bench:
    """``given_up``: connections, here numbers, in their order."""

    def __init__(self, most: int, most_data: int = 1000) -> None:
        self.kept = KeptConnections(most, most_data)
        self.given_up: list[int] = []

    def add(self, number: int, address: str, data: int = 0) -> None:
        self.kept.add(number, address, data, partial(self.given_up.append, number))


def test_the_address_that_has_most_gives_up_its_oldest() -> None:
    bench = Bench(3)
    for number, address in enumerate(["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2", "10.0.0.2"]):
        bench.add(number, address)
    assert bench.given_up == [1, 2] and len(bench.kept) == 3
    bench.kept.remove(0)
    bench.add(5, "10.0.0.3")
    assert bench.given_up == [1, 2]


def test_the_address_whose_tasks_hold_most_gives_up_what_holds_data() -> None:
    bench = Bench(10)
    bench.add(0, "10.0.0.1", 300)
    bench.add(1, "10.0.0.2", 0)
    bench.add(2, "10.0.0.2", 400)
    bench.add(3, "10.0.0.2", 500)
    assert bench.given_up == [2] and bench.kept.data == 800
    bench.add(4, "10.0.0.3", 2000)
    assert bench.given_up == [2, 4] and bench.kept.data == 800


def test_what_was_given_up_is_removed_once() -> None:
    bench = Bench(1)
    bench.add(0, "10.0.0.1", 7)
    bench.add(1, "10.0.0.1", 8)
    bench.kept.remove(0)
    assert bench.kept.data == 8 and len(bench.kept) == 1
    bench.kept.remove(1)
    assert bench.kept.data == 0 and not len(bench.kept)
