"""ErrorRecoveryLevel 1 in the session: commands that the target has discarded, and pings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from iserblk.commands.command import SENT, TAKEN
from iserblk.errors import CommandRejected, RemoteProtocolError
from iserblk.initiator.session.deadlines import IDLE_S, SOON_S, STEP_S, Ladder
from iserblk.initiator.session.sending import CONTROL_SLOTS, MOST_AGAIN
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.keys import SessionParameters
from iserblk.scsi.tasks import NO_DATA, READ, WRITE
from tests.initiator.fake import CountingWaiter, FakeDatamover, FakeDriver
from tests.support import logs

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.REJECTED)

MOST = 1 << 16


class Bench:
    """A session with one connection."""

    def __init__(self, level: int = 1, rdma: bool = False) -> None:
        self.dm = FakeDatamover()
        slots = [TaskSlot(index) for index in range(8 + CONTROL_SLOTS)]
        self.dm.allocate_connection_resources(list(slots), 0)
        agreed = SessionParameters(error_recovery_level=level, rdma_extensions=rdma)
        self.session = Session(self.dm, slots, agreed, "portal:3260", 1000.0)
        self.session.start(1, 1, MOST, 100)
        self.session.drive(FakeDriver(self.session))
        self.ladder = Ladder(self.session)
        self.waiter = CountingWaiter()
        self.stat_sn = 100
        self.now = self.session.last_heard

    def submit(self, direction: int = NO_DATA, size: int = 512) -> TaskSlot:
        slot = self.session.queue.take_now()
        assert slot is not None
        slot.cdb[:] = bytes(16)
        slot.direction = direction
        slot.data = None if direction == NO_DATA else memoryview(bytearray(size))
        slot.length = 0 if direction == NO_DATA else size
        slot.waiter = self.waiter
        self.waiter.pending += 1
        self.session.queue.submit(slot)
        return slot

    def receive(self, message: pdu.Pdu, data: bytes = b"") -> None:
        self.dm.inbox.append(message.pack() + data)
        self.session.progress(self.now)

    def numbers(self, exp_cmd_sn: int = 1) -> dict[str, Any]:
        self.stat_sn += 1
        return {"stat_sn": self.stat_sn - 1, "exp_cmd_sn": exp_cmd_sn, "max_cmd_sn": MOST}

    def reject(self, header: bytes, reason: int = pdu.REJECT_DATA_DIGEST_ERROR) -> None:
        self.receive(pdu.Reject(reason=reason, data_length=48, **self.numbers()), header)

    def commands(self) -> list[tuple[int, int]]:
        """ITT and CmdSN of all SCSI Commands that were sent."""
        found = []
        for _, sent in self.dm.sent:
            if sent[0] & bhs.OPCODE_MASK == bhs.SCSI_COMMAND:
                command = pdu.ScsiCommand.unpack_from(sent)
                found.append((command.itt, command.cmd_sn))
        return found

    def pings(self) -> list[pdu.NopOut]:
        return [
            pdu.NopOut.unpack_from(sent)
            for _, sent in self.dm.sent
            if sent[0] & bhs.OPCODE_MASK == bhs.NOP_OUT
        ]

    def tick(self, after: float) -> None:
        self.now += after
        self.ladder.tick(self.now)

    def pong(self, ping: pdu.NopOut, exp_cmd_sn: int) -> None:
        self.receive(pdu.NopIn(itt=ping.itt, **self.numbers(exp_cmd_sn)))


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    if made.session.error is None:
        made.session.fail(RemoteProtocolError("iSCSI", "closing"))


# shows: SYSTEM-40
def test_a_command_that_was_discarded_is_sent_again(bench: Bench) -> None:
    """With its tag and its CmdSN (RFC 7143 section 7.2.1); the rest of it goes along."""
    slot = bench.submit(WRITE)
    header = bytes(slot.bhs)
    bench.reject(header)
    again = pdu.ScsiCommand.unpack_from(bench.dm.sent[-1][1])
    first = pdu.ScsiCommand.unpack_from(header)
    assert again.exp_stat_sn == 101
    again.exp_stat_sn = first.exp_stat_sn
    assert again == first
    assert slot.state == SENT and bench.waiter.pending == 1


def test_a_command_is_not_sent_again_for_ever(bench: Bench) -> None:
    """The target need not take what we send to go on like that."""
    slot = bench.submit(WRITE)
    header = bytes(slot.bhs)
    for _ in range(MOST_AGAIN):
        bench.reject(header)
    assert bench.session.error is None
    bench.reject(header)
    assert isinstance(bench.session.error, RemoteProtocolError)
    assert len(bench.commands()) == 1 + MOST_AGAIN
    assert bench.waiter.woken == 1


def test_each_command_is_counted_anew(bench: Bench) -> None:
    for _ in range(MOST_AGAIN + 1):
        slot = bench.submit(WRITE)
        bench.reject(bytes(slot.bhs))
        bench.receive(pdu.ScsiResponse(itt=slot.itt, status=0, **bench.numbers()))
        bench.session.queue.release(slot)
    assert bench.session.error is None


def test_answers_to_pings_do_not_have_it_sent_for_ever_either(bench: Bench) -> None:
    """Tags can be guessed: such a target need not have taken the pings."""
    bench.submit()
    bench.tick(SOON_S)
    for _ in range(MOST_AGAIN + 1):
        bench.pong(bench.pings()[-1], 1)
    assert isinstance(bench.session.error, RemoteProtocolError)
    assert len(bench.commands()) == 1 + MOST_AGAIN


@pytest.mark.parametrize("reason", [pdu.REJECT_PROTOCOL_ERROR, pdu.REJECT_DATA_DIGEST_ERROR])
def test_over_iser_a_rejected_command_ends(reason: int) -> None:
    """Sent again, it would advertise its buffer once more, and the end of the command would take
    back one of the two STags."""
    bench = Bench(rdma=True)
    slot = bench.submit(READ)
    bench.reject(bytes(slot.bhs), reason)
    assert slot.state == TAKEN and isinstance(slot.error, CommandRejected)
    assert len(bench.commands()) == 1
    bench.session.fail(RemoteProtocolError("iSCSI", "closing"))


@pytest.mark.parametrize("reason", [pdu.REJECT_PROTOCOL_ERROR, pdu.REJECT_DATA_DIGEST_ERROR])
def test_at_level_0_a_rejected_command_ends(reason: int) -> None:
    bench = Bench(0)
    slot = bench.submit(WRITE)
    bench.reject(bytes(slot.bhs), reason)
    assert slot.state == TAKEN and isinstance(slot.error, CommandRejected)
    assert len(bench.commands()) == 1
    bench.session.fail(RemoteProtocolError("iSCSI", "closing"))


@pytest.mark.parametrize("level", [0, 1])
def test_a_rejected_data_out_or_snack_does_not_end_its_task(level: int) -> None:
    """The response is still to come (section 7.3)."""
    bench = Bench(level)
    slot = bench.submit(READ)
    for opcode, reason in ((bhs.DATA_OUT, 2), (bhs.SNACK_REQUEST, 3), (bhs.SNACK_REQUEST, 4)):
        header = bytearray(slot.bhs)
        header[0] = opcode
        bench.reject(bytes(header), reason)
    assert slot.state == SENT and len(bench.commands()) == 1
    bench.session.fail(RemoteProtocolError("iSCSI", "closing"))


def test_a_rejected_snack_is_no_warning(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Its reason may be that the target has not sent yet what it was asked for (11.16)."""
    slot = bench.submit(WRITE)
    caplog.set_level(logging.INFO)
    snack = pdu.SnackRequest(
        kind=pdu.SNACK_DATA, itt=slot.itt, exp_stat_sn=100, beg_run=0, run_length=0
    )
    bench.reject(snack.pack(), pdu.REJECT_PROTOCOL_ERROR)
    assert [record.levelno for record in caplog.records] == [logging.INFO]
    assert slot.state == SENT
    bench.reject(bytes(slot.bhs), pdu.REJECT_PROTOCOL_ERROR)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]


