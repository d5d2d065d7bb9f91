"""Initiators that are there, and do not do what others wait for: their connections end."""

from __future__ import annotations

import socket

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.rcap import seam
from iserblk.scsi import status as sam
from iserblk.target.iscsi.owing import LONGEST_S, PATIENCE_S
from tests.target.iscsi.several import (
    KINDS,
    READ_10,
    READS,
    WRITE_10,
    WRITES,
    Host,
    IserPeer,
    Kind,
    Peer,
    TcpPeer,
    cdb10,
    two,
)

HEAD_OF_QUEUE = bhs.FLAG_FINAL | bhs.FLAG_WRITE | 3
ORDERED = bhs.FLAG_FINAL | bhs.FLAG_WRITE | bhs.ATTR_ORDERED
DATA = bytes(range(256)) * 2048
BLOCKS = len(DATA) // 512  # 512 KiB, which may take 8 s
LOOK_S = PATIENCE_S / 2


def logged_in(kind: Kind, host: Host, *more: tuple[str, str]) -> Peer:
    """With a session of its own, whose first command has come."""
    peer = kind(host)
    assert peer.log_in(*more, tsih=0) == 0
    peer.ready()
    return peer


def stop(peer: Peer) -> None:
    """The initiator lets no RDMA Read pass from now on."""
    if isinstance(peer, IserPeer):
        peer.theirs.intercept = lambda message: message.kind != seam.RDMA_READ


def begin(peer: Peer, flags: int, itt: int = 1) -> None:
    header = peer.writes_from(DATA) if isinstance(peer, IserPeer) else None
    peer.command(cdb10(WRITE_10, BLOCKS), flags, len(DATA), itt=itt, header=header)


def look(peer: Peer, now: float) -> str:
    """What the owner does in time, behind a sign of life."""
    peer.acknowledge()
    owed = peer.connection.overdue(now)
    if owed:
        peer.connection.give_up()
        peer.host.run()
        peer.close()
    return owed


@KINDS
@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("flags", [HEAD_OF_QUEUE, ORDERED])
def test_a_write_without_its_data_holds_up_others_for_a_while(
    kind: Kind, level: int, flags: int
) -> None:
    """Also where the tasks of a lost connection are kept."""
    host = Host(level=level)
    peer = logged_in(kind, host)
    stop(peer)
    begin(peer, flags)
    other = logged_in(TcpPeer, host)
    other.command(cdb10(WRITE_10, 1), WRITES, 512, b"o" * 512)
    assert not other.heard  # it waits
    now = 0.0
    while now <= PATIENCE_S + 8:
        assert look(peer, now) == ""
        now += LOOK_S / 4
    assert not other.heard
    assert look(peer, now) == "the data of a command did not come"
    assert other.answer(bhs.SCSI_RESPONSE)[0][3] == 0
    assert bytes(host.store.content[:512]) == b"o" * 512


@KINDS
def test_unsolicited_data_has_its_time_too(kind: Kind) -> None:
    host = Host(level=0)
    peer = logged_in(kind, host, ("InitialR2T", "No"))
    peer.command(cdb10(WRITE_10, 128), HEAD_OF_QUEUE & ~bhs.FLAG_FINAL, 65536)
    other = logged_in(TcpPeer, host)
    other.command(cdb10(WRITE_10, 1), WRITES, 512, b"o" * 512)
    assert look(peer, 0.0) == "" and not other.heard
    assert look(peer, PATIENCE_S + 2) == "the data of a command did not come"
    assert other.answer(bhs.SCSI_RESPONSE)[0][3] == 0


def test_a_task_that_is_kept_has_ended_without_its_data() -> None:
    """So that reassigning it again and again holds up nobody."""
    host = Host(level=2)
    first, second = two(TcpPeer, host)
    begin(first, HEAD_OF_QUEUE, itt=7)
    first.heard.clear()
    look(first, 0.0)
    assert look(first, PATIENCE_S + 9)
    second.heard.clear()
    second.log_out(pdu.LOGOUT_FOR_RECOVERY, cid=0)
    second.heard.clear()
    second.manage(pdu.TMF_TASK_REASSIGN, 7)
    opcodes = second.opcodes()
    assert opcodes == [bhs.TASK_MANAGEMENT_RESPONSE, bhs.SCSI_RESPONSE]
    assert second.heard[1][0][3] == sam.TASK_ABORTED


