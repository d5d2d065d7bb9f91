"""Writes with unsolicited Data-Outs over iSER (RFC 7145 sections 7.3.1, 7.3.4): every message that
leaves, and who may use which memory when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.commands.running import fill_write
from iserblk.datamover.iser import CONTROL, MINIMUM_LENGTH, WSV, ControlHeader
from iserblk.datamover.iser_initiator import IserInitiator, ZeroBasedInitiator
from iserblk.datamover.seam import INLINE, UNSOLICITED, PduSlot
from iserblk.errors import ConnectionLost
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import UNEXPECTED, Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap import seam
from iserblk.rcap.inprocess import Message, memory_pair
from iserblk.scsi.tasks import WRITE
from tests.initiator.fake import CountingWaiter, FakeDriver, response, session
from tests.support import logs
from tests.vectors import unsolicited

pytestmark = pytest.mark.logs(logs.RECONNECTED)

LUN = b"\0\1" + bytes(6)
DATA = bytes((7 * j + (j >> 8)) & 255 for j in range(131072))
HEAD = bytes((CONTROL,)) + bytes(27)
SEGMENT = 8192
DEPTH = 4


def agreed(**more: object) -> SessionParameters:
    values = {"rdma_extensions": True, "initial_r2t": False, "immediate_data": True, **more}
    return SessionParameters(**values)  # type: ignore[arg-type]


def write_through(made: Session, data: bytes | bytearray, cdb: bytes = bytes(16)) -> TaskSlot:
    """Submit a write; its waiter is a CountingWaiter."""
    slot = made.queue.take_now()
    assert slot is not None
    slot.cdb[:] = cdb
    slot.waiter = waiter = CountingWaiter()
    waiter.pending += 1
    fill_write(slot, LUN, memoryview(data))
    made.queue.submit(slot)
    return slot


class Link:
    """A session whose writes may have Data-Outs, and its far end, a bare queue pair. ``sent``:
    every message of the session."""

    def __init__(
        self,
        parameters: SessionParameters,
        count: int = 64,
        inline: int = SEGMENT,
        cmd_sn: int = 1,
        most_busy: int = DEPTH,
        kind: type[IserInitiator] = IserInitiator,
    ) -> None:
        ours, self.theirs = memory_pair(receive_size=MINIMUM_LENGTH + (1 << 17))
        self.sent: list[Message] = []
        ours.intercept = self._left
        self.datamover = kind(ours, inline)
        slots = [TaskSlot(index) for index in range(DEPTH + CONTROL_SLOTS)]
        self.datamover.allocate_connection_resources(list(slots), UNEXPECTED)
        self.session = Session(self.datamover, slots, parameters, "portal:3260", 30.0)
        size = min(parameters.first_burst_length, parameters.target_recv_data_segment_length)
        self.pool = self.datamover.allocate_data_outs(count, size)
        self.session.queue.connection.allow_data_outs(self.pool, most_busy)
        self.session.start(cmd_sn, cmd_sn, 64, 100)
        self.theirs.post_receive(1000)
        self.stat_sn = 99

    def _left(self, message: Message) -> bool:
        self.sent.append(message)
        return True

    def write(self, data: bytes, cdb: bytes = bytes(16)) -> TaskSlot:
        return write_through(self.session, data, cdb)

    def respond(self, slot: TaskSlot, **fields: int) -> None:
        self.stat_sn += 1
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(HEAD + response(slot.itt, self.stat_sn, 64, **fields))  # type: ignore[arg-type]
        self.theirs.post([request])
        self.session.progress(1.0)

    def lose(self) -> None:
        """Lose the connection; the session waits for the next."""
        driver = FakeDriver(self.session)
        driver.reconnect = lambda: None
        self.session.drive(driver)
        self.theirs.close()
        self.session.progress(1.0)  # what has left
        self.session.progress(1.0)
        assert isinstance(self.session.suspended, ConnectionLost)

    def adopt(self, fresh: Link) -> Session:
        """Go on with the connection of ``fresh``."""
        self.session.offer(fresh.session)
        self.session.progress(2.0)
        assert self.session.suspended is None
        return self.session

    @property
    def advertised(self) -> list[bool]:
        """Of each command: whether it advertises a Write STag."""
        return [
            bool(ControlHeader.unpack_from(each.data).flags & WSV)
            for each in self.sent
            if each.data[28] == bhs.SCSI_COMMAND
        ]


def pieces_of(sent: list[Message]) -> list[tuple[pdu.DataOut, bytes]]:
    return [
        (pdu.DataOut.unpack_from(each.data, 28), each.data[MINIMUM_LENGTH:])
        for each in sent
        if each.data[28] == bhs.DATA_OUT
    ]


# shows: SYSTEM-37
@pytest.mark.parametrize(
    ("kind", "write"),
    [(IserInitiator, unsolicited.WRITE), (ZeroBasedInitiator, unsolicited.WRITE_5046)],
    ids=["28 bytes", "12 bytes"],
)
def test_golden_bytes(kind: type[IserInitiator], write: tuple[unsolicited.Vector, ...]) -> None:
    """Header by header as the specifications say; plain Sends before the last Data-Out.

    proves: ISER-2.6-1, ISER-2.4.1-2, ISER-6.4-2, ISER-7.3.1-3, ISER-7.3.1-5, ISER-7.3.1-15
    proves: ISER-7.3.4-1, ISER-7.3.4-2, ISER-7.3.4-4, ISER-7.3.4-5, ISER-9.5.1-5
    """
    parameters = agreed(
        target_recv_data_segment_length=unsolicited.SEGMENT, iser_hello_required=False
    )
    link = Link(parameters, cmd_sn=2, kind=kind)
    slot = link.write(unsolicited.DATA, write[0].head[-16:])
    assert len(link.sent) == len(write)
    for sent, golden in zip(link.sent, write, strict=True):
        assert sent.data[: len(golden.head)].hex(" ") == golden.head.hex(" ")
        assert sent.data[len(golden.head) :] == golden.data
        assert sent.kind == (seam.SEND_SE if golden.solicited else seam.SEND)
    assert slot.stag == 0
    link.session.progress(1.0)
    assert len(link.pool) == 64  # both slots are free again
    if kind is IserInitiator:
        link.respond(slot)
        assert slot.waiter.pending == 0 and slot.error is None and slot.data is None


@given(
    length=st.integers(1, 200_000),
    segment=st.integers(512, 40_000),
    burst=st.integers(512, 100_000),
    immediate=st.booleans(),
    inline=st.sampled_from([512, 8192, 16384]),
)
def test_any_write(length: int, segment: int, burst: int, immediate: bool, inline: int) -> None:
    """A write travels whole or not at all, in PDUs as long as TargetRecvDataSegmentLength.

    proves: ISER-6.4-2, ISER-6.4-3, ISER-7.3.1-6, ISER-7.3.1-15, ISER-7.3.4-2
    """
    parameters = agreed(
        immediate_data=immediate,
        target_recv_data_segment_length=segment,
        first_burst_length=burst,
    )
    link = Link(parameters, 400, inline)
    data = (DATA + DATA)[:length]
    link.write(data)
    command = pdu.ScsiCommand.unpack_from(link.sent[0].data, 28)
    inside = link.sent[0].data[MINIMUM_LENGTH:]
    assert (command.edtl, command.data_length) == (length, len(inside))
    pieces = pieces_of(link.sent)
    assert len(pieces) == len(link.sent) - 1
    whole = length <= burst
    assert link.advertised == [not whole]
    assert bool(command.flags & bhs.FLAG_FINAL) == (not pieces)
    if not whole:
        assert not inside and not pieces
        return
    assert immediate or not inside
    assert inside + b"".join(part for _, part in pieces) == data
    at = len(inside)
    for number, (head, part) in enumerate(pieces):
        last = number == len(pieces) - 1
        assert (head.buffer_offset, head.data_sn, head.data_length) == (at, number, len(part))
        assert head.flags == (bhs.FLAG_FINAL if last else 0)
        assert (head.itt, head.ttt, head.lun) == (command.itt, bhs.NO_TAG, bytes(8))
        assert last or len(part) == segment
        at += len(part)
    sizes = [len(inside)] * bool(inside) + [len(part) for _, part in pieces]
    assert set(sizes[:-1]) <= {segment} and sizes[-1] <= segment


def test_the_calls_of_the_seam() -> None:
    """The iSCSI layer makes the Data-Outs, and gives each to Send_Control with its data, behind the
    command; their slots belong to the datamover until sent_notify.

    proves: ISER-7.3.4-1, ISER-9.5.1-5
    """
    made, dm = session(initial_r2t=False, immediate_data=True)
    outs = dm.allocate_data_outs(2, 8192)
    made.queue.connection.allow_data_outs(list(outs), DEPTH)
    slot = write_through(made, DATA[:20480])
    assert [each for each, _ in dm.sent] == [slot, outs[1], outs[0]]
    command, *rest = [each for each, _ in dm.sent]
    assert command.direction == INLINE and bytes(command.inline[:8192]) == DATA[:8192]
    assert [each.direction for each in rest] == [UNSOLICITED] * 2
    parts = [bytes(each.inline[: each.inline_length]) for each in rest]
    assert parts == [DATA[8192:16384], DATA[16384:20480]]
    write_through(made, DATA[:16384])
    assert dm.sent[-1][0].direction == WRITE  # no slot is free
    dm.user.sent_notify(outs[0])
    write_through(made, DATA[:16384])
    assert dm.sent[-1][0] is outs[0]


def test_memory_for_data_outs_comes_with_the_first_of_them() -> None:
    """Sessions without such writes have none; there is never more than was said."""
    made, dm = session(depth=16, initial_r2t=False, immediate_data=True)
    asked: list[tuple[int, int]] = []
    allocate = dm.allocate_data_outs

    def counted(count: int, size: int) -> list[PduSlot]:
        asked.append((count, size))
        return allocate(count, size)

    dm.allocate_data_outs = counted  # type: ignore[method-assign]
    made.queue.connection.allow_data_outs([], 16, 10)
    write_through(made, DATA[:4096])
    write_through(made, DATA)  # too long to travel whole
    assert not asked
    write_through(made, DATA[:65536])
    assert asked == [(8, 8192)] and dm.sent[-1][0].direction == UNSOLICITED
    write_through(made, DATA[:65536])
    assert asked == [(8, 8192), (2, 8192)]
    assert dm.sent[-1][0].direction == WRITE  # three are free, it takes seven
    for slot, _ in dm.sent[3:10]:
        dm.user.sent_notify(slot)
    write_through(made, DATA[:65536])
    assert len(asked) == 2 and dm.sent[-1][0].direction == UNSOLICITED
    outs = made.queue.connection.data_outs
    outs.take_back()  # not while some are on their way
    for slot, _ in dm.sent[-7:]:
        dm.user.sent_notify(slot)
    write_through(made, DATA[:16384])
    assert len(asked) == 2
    dm.user.sent_notify(dm.sent[-1][0])
    outs.take_back()
    write_through(made, DATA[:16384])
    assert asked[2:] == [(8, 8192)]


def test_without_memory_for_data_outs_the_write_is_advertised() -> None:
    made, dm = session(initial_r2t=False, immediate_data=True)

    def refuse(count: int, size: int) -> list[PduSlot]:
        raise OSError(12, "Cannot allocate memory")

    dm.allocate_data_outs = refuse  # type: ignore[method-assign]
    made.queue.connection.allow_data_outs([], DEPTH, 10)
    slot = write_through(made, DATA[:65536])
    assert [each for each, _ in dm.sent] == [slot] and slot.direction == WRITE


@pytest.mark.parametrize(("level", "immediate"), [(1, SEGMENT), (2, 0)])
def test_no_immediate_data_where_the_write_may_be_reassigned(level: int, immediate: int) -> None:
    """Else peers could take what TASK REASSIGN advertises for another part of it."""
    link = Link(agreed(error_recovery_level=level))
    link.write(DATA[:20480])
    command, *rest = link.sent
    assert len(command.data) == MINIMUM_LENGTH + immediate
    data = command.data[MINIMUM_LENGTH:] + b"".join(data for _, data in pieces_of(rest))
    assert data == DATA[:20480] and link.advertised == [False]


def test_no_data_out_where_r2t_is_required() -> None:
    """The target did not agree to InitialR2T=No: its login gave us no slots for Data-Outs.

    proves: ISER-7.3.1-6
    """
    link = Link(agreed(), 0)
    link.write(DATA[:16384])
    assert link.advertised == [True] and len(link.sent) == 1


def test_memory_is_used_again_only_when_it_has_left() -> None:
    """Slots whose Sends have not left are nobody's; a write that finds too few is advertised."""
    link = Link(agreed(), 3)
    first = link.write(DATA[:16384])
    second = link.write(DATA[:65536])
    third = link.write(DATA[8192 : 3 * 8192])
    fourth = link.write(DATA[16384 : 4 * 8192])
    assert link.advertised == [False, True, False, False]
    parts = [part for _, part in pieces_of(link.sent)]
    assert parts == [DATA[8192:16384], DATA[16384:24576], DATA[24576:32768]]
    link.session.progress(0.0)  # from here on they are known to have left
    for slot in (first, second, third, fourth):
        link.respond(slot)
        assert slot.error is None
        link.session.queue.release(slot)
    link.write(DATA[:32768])  # three Data-Outs: all slots are free again
    assert link.advertised[-1] is False


