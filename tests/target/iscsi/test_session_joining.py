"""A session of the target gets further connections: login, limits, one CmdSN space."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.login_target import (
    CANNOT_INCLUDE,
    SESSION_DOES_NOT_EXIST,
    TOO_MANY_CONNECTIONS,
)
from iserblk.iscsi.text import MAXIMUM_TEXT, encode
from iserblk.target.iscsi.buffers import BESIDE, SET_ASIDE, BufferPool, DataBudget
from tests.support import logs
from tests.target.iscsi.several import (
    IQN,
    KINDS,
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
    two,
)

pytestmark = pytest.mark.logs(logs.IGNORED)


def write(peer: Peer, data: bytes, lba: int, cmd_sn: int | None = None, itt: int = 1) -> None:
    """A write whose data comes with the command."""
    blocks = len(data) // 512
    peer.command(cdb10(WRITE_10, blocks, lba), WRITES, len(data), data, itt=itt, cmd_sn=cmd_sn)


# shows: SYSTEM-30
@KINDS
def test_both_connections_serve_one_session(kind: Kind) -> None:
    """Commands and their answers stay on their connection; StatSN is of a connection, CmdSN of the
    session. The later login exchanges no key of the leading one, RDMAExtensions among them.

    proves: ISER-5.1-10
    """
    host = Host()
    first, second = two(kind, host)
    assert b"RDMAExtensions" not in second.login_text
    assert second.connection.session is first.connection.session is host.session
    assert second.connection.parameters is not None
    assert second.connection.parameters.rdma_extensions is (kind is IserPeer)
    assert len(host.nexuses) == 1
    for index, peer in enumerate([first, second, first]):
        write(peer, bytes([index + 1]) * 512, index)
        head, _ = peer.answer(bhs.SCSI_RESPONSE)
        response = pdu.ScsiResponse.unpack_from(head)
        assert (response.status, response.exp_cmd_sn) == (0, host.cmd_sn)
        assert response.stat_sn == peer.exp_stat_sn - 1
    assert host.store.content[:1536] == b"\1" * 512 + b"\2" * 512 + b"\3" * 512
    assert first.exp_stat_sn == 4 and second.exp_stat_sn == 2


@pytest.mark.parametrize("value", ["Yes", "No"])
@KINDS
def test_the_mode_is_not_negotiated_again(kind: Kind, value: str) -> None:
    """A later connection that offers RDMAExtensions gets no value for it, and is refused where it
    asks for another mode than the session has.

    proves: ISER-5.1-11
    """
    host = Host()
    assert kind(host).log_in() == 0
    later = kind(host, 1)
    status = later.log_in(("RDMAExtensions", value))
    if (value == "Yes") is (kind is IserPeer):
        assert status == 0 and b"RDMAExtensions=Irrelevant" in later.login_text
    else:
        assert status == CANNOT_INCLUDE


# shows: SYSTEM-6
@KINDS
def test_a_session_has_one_mode(kind: Kind) -> None:
    host = Host()
    assert kind(host).log_in() == 0
    other = TcpPeer(host, 1) if kind is IserPeer else IserPeer(host, 1)
    assert other.log_in() == CANNOT_INCLUDE
    assert len(host.session.connections) == 1


def test_keys_of_the_leading_login_hold() -> None:
    """What a later connection offers of them changes nothing; its own keys it negotiates."""
    host = Host()
    assert TcpPeer(host).log_in(("MaxBurstLength", "4096")) == 0
    later = TcpPeer(host, 1)
    more = (
        ("MaxBurstLength", "8192"),
        ("ErrorRecoveryLevel", "0"),
        ("MaxRecvDataSegmentLength", "1024"),
    )
    assert later.log_in(*more) == 0
    parameters = later.connection.parameters
    assert parameters is not None
    assert (parameters.max_burst_length, parameters.error_recovery_level) == (4096, 2)
    assert parameters.initiator_recv_data_segment_length == 1024
    first = host.peers[0].connection.parameters
    assert first is not None and first.initiator_recv_data_segment_length == 8192


def test_who_may_not_join() -> None:
    """No session with that TSIH; another ISID or name; a discovery session; another portal group.
    What is refused leaves the session as it was."""
    host = Host()
    assert TcpPeer(host).log_in() == 0
    assert TcpPeer(host, 1).log_in(tsih=host.tsih + 100) == SESSION_DOES_NOT_EXIST
    stranger = ("InitiatorName", "iqn.2026-11.example:stranger")
    assert TcpPeer(host, 1).log_in(stranger) == SESSION_DOES_NOT_EXIST
    assert TcpPeer(host, 1).log_in(("SessionType", "Discovery")) == CANNOT_INCLUDE
    host.session.portal_group = 2
    assert TcpPeer(host, 1).log_in() == CANNOT_INCLUDE
    host.session.portal_group = 1
    host.session.initiator_name = stranger[1]
    assert TcpPeer(host, 1).log_in() == SESSION_DOES_NOT_EXIST
    host.session.isid = bytes(6)
    assert TcpPeer(host, 1).log_in() == SESSION_DOES_NOT_EXIST
    assert len(host.session.connections) == 1


@pytest.mark.parametrize(("level", "most"), [(0, 3), (1, 3), (2, 4)])
def test_a_session_has_no_more_connections_than_agreed_on(level: int, most: int) -> None:
    """At level 2 there is room for one more, which may have to clean up after another."""
    host = Host(level=level, max_connections=3)
    for cid in range(most):
        assert TcpPeer(host, cid).log_in() == 0
    assert TcpPeer(host, most).log_in() == TOO_MANY_CONNECTIONS
    assert len(host.session.connections) == most


@pytest.mark.parametrize("level", [0, 1])
def test_below_level_2_nothing_is_kept(level: int) -> None:
    """DefaultTime2Retain is 0, and the session ends with its last connection."""
    host = Host(level=level)
    peer = TcpPeer(host)
    assert peer.log_in() == 0
    assert b"DefaultTime2Retain=0\0" in peer.login_text
    peer.lose()
    assert host.over == [host.tsih] and not host.nexuses


# -- the order of commands ----------------------------------------------------------------------


# shows: SYSTEM-30
@KINDS
def test_commands_begin_in_the_order_of_cmd_sn(kind: Kind) -> None:
    """They arrive in any order, on any connection; those after a gap wait, whether they bring
    their data with them or behind them. Duplicates are dropped."""
    host = Host()
    first, second = two(kind, host)
    start = host.cmd_sn
    write(second, b"C" * 512, 0, start + 2, itt=3)
    write(first, b"B" * 512, 0, start + 1, itt=2)
    write(first, b"X" * 512, 0, start + 1, itt=4)  # a duplicate of what waits
    assert not first.heard and not second.heard and not host.store.calls
    write(second, b"A" * 512, 0, start, itt=1)
    assert host.store.content[:512] == b"C" * 512 and len(host.store.calls) == 3
    assert first.opcodes() == [bhs.SCSI_RESPONSE]
    assert second.opcodes() == [bhs.SCSI_RESPONSE] * 2
    itts = [pdu.ScsiResponse.unpack_from(head).itt for head, _ in second.heard]
    assert itts == [1, 3]
    host.cmd_sn = start + 3
    first.heard.clear()
    write(first, b"X" * 512, 0, start + 1, itt=5)  # a duplicate of what has ended
    assert not first.heard and len(host.store.calls) == 3
    write(first, b"D" * 512, 0)
    assert first.opcodes() == [bhs.SCSI_RESPONSE]


@KINDS
def test_the_window_bounds_what_waits(kind: Kind) -> None:
    """A CmdSN beyond MaxCmdSN is ignored."""
    host = Host()
    first, second = two(kind, host)
    start = host.cmd_sn
    last = host.session.max_cmd_sn
    write(first, b"Z" * 512, 1, (last + 1) & 0xFFFFFFFF, itt=7)
    assert host.session.window.waiting == 0
    write(first, b"Y" * 512, 1, last, itt=8)
    assert host.session.window.waiting == 1
    assert not first.heard and not second.heard
    assert start == host.session.exp_cmd_sn


@KINDS
def test_an_immediate_command_does_not_wait(kind: Kind) -> None:
    host = Host()
    first, second = two(kind, host)
    write(first, b"L" * 512, 0, host.cmd_sn + 1, itt=2)
    second.command(bytes(16), itt=3, cmd_sn=host.cmd_sn, immediate=bhs.IMMEDIATE)
    assert second.opcodes() == [bhs.SCSI_RESPONSE] and not first.heard


@KINDS
def test_pings_and_requests_wait_for_their_turn(kind: Kind) -> None:
    """PDUs with a CmdSN that are no SCSI commands, too."""
    host = Host()
    first, second = two(kind, host)
    start = host.cmd_sn
    first.say(
        pdu.NopOut(
            opcode=bhs.NOP_OUT, data_length=4, itt=5, cmd_sn=start + 1, exp_stat_sn=0, lun=bytes(8)
        ),
        b"ping",
    )
    first.manage(pdu.TMF_LOGICAL_UNIT_RESET, cmd_sn=start + 2)
    assert not first.heard
    write(second, b"A" * 512, 0, start)
    second.acknowledge()
    assert first.opcodes() == [bhs.NOP_IN, bhs.TASK_MANAGEMENT_RESPONSE]
    assert first.heard[0][1] == b"ping"


def ask(peer: Peer, cmd_sn: int, data: bytes, itt: int = 9) -> None:
    peer.say(
        pdu.TextRequest(
            opcode=bhs.TEXT_REQUEST,
            flags=bhs.FLAG_FINAL,
            data_length=len(data),
            itt=itt,
            ttt=bhs.NO_TAG,
            cmd_sn=cmd_sn,
            exp_stat_sn=0,
        ),
        data,
    )


def test_a_long_text_that_waits_is_answered_as_one_in_turn() -> None:
    """With its last key, and not as far as an answer could be long."""
    host = Host(receives=1 << 17)
    first, second = two(TcpPeer, host)
    start = host.cmd_sn
    text = encode([*((f"X-a{n}", "v" * 200) for n in range(60)), ("SendTargets", "")])
    assert len(text) > 12000
    ask(first, start + 1, text)
    second.command(bytes(16), itt=3, cmd_sn=start)
    assert first.opcodes() == [bhs.TEXT_RESPONSE]
    early = first.heard.pop()[1]
    assert encode([("TargetName", IQN)]) in early
    ask(first, start + 2, text)
    host.run()
    assert first.heard.pop()[1] == early


def test_texts_that_wait_have_a_bound() -> None:
    """A connection has one text operation at a time; and none is longer than in turn."""
    host = Host(receives=1 << 17)
    first, second = two(TcpPeer, host)
    start = host.cmd_sn
    text = encode([("SendTargets", "")])
    ask(first, start + 1, text)
    ask(first, start + 2, text, itt=10)
    host.run()
    ((head, _),) = first.heard
    assert pdu.Reject.unpack_from(head).reason == pdu.REJECT_PROTOCOL_ERROR
    assert host.session.window.waiting == 1
    first.heard.clear()
    second.command(bytes(16), itt=3, cmd_sn=start)
    assert first.opcodes() == [bhs.TEXT_RESPONSE]
    ask(first, start + 3, text)  # the next may wait again
    ask(first, start + 2, text)
    host.run()
    assert first.opcodes() == [bhs.TEXT_RESPONSE] * 3
    ask(first, start + 5, bytes(MAXIMUM_TEXT + 1))
    host.run()
    assert first.connection.done and str(MAXIMUM_TEXT) in str(first.error)


def test_unsolicited_data_of_a_command_that_waits() -> None:
    """It is taken as it comes, and belongs to its command when that begins."""
    host = Host()
    first = TcpPeer(host)
    assert first.log_in(("InitialR2T", "No"), ("ImmediateData", "Yes")) == 0
    first.ready()
    second = TcpPeer(host, 1)
    assert second.log_in() == 0
    start = host.cmd_sn
    flags = WRITES & ~bhs.FLAG_FINAL
    first.command(cdb10(WRITE_10, 3), flags, 1536, b"a" * 512, itt=1, cmd_sn=start + 1)
    first.say_data_out(b"b" * 512, 512, bhs.NO_TAG, 0, final=False)
    first.command(cdb10(READ_10, 3), READS, 1536, itt=2, cmd_sn=start + 2)
    second.command(cdb10(SYNCHRONIZE_CACHE, 0), itt=3, cmd_sn=start)
    assert second.opcodes() == [bhs.SCSI_RESPONSE]
    assert first.opcodes() == [bhs.DATA_IN]  # the write still waits for its data
    first.say_data_out(b"c" * 512, 1024, bhs.NO_TAG, 1)
    assert first.opcodes() == [bhs.DATA_IN, bhs.SCSI_RESPONSE]
    assert host.store.content[:1536] == b"a" * 512 + b"b" * 512 + b"c" * 512


def test_what_waits_is_aborted() -> None:
    """ABORT TASK of a command that waits for others: its CmdSN counts as received."""
    host = Host()
    first, second = two(TcpPeer, host)
    start = host.cmd_sn
    write(first, b"B" * 512, 0, start + 1, itt=2)
    write(second, b"C" * 512, 1, start + 2, itt=3)
    host.cmd_sn = start + 3
    first.manage(pdu.TMF_ABORT_TASK, 2, ref_cmd_sn=start + 1)
    assert first.managed() == pdu.TMF_COMPLETE
    write(second, b"A" * 512, 2, start, itt=1)
    assert second.opcodes() == [bhs.SCSI_RESPONSE] * 2
    assert not any(host.store.content[:512]) and host.session.window.waiting == 0
    assert host.session.exp_cmd_sn == start + 3


@KINDS
def test_a_task_set_function_waits_for_earlier_commands(kind: Kind) -> None:
    """ABORT TASK SET is about all commands before it, on all connections (RFC 7143 section
    4.2.3.3): it waits for those that have not come, and its response for the acknowledgement of
    responses on the other connections."""
    host = Host(threads=True)
    first, second = two(kind, host)
    start = host.cmd_sn
    host.store.cached = False
    host.cmd_sn = start + 2
    first.manage(pdu.TMF_ABORT_TASK_SET)
    assert not first.heard
    buffer = bytearray(512)
    header = second.reads_into(buffer) if isinstance(second, IserPeer) else None
    args = (cdb10(READ_10, 1), READS, 512)
    second.command(*args, itt=1, cmd_sn=start, header=header)
    assert not first.heard
    second.acknowledges = False
    second.command(cdb10(0, 0), itt=2, cmd_sn=start + 1, immediate=0)
    assert second.opcodes() == [bhs.SCSI_RESPONSE]
    assert not first.heard and len(host.running) == 1
    host.finish()  # an aborted task sends nothing
    assert not any(head[0] == bhs.DATA_IN for head, _ in second.heard)
    assert not first.heard, "a response of another connection is not acknowledged"
    assert second.opcodes()[-1] == bhs.NOP_IN  # asks for that
    second.exp_stat_sn += 1
    second.acknowledge()
    assert first.managed() == pdu.TMF_COMPLETE


def test_too_many_requests_that_wait_are_refused() -> None:
    host = Host()
    first, _ = two(TcpPeer, host)
    host.cmd_sn += 1  # a command that never comes
    for _ in range(64):
        first.manage(pdu.TMF_ABORT_TASK_SET)
    assert not first.heard
    first.manage(pdu.TMF_ABORT_TASK_SET)
    assert first.managed() == pdu.TMF_REJECTED
    first.lose()
    assert host.session.window.waiting == 0


@KINDS
def test_a_task_on_another_connection_is_aborted(kind: Kind) -> None:
    host = Host(threads=True)
    first, second = two(kind, host)
    second.command(cdb10(SYNCHRONIZE_CACHE, 0), itt=1)
    assert len(host.running) == 1
    first.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert not first.heard  # not before the thread has let go
    host.finish()
    assert first.managed() == pdu.TMF_COMPLETE and not second.heard
    assert not host.session.tasks


def test_an_error_of_a_command_that_waited_ends_its_connection_only() -> None:
    """A read without a buffer is found out when its turn comes."""
    host = Host(level=0)
    first, second = two(IserPeer, host)
    start = host.cmd_sn
    first.command(cdb10(READ_10, 1), READS, 512, itt=2, cmd_sn=start + 1)
    second.command(bytes(16), itt=1, cmd_sn=start)
    assert first.connection.done and not second.connection.done
    assert second.opcodes() == [bhs.SCSI_RESPONSE]


def test_without_memory_nothing_waits_for_its_turn() -> None:
    """Beyond what is guaranteed to each session; the connection ends, as the PDU would be lost."""
    host = Host(level=0, budget=DataBudget(SET_ASIDE << 20))
    others = BufferPool(host.budget)
    others.take(SET_ASIDE << 20)
    _, second = two(TcpPeer, host)
    for number in range(1, 127):
        ping = pdu.NopOut(
            opcode=bhs.NOP_OUT,
            data_length=8192,
            lun=bytes(8),
            itt=number,
            cmd_sn=host.cmd_sn + number,
            exp_stat_sn=second.exp_stat_sn,
        )
        second.say(ping, bytes(8192))
        host.run()
        assert host.budget.beside <= BESIDE
        if second.connection.done:
            break
    assert str(second.error) == "there is no memory for what comes before its turn"
    assert not host.budget.beside
    others.close()


@pytest.mark.parametrize("end", ["turn", "loss", "session"])
def test_what_waits_for_its_turn_is_in_the_account_of_memory(end: str) -> None:
    host = Host(level=0)
    first, second = two(TcpPeer, host)
    ping = pdu.NopOut(
        opcode=bhs.NOP_OUT,
        data_length=4096,
        lun=bytes(8),
        itt=3,
        cmd_sn=host.cmd_sn + 1,
        exp_stat_sn=second.exp_stat_sn,
    )
    second.say(ping, bytes(4096))
    host.run()
    assert host.budget.beside == 48 + 4096 and not second.heard
    if end == "turn":
        first.command(bytes(16))
        assert second.opcodes() == [bhs.NOP_IN]
    elif end == "loss":
        second.lose()
        assert not first.connection.done
    else:
        host.session.abandon()
    assert not host.budget.beside