@KINDS
def test_a_task_that_loses_its_connection_again_and_again_ends(kind: Kind) -> None:
    """Each of them has its time; one that is too short for that would hold up others for ever."""
    host = Host(level=2)
    peer = logged_in(kind, host)
    stop(peer)
    begin(peer, HEAD_OF_QUEUE, itt=7)
    first = host.tsih
    other = logged_in(TcpPeer, host)
    other.command(cdb10(WRITE_10, 1), WRITES, 512, b"o" * 512)
    host.tsih = first
    losses = 0
    while not other.heard:
        assert losses <= 8
        successor = kind(host, losses + 1)
        assert successor.log_in() == 0
        stop(successor)
        peer.lose()
        losses += 1
        if other.heard:
            break
        successor.log_out(pdu.LOGOUT_FOR_RECOVERY, cid=peer.cid)
        successor.logged_out()
        header = successor.writes_from(DATA) if isinstance(successor, IserPeer) else None
        successor.manage(pdu.TMF_TASK_REASSIGN, 7, header=header)
        assert pdu.TaskManagementResponse.unpack_from(successor.heard.pop(0)[0]).response == 0
        successor.heard.clear()
        peer = successor
    assert losses > 4 and other.answer(bhs.SCSI_RESPONSE)[0][3] == 0


def test_a_host_that_sends_slowly_is_waited_for() -> None:
    """One write after the other, as R2Ts came; each has its time."""
    host = Host(level=0)
    peer = logged_in(TcpPeer, host, ("MaxBurstLength", str(len(DATA))))
    for itt in range(10):
        begin(peer, WRITES, itt)
    r2ts = [pdu.ReadyToTransfer.unpack_from(head) for head, _ in peer.heard]
    peer.heard.clear()
    now = 0.0
    for r2t in r2ts:
        for _ in range(3):
            assert look(peer, now) == ""
            now += PATIENCE_S / 3.5
        for at in range(0, len(DATA), 8192):
            last = at + 8192 == len(DATA)
            peer.say_data_out(DATA[at : at + 8192], at, r2t.ttt, at // 8192, last, r2t.itt)
    assert now < LONGEST_S and peer.opcodes() == [bhs.SCSI_RESPONSE] * 10


class Deaf(TcpPeer):
    """Receives nothing when it is ``deaf``."""

    deaf = False

    def take(self) -> list[tuple[bytes, bytes]]:
        return [] if self.deaf else super().take()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_answers_that_are_not_taken_hold_memory_for_a_while(level: int) -> None:
    host = Host(level=level)
    peer = logged_in(Deaf, host)
    assert isinstance(peer, Deaf)
    peer.deaf = True
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for itt in range(4):
        peer.command(cdb10(READ_10, BLOCKS), READS, len(DATA), itt=itt)
    assert look(peer, 0.0) == "" and host.budget.used
    assert look(peer, PATIENCE_S) == ""
    assert look(peer, PATIENCE_S + 9) == "its answers were not taken"
    for session in host.sessions.values():
        for connection in list(session.lost):
            session.expire(connection)
    assert not host.budget.used


@pytest.mark.parametrize("level", [1, 2])
def test_answers_that_are_only_kept_are_nothing_that_is_owed(level: int) -> None:
    host = Host(level=level)
    peer = logged_in(TcpPeer, host)
    peer.acknowledges = False
    peer.command(cdb10(READ_10, BLOCKS), READS, len(DATA))
    for now in range(0, 1000, 10):
        assert look(peer, float(now)) == ""


def test_a_command_that_never_comes_is_awaited_for_a_while() -> None:
    """What waits behind it holds memory."""
    host = Host(level=0)
    peer = logged_in(TcpPeer, host, ("ImmediateData", "Yes"))
    peer.command(cdb10(WRITE_10, 1), WRITES, 512, b"e" * 512, cmd_sn=host.cmd_sn + 1)
    assert host.budget.used and look(peer, 0.0) == ""
    assert look(peer, PATIENCE_S) == ""
    assert look(peer, PATIENCE_S + 1) == "a command before others did not come"
    assert not host.budget.used


def test_commands_that_come_in_another_order_are_no_debt() -> None:
    """Each look finds one that waits, and never for the same command."""
    host = Host(level=0)
    peer = logged_in(TcpPeer, host)
    for now in range(0, 1000, 10):
        first = host.take_cmd_sn()
        peer.command(bytes(16), cmd_sn=host.take_cmd_sn(), itt=2)
        assert look(peer, float(now)) == ""
        peer.command(bytes(16), cmd_sn=first)
        assert peer.opcodes() == [bhs.SCSI_RESPONSE] * 2
        peer.heard.clear()
