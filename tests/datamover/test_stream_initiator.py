"""The initiator's end of a connection that begins as a byte stream, against golden bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import INLINE, PduSlot
from iserblk.datamover.stream_initiator import StreamInitiator
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError
from iserblk.iscsi.keys import SessionParameters
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.scsi.tasks import READ
from iserblk.sockets.stream import SocketStream
from tests.contract.datamovers import Recorder
from tests.datamover.test_stream_target import Kept
from tests.vectors import streaming_login as golden

ISER = SessionParameters(rdma_extensions=True)
TRADITIONAL = SessionParameters()
NOP_IN = golden.UNASKED[2 + 18 + 28 : -4]


class Initiator:
    """``peer``: the target's socket. ``up``: the layer above. ``end``: what Enable_Datamover has
    returned."""

    def __init__(self) -> None:
        self.peer, ours = socket.socketpair()
        self.peer.setblocking(False)
        self.stream = stream = Kept(SocketStream(ours))
        self.qp = StreamingQueuePair(
            stream, initiator=True, crc=False, receive_size=28 + 48 + 8192, segments=1
        )
        self.iser = IserInitiator(self.qp, 8192, "stream")
        self.first = StreamInitiator(stream, self.qp, self.iser, 262144)
        self.up = Recorder()
        self.first.user = self.up
        self.slots = [PduSlot(index) for index in range(4)]
        self.first.allocate_connection_resources(self.slots, 8)

    def ask(self) -> bytes:
        """Send the Login Request; what leaves."""
        slot = self.slots[-1]
        slot.bhs[:] = golden.LOGIN_REQUEST[:48]
        size = int.from_bytes(golden.LOGIN_REQUEST[5:8], "big")
        slot.inline[:size] = golden.LOGIN_REQUEST[48 : 48 + size]
        slot.inline_length, slot.direction = size, INLINE
        self.first.send_control(slot)
        self.first.flush()
        return self.heard()

    def heard(self) -> bytes:
        try:
            return self.peer.recv(65536)
        except BlockingIOError:
            return b""

    def enable(self, parameters: SessionParameters = ISER) -> None:
        self.first.notice_key_values(parameters)
        self.end = self.first.enable_datamover()

    def start(self) -> None:
        """Do what can be done of MPA start-up."""
        self.qp.progress(0.0)

    def close(self) -> None:
        self.first.connection_terminate()
        self.peer.close()


@pytest.fixture
def initiator() -> Iterator[Initiator]:
    made = Initiator()
    yield made
    made.close()


def login(initiator: Initiator) -> None:
    """The golden login, up to the final Login Response."""
    initiator.ask()
    initiator.peer.sendall(golden.LOGIN_RESPONSE)
    initiator.first.progress(0.0)


def test_every_byte(initiator: Initiator) -> None:
    """Login as a byte stream, without an iSER header; behind the final Login Response the
    initiator sends the MPA Request. Send_Control is iSER's from Enable_Datamover on, no earlier.

    proves: ISER-3.1.1-1, ISER-4.1-11, ISER-5.1.1-14, ISER-5.1.1-15, ISER-7.3.9-1
    proves: ISER-GEN-8.1.6.2-1, ISER-IB00-3.1.6.2-1
    """
    assert initiator.ask() == golden.LOGIN_REQUEST
    initiator.peer.sendall(golden.LOGIN_RESPONSE)
    initiator.first.progress(0.0)
    ((unit, text, _),) = initiator.up.pdus
    assert unit + text == golden.LOGIN_RESPONSE
    assert initiator.heard() == b""
    initiator.enable()
    assert initiator.end is initiator.iser
    assert initiator.heard() == golden.ENHANCED_REQUEST
    initiator.start()
    assert not initiator.qp.established and initiator.heard() == b""
    initiator.peer.sendall(golden.ENHANCED_REPLY)
    initiator.start()
    assert initiator.qp.established
    assert initiator.heard()[:-4] == golden.RTR[:-4]
    slot = initiator.slots[0]
    slot.bhs[:], slot.inline_length = golden.PING[48:-4], 0
    initiator.end.send_control(slot)
    initiator.end.flush()
    ping = initiator.heard()[:-4]
    # The RTR is no message of the queue that Sends use.
    assert ping == golden.PING[:-4]
    assert initiator.end.describe()["style"] == "stream"


def test_the_order_of_events(initiator: Initiator) -> None:
    """Connection resources, Enable_Datamover, the RCaP, and only then what iSER sends.

    proves: ISER-5.1.1-11
    """
    prepared = initiator.qp._receives
    assert prepared == len(initiator.slots) + 8  # before the first byte of the login
    assert initiator.slots[0].bhs is not None and initiator.heard() == b""
    login(initiator)
    calls = initiator.stream.calls
    assert [name for name, _ in calls] == ["send"]
    agreed = SessionParameters(rdma_extensions=True, iser_hello_required=True)
    initiator.enable(agreed)
    initiator.end.flush()
    assert initiator.heard() == golden.ENHANCED_REQUEST  # and no Hello yet
    assert calls[1:] == [("send", golden.ENHANCED_REQUEST)]
    initiator.peer.sendall(golden.ENHANCED_REPLY)
    initiator.start()
    assert calls[2:] == [("release", b"")]  # the RCaP has the socket
    first = initiator.heard()[len(golden.RTR) :]
    assert first[20] >> 4 == 2, "the first iSER message is a Hello"


@pytest.mark.parametrize("enhanced", [True, False])
def test_cut_anywhere(enhanced: bool) -> None:
    """However the final Login Response, the MPA Reply and what follows it were cut, nothing is
    lost and nothing read twice, even where a target sends all of it at once."""
    reply = golden.ENHANCED_REPLY if enhanced else golden.MPA_REPLY
    whole = golden.LOGIN_RESPONSE + reply + golden.UNASKED
    for cut in range(1, len(whole)):
        initiator = Initiator()
        try:
            initiator.ask()
            enabled = False
            for piece in (whole[:cut], whole[cut:]):
                initiator.peer.sendall(piece)
                if not enabled:
                    initiator.first.progress(0.0)
                if initiator.up.pdus and not enabled:
                    initiator.enable()
                    enabled = True
                if enabled:
                    initiator.end.progress(0.0)
            (login_response, *_), (nop_in, *_) = initiator.up.pdus
            assert login_response == golden.LOGIN_RESPONSE[:48] and nop_in == NOP_IN
        finally:
            initiator.close()


def test_byte_by_byte(initiator: Initiator) -> None:
    initiator.ask()
    for at in range(len(golden.LOGIN_RESPONSE)):
        assert not initiator.up.pdus
        initiator.peer.sendall(golden.LOGIN_RESPONSE[at : at + 1])
        initiator.first.progress(0.0)
    initiator.enable()
    for at in range(len(golden.ENHANCED_REPLY + golden.UNASKED)):
        assert len(initiator.up.pdus) == 1
        initiator.peer.sendall((golden.ENHANCED_REPLY + golden.UNASKED)[at : at + 1])
        initiator.end.progress(0.0)
    assert initiator.up.pdus[1][0] == NOP_IN


# shows: SYSTEM-32
def test_unexpected_pdus_at_once(initiator: Initiator) -> None:
    """A target that sends all that MaxOutstandingUnexpectedPDUs allows as soon as it may: the
    receives were posted before the login. proves: ISER-7145-5.1.3-4"""
    login(initiator)
    initiator.enable()
    initiator.peer.sendall(golden.ENHANCED_REPLY)
    for msn in range(1, 9):
        pdu = bytearray(golden.UNASKED)
        pdu[12:16] = msn.to_bytes(4, "big")
        initiator.peer.sendall(pdu)
    while len(initiator.up.pdus) < 9:
        initiator.end.progress(0.0)
    assert [unit for unit, _, _ in initiator.up.pdus[1:]] == [NOP_IN] * 8


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (golden.LOGIN_RESPONSE, RemoteProtocolError, "no MPA frame"),
        (golden.ENHANCED_REQUEST, RemoteProtocolError, "acts as an MPA initiator"),
        (b"MPA ID Rep Frame\x20\x01\0\0", RemoteProtocolError, "rejected"),
        (b"", ConnectionLost, "closed the connection during MPA start-up"),
    ],
)
def test_what_is_no_reply(
    initiator: Initiator, answer: bytes, error: type[Exception], words: str
) -> None:
    """The error stays, and no memory of a caller was shown to the peer."""
    login(initiator)
    initiator.enable()
    if answer:
        initiator.peer.sendall(answer)
    else:
        initiator.peer.shutdown(socket.SHUT_WR)
    for _ in range(2):
        with pytest.raises(error, match=words):
            initiator.start()
    with pytest.raises(ConnectionLost):
        initiator.qp.post([])


def test_no_command_before_the_rcap(initiator: Initiator) -> None:
    login(initiator)
    initiator.enable()
    slot = initiator.slots[0]
    slot.direction, slot.data = READ, memoryview(bytearray(512))
    with pytest.raises(LocalProtocolError, match="streaming mode"):
        initiator.end.send_control(slot)


def test_traditional_iscsi_goes_on(initiator: Initiator) -> None:
    """RDMAExtensions is not Yes: the same stream, from the byte behind the Login Response on."""
    initiator.ask()
    initiator.peer.sendall(golden.LOGIN_RESPONSE + NOP_IN)
    initiator.first.progress(0.0)
    initiator.enable(TRADITIONAL)
    assert isinstance(initiator.end, TcpInitiator) and initiator.heard() == b""
    initiator.end.progress(0.0)
    assert [unit for unit, _, _ in initiator.up.pdus[1:]] == [NOP_IN]
    slot = initiator.slots[0]
    slot.bhs[:], slot.inline_length = golden.PING[48:-4], 0
    initiator.end.send_control(slot)
    initiator.end.flush()
    assert initiator.heard() == golden.PING[48:-4]


def test_it_ends_in_every_state() -> None:
    for state in range(3):
        initiator = Initiator()
        if state:
            login(initiator)
        if state > 1:
            initiator.enable()
        initiator.first.disconnect()
        initiator.close()
        with pytest.raises(ConnectionLost):
            initiator.qp.post([])
