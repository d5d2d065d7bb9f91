"""A world of one disk: an initiator, a target and the network between them, in one thread.

Clients read, write and flush at random; meanwhile connections are lost in all ways that the network
has, the target restarts, with its cache or without, does not answer for a while, and the client
dies with its journal. A ``History`` checks what the disk shows. All of it comes from a ``Case``:
``play`` with the same case does the same again, in the same order. Another host may use the LUN,
too (``other_host``).

Each fault, and the operations of each client, have random numbers of their own: what is left out of
a case changes nothing of what it leaves.
"""

from __future__ import annotations

import marshal
import zlib
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from unittest import mock

import trio

from iserblk.disk.aio import TrioDisk, TrioDiskSet, open_disks
from iserblk.disk.lun import reservation
from iserblk.disk.seam import EXTENT_DATA, FlushClient
from iserblk.errors import (
    Busy,
    CommandTimeout,
    IserblkError,
    LunChanged,
    ReservationConflict,
    ScsiError,
    TransportError,
    WritesLost,
)
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session.session import Session
from iserblk.loop.work import nothing
from iserblk.metrics.target_reading import TargetReading
from iserblk.scsi import opcodes, sense
from iserblk.scsi import status as sam
from iserblk.scsi.cdb import FUA as FUA_BIT
from iserblk.scsi.sense import Sense
from iserblk.target.scsi.device import LogicalUnit
from iserblk.target.seam import Nexus
from iserblk.target.store.store import Extent, OnLoss, no_loss
from iserblk.target.store.volatile import VolatileStore
from tests.model.machine import Media
from tests.model.trouble import FLUSH_FAILED, TroubledDevice, Troubles
from tests.simulation import nbd_face, other_host, queue_face, servers
from tests.simulation.cases import (
    ACROSS,
    ALL,
    ALL_OF_IT,
    BAD,
    BAD_FAULTS,
    BESIDE,
    BLINK,
    BUSY,
    CUT,
    DAMAGE,
    DARK,
    DEFER,
    DIE,
    DISK,
    DROP,
    DURABLE,
    EVICT,
    FAIL,
    FENCES,
    FENCING,
    FUSE,
    GOOD,
    HALVE,
    HAND_OVER,
    HOARDS,
    HOLE,
    INVADES,
    LAST,
    LAZY,
    LESS,
    LIMIT,
    LINGERING_FAULTS,
    LINGERS,
    NBD,
    NBD_FAULTS,
    NONE,
    NUMBERS,
    PASSING,
    QUEUE,
    QUEUE_FAULTS,
    RECOVERED,
    REPLACE,
    REPLACES,
    RESTART,
    SLOW,
    STRIKE,
    SUCCESSION_FAULTS,
    TAKE,
    TAKES,
    USUAL,
    Case,
    are_of,
    faults_of,
    front_of,
)  # fmt: skip
from tests.simulation.faces import (
    DURABLE_AT_ONCE,
    EXTENTS,
    FLUSH,
    FUA,
    FUSE_STATES,
    READ,
    TRIM,
    WRITE,
    ZERO,
    ZERO_FUA,
)
from tests.simulation.history import Hearer, History, Wrong, content
from tests.simulation.loop import WORK_S, SimulatedLoop
from tests.simulation.medium import LingeringMedia
from tests.simulation.nbd_face import NbdFace, OneServer
from tests.simulation.nbd_wire import Gone
from tests.simulation.network import End
from tests.simulation.other_host import OtherHost
from tests.simulation.queue_face import Closed, QueueFace
from tests.simulation.running import Simulation
from tests.simulation.servers import SuccessiveServers
from tests.support.cores import session_of
from tests.support.target_here import serve
from tests.support.until import all_ended, until

if TYPE_CHECKING:
    from tests.simulation.fuse_face import FuseFace

IQN: Final = "iqn.2026-11.example:disk"
INITIATOR: Final = "iqn.2026-11.example:initiator"
PLACES: Final = ("10.0.0.2:3260", "10.0.0.3:3260", "10.0.0.4:3260")
SIZE: Final = 1 << 20  # bytes of the LUN that are used
LARGEST: Final = 16 << 40  # bytes of a LUN
CACHE: Final = 256 << 10  # smaller than the disk: some of it is written back now and then
MOST: Final = 128  # granules of one request
HOT: Final = 24  # granules, to which half of the requests go: they meet there
APART: Final = 4  # one of so many parts of the disk, the last, is the other host's
FOREIGN: Final = 0.1  # of the reads are of that part
PATIENCE_S: Final = 3600.0  # of one request, in made-up time: it would never end
SOON_S: Final = (0.0005, 0.003, 0.2)  # within about so many seconds
LURKS: Final = 0.5  # where more faults follow at once, the latest of them wait for a connection
CUTS_OFF: Final = 0.3  # of the commands that are to tell that the cache is lost
WRITTEN_BACK: Final = 0.3  # of a cache that is lost: a cache may write back at any time
AT_END: Final = 400  # lines of a trace that are kept
SMALL_TRANSFER: Final = 8192  # bytes: the limit of a target with small ones
REFUSED_S: Final = 0.05  # a host that is shut out by another waits so long
LATE_REFUSALS: Final = 7  # see Troubles.refuse
LAZY_S: Final = (0.001, 45.0)  # how long a thread of the target takes while it is LAZY
NEAR_THE_END: Final = 0xFFFFFFFF - 40  # of sequence numbers: they begin anew soon
_SAME_BYTES: Final = 2  # the version of marshal's format in which equal values are equal bytes
_JUNK: Final = b"\xee"
_OTHERS: Final = b"\x5a"  # content of the LUN that takes the place of the clients'
SERIAL: Final = "SIMULATED"

OPERATIONS: Final = {READ: 40, WRITE: 40, FLUSH: 8, FUA: 2, ZERO: 2, TRIM: 2, EXTENTS: 2}

MIXED: Final = {USUAL: {}, HOARDS: {FLUSH: 1}, DURABLE: {FUA: 20}}  # what they have instead

_OPERATIONS: Final = list(OPERATIONS)
_OPERATION_WEIGHTS: Final = {
    mix: list(accumulate((OPERATIONS | others).values())) for mix, others in MIXED.items()
}
# Commands that are about data.
_DATA: Final = frozenset(
    (
        opcodes.READ_16,
        opcodes.WRITE_16,
        opcodes.WRITE_SAME_16,
        opcodes.UNMAP,
        opcodes.SYNCHRONIZE_CACHE_16,
    )
)
_DEFERRED: Final = bytes([sense.FIXED_DEFERRED]) + FLUSH_FAILED[1:]
# What the product goes through, and a world counts.
RECONNECTED, REPLAYED = "session connected again", "command sent again"
BACK, BACK_WITH_JOURNAL = "session lost without a journal", "session lost with a journal"
RECOVERED_CONNECTION, REASSIGNED = "connection lost beside others", "task reassigned"
SNACK, DAMAGED = "SNACK", "PDU lost to its digest"
ABORTED, RESET, RETRIED = "command aborted", "LUN reset", "command tried again"
TOLD, TOLD_OF_FAILURE = "loss told", "failed flush told"
UNHEARD = "loss told, unheard"
FAILED_OVER, TIMED_OUT = "another portal", "io-timeout reached"
DIED = "client dead at work"
TAKEN, HELD_OFF = "taken over by another host", "refused after it was taken over"
THIRD = "third host refused"
TAKING: Final = (TAKEN, HELD_OFF, THIRD)
REPLACED, OTHER_BLOCKS = "another LUN in its place", "its blocks have another size"
TOLD_OF_ANOTHER = "told of another LUN"
REPLACING: Final = (REPLACED, OTHER_BLOCKS, TOLD_OF_ANOTHER)
DROPPED, DEFERRED = "cache lost by what failed", "cache lost, told later"
UNNOTICED = "cache lost before a flush fails"
CUT_OFF = "connection lost with the answer that tells of it"
EVICTED = "what is lost is shown no longer"
OF_BAD_MEDIUM: Final = (DROPPED, DEFERRED, UNNOTICED, CUT_OFF)
WORDLESS = "commands ended without a word"
RESTARTED, RESTARTED_EMPTY = "target restarted", "target restarted without its cache"
STATES: Final = (
    RECONNECTED, BACK, BACK_WITH_JOURNAL, REPLAYED, RECOVERED_CONNECTION, REASSIGNED, SNACK,
    DAMAGED, ABORTED, RESET, RETRIED, TOLD, TOLD_OF_FAILURE, UNHEARD, FAILED_OVER, TIMED_OUT, DIED,
    RESTARTED, RESTARTED_EMPTY, *nbd_face.STATES, *FUSE_STATES, *queue_face.STATES,
    *servers.STATES,    *other_host.STATES,
    *TAKING, *OF_BAD_MEDIUM, EVICTED, WORDLESS, *REPLACING,
)  # fmt: skip
_KINDS: Final = {PASSING: "passing", RECOVERED: "recovered", FAIL: "flush"}