def test_an_answer_before_the_data_has_left() -> None:
    """A target may refuse a write before it has all of it. The caller's buffer is free then, and
    what is still to be sent is not changed by the next write."""
    link = Link(agreed(), 2)
    source = bytearray(DATA[:16384])
    slot = write_through(link.session, source)
    link.datamover.user.control_notify(memoryview(response(slot.itt, status=2)), 0, 0)
    assert slot.waiter.pending == 0 and slot.status == 2
    source[:] = bytes(16384)
    link.session.queue.release(slot)
    source.clear()  # BufferError while a view of it is left
    link.write(bytes(8192) + b"n" * 8192)
    (_, old), (_, new) = pieces_of(link.sent)
    assert (old, new) == (DATA[8192:16384], b"n" * 8192)
    link.write(DATA[:16384])
    assert link.advertised == [False, False, True]  # both slots are still with the network


def test_only_with_few_commands_in_flight() -> None:
    """With more, the target has other work while it waits for what it reads."""
    link = Link(agreed(), most_busy=2)
    slots = [link.write(DATA[:16384]) for _ in range(4)]
    assert link.advertised == [False, False, True, True]
    for slot in slots:
        link.respond(slot)
        link.session.queue.release(slot)
    # The first writes behind a batch of answers do not count as few: more are about to follow.
    for whole in (False, True, True):
        slot = link.write(DATA[:16384])
        assert link.advertised[-1] is not whole
        link.respond(slot)
        link.session.queue.release(slot)


