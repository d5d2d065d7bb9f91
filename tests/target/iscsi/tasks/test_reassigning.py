"""ErrorRecoveryLevel 2 at the target: what happens to tasks whose connection is lost."""

from __future__ import annotations

import pytest

from iserblk.datamover.iser import ControlHeader
from iserblk.iscsi import bhs, pdu
from iserblk.rcap import seam
from iserblk.target.iscsi.tasks.slots import BATCH_SLOTS, TASK_SLOTS
from tests.support import logs
from tests.target.iscsi.several import (
    KINDS,
    PLAIN,
    READ_10,
    READS,
    SYNCHRONIZE_CACHE,
    WRITE_10,
    WRITES,
    Host,
    IserPeer,
    Kind,
    Peer,
    TcpPeer,
    cdb10,
)
from tests.vectors import bidirectional

pytestmark = pytest.mark.logs(logs.IGNORED)

FOR_RECOVERY = pdu.LOGOUT_FOR_RECOVERY


def begun(kind: Kind, host: Host, *keys: tuple[str, str]) -> Peer:
    peer = kind(host, 0)
    assert peer.log_in(*keys) == 0
    peer.ready()
    return peer


def joined(kind: Kind, host: Host, cid: int = 1) -> Peer:
    peer = kind(host, cid)
    assert peer.log_in() == 0
    return peer


def flush(peer: Peer, itt: int = 1) -> None:
    """A command that a thread carries out."""
    peer.command(cdb10(SYNCHRONIZE_CACHE, 0), PLAIN, itt=itt)


def flushing(kind: Kind) -> tuple[Host, Peer, Peer]:
    """Two connections of one session; the first has a command that a thread carries out."""
    host = Host(threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    flush(first)
    return host, first, second


def reassign(peer: Peer, itt: int = 1, exp_data_sn: int = 0, **more: object) -> None:
    peer.manage(pdu.TMF_TASK_REASSIGN, itt, exp_data_sn=exp_data_sn, **more)  # type: ignore[arg-type]


def response_of(peer: Peer) -> pdu.ScsiResponse:
    """The task management response, complete, and behind it a SCSI Response; nothing else."""
    assert peer.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE, bhs.SCSI_RESPONSE]
    managed = pdu.TaskManagementResponse.unpack_from(peer.heard[0][0])
    found = pdu.ScsiResponse.unpack_from(peer.heard[1][0])
    assert managed.response == pdu.TMF_COMPLETE and found.stat_sn == managed.stat_sn + 1
    peer.heard.clear()
    return found


@KINDS
def test_what_another_ends_without_a_word_is_not_overtaken(kind: Kind) -> None:
    """A thread still carries out the task, which TASK REASSIGN does not find any more: what the
    initiator sends in its place must not land before it."""
    host, first, second = flushing(kind)
    first.lose()
    second.log_out(FOR_RECOVERY, cid=0)
    second.heard.clear()
    assert host.session.end_tasks(0, lambda: None, tas=False) == 1
    reassign(second)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    second.heard.clear()
    flush(second, itt=9)
    assert [slot.itt for slot in host.running] == [1]
    host.finish()
    assert [slot.itt for slot in host.running] == [9] and not second.heard
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]
    host.end()


# -- which requests are refused -----------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("level", [0, 1])
def test_below_level_2_no_task_is_reassigned(kind: Kind, level: int) -> None:
    """Nor is a connection logged out for recovery: the session goes on."""
    host = Host(level=level, threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    flush(first)
    reassign(second)
    assert second.managed() == pdu.TMF_REASSIGN_NOT_SUPPORTED
    second.log_out(FOR_RECOVERY, 0)
    assert second.logged_out().response == 2 and not first.connection.done
    host.finish()
    assert first.opcodes() == [bhs.SCSI_RESPONSE]


@KINDS
def test_a_task_is_allegiant_until_its_connection_is_logged_out(kind: Kind) -> None:
    """A connection that works, and one that has failed without a logout. Unknown tasks do not
    exist, and unknown connections are not found.
    """
    host, first, second = flushing(kind)
    reassign(second)
    assert second.managed() == pdu.TMF_STILL_ALLEGIANT
    reassign(first)
    assert first.managed() == pdu.TMF_STILL_ALLEGIANT
    reassign(second, 99)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    first.lose()
    reassign(second)
    assert second.managed() == pdu.TMF_STILL_ALLEGIANT
    second.log_out(FOR_RECOVERY, 7)
    assert second.logged_out().response == 1
    second.log_out(FOR_RECOVERY, 0)
    answer = second.logged_out()
    assert (answer.response, answer.time2wait, answer.time2retain) == (0, 0, 20)
    reassign(second)
    assert second.managed() == pdu.TMF_COMPLETE
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]


# -- how a connection is logged out -------------------------------------------------------------


@KINDS
def test_a_connection_logs_itself_out_for_recovery(kind: Kind) -> None:
    """The response leaves, its tasks wait."""
    host, first, second = flushing(kind)
    first.log_out(FOR_RECOVERY)
    assert first.logged_out().response == 0 and first.ended
    reassign(second)
    assert not second.heard, "not before the old connection is closed"
    first.close()
    assert second.managed() == pdu.TMF_COMPLETE
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]