OURS, SILENT, SMALL, LATE = "ours", "silent", "small", "late"
PROFILES: Final = {
    OURS: "says all",
    SILENT: "never tells a new nexus of a loss, as Linux's target",
    SMALL: "has small limits",
    LATE: "refuses long transfers, and WRITE SAME, that it says it has",
}
FOREVER: Final = "forever"
KEY, THIRD_KEY = "0x1e5e", "0x3d"  # of reservations
SUCCESSOR: Final = "iqn.2026-11.example:successor"
AFTER: Final = 3  # operations that a client still tries when its LUN was taken over
VAIN_S: Final = 0.5  # about so long after another
REIGN: Final = (5, 40)  # operations of the host that has taken over
_NOT, _PERHAPS, _DONE = range(3)
_NOBODY: Final = 1 << 63  # versions of what must never be seen


class Settings(NamedTuple):
    """``granule``: bytes, of which requests are multiples; may be less than a ``block``.
    ``between``: operations between two faults, in the mean. ``hearers``: flush clients at a
    time; 1: there is that of the disk alone. ``hesitates``: how often the target needs a
    thread. ``first_number``: CmdSN and StatSN of a session begin there. ``front``: what clients
    use; where it speaks NBD, or is a file, it has as many connections, or open files, as
    ``hearers``. ``other``: what another host does with the LUN meanwhile. ``fault_kinds``: see
    ``faults_of``. ``mix``: of operations. ``again``: how often another fault follows at once.
    ``medium``: that of the target; where it is not good, what the target could not write is
    lost, and told once. ``tas``: "no": commands that another host ends are not answered. ``lies``:
    which part of the LUN they use. ``options``: of the disk."""

    scheme: str
    profile: str
    portals: int
    block: int
    granule: int
    clients: int
    between: int
    hearers: int
    hesitates: float
    first_number: int
    front: str
    other: str
    fault_kinds: str
    mix: str
    again: float
    medium: str
    tas: str
    lies: str
    succession: str
    options: dict[str, str]

    @property
    def keeps(self) -> bool:
        """The client has a journal."""
        return self.options["journal"] != "off"

    @property
    def is_hindered(self) -> bool:
        """What it has in its journal it may not send again: it compares that with the LUN."""
        return self.other in FENCING or self.options["shared"] == "yes"

    @property
    def several(self) -> bool:
        """A session may have several connections."""
        return self.options["connections"] != "1"

    @property
    def has_digests(self) -> bool:
        """Damaged bytes are noticed."""
        words = ("mpa-crc",) if self.scheme == "iser" else ("header-digest", "data-digest")
        return all(self.options[each] in ("yes", "crc32c") for each in words)

    @property
    def patient(self) -> bool:
        return self.options["io-timeout"] == FOREVER

    @property
    def first(self) -> int:
        """Bytes of the LUN in front of the granules."""
        if self.lies == ACROSS:
            return (self.block << 32) - SIZE // 2
        return LARGEST - SIZE if self.lies == LAST else 0

    @property
    def size(self) -> int:
        """Bytes of the LUN."""
        return {ALL_OF_IT: SIZE, ACROSS: self.block << 33, LAST: LARGEST}[self.lies]

    def as_words(self) -> dict[str, str]:
        """As a case has them."""
        values = {key.replace("_", "-"): str(value) for key, value in self._asdict().items()}
        del values["options"]
        return values | self.options

    def kinds(self) -> tuple[str, ...]:
        """The columns of a table to which the world belongs."""
        options = self.options
        return (
            self.profile,
            options["style"] if self.scheme == "iser" else "tcp",
            f"level {options['error-recovery-level']}",
            "shared" if options["shared"] == "yes" else "journal" if self.keeps else "no journal",
            "one portal" if self.portals == 1 else "portals",
            "one connection" if options["connections"] == "1" else "connections",
            "patient" if self.patient else "io-timeout",
            f"front {self.front}" + (", succession" if self.succession == "yes" else ""),
            "one host" if self.other == NONE else f"other {self.other}",
            "TAS" if self.tas == "yes" else "no TAS",
            "one hearer" if self.hearers == 1 else "hearers",
            f"mix {self.mix}",
            f"medium {self.medium}",
            "1 MiB" if self.lies == ALL_OF_IT else f"TiB, {self.lies}",
        )


def draw(chance: Random, given: dict[str, str] | None = None) -> Settings:
    """What a world of this seed is like. ``given``: some of it, as a case has it."""
    words = {
        "scheme": chance.choice(("iscsi", "iser")),
        "profile": chance.choice((OURS, OURS, OURS, SILENT, SILENT, SMALL, LATE)),
        "portals": chance.choice("1123"),
        "clients": chance.choice(("1", "2", "4", "8", "16")),
        "between": chance.choice(("5", "20", "60")),
        "hearers": chance.choice("114"),
        "hesitates": chance.choice(("0.0", "0.1", "0.5")),
        "first-number": chance.choice(("1", str(NEAR_THE_END))),
        "io-timeout": chance.choice((FOREVER, FOREVER, FOREVER, "30", "4")),
        "journal": chance.choice(("56M", "1M", "256k", "64k", "off")),
        "queue-depth": chance.choice(("128", "128", "4", "1")),
        "connections": chance.choice("1123"),
        "error-recovery-level": chance.choice("0012"),
        "immediate-data": chance.choice(("yes", "yes", "no")),
        "max-transfer": chance.choice(("1M", "1M", "16384")),
        "style": chance.choice(("cm", "stream")),
        "mpa-crc": chance.choice(("yes", "no")),
    }
    # (A granule is what a loss leaves whole.)
    words["block"], words["granule"] = chance.choice(
        (("512", "512"), ("4096", "512"), ("4096", "4096"))
    )
    digest = chance.choice(("None", "crc32c"))
    words |= {"header-digest": digest, "data-digest": digest}
    words["front"] = chance.choice((DISK, DISK, NBD))  # (the last: older seeds mean the same)
    words["other"] = chance.choice((NONE, NONE, NONE, BESIDE, FENCES))
    # (TAKES and REPLACES are not drawn: a case asks for them.)
    words["fault-kinds"] = (given or {}).get("fault-kinds", ALL)
    needed = front_of(words["fault-kinds"])
    words["front"] = needed or words["front"]
    words["mix"] = chance.choice((USUAL, USUAL, HOARDS, DURABLE))
    words["again"] = chance.choice(("0.3", "0.3", "0.8"))
    words["medium"] = chance.choice((GOOD, GOOD, BAD))
    words["tas"] = chance.choice(("yes", "no"))
    words["lies"] = chance.choice((ALL_OF_IT, ALL_OF_IT, ACROSS, LAST))
    instead = chance.choice((DISK, FUSE, QUEUE))
    if words["front"] == DISK:
        words["front"] = instead
    words["succession"] = chance.choice(("no", "yes"))
    invades = chance.random() < 0.5
    words["shared"] = chance.choice(("no", "no", "no", "no", "no", "yes"))
    lingers = chance.random() < 0.5
    if words["front"] != NBD or needed or "front" in (given or {}):
        words["succession"] = "no"  # (a case that names its front asks for it)
    if are_of(words["fault-kinds"], SUCCESSION_FAULTS) or (given or {}).get("succession") == "yes":
        words["front"], words["succession"] = NBD, "yes"
    words |= given or {}
    if int(words["granule"]) > int(words["block"]):  # (a part of it might be lost, or land alone)
        of, like = ("granule", "block") if "block" in (given or {}) else ("block", "granule")
        words[of] = words[like]
    if words["front"] != NBD:
        words["succession"] = "no"
    if words["succession"] == "yes":
        words["other"] = NONE
    if words["other"] != NONE:
        words["medium"] = GOOD  # (which of two hosts hears of it is a matter of chance)
    needs = (given or {}).get("medium", GOOD)
    if needs == GOOD and are_of(words["fault-kinds"], BAD_FAULTS):
        needs = BAD
    if are_of(words["fault-kinds"], LINGERING_FAULTS):
        needs = LINGERS
    if needs != GOOD:
        words["medium"], words["other"] = needs, NONE
    elif words["medium"] == BAD and lingers:
        words["medium"] = LINGERS
    if words["other"] == FENCES and invades and "other" not in (given or {}):
        words["other"] = INVADES
    if words["front"] in (NBD, FUSE) and words["other"] != NONE:
        words["other"] = BESIDE  # (they have no error for what a reservation refuses)
    if words["journal"] == "off" or words["other"] not in (NONE, BESIDE):
        words["shared"] = (given or {}).get("shared", "no")
    if words["other"] == INVADES:  # (the rest of a block that one host changes is not the other's)
        words["granule"] = words["block"]
    for key in (
        ("header-digest", "data-digest") if words["scheme"] == "iser" else ("style", "mpa-crc")
    ):
        del words[key]
    numbers = {key: int(words.pop(key)) for key in NUMBERS}
    return Settings(
        scheme=words.pop("scheme"),
        profile=words.pop("profile"),
        hesitates=float(words.pop("hesitates")),
        first_number=int(words.pop("first-number")),
        front=words.pop("front"),
        other=words.pop("other"),
        fault_kinds=words.pop("fault-kinds"),
        mix=words.pop("mix"),
        again=float(words.pop("again")),
        medium=words.pop("medium"),
        tas=words.pop("tas"),
        lies=words.pop("lies"),
        succession=words.pop("succession"),
        **numbers,
        options={"initiator-name": INITIATOR, **words},
    )