def test_silence_with_commands_in_flight_is_asked_about_soon(bench: Bench) -> None:
    """A lost ping is no reason to cut; silence for as long as at level 0 is."""
    bench.submit()
    bench.tick(SOON_S / 2)
    assert not bench.pings()
    bench.tick(SOON_S)
    assert len(bench.pings()) == 1
    while bench.now - bench.session.last_heard + SOON_S < IDLE_S + STEP_S:
        bench.tick(SOON_S)
        assert not bench.dm.disconnected
    assert len(bench.pings()) > 3
    bench.tick(SOON_S)
    bench.tick(SOON_S)
    assert bench.dm.disconnected


def test_an_idle_session_is_asked_as_seldom_as_ever(bench: Bench) -> None:
    bench.tick(IDLE_S - 1)
    assert not bench.pings()


def test_a_ping_finds_commands_that_did_not_arrive(bench: Bench) -> None:
    """Each is sent again, and another ping shows the next."""
    slots = [bench.submit() for _ in range(3)]
    bench.tick(SOON_S)
    (ping,) = bench.pings()
    bench.pong(ping, 2)  # it has the first
    numbers = [(slot.itt, slot.cmd_sn) for slot in slots]
    assert bench.commands() == [*numbers, numbers[1]]
    bench.pong(bench.pings()[-1], 3)
    assert bench.commands() == [*numbers, numbers[1], numbers[2]]
    bench.pong(bench.pings()[-1], 4)
    assert len(bench.commands()) == 5 and len(bench.pings()) == 3


def test_a_command_behind_the_ping_is_not_lost(bench: Bench) -> None:
    """It was on its way when the ping was answered."""
    bench.submit()
    bench.tick(SOON_S)
    (ping,) = bench.pings()
    bench.submit()
    bench.pong(ping, 2)
    assert len(bench.commands()) == 2 and len(bench.pings()) == 1


def test_over_iser_nothing_is_sent_again() -> None:
    """The RCaP loses no PDU.

    proves: ISER-10.2.1-1
    """
    bench = Bench(rdma=True)
    bench.submit()
    bench.tick(SOON_S)
    (ping,) = bench.pings()
    bench.pong(ping, 1)
    assert len(bench.commands()) == 1 and len(bench.pings()) == 1
    bench.session.fail(RemoteProtocolError("iSCSI", "closing"))


def test_the_datamover_is_asked_each_second(bench: Bench) -> None:
    bench.tick(1.0)
    bench.tick(1.0)
    assert bench.dm.ticks == 2


def test_what_cannot_be_had_again_ends_the_connection(bench: Bench) -> None:
    bench.dm.tick_error = RemoteProtocolError("iSCSI", "a lost status does not come")
    bench.tick(1.0)
    assert isinstance(bench.session.error, RemoteProtocolError)


def test_at_level_0_nothing_is_asked() -> None:
    bench = Bench(0)
    bench.submit()
    bench.tick(SOON_S + 1)
    assert not bench.pings() and not bench.dm.ticks
    bench.session.fail(RemoteProtocolError("iSCSI", "closing"))
