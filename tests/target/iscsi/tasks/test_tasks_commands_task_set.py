"""Task attributes at the target: ORDERED and HEAD OF QUEUE, within a session and between two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.scsi import cdb, mode, sense
from iserblk.scsi import reservations as pr
from iserblk.scsi import status as sam
from iserblk.target.iscsi.tasks.slot import TargetTask
from tests.support import logs
from tests.target.iscsi.test_connection import READ_10, WRITE_10, Client, cdb10
from tests.target.iser_client import IserClient, rw10
from tests.target.scsi_client import make_unit

pytestmark = pytest.mark.logs(logs.IGNORED)

UNTAGGED, SIMPLE, ORDERED, HEAD_OF_QUEUE, ACA, RESERVED = range(6)
FLUSH = cdb.synchronize_cache10(0, 0)
READY = cdb.test_unit_ready()


class Host:
    """An initiator whose flushes run until ``end`` is called. ``answers``: ITT and status of each
    response, oldest first."""

    def __init__(self, *keys: tuple[str, str], beside: Host | None = None) -> None:
        self.all: list[Host] = beside.all if beside else []
        self.all.append(self)
        self.client: Client = Client(*keys, beside=beside.client if beside else None)
        self.running: list[TargetTask] = []
        self.client.owner.offload = self.running.append
        self.next_itt = 100

    def say(self, command: bytes, attribute: int, edtl: int = 0, flags: int = 0) -> int:
        """Send a command; returns its ITT."""
        self.next_itt += 1
        self.client.command(
            command.ljust(16, b"\0"), bhs.FLAG_FINAL | flags | attribute, edtl, itt=self.next_itt
        )
        return self.next_itt

    def flush(self, attribute: int = SIMPLE) -> int:
        return self.say(FLUSH, attribute)

    def end(self, itt: int) -> None:
        """The thread that runs this task has done it."""
        (slot,) = [slot for slot in self.running if slot.itt == itt]
        self.running.remove(slot)
        self.client.device.run(slot.task, slot.buffer)
        self.client.connection.finish(slot)
        self.client.connection.flush()
        self.client.run()

    @property
    def begun(self) -> list[int]:
        return [slot.itt for slot in self.running]

    @property
    def answers(self) -> list[tuple[int, int]]:
        self.client.run()
        return [
            (int.from_bytes(head[16:20], "big"), head[3])
            for head, _ in self.client.heard
            if head[0] == bhs.SCSI_RESPONSE
        ]

    def manage(self, function: int, itt: int = bhs.NO_TAG) -> None:
        self.client.send(
            pdu.TaskManagementRequest(
                function=function,
                lun=bytes(8),
                itt=7,
                referenced_task_tag=itt,
                cmd_sn=self.client.cmd_sn,
                exp_stat_sn=1,
            )
        )

    def close(self) -> None:
        """Close this client and those beside it."""
        for each in self.all:
            each.client.close()


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def other(host: Host) -> Host:
    return Host(beside=host)


def test_an_ordered_command_begins_when_all_older_ones_have_ended(host: Host, other: Host) -> None:
    """Of all sessions: the LUN has one task set. Younger commands, of any session, wait for it."""
    one, two = host.flush(), other.flush()
    ordered = host.flush(ORDERED)
    younger, theirs = host.flush(), other.flush(UNTAGGED)
    assert (host.begun, other.begun) == ([one], [two])
    host.end(one)
    assert (host.begun, other.begun) == ([], [two])
    other.end(two)
    assert (host.begun, other.begun) == ([ordered], [])
    host.end(ordered)
    assert (host.begun, other.begun) == ([younger], [theirs])
    host.end(younger)
    other.end(theirs)
    assert host.answers == [(one, 0), (ordered, 0), (younger, 0)]
    assert other.answers == [(two, 0), (theirs, 0)]
    assert not host.client.device.task_sets.active


def test_simple_commands_wait_for_nothing(host: Host, other: Host) -> None:
    begun = [host.flush(), host.flush(UNTAGGED), host.flush(RESERVED)]
    assert host.begun == begun and other.flush() in other.begun
    assert not host.client.device.task_sets.active


def test_a_head_of_queue_command_overtakes_what_waits(host: Host, other: Host) -> None:
    one = host.flush()
    ordered, simple = host.flush(ORDERED), host.flush()
    head = other.flush(HEAD_OF_QUEUE)
    assert (host.begun, other.begun) == ([one], [head])
    host.end(one)
    assert host.begun == [], "dormant commands wait for it, too"
    other.end(head)
    assert host.begun == [ordered]
    host.end(ordered)
    assert host.begun == [simple]


@pytest.mark.parametrize(
    "command",
    [cdb.inquiry(96), cdb.report_luns(16), cdb.request_sense(18)],
    ids=lambda x: hex(x[0]),
)
def test_what_needs_no_lun_does_not_wait(host: Host, command: bytes) -> None:
    host.flush()
    host.flush(ORDERED)
    for attribute in (SIMPLE, ORDERED):
        host.client.heard.clear()
        host.say(command, attribute, 96, bhs.FLAG_READ)
        assert host.client.opcodes()
        assert len(host.begun) == 1


def test_an_ordered_write_lands_between_its_neighbours(host: Host, other: Host) -> None:
    """Its data may come before its turn; it is neither written nor asked for before."""
    unsolicited = Host(("InitialR2T", "No"), beside=host)
    client = unsolicited.client
    first = host.flush()
    client.command(cdb10(WRITE_10, 2), bhs.FLAG_WRITE | ORDERED, 1024, b"a" * 512, itt=1)
    client.data_out(b"b" * 512, 512, bhs.NO_TAG)
    other.say(cdb10(WRITE_10, 1), SIMPLE, 512, bhs.FLAG_WRITE)
    read = other.say(cdb10(READ_10, 2), SIMPLE, 1024, bhs.FLAG_READ)
    assert not any(host.client.store.content) and not other.client.heard and not client.heard
    host.end(first)
    assert host.client.store.content[:1024] == b"a" * 512 + b"b" * 512
    assert unsolicited.answers == [(1, 0)]
    other.client.run()
    units = {head[0]: (head, data) for head, data in other.client.heard}
    assert set(units) == {bhs.R2T, bhs.DATA_IN}
    assert int.from_bytes(units[bhs.DATA_IN][0][16:20], "big") == read
    assert units[bhs.DATA_IN][1] == b"a" * 512 + b"b" * 512


def test_a_command_is_looked_at_when_its_turn_comes(host: Host, other: Host) -> None:
    """What it depends on may be changed by the commands that it waits for: here reservations, and
    the data of an answer."""
    register = pr.OUT_CDB.pack(0x5F, pr.REGISTER, 0, pr.PARAMETER_LENGTH)
    parameters = bytes(8) + (77).to_bytes(8, "big") + bytes(8)
    host.client.command(
        register.ljust(16, b"\0"),
        bhs.FLAG_FINAL | bhs.FLAG_WRITE | ORDERED,
        len(parameters),
        itt=50,
    )
    (r2t,) = [pdu.ReadyToTransfer.unpack_from(head) for head, _ in host.client.heard]
    reserve = pr.OUT_CDB.pack(0x5F, pr.RESERVE, pr.WRITE_EXCLUSIVE, pr.PARAMETER_LENGTH)
    host.client.command(
        reserve.ljust(16, b"\0"),
        bhs.FLAG_FINAL | bhs.FLAG_WRITE | ORDERED,
        len(parameters),
        (77).to_bytes(8, "big") + bytes(16),
        itt=51,
    )
    keys = host.say(pr.IN_CDB.pack(0x5E, pr.READ_KEYS, 64), SIMPLE, 64, bhs.FLAG_READ)
    write = other.say(cdb10(WRITE_10, 1), SIMPLE, 512, bhs.FLAG_WRITE)
    assert other.answers == []
    host.client.send(
        pdu.DataOut(
            flags=bhs.FLAG_FINAL,
            data_length=len(parameters),
            lun=bytes(8),
            itt=50,
            ttt=r2t.ttt,
            exp_stat_sn=1,
            data_sn=0,
            buffer_offset=0,
        ),
        parameters,
    )
    assert host.answers == [(50, 0), (51, 0)]
    (answer,) = [
        data for head, data in host.client.heard if int.from_bytes(head[16:20], "big") == keys
    ]
    assert answer[4:16] == (8).to_bytes(4, "big") + (77).to_bytes(8, "big")
    assert other.answers == [(write, sam.RESERVATION_CONFLICT)]


def test_a_dormant_command_can_be_aborted(host: Host) -> None:
    one, ordered, simple = host.flush(), host.flush(ORDERED), host.flush()
    host.manage(pdu.TMF_ABORT_TASK, ordered)
    assert host.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE]
    assert host.begun == [one, simple]
    host.end(one)
    host.end(simple)
    assert host.answers == [(one, 0), (simple, 0)]


def test_a_reset_ends_dormant_commands_of_all_sessions(host: Host, other: Host) -> None:
    """None of them begins in the middle of it."""
    one = host.flush()
    host.flush(ORDERED)
    host.flush(ORDERED)
    theirs = [other.flush(), other.flush(ORDERED)]
    third = Host(beside=host)
    third.manage(pdu.TMF_LOGICAL_UNIT_RESET)
    assert other.answers == [(itt, sam.TASK_ABORTED) for itt in theirs]
    assert third.client.opcodes() == [], "a thread runs a command yet"
    assert (host.begun, other.begun) == ([one], [])
    host.end(one)
    third.client.run()
    assert third.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE]
    assert [status for _, status in host.answers] == [sam.TASK_ABORTED] * 3
    assert not host.begun and not host.client.device.task_sets.active


def _without_tas(host: Host) -> None:
    session = host.client.connection.session
    assert session.nexus is not None
    (unit,) = host.client.device.siblings(session.nexus)
    unit.tas = False


def _attention(host: Host) -> tuple[int, int]:
    """Status and ASC << 8 | ASCQ of a TEST UNIT READY."""
    host.client.heard.clear()
    host.say(READY, SIMPLE)
    ((head, data),) = host.client.heard
    return head[3], int.from_bytes(data[14:16], "big")


def test_without_tas_another_s_reset_ends_commands_without_a_word(host: Host, other: Host) -> None:
    """Those that a thread runs, that wait for their turn, and that wait for their data: none is
    answered, and none is carried out. The reset waits for the thread; a unit attention follows."""
    _without_tas(host)
    content = bytes(host.client.store.content)
    other.client.command(cdb10(WRITE_10, 2), bhs.FLAG_WRITE | bhs.FLAG_FINAL, 1024, itt=1)
    (r2t,) = [pdu.ReadyToTransfer.unpack_from(head) for head, _ in other.client.heard]
    running, dormant = other.flush(), other.flush(ORDERED)
    third = Host(beside=host)
    third.manage(pdu.TMF_LOGICAL_UNIT_RESET)
    assert third.client.opcodes() == [], "a thread runs a command yet"
    other.end(running)
    third.client.run()
    assert third.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE]
    other.client.data_out(b"x" * 1024, 0, r2t.ttt)
    assert other.answers == [] and other.begun == []
    assert bytes(host.client.store.content) == content
    assert not host.client.device.task_sets.active
    assert _attention(other) == (sam.CHECK_CONDITION, sense.LUN_RESET)
    for itt in (1, running, dormant):
        other.client.heard.clear()
        other.manage(pdu.TMF_ABORT_TASK, itt)
        ((head, _),) = other.client.heard
        assert head[2] == pdu.TMF_TASK_DOES_NOT_EXIST
    assert _attention(other) == (sam.GOOD, 0)


def test_without_tas_an_abort_waits_for_the_thread_of_what_is_ended(
    host: Host, other: Host
) -> None:
    """The initiator asks whether it may send the command again: a thread may write yet."""
    _without_tas(host)
    running = other.flush()
    host.manage(pdu.TMF_CLEAR_TASK_SET)
    other.manage(pdu.TMF_ABORT_TASK, running)
    assert other.client.opcodes() == []
    other.end(running)
    host.client.run()
    assert other.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE]
    assert host.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE]


@pytest.mark.parametrize("function", [pdu.TMF_CLEAR_TASK_SET, pdu.TMF_LOGICAL_UNIT_RESET])
def test_without_tas_what_is_sent_again_does_not_overtake_the_thread(
    host: Host, other: Host, function: int
) -> None:
    """A unit attention tells the initiator that its commands are gone (SAM-5): it need not abort
    them before it sends them again."""
    _without_tas(host)
    running = other.flush()
    host.manage(function)
    assert _attention(other)[0] == sam.CHECK_CONDITION
    again = other.flush()
    assert other.begun == [running]
    other.end(running)
    assert other.begun == [again]
    other.end(again)
    assert other.answers[-1] == (again, sam.GOOD)


def test_without_tas_who_has_lost_commands_is_told_so(host: Host, other: Host) -> None:
    """COMMANDS CLEARED BY ANOTHER INITIATOR; who had none has lost none."""
    _without_tas(host)
    third = Host(beside=host)
    third.manage(pdu.TMF_CLEAR_TASK_SET)
    assert _attention(other) == (sam.GOOD, 0)
    running = other.flush()
    third.manage(pdu.TMF_CLEAR_TASK_SET)
    other.end(running)
    assert _attention(other) == (sam.CHECK_CONDITION, sense.COMMANDS_CLEARED)
    assert _attention(host) == (sam.GOOD, 0)


def test_without_tas_a_command_that_has_failed_before_is_answered(host: Host) -> None:
    """It waits for its unsolicited data only, and its answer tells of a reset: with the silence
    that would be lost, too."""
    _without_tas(host)
    other, third = Host(("InitialR2T", "No"), beside=host), Host(beside=host)
    assert _attention(other) == (sam.GOOD, 0)
    third.manage(pdu.TMF_LOGICAL_UNIT_RESET)
    other.client.heard.clear()
    other.client.command(cdb10(WRITE_10, 2), bhs.FLAG_WRITE, 1024, b"a" * 512, itt=1)
    third.manage(pdu.TMF_CLEAR_TASK_SET)
    other.client.data_out(b"b" * 512, 512, bhs.NO_TAG)
    ((head, data),) = other.client.heard
    assert (head[3], data[14:16]) == (sam.CHECK_CONDITION, sense.LUN_RESET.to_bytes(2, "big"))
    assert not any(host.client.store.content)
    assert _attention(other) == (sam.GOOD, 0)


@pytest.mark.parametrize("tas", [True, False])
def test_preempt_and_abort_and_the_commands_of_the_victim(
    host: Host, other: Host, tas: bool
) -> None:
    if not tas:
        _without_tas(host)
    for each, key in ((host, 1), (other, 2)):
        _reserve(each, pr.REGISTER, 0, key)
        each.client.heard.clear()
    running = other.flush()
    waiting = other.flush(ORDERED)
    _reserve(host, pr.PREEMPT_AND_ABORT, 1, 2)
    (slot,) = host.running  # it waits for the other's thread
    other.end(running)
    host.end(slot.itt)
    assert [status for _, status in host.answers] == [sam.GOOD]
    assert other.answers == ([(waiting, sam.TASK_ABORTED), (running, sam.TASK_ABORTED)] * tas)
    codes = [_attention(other)[1] for _ in range(3 - tas)]
    assert codes == [sense.REGISTRATIONS_PREEMPTED, *([sense.COMMANDS_CLEARED] * (not tas)), 0]


def _reserve(host: Host, action: int, key: int, service_key: int) -> None:
    """A PERSISTENT RESERVE OUT, which overtakes what waits. Its data is sent with it."""
    command = pr.OUT_CDB.pack(0x5F, action, 0, pr.PARAMETER_LENGTH)
    data = key.to_bytes(8, "big") + service_key.to_bytes(8, "big") + bytes(8)
    host.next_itt += 1
    host.client.command(
        command.ljust(16, b"\0"),
        bhs.FLAG_FINAL | bhs.FLAG_WRITE | HEAD_OF_QUEUE,
        len(data),
        data,
        itt=host.next_itt,
    )


def test_an_own_reset_begins_nothing_that_it_ends(host: Host, other: Host) -> None:
    one = other.flush()
    host.flush(ORDERED)
    host.flush()
    host.flush(ORDERED)
    host.manage(pdu.TMF_LOGICAL_UNIT_RESET)
    assert host.begun == [] and host.client.opcodes() == []
    other.end(one)
    host.client.run()
    assert host.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE] and host.begun == []


def test_the_end_of_a_session_ends_the_wait_for_it(host: Host, other: Host) -> None:
    """Dormant commands go with their session; one that a thread runs is waited for."""
    running, ordered = host.flush(), host.flush(ORDERED)
    theirs = other.flush()
    host.client.connection.abandon()
    assert other.begun == [theirs], "the ORDERED command has gone"
    late = other.flush(ORDERED)
    other.end(theirs)
    assert other.begun == []
    (slot,) = [slot for slot in host.running if slot.itt == running]
    host.client.device.run(slot.task, slot.buffer)
    host.client.connection.finish(slot)
    assert other.begun == [late]
    assert ordered not in host.begun


def test_commands_that_wait_for_data_are_older_as_well(host: Host, other: Host) -> None:
    """An ORDERED command does not overtake a write whose data has been asked for. When the write
    is aborted, its data is not waited for."""
    write = host.say(cdb10(WRITE_10, 1), SIMPLE, 512, bhs.FLAG_WRITE)
    ordered = other.flush(ORDERED)
    assert other.begun == []
    host.manage(pdu.TMF_ABORT_TASK, write)
    assert other.begun == [ordered]


def test_an_aborted_command_is_not_waited_for_while_its_data_is(host: Host, other: Host) -> None:
    """After ABORT TASK SET the data of R2Ts still comes, and the answer waits for it; the command
    will never be carried out, so that no other need wait."""
    host.say(cdb10(WRITE_10, 1), SIMPLE, 512, bhs.FLAG_WRITE)
    ordered = other.flush(ORDERED)
    host.client.heard.clear()
    host.manage(pdu.TMF_ABORT_TASK_SET)
    assert host.client.opcodes() == [] and other.begun == [ordered]


def test_a_lun_waits_for_no_command_of_the_one_before_it(host: Host, other: Host) -> None:
    """Threads may run those for long, e.g. as another target is away whose LUN this was."""
    old, waiting = host.flush(), host.flush(ORDERED)
    device = host.client.device
    ended: list[str] = []
    with closing(make_unit(os.memfd_create("second"), 1 << 20)) as second:
        assert device.remove_luns([0], lambda: ended.append("first")) == 1
        assert host.answers == [(waiting, sam.TASK_ABORTED)]
        device.add_luns({0: second})
        while other.say(READY, SIMPLE) and other.answers[-1][1]:
            pass  # unit attentions
        orders = [other.flush(ORDERED), other.flush(ORDERED)]
        assert other.begun == orders[:1] and host.begun == [old]
        other.end(orders[0])
        assert other.begun == orders[1:]
        third = Host(beside=host)
        third.manage(pdu.TMF_LOGICAL_UNIT_RESET)
        other.end(orders[1])
        third.client.run()
        assert third.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE] and host.begun == [old]
        # Nor does the removal of the new one wait for it. Its own initiator does.
        assert device.remove_luns([0], lambda: ended.append("second")) == 0
        device.add_luns({0: second})
        host.client.heard.clear()
        host.manage(pdu.TMF_LOGICAL_UNIT_RESET)
        assert host.client.opcodes() == []
        host.end(old)
        host.client.run()
        assert host.client.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE]
        assert ended == ["first"] and not device.task_sets.active
        device.remove_luns([0], lambda: None)


def test_a_head_of_queue_command_is_the_first_of_those_that_wait_for_memory(host: Host) -> None:
    """Here for the end of an older session of the same name."""
    host.client.connection.session.pause()
    simple, head, second = (host.say(READY, each) for each in (SIMPLE, HEAD_OF_QUEUE, SIMPLE))
    assert host.answers == []
    host.client.connection.session.go_on()
    assert host.answers == [(head, 0), (simple, 0), (second, 0)]


def test_many_ordered_commands_in_a_row(host: Host) -> None:
    """Each ends as soon as it begins; they do not nest."""
    one = host.flush()
    queue = [host.say(READY, ORDERED) for _ in range(100)]
    assert host.answers == []
    host.end(one)
    assert host.answers == [(itt, 0) for itt in (one, *queue)]


def test_aca_needs_an_aca_condition(host: Host) -> None:
    """There never is one: NACA is refused in every CDB. INVALID MESSAGE ERROR."""
    host.say(READY, ACA)
    ((head, data),) = host.client.heard
    assert head[3] == sam.CHECK_CONDITION
    assert (data[4], data[14], data[15]) == (5, 0x49, 0)
    host.say(READY, SIMPLE)
    assert host.answers[-1][1] == 0


def test_an_error_of_a_session_that_was_waiting_ends_that_session_only(host: Host) -> None:
    """A READ without a Read STag is found when its turn comes: perhaps as a command of another
    session ends."""
    iser = IserClient(device=host.client.device, store=host.client.store).logged_in()
    running: list[TargetTask] = []
    iser.owner.offload = running.append
    one = host.flush()
    head = bytearray(28)
    head[0] = 0x10
    ordered = bytearray(iser.scsi(FLUSH, itt=20))
    ordered[1] = bhs.FLAG_FINAL | ORDERED
    iser.send(bytes(head + ordered))
    iser.send(bytes(head) + iser.scsi(rw10(0x28, 512), 0xC0, 512, itt=21))
    iser.run()
    assert not running
    host.end(one)
    assert [slot.itt for slot in running] == [20]
    iser.device.run(running[0].task, running[0].buffer)
    iser.connection.finish(running[0])
    assert not iser.connection.done
    iser.connection.flush()
    assert iser.connection.done and not host.client.connection.done
    two = host.flush()
    host.end(two)
    assert host.answers == [(one, 0), (two, 0)]


def test_the_control_mode_page_says_so(host: Host) -> None:
    """TST 0: one task set for all I_T nexuses. QUEUE ALGORITHM MODIFIER 1: SIMPLE commands may be
    reordered. QERR 0: a command that fails ends no other (SPC-4)."""
    host.say(cdb.mode_sense6(mode.CONTROL, 64), SIMPLE, 64, bhs.FLAG_READ)
    ((_, data),) = host.client.heard
    page = data[4:]
    assert page[0] == mode.CONTROL
    assert (page[2] >> 5, page[3] >> 4, page[3] >> 1 & 3) == (0, 1, 0)
    host.client.heard.clear()
    one = host.flush()
    bad = host.say(cdb10(READ_10, 1)[:2] + b"\xff" * 4 + bytes(2) + b"\1\0", ORDERED, 512)
    ordered = host.flush(ORDERED)
    host.end(one)
    host.end(ordered)
    assert sorted(host.answers) == [(one, 0), (bad, sam.CHECK_CONDITION), (ordered, 0)]
