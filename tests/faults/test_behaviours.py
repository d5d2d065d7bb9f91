"""Each behaviour of a fault alone, on units: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.faults.behaviours import (
    FIN,
    RST,
    Behaviour,
    Corrupt,
    CorruptByte,
    Cut,
    Delay,
    Drop,
    Duplicate,
    Gate,
    Hold,
    Item,
    Reorder,
    Signal,
    Sips,
)
from tests.support.faults.framing import Unit

WORDS = [b"alpha", b"beta", b"gamma", b"delta", b"epsilon"]


def units(words: Iterable[bytes] = WORDS) -> list[Item]:
    made: list[Item] = []
    offset = 0
    for word in words:
        made.append(Unit(word, offset))
        offset += len(word)
    return [*made, Signal(FIN)]


def through(behaviour: Behaviour, items: list[Item] | None = None) -> list[bytes | str]:
    out: list[bytes | str] = []
    for item in units() if items is None else items:
        for passed in behaviour.take(item):
            out.append(passed.kind if isinstance(passed, Signal) else passed.data)
    return out


def test_units_that_are_lost_doubled_or_late() -> None:
    assert through(Drop(nth=1)) == [b"alpha", b"gamma", b"delta", b"epsilon", FIN]
    assert through(Duplicate(nth=0)) == [b"alpha", *WORDS, FIN]
    assert through(Reorder(nth=1)) == [b"alpha", b"gamma", b"beta", b"delta", b"epsilon", FIN]
    assert through(Reorder(nth=4)) == [*WORDS, FIN]  # the last unit is not lost


def test_the_stream_is_cut_to_the_byte() -> None:
    assert through(Cut(7)) == [b"alpha", b"be", FIN]
    assert through(Cut(9, RST)) == [b"alpha", b"beta", RST]
    assert through(Cut(0, "black hole")) == []
    assert through(Cut(1000)) == [*WORDS, FIN]


def test_cutting_does_not_depend_on_how_tcp_cut() -> None:
    whole = b"".join(WORDS)
    for size in range(1, len(whole)):
        chunks = [whole[at : at + size] for at in range(0, len(whole), size)]
        passed = through(Cut(11), units(chunks))
        assert passed.pop() == FIN and b"".join(each for each in passed) == whole[:11]  # type: ignore[misc]
        turned = through(CorruptByte(11), units(chunks))
        data = b"".join(each for each in turned[:-1])  # type: ignore[misc]
        assert data[:11] + data[12:] == whole[:11] + whole[12:] and data[11] == whole[11] ^ 1


def test_sips_lose_nothing() -> None:
    passed = through(Sips(3, seed=1))
    assert len(passed) > len(WORDS) + 1 and all(len(each) <= 3 for each in passed)
    assert b"".join(each for each in passed[:-1]) == b"".join(WORDS)  # type: ignore[misc]


def test_one_bit_is_turned() -> None:
    passed = through(Corrupt(nth=2))
    (wrong,) = [(got, word) for got, word in zip(passed, WORDS, strict=False) if got != word]
    assert wrong[1] == b"gamma" and isinstance(wrong[0], bytes)
    assert sum((a ^ b).bit_count() for a, b in zip(*wrong, strict=True)) == 1  # type: ignore[misc,operator]


def test_the_same_seed_meets_the_same_fate() -> None:
    many = units([b"%d" % number for number in range(500)])
    first, again, other = (
        through(Drop(nth=None, chance=0.3, seed=seed), list(many)) for seed in (1, 1, 2)
    )
    assert first == again != other and 300 < len(first) < 400


def test_delay_keeps_the_order_of_what_is_due() -> None:
    late = Delay(2.0, jitter=1.0, seed=3)
    dues = [next(iter(late.take(unit))).due for unit in units()[:-1]]
    assert all(2.0 <= due <= 3.0 for due in dues) and len(set(dues)) == len(dues)


def test_what_is_held_comes_later_with_all_that_is_behind_it() -> None:
    hold = Hold(lambda unit: unit.data == b"gamma")
    assert through(hold) == [b"alpha", b"beta"]
    assert [getattr(item, "data", FIN) for item in hold.let_go()] == [*WORDS[2:], FIN]
    assert through(hold) == [*WORDS, FIN]  # held once


def test_a_gate_swallows_while_it_is_closed() -> None:
    gate = Gate()
    assert through(gate) == [*WORDS, FIN]
    gate.closed = True
    assert through(gate) == [] and gate.swallowed == 26


def test_they_stack() -> None:
    stacked: list[bytes | str] = []
    first, second = Duplicate(nth=0), Cut(14)
    offset = 0
    for item in units():
        for passed in first.take(item):
            if isinstance(passed, Unit):
                passed.offset, offset = offset, offset + len(passed.data)
            stacked += through(second, [passed])
    assert stacked == [b"alpha", b"alpha", b"beta", FIN]
