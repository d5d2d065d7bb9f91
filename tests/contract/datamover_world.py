"""A world of one session: the datamovers of both ends, and between them lines that lose.

The layers above are played here: an initiator that sends commands, aborts some and moves all to
another connection, and a target that answers them. All of it comes from a seed. What holds is
asserted as it happens, and in the end nothing is in use any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Final, NamedTuple

from iserblk.datamover.seam import (
    INLINE,
    InitiatorDatamover,
    PduSlot,
    Resumption,
    TargetDatamover,
    TargetSlot,
)
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_target import TcpTarget
from iserblk.errors import ConnectionLost, RemoteProtocolError, TransportError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.serial import MASK32, serial_lt
from iserblk.rcap.inprocess import MemoryQueuePair
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.scsi import sense
from iserblk.scsi.tasks import BIDIRECTIONAL, NO_DATA, READ, WRITE
from tests.contract.datamovers import ISER_WAYS
from tests.contract.lossy_lines import Faults, Line, Rules, data_length, lines, word

INLINE_SIZE: Final = 8192
SLOTS: Final = 20
DEPTH: Final = 8  # commands and pings at a time
RECEIVES: Final = 24
LUN: Final = bytes((0, 3, 0, 0, 0, 0, 0, 0))
LEAST_PAUSE: Final = 80  # steps between two ticks
LONG: Final = 8192
FLOOD: Final = 64  # SNACKs whose answers have not left
FIRST_TICKS: Final = 8  # in which one end alone brings back what was lost
UNTICKED: Final = 40  # rests before the first tick, where all that is lost shows by itself
MOST_VAIN: Final = UNTICKED + 20  # rests in which nothing ends
STEPS: Final = 20_000  # of a world, at most
GOOD, CHECK_CONDITION, BUSY = 0, 2, 8
SENSE: Final = b"\0\x12\x70\0\5" + bytes(15)
EMPTY: Final = 0xEE  # in a buffer before any Data-In


class Way(NamedTuple):
    """``iser``: a key of ISER_WAYS, or "" for TCP. ``level``: ErrorRecoveryLevel."""

    iser: str
    level: int

    def __str__(self) -> str:
        return f"{self.iser or 'tcp'}-level-{self.level}"


WAYS: Final = [
    *(Way("", level) for level in (0, 1, 2)),
    *(Way(name, 0) for name in ISER_WAYS),
    *(Way(name, 2) for name in ("iser-memory", "iser-iwarp-crc", "iser-stream-nocrc")),
]


@dataclass(eq=False)
class Job:
    """A command at the initiator, and what its target is to do. ``out``, ``back``: its buffers;
    ``content`` of ``out`` when it was sent, ``room`` in ``back``. ``given``: the Data-In, from
    ``at`` on. ``taken``: how many bytes of Data-Out the target fetches. ``reports``: whether it
    tells the residual."""

    itt: int
    slot: PduSlot
    direction: int
    out: bytearray | None = None
    back: bytearray | None = None
    content: bytes = b""
    room: int = 0
    given: bytes = b""
    at: int = 0
    taken: int = 0
    status: int = GOOD
    reports: bool = True
    overflow: bool = False
    aborts: bool = False
    forgotten: bool = False

    @property
    def unsaid(self) -> bool:
        """Whether there is no Data-In, and its target does not say so."""
        return not (self.given or self.reports)


@dataclass(eq=False)
class Serving:
    """The same command at the target. ``filled``: bytes of Data-Out that have come, all from the
    first on. ``fetching``: what ``get_data`` is to bring."""

    job: Job
    slot: TargetSlot
    filled: int = 0
    more: bool = False  # unsolicited data is under way
    hole: bool = False  # some of it was lost
    fetching: memoryview | None = None
    notify: bool = False
    asked: int = 0
    noticed: int = 0  # of a put_data with Notify_Enable: 1 due, 2 come
    acknowledged: int = 0  # the same of one with the A-bit
    source: bytearray | None = None
    ended: Callable[[], None] | None = None  # the answer of an abort that waits
    cancelled: bool = False
    answered: bool = False
    stat_sn: int = 0
    resume_at: int = 0
    suspended: bool = False


@dataclass
class Numbers:
    """Implements SessionNumbers."""

    stat_sn: int
    exp_cmd_sn: int = 5
    max_cmd_sn: int = 50

    def take(self) -> int:
        taken, self.stat_sn = self.stat_sn, self.stat_sn + 1 & MASK32
        return taken


class Connection:
    """One connection in full feature phase. Implements InitiatorUser and TargetUser, for
    ``world``."""

    def __init__(self, world: World) -> None:
        self.world = world
        chance = world.chance
        self.way = world.way
        self.parameters = world.parameters
        self.numbers = Numbers((chance.choice((0, 100, MASK32)) - 3) & MASK32)
        self.heard = self.numbers.stat_sn  # ExpStatSN of the initiator
        self.line: Line | None = None
        self.rules = Rules(self.parameters, world.faults, LUN)
        if self.way.iser:
            self.initiator, self.target = ISER_WAYS[self.way.iser].make()
        else:
            self.line, other = lines(world.faults, chance.choice((600 + world.most // 4, 1 << 20)))
            self.initiator = TcpInitiator(self.line, INLINE_SIZE, 1 << 18)
            self.target = TcpTarget(other, 1 << 18)
        self.login = True
        self.up, self.down = Up(self), Down(self)
        self.initiator.user, self.target.user = self.up, self.down
        self.target.notice_numbers(self.numbers)
        self.slots = [PduSlot(index) for index in range(SLOTS)]
        self.free: list[TargetSlot] = [TargetSlot(index) for index in range(2)]
        self.initiator.allocate_connection_resources(self.slots, RECEIVES)
        self.target.allocate_connection_resources(self.free, INLINE_SIZE, RECEIVES)
        self.busy: list[TargetSlot] = []  # slots of PDUs that are no SCSI Response
        self.initiator.notice_key_values(self.parameters)
        self.target.notice_key_values(self.parameters)
        self._enable()

    def _enable(self) -> None:
        final = self.take()
        final.bhs[:] = pdu.LoginResponse(
            flags=pdu.TRANSIT | pdu.OPERATIONAL_STAGE << pdu.CSG_SHIFT | pdu.FULL_FEATURE_PHASE,
            data_length=0,
            isid=bytes(6),
            tsih=1,
            itt=0,
            stat_sn=self.numbers.take(),
            exp_cmd_sn=5,
            max_cmd_sn=50,
        ).pack()
        self.busy.append(final)
        self.target = self.target.enable_datamover(final)
        self._drive(lambda: not self.login)
        losses = self.initiator.losses
        self.initiator = self.initiator.enable_datamover()
        assert self.way.iser or self.initiator.losses is losses
        self._drive(
            lambda: (
                not final.busy
                and self.initiator.greeted
                and self.target.greeted
                and not any(
                    isinstance(getattr(end, "qp", None), StreamingQueuePair)
                    for end in (self.initiator, self.target)
                )
            )
        )
        if self.line is not None:
            for line in (self.line, self.line.peer):
                line.begin(self.parameters, self.rules)

    def _drive(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.turn(True)
        raise AssertionError("the login does not end")

    def turn(self, whole: bool) -> None:
        """Everything once."""
        self.initiator.flush()
        self.target.flush()
        if self.line is not None:
            self.line.carry(whole)
            self.line.peer.carry(whole)
        self.target.progress(0.0)
        self.initiator.progress(0.0)

    def hear(self, stat_sn: int) -> None:
        self.heard = self.rules.heard = (stat_sn + 1) & MASK32

    def take(self) -> TargetSlot:
        """A slot of the target that is not in use."""
        for slot in self.busy:
            if not slot.busy:
                self.busy.remove(slot)
                self.free.append(slot)
                break
        if not self.free:
            fresh = TargetSlot(100)
            self.target.add_resources([fresh], INLINE_SIZE, 0)
            return fresh
        return self.free.pop()

    def answer(self, unit: pdu.Pdu, data: bytes = b"") -> None:
        """Send a PDU of the target that is no SCSI Response."""
        slot = self.take()
        slot.bhs[:] = unit.pack()
        slot.inline[: len(data)] = data
        slot.inline_length = len(data)
        self.busy.append(slot)
        self.target.send_control(slot)

    def window(self) -> dict[str, int]:
        if self.world.chance.random() < 0.3:
            self.numbers.max_cmd_sn += 1
        return {"exp_cmd_sn": self.numbers.exp_cmd_sn, "max_cmd_sn": self.numbers.max_cmd_sn}

    def terminate(self) -> None:
        ends: list[InitiatorDatamover | TargetDatamover] = [self.initiator, self.target]
        self.world.chance.shuffle(ends)
        for end in ends:
            end.connection_terminate()


class Up:
    """The initiator's iSCSI layer of one connection. Implements InitiatorUser."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        connection, head = self.connection, bytes(message[at : at + bhs.BHS_LENGTH])
        opcode = head[0] & bhs.OPCODE_MASK
        data = bytes(message[at + bhs.BHS_LENGTH :])[: data_length(head)]
        itt, stat_sn = word(head, 16), word(head, 24)
        numbered = opcode != bhs.NOP_IN or itt != bhs.NO_TAG
        if numbered:
            # (A status of a task that has ended meanwhile may be left out.)
            turn = stat_sn == connection.heard
            later = connection.world.rude and serial_lt(connection.heard, stat_sn)
            assert turn or later or connection.login, "not its turn"
            connection.hear(stat_sn)
        if opcode == bhs.LOGIN_RESPONSE:
            connection.login = False
        else:
            assert not connection.login
            connection.world.heard(head, data, invalidated)

    def sent_notify(self, slot: PduSlot) -> None:
        raise AssertionError("no slot was allocated for Data-Outs")


