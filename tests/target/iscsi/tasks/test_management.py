"""Tasks that are being aborted, or wait, when a connection or the session ends; and what the
response to an abort waits for."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import TOO_MANY_CONNECTIONS
from iserblk.target.iscsi import session
from iserblk.target.iscsi.tasks.management import UNANSWERED
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
    Kind,
    Peer,
    TcpPeer,
    cdb10,
    two,
)

pytestmark = pytest.mark.logs(logs.IGNORED)


def two_ready(kind: Kind, host: Host) -> tuple[Peer, Peer]:
    """The same, and the second connection has no unit attention any more."""
    first, second = two(kind, host)
    second.command(bytes(16), itt=9)  # the unit attention
    second.heard.clear()
    return first, second


@KINDS
@pytest.mark.parametrize("level", [0, 2])
def test_a_thread_that_works_for_an_aborted_task_of_a_lost_connection(
    kind: Kind, level: int
) -> None:
    """The answer to the abort is lost with the connection, so the initiator does not wait for it:
    no command may begin before the thread has ended, or an old write lands behind a new one."""
    host = Host(level=level, threads=True)
    first, second = two_ready(kind, host)
    first.command(cdb10(SYNCHRONIZE_CACHE, 0), PLAIN, itt=1)
    first.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert len(host.running) == 1 and not first.heard
    first.lose()
    again = kind(host, 0)
    assert again.log_in() == 0
    for peer, itt in (second, 2), (again, 3):
        peer.command(cdb10(WRITE_10, 1), WRITES, 512, b"x" * 512, itt=itt)
        assert not peer.heard and not host.store.calls
    host.finish()
    assert second.opcodes() == again.opcodes() == [bhs.SCSI_RESPONSE]
    assert host.store.calls[-1][0] == "write" and not host.session.paused


@pytest.mark.parametrize("reason", [pdu.LOGOUT_CLOSE_SESSION, pdu.LOGOUT_CLOSE_CONNECTION])
def test_a_logout_while_an_aborted_task_waits_for_its_data(reason: int) -> None:
    """After a reset the target waits for the data that it has asked for. The end of the connection
    ends that as well, and the logout is answered."""
    host = Host(level=0)
    first, second = two(TcpPeer, host)
    second.command(cdb10(WRITE_10, 1), WRITES, 512, itt=1)
    assert second.opcodes() == [bhs.R2T]
    first.manage(pdu.TMF_LOGICAL_UNIT_RESET)
    assert not first.heard
    first.log_out(reason, 1)
    assert second.ended
    second.close()
    host.run()
    opcodes = first.opcodes()
    assert opcodes[-1] == bhs.LOGOUT_RESPONSE, opcodes


@KINDS
def test_a_connection_that_had_many_responses_before_the_second_one_came(kind: Kind) -> None:
    """What is acknowledged is noted only from the second connection on, and StatSN may be half of
    its range away from where it began."""
    host = Host(level=0, threads=True)
    first = kind(host, 0)
    assert first.log_in() == 0
    first.ready()
    first.connection._numbers.stat_sn = first.exp_stat_sn = 0x9000_0000
    second = kind(host, 1)
    assert second.log_in() == 0
    first.acknowledges = False
    first.command(bytes(16), itt=9)
    first.heard.clear()
    second.manage(pdu.TMF_ABORT_TASK_SET)
    assert not second.heard and first.opcodes() == [bhs.NOP_IN]
    first.exp_stat_sn += 1
    first.acknowledge()
    assert second.managed() == pdu.TMF_COMPLETE


@KINDS
def test_requests_that_were_answered_leave_nothing_behind(kind: Kind) -> None:
    host = Host(level=0)
    first, second = two_ready(kind, host)
    first.acknowledges = False
    for _ in range(20):
        first.command(bytes(16), itt=8)
        second.manage(pdu.TMF_ABORT_TASK_SET)
        assert not second.heard
        first.exp_stat_sn += 1
        first.acknowledge()
        assert second.managed() == pdu.TMF_COMPLETE
    assert len(first.connection.on_closed) <= 1
    first.command(bytes(16), itt=8)
    second.manage(pdu.TMF_ABORT_TASK_SET)
    assert not second.heard
    first.lose()
    assert second.managed() == pdu.TMF_COMPLETE, "nobody acknowledges it any more"


@KINDS
def test_requests_about_a_task_that_does_not_end_are_bounded(kind: Kind) -> None:
    """A disk does not answer, and the initiator asks for the same again and again."""
    host = Host(level=0, threads=True)
    first, _ = two_ready(kind, host)
    first.command(cdb10(SYNCHRONIZE_CACHE, 0), PLAIN, itt=1)
    for _ in range(UNANSWERED):
        first.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert not first.heard
    first.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert first.managed() == pdu.TMF_REJECTED
    host.finish()
    assert first.opcodes() == [bhs.TASK_MANAGEMENT_RESPONSE] * UNANSWERED
    assert first.error is None
    first.heard.clear()
    first.manage(pdu.TMF_ABORT_TASK, 1)
    assert first.managed() == pdu.TMF_TASK_DOES_NOT_EXIST


@pytest.mark.parametrize("by", ["expiry", "loss", "end"])
def test_memory_of_a_connection_that_is_over_serves_commands_that_wait(
    monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Nothing else comes on the other connection that could start them. Of a write that is kept
    (``loss``) the data comes again, if at all; of a read that was answered it is kept."""
    monkeypatch.setattr(session, "GUARANTEED", 4096)
    monkeypatch.setattr(session, "DATA_BUDGET", 8192)
    host = Host(level=0 if by == "end" else 2, threads=True)
    first, second = two(TcpPeer, host)
    if by == "expiry":
        first.acknowledges = False
        first.command(cdb10(READ_10, 16), READS, 8192, itt=1)
        assert first.opcodes() == [bhs.DATA_IN]
    else:
        first.command(cdb10(WRITE_10, 16), WRITES, 8192, itt=1)
        assert first.opcodes() == [bhs.R2T]
    second.command(cdb10(WRITE_10, 16), WRITES, 8192, itt=2)
    assert not second.heard
    first.hang_up()
    first.turn()
    first.connection.close()
    host.peers.remove(first)
    if by == "expiry":
        assert not second.take()
        host.session.expire(first.connection)
    assert [head[0] for head, _ in second.take()] == [bhs.R2T]


