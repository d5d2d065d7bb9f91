"""The target's end of a connection that begins as a byte stream, against golden bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from iserblk.datamover.iser_target import IserTarget
from iserblk.datamover.stream_target import StreamTarget
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.sockets.stream import SocketStream
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.support.golden import golden as vector
from tests.target.fake_store import FakeStore
from tests.target.iser_client import Traced
from tests.target.owner import Owner
from tests.vectors import streaming_login as golden

TSIH = 7


class Kept:
    """A stream whose calls are kept in order: what leaves, and the end of the stream."""

    def __init__(self, stream: SocketStream) -> None:
        self._stream = stream
        self.calls: list[tuple[str, bytes]] = []
        self.most = 1 << 20  # bytes that leave at once; 0: the socket is full

    def send(self, buffers: list[bytes | memoryview], size: int) -> int:
        if not self.most:
            return -1
        data = b"".join(buffers)[: self.most]
        self.calls.append(("send", data))
        return self._stream.send([data], len(data))

    def release(self) -> socket.socket:
        self.calls.append(("release", b""))
        return self._stream.release()

    def receive(self, buffers: list[memoryview]) -> int:
        return self._stream.receive(buffers)

    def fileno(self) -> int:
        return self._stream.fileno()

    def disconnect(self, discard: bool = False) -> None:
        self._stream.disconnect(discard)

    def close(self) -> None:
        self._stream.close()

    def describe(self) -> dict[str, object]:
        return self._stream.describe()


class Target:
    """``peer``: the initiator's socket. ``stream``, ``qp``: of the target's end."""

    def __init__(self) -> None:
        self.peer, ours = socket.socketpair()
        self.peer.setblocking(False)
        self.stream = Kept(SocketStream(ours))
        self.qp = StreamingQueuePair(
            self.stream, initiator=False, crc=False, receive_size=28 + 48 + 8192
        )
        self.datamover = StreamTarget(self.stream, self.qp, IserTarget(self.qp, True), 262144)
        self.traced = Traced(self.datamover)
        login = LoginTarget(
            LoginTargetConfig(
                "iqn.2026-11.example:disk",
                TSIH,
                max_ulpdu=self.qp.max_ulpdu,
                max_recv_data_segment_length=262144,
            )
        )
        units = {0: LogicalUnit(FakeStore(1 << 20), serial="S", block=512)}
        self.connection = TargetConnection(
            self.traced,
            DeviceServer(units, "iqn.2026-11.example:disk"),
            login,
            Owner(),
            portal="10.0.0.1:3260",
        )

    def take(self) -> bytes:
        """Let the target work; what it has sent."""
        self.connection.progress(0.0)
        try:
            return self.peer.recv(65536)
        except BlockingIOError:
            return b""

    def say(self, data: bytes) -> bytes:
        self.peer.sendall(data)
        return self.take()

    def close(self) -> None:
        self.connection.close()
        self.peer.close()


def without_crc(heard: bytes) -> bytes:
    """What ends with an FPDU, without the CRC field, which may have any value."""
    return heard[:-4]


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.close()


def test_every_byte(target: Target) -> None:
    """The final Login Response is a byte stream without an iSER header; then MPA start-up, of which
    the target is the responder; then FPDUs, which carry what Send_Control sends.

    proves: ISER-3.1.1-1, ISER-3.1.6-2, ISER-4.1-11, ISER-5.1.2-11, ISER-5.1.2-12, ISER-5.1.2-13
    proves: ISER-5.1.2-14, ISER-7.3.9-1, ISER-GEN-8.1.6.3-1, ISER-IB00-3.1.6.3-1
    proves: ISER-IB00-3.1.6.3-3
    """
    assert target.say(golden.LOGIN_REQUEST) == golden.LOGIN_RESPONSE
    assert target.say(golden.MPA_REQUEST) == golden.MPA_REPLY
    assert without_crc(target.say(golden.PING)) == golden.PONG[:-4]
    assert target.connection.describe()["mpa_revision"] == 1


def test_an_enhanced_start_up(target: Target) -> None:
    assert target.say(golden.LOGIN_REQUEST) == golden.LOGIN_RESPONSE
    assert target.say(golden.ENHANCED_REQUEST) == golden.ENHANCED_REPLY[:22] + bytes.fromhex("c040")
    assert without_crc(target.say(golden.RTR + golden.PING)) == golden.PONG[:-4]


@pytest.mark.parametrize("write", [False, True])
def test_no_data_moves_before_the_end_of_login(target: Target, write: bool) -> None:
    """A command on the byte stream before the end of login moves nothing: the connection ends.

    proves: ISER-3.1.2-1, ISER-3.1.3-1
    """
    command = bhs.SCSI_COMMAND_FIELDS.pack(
        bhs.SCSI_COMMAND,
        0xA0 if write else 0xC0,
        0,
        bytes(8),
        9,
        512,
        1,
        0,
        bytes((0x2A if write else 0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0)).ljust(16, b"\0"),
    )
    with pytest.raises(RemoteProtocolError, match="before the end of login"):
        target.say(command)
    assert not {"put_data", "get_data", "enable_datamover"} & {
        name for name, _ in target.traced.calls
    }
    assert not target.stream.calls


def test_the_order_of_the_switch(target: Target) -> None:
    """Allocate_Connection_Resources, then Enable_Datamover with the final Login Response, which
    leaves first of all; only behind it the connection is another protocol's.

    proves: ISER-3.1.6-3, ISER-5.1.2-10
    """
    target.say(golden.LOGIN_REQUEST)
    names = [name for name, _ in target.traced.calls]
    enabled = names.index("enable_datamover")
    assert names.index("notice_key_values") < names.index("add_resources") < enabled
    assert "add_resources" not in names[enabled:]
    ((final,),) = [given for name, given in target.traced.calls if name == "enable_datamover"]
    assert bytes(final.bhs) == golden.LOGIN_RESPONSE[:48]  # type: ignore[attr-defined]
    assert target.stream.calls == [("send", golden.LOGIN_RESPONSE)]
    target.say(golden.MPA_REQUEST)
    assert target.stream.calls[1:] == [("send", golden.MPA_REPLY), ("release", b"")]


@pytest.mark.parametrize("stays", [0, 1, 47, 48, 100])
def test_what_the_socket_does_not_take_at_once(target: Target, stays: int) -> None:
    """The rest of the final Login Response leaves before the MPA Reply, although the Request has
    come meanwhile. proves: ISER-5.1.2-16, ISER-GEN-8.1.6.3-2, ISER-IB00-3.1.6.3-4"""
    target.stream.most = stays
    target.peer.sendall(golden.LOGIN_REQUEST)
    first = target.take()
    if not stays:
        assert first == b"" and target.connection.wants_write()
        target.peer.sendall(golden.MPA_REQUEST)
        assert target.take() == b"" and target.connection.wants_write()
    else:
        first += target.say(golden.MPA_REQUEST)
    target.stream.most = 3
    heard = first
    while target.connection.wants_write():
        heard += target.take()
    assert heard == golden.LOGIN_RESPONSE + golden.MPA_REPLY
    assert without_crc(target.say(golden.PING)) == golden.PONG[:-4]


@pytest.mark.parametrize("cut", range(1, len(golden.LOGIN_REQUEST + golden.MPA_REQUEST)))
def test_cut_anywhere(cut: int) -> None:
    """An initiator that does not wait for the Login Response: its MPA Request is in the segments of
    the login, however these are cut. Nothing is lost, and nothing read twice.

    proves: ISER-5.1.2-16, ISER-GEN-8.1.6.3-2, ISER-IB00-3.1.6.3-4
    """
    target = Target()
    try:
        whole = golden.LOGIN_REQUEST + golden.MPA_REQUEST
        heard = target.say(whole[:cut])
        assert golden.LOGIN_RESPONSE.startswith(heard)
        heard += target.say(whole[cut:])
        assert heard == golden.LOGIN_RESPONSE + golden.MPA_REPLY
        assert without_crc(target.say(golden.PING)) == golden.PONG[:-4]
    finally:
        target.close()


def test_byte_by_byte(target: Target) -> None:
    heard = b""
    for said in golden.INITIATOR_SENDS:
        for at in range(len(said)):
            assert target.take() == b""
            heard += target.say(said[at : at + 1])
    assert without_crc(heard) == b"".join(golden.TARGET_SENDS)[:-4]


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (golden.PING, "no MPA frame"),
        (bytes((bhs.SCSI_COMMAND,)) + bytes(47), "no MPA frame"),
        (golden.MPA_REPLY, "acts as an MPA responder"),
        (golden.MPA_REQUEST + golden.PING, "did not wait"),
    ],
)
def test_what_does_not_begin_mpa(target: Target, behind: bytes, words: str) -> None:
    target.say(golden.LOGIN_REQUEST)
    with pytest.raises(RemoteProtocolError, match=words):
        target.say(behind)


def test_nothing_is_sent_unasked_before_the_initiator_speaks(target: Target) -> None:
    """An initiator may allocate its resources late: the target's own ping waits for its first PDU.

    proves: ISER-7145-5.1.3-7
    """
    target.say(golden.LOGIN_REQUEST)
    target.connection.ping()
    assert target.take() == b""
    assert target.say(golden.MPA_REQUEST) == golden.MPA_REPLY
    target.connection.ping()
    assert target.take() == b""
    heard = target.say(golden.PING)
    # With the first FPDU of the initiator it leaves. (While it is unanswered there is no second.)
    itts = [heard[at + 2 + 18 + 28 + 16 :][:4] for at in range(0, len(heard), 100)]
    assert itts == [b"\xff" * 4, bytes((0, 0, 0, 77))]


def with_key(value: bytes) -> bytes:
    """The Login Request, with iSERHelloRequired behind its other keys."""
    text = golden.REQUEST_TEXT[:-2] + b"iSERHelloRequired=" + value + b"\0"
    head = golden.LOGIN_REQUEST[:5] + len(text).to_bytes(3, "big") + golden.LOGIN_REQUEST[8:48]
    return head + text + bytes(-len(text) & 3)


@pytest.mark.parametrize("key", [None, b"Yes"], ids=["old initiator", "new initiator"])
def test_a_hello_behind_the_start_up(target: Target, key: bytes | None) -> None:
    """An initiator of RFC 5046 knows no key, and greets; one of RFC 7145 has said that it will.
    Either allocates its resources before its Hello at the latest, and nothing comes sooner.

    proves: ISER-7145-5.1.3-5
    """
    request = golden.LOGIN_REQUEST if key is None else with_key(key)
    assert target.say(request)[36:38] == b"\0\0"
    target.say(golden.ENHANCED_REQUEST)
    if key is not None:  # else an initiator that was silent for so long sends none
        target.connection.ping()
    assert target.take() == b""
    heard = target.say(golden.RTR + vector("iser/hello-fpdu-28") + bytes(4))
    reply = vector("iser/hello-reply-fpdu-28")
    assert heard[: len(reply)] == reply
    # The ping, which nobody has asked for, leaves behind it.
    behind = heard[len(reply) + 4 :][2 + 18 + 28 + 16 :][:4]
    assert behind == (b"" if key is None else b"\xff" * 4)


@pytest.mark.parametrize("key", [b"Yes", b"No"])
def test_the_wrong_first_message(target: Target, key: bytes) -> None:
    """What login has agreed on holds for the first message on the RCaP."""
    assert target.say(with_key(key))[36:38] == b"\0\0"
    target.say(golden.ENHANCED_REQUEST)
    first = golden.PING if key == b"Yes" else vector("iser/hello-fpdu-28") + bytes(4)
    with pytest.raises(RemoteProtocolError, match=r"no Hello|unexpected Hello"):
        target.say(golden.RTR + first)


def test_a_silent_peer_goes_away(target: Target) -> None:
    target.say(golden.LOGIN_REQUEST)
    target.peer.close()
    with pytest.raises(Exception, match="closed the connection during MPA start-up"):
        target.connection.progress(0.0)


def test_traditional_iscsi_goes_on(target: Target) -> None:
    """RDMAExtensions=No: the same connection, the same bytes to its end, and no MPA."""
    text = golden.REQUEST_TEXT.replace(b"RDMAExtensions=Yes", b"RDMAExtensions=No\0")
    said = golden.LOGIN_REQUEST[:48] + text
    answer = target.say(said)
    assert answer[:2] == b"\x23\x87" and answer[36:38] == b"\0\0"
    assert b"RDMAExtensions=No\0" in answer and b"MaxRecvDataSegmentLength=262144\0" in answer
    assert isinstance(target.connection.describe()["datamover"], str)
    assert target.connection.describe()["datamover"] == "tcp"
    ping = golden.PING[2 + 18 + 28 : -4]
    pong = golden.PONG[2 + 18 + 28 : -4]
    assert target.say(ping) == pong


def test_the_successors(target: Target) -> None:
    """What Enable_Datamover returns."""
    target.say(golden.LOGIN_REQUEST)
    assert target.connection.describe()["datamover"] == "iser"
    other = Target()
    try:
        other.say(golden.LOGIN_REQUEST.replace(b"Extensions=Yes", b"Extensions=No\0"))
        assert other.connection.describe()["datamover"] == "tcp"
    finally:
        other.close()