@dataclass
class Result:
    """``trace``: a sum over all that has happened, in its order. ``seconds``: of made-up time.
    ``states``: what was reached, and how often (STATES). ``happened``: the numbers of the faults.
    ``begun``: operations."""

    settings: Settings
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    happened: list[int] = field(default_factory=list)
    begun: int = 0
    losses: int = 0
    seconds: float = 0.0
    trace: int = 0


class Trace:
    """A line for each thing that happens. ``print``: gets each. ``values`` are text and numbers."""

    def __init__(self, loop: SimulatedLoop, print_line: Callable[[str], object] | None) -> None:
        self.sum = 0
        self._last: deque[tuple[float, str, tuple[str | float, ...]]] = deque(maxlen=AT_END)
        self._loop = loop
        self._print = print_line

    def __call__(self, words: str, *values: str | float) -> None:
        event = (self._loop.now(), words, values)
        self.sum = zlib.crc32(marshal.dumps(event, _SAME_BYTES), self.sum)
        self._last.append(event)
        if self._print is not None:
            self._print(self._line(*event))

    @property
    def lines(self) -> list[str]:
        """The last ones."""
        return [self._line(*event) for event in self._last]

    @staticmethod
    def _line(when: float, words: str, values: tuple[str | float, ...]) -> str:
        return f"{when:.6f} {words % values}"


class Hesitant:
    """Implements Store over a cache that often would have to wait: then a thread does the work, and
    its end may overtake that of other work. The cache has the bytes of the LUN from ``first`` on;
    what is around them is never used. ``stray``: is told of a call that goes there."""

    def __init__(
        self,
        cache: VolatileStore,
        chance: Random,
        settings: Settings,
        stray: Callable[[BaseException], object],
    ) -> None:
        self._cache = cache
        self._chance = chance
        self._hesitates = settings.hesitates
        self._first = settings.first
        self.size = settings.size
        self._stray = stray
        self.on_loss: OnLoss = no_loss  # this cache has none
        self.flush = cache.flush
        self.usage = cache.usage
        self.close = cache.close

    def measure(self) -> int:
        return self.size

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        at = self._at(offset, len(buffer))
        return not self._waits(nowait) and self._cache.read_into(buffer, at, nowait)

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        at = self._at(offset, len(data))
        return not self._waits(nowait) and self._cache.write(data, at, durable, nowait)

    def unmap(self, offset: int, length: int) -> None:
        self._cache.unmap(self._at(offset, length), length)

    def punch(self, offset: int, length: int) -> None:
        self._cache.punch(self._at(offset, length), length)

    def zero(self, offset: int, length: int) -> None:
        self._cache.zero(self._at(offset, length), length)

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        """All around is a hole, for which a client may ask: it tries the command at LBA 0."""
        if not self._first <= offset < self._first + SIZE:
            return [(offset, length, False)]
        length = min(length, self._first + SIZE - offset)
        found = self._cache.extents(offset - self._first, length, limit)
        return [(self._first + at, size, is_data) for at, size, is_data in found]

    def prefetch(self, offset: int, length: int) -> None:
        self._cache.prefetch(self._at(offset, length), length)

    def _at(self, offset: int, length: int) -> int:
        """Raises Wrong, which the target takes for an error of its own."""
        at = offset - self._first
        if not 0 <= at <= SIZE - length:
            problem = Wrong(f"{length} bytes at {offset}, where no client has asked for any")
            self._stray(problem)
            raise problem
        return at

    def _waits(self, nowait: bool) -> bool:
        return nowait and self._chance.random() < self._hesitates


class _Troubles(Troubles):
    """``busy_until``: the target takes no command before that time. ``drops``: flushes, or writes
    with FUA, that will fail: each loses what is in the cache, and is the only one that tells of it.
    ``is_deferred``: the next command will tell that the cache is lost. ``is_cut_off``: the next of
    these answers is lost with its connection. ``tells``: is called with DROPPED or DEFERRED when
    one of these does."""

    def __init__(
        self, seed: object, now: Callable[[], float], tells: Callable[[str], None]
    ) -> None:
        super().__init__(seed)
        self._now = now
        self._tells = tells
        self.busy_until = 0.0
        self.drops = 0
        self.is_deferred = False
        self.is_cut_off = False

    def instead_of(self, cdb: bytes) -> tuple[int, bytes] | None:
        if self._now() < self.busy_until:
            return sam.BUSY, b""
        instead = super().instead_of(cdb)
        if instead is not None or cdb[0] not in _DATA:
            return instead
        if self.is_deferred:
            self.is_deferred = False
            self._tells(DEFERRED)
            return sam.CHECK_CONDITION, _DEFERRED
        waits = cdb[0] == opcodes.SYNCHRONIZE_CACHE_16 or (
            cdb[0] == opcodes.WRITE_16 and cdb[1] & FUA_BIT
        )
        if self.drops and waits:
            self.drops -= 1
            self._tells(DROPPED)
            return sam.CHECK_CONDITION, FLUSH_FAILED
        return None

    def forget(self) -> None:
        super().forget()
        self.busy_until = 0.0
        self.drops = 0
        self.is_deferred = self.is_cut_off = False

    def take_time(self) -> None:
        """The loop does."""


class _Device(TroubledDevice):
    """``wordless``: called when commands of a nexus are ended, and not answered."""

    wordless: Callable[[], object]

    def end_tasks_of_others(self, lun: int, by: Nexus, ended: Callable[[], None]) -> int:
        if not self.siblings(by)[0].tas:
            for nexus in self._nexuses:
                if nexus is not by and nexus.tasks.tasks_of(lun):
                    self.wordless()
        return super().end_tasks_of_others(lun, by, ended)


class _SilentDevice(_Device):
    def greeting(self, _nexus: Nexus, _lun: int) -> int:
        return 0


