"""What has come and what is missing at an initiator, over TCP at ErrorRecoveryLevel 1 or more.

``Arrivals`` gives numbered PDUs on in the order of their StatSN: those behind a lost one wait. So
the layer above acknowledges no status that it must not (RFC 7143 section 7.9). ``Gaps`` has the
Data-In and R2Ts of one task that are missing. ``Awaited`` is an R2T that may be. Sans-IO.
"""

from __future__ import annotations

from typing import Final

from iserblk.errors import RemoteProtocolError

MOST_PDUS: Final = 1024  # that wait for a lost one
MOST_BYTES: Final = 4 << 20  # of them
MOST_ASKED: Final = 16  # how often the same is asked for
MOST_DAMAGED: Final = 64  # Data-In of one task, after the first: then its data does not come
# Of one task that are missing at once. All are gone through for each PDU: with 4,096 a target
# could keep one turn of the event loop for 0.7 s.
MOST_RUNS: Final = 256
PATIENCE: Final = 2  # ticks, after which it is asked for again
_DOUBLINGS: Final = 3  # of that, for what may not be missing
_MASK: Final = 0xFFFFFFFF
_HALF: Final = 1 << 31
NOTHING: Final = memoryview(b"")  # a PDU whose task has ended meanwhile


class Gaps:
    """The missing Data-In and R2Ts of one task.

    ``runs``: of DataSN or R2TSN, in order: first, behind the last, and the part of the read that
    the Data-In among them have, from ``low`` up to ``high``. ``asked``: how often they were asked
    for in vain; ``age``: ticks since. ``damaged``: how many came with a wrong digest, after the
    first. ``failed``: they will not come. ``acknowledge``: LUN and Target Transfer Tag of a DataACK
    that waits until nothing is missing. ``rest``: all that follows was asked for, however much
    there is.

    ``sn``: DataSN or R2TSN up to which all have come, at least, with ``moved`` bytes of the read,
    which end at ``placed``."""

    __slots__ = (
        "acknowledge",
        "age",
        "asked",
        "damaged",
        "failed",
        "moved",
        "placed",
        "rest",
        "runs",
        "sn",
    )

    def __init__(self, sn: int, placed: int, moved: int) -> None:
        """All before ``sn`` have come."""
        self.sn = sn
        self.placed = placed
        self.moved = moved
        self.runs: list[tuple[int, int, int, int]] = []
        self.asked = 0
        self.age = 0
        self.damaged = 0
        self.failed = False
        self.rest = False
        self.acknowledge: tuple[bytes, int] | None = None

    def whole(self, sn: int, placed: int, moved: int) -> None:
        """Nothing is missing before ``sn``, and the data that has come is as it should be."""
        self.sn = sn
        self.placed = placed
        self.moved = moved

    def add(self, begin: int, end: int, low: int, high: int) -> None:
        """``begin`` up to ``end``, which are not among the runs yet, are missing."""
        self.runs.append((begin, end, low, high))
        self.runs.sort()

    def fill(self, sn: int, offset: int, size: int) -> bool:
        """``sn`` has come, with ``size`` bytes of the read at ``offset``; an R2T has none. False:
        it was not missing. Raises RemoteProtocolError where other Data-In have these bytes."""
        for at, (begin, end, low, high) in enumerate(self.runs):
            if begin <= sn < end:
                if size and not low <= offset <= high - size:
                    raise RemoteProtocolError(
                        "iSCSI",
                        f"Data-In {sn} of {size} bytes at {offset}: {low} up to {high} are missing",
                    )
                around = [(begin, sn, low, high), (sn + 1, end, low, high)]
                self.runs[at : at + 1] = [run for run in around if run[0] < run[1]]
                if size:
                    self.part(at + (begin < sn), offset, offset + size)
                self.asked = 0
                self.age = 0
                return True
        return False

    def part(self, at: int, offset: int, behind: int) -> None:
        """A Data-In has come that has the bytes from ``offset`` to ``behind``. Data-In come in the
        order of their bytes: so the runs before index ``at`` end there, the others begin there."""
        runs = self.runs
        before = at - 1
        while before >= 0 and runs[before][3] > offset:
            runs[before] = (*runs[before][:3], offset)
            before -= 1
        while at < len(runs) and runs[at][2] < behind:
            begin, end, _, high = runs[at]
            runs[at] = begin, end, behind, high
            at += 1


