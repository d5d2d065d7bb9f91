"""Faults inside the process: around a QueuePair (iSER) or a ByteStream (Traditional iSCSI).

Both are stood in for by an object that hands everything on, counts the calls, and raises or does
less than asked where its ``Script`` says so. Nothing but the seam's own contract is used: what is
raised here is what the real thing may raise.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from iserblk.datamover.tcp_stream import ByteStream
from iserblk.errors import Busy, ConnectionLost, IserblkError
from iserblk.rcap import seam

NOT_NOW = -1


class Script:
    """``errors[name, n]``: what the n-th call (from 0) of ``name`` raises; or, with ``chance``,
    any call of the ``fragile`` ones, decided by ``seed``. ``log``: what was raised."""

    def __init__(
        self,
        errors: dict[tuple[str, int], IserblkError] | None = None,
        *,
        chance: float = 0.0,
        fragile: tuple[str, ...] = (),
        make: Callable[[], IserblkError] = lambda: ConnectionLost("the connection was cut"),
        seed: object = 0,
    ) -> None:
        self._errors = errors or {}
        self._chance = chance
        self._fragile = fragile
        self._make = make
        self._random = random.Random(str(seed))
        self.calls: dict[str, int] = {}
        self.log: list[tuple[str, int]] = []

    def at(self, name: str) -> None:
        """A call of ``name`` begins. Raises what is due."""
        count = self.calls.get(name, 0)
        self.calls[name] = count + 1
        error = self._errors.get((name, count))
        if error is None and name in self._fragile and self._random.random() < self._chance:
            error = self._make()
        if error is not None:
            self.log.append((name, count))
            raise error


class FaultyQueuePair:
    """Implements QueuePair around another one. An error in ``post`` or ``progress`` ends the
    connection, as the seam says: the real one is disconnected, and everything raises from then on.
    ``advertise`` may raise Busy and go on."""

    def __init__(self, pair: seam.QueuePair, script: Script) -> None:
        self._pair = pair
        self.script = script
        self._over: IserblkError | None = None
        self._open = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)

    def _ends(self, name: str) -> None:
        if self._over is not None:
            raise self._over
        try:
            self.script.at(name)
        except IserblkError as error:
            self._over = error
            self._pair.disconnect()
            raise

    def advertise(self, buffer: memoryview, rights: int) -> tuple[int, int]:
        # Memory that is short comes back when another STag is retired: so there must be one.
        if self._over is None and self._open:
            self.script.at("advertise")
        made = self._pair.advertise(buffer, rights)
        self._open += 1
        return made

    def retire(self, stag: int) -> bool:
        self._open -= 1
        return self._pair.retire(stag)

    def post(self, requests: list[seam.WorkRequest]) -> None:
        self._ends("post")
        self._pair.post(requests)

    def progress(self, now: float) -> list[seam.Completion]:
        self._ends("progress")
        return self._pair.progress(now)


def memory_short(chance: float, seed: object) -> Script:
    """``advertise`` finds no memory now and then."""
    return Script(chance=chance, fragile=("advertise",), make=lambda: Busy("no memory"), seed=seed)


class FaultyStream:
    """Implements ByteStream around another one: what ``script`` raises in ``send`` and
    ``receive``; and, with ``sips``, sends and receives that move 1 to so many bytes, or, one time
    in four, none yet."""

    def __init__(self, stream: ByteStream, script: Script, sips: int = 0, seed: object = 0) -> None:
        self._stream = stream
        self.script = script
        self._sips = sips
        self._random = random.Random(str(seed))
        self._over: IserblkError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _ends(self, name: str) -> None:
        if self._over is not None:
            raise self._over
        try:
            self.script.at(name)
        except IserblkError as error:
            self._over = error
            self._stream.disconnect()
            raise

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        self._ends("send")
        if not self._sips:
            return self._stream.send(buffers, size)
        if self._random.random() < 0.25:
            return NOT_NOW
        first = next(memoryview(each) for each in buffers if len(each))
        piece = first[: self._random.randint(1, self._sips)]
        return self._stream.send([piece], len(piece))

    def receive(self, buffers: list[memoryview]) -> int:
        self._ends("receive")
        if not self._sips:
            return self._stream.receive(buffers)
        if self._random.random() < 0.25:
            return NOT_NOW
        first = next(each for each in buffers if len(each))
        return self._stream.receive([first[: self._random.randint(1, self._sips)]])