@KINDS
def test_another_connection_logs_it_out_while_it_works(kind: Kind) -> None:
    """The answer comes when nothing of the old connection touches the initiator's buffers."""
    host, first, second = flushing(kind)
    second.log_out(FOR_RECOVERY, 0)
    assert first.ended and first.connection.done and not second.heard
    first.close()
    assert second.logged_out().response == 0
    host.finish()  # it ends while it is allegiant to no connection
    reassign(second)
    assert response_of(second).status == 0
    assert not host.session.lost


@KINDS
def test_a_login_with_its_cid_logs_it_out(kind: Kind) -> None:
    """Connection reinstatement (RFC 7143 section 6.3.4), of a connection that works still, and of
    the only one of the session, which has failed."""
    host = Host(threads=True)
    first = begun(kind, host)
    flush(first)
    second = joined(kind, host, 0)
    assert first.ended and not second.heard
    first.close()
    reassign(second)
    assert second.managed() == pdu.TMF_COMPLETE
    second.lose()
    assert host.session.lost and not host.over
    third = joined(kind, host, 0)
    host.finish()
    reassign(third)
    assert response_of(third).status == 0


@KINDS
def test_a_new_nexus_is_not_made(kind: Kind) -> None:
    """The session outlives its last connection: no unit attention, no lost reservation."""
    host = Host()
    first = begun(kind, host)
    nexus = host.session.nexus
    first.lose()
    second = joined(kind, host)
    assert host.session.nexus is nexus
    second.command(bytes(16))
    assert second.answer(bhs.SCSI_RESPONSE)[0][3] == 0


# -- tasks go on ---------------------------------------------------------------------------------


@KINDS
def test_a_status_that_was_sent_is_sent_again(kind: Kind) -> None:
    """Until the initiator has acknowledged it. With another StatSN, that of the new connection;
    the window does not move twice."""
    host = Host()
    first = begun(kind, host)
    first.acknowledges = False
    first.command(cdb10(WRITE_10, 1), WRITES, 512, b"w" * 512)
    assert first.opcodes() == [bhs.SCSI_RESPONSE]
    window = host.session.max_cmd_sn
    first.lose()
    second = joined(kind, host)
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    reassign(second)
    assert response_of(second).status == 0
    assert host.session.max_cmd_sn == window and len(host.store.calls) == 1
    second.acknowledge()
    second.lose()
    third = joined(kind, host)
    reassign(third)
    assert third.managed() == pdu.TMF_TASK_DOES_NOT_EXIST