class Down:
    """The target's iSCSI layer of one connection. Implements TargetUser."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        head = bytes(message[at : at + bhs.BHS_LENGTH])
        assert not invalidated
        self.connection.world.received(head, bytes(message[at + bhs.BHS_LENGTH :]))

    def data_completion_notify(self, slot: PduSlot, sn: int) -> None:
        self.connection.world.completed(slot, sn)

    def data_ack_notify(self, slot: PduSlot, data_sn: int) -> None:
        serving = self.connection.world.serving_of(slot)
        assert serving.acknowledged == 1 and data_sn > 0, "nothing asked for that, or twice"
        serving.acknowledged = 2

    def sent_notify(self, slot: PduSlot) -> None:
        assert isinstance(slot, TargetSlot) and slot.busy >= 0

    def discarded_notify(self, head: memoryview) -> None:
        self.connection.world.discarded(bytes(head))


def parameters_of(way: Way, chance: Random) -> SessionParameters:
    if way.iser:
        return replace(ISER_WAYS[way.iser].parameters, error_recovery_level=way.level)
    burst = chance.choice((512, 4096, 5000, 65536))
    return SessionParameters(
        error_recovery_level=way.level,
        header_digest=chance.choice(("None", "CRC32C")),
        data_digest=chance.choice(("None", "CRC32C", "CRC32C", "CRC32C")),
        initial_r2t=chance.random() < 0.5,
        immediate_data=chance.random() < 0.5,
        max_burst_length=burst,
        first_burst_length=chance.choice((512, min(burst, 3000), burst)),
        max_recv_data_segment_length=chance.choice((512, 1000, 8192, 1 << 18)),
        initiator_recv_data_segment_length=chance.choice((512, 1000, 8192, 1 << 18)),
    )


class World:
    """See the module. ``play`` raises AssertionError where something does not hold."""

    def __init__(self, way: Way, seed: int) -> None:
        self.way = way
        self.chance = chance = Random(f"{way} {seed}")
        self.parameters = parameters_of(way, chance)
        troubled = chance.random() < 0.75
        self.troubled = troubled
        self.mild = troubled and chance.random() < 0.4  # what is lost, a few messages bring back
        self.faults = Faults(
            chance,
            chance.choice((0.0, 0.03, 0.15)) * troubled,
            chance.choice((0.0, 0.03, 0.15)) * troubled,
            self.mild,
        )
        self.faults.uncounted = way.level == 1 and chance.random() < 0.2
        self.first_tick = chance.choice(("initiator", "target"))  # where time goes on first
        self.cuts = 0 if self.mild else chance.choice((0, 1, 1, 2)) * troubled
        self.ticks = 0.0 if self.mild or not troubled else chance.choice((0.0, 0.5, 1.0))
        self.aborting = chance.choice((0.0, 0.05, 0.2))
        self.most = chance.choice((100, 3000, 20_000, 70_000))
        self.left = chance.randint(3, 14)  # commands still to be sent
        self.jobs: dict[int, Job] = {}  # by ITT
        self.every: dict[int, Job] = {}  # also those that have ended
        self.rude = False  # a task has ended before its target knew
        self.servings: dict[int, Serving] = {}
        self.ours: dict[int, Callable[[int], None]] = {}  # what answers to requests bring about
        self.spare: list[int] = []
        self.unanswered: dict[int, tuple[PduSlot, bytes]] = {}  # pings
        self.next_itt = chance.choice((1, 0x7FFFFFF0, 0xFFFF0000))
        self.ended: list[tuple[Job, bool, bytes]] = []  # their buffers are the caller's own
        self.emptied: list[bytearray] = []  # the same of the target
        self.ticked = self.reassigned = False
        self.steps = self.ticked_at = 0
        self.rests = self.vain = self.done = 0
        self.both = False  # time goes on at both ends
        self.fetched = self.gave = 0  # bytes
        self.over = False
        self.happened: dict[str, int] = {}
        self.connection = Connection(self)
        self.spare = list(range(SLOTS))

    def note(self, what: str) -> None:
        self.happened[what] = self.happened.get(what, 0) + 1

    # -- the initiator ----------------------------------------------------------------------------

    def _tag(self) -> int:
        self.next_itt += 1
        return self.next_itt

    def _size(self) -> int:
        """Bytes of a transfer: often about a bound."""
        keys, chance = self.parameters, self.chance
        if chance.random() < 0.5:
            return chance.randint(1, self.most)
        bound = chance.choice(
            (
                keys.max_burst_length,
                keys.first_burst_length,
                keys.max_recv_data_segment_length,
                keys.initiator_recv_data_segment_length,
            )
        )
        return max(1, min(self.most, bound * chance.randint(1, 3) + chance.choice((-1, 0, 1))))

    def submit(self) -> None:
        chance = self.chance
        slot = self.connection.slots[self.spare.pop(chance.randrange(len(self.spare)))]
        if chance.random() < 0.15:
            self._ping(slot)
            return
        self.left -= 1
        direction = chance.choice((READ, READ, READ, WRITE, WRITE, WRITE, BIDIRECTIONAL, NO_DATA))
        job = Job(self._tag(), slot, direction)
        if direction in (WRITE, BIDIRECTIONAL):
            job.out = bytearray(chance.randbytes(self._size()))
            job.content = bytes(job.out)
            job.taken = len(job.out)
        if direction in (READ, BIDIRECTIONAL):
            job.back = bytearray((EMPTY,)) * self._size()
            job.room = len(job.back)
            job.given = chance.randbytes(len(job.back))
            if chance.random() < 0.25:
                job.given = job.given[: chance.randint(0, len(job.given))]
                if self.way.level < 2:
                    job.at = chance.randint(0, len(job.back) - len(job.given))
        job.status = chance.choice((GOOD,) * 6 + (CHECK_CONDITION, BUSY))
        if job.status and job.taken:
            job.taken = chance.randint(0, job.taken)
        # (Behind a TASK REASSIGN the response of acknowledged data has no ExpDataSN.)
        job.reports = chance.random() < 0.7 or self.way.level == 2 or self.faults.uncounted
        job.overflow = chance.random() < 0.1
        self.jobs[job.itt] = self.every[job.itt] = job
        self._send(job)
        self.note("commands")

    def _send(self, job: Job) -> None:
        """Send the command, for the first time or again."""
        slot = job.slot
        slot.inline_length = 0
        slot.data = slot.data_in = None
        flags, edtl = bhs.FLAG_FINAL | bhs.ATTR_SIMPLE, 0
        slot.direction = job.direction
        if job.out is not None:
            flags |= bhs.FLAG_WRITE
            slot.data = memoryview(job.out)
            edtl = len(job.out)
        if job.back is not None:
            flags |= bhs.FLAG_READ
            if job.direction == BIDIRECTIONAL:
                slot.data_in = memoryview(job.back)
                slot.inline_length = bhs.pack_bidirectional_read_length(slot.inline, len(job.back))
            else:
                slot.data = memoryview(job.back)
                edtl = len(job.back)
        size = 0
        if self.way.iser and job.direction == WRITE and edtl <= len(slot.inline) and job.itt % 2:
            slot.direction, size = INLINE, edtl
            slot.inline[:size] = job.content
            slot.inline_length, slot.data = size, None
        slot.bhs[:] = pdu.ScsiCommand(
            flags=flags,
            data_length=size | (slot.inline_length // 4 << 24 if slot.data_in is not None else 0),
            lun=LUN,
            itt=job.itt,
            edtl=edtl,
            cmd_sn=1,
            exp_stat_sn=self.connection.heard,
            cdb=bytes(16),
        ).pack()
        self.connection.initiator.send_control(slot)

    def _ping(self, slot: PduSlot) -> None:
        itt = self._tag()
        data = self.chance.randbytes(self.chance.choice((0, 1, 4, 512)))
        self.unanswered[itt] = slot, data
        self._send_ping(itt)
        self.note("pings")

    def _send_ping(self, itt: int) -> None:
        slot, data = self.unanswered[itt]
        slot.direction, slot.data, slot.data_in = INLINE, None, None
        slot.inline[: len(data)] = data
        slot.inline_length = len(data)
        slot.bhs[:] = pdu.NopOut(
            itt=itt, data_length=len(data), cmd_sn=1, exp_stat_sn=self.connection.heard
        ).pack()
        self.connection.initiator.send_control(slot)

    def acknowledge(self) -> None:
        """Tell by a PDU that is not answered what was heard."""
        if self.way.iser or not self.spare:
            return  # its memory would be in use until it has left
        slot = self.connection.slots[self.spare[0]]
        slot.direction, slot.data, slot.data_in = NO_DATA, None, None
        slot.bhs[:] = pdu.NopOut(itt=bhs.NO_TAG, cmd_sn=1, exp_stat_sn=self.connection.heard).pack()
        self.connection.initiator.send_control(slot)

    def _manage(self, function: int, job: Job, answered: Callable[[int], None]) -> PduSlot:
        """The PDU of a task management request, which is to be sent."""
        slot = self.connection.slots[self.spare.pop()]
        itt = self._tag()
        slot.direction, slot.data, slot.data_in = NO_DATA, None, None
        slot.inline_length = 0
        slot.bhs[:] = pdu.TaskManagementRequest(
            function=function,
            lun=LUN,
            itt=itt,
            referenced_task_tag=job.itt,
            cmd_sn=1,
            exp_stat_sn=self.connection.heard,
        ).pack()

        def ended(response: int) -> None:
            self._give_back(slot)
            answered(response)

        self.ours[itt] = ended
        return slot

    def _give_back(self, slot: PduSlot) -> None:
        self.spare.append(self.connection.slots.index(slot))

    def abort(self) -> None:
        jobs = [job for job in self.jobs.values() if not job.aborts]
        if not jobs or not self.spare:
            return
        job = self.chance.choice(jobs)
        job.aborts = True

        def answered(response: int) -> None:
            if job.itt not in self.jobs:
                return
            if response == pdu.TMF_COMPLETE:
                self.note("aborted")
                self.end(job, 0)
            else:  # its command was discarded, or never came, and is sent again
                again = self.faults.damaged or self.happened.get("lost connections")
                assert again, "its response was to come first"
                job.aborts = False

        self.connection.initiator.send_control(self._manage(pdu.TMF_ABORT_TASK, job, answered))
        if not self.way.iser and self.chance.random() < 0.3:  # it does not wait for the answer
            self.rude = self.connection.rules.lenient = True
            self.note("aborted")
            self.end(job, 0)

    def heard(self, head: bytes, data: bytes, invalidated: int) -> None:
        """A PDU has come up at the initiator."""
        opcode, itt = head[0] & bhs.OPCODE_MASK, word(head, 16)
        if opcode == bhs.SCSI_RESPONSE:
            if itt not in self.jobs:
                assert self.every[itt].aborts, "a response to a task that has ended"
                return
            self._judge(self.jobs[itt], pdu.ScsiResponse.unpack_from(head), data, invalidated)
        elif opcode == bhs.REJECT:
            self._rejected(data)
        elif opcode == bhs.TASK_MANAGEMENT_RESPONSE:
            self.ours.pop(itt)(head[2])
        else:
            assert opcode == bhs.NOP_IN
            if itt != bhs.NO_TAG:
                slot, sent = self.unanswered.pop(itt)
                assert data == sent
                self.connection.initiator.deallocate_task_resources(slot, 0)
                self._give_back(slot)

    def _rejected(self, head: bytes) -> None:
        opcode, itt = head[0] & bhs.OPCODE_MASK, word(head, 16)
        self.note(f"rejected {opcode:#x}")
        if opcode == bhs.SCSI_COMMAND and itt in self.jobs:
            self._send(self.jobs[itt])
        elif opcode == bhs.NOP_OUT and itt in self.unanswered:
            self._send_ping(itt)

    def _judge(self, job: Job, response: pdu.ScsiResponse, data: bytes, invalidated: int) -> None:
        """Whether a task has ended as its target had it, or as the standard has it."""
        back, lost = job.back, False
        assert response.response == 0
        if response.status == CHECK_CONDITION and (job.status != CHECK_CONDITION):
            reason = sense.decode(data[2:])
            assert (reason.key, reason.code) == (sense.ABORTED_COMMAND, 0x4705)
            # Data that the target keeps no longer; or that it neither sent nor reports as missing.
            assert self.way.level and (job.unsaid or (job.forgotten and self.disturbed))
            self.note("lost data of a read")
            lost = True
        else:
            assert response.status == job.status
            assert data == (SENSE if job.status == CHECK_CONDITION else b"")
            lost = (job.forgotten or self.faults.uncounted) and job.status != GOOD
            flags, residual, bidi = self._residuals(job)
            if not self.way.iser and back is not None and job.status != BUSY:
                missing = len(back) - len(job.given)
                both = job.direction == BIDIRECTIONAL
                under = bhs.BIDI_UNDERFLOW if both else bhs.RESIDUAL_UNDERFLOW
                said = (bidi if both else residual) if flags & under else 0
                if missing > said:
                    others = bhs.BIDI_FLAGS if both else bhs.RESIDUAL_FLAGS
                    flags = flags & ~others | under
                    residual, bidi = (residual, missing) if both else (missing, bidi)
            found = response.flags, response.residual, response.bidi_residual
            # Where data may be lost for good, that counts as well.
            assert lost or found == (bhs.FLAG_FINAL | flags, residual, bidi)
        self.note("ended")
        self.end(job, invalidated, not lost)

    def _residuals(self, job: Job) -> tuple[int, int, int]:
        """What the target reports: flags, residual count, bidirectional read residual count."""
        flags = residual = bidi = 0
        if job.overflow:
            flags, residual = bhs.RESIDUAL_OVERFLOW, 7
        if job.reports and job.back is not None:
            missing = job.room - len(job.given)
            if missing and job.direction == BIDIRECTIONAL:
                flags, bidi = flags | bhs.BIDI_UNDERFLOW, missing
            elif missing:
                flags, residual = bhs.RESIDUAL_UNDERFLOW, missing
        return flags, residual, bidi

    def end(self, job: Job, invalidated: int, whole: bool = False) -> None:
        """The task has ended: its buffers are the caller's own again. ``whole``: its data is
        there."""
        del self.jobs[job.itt]
        self.connection.initiator.deallocate_task_resources(job.slot, invalidated)
        slot = job.slot
        assert slot.data is None and slot.data_in is None and not slot.stag and not slot.stag_in
        self._give_back(slot)
        self.ended.append((job, whole, bytes(job.back or b"")))

    def _free_all(self) -> None:
        """Behind the call that ended them: in it there are views still."""
        ended, self.ended = self.ended, []
        for job, whole, back in ended:
            assert bytes(job.back or b"") == back, "written to behind the end"
            self._free(job, whole)
        emptied, self.emptied = self.emptied, []
        for buffer in emptied:
            buffer.clear()  # BufferError while a view of it is left

    def _free(self, job: Job, whole: bool) -> None:
        if job.back is not None:
            back, end = job.back, job.at + len(job.given)
            if whole:
                assert back[job.at : end] == job.given
            assert set(back[: job.at]) | set(back[end:]) <= {EMPTY}, "more was written"
            back.clear()  # BufferError while a view of it is left
        if job.out is not None:
            assert job.out == job.content
            job.out.clear()

    # -- the target -------------------------------------------------------------------------------

    def serving_of(self, slot: PduSlot) -> Serving:
        return next(each for each in self.servings.values() if each.slot is slot)

    def received(self, head: bytes, behind: bytes) -> None:
        """A PDU has come up at the target."""
        opcode, itt = head[0] & bhs.OPCODE_MASK, word(head, 16)
        self._acknowledged(word(head, 28))
        ahs = head[4] * 4
        data = behind[ahs : ahs + data_length(head)]
        if opcode == bhs.SCSI_COMMAND:
            self._begin(head, itt, behind[:ahs], data)
        elif opcode == bhs.DATA_OUT:
            self._unsolicited(pdu.DataOut.unpack_from(head), data)
        elif opcode == bhs.NOP_OUT:
            if itt != bhs.NO_TAG:
                self.connection.answer(
                    pdu.NopIn(
                        itt=itt,
                        lun=bytes(8),
                        data_length=len(data),
                        stat_sn=self.connection.numbers.take(),
                        **self.connection.window(),
                    ),
                    data,
                )
        elif opcode == bhs.SNACK_REQUEST:
            snack = pdu.SnackRequest.unpack_from(head)
            reason, data_sn = self.connection.target.retransmit(snack)
            if reason:
                job = self.jobs.get(snack.itt)
                assert self.disturbed or (job is not None and job.unsaid)
                self._reject(head, reason, data_sn)
        else:
            assert opcode == bhs.TASK_MANAGEMENT_REQUEST
            self._managed(pdu.TaskManagementRequest.unpack_from(head))

    def _acknowledged(self, exp_stat_sn: int) -> None:
        """What was heard of a response need not be kept for another connection."""
        for itt, serving in list(self.servings.items()):
            known = self.way.level < 2 or serial_lt(serving.stat_sn, exp_stat_sn)
            if known and serving.answered and not serving.slot.busy and not serving.suspended:
                self._recycle(itt)

    def _recycle(self, itt: int) -> None:
        """The task has ended, and its slot may be used again."""
        serving = self.servings[itt]
        assert not serving.slot.busy
        assert serving.noticed != 1 and serving.acknowledged != 1, "a notice has not come"
        del self.servings[itt]
        self.connection.target.deallocate_task_resources(serving.slot)
        if serving.source is not None:
            self.emptied.append(serving.source)
        self.connection.free.append(serving.slot)

    def _reject(self, head: bytes, reason: int, data_sn: int = 0) -> None:
        self.connection.answer(
            pdu.Reject(
                reason=reason,
                data_length=bhs.BHS_LENGTH,
                data_sn=data_sn,
                stat_sn=self.connection.numbers.take(),
                **self.connection.window(),
            ),
            head,
        )

    def _begin(self, head: bytes, itt: int, ahs: bytes, data: bytes) -> None:
        command = pdu.ScsiCommand.unpack_from(head)
        job = self.every[itt]
        assert itt in self.jobs or job.aborts, "a command whose task has ended"
        assert command.lun == LUN and itt not in self.servings
        assert bool(ahs) == (job.direction == BIDIRECTIONAL)
        slot = self.connection.take()
        self.connection.target.map_task(slot)
        serving = self.servings[itt] = Serving(job, slot)
        assert data == job.content[: len(data)]
        serving.filled = len(data)
        serving.more = not command.flags & bhs.FLAG_FINAL

    def _unsolicited(self, unit: pdu.DataOut, data: bytes) -> None:
        assert unit.ttt == bhs.NO_TAG
        serving = self.servings.get(unit.itt)
        if serving is None or not serving.more:
            return  # of a command that was discarded, or of a task that was aborted
        at = unit.buffer_offset
        if not serving.hole:
            assert at == serving.filled
            assert data == serving.job.content[at : at + len(data)]
            serving.filled += len(data)
        serving.more = not unit.flags & bhs.FLAG_FINAL

    def discarded(self, head: bytes) -> None:
        assert self.faults.damaged and self.way.level
        opcode = head[0] & bhs.OPCODE_MASK
        self._reject(head, pdu.REJECT_DATA_DIGEST_ERROR)
        serving = self.servings.get(word(head, 16))
        if opcode == bhs.DATA_OUT and word(head, 20) == bhs.NO_TAG and serving is not None:
            serving.hole = True
            if serving.more:
                serving.more = not head[1] & bhs.FLAG_FINAL

    def _managed(self, request: pdu.TaskManagementRequest) -> None:
        itt = request.referenced_task_tag
        serving = self.servings.get(itt)
        target = self.connection.target
        if request.function == pdu.TMF_TASK_REASSIGN:
            fresh = self.connection.take()
            target.map_task(fresh)
            known = serving is not None and serving.suspended
            self._answer_management(
                request.itt, pdu.TMF_COMPLETE if known else pdu.TMF_TASK_DOES_NOT_EXIST
            )
            if serving is not None and known:
                self._take_over(serving, fresh, request.exp_data_sn)
            else:
                target.deallocate_task_resources(fresh)
                self.connection.free.append(fresh)
            return
        if serving is None or serving.answered:
            self._answer_management(request.itt, pdu.TMF_TASK_DOES_NOT_EXIST)
            return

        def ended() -> None:
            serving.noticed = serving.acknowledged = 0
            serving.fetching = None
            self._recycle(itt)
            self._answer_management(request.itt, pdu.TMF_COMPLETE)

        serving.cancelled = True
        if serving.fetching is None or target.cancel_data(serving.slot):
            ended()
        else:
            serving.ended = ended

    def _answer_management(self, itt: int, response: int) -> None:
        self.connection.answer(
            pdu.TaskManagementResponse(
                itt=itt,
                response=response,
                stat_sn=self.connection.numbers.take(),
                **self.connection.window(),
            )
        )

    def serve(self) -> None:
        """Go on with one of the tasks."""
        ready = [
            each
            for each in self.servings.values()
            if not (each.answered or each.cancelled or each.more or each.suspended)
            and each.fetching is None
        ]
        if not ready:
            return
        serving = self.chance.choice(ready)
        job = serving.job
        if serving.filled < job.taken:
            size = min(job.taken - serving.filled, self.parameters.max_burst_length)
            if self.chance.random() < 0.3:
                size = self.chance.randint(1, size)
            serving.fetching = memoryview(bytearray(size))
            serving.notify = self.chance.random() < 0.8
            serving.asked += 1
            self.connection.target.get_data(
                serving.slot, serving.fetching, serving.filled, serving.notify
            )
        else:
            self._respond(serving)

    def look(self) -> None:
        """Get_Data without Notify_Enable tells by ``busy`` that it is complete."""
        for serving in list(self.servings.values()):
            if serving.fetching is not None and not serving.notify and not serving.slot.busy:
                self._filled(serving)

    def completed(self, slot: PduSlot, sn: int) -> None:
        serving = self.serving_of(slot)
        if serving.fetching is None:
            assert serving.noticed == 1, "nothing asked for that, or twice"
            serving.noticed = 2
            return
        assert serving.notify
        if not (self.disturbed or self.reassigned):
            assert sn == serving.asked - 1
        self._filled(serving)

    def _filled(self, serving: Serving) -> None:
        sink, serving.fetching = serving.fetching, None
        assert sink is not None
        content = serving.job.content[serving.filled : serving.filled + len(sink)]
        assert sink == content, "other data"
        self.fetched += len(sink)
        serving.filled += len(sink)
        assert isinstance(sink.obj, bytearray)
        self.emptied.append(sink.obj)
        sink.release()
        if serving.ended is not None:
            serving.ended()
        else:
            assert not serving.cancelled

    def _respond(self, serving: Serving) -> None:
        job, slot, numbers = serving.job, serving.slot, self.connection.numbers
        target = self.connection.target
        if job.given and serving.resume_at < len(job.given) and serving.acknowledged != 2:
            serving.source = bytearray(job.given)
            how = self.chance.random()
            acknowledges = target.acknowledges or (not self.way.iser and self.way.level > 0)
            notify = how < 0.3 and self.way.level < 2
            acknowledge = how > 0.7 and acknowledges
            serving.noticed, serving.acknowledged = int(notify), int(acknowledge)
            data = memoryview(serving.source)[serving.resume_at :]
            self.gave += len(data)
            target.put_data(slot, data, job.at + serving.resume_at, notify, acknowledge)
        flags, residual, bidi = self._residuals(job)
        sense_data = SENSE if job.status == CHECK_CONDITION else b""
        slot.inline[: len(sense_data)] = sense_data
        slot.inline_length = len(sense_data)
        serving.answered = True
        serving.stat_sn = numbers.take()
        slot.bhs[:] = pdu.ScsiResponse(
            flags=bhs.FLAG_FINAL | flags,
            status=job.status,
            data_length=len(sense_data),
            itt=job.itt,
            stat_sn=serving.stat_sn,
            bidi_residual=bidi,
            residual=residual,
            **self.connection.window(),
        ).pack()
        target.send_control(slot, True)

    # -- another connection -----------------------------------------------------------------------

    def _take_over(self, serving: Serving, fresh: TargetSlot, exp_data_sn: int) -> None:
        job, slot = serving.job, serving.slot
        both = job.direction == BIDIRECTIONAL
        sent = len(job.given) if serving.answered and serving.acknowledged != 2 else 0
        serving.resume_at = self.connection.target.reassign_task(
            slot, fresh, Resumption(LUN, job.itt, both, exp_data_sn, sent, serving.resume_at)
        )
        assert serving.resume_at <= len(job.given)
        slot.take_memory(fresh)
        slot.transfer = fresh.transfer
        slot.transfer.token = slot
        slot.busy = 0
        answered, serving.suspended, serving.answered = serving.answered, False, False
        if serving.acknowledged == 1:
            serving.acknowledged = 0
        self.reassigned = True
        self.note("reassigned")
        if answered:
            self._respond(serving)

    def _lose(self) -> None:
        """The connection has ended."""
        self.faults.fatal = ""
        before = self.connection
        before.terminate()
        self.note("lost connections")
        self.ours.clear()
        self.unanswered.clear()
        if self.way.level < 2:
            for job in self.jobs.values():
                job.slot.data = job.slot.data_in = None
                self.ended.append((job, False, bytes(job.back or b"")))
            for serving in self.servings.values():
                self._let_go(serving)
            self.jobs.clear()
            self.servings.clear()
            self.over = True
            return
        for itt, serving in list(self.servings.items()):
            self._let_go(serving)
            if serving.cancelled or itt not in self.jobs:
                del self.servings[itt]  # it was aborted; or its response was heard
        self.connection = Connection(self)
        self.spare = list(range(SLOTS))
        for job in list(self.jobs.values()):
            job.aborts = False
            self._reassign(job, before)

    def _let_go(self, serving: Serving) -> None:
        """Its connection is closed: nothing of it is in use."""
        if serving.fetching is not None:
            assert isinstance(serving.fetching.obj, bytearray)
            self.emptied.append(serving.fetching.obj)
            serving.fetching.release()
            serving.fetching = None
        serving.slot.transfer.data = None
        if serving.source is not None:
            self.emptied.append(serving.source)
            serving.source = None
        serving.suspended, serving.more, serving.noticed = True, False, 0
        serving.hole = False
        serving.ended = None

    def _reassign(self, job: Job, before: Connection) -> None:
        connection = self.connection
        old, slot = job.slot, connection.slots[self.spare.pop(0)]
        slot.direction, slot.data, slot.data_in = old.direction, old.data, old.data_in
        slot.stag, slot.stag_in = 0, 0
        if slot.direction == INLINE:
            assert job.out is not None
            slot.direction, slot.data = WRITE, memoryview(job.out)
        old.data = old.data_in = None
        job.slot = slot
        bhs.ITT.pack_into(slot.bhs, bhs.ITT_OFFSET, job.itt)

        def answered(response: int) -> None:
            if response == pdu.TMF_TASK_DOES_NOT_EXIST and job.itt in self.jobs:
                connection.initiator.deallocate_task_resources(slot, 0)
                self._send(job)

        control = self._manage(pdu.TMF_TASK_REASSIGN, job, answered)
        connection.initiator.reassign(slot, control, before.initiator)

    # -- what happens -----------------------------------------------------------------------------

    def play(self) -> None:
        """Raises AssertionError where something does not hold."""
        calm = False  # without faults from now on
        for step in range(STEPS):
            self.steps = step
            if self.over:
                return
            if not (self.left or self.jobs or self.unanswered or self.ours):
                break
            calm = calm or step > STEPS // 4 or (not self.left and step % 300 == 299)
            self.faults.over = calm
            self._try(self._rest if calm else self._step)
        else:
            raise AssertionError("no end")
        self._finish()

    def _try(self, call: Callable[[], object]) -> None:
        """``call``, which may find that the connection has ended, where it has to."""
        try:
            call()
        except TransportError as error:
            if "flood" in str(error) and self.connection.rules.snacks >= FLOOD:
                self.faults.fatal = "a flood"  # their answers wait behind much else
            if self.rude and (self.way.iser or not self.way.level):
                self.faults.fatal = self.faults.fatal or "data for a task that has ended"
            if not self.faults.fatal:
                raise AssertionError(f"the connection has ended: {error}") from error
            assert isinstance(error, ConnectionLost | RemoteProtocolError)
            self.note(f"lost by {self.faults.fatal}")
            self._lose()
            del error
        self._free_all()

    def _step(self) -> None:
        chance, connection = self.chance, self.connection
        lot = chance.random()
        if self.left and self.spare and lot < 0.1 and len(self.jobs) + len(self.unanswered) < DEPTH:
            self.submit()
        elif lot < 0.3:
            self.serve()
        elif lot < 0.4:
            connection.initiator.flush()
        elif lot < 0.5:
            connection.target.flush()
        elif lot < 0.6:
            connection.initiator.progress(0.0)
        elif lot < 0.7:
            connection.target.progress(0.0)
        elif lot < 0.9:
            self._carry()
        else:
            self._rare()
        self.look()

    def _carry(self) -> None:
        connection = self.connection
        if connection.line is not None:
            self.chance.choice((connection.line, connection.line.peer)).carry()
            return
        pair = getattr(self.chance.choice((connection.initiator, connection.target)), "qp", None)
        if isinstance(pair, MemoryQueuePair):
            pair.hold = not pair.hold

    def _rare(self) -> None:
        chance, connection = self.chance, self.connection
        segment = self.parameters.initiator_recv_data_segment_length
        pause = LEAST_PAUSE if segment < LONG else LEAST_PAUSE // 2  # few PDUs move much
        if self.steps - self.ticked_at > pause and chance.random() < self.ticks:
            self._carry()
            connection.initiator.progress(0.0)  # often there is a part of a PDU then
            self.tick()
        if chance.random() < self.aborting:
            self.abort()
        lot = chance.random()
        if lot < 0.2:
            self.acknowledge()
        elif lot < 0.23:
            connection.target.forget_kept()
            for serving in self.servings.values():
                serving.job.forgotten |= serving.answered
        elif lot < 0.26 and self.cuts and self.jobs and not self.faults.fatal:
            self.cuts -= 1
            self.faults.fatal = "a cut"
            if connection.line is not None:
                connection.line.cut()
            else:
                chance.choice((connection.initiator, connection.target)).disconnect()

    @property
    def disturbed(self) -> bool:
        """Whether anything may have been sent twice."""
        return self.ticked or self.faults.damaged + self.faults.dropped > 0

    def tick(self) -> None:
        self.ticked = True
        self.ticked_at = self.steps
        self.connection.initiator.tick()
        self.connection.target.tick()

    def _rest(self) -> None:
        """Without faults, all that has to happen does."""
        connection = self.connection
        for end in (connection.initiator, connection.target):
            pair = getattr(end, "qp", None)
            if isinstance(pair, MemoryQueuePair):
                pair.hold = False
        for _ in range(8):
            if self.connection is not connection or self.over:
                return
            connection.turn(True)
            self.look()
            self.serve()
        if self.left and len(self.jobs) + len(self.unanswered) < DEPTH:
            self.submit()
        self.acknowledge()
        if not self.way.iser:
            stat_sn = connection.numbers.stat_sn  # it shows what was lost
            connection.answer(
                pdu.NopIn(itt=bhs.NO_TAG, lun=bytes(8), stat_sn=stat_sn, **connection.window())
            )
        self.rests += 1
        if self.troubled and (not self.mild or self.both):
            self.tick()
        elif self.mild and self.rests > UNTICKED:
            self.ticked = True
            (connection.initiator if self.first_tick == "initiator" else connection.target).tick()
        done = self.happened.get("ended", 0) + self.fetched
        self.vain, self.done = (self.vain + 1 if self.jobs and done == self.done else 0), done
        assert self.vain <= MOST_VAIN, "nothing gets on"
        if self.mild and self.rests == UNTICKED:
            waiting = [job for job in self.jobs.values() if job.out is None]
            assert not waiting, "what its loss showed was not asked for"
            self.vain = 0
        elif self.mild and self.rests > UNTICKED and self.vain > FIRST_TICKS and not self.both:
            assert self._may_wait(), "what was lost did not come again"
            self.both = True

    def _may_wait(self) -> bool:
        """Whether the tasks that have not ended need the time of the other end, too."""
        if self.first_tick == "target":  # R2Ts and Data-Outs it misses by itself
            return not self.jobs
        return all(
            job.direction == BIDIRECTIONAL or job.itt in self.faults.outs
            for job in self.jobs.values()
        )

    def _finish(self) -> None:
        """All tasks have ended: what is acknowledged is in use no more."""
        connection = self.connection
        self.faults.over = True
        for _ in range(60):
            kept = self.connection.target.unacknowledged is not None
            if self.over or not (self.servings or self.unanswered or kept or self.faults.fatal):
                break
            connection = self.connection
            if self.way.iser and not self.unanswered:
                self._ping(connection.slots[self.spare.pop()])
            self._try(self._rest)
        for _ in range(4):
            if self.over:
                return
            self._try(partial(self.connection.turn, True))
        connection = self.connection
        assert not self.faults.fatal, f"nobody noticed {self.faults.fatal}"
        assert not self.servings, "tasks of the target that do not end"
        assert not any(slot.busy for slot in (*connection.free, *connection.busy[:-1]))
        assert connection.target.kept_bytes == 0 and connection.target.unacknowledged is None
        assert not connection.initiator.queued
        assert not (connection.initiator.wants_write() or connection.target.wants_write())
        losses, rules = connection.initiator.losses, connection.rules
        if not self.happened.get("lost connections"):
            assert losses.damaged == self.faults.damaged_in
            assert losses.snacks == rules.snacks
            whole = not (
                self.faults.uncounted
                or self.happened.get("aborted")
                or self.happened.get("lost data of a read")
            )
            assert not whole or rules.asked == rules.acknowledged, "an A bit was not answered"
        if not (self.troubled or self.way.iser or self.happened.get("aborted")):
            assert not losses.damaged and rules.bytes_out == self.fetched
            assert rules.bytes_in == self.gave, "more was sent than was to be sent"


def play(way: Way, seed: int) -> dict[str, int]:
    """A world of ``seed``; returns what happened how often."""
    world = World(way, seed)
    try:
        world.play()
    except BaseException as error:
        error.add_note(f"again: play({way!r}, {seed})")
        raise
    finally:
        world.connection.terminate()
    return world.happened
