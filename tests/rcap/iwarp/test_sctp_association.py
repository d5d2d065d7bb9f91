"""An SCTP association as the LLP, over a stand-in for the kernel's SCTP."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable

import pytest

from iserblk.errors import ConnectionLost, NotSupported, RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import sctp, sctp_association
from iserblk.rcap.iwarp.sctp_association import Association
from tests.rcap.sctp import Ancillary, FakeSctp, fake_association
from tests.rcap.sctp_pair import fake_pair, over, when
from tests.rcap.wire import Driver, pattern, rdma_request, send_request

LOST = struct.pack("=HHIHHHHi", 0x8001, 0, 20, 1, 0, 0, 0, 1)
RESTARTED = struct.pack("=HHIHHHHi", 0x8001, 0, 20, 2, 0, 1, 1, 1)
SHUTDOWN = struct.pack("=HHIi", 0x8005, 0, 12, 1)


def peer_of_pair() -> tuple[Driver, FakeSctp]:
    """A driver whose first queue pair is at the other end of a socket."""
    first, second = fake_association()
    a, b = over(first, second)
    driver = Driver(a, b)
    a.post_receive(8)
    return driver, second


def raw(message: bytes) -> bytes:
    """A Send in one DDP segment, without DDP-SSN: DDP and RDMAP control, RFC 5041 and 5040."""
    return struct.pack(">BBIIII", 0x41, 0x43, 0, 0, 1, 0) + message


@pytest.mark.parametrize("indication", [None, 0, 2])
def test_a_peer_that_does_not_announce_ddp(indication: int | None) -> None:
    """RFC 5043 section 11.1: no DDP on such an association, at either end."""
    ours, theirs = (Association(end) for end in fake_association(indications=(1, indication)))
    with pytest.raises(RemoteProtocolError, match="Adaptation Indication"):
        when(ours, lambda: ours.is_adapted() or None)
    ours.close()
    theirs.close()
    first, second = fake_association(indications=(indication, 1))
    ours, theirs = Association(first), Association(second)
    ours.send_control(sctp.INITIATE)
    with pytest.raises(RemoteProtocolError, match="Adaptation Indication"):
        when(theirs, theirs.receive_control)
    ours.close()
    theirs.close()


def test_a_segment_before_the_session() -> None:
    first, second = fake_association()
    with first:
        first.inject(sctp.PPID_SEGMENT, b"\0\0" + raw(b"early"))
        theirs = Association(second)
        with pytest.raises(RemoteProtocolError, match="before the session"):
            when(theirs, theirs.receive_control)
        theirs.close()


@pytest.mark.parametrize("ppid", [sctp.PPID_SEGMENT, sctp.PPID_CONTROL])
def test_a_message_that_overtakes_the_initiate(ppid: int) -> None:
    """It is refused: from a peer that has not begun a session nothing is kept."""
    first, second = fake_association()
    with first:
        first.inject(ppid, b"\0\1" + raw(b"early"))
        theirs = Association(second)
        with pytest.raises(RemoteProtocolError, match="before the session"):
            when(theirs, theirs.receive_control)
        theirs.close()


@pytest.mark.parametrize(
    ("ppid", "message", "words"),
    [
        (0, b"\0\x01", "PPID 0"),
        (18, b"\0\x01", "PPID 18"),
        (16, b"\0", "of 1 bytes"),
        (16, b"\0\x01" + bytes(10), "shorter"),
        (17, b"\0\x01\0", "of 3 bytes"),
        (17, b"\0\x01\0\x01", "Function Code 1 in the middle"),
        (17, b"\0\x01\0\x04" + bytes(513), "513 bytes of private data"),
        (16, b"\0\0" + raw(b"again"), "second time"),
    ],
)
def test_violation(ppid: int, message: bytes, words: str) -> None:
    driver, second = peer_of_pair()
    second.inject(ppid, message)
    driver.run(lambda: driver.errors[0] is not None)
    assert isinstance(driver.errors[0], RemoteProtocolError)
    assert words in str(driver.errors[0])
    for pair in driver.pairs:
        pair.close()


@pytest.mark.parametrize(
    ("notice", "words"),
    [(LOST, "was lost"), (RESTARTED, "was lost"), (SHUTDOWN, "peer closed")],
)
def test_the_end_comes_behind_what_came_before(notice: bytes, words: str) -> None:
    driver, second = peer_of_pair()
    second.inject(sctp.PPID_SEGMENT, b"\0\x01" + raw(b"last words"))
    second.notify_peer(notice)
    driver.run(lambda: driver.errors[0] is not None)
    assert isinstance(driver.errors[0], ConnectionLost)
    assert words in str(driver.errors[0])
    assert [event.data for event in driver.events[0]] == [b"last words"]
    for pair in driver.pairs:
        pair.close()


def test_what_has_overtaken_another_goes_with_the_association() -> None:
    """Its share of what all associations may keep is free again."""
    before = sctp.EARLY.bytes
    driver, second = peer_of_pair()
    second.inject(sctp.PPID_SEGMENT, b"\0\x02" + raw(b"early"))
    driver.run(lambda: sctp.EARLY.bytes > before)
    for pair in driver.pairs:
        pair.close()
    assert sctp.EARLY.bytes == before


@pytest.mark.parametrize("disconnects", [False, True])
def test_the_session_ends_with_a_terminate(
    monkeypatch: pytest.MonkeyPatch, disconnects: bool
) -> None:
    """RFC 5043 section 6.2: at least one side sends it; then the association may stay or go."""
    sent: list[tuple[int, bytes]] = []
    kept: Callable[..., int] = FakeSctp.sendmsg

    def watch(self: FakeSctp, buffers: list[bytes], info: Ancillary, flags: int = 0) -> int:
        size = kept(self, buffers, info, flags)
        ppid = struct.unpack_from("=HHI", info[0][2])[2]
        sent.append((socket.ntohl(ppid), b"".join(buffers)))
        return size

    monkeypatch.setattr(FakeSctp, "sendmsg", watch)
    a, b = fake_pair()
    a.post([send_request(a, b"one")])
    if disconnects:
        a.disconnect()
    a.close()
    assert [ppid for ppid, _ in sent] == [17, 17, 16, 17]
    assert [struct.unpack_from(">H", message)[0] for _, message in sent] == [0, 0, 1, 2]
    assert sent[-1][1] == b"\0\x02\0\x04"
    b.post_receive(1)
    driver = Driver(a, b)
    driver.run(lambda: driver.errors[1] is not None)
    assert isinstance(driver.errors[1], ConnectionLost)
    assert [event.data for event in driver.events[1]] == [b"one"]
    b.close()


@pytest.mark.parametrize("size", [0, 1, 1383, 1384, 1400, 100_001, 1 << 20])
def test_no_message_is_larger_than_a_packet(size: int) -> None:
    """The stand-in refuses larger messages."""
    a, b = fake_pair(fragmentation_point=1452)
    driver = Driver(a, b)
    b.post_receive(1)
    sink = bytearray(size)
    stag, base = b.advertise(memoryview(sink), seam.REMOTE_WRITE)
    a.post([rdma_request(seam.RDMA_WRITE, pattern(size), stag, base), send_request(a, b"end")])
    driver.run(lambda: bool(driver.events[1]))
    assert sink == pattern(size)
    assert a.describe()["mulpdu"] == 1418
    assert a.describe()["provider"] == "iwarp-sctp"
    a.close()
    b.close()


def test_messages_follow_the_path() -> None:
    first, second = fake_association(fragmentation_point=1452)
    a, b = over(first, second)
    driver = Driver(a, b)
    b.post_receive(2)
    sink = bytearray(1 << 20)
    stag, base = b.advertise(memoryview(sink), seam.REMOTE_WRITE)
    for round_ in range(2):
        data = pattern(len(sink), round_)
        a.post([rdma_request(seam.RDMA_WRITE, data, stag, base), send_request(a, b"end")])
        driver.run(lambda n=round_: len(driver.events[1]) > n)  # type: ignore[misc]
        assert sink == data
        first.fragmentation_point = 9000
    assert a.describe()["mulpdu"] == 8966
    a.close()
    b.close()


@pytest.mark.parametrize("number", [errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT])
def test_a_kernel_without_sctp(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "not supported")

    monkeypatch.setattr("socket.socket", refuse)
    with pytest.raises(NotSupported, match="modprobe sctp"):
        sctp_association.open_socket(socket.AF_INET)
    assert sctp_association.available() == sctp_association.NO_SCTP