class Target:
    """The target, which may end in the middle of its commands. What is on ``media`` stays, and
    reservations do."""

    def __init__(self, world: World) -> None:
        self._lingering = LingeringMedia(SIZE) if world.settings.medium == LINGERS else None
        self.media = self._lingering or Media(SIZE)
        self._world = world
        self.chance = world.chance
        self._another: Media | None = None  # in place of the medium of the clients
        self._serial, self._block = SERIAL, world.settings.block
        self._cache = self._new_cache()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        self.troubles = _Troubles(self.chance.random(), world.loop.now, self._tells)
        self.read: Callable[[], TargetReading]
        self._device: _Device
        self._reservations: bytes | None = None

    async def start(self) -> None:
        await self._world.nursery.start(self._run)

    async def _run(self, task_status: trio.TaskStatus[None]) -> None:
        unit = LogicalUnit(
            self._cache,
            serial=self._serial,
            block=self._block,
            write_cache=True,
            tas=self._world.settings.tas == "yes",
        )
        unit.reservations.can_persist = True
        if self._reservations is not None:
            unit.reservations.restore(self._reservations)

        async def watch(read: Callable[[], TargetReading]) -> None:
            self.read = read

        profile = self._world.settings.profile
        if profile == SMALL:
            most = SMALL_TRANSFER // unit.block
            unit.max_transfer_blocks = most
            unit.limits = unit.limits._replace(
                max_transfer_length=most,
                optimal_transfer_length=most,
                max_unmap_lba_count=most,
                max_write_same_length=most,
            )
        made = _SilentDevice if profile == SILENT else _Device
        if profile == LATE:
            self.troubles.refuse(LATE_REFUSALS)

        def device(*words: Any) -> _Device:
            self._device = made(self.troubles, *words)
            self._device.wordless = self._wordless
            return self._device

        self._ended = trio.Event()
        with trio.CancelScope() as self._scope:
            await serve(
                PLACES[: self._world.settings.portals],
                IQN,
                {0: unit},
                lambda _url: task_status.started(),
                make_device=device,
                watch=watch,
            )
        self._reservations = unit.reservations.snapshot()
        self._ended.set()

    def _wordless(self) -> None:
        self._world.count(WORDLESS)
        self._world.trouble_begins()  # a write with FUA, of which nobody hears, may have failed

    async def stop(self, loses: bool) -> None:
        """``loses``: its cache, but for what was written back before."""
        self._world.cut_all()
        self._scope.cancel()
        await self._ended.wait()
        if loses:
            self._lose()
            self.evict()
            self._cache = self._new_cache()

    def replace(self, serial: str, block: int) -> None:
        """From the next start on another LUN is there, with a content of its own."""
        self._another = Media(SIZE)
        self._another.write(memoryview(_OTHERS * SIZE), 0, True, False)
        self._cache = self._new_cache()
        self._serial, self._block = serial, block

    def put_back(self) -> None:
        """The LUN of the clients is there again. Raises Wrong."""
        assert self._another is not None
        self._cache.flush()
        if self._another.content != _OTHERS * SIZE:
            raise Wrong("what was written for the LUN that was there before is on another")
        self._another = None
        self._cache = self._new_cache()
        self._serial, self._block = SERIAL, self._world.settings.block

    def _lose(self) -> None:
        chance = self.chance
        with self.media.losing(lambda: chance.random() >= WRITTEN_BACK):
            self._cache.flush()

    def blink(self) -> None:
        """Lose the content of the cache, and tell of it; connections stay."""
        self._lose()
        self.evict()
        self._device.reset()

    def _tells(self, state: str) -> None:
        self._world.count(state)
        if state == DROPPED:
            self.drop()
        if self.troubles.is_cut_off:
            self.troubles.is_cut_off = False
            self._world.cut_off()

    def drop(self, unnoticed: bool = False) -> None:
        """Lose the content of the cache, and tell nobody. ``unnoticed``: what fails then tells of
        it later."""
        self._world.trace("the target could not write what was in its cache")
        if unnoticed:
            self._world.count(UNNOTICED)
        self._lose()
        self._world.struck(in_place=True, unnoticed=unnoticed)

    def evict(self, share: float = 1.0) -> None:
        """What the target shows still and has lost it may show no longer: ``share`` of that."""
        if self._lingering is not None and self._lingering.evict(self.chance, share):
            self._world.evicted()

    def _new_cache(self) -> Hesitant:
        cache = VolatileStore(self._another or self.media, CACHE)
        return Hesitant(cache, self.chance, self._world.settings, self._world.simulation.fail)


class _LockElsewhere:
    """Instead of HostLock: each host of the world is a machine of its own."""

    def __init__(self, what: str) -> None: ...

    def close(self) -> None: ...