def test_data_outs_follow_their_command() -> None:
    """Of two writes, the data of the first comes first (RFC 7143 section 4.2.5.2)."""
    link = Link(agreed())
    link.session.queue.batch = True
    first, second = link.write(DATA[:24576]), link.write(DATA[:16384])
    link.session.queue.flush()
    tags = [int.from_bytes(each.data[44:48], "big") for each in link.sent]
    assert tags == [first.itt] * 3 + [second.itt] * 2


def test_the_next_connection_takes_less() -> None:
    """What was sent with Data-Outs is whole in the caller's buffer, and is sent again as the next
    connection wants it."""
    lost, kept = Link(agreed()), Link(agreed(initial_r2t=True), 0)
    lost.write(DATA[:65536])
    assert lost.advertised == [False]
    lost.lose()
    made = lost.adopt(kept)
    assert kept.advertised == [True] and not pieces_of(kept.sent)
    sink = bytearray(65536)
    request = seam.WorkRequest(seam.RDMA_READ)
    header = ControlHeader.unpack_from(kept.sent[0].data)
    request.data, request.stag, request.to = memoryview(sink), header.write_stag, header.write_base
    kept.theirs.post([request])
    made.progress(3.0)
    kept.theirs.progress(0.0)
    assert sink == DATA[:65536]


def test_the_next_connection_has_slots_of_its_own() -> None:
    lost, kept = Link(agreed()), Link(agreed())
    slot = lost.write(DATA[:16384])
    lost.lose()
    made = lost.adopt(kept)
    assert kept.advertised == [False]
    assert [part for _, part in pieces_of(kept.sent)] == [DATA[8192:16384]]
    kept.theirs.progress(0.0)
    made.progress(3.0)
    assert len(kept.pool) == 64  # given back
    assert slot.data is not None


def test_the_end_of_a_connection_frees_everything() -> None:
    link = Link(agreed())
    slot = link.write(DATA[:65536])
    link.theirs.close()
    for _ in range(2):
        link.session.progress(1.0)
    assert isinstance(slot.error, ConnectionLost) and slot.data is None


@pytest.mark.parametrize("length", [8192, 8193])
def test_a_write_that_fits_into_its_command(length: int) -> None:
    """Immediate data as ever: with the F bit, and without a Data-Out.

    proves: ISER-2.4.1-2
    """
    link = Link(agreed())
    link.write(DATA[:length])
    flags = link.sent[0].data[29]
    assert bool(flags & bhs.FLAG_FINAL) == (length == 8192)
    assert len(link.sent) == (1 if length == 8192 else 2)
