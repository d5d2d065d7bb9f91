"""Bidirectional commands of an initiator: golden bytes on the wire, residuals, losses, retries."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from iserblk.commands.command import QUEUED, SENT
from iserblk.commands.running import command as run_command
from iserblk.commands.running import fill_bidirectional
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.errors import CommandTimeout, ConnectionLost, NotSupported, ScsiError
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import UNEXPECTED, Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap import seam
from iserblk.scsi import cdb, sense
from iserblk.scsi import status as sam
from iserblk.sockets.stream import SocketStream
from tests.initiator.fake import CountingWaiter, FakeDriver, command, response, session
from tests.initiator.session.test_session_recovery import Kept
from tests.initiator.test_initiator_iser_rules import Link
from tests.support import logs
from tests.vectors import bidirectional as golden

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED)

OUT = bytes(i * 7 + 1 & 255 for i in range(1024))
BACK = bytes(i * 5 & 255 for i in range(1024))
CDB = cdb.xdwriteread10(5, 2)


def submit(made: Session, data_out: bytes, data_in: bytearray) -> TaskSlot:
    slot = made.queue.take_now()
    assert slot is not None
    fill_bidirectional(slot, bytes(8), memoryview(data_out), memoryview(data_in))
    slot.cdb[:] = CDB.ljust(16, b"\0")
    slot.waiter = CountingWaiter()
    slot.waiter.pending = 1
    made.queue.submit(slot)
    return slot


def end_one(link: Link) -> None:
    """A command with CmdSN 1."""
    slot = command(link.session, CountingWaiter())
    link.respond(slot.itt)
    link.sent.clear()


# shows: SYSTEM-36
def test_over_iser_byte_by_byte() -> None:
    """One Send with both STags in its header, and the AHS behind its BHS. The response names the
    Read STag; the initiator invalidates the Write STag.

    proves: ISER-9.5.3-1, ISER-7.3.2-11, ISER-2.4.1-4, ISER-7.3.1-2, ISER-7.3.1-10
    proves: ISER-7.3.1-11, ISER-9.2-5
    """
    link = Link(immediate=True)  # even so, no data goes along
    end_one(link)
    back = bytearray(1024)
    slot = submit(link.session, OUT, back)
    (sent,) = link.sent
    write_stag, read_stag = slot.stag, slot.stag_in
    base, base_in = slot.base, int.from_bytes(sent.data[20:28], "big")
    assert sent.kind == seam.SEND_SE
    assert sent.data == golden.iser_header(write_stag, base, read_stag, base_in) + golden.command(
        slot.itt, exp_stat_sn=101
    )
    sink = bytearray(1024)
    link.post(seam.RDMA_READ, sink, write_stag, base)
    link.post(seam.RDMA_WRITE, BACK, read_stag, base_in)
    link.session.progress(1.0)
    link.theirs.progress(0.0)
    assert sink == OUT and back == BACK
    link.post(
        seam.SEND_SE_INVALIDATE,
        golden.ISER_HEADER_OF_RESPONSE + golden.response(101, 0, itt=slot.itt),
        read_stag,
    )
    link.session.progress(1.0)
    assert slot.waiter.pending == 0 and slot.error is None and link.session.error is None
    assert (slot.status, slot.residual, slot.residual_in) == (0, 0, 0)
    assert not link.is_open(write_stag) and not link.is_open(read_stag)


class Wire:
    """A session over TCP, and what it says."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.socket.setblocking(False)
        datamover = TcpInitiator(SocketStream(ours), 8192, 65536)
        slots = [TaskSlot(index) for index in range(4 + CONTROL_SLOTS)]
        datamover.allocate_connection_resources(list(slots), UNEXPECTED)
        agreed = SessionParameters(immediate_data=True, initial_r2t=False)
        self.session = Session(datamover, slots, agreed, "portal:3260", 30.0)
        self.session.start(1, 1, 64, 1)
        self.session.drive(FakeDriver(self.session))
        slot = command(self.session, CountingWaiter())
        self.hear(response(slot.itt, 1, 64))
        self.said()

    def said(self) -> bytes:
        return self.socket.recv(1 << 20)

    def hear(self, data: bytes) -> None:
        self.socket.sendall(data)
        self.session.progress(1.0)
        self.session.queue.flush()

    def close(self) -> None:
        self.session.fail(ConnectionLost("the end"))
        self.socket.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()