def test_late_data_of_an_aborted_task_whose_tag_another_connection_uses_again() -> None:
    """The initiator may use a tag again when it has the answer to the abort. What it had sent
    before, on the task's own connection, is still on its way, and is no error."""
    host = Host(level=0, threads=True)
    first = TcpPeer(host, 0)
    assert first.log_in(("InitialR2T", "No")) == 0
    first.ready()
    second = TcpPeer(host, 1)
    assert second.log_in() == 0
    second.command(bytes(16), itt=9)
    second.heard.clear()
    first.command(cdb10(WRITE_10, 2), WRITES & ~bhs.FLAG_FINAL, 1024, b"", itt=1)
    second.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert second.managed() == pdu.TMF_COMPLETE
    second.command(cdb10(SYNCHRONIZE_CACHE, 0), PLAIN, itt=1)
    first.say_data_out(bytes(1024), 0, bhs.NO_TAG, itt=1)
    assert first.error is None and second.connection.session is first.connection.session
    host.finish()
    assert second.opcodes() == [bhs.SCSI_RESPONSE]


def test_a_cid_of_a_connection_that_is_being_closed_makes_no_room() -> None:
    host = Host(level=0, max_connections=2)
    first, second = two(TcpPeer, host)
    second.log_out(pdu.LOGOUT_CLOSE_CONNECTION)
    assert second.ended and second.connection.done
    third = TcpPeer(host, 2)
    assert third.log_in() == 0
    assert TcpPeer(host, 1).log_in() == TOO_MANY_CONNECTIONS
    assert not first.connection.done
