"""What may happen to the units of one direction. They stack: each takes what the one before passed.

A behaviour decides by its seed and by positions in the stream (bytes, or units where a framer knows
them), never by the clock or by how TCP cut the bytes: the same seed and the same stream meet the
same faults. What ends or holds a direction is said with the signals below, in the stream's order.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

from tests.support.faults.framing import Unit, mended

FIN = "fin"  # no more bytes this way: the receiving end reads the end of the stream
RST = "rst"  # the whole connection is reset, towards both ends


class Signal:
    """A mark between units: FIN or RST."""

    __slots__ = ("due", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.due = 0.0


Item = Unit | Signal


class Behaviour(Protocol):
    def take(self, item: Item) -> Iterable[Item]:
        """Returns what goes on now in the place of ``item``."""
        ...


class Plain(ABC):
    """Base: signals pass, ``unit`` says what becomes of a unit."""

    def take(self, item: Item) -> Iterable[Item]:
        return [item] if isinstance(item, Signal) else self.unit(item)

    @abstractmethod
    def unit(self, unit: Unit) -> Iterable[Item]: ...


class Delay(Plain):
    """Everything is ``seconds`` late, and up to ``jitter`` more; the order stays."""

    def __init__(self, seconds: float, jitter: float = 0.0, seed: object = 0) -> None:
        self._seconds = seconds
        self._jitter = jitter
        self._random = random.Random(str(seed))

    def unit(self, unit: Unit) -> Iterable[Item]:
        unit.due += self._seconds + self._random.random() * self._jitter
        return [unit]


class Sips(Plain):
    """Cuts units into pieces of 1 to ``most`` bytes."""

    def __init__(self, most: int, seed: object = 0) -> None:
        self._most = most
        self._random = random.Random(str(seed))

    def unit(self, unit: Unit) -> Iterable[Item]:
        at = 0
        while at < len(unit.data):
            size = self._random.randint(1, self._most)
            piece = Unit(unit.data[at : at + size], unit.offset + at)
            piece.due = unit.due
            yield piece
            at += size


class Cut(Plain):
    """``after`` bytes pass. Then ``how``: FIN (truncate, half-close), RST, or "black hole": all
    that follows is swallowed."""

    def __init__(self, after: int, how: str = FIN) -> None:
        self._after = after
        self._how = how
        self._over = False

    def take(self, item: Item) -> Iterable[Item]:
        return [] if self._over else super().take(item)

    def unit(self, unit: Unit) -> Iterable[Item]:
        left = self._after - unit.offset
        if len(unit.data) <= left:
            return [unit]
        self._over = True
        out: list[Item] = [unit.with_data(unit.data[:left])] if left > 0 else []
        if self._how in (FIN, RST):
            out.append(Signal(self._how))
        return out


class _Chosen(Plain):
    """Base: acts on the ``nth`` unit that ``when`` picks (from 0); None: on each by ``chance``."""

    def __init__(
        self,
        when: Callable[[Unit], bool] = lambda unit: True,
        nth: int | None = 0,
        chance: float = 0.0,
        seed: object = 0,
    ) -> None:
        self._when = when
        self._nth = nth
        self._chance = chance
        self._random = random.Random(str(seed))
        self._seen = 0
        self.hit = 0  # how many were chosen

    def unit(self, unit: Unit) -> Iterable[Item]:
        if self._when(unit):
            self._seen += 1
            if self._nth is None:
                chosen = self._random.random() < self._chance
            else:
                chosen = self._seen == self._nth + 1
            if chosen:
                self.hit += 1
                return self.chosen(unit)
        return self.other(unit)

    @abstractmethod
    def chosen(self, unit: Unit) -> Iterable[Item]: ...

    def other(self, unit: Unit) -> Iterable[Item]:
        return [unit]


class Drop(_Chosen):
    """Removes the chosen units."""

    def chosen(self, unit: Unit) -> Iterable[Item]:
        return []


class Duplicate(_Chosen):
    def chosen(self, unit: Unit) -> Iterable[Item]:
        return [unit, unit.with_data(unit.data)]


class Reorder(_Chosen):
    """Puts the unit behind the next unit. On TCP that is only a fault where units are PDUs."""

    _late: Unit | None = None

    def take(self, item: Item) -> Iterable[Item]:
        if isinstance(item, Signal) and self._late is not None:
            late, self._late = self._late, None
            return [late, item]
        return super().take(item)

    def chosen(self, unit: Unit) -> Iterable[Item]:
        if self._late is not None:
            return self.other(unit)
        self._late = unit
        return []

    def other(self, unit: Unit) -> Iterable[Item]:
        late, self._late = self._late, None
        return [unit] if late is None else [unit, late]


class Corrupt(_Chosen):
    """Turns one bit of the unit, or calls ``change`` with its bytes. ``mend``: the CRC
    of an FPDU is made right again, so that only the layers above can tell."""

    def __init__(
        self,
        when: Callable[[Unit], bool] = lambda unit: True,
        nth: int | None = 0,
        chance: float = 0.0,
        seed: object = 0,
        change: Callable[[bytearray], None] | None = None,
        mend: bool = False,
    ) -> None:
        super().__init__(when, nth, chance, seed)
        self._change = change or self._turn
        self._mend = mend

    def _turn(self, data: bytearray) -> None:
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def chosen(self, unit: Unit) -> Iterable[Item]:
        data = bytearray(unit.data)
        self._change(data)
        return [unit.with_data(mended(bytes(data)) if self._mend else bytes(data))]


class CorruptByte(Plain):
    """Turns the bits of ``mask`` in the byte at ``offset`` of the stream, however it is cut."""

    def __init__(self, offset: int, mask: int = 1) -> None:
        self._offset = offset
        self._mask = mask

    def unit(self, unit: Unit) -> Iterable[Item]:
        at = self._offset - unit.offset
        if not 0 <= at < len(unit.data):
            return [unit]
        data = bytearray(unit.data)
        data[at] ^= self._mask
        return [unit.with_data(bytes(data))]


class Hold:
    """Keeps the first unit that ``when`` picks, and everything behind it, until ``open`` is
    set: by ``proxy.release``, which also sends them on. ``units``: what is held."""

    def __init__(self, when: Callable[[Unit], bool]) -> None:
        self._when = when
        self.holding = False
        self.open = False
        self.units: list[Item] = []

    def take(self, item: Item) -> Iterable[Item]:
        if not self.open and not self.holding and isinstance(item, Unit) and self._when(item):
            self.holding = True
        if not self.holding:
            return [item]
        self.units.append(item)
        return []

    def let_go(self) -> list[Item]:
        """Returns what was held; from now on everything passes."""
        self.open, self.holding = True, False
        units, self.units = self.units, []
        return units


class Gate:
    """A black hole with a switch: swallows everything while ``closed``."""

    def __init__(self) -> None:
        self.closed = False
        self.swallowed = 0

    def take(self, item: Item) -> Iterable[Item]:
        if not self.closed:
            return [item]
        if isinstance(item, Unit):
            self.swallowed += len(item.data)
        return []