@pytest.mark.parametrize(("most", "taken"), [(7, False), (8, True), (0, True), (256, True)])
def test_a_target_that_takes_fewer_bytes_of_ahs(most: int, taken: bool) -> None:
    """MaxAHSLength of the target (0: no limit): the command ends at once, and nothing is sent.
    In Traditional iSCSI the key has no meaning. proves: ISER-3.3-10"""
    for rdma in (True, False):
        link = Link(rdma_extensions=rdma, max_ahs_length=most)
        end_one(link)
        slot = submit(link.session, OUT, bytearray(1024))
        if taken or not rdma:
            assert slot.error is None and slot.waiter.pending == 1 and len(link.sent) == 1
        else:
            assert isinstance(slot.error, NotSupported) and "MaxAHSLength" in str(slot.error)
            assert slot.waiter.pending == 0 and not link.sent
        assert link.session.error is None


def test_over_tcp_byte_by_byte(wire: Wire) -> None:
    """Data-Out is sent for the R2T, and Data-In placed; R2Ts and Data-In are numbered together."""
    back = bytearray(1024)
    slot = submit(wire.session, OUT, back)
    assert wire.said() == golden.command(slot.itt, exp_stat_sn=2)
    wire.hear(golden.r2t(77, 2, slot.itt))
    data_out = pdu.DataOut(
        flags=bhs.FLAG_FINAL,
        data_length=1024,
        lun=bytes(8),
        itt=slot.itt,
        ttt=77,
        exp_stat_sn=2,
        data_sn=0,
        buffer_offset=0,
    )
    assert wire.said() == data_out.pack() + OUT
    wire.hear(golden.data_in(itt=slot.itt) + BACK)
    assert back == BACK and slot.waiter.pending == 1
    wire.hear(golden.response(2, itt=slot.itt))
    assert slot.waiter.pending == 0 and slot.error is None and wire.session.error is None


@pytest.mark.parametrize(
    ("flags", "bidi", "residual", "expected"),
    [
        (0x80, 0, 0, (0, 0)),
        (0x88, 24, 0, (0, 24)),
        (0x90, 24, 0, (0, -24)),
        (0x82, 24, 100, (100, 0)),
        (0x84, 24, 100, (-100, 0)),
        (0x8A, 24, 100, (100, 24)),
        (0x94, 24, 100, (-100, -24)),
    ],
)
def test_both_residuals(flags: int, bidi: int, residual: int, expected: tuple[int, int]) -> None:
    """A count is only valid with one of its flags (RFC 7143 section 11.4.1)."""
    link = Link()
    end_one(link)
    slot = submit(link.session, OUT, bytearray(1024))
    answer = golden.response(101, 0, flags, bidi, residual, itt=slot.itt)
    link.post(seam.SEND_SE, golden.ISER_HEADER_OF_RESPONSE + answer)
    link.session.progress(1.0)
    assert (slot.residual, slot.residual_in) == expected


def test_a_status_in_a_data_in_is_refused(wire: Wire) -> None:
    """The status of a bidirectional command comes in a SCSI Response (RFC 7143 section 11.7.3)."""
    slot = submit(wire.session, OUT, bytearray(1024))
    head = bytearray(golden.data_in(itt=slot.itt))
    head[1] |= 0x01
    head[39] = 0  # DataSN
    wire.hear(bytes(head) + BACK)
    assert "status of a bidirectional task" in str(wire.session.error)


@pytest.mark.parametrize("sn", [0, 2])
def test_a_data_in_that_is_numbered_by_itself_is_refused(wire: Wire, sn: int) -> None:
    slot = submit(wire.session, OUT, bytearray(1024))
    wire.hear(golden.r2t(77, 2, slot.itt))
    head = bytearray(golden.data_in(itt=slot.itt))
    head[39] = sn
    wire.hear(bytes(head) + BACK)
    assert "expected 1" in str(wire.session.error)


def test_it_is_not_sent_again_on_another_connection() -> None:
    """Whether it was carried out is not known, and its Data-In depends on that. One that was never
    sent is sent there."""
    kept = Kept(window=1)
    out, back = bytearray(OUT), bytearray(1024)
    sent = submit(kept.session, out, back)  # type: ignore[arg-type]
    waiting = submit(kept.session, OUT, bytearray(1024))
    assert (sent.state, waiting.state) == (SENT, QUEUED)
    kept.lose()
    assert isinstance(sent.error, ConnectionLost) and "not sent again" in str(sent.error)
    assert sent.waiter.pending == 0
    assert (sent.data, sent.data_in, sent.stag, sent.stag_in) == (None, None, 0, 0)
    kept.session.queue.release(sent)
    for buffer in (out, back):
        buffer.clear()  # BufferError while a view of it is left
    dm = kept.regain()
    ((slot, header),) = dm.sent
    assert slot is waiting and header[1] & bhs.FLAGS_BIDIRECTIONAL == bhs.FLAGS_BIDIRECTIONAL
    assert bytes(slot.inline[:8]) == golden.command()[48:]