@KINDS
def test_the_tag_of_an_answered_task_is_used_again(kind: Kind) -> None:
    """That acknowledges it: the tag means the new task."""
    host = Host(threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    first.acknowledges = False
    first.command(bytes(16), itt=5)
    flush(second, itt=5)
    second.lose()
    first.log_out(FOR_RECOVERY, 1)
    first.heard.clear()
    reassign(first, 5)
    assert first.managed() == pdu.TMF_COMPLETE
    host.finish()
    assert first.opcodes() == [bhs.SCSI_RESPONSE]


# shows: SYSTEM-41
def test_data_in_goes_on_from_exp_data_sn() -> None:
    """Over TCP: DataSN and Buffer Offset go on where the initiator has acknowledged them, with the
    PDU length of the new connection. A number that was never sent is ignored."""
    host = Host()
    host.store.content[:8192] = bytes(index // 512 for index in range(8192))
    keys = (("MaxRecvDataSegmentLength", "1024"), ("MaxBurstLength", "2560"))
    for exp_data_sn, offset in ((0, 0), (1, 1024), (3, 2560), (7, 6144), (11, 0)):
        host = Host(store=host.store)
        first = begun(TcpPeer, host, *keys)
        first.acknowledges = False
        first.command(cdb10(READ_10, 16), READS, 8192)
        units = [pdu.DataIn.unpack_from(head) for head, _ in first.heard]
        assert [unit.buffer_offset for unit in units][:4] == [0, 1024, 2048, 2560]
        assert len(units) == 10
        first.lose()
        second = joined(TcpPeer, host)
        second.log_out(FOR_RECOVERY, 0)
        second.heard.clear()
        reassign(second, exp_data_sn=exp_data_sn)
        assert second.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
        again = [pdu.DataIn.unpack_from(head) for head, _ in second.heard]
        assert again[0].buffer_offset == offset
        start = exp_data_sn if offset else 0
        assert [unit.data_sn for unit in again] == list(range(start, start + len(again)))
        assert b"".join(data for _, data in second.heard) == host.store.content[offset:8192]
        assert again[-1].flags & 1 and not again[-1].status


@pytest.mark.parametrize(
    ("exp_data_sn", "offset"), [(0, 2560), (3, 2560), (4, 3072), (7, 4608), (14, 8192), (15, 2560)]
)
def test_data_in_goes_on_after_a_second_loss(exp_data_sn: int, offset: int) -> None:
    """The first connection cut the data into PDUs of 1024 bytes, the second one, from the fourth
    PDU on, into 512. A number that the initiator cannot mean leaves it at what it said last."""
    host = Host()
    host.store.content[:8192] = bytes(index // 512 for index in range(8192))
    first = begun(TcpPeer, host, ("MaxRecvDataSegmentLength", "1024"), ("MaxBurstLength", "2560"))
    first.acknowledges = False
    first.command(cdb10(READ_10, 16), READS, 8192)
    first.lose()
    second = TcpPeer(host, 0)
    assert second.log_in(("MaxRecvDataSegmentLength", "512")) == 0
    second.acknowledges = False
    reassign(second, exp_data_sn=3)
    begins = [pdu.DataIn.unpack_from(head).buffer_offset for head, _ in second.heard[1:]]
    assert begins == list(range(2560, 8192, 512))
    second.lose()
    third = joined(TcpPeer, host, 0)
    reassign(third, exp_data_sn=exp_data_sn)
    assert third.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    if offset == 8192:
        assert third.answer(bhs.SCSI_RESPONSE)[0][3] == 0
        return
    again = [pdu.DataIn.unpack_from(head) for head, _ in third.heard]
    assert again[0].buffer_offset == offset
    start = exp_data_sn if offset > 2560 else 3
    assert [unit.data_sn for unit in again] == list(range(start, start + len(again)))
    assert b"".join(data for _, data in third.heard) == host.store.content[offset:8192]


def test_all_data_in_was_acknowledged() -> None:
    """Only the status is sent."""
    host = Host()
    first = begun(TcpPeer, host)
    first.acknowledges = False
    first.command(cdb10(READ_10, 4), READS, 2048)
    first.lose()
    second = joined(TcpPeer, host, 0)
    reassign(second, exp_data_sn=1)
    assert response_of(second).exp_data_sn == 1


def test_missing_data_out_is_asked_for() -> None:
    """Over TCP: what came in whole bursts is kept; recovery R2Ts ask for the rest."""
    host = Host()
    first = begun(TcpPeer, host, ("MaxBurstLength", "1024"), ("ImmediateData", "Yes"))
    data = bytes(index // 512 for index in range(4096))
    first.command(cdb10(WRITE_10, 8), WRITES, 4096, data[:512])
    r2t = pdu.ReadyToTransfer.unpack_from(first.answer(bhs.R2T)[0])
    assert (r2t.buffer_offset, r2t.desired_length) == (512, 1024)
    first.say_data_out(data[512:1536], 512, r2t.ttt)
    r2t = pdu.ReadyToTransfer.unpack_from(first.answer(bhs.R2T)[0])
    first.say_data_out(data[1536:2048], 1536, r2t.ttt, final=False)  # half a burst
    first.lose()
    second = joined(TcpPeer, host, 0)
    reassign(second, exp_data_sn=2)
    assert second.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    for at, sn in ((1536, 2), (2560, 3), (3584, 4)):
        r2t = pdu.ReadyToTransfer.unpack_from(second.answer(bhs.R2T)[0])
        length = min(1024, 4096 - at)
        assert (r2t.buffer_offset, r2t.desired_length, r2t.r2t_sn) == (at, length, sn)
        second.say_data_out(data[at : at + length], at, r2t.ttt)
    assert second.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    assert host.store.content[:4096] == data


def test_r2ts_are_numbered_on_after_each_loss() -> None:
    """Over TCP: also where the same data is asked for again and again."""
    host = Host()
    peer = begun(TcpPeer, host)
    peer.command(cdb10(WRITE_10, 1), WRITES, 512)
    for number in range(4):
        r2t = pdu.ReadyToTransfer.unpack_from(peer.answer(bhs.R2T)[0])
        assert (r2t.buffer_offset, r2t.desired_length, r2t.r2t_sn) == (0, 512, number)
        peer.lose()
        peer = joined(TcpPeer, host, 0)
        reassign(peer, exp_data_sn=number + 1)
        assert peer.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    peer.say_data_out(b"w" * 512, 0, pdu.ReadyToTransfer.unpack_from(peer.answer(bhs.R2T)[0]).ttt)
    assert peer.answer(bhs.SCSI_RESPONSE)[0][3] == 0


def test_a_bidirectional_command_goes_on_after_each_loss() -> None:
    """Over TCP: its Data-In is numbered on from the R2Ts that there were, and goes on where the
    initiator has it."""
    host = Host()
    old, new = bytes(range(256)) * 4, b"\x5a" * 1024
    host.store.content[5 * 512 : 7 * 512] = old
    first = begun(TcpPeer, host, ("MaxRecvDataSegmentLength", "512"))
    first.put(bidirectional.command(itt=1))
    host.take_cmd_sn()
    host.run()
    assert pdu.ReadyToTransfer.unpack_from(first.answer(bhs.R2T)[0]).r2t_sn == 0
    first.lose()
    second = TcpPeer(host, 0)
    assert second.log_in(("MaxRecvDataSegmentLength", "512")) == 0
    second.acknowledges = False
    reassign(second, exp_data_sn=1)
    assert second.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    r2t = pdu.ReadyToTransfer.unpack_from(second.answer(bhs.R2T)[0])
    assert r2t.r2t_sn == 1
    second.say_data_out(new, 0, r2t.ttt)
    assert second.opcodes() == [bhs.DATA_IN, bhs.DATA_IN, bhs.SCSI_RESPONSE]
    units = [pdu.DataIn.unpack_from(head) for head, _ in second.heard[:2]]
    assert [(unit.data_sn, unit.buffer_offset) for unit in units] == [(2, 0), (3, 512)]
    second.lose()
    third = joined(TcpPeer, host, 0)
    reassign(third, exp_data_sn=3)
    assert third.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    (head, data), (last, _) = third.heard
    unit = pdu.DataIn.unpack_from(head)
    assert (unit.data_sn, unit.buffer_offset) == (3, 512)
    assert data == bytes(one ^ two for one, two in zip(old, new, strict=True))[512:]
    response = pdu.ScsiResponse.unpack_from(last)
    assert (response.status, response.exp_data_sn, last[1] & bhs.RESIDUAL_FLAGS) == (0, 4, 0)
    assert host.store.content[5 * 512 : 7 * 512] == new, "it is carried out once"


def test_unsolicited_data_that_was_lost_is_asked_for() -> None:
    host = Host()
    first = begun(TcpPeer, host, ("InitialR2T", "No"), ("ImmediateData", "Yes"))
    flags = WRITES & ~bhs.FLAG_FINAL
    first.command(cdb10(WRITE_10, 3), flags, 1536, b"a" * 512)
    first.say_data_out(b"b" * 512, 512, bhs.NO_TAG, final=False)
    first.lose()
    second = joined(TcpPeer, host, 0)
    reassign(second)
    assert second.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    r2t = pdu.ReadyToTransfer.unpack_from(second.answer(bhs.R2T)[0])
    assert (r2t.buffer_offset, r2t.desired_length) == (1024, 512)
    second.say_data_out(b"c" * 512, 1024, r2t.ttt)
    assert second.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    assert host.store.content[:1536] == b"a" * 512 + b"b" * 512 + b"c" * 512


# -- what the kept tasks hold ---------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("immediate", [0, 512])
def test_a_write_that_is_kept_gives_its_buffer_back(kind: Kind, immediate: int) -> None:
    """When nothing touches it any more; all but what came with the command."""
    host = Host()
    first = begun(kind, host, ("ImmediateData", "Yes"))
    second = joined(kind, host)
    header = None
    if isinstance(first, IserPeer):
        first.theirs.intercept = lambda message: message.kind != seam.RDMA_READ
        header = first.writes_from(bytes(65536 - immediate))
    data = bytes(immediate)
    first.command(cdb10(WRITE_10, 128), WRITES, 65536, data, header=header)
    assert host.budget.used == 65536
    first.lose(close=False)
    assert host.budget.used == 65536, "data may still come to it"
    first.close()
    assert host.budget.used == (4096 if immediate else 0)
    host.session.expire(first.connection)
    assert not host.budget.used and not second.connection.done


def test_a_dormant_write_that_is_kept_holds_what_came_with_it() -> None:
    host = Host(threads=True)
    first = begun(TcpPeer, host, ("InitialR2T", "No"), ("ImmediateData", "Yes"))
    second = joined(TcpPeer, host)
    flush(second, itt=9)
    ordered = WRITES & ~bhs.ATTR_MASK | bhs.ATTR_ORDERED
    first.command(cdb10(WRITE_10, 128), ordered & ~bhs.FLAG_FINAL, 65536, b"a" * 512)
    first.say_data_out(b"b" * 512, 512, bhs.NO_TAG)
    assert host.budget.used == 65536
    first.lose()
    assert host.budget.used == 4096
    host.finish()
    second.heard.clear()
    second.log_out(FOR_RECOVERY, 0)
    assert second.logged_out().response == 0
    reassign(second)
    assert second.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    r2t = pdu.ReadyToTransfer.unpack_from(second.answer(bhs.R2T)[0])
    assert (r2t.buffer_offset, r2t.desired_length) == (1024, 64512)
    for at in range(1024, 65536, 7168):
        second.say_data_out(b"c" * 7168, at, r2t.ttt, at // 7168, at + 7168 == 65536)
    assert second.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    assert host.store.content[:65536] == b"a" * 512 + b"b" * 512 + b"c" * 64512


def test_of_a_long_write_its_beginning_is_kept() -> None:
    host = Host()
    first = begun(TcpPeer, host, ("MaxBurstLength", "131072"))
    second = joined(TcpPeer, host)
    first.command(cdb10(WRITE_10, 512), WRITES, 262144)
    r2t = pdu.ReadyToTransfer.unpack_from(first.answer(bhs.R2T)[0])
    for at in range(0, 131072, 8192):
        end = at + 8192 == 131072
        first.say_data_out(b"1" * 8192, at, r2t.ttt, at // 8192, end)
    assert first.opcodes() == [bhs.R2T] and host.budget.used == 262144
    first.lose()
    assert host.budget.used == 65536
    second.log_out(FOR_RECOVERY, 0)
    assert second.logged_out().response == 0
    reassign(second, exp_data_sn=2)
    assert second.heard.pop(0)[0][2] == pdu.TMF_COMPLETE
    r2t = pdu.ReadyToTransfer.unpack_from(second.answer(bhs.R2T)[0])
    assert (r2t.buffer_offset, r2t.desired_length) == (65536, 131072)


@KINDS
@pytest.mark.parametrize("when", ["before the loss", "behind it"])
def test_a_write_that_was_carried_out_holds_nothing(kind: Kind, when: str) -> None:
    """Its thread ends while nobody is there."""
    host = Host(threads=True)
    first = begun(kind, host, ("ImmediateData", "Yes"))
    second = joined(kind, host)
    cdb = bytearray(cdb10(WRITE_10, 8))
    cdb[1] = 8  # FUA
    first.command(bytes(cdb), WRITES, 4096, b"w" * 4096)
    assert host.running and host.budget.used == 4096
    first.lose(close=False)
    if when == "before the loss":
        host.finish()
        first.close()
    else:
        first.close()
        assert host.budget.used == 4096, "the thread writes"
        host.finish()
    assert not host.budget.used
    second.log_out(FOR_RECOVERY, 0)
    assert second.logged_out().response == 0
    reassign(second)
    assert response_of(second).status == 0
    assert host.store.content[:4096] == b"w" * 4096


@pytest.mark.parametrize(
    ("wait", "retain", "seconds"),
    [(0, 20, 20), (20, 20, 40), (30, 10, 40), (39, 1, 40), (40, 0, 0), (3600, 0, 0)],
)
def test_how_long_tasks_are_kept_at_most(wait: int, retain: int, seconds: int) -> None:
    """Whatever Time2Wait an initiator wants; it is told."""
    host = Host(threads=True)
    first = begun(TcpPeer, host, ("DefaultTime2Wait", str(wait)))
    second = joined(TcpPeer, host)
    assert f"DefaultTime2Retain={retain}".encode() in first.login_text.split(b"\0")
    assert host.session.retention_s == seconds
    flush(first)
    second.log_out(FOR_RECOVERY, 0)
    first.close()
    assert first.connection.kept is (seconds > 0)
    if not seconds:
        host.finish()
    answer = second.logged_out()
    assert (answer.response, answer.time2wait, answer.time2retain) == (0, wait, retain)


def test_the_time_does_not_begin_anew_for_ever() -> None:
    """A logout for recovery has it begin anew, once."""
    _, first, second = flushing(TcpPeer)
    begun_anew: list[None] = []
    first.owner.recovery_begins = lambda: begun_anew.append(None)
    first.lose()
    for _ in range(3):
        second.log_out(FOR_RECOVERY, 0)
        assert second.logged_out().response == 0
    assert len(begun_anew) == 1


# -- over iSER -----------------------------------------------------------------------------------


# shows: SYSTEM-41
@pytest.mark.parametrize("answered", [False, True])
def test_new_stags_replace_the_old_ones(answered: bool) -> None:
    """A read whose status is not acknowledged, or whose data has not been read from the disk: all
    of its Data-In goes to the buffer of the request, none to the old one.

    proves: ISER-7.3.3-10, ISER-7.3.3-11, ISER-7.3.3-12, ISER-7.3.3-13, ISER-10.2.2-3
    proves: ISER-10.2.2-7
    """
    host = Host(threads=True)
    host.store.content[:4096] = b"r" * 4096
    host.store.cached = answered
    first = begun(IserPeer, host)
    assert isinstance(first, IserPeer)
    first.acknowledges = False
    old = bytearray(4096)
    first.command(cdb10(READ_10, 8), READS, 4096, header=first.reads_into(old))
    assert first.opcodes() == [bhs.SCSI_RESPONSE] * answered
    first.lose()
    old[:] = bytes(4096)
    second = joined(IserPeer, host, 0)
    assert isinstance(second, IserPeer)
    new = bytearray(4096)
    header = second.reads_into(new)
    reassign(second, header=header)
    if not answered:
        assert second.managed() == pdu.TMF_COMPLETE and not any(new)
        host.store.cached = True
        host.finish()
        assert second.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    else:
        assert response_of(second).status == 0
    assert new == b"r" * 4096 and not any(old)
    (placed,) = second.placed
    assert (placed.kind, placed.stag) == (seam.RDMA_WRITE, header.read_stag)


@pytest.mark.parametrize("solicited_only", ["Yes", "No"])
def test_data_out_is_read_from_the_new_buffer(solicited_only: str) -> None:
    """A write that lost its connection while its data was being read: Get_Data with the Write STag
    of the request, whose buffer begins behind the immediate data, or where it has all.

    proves: ISER-10.2.2-4, ISER-10.2.2-5, ISER-7.3.3-13
    """
    host = Host()
    data = bytes(index // 512 for index in range(4096))
    key = ("TaggedBufferForSolicitedDataOnly", solicited_only)
    first = begun(IserPeer, host, key, ("ImmediateData", "Yes"))
    assert isinstance(first, IserPeer)
    first.ours.hold = True  # the RDMA Read is not answered
    whole = 0 if solicited_only == "No" else 512
    old = first.writes_from(data[whole:])
    first.command(cdb10(WRITE_10, 8), WRITES, 4096, data[:512], header=old)
    assert [message.kind for message in first.placed] == [seam.RDMA_READ] and not first.heard
    first.lose()
    second = joined(IserPeer, host, 0)
    assert isinstance(second, IserPeer)
    header = second.writes_from(data[whole:])
    reassign(second, header=header)
    assert response_of(second).status == 0
    assert host.store.content[:4096] == data
    assert [(each.kind, each.stag) for each in second.placed] == [
        (seam.RDMA_READ, header.write_stag)
    ]


def test_data_that_was_acknowledged_is_not_sent_again() -> None:
    """From 64 KiB on the target asks for an acknowledgement, an RDMA Read of nothing behind the
    data. What it acknowledges is not kept, and only the status is sent again.

    proves: ISER-3.2.3-1, ISER-7.3.5-12, ISER-7.3.5-13, ISER-7.3.5-14
    """
    host = Host()
    host.store.content[:] = b"d" * len(host.store.content)
    first = begun(IserPeer, host)
    assert isinstance(first, IserPeer)
    first.acknowledges = False
    buffer = bytearray(65536)
    first.command(cdb10(READ_10, 128), READS, 65536, header=first.reads_into(buffer))
    assert buffer == b"d" * 65536 and first.opcodes() == [bhs.SCSI_RESPONSE]
    assert [(each.kind, each.size) for each in first.placed] == [
        (seam.RDMA_WRITE, 65536),
        (seam.RDMA_READ, 0),
    ]
    assert not host.session.pool.used
    first.lose()
    second = joined(IserPeer, host, 0)
    assert isinstance(second, IserPeer)
    again = bytearray(65536)
    reassign(second, header=second.reads_into(again))
    assert response_of(second).status == 0
    assert not second.placed


def test_a_read_is_kept_where_nothing_acknowledges_it() -> None:
    """An initiator that takes no RDMA Reads; its data is sent again."""
    host = Host()
    host.store.content[:] = b"d" * len(host.store.content)
    first = begun(lambda host, cid: IserPeer(host, cid, ord=0), host)  # type: ignore[arg-type]
    assert isinstance(first, IserPeer)
    first.acknowledges = False
    buffer = bytearray(65536)
    first.command(cdb10(READ_10, 128), READS, 65536, header=first.reads_into(buffer))
    assert [each.kind for each in first.placed] == [seam.RDMA_WRITE]
    first.lose()
    second = joined(IserPeer, host, 0)
    assert isinstance(second, IserPeer)
    again = bytearray(65536)
    reassign(second, header=second.reads_into(again))
    assert response_of(second).status == 0 and again == b"d" * 65536


def test_a_request_without_the_buffers_that_the_task_needs() -> None:
    """It ends its connection, and nothing else."""
    host = Host()
    first = begun(IserPeer, host)
    assert isinstance(first, IserPeer)
    first.acknowledges = False
    buffer = bytearray(512)
    first.command(cdb10(READ_10, 1), READS, 512, header=first.reads_into(buffer))
    first.lose()
    second = joined(IserPeer, host)
    third = joined(IserPeer, host, 0)
    reassign(second)
    assert second.connection.done and not third.connection.done


# -- the end ------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(("level", "retain"), [(0, 0), (2, 20)])
def test_a_connection_that_the_target_drops(kind: Kind, level: int, retain: int) -> None:
    """The initiator is told on another one, with the times that it has (RFC 7143 section 11.9.1).
    The only connection of a session has no other one."""
    host = Host(level=level)
    first = begun(kind, host)
    second = joined(kind, host)
    first.connection.give_up()
    host.run()
    told = pdu.AsyncMessage.unpack_from(second.answer(bhs.ASYNC_MESSAGE)[0])
    assert (told.event, told.parameter1) == (pdu.ASYNC_CONNECTION_DROP, 0)
    assert (told.parameter2, told.parameter3) == (0, retain)
    first.close()
    second.connection.give_up()
    assert second.connection.done and not second.heard


@KINDS
def test_tasks_end_when_nobody_comes_back(kind: Kind) -> None:
    """At the end of Time2Retain, with unit attention 47/7F where the session goes on."""
    host, first, second = flushing(kind)
    first.command(cdb10(WRITE_10, 1), WRITES, 512, b"w" * 512, itt=2)
    first.lose()
    assert first.connection.kept and host.session.retention_s == 20
    host.session.expire(first.connection)
    assert not first.connection.kept
    second.command(cdb10(WRITE_10, 1), WRITES, 512, b"x" * 512, itt=3)
    head, sense = second.answer(bhs.SCSI_RESPONSE)
    assert head[3] == 2 and sense[2 + 12 : 2 + 14] == b"\x47\x7f"
    host.finish()  # the task that had not ended
    assert not second.heard and not host.session.paused
    reassign(second)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST


@KINDS
def test_tasks_that_were_answered_are_not_cleared(kind: Kind) -> None:
    """A status that was not acknowledged is forgotten at the end of Time2Retain. No unit attention
    tells of it: after each lost connection the initiator would get one."""
    host = Host()
    first = begun(kind, host)
    second = joined(kind, host)
    first.acknowledges = False
    first.command(cdb10(WRITE_10, 1), WRITES, 512, b"w" * 512)
    first.lose()
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    assert first.connection.kept
    host.session.expire(first.connection)
    second.command(bytes(16), itt=2)
    assert second.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    reassign(second)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST


@KINDS
def test_no_command_begins_while_a_thread_still_writes_for_one_that_has_ended(kind: Kind) -> None:
    """An old write must not land behind a new one: connections that fail below level 2."""
    host = Host(level=0, threads=True)
    first = begun(kind, host)
    second = joined(kind, host)
    flush(first)
    first.lose()
    second.command(bytes(16), itt=3)  # the unit attention
    second.heard.clear()
    second.command(cdb10(WRITE_10, 1), WRITES, 512, b"x" * 512, itt=4)
    assert not second.heard and not host.store.calls
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]
    assert [call[0] for call in host.store.calls][-1] == "write"


@KINDS
def test_a_session_without_connections_ends(kind: Kind) -> None:
    host = Host(threads=True)
    first = begun(kind, host)
    flush(first)
    first.lose()
    assert not host.over
    host.session.expire(first.connection)
    assert not host.over, "a thread uses its memory"
    host.finish()
    assert host.over == [host.tsih]
    late = kind(host, 0)
    assert late.log_in() == 0x020A


@KINDS
def test_a_cid_is_used_again_while_an_earlier_connection_is_kept(kind: Kind) -> None:
    """The logout is about the latest connection that had it. The one before it is kept for a task
    whose status is not acknowledged."""
    host = Host(threads=True)
    first = begun(kind, host)
    before = joined(kind, host)
    before.acknowledges = False
    before.command(bytes(16), itt=5)
    before.lose()
    first.log_out(FOR_RECOVERY, 1)
    assert first.logged_out().response == 0 and len(host.session.lost) == 1
    again = joined(kind, host)
    flush(again, itt=6)
    again.lose()
    first.log_out(FOR_RECOVERY, 1)
    assert first.logged_out().response == 0
    reassign(first, 6)
    assert first.managed() == pdu.TMF_COMPLETE
    host.finish()
    assert first.opcodes() == [bhs.SCSI_RESPONSE]


@KINDS
def test_connections_that_are_made_and_lost_again_and_again(kind: Kind) -> None:
    """A session keeps a few of them; the oldest give way."""
    host = Host(max_connections=2, threads=True)
    first = begun(kind, host)
    for cid in range(1, 8):
        other = joined(kind, host, cid)
        flush(other, itt=cid)
        other.lose()
    assert len(host.session.lost) == 3
    assert not first.connection.done
    while host.running:
        host.finish()
    reassign(first, 1)
    assert first.managed() == pdu.TMF_TASK_DOES_NOT_EXIST


@KINDS
def test_nonsense_is_reassigned(kind: Kind) -> None:
    """Nothing comes of it, and all slots are free again."""
    host = Host()
    first = begun(kind, host)
    for itt in range(600):
        reassign(first, itt)
        assert first.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    first.command(bytes(16))
    assert first.opcodes() == [bhs.SCSI_RESPONSE]


@KINDS
def test_a_request_that_is_not_immediate(kind: Kind) -> None:
    """It is rejected, in its turn or behind a command that it has overtaken: the buffers of that
    one are not its own."""
    host, first, second = flushing(kind)
    first.lose()
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    reassign(second, cmd_sn=host.take_cmd_sn())
    assert second.managed() == pdu.TMF_REJECTED
    missing = host.take_cmd_sn()
    reassign(second, cmd_sn=host.take_cmd_sn())
    assert not second.heard
    second.command(bytes(16), itt=2, cmd_sn=missing)
    assert second.opcodes() == [bhs.SCSI_RESPONSE, bhs.TASK_MANAGEMENT_RESPONSE]
    managed = pdu.TaskManagementResponse.unpack_from(second.heard[1][0])
    assert managed.response == pdu.TMF_REJECTED
    second.heard.clear()
    reassign(second)
    assert second.managed() == pdu.TMF_COMPLETE
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]


def test_a_refused_request_and_the_write_before_it() -> None:
    """Over TCP: the slot that is given back is not that of the last command, whose R2T goes on."""
    host = Host()
    first = begun(TcpPeer, host)
    first.command(cdb10(WRITE_10, 1), WRITES, 512)
    r2t = pdu.ReadyToTransfer.unpack_from(first.answer(bhs.R2T)[0])
    reassign(first, 99)
    assert first.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    first.say_data_out(b"w" * 512, 0, r2t.ttt)
    assert first.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    assert host.store.content[:512] == b"w" * 512


# -- aborts and logouts -------------------------------------------------------------------------


@KINDS
def test_a_task_without_allegiance_is_aborted(kind: Kind) -> None:
    host = Host()
    first = begun(kind, host)
    second = joined(kind, host)
    first.command(cdb10(WRITE_10, 8), WRITES, 4096, itt=1, header=_no_data(first))
    first.lose()
    assert 1 in host.session.tasks
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert second.managed() == pdu.TMF_COMPLETE
    assert not host.session.tasks and not host.session.pool.used


def _no_data(peer: Peer) -> ControlHeader | None:
    if not isinstance(peer, IserPeer):
        return None
    peer.ours.hold = True
    return peer.writes_from(bytes(4096))


def aborted(peer: Peer) -> list[int]:
    """StatSNs of the answer to a task that ends with GOOD, and of the response to its abort behind
    it, and nothing else."""
    assert peer.opcodes() == [bhs.SCSI_RESPONSE, bhs.TASK_MANAGEMENT_RESPONSE]
    answer = pdu.ScsiResponse.unpack_from(peer.heard[0][0])
    managed = pdu.TaskManagementResponse.unpack_from(peer.heard[1][0])
    assert (answer.itt, answer.status, answer.response) == (1, 0, 0)
    assert managed.response == pdu.TMF_COMPLETE
    peer.heard.clear()
    return [answer.stat_sn, managed.stat_sn]


def unheard(
    kind: Kind, cdb: bytes, *what: object, threads: bool = False
) -> tuple[Host, Peer, Peer]:
    """A command was answered on the first connection, which has failed. The initiator has not
    acknowledged the answer."""
    host = Host(threads=threads)
    host.store.content[:1024] = b"r" * 1024
    first = begun(kind, host)
    second = joined(kind, host)
    first.acknowledges = False
    first.command(cdb, *what)  # type: ignore[arg-type]
    first.lose()
    second.heard.clear()
    return host, first, second


# shows: SYSTEM-41
@KINDS
def test_an_answered_task_without_allegiance_is_aborted(kind: Kind) -> None:
    """Its status is sent again, on this connection, and then the response (RFC 7143 section
    11.5.1); the command is not carried out again, and the window does not move twice."""
    host, _, second = unheard(kind, cdb10(WRITE_10, 1), WRITES, 512, b"w" * 512)
    window = host.session.max_cmd_sn
    second.log_out(FOR_RECOVERY, 0)
    assert second.logged_out().response == 0
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    status, response = aborted(second)
    assert response == status + 1
    assert host.session.max_cmd_sn == window and len(host.store.calls) == 1
    assert not host.session.lost
    second.acknowledge()
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    assert not host.session.answered


@KINDS
def test_a_status_that_an_abort_has_brought_may_be_lost_too(kind: Kind) -> None:
    host, _, second = unheard(kind, bytes(16))
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    second.acknowledges = False
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    aborted(second)
    second.lose()
    third = joined(kind, host, 1)
    third.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    aborted(third)


@KINDS
@pytest.mark.parametrize("count", [BATCH_SLOTS, TASK_SLOTS])
def test_an_answered_task_is_aborted_while_all_slots_are_in_use(kind: Kind, count: int) -> None:
    """More are made. If there may be no more, the request is rejected; the status is kept, and the
    request may come again."""
    host, _, second = unheard(kind, bytes(16), threads=True)
    ref_cmd_sn = host.cmd_sn - 1
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    for itt in range(2, 2 + count):
        cdb = cdb10(SYNCHRONIZE_CACHE, 0)
        second.command(cdb, itt=itt, cmd_sn=host.cmd_sn, immediate=bhs.IMMEDIATE)
    assert len(host.running) == count and not second.heard
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=ref_cmd_sn)
    if count == TASK_SLOTS:
        assert second.managed() == pdu.TMF_REJECTED
        host.finish()
        second.answer(bhs.SCSI_RESPONSE)
        second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=ref_cmd_sn)
    aborted(second)


@KINDS
def test_an_answered_task_is_aborted_when_its_connection_is_closed(kind: Kind) -> None:
    """One that is logged out while it works: its buffers may be in use until then."""
    host = Host()
    first = begun(kind, host)
    second = joined(kind, host)
    first.acknowledges = False
    first.command(bytes(16))
    second.log_out(FOR_RECOVERY, 0)
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert not second.heard
    first.close()
    assert second.heard.pop(0)[0][0] == bhs.LOGOUT_RESPONSE
    aborted(second)


@KINDS
def test_the_allegiance_of_an_answered_task_is_not_taken_unasked(kind: Kind) -> None:
    """Its connection works, or has failed without a logout: an ABORT TASK belongs there, where the
    task has ended. Its status is kept, and a TASK REASSIGN finds it later."""
    host = Host()
    first = begun(kind, host)
    second = joined(kind, host)
    first.acknowledges = False
    first.command(bytes(16))
    for peer in (second, first):
        peer.heard.clear()
        peer.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
        assert peer.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    first.lose()
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    reassign(second)
    assert response_of(second).status == 0


def test_an_answered_read_is_aborted_over_tcp() -> None:
    """Its data comes again with its status: GOOD means that it is there."""
    host, _, second = unheard(TcpPeer, cdb10(READ_10, 2), READS, 1024)
    second.log_out(FOR_RECOVERY, 0)
    second.heard.clear()
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert second.opcodes() == [bhs.DATA_IN, bhs.TASK_MANAGEMENT_RESPONSE]
    head, data = second.heard[0]
    assert data == b"r" * 1024 and head[1] & 1
    assert second.heard[1][0][2] == pdu.TMF_COMPLETE


def test_an_answered_read_is_aborted_over_iser() -> None:
    """There is no buffer that its data could go to, so it has no status either. Its memory is
    free."""
    host = Host()
    first = begun(IserPeer, host)
    second = joined(IserPeer, host)
    assert isinstance(first, IserPeer)
    first.acknowledges = False
    header = first.reads_into(bytearray(1024))
    first.command(cdb10(READ_10, 2), READS, 1024, itt=5, header=header)
    first.lose()
    assert host.session.pool.used
    second.log_out(FOR_RECOVERY, 0)
    assert second.logged_out().response == 0
    second.manage(pdu.TMF_ABORT_TASK, 5, ref_cmd_sn=host.cmd_sn - 1)
    assert second.managed() == pdu.TMF_COMPLETE
    assert not host.session.pool.used and 5 not in host.session.answered
    second.manage(pdu.TMF_ABORT_TASK, 5, ref_cmd_sn=host.cmd_sn - 1)
    assert second.managed() == pdu.TMF_TASK_DOES_NOT_EXIST


@pytest.mark.parametrize("level", [1, 2])
def test_a_status_outlives_the_abort_of_its_task(level: int) -> None:
    """Over TCP, on a connection that works: the task does not exist any more (11.6.1 c), and a
    status that was lost is sent again as it was."""
    host = Host(level=level)
    peer = begun(TcpPeer, host)
    peer.acknowledges = False
    peer.command(bytes(16))
    answer, _ = peer.answer(bhs.SCSI_RESPONSE)
    peer.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert peer.managed() == pdu.TMF_TASK_DOES_NOT_EXIST
    stat_sn = pdu.ScsiResponse.unpack_from(answer).stat_sn
    peer.say(
        pdu.SnackRequest(kind=pdu.SNACK_STATUS, exp_stat_sn=stat_sn, beg_run=stat_sn, run_length=1)
    )
    host.run()
    assert peer.answer(bhs.SCSI_RESPONSE)[0] == answer


@KINDS
def test_a_session_is_abandoned_with_all_that_is_kept(kind: Kind) -> None:
    """Session reinstatement, or a target that ends."""
    host, first, second = flushing(kind)
    first.lose()
    released: list[bool] = []
    first.owner.released = lambda: released.append(True)
    host.session.abandon()
    assert released and second.connection.done
    second.close()
    host.finish()
    assert host.over == [host.tsih]
