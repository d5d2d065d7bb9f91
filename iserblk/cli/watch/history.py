"""LUNs over the last minutes: from one look at the machine to the next come rates, latencies by
time, and events.

Nothing here asks a process or reads a clock; looks come in the order of time. What is kept of a LUN
has a limit: SLOTS sums of SLOT_S seconds each. So has what is kept of the machine: LUNs that are
there, and the last MOST_EVENTS events.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from iserblk.cli.states import BAD, DEAD, lun_state
from iserblk.cli.watch.events import Event, changes
from iserblk.metrics.counting import OPERATIONS
from iserblk.metrics.reading import LunReading, OperationReading, together

SLOT_S = 5.0  # of a column of a heat map
SLOTS = 120
LONGEST_S = 30.0  # between two readings that make rates
RECENT = 2  # slots from which present latencies are: the one that fills, and the one before
MOST_EVENTS = 200

Key = tuple[str, str, str, int]  # the user's id, where, the target's name, the LUN
Operations = Mapping[str, OperationReading]


@dataclass(slots=True, frozen=True)
class Seen:
    """A LUN of one process. ``where``: the device, mount point, …. ``uid``: of the user whose
    process it is, "" for a port. ``at``: monotonic seconds of the reading. ``name``: that users
    have given to the LUN, "" without one."""

    where: str
    uid: str
    pid: int
    at: float
    lun: LunReading
    command: str = ""
    name: str = ""

    @property
    def key(self) -> Key:
        return self.uid, self.where, self.lun.target, self.lun.lun

    @property
    def title(self) -> str:
        """The LUN by its name, or by the names of the standard."""
        return self.name or f"{self.lun.target}/{self.lun.lun}"

    @property
    def exported(self) -> str:
        """Where it is, with the name under which a process with several LUNs exports it."""
        return f"{self.where} {self.lun.name}"


@dataclass(slots=True, frozen=True)
class Silent:
    """A process that has not answered as it should. ``state``: one of those in ``states``."""

    uid: str
    where: str
    state: str


@dataclass(slots=True, frozen=True)
class Look:
    """All that was found at one moment. ``when``: seconds since 1970. ``notes``: what could not be
    looked at, and the like, in words. ``targets``, ``sessions``: how many there are here.
    ``others``: other processes of iserblk that use LUNs and serve no metrics, in words."""

    at: float
    when: float
    luns: tuple[Seen, ...] = ()
    silent: tuple[Silent, ...] = ()
    notes: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    targets: int = 0
    sessions: int = 0


@dataclass(slots=True)
class Slot:
    """What was done in SLOT_S seconds. ``number``: of the slot. ``seconds``: of which readings
    tell. ``away``: there was no connection when a reading was taken."""

    number: int
    seconds: float = 0.0
    away: bool = False
    operations: dict[str, OperationReading] = field(default_factory=dict)

    def add(self, seconds: float, operations: Operations) -> None:
        self.seconds += seconds
        for name, each in operations.items():
            if each.requests or each.errors:
                before = self.operations.get(name)
                self.operations[name] = each if before is None else together([before, each])

    @property
    def every(self) -> OperationReading:
        return together(list(self.operations.values())) if self.operations else NONE


NONE = OperationReading()


@dataclass(slots=True, frozen=True)
class Rates:
    """Between two readings, ``seconds`` apart; 0: there is one reading only."""

    seconds: float = 0.0
    operations: Operations = field(default_factory=lambda: dict.fromkeys(OPERATIONS, NONE))

    def iops(self, operation: str = "") -> float | None:
        """Requests a second, of one operation or of all; None: not known yet."""
        if not self.seconds:
            return None
        return sum(each.requests for each in self._of(operation)) / self.seconds

    def bytes_s(self, operation: str) -> float | None:
        """Bytes a second; None: not known yet."""
        if not self.seconds:
            return None
        return sum(each.bytes for each in self._of(operation)) / self.seconds

    def _of(self, operation: str) -> Iterable[OperationReading]:
        return [self.operations[operation]] if operation else self.operations.values()


class LunHistory:
    """One LUN. ``seen``: the last reading. ``state``: as ``iserblk status`` calls it. ``rates``:
    since the reading before. ``slots``: the last is the one that fills."""

    def __init__(self, seen: Seen, when: float) -> None:
        """``when``: seconds since 1970, as everywhere here."""
        self.seen = seen
        self.state = lun_state(seen.lun)
        self.rates = Rates()
        self.slots: deque[Slot] = deque(maxlen=SLOTS)
        self._away_since: float | None = None  # monotonic seconds
        self._note_state(when)

    @property
    def bad(self) -> bool:
        return self.state in BAD

    def add(self, seen: Seen, when: float) -> list[tuple[str, bool]]:
        """Take the next reading. Returns what has happened since, as ``changes`` does."""
        before, self.seen = self.seen, seen
        self.state = lun_state(seen.lun)
        away_since = self._away_since
        self._note_state(when)
        seconds = seen.at - before.at
        if seen.pid != before.pid:
            self.rates = Rates()
            return [("another process serves it now", False)]
        if seconds <= 0:
            return []
        if seconds > LONGEST_S:  # no user has looked: these are no present rates
            self.rates = Rates()
            return changes(before.lun, seen.lun, None)
        then = before.lun.operations
        added = {name: each.since(then[name]) for name, each in seen.lun.operations.items()}
        self.rates = Rates(seconds, added)
        self._slot().add(seconds, added)
        away_s = None if away_since is None else seen.at - away_since
        return changes(before.lun, seen.lun, away_s)

    def fall_silent(self, state: str) -> bool:
        """Its process does not answer. Returns whether that is new."""
        fresh, self.state = self.state != state, state
        self.rates = Rates()
        return fresh

    def _note_state(self, when: float) -> None:
        lun, at = self.seen.lun, self.seen.at
        if lun.connected:
            self._away_since = None
        else:
            self._slot().away = True
            if lun.away_since:
                self._away_since = at - max(0.0, when - lun.away_since)
            elif self._away_since is None:  # a process of an older version
                self._away_since = at

    def _slot(self) -> Slot:
        number = int(self.seen.at // SLOT_S)
        if not self.slots or self.slots[-1].number < number:
            self.slots.append(Slot(number))
        return self.slots[-1]

    def away_s(self, now: float) -> float | None:
        """For how long there has been no connection; None: there is one."""
        return None if self._away_since is None else max(0.0, now - self._away_since)

    def columns(self, count: int, now: float) -> list[Slot]:
        """The last ``count`` slots up to that of ``now``; those without readings are empty."""
        last = int(now // SLOT_S)
        known = {each.number: each for each in self.slots}
        return [known.get(number) or Slot(number) for number in range(last - count + 1, last + 1)]

    def recent(self, now: float, operation: str = "", slots: int = RECENT) -> OperationReading:
        """The requests of the last ``slots`` slots, of one operation or of all."""
        columns = self.columns(slots, now)
        parts = [
            each
            for slot in columns
            for name, each in slot.operations.items()
            if operation in ("", name)
        ]
        return together(parts) if parts else NONE

    def recent_bytes_s(self, now: float) -> float:
        """Bytes a second of the last slots, read and written."""
        columns = self.columns(RECENT, now)
        seconds = sum(each.seconds for each in columns)
        moved = sum(
            each.bytes
            for slot in columns
            for name, each in slot.operations.items()
            if name in ("read", "write")
        )
        return moved / seconds if seconds else 0.0


class History:
    """All LUNs of the machine. ``look``: the last one. ``began``: ``at`` of the first."""

    def __init__(self) -> None:
        self.look = Look(0.0, 0.0)
        self.luns: dict[Key, LunHistory] = {}
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.began: float | None = None
        self._several: set[tuple[str, str]] = set()  # processes with several LUNs

    def add(self, look: Look) -> None:
        """Take the next look."""
        first = self.began is None
        if first:
            self.began = look.at
        self.look = look
        silent = {(each.uid, each.where): each.state for each in look.silent}
        processes = Counter(each.key[:2] for each in look.luns)
        self._several |= {each for each, count in processes.items() if count > 1}
        here: dict[Key, LunHistory] = {}
        for seen in look.luns:
            known = self.luns.get(seen.key)
            if known is None:
                known = LunHistory(seen, look.when)
                if not first:
                    self._tell(known, "in use", False)
                if known.bad:
                    self._tell(known, known.state, True)
            else:
                if known.state in DEAD:
                    self._tell(known, "answers again", False)
                for words, bad in known.add(seen, look.when):
                    self._tell(known, words, bad)
            here[seen.key] = known
        for key, known in self.luns.items():
            if key in here:
                continue
            if (state := silent.get(key[:2])) is not None:
                here[key] = known
                if known.fall_silent(state):
                    self._tell(known, f"its process: {state}", True)
            else:
                self._tell(known, "not in use any more", False)
        self.luns = here
        self._several &= {key[:2] for key in here}

    def where(self, lun: LunHistory) -> str:
        """Where the LUN is, as it differs from the other LUNs."""
        seen = lun.seen
        return seen.exported if seen.key[:2] in self._several else seen.where

    def _tell(self, lun: LunHistory, words: str, bad: bool) -> None:
        seen = lun.seen
        self.events.append(Event(self.look.when, self.where(lun), seen.title, words, bad))

    def events_of(self, lun: LunHistory) -> list[Event]:
        of = self.where(lun), lun.seen.title
        return [each for each in self.events if (each.where, each.name) == of]

    @property
    def unknown(self) -> list[Silent]:
        """Processes that do not answer, and of which no LUN is known."""
        known = {key[:2] for key in self.luns}
        return [each for each in self.look.silent if (each.uid, each.where) not in known]


# --- order ---------------------------------------------------------------------------------------

# By what LUNs are sorted → the key on the keyboard.
SORTS = {
    "where": "w",
    "throughput": "t",
    "iops": "i",
    "latency": "l",
    "flight": "f",
    "unflushed": "u",
    "state": "s",
}
SORT = "state"  # the default: no LUN that is bad is below those that do not fit


def in_order(history: History, sort: str, reverse: bool = False) -> list[LunHistory]:
    """All LUNs, by ``sort``, one of SORTS: the largest first, names by the alphabet; by the state:
    bad ones first, then the largest throughput."""
    now = history.look.at

    def rank(lun: LunHistory) -> tuple[bool, float, Key]:
        reading = lun.seen.lun
        number = 0.0
        if sort in ("throughput", "state"):
            number = lun.recent_bytes_s(now)
        elif sort == "iops":
            number = float(lun.recent(now).requests)
        elif sort == "latency":
            number = lun.recent(now).percentile_us(99) or 0.0
        elif sort == "flight":
            number = float(reading.in_flight)
        elif sort == "unflushed":
            number = float(reading.unflushed)
        bad = sort == "state" and lun.bad
        uid, where, target, number_of_lun = lun.seen.key
        return not bad, -number, (where, uid, target, number_of_lun)

    return sorted(history.luns.values(), key=rank, reverse=reverse)


# --- latencies by time ---------------------------------------------------------------------------

SHADES = (0.0, 0.01, 0.1, 0.5)  # from this share of a slot's requests on: the shades of a heat map


@dataclass(slots=True, frozen=True)
class HeatMap:
    """``bounds``: of the rows, in µs, the slowest first; None: no bound. ``rows``: by row and
    column 0 (no request), or 1 to len(SHADES): the larger the share of the requests of this time.
    ``away``: by column, whether there was no connection."""

    bounds: tuple[int | None, ...]
    rows: tuple[tuple[int, ...], ...]
    away: tuple[bool, ...]


def heat_map(lun: LunHistory, now: float, columns: int, height: int) -> HeatMap:
    """The latencies of the last ``columns`` slots in at most ``height`` rows, which are as wide as
    the durations that there are demand. Without requests there are no rows."""
    slots = lun.columns(columns, now)
    away = tuple(each.away for each in slots)
    sums = [each.every for each in slots]
    used = [index for each in sums for index, count in enumerate(each.buckets) if count]
    if not used:
        return HeatMap((), (), away)
    low, high = min(used), max(used)
    wide = -(-(high - low + 1) // height)  # buckets of a row
    bounds: list[int | None] = []
    rows = []
    uppers = [bound for bound, _ in NONE.histogram()]
    for first in range(low, high + 1, wide):
        last = min(first + wide, len(uppers)) - 1
        bounds.append(uppers[last])
        rows.append(tuple(_shade(each, first, first + wide) for each in sums))
    return HeatMap(tuple(reversed(bounds)), tuple(reversed(rows)), away)


def _shade(operation: OperationReading, first: int, end: int) -> int:
    count = sum(operation.buckets[first:end])
    if not count:
        return 0
    share = count / operation.requests
    return sum(share >= each for each in SHADES)