def test_the_end_of_the_session_ends_it() -> None:
    made, _ = session()
    back = bytearray(1024)
    slot = submit(made, OUT, back)
    made.fail(ConnectionLost("the end"))
    assert isinstance(slot.error, ConnectionLost) and slot.data_in is None
    back.clear()


def test_a_deadline_aborts_it() -> None:
    """Both STags are invalid when the target has confirmed the abort.

    proves: ISER-2.4.1-4, ISER-7145-1.5.1-2
    """
    link = Link()
    back = bytearray(1024)
    slot = submit(link.session, OUT, back)
    stags = slot.stag, slot.stag_in
    Ladder(link.session).abort(slot, 1.0)
    abort = link.pdus[-1]
    answer = pdu.TaskManagementResponse(
        response=pdu.TMF_COMPLETE,
        itt=abort.number(16),
        stat_sn=100,
        exp_cmd_sn=2,
        max_cmd_sn=64,
    )
    link.post(seam.SEND_SE, golden.ISER_HEADER_OF_RESPONSE + answer.pack())
    link.session.progress(1.0)
    assert isinstance(slot.error, CommandTimeout)
    assert not any(link.is_open(stag) for stag in stags)
    back.clear()


# -- the command with its retries ------------------------------------------------------------------

ATTENTION = sense.encode_fixed(sense.UNIT_ATTENTION, 0x29, 0)
ABORTED = sense.encode_fixed(sense.ABORTED_COMMAND, 0x47, 0)
NOT_READY = sense.encode_fixed(sense.NOT_READY, 0x04, 0x01)
GOOD: dict[str, Any] = {}


def ask(answers: list[dict[str, Any]], short_ok: bool = False) -> int:
    """Run the command while the target gives these answers, each to one sending of it; the result.
    Raises the command's error."""
    made, dm = session()
    back = memoryview(bytearray(1024))
    steps = run_command(
        made, bytes(8), CDB, "lun0", data_in=back, data_out=memoryview(OUT), short_ok=short_ok
    )
    todo = iter(answers)
    try:
        while True:
            if not isinstance(next(steps), float):
                (slot,) = [slot for slot in made.queue.tasks if slot.state == SENT]
                dm.inbox.append(response(slot.itt, **next(todo)))
                made.progress(1.0)
    except StopIteration as stop:
        assert isinstance(stop.value, int)
        return stop.value
    finally:
        assert len(dm.sent) == len(answers)


def test_the_result_is_about_data_in() -> None:
    assert ask([GOOD]) == 1024
    under = {"flags": 0x88, "bidi_residual": 1000}
    assert ask([under], short_ok=True) == 24
    with pytest.raises(ScsiError, match="with 1024 bytes of Data-In moved 24"):
        ask([under])
    over = {"flags": 0x90, "bidi_residual": 1000}
    assert ask([over], short_ok=True) == 1024
    with pytest.raises(ScsiError):
        ask([over])
    with pytest.raises(ScsiError, match="of 1024 bytes moved 1014"):
        ask([{"flags": 0x82, "residual": 10}])


def test_a_residual_of_an_earlier_command_does_not_count() -> None:
    """Here of its own first sending, which the target had not begun."""
    full = {"status": sam.BUSY, "flags": 0x88, "bidi_residual": 1024}
    assert ask([full, GOOD]) == 1024


@pytest.mark.parametrize("attribute", [bhs.ATTR_SIMPLE, bhs.ATTR_ORDERED, bhs.ATTR_HEAD_OF_QUEUE])
def test_any_command_may_have_a_task_attribute(attribute: int) -> None:
    made, dm = session()
    steps = run_command(made, bytes(8), CDB, "lun0", attribute=attribute)
    assert not isinstance(next(steps), float)
    ((_, header),) = dm.sent
    assert header[1] == bhs.FLAG_FINAL | attribute
    steps.close()


@pytest.mark.parametrize(
    "refusal",
    [
        {"status": sam.BUSY},
        {"status": sam.TASK_SET_FULL},
        {"status": sam.CHECK_CONDITION, "sense": ATTENTION},
    ],
    ids=str,
)
def test_it_is_sent_again_where_it_was_not_begun(refusal: dict[str, Any]) -> None:
    assert ask([refusal, refusal, GOOD]) == 1024


@pytest.mark.parametrize(
    "failure",
    [
        {"status": sam.TASK_ABORTED},
        {"status": sam.CHECK_CONDITION, "sense": ABORTED},
        {"status": sam.CHECK_CONDITION, "sense": NOT_READY},
    ],
    ids=str,
)
def test_it_is_not_sent_again_where_it_may_have_been_begun(failure: dict[str, Any]) -> None:
    """A second XDWRITEREAD would return the exclusive or of the new data with itself."""
    with pytest.raises(ScsiError):
        ask([failure])