class Awaited:
    """An R2T that a write waits for. Nothing shows whether it was lost, or whether the target has
    not sent it yet. ``sn``: its R2TSN."""

    __slots__ = ("_age", "_asked", "sn")

    def __init__(self, sn: int) -> None:
        self.sn = sn
        self._age = 0  # ticks since it was waited for, or asked for
        self._asked = 0  # how often

    def due(self) -> bool:
        """A tick: whether to ask for it, in pauses that grow, and not for ever."""
        self._age += 1
        if self._asked == MOST_ASKED or self._age < PATIENCE << min(self._asked, _DOUBLINGS):
            return False
        self._age = 0
        self._asked += 1
        return True


class Arrivals:
    """The numbered PDUs of one connection. ``expected``: the StatSN that comes next, which is the
    ExpStatSN of our PDUs."""

    __slots__ = ("_asked", "_bytes", "_held", "_seen", "age", "expected")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.age = 0  # ticks since the missing ones were asked for
        self._asked = 0  # how often, in vain
        self._seen = expected  # behind the last that is known to exist
        self._held: dict[int, memoryview] = {}
        self._bytes = 0

    @property
    def waiting(self) -> bool:
        """Whether PDUs wait."""
        return bool(self._held)

    def ahead(self, stat_sn: int) -> int:
        """How far ``stat_sn`` is behind the expected one; negative: it came before. Raises
        RemoteProtocolError for a number that cannot be."""
        distance = (stat_sn - self.expected) & _MASK
        if distance >= _HALF:
            return distance - (1 << 32)
        if distance > MOST_PDUS:
            raise RemoteProtocolError("iSCSI", f"StatSN {stat_sn}, expected {self.expected}")
        return distance

    def next(self) -> None:
        """The expected one is given on."""
        self.expected = (self.expected + 1) & _MASK
        if (self._seen - self.expected) & _MASK >= _HALF:
            self._seen = self.expected

    def keep(self, stat_sn: int, message: memoryview) -> None:
        """Keep a copy of a PDU that cannot be given on yet."""
        if stat_sn in self._held:
            return
        if len(self._held) >= MOST_PDUS or self._bytes + len(message) > MOST_BYTES:
            raise RemoteProtocolError("iSCSI", "a lost status does not come")
        self._held[stat_sn] = memoryview(bytearray(message))
        self._bytes += len(message)

    def head(self) -> memoryview | None:
        """The PDU that waits, and is the expected one."""
        return self._held.get(self.expected)

    def take(self) -> None:
        """Let go of the ``head``, and give it on."""
        self._bytes -= len(self._held.pop(self.expected))
        self._asked = 0
        self.next()

    def held(self) -> list[tuple[int, memoryview]]:
        return list(self._held.items())

    def forget(self, stat_sn: int) -> None:
        """Its task has ended: nothing is to be given on."""
        self._bytes -= len(self._held[stat_sn])
        self._held[stat_sn] = NOTHING

    def exists(self, end: int) -> list[tuple[int, int]]:
        """All PDUs up to StatSN ``end`` are known to have been sent. Returns the runs that are
        newly known to be missing: StatSN of the first, and how many."""
        begin = self._seen
        length = (end - begin) & _MASK
        if length >= _HALF or not length:
            return []
        self._seen = end
        return self._missing(begin, length)

    def missing(self) -> list[tuple[int, int]]:
        """All runs that are missing."""
        return self._missing(self.expected, (self._seen - self.expected) & _MASK)

    def ask_again(self) -> list[tuple[int, int]]:
        """A tick: the runs to ask for once more. Raises RemoteProtocolError after too many."""
        runs = self.missing()
        if not runs:
            self.age = self._asked = 0
            return []
        self.age += 1
        if self.age < PATIENCE:
            return []
        self.age = 0
        self._asked += 1
        if self._asked > MOST_ASKED:
            raise RemoteProtocolError("iSCSI", "a lost status does not come")
        return runs

    def _missing(self, begin: int, length: int) -> list[tuple[int, int]]:
        runs: list[tuple[int, int]] = []
        for at in range(length):
            stat_sn = (begin + at) & _MASK
            if stat_sn in self._held:
                continue
            if runs and (runs[-1][0] + runs[-1][1]) & _MASK == stat_sn:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((stat_sn, 1))
        return runs