class World:
    """``play`` runs it, once."""

    def __init__(self, case: Case, print_line: Callable[[str], object] | None = None) -> None:
        self.case = case
        self.chance = Random(f"target {case.seed} {case.order}")
        self.settings = draw(Random(f"settings {case.seed}"), dict(case.settings))
        first = self.settings.first_number
        simulation = self.simulation = Simulation(f"{case.seed} {case.order}", first)
        self.loop = simulation.loop
        self.network = simulation.network
        self.trace = self.network.trace = Trace(self.loop, print_line)
        granule = self.settings.granule
        self.history = History(
            SIZE // granule,
            granule,
            self.settings.keeps,
            self.settings.is_hindered,
            self.settings.several,
        )
        self._histories = [self.history]
        self._granules = SIZE // granule  # of which the clients use each
        self._other: OtherHost | None = None
        if self.settings.other in (BESIDE, *FENCING):
            self._other = self._other_host()
            self._histories.append(self._other.history)
        self.network.on_line = self._is_connected
        self._connected = trio.Event()  # again and again
        self.nursery: trio.Nursery
        self.result = Result(self.settings)
        self._under_way: Counter[str] = Counter()
        self._clients: dict[FlushClient, Hearer] = {}
        self._asked: dict[int, tuple[float, str, int, int]] = {}  # of each client: since when, what
        self._lives = 0
        self._faults = 0  # that the seed has planned so far
        self._next_fault = 0
        self._fault_is_due = trio.Event()
        self._over = trio.Event()
        self._reconnects = 0
        self._portal = ""
        self._taken = _NOT  # whether another host takes the LUN over
        self._disk: TrioDisk
        self._first: TrioDisk  # of this life
        self._face: NbdFace | FuseFace | None = None
        self._queue: QueueFace | None = None
        self._servers: SuccessiveServers | None = None
        self._strikes: trio.Nursery
        self._restarts: trio.Event | None = None  # the target is being restarted
        self._give_up: Callable[[], object] = nothing

    @property
    def _is_done(self) -> bool:
        return self.result.begun >= self.case.operations

    def play(self) -> Result:
        """Raises Wrong, Stuck, and what the product raises where it must not."""
        with mock.patch.object(reservation, "HostLock", _LockElsewhere):
            self.simulation.run(self._body)
        result = self.result
        result.trace = self.trace.sum
        result.seconds = self.loop.now()
        result.losses = self.history.losses
        return result

    async def _body(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self._target = Target(self)
            await self._target.start()
            async with trio.open_nursery() as others:
                if self._other is not None:
                    await others.start(self._other.run)
                while not self._is_done:
                    await self._life()
                    if self.settings.other == REPLACES and self._taken:
                        await self._target.stop(False)
                        self._target.put_back()
                        await self._target.start()
                    elif not self._taken:
                        await self._restart(self.chance, True)
                    self.history.died(self.loop.now())
                    if self._other is not None:
                        self._other.forgotten()
                await self._life()  # reads all that is there
                if self._other is not None:
                    self._other.end()
            await self._check_target()
            await self._target.stop(False)
            self.nursery.cancel_scope.cancel()
        self._check_end()

    def place(self, at: int) -> int:
        """Where granule ``at`` lies on the LUN, in bytes."""
        return self.settings.first + at * self.settings.granule

    def disturbed(self) -> None:
        for each in self._histories:
            each.disturbed(self.loop.now())

    def _is_connected(self) -> None:
        self.disturbed()
        self._connected.set()
        self._connected = trio.Event()

    def trouble_begins(self) -> None:
        for each in self._histories:
            each.trouble()

    def struck(self, in_place: bool = False, unnoticed: bool = False) -> None:
        for each in self._histories:
            each.struck(self.loop.now(), self._target.media.content, in_place, unnoticed)

    def cut_off(self) -> None:
        """All connections are lost, with the answer that the target is about to send."""
        self.count(CUT_OFF)
        self.cut_all()
        self.disturbed()

    def evicted(self) -> None:
        self.count(EVICTED)
        self.trace("the target shows some of what it has lost no longer")
        for each in self._histories:
            each.evicted()

    @property
    def _urls(self) -> list[str]:
        places = PLACES[: self.settings.portals]
        return [f"{self.settings.scheme}://{place}/{IQN}/0" for place in places]

    def _other_host(self) -> OtherHost:
        granule = self.settings.granule
        self._granules -= SIZE // granule // APART
        # It waits for ever, and keeps all: whatever it is told is wrong.
        options = self.settings.options | {
            "initiator-name": other_host.INITIATOR,
            "io-timeout": FOREVER,
            "journal": self.settings.options["journal"].replace("off", "256k"),
            "shared": "no",
        }
        return OtherHost(
            self,
            self._urls,
            options,
            range(self._granules, SIZE // granule),
            granule,
            self.settings.other in FENCING,
            self.settings.other == INVADES,
            self.settings.several,
            f"{self.case.seed} {self.case.order}",
        )

    # -- a client's life --------------------------------------------------------------------------

    async def _life(self) -> None:
        """Of one client with its journal, from the opening of the disk to its death."""
        self._over = trio.Event()
        self._reconnects = 0
        self._taken = _NOT
        self._lives += 1
        self._clients.clear()
        self._forget_troubles()
        if self.settings.succession == "yes":
            await self._life_of_servers()
            return
        async with AsyncExitStack() as stack:
            async with nullcontext() if self._other is None else self._other.door:
                opened = await stack.enter_async_context(
                    open_disks(self._urls, self._options(INITIATOR, KEY))
                )
            disk = opened.disks[opened.default]
            assert isinstance(disk, TrioDisk)
            assert isinstance(disk.driver, TrioDriver)
            session = disk.driver.session
            self._portal = session.portal
            self._first = disk
            stack.callback(self._count, disk, session)
            self.trace("the disk is open")
            await self._everything(disk)
            if not self._is_done:
                if self.settings.front == NBD:
                    await self._through_nbd(opened, disk)
                elif self.settings.front == FUSE:
                    await self._through_fuse(opened, disk)
                elif self.settings.front == QUEUE:
                    await self._through_queue(opened, disk)
                else:
                    await self._use(opened.ending.give_up, disk)
                self._forget_troubles(told=False)
                if self._over.is_set() or self._taken:
                    return
                await self._everything(disk)
            with trio.fail_after(PATIENCE_S):
                while not await self._flush(disk):
                    pass
            if self._under_way.total():
                raise Wrong(f"requests are under way: {self._under_way}")
            with trio.fail_after(PATIENCE_S):
                await all_ended(session.queue)
            self.trace("the disk is closed")

    def _options(self, name: str, key: str) -> dict[str, str]:
        options = self.settings.options | {"initiator-name": name}
        if self.settings.other == TAKES:
            options |= {"reserve": "exclusive", "reserve-key": key}
        return options

    async def _use(self, give_up: Callable[[], object], disk: TrioDisk) -> None:
        """By all clients, with all faults. ``give_up``: nothing comes from the client any more."""
        self._give_up = give_up
        async with trio.open_nursery() as nursery:
            self._strikes = nursery
            nursery.start_soon(self._trouble)
            nursery.start_soon(self._watch_clients)
            async with trio.open_nursery() as clients:
                for number in range(self.settings.clients):
                    clients.start_soon(self._client, disk, number)
            nursery.cancel_scope.cancel()

    async def _through_nbd(self, opened: TrioDiskSet, disk: TrioDisk) -> None:
        self._disk = disk
        self.history.end_hearer(self.history.first)  # nobody but the connections flushes
        seed = f"{self.case.seed} {self._lives} {self.case.order}"
        self._face = face = NbdFace(self, OneServer(disk), self.settings.hearers, seed)
        async with face.serving():
            await self._use(opened.ending.give_up, disk)
        self._face = None

    async def _life_of_servers(self) -> None:
        """As ``_life``, of NBD servers that succeed each other, each with a session of its own."""
        history = self.history
        history.end_hearer(history.first)  # nobody but the client of all connections flushes
        seed = f"{self.case.seed} {self._lives} {self.case.order}"
        options = self._options(INITIATOR, KEY)
        servers = self._servers = SuccessiveServers(self, self._urls, options, seed)
        face = self._face = NbdFace(self, servers, self.settings.hearers, seed)
        begun = self.loop.now()
        hearer: Hearer | None = None
        async with face.serving():
            await self._everything(servers.disk)
            if not self._is_done:
                await self._use(nothing, servers.disk)
                self._forget_troubles(told=False)
                if not self._over.is_set():
                    await self._everything(servers.disk)
            if not self._over.is_set():
                begun, hearer = self.loop.now(), history.begin_hearer()
        self._face = self._servers = None
        if hearer is None:
            return
        if servers.failed:
            self.trace("the last flush: %s", servers.failed[0])
            self.result.states[TOLD] += 1
            failed = self.may_fail(FLUSH)
            history.end_flush_with_loss(begun, self.loop.now(), failed, hearer, False)
        else:
            history.end_flush(begun, self.loop.now(), hearer)
        if self._under_way.total():
            raise Wrong(f"requests are under way: {self._under_way}")
        self.trace("the last server has ended")

    # What the servers ask of their world.

    def serves(self, disk: TrioDisk) -> None:
        session = session_of(disk)
        self._disk = self._first = disk
        self._portal = session.portal
        self._reconnects = session.counts.reconnects

    def served(self, disk: TrioDisk) -> None:
        self._count(disk, session_of(disk))

    def begin_strike(self, chance: Random) -> None:
        kind = chance.choice((CUT, CUT, HALVE, RESTART, STRIKE, STRIKE, BLINK, FAIL, DIE))
        kinds, _ = faults_of(NBD, NONE, GOOD, self.settings.fault_kinds, True)
        if kind not in kinds or self._over.is_set():
            return
        self._strikes.start_soon(self._strike_beside, kind, chance)

    async def _strike_beside(self, kind: str, chance: Random) -> None:
        self.result.faults[kind] += 1
        self.trace("beside a hand-over: %s", kind)
        if kind == DIE:
            self._die()
            return
        with trio.CancelScope(shield=True):
            await self._strike(kind, chance)

    async def _through_fuse(self, opened: TrioDiskSet, disk: TrioDisk) -> None:
        from tests.simulation.fuse_face import FuseFace  # noqa: PLC0415 (needs pyfuse3)

        self._disk = disk
        self.history.end_hearer(self.history.first)  # nobody but the open files flushes
        assert opened.ending is not None
        seed = f"{self.case.seed} {self._lives} {self.case.order}"
        face = self._face = FuseFace(self, disk, opened.ending, self.settings.hearers, seed)
        async with face.serving():
            await self._use(opened.ending.give_up, disk)
        self._face = None

    async def _through_queue(self, opened: TrioDiskSet, disk: TrioDisk) -> None:
        self._queue = QueueFace(self, disk)
        async with self._queue.serving():
            await self._use(opened.ending.give_up, disk)
        self._queue = None

    def _requests(self, disk: TrioDisk) -> TrioDisk | QueueFace:
        """By what a client reads and writes."""
        return disk if self._queue is None or disk is not self._first else self._queue

    # What a face asks of its world.

    def count(self, state: str) -> None:
        self.result.states[state] += 1

    def look(self) -> None:
        self._look(self._disk)

    def may_fail(self, kind: str) -> bool:
        return (
            not self.settings.patient
            or self._flushes_fail
            or (self._may_lose and kind in (FUA, WRITE, ZERO, ZERO_FUA, TRIM))
        )

    def is_over(self) -> bool:
        return self._over.is_set()

    def _forget_troubles(self, told: bool = True) -> None:
        """``told``: the client is a new one, or knows all: else the target tells it still that its
        cache is lost, or will be."""
        troubles = self._target.troubles
        drops, deferred = troubles.drops, troubles.is_deferred
        troubles.forget()
        if not told:
            troubles.drops, troubles.is_deferred = drops, deferred
        self.loop.work_s = WORK_S
        if self.settings.profile == LATE:
            troubles.refuse(LATE_REFUSALS)

    def _count(self, disk: TrioDisk, session: Session) -> None:
        """What the session has gone through."""
        if self._servers is None or disk is self._disk:
            self._look(disk)
        assert isinstance(disk.driver, TrioDriver)
        ladder = disk.driver.ladder
        for state, times in (
            (RECONNECTED, session.counts.reconnects),
            (REPLAYED, session.counts.replayed),
            (RECOVERED_CONNECTION, session.counts.recovered),
            (REASSIGNED, session.counts.reassigned),
            (SNACK, session.counts.losses.snacks),
            (DAMAGED, session.counts.losses.damaged),
            (ABORTED, ladder.aborted),
            (RESET, ladder.resets),
            (RETRIED, disk.core.metrics.retries),
        ):
            self.result.states[state] += times

    async def _everything(self, disk: TrioDisk) -> None:
        for at in range(0, self._granules, MOST):
            with trio.fail_after(PATIENCE_S):
                while not await self._read(disk, at, min(MOST, self._granules - at)):
                    pass

    async def _client(self, disk: TrioDisk, number: int) -> None:
        chance = Random(f"client {self.case.seed} {self._lives} {number}")
        weights = _OPERATION_WEIGHTS[self.settings.mix]
        result, tries = self.result, 0
        while not self._is_done and not self._over.is_set():
            result.begun += 1
            if result.begun >= self._next_fault:
                self._fault_is_due.set()
            if self._other is not None:
                self._other.go_on()
            kind = chance.choices(_OPERATIONS, cum_weights=weights)[0]
            granule = self.settings.granule
            if chance.random() < 0.5:
                count = chance.randint(1, HOT // 2)
                at = chance.randrange(HOT - count + 1)
            else:
                count = chance.randint(1, min(chance.choice((1, 16, MOST)), MOST * 512 // granule))
                at = chance.randrange(self._granules - count + 1)
            if kind == ZERO and self.settings.mix == DURABLE and at & 2:
                kind = ZERO_FUA
            if self._taken == _DONE:
                tries += 1
                await self._try_in_vain(disk, number, kind, at, count)
                if tries == AFTER:
                    return
                await trio.sleep(chance.expovariate(1 / VAIN_S))
                continue
            result.operations[kind] += 1
            self._under_way[kind] += 1
            began = self.loop.now()
            self.trace("client %d begins: %s, %d at %d", number, kind, count, at)
            self._asked[number] = began, kind, at, count
            try:
                if self._face is not None:
                    await self._face.operate(chance, kind, at, count)
                else:
                    await self._operate(disk, chance, kind, at, count)
            except (IserblkError, Gone) as error:
                if self._over.is_set():
                    return  # it is dead
                if not self._taken:
                    raise
                self.trace("it is taken over: %s", str(error))
                await trio.sleep(REFUSED_S)
            finally:
                del self._asked[number]
                self._under_way[kind] -= 1
            self.simulation.progress()
            self.trace("client %d: %s, %d at %d, since %.6f", number, kind, count, at, began)
            if chance.random() < 0.05:
                await trio.sleep(chance.expovariate(20.0))

    async def _watch_clients(self) -> None:
        while True:
            await trio.sleep(PATIENCE_S)
            for began, kind, at, count in self._asked.values():
                if began <= self.loop.now() - PATIENCE_S:
                    raise Wrong(f"{kind} of {count} blocks at {at} never ends")

    async def _operate(
        self, disk: TrioDisk, chance: Random, kind: str, at: int, count: int
    ) -> None:
        if kind == READ:
            if self._other is not None and chance.random() < FOREIGN:
                at = min(at + self._granules, SIZE // self.settings.granule - count)
            await self._read(disk, at, count)
        elif kind == FLUSH:
            await self._flush(disk, chance)
        elif kind == EXTENTS:
            await self._extents(disk, at, count)
        else:
            await self._change(disk, kind, at, count)

    def _is_refused(self, error: IserblkError, begun: float, reads: bool) -> bool:
        """The other host has, or had, shut ours out since ``begun``."""
        other = self._other
        if other is None or not isinstance(error, ReservationConflict):
            return False
        if not (other.reads if reads else other.writes).perhaps(begun):
            return False
        other.heard()
        self.result.states[other_host.REFUSED_READ if reads else other_host.REFUSED] += 1
        self.trace("the reservation of the other host: %s", str(error))
        return True

    def _is_shut_out(self, begun: float, reads: bool = False) -> bool:
        """All the time since ``begun``."""
        other = self._other
        if other is None:
            return False
        return (other.reads if reads else other.writes).surely(begun, self.loop.now())

    def _look(self, disk: TrioDisk) -> None:
        """Whether the disk has been connected again: only then it takes changes for lost."""
        session = session_of(disk)
        if session.counts.reconnects != self._reconnects:
            self._reconnects = session.counts.reconnects
            self.disturbed()
            self.history.heard()
            self.result.states[BACK_WITH_JOURNAL if self.settings.keeps else BACK] += 1
        if session.portal != self._portal:
            self._portal = session.portal
            self.result.states[FAILED_OVER] += 1

    def _is_late(self, error: IserblkError) -> bool:
        """A request that has had its time ends with this."""
        if self.settings.patient or not isinstance(
            error, (TransportError, CommandTimeout, ScsiError)
        ):
            return False
        self.result.states[TIMED_OUT] += 1
        self.trace("it has had its time: %s", str(error))
        return True

    async def _read(self, disk: TrioDisk, at: int, count: int) -> bool:
        """Returns whether it has succeeded."""
        size = self.settings.granule
        buffer = bytearray(count * size)
        foreign = at >= self._granules
        history = self._histories[foreign]
        read = history.begin_read(at, self.loop.now(), foreign)
        try:
            await self._requests(disk).read_into(memoryview(buffer), self.place(at))
        except IserblkError as error:
            if isinstance(error, Closed) or self._falls(disk):
                history.end_read(read, None, self.loop.now())
                return False
            refused = self._is_refused(error, read.begun, True)
            if not refused and (self._over.is_set() or not self._is_late(error)):
                raise
            history.end_read(read, None, self.loop.now())
            if refused:
                await trio.sleep(REFUSED_S)
            return False
        if _OTHERS * 16 in buffer:
            raise Wrong("a read shows another LUN")
        if self._is_taken(disk):
            return False
        if self._is_shut_out(read.begun, True):
            raise Wrong("a read is carried out, and another host has reserved the LUN")
        self._look(disk)
        self.simulation.progress()
        history.end_read(read, bytes(buffer), self.loop.now())
        return True

    async def _change(self, disk: TrioDisk, kind: str, at: int, count: int) -> None:
        size = self.settings.granule
        writes = kind in (WRITE, FUA)
        change = self.history.begin_change(
            at, count, self.loop.now(), zeroes=not writes, keeps=kind == TRIM
        )
        done = True
        try:
            if writes:
                self.trace("version %d, %d at %d", change.version, count, at)
                buffer = bytearray(self.history.data(change))
                try:
                    view = memoryview(buffer)
                    await self._requests(disk).write(view, self.place(at), kind == FUA)
                finally:
                    buffer[:] = _JUNK * len(buffer)  # it is the caller's again
            elif kind in (ZERO, ZERO_FUA):
                fua = kind == ZERO_FUA
                await disk.zero(self.place(at), count * size, may_trim=bool(at & 1), fua=fua)
            else:
                await disk.trim(self.place(at), count * size)
        except IserblkError as error:
            if isinstance(error, Closed) or self._falls(disk):
                self.history.end_change(change, self.loop.now(), False)
                if kind in DURABLE_AT_ONCE:
                    self.history.given_up()
                return
            if self._is_refused(error, change.begun, False):
                self.history.end_change(change, self.loop.now(), False)
                if self._is_shut_out(change.begun):
                    self.history.never(change)
                await trio.sleep(REFUSED_S)
                return
            over = self._over.is_set()
            if over or not (self._may_fail(error, kind, change.begun) or self._is_late(error)):
                self.history.end_change(change, self.loop.now(), False)
                raise
            self.trace("a change fails: %s", str(error))
            done = False
        if self._is_taken(disk):
            return
        if done and kind != TRIM and self._is_shut_out(change.begun):
            raise Wrong(f"{kind} is carried out, and another host has reserved the LUN")
        self._look(disk)
        self.history.end_change(change, self.loop.now(), done, kind in DURABLE_AT_ONCE)

    async def _flush(self, disk: TrioDisk, chance: Random | None = None) -> bool:
        """Returns whether it has not run out of time. ``chance``: draws who flushes, if there are
        several; None: it is the last flush of a disk."""
        hearer, client = self.history.first, None
        if chance is not None and self.settings.hearers > 1:
            hearer, client = self._one_of(disk, chance)
        elif self.settings.front in (NBD, FUSE):  # the last one, for which the server asks
            hearer, client = self.history.begin_hearer(), disk.new_client()
        begun = self.loop.now()
        try:
            await disk.flush(client)
        except IserblkError as error:
            if self._falls(disk):
                return True
            if not error.losses and self._is_refused(error, begun, False):
                await trio.sleep(REFUSED_S)
                return False
            if not error.losses and not self._has_failed(error):
                if not self._over.is_set() and self._is_late(error):
                    return False
                raise
            self._look(disk)
            self.trace("a flush tells of a loss: %s", str(error))
            failed = self._has_failed(error) or DEFER in self.result.faults
            self.result.states[TOLD_OF_FAILURE if failed else TOLD] += 1
            hears = True
            if client is not None and error.losses:
                hears = chance is None or (client in self._clients and chance.random() < 0.8)
                if hears:
                    client.told(error.losses)
                else:
                    self.result.states[UNHEARD] += 1
            self.history.end_flush_with_loss(begun, self.loop.now(), failed, hearer, hears)
        else:
            if not self._is_taken(disk):
                self.history.end_flush(begun, self.loop.now(), hearer)
        return True

    def _one_of(self, disk: TrioDisk, chance: Random) -> tuple[Hearer, FlushClient]:
        """Who flushes: one that there is, or a new one, for which another ends perhaps."""
        if not self._clients or chance.random() < 0.1:
            if len(self._clients) >= self.settings.hearers:
                client = chance.choice(list(self._clients))
                self.trace("a flush client ends")
                self.history.end_hearer(self._clients.pop(client))
                client.ended()
            client = disk.new_client()
            self._clients[client] = self.history.begin_hearer()
            self.trace("a flush client begins")
        client = chance.choice(list(self._clients))
        return self._clients[client], client

    def _may_fail(self, error: IserblkError, kind: str, begun: float) -> bool:
        """A change that began at ``begun``. That it is lost, only one with FUA tells: others leave
        that to a flush; and no change pays for what was lost before it."""
        return self._has_failed(error) or (
            isinstance(error, WritesLost)
            and kind in DURABLE_AT_ONCE
            and (self._may_lose or self._flushes_fail)
            and not (self.settings.other == NONE and self.history.is_quiet(begun))
        )

    @property
    def _may_lose(self) -> bool:
        """The client does not write again all that the target has lost."""
        return not self.settings.keeps or self.settings.is_hindered

    @property
    def _flushes_fail(self) -> bool:
        """There may have been some that the target could not carry out."""
        return FAIL in self.result.faults or self.settings.medium != GOOD

    def may_have_failed(self, error: IserblkError) -> bool:
        return self._has_failed(error) or (self._flushes_fail and bool(error.losses))

    def _has_failed(self, error: IserblkError) -> bool:
        """The target has said that it could not write what it had cached."""
        return (
            self._flushes_fail
            and isinstance(error, ScsiError)
            and isinstance(error.sense, Sense)
            and error.sense.code == sense.WRITE_ERROR
        )

    async def _extents(self, disk: TrioDisk, at: int, count: int) -> None:
        size, begun = self.settings.granule, self.loop.now()
        try:
            extents = await disk.extents(self.place(at), count * size)
        except IserblkError as error:
            if self._falls(disk) or self._is_refused(error, begun, True):
                return
            if self._over.is_set() or not self._is_late(error):
                raise
            return
        if self._is_taken(disk):
            return
        for offset, length, flags in extents:
            if flags != EXTENT_DATA:
                start = offset - self.settings.first
                first = -(-start // size)
                self.history.check_hole(first, (start + length) // size - first, begun)

    # -- another host takes over ------------------------------------------------------------------

    def _is_taken(self, disk: TrioDisk) -> bool:
        """What the disk says does not count any more."""
        return self._taken == _DONE and disk is self._first

    def _falls(self, disk: TrioDisk) -> bool:
        """The disk is perhaps another host's already."""
        return self._taken != _NOT and disk is self._first

    async def _try_in_vain(
        self, disk: TrioDisk, number: int, kind: str, at: int, count: int
    ) -> None:
        """The target refuses all of it."""
        size = self.settings.granule
        self.trace("client %d tries in vain: %s, %d at %d", number, kind, count, at)
        self._asked[number] = self.loop.now(), kind, at, count
        try:
            if kind == READ:
                await disk.read_into(memoryview(bytearray(count * size)), self.place(at))
            elif kind in (ZERO, ZERO_FUA):
                await disk.zero(self.place(at), count * size, fua=kind == ZERO_FUA)
            elif kind == FLUSH and self.settings.other == REPLACES:
                await disk.flush()
            else:
                data = content(_NOBODY, at, size) * count
                await disk.write(memoryview(bytearray(data)), self.place(at), kind == FUA)
        except IserblkError as error:
            self._check_vain(error)
            self.trace("client %d is refused: %s", number, str(error))
        else:
            raise Wrong(f"{kind} is carried out, and the LUN is another's, or another one")
        finally:
            del self._asked[number]

    def _check_vain(self, error: IserblkError) -> None:
        if self.settings.other != REPLACES:
            self.result.states[HELD_OFF] += 1
        elif isinstance(error, LunChanged):
            self.result.states[TOLD_OF_ANOTHER] += 1
        elif self.settings.patient:
            raise Wrong(f"another LUN is there, and a client is told: {error}")

    async def _take_over(self, chance: Random) -> None:
        """Another host does what the message of the refusal says. From then on nothing of ours is
        carried out, whenever it was sent; and when the other host has ended, ours comes back."""
        self._forget_troubles()
        self._taken = _PERHAPS
        options = self._options(SUCCESSOR, KEY)
        while True:
            async with AsyncExitStack() as stack:
                try:
                    opened = await stack.enter_async_context(open_disks(self._urls, options))
                except IserblkError as error:
                    self.trace("not taken over: %s", str(error))
                    await trio.sleep(REFUSED_S)
                    continue
                disk = opened.disks[opened.default]
                assert isinstance(disk, TrioDisk)
                self._taken = _DONE
                self.history.died(self.loop.now())
                self._reconnects = 0
                self._portal = session_of(disk).portal
                self.result.states[TAKEN] += 1
                self.trace("another host has taken the LUN over")
                with trio.fail_after(PATIENCE_S):
                    await self._reign(disk, chance)
                self.trace("the other host has ended")
                return

    async def _replace(self, chance: Random) -> None:
        """The target comes back with another LUN under the number, or with other blocks. From then
        on the clients get nothing but errors that say so, and nothing of theirs is written there.
        The LUN is there again when the disk is closed."""
        self._forget_troubles()
        self._taken = _PERHAPS
        await self._target.stop(True)
        self.disturbed()
        block, state = self.settings.block, REPLACED
        serial = SERIAL + "*"
        if chance.random() < 0.3:
            serial, block, state = SERIAL, 4096 if block == 512 else 512, OTHER_BLOCKS
        self._target.replace(serial, block)
        await trio.sleep(chance.choice((0.0, chance.expovariate(1.0))))
        self._taken = _DONE
        self.result.states[state] += 1
        self.trace("another LUN: serial number %s, blocks of %d bytes", serial, block)
        await self._target.start()

    async def _reign(self, disk: TrioDisk, chance: Random) -> None:
        while not await self._flush(disk):  # what ours has not: from then on all of it stays
            pass
        await self._everything(disk)
        weights = _OPERATION_WEIGHTS[self.settings.mix]
        for _ in range(chance.randint(*REIGN)):
            draw = chance.random()
            if draw < 0.05:
                self.cut_all()
            elif draw < 0.2:
                await self._restart(chance, draw < 0.1)
            elif draw < 0.25:
                await self._be_refused()
            kind = chance.choices(_OPERATIONS, cum_weights=weights)[0]
            count = chance.randint(1, HOT // 2)
            at = chance.randrange(HOT - count + 1)
            self.trace("the other host begins: %s, %d at %d", kind, count, at)
            if kind == FLUSH:
                await self._flush(disk)
            else:
                await self._operate(disk, chance, kind, at, count)
            await trio.sleep(chance.expovariate(20.0))
        await self._everything(disk)
        while not await self._flush(disk):
            pass

    async def _be_refused(self) -> None:
        """A third host, with a key of its own."""
        options = self._options(other_host.INITIATOR, THIRD_KEY)
        try:
            async with open_disks(self._urls, options):
                raise Wrong("a third host opens a LUN that another has reserved")
        except Busy:
            self.result.states[THIRD] += 1
        except IserblkError as error:
            self.trace("a third host does not come to it: %s", str(error))

    # -- faults -----------------------------------------------------------------------------------

    async def _trouble(self) -> None:
        case = self.case
        again = False
        settings = self.settings
        kinds, weights = faults_of(
            settings.front,
            settings.other,
            settings.medium,
            settings.fault_kinds,
            settings.succession == "yes",
        )
        while True:
            number = self._faults
            self._faults += 1
            chance = Random(f"fault {case.seed} {number}")
            scale = chance.choice(SOON_S)
            soon = chance.expovariate(1 / scale)
            pause = int(chance.expovariate(1 / settings.between)) + 1
            little = chance.choice((0.0, chance.uniform(0.0, 0.002)))
            if again and settings.again > LURKS and scale == max(SOON_S):
                with trio.move_on_after(soon):
                    await self._connected.wait()
                    await trio.sleep(soon / 100)  # into what follows a login
            elif again:  # into the recovery from the one before
                await trio.sleep(soon)
            else:
                self._next_fault = self.result.begun + pause
                self._fault_is_due = trio.Event()
                await self._fault_is_due.wait()
                await trio.sleep(little)
            again = chance.random() < settings.again
            kind = chance.choices(kinds, cum_weights=weights)[0]
            if case.faults is not None and number not in case.faults:
                continue
            self.result.faults[kind] += 1
            self.result.happened.append(number)
            self.trace("fault %d: %s", number, kind)
            if kind == DIE:
                self._die()
                return
            if self._taken:
                return
            with trio.CancelScope(shield=True):  # clients may have ended meanwhile
                await self._strike(kind, chance)
            if self._over.is_set():
                return

    def _die(self) -> None:
        """What the client had under way may arrive, or not; nothing more comes from it."""
        if self._over.is_set():
            return
        self._over.set()
        self.result.states[DIED] += self._under_way.total() > 0
        self.cut_all()
        if self._face is not None:
            self._face.die()
        self._give_up()

    def cut_all(self) -> None:
        for line in self.network.alive():
            self.network.cut(line[0])

    async def _strike(self, kind: str, chance: Random) -> None:
        network, troubles = self.network, self._target.troubles
        if kind == HAND_OVER:
            assert self._servers is not None
            await self._servers.hand_over(chance)
            return
        if kind in QUEUE_FAULTS:
            assert self._queue is not None
            self._queue.strike(kind)
            return
        if kind in NBD_FAULTS:
            assert isinstance(self._face, NbdFace)
            self._face.strike(kind, chance)
            return
        if kind == TAKE:
            await self._take_over(chance)
            return
        if kind == REPLACE:
            await self._replace(chance)
            return
        if kind in (RESTART, STRIKE):
            self.result.states[RESTARTED_EMPTY if kind == STRIKE else RESTARTED] += 1
            await self._restart(chance, kind == STRIKE)
            return
        if kind == BLINK:
            self._target.blink()
            self.struck(in_place=True)
            return
        if kind in _KINDS:
            self.trouble_begins()
            troubles.add(_KINDS[kind], chance.randint(1, 6))
            return
        if kind == DROP:
            self.trouble_begins()
            troubles.drops = chance.randint(1, 2)
            # (A flush under way would say that it has kept what is dropped in the midst of it.)
            if chance.random() < 0.7 and not self._target.read().in_flight:
                self._target.drop(unnoticed=True)
            troubles.is_cut_off = chance.random() < CUTS_OFF
            return
        if kind == EVICT:
            self._target.evict(chance.choice((0.1, 0.5, 1.0)))
            return
        if kind == DEFER:
            if not self.settings.keeps and self._target.read().in_flight:
                return  # (A flush under way: as above.)
            self.trouble_begins()
            troubles.is_deferred = True
            if not self.settings.keeps:  # (no journal is sent again then: it must not be true)
                self._target.drop()
            troubles.is_cut_off = chance.random() < CUTS_OFF
            return
        if kind == LESS:
            troubles.refuse(chance.randrange(32))
            return
        if kind == BUSY:
            self.trouble_begins()
            troubles.busy_until = self.loop.now() + chance.uniform(0.1, 8.0)
            return
        if kind == LAZY:
            self.trouble_begins()
            self.loop.work_s = LAZY_S
            await trio.sleep(chance.expovariate(0.05))
            self.loop.work_s = WORK_S
            return
        if kind == SLOW:
            before, network.delay = network.delay, (0.001, chance.choice((0.01, 0.3)))
            await trio.sleep(chance.uniform(0.0, 2.0))
            network.delay = before
            return
        if kind == DARK:
            places = [place for place in network.listeners if chance.random() < 0.7]
            network.dark.update(places)
            for line in network.alive():
                for end in line:
                    if line[0].remote in places:
                        network.lose(end)
            await trio.sleep(chance.expovariate(0.1))
            network.dark.clear()
            self.disturbed()
            return
        ends: list[End] = [end for line in network.alive() for end in line]
        if not ends:
            return
        end = chance.choice(ends)
        if kind == CUT:
            network.cut(end)
        elif kind == HALVE:
            network.halve(end)
        elif kind == HOLE:
            network.lose(end)
        elif kind == DAMAGE:
            if self.settings.has_digests:
                network.damage(end, chance.randrange(20_000))
        else:
            assert kind == LIMIT
            network.limit(end, chance.choice((1, 48, chance.randint(1, 100_000))))
        self.disturbed()

    async def _restart(self, chance: Random, loses: bool) -> None:
        while self._restarts is not None:  # beside a hand-over
            await self._restarts.wait()
        ended = self._restarts = trio.Event()
        try:
            await self._restart_alone(chance, loses)
        finally:
            self._restarts = None
            ended.set()

    async def _restart_alone(self, chance: Random, loses: bool) -> None:
        await self._target.stop(loses)
        if loses:
            self.trace("the target has lost its cache")
            self.struck()
        else:
            self.disturbed()
        await trio.sleep(chance.choice((0.0, chance.expovariate(1.0))))
        await self._target.start()

    # -- the end ----------------------------------------------------------------------------------

    async def _check_target(self) -> None:
        """Nothing of its clients is left at the target."""
        with trio.move_on_after(PATIENCE_S):
            await until(lambda: not self._target.read().connections)
        left = self._target.read()
        if left.memory or left.memory_beside or left.connections or left.in_flight or left.sessions:
            raise Wrong(f"the target keeps {left}")

    def _check_end(self) -> None:
        loop = self.loop
        if loop.open or loop.watched:
            raise Wrong(f"open at the end: {loop.describe()}; {loop.watched} are watched")


def play(case: Case, print_line: Callable[[str], object] | None = None) -> Result:
    """Raises Wrong and so on, with the end of the trace as notes."""
    return finish(World(case, print_line))


def finish(world: World) -> Result:
    """As ``play``. What had happened by then, ``world.result`` has."""
    try:
        return world.play()
    except BaseException as error:
        error.add_note("\n".join(["what happened last:", *world.trace.lines]))
        raise
