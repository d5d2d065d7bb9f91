"""A queue pair on a connection that is still a byte stream."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator

import pytest

from iserblk.errors import ConnectionLost, LocalProtocolError, RemoteProtocolError
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, queuepair
from iserblk.rcap.iwarp.mpa import MpaInitiator
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.sockets.stream import SocketStream

RECEIVE_SIZE = 4096
Made = Callable[..., tuple[StreamingQueuePair, StreamingQueuePair]]


@pytest.fixture
def pair() -> Iterator[Made]:
    made: list[StreamingQueuePair] = []

    def make(crc: bool = True) -> tuple[StreamingQueuePair, StreamingQueuePair]:
        ends = [SocketStream(sock) for sock in socket.socketpair()]
        for stream in ends:
            made.append(
                StreamingQueuePair(
                    stream,
                    initiator=stream is ends[0],
                    crc=crc and stream is ends[0],
                    receive_size=RECEIVE_SIZE,
                    ird=8,
                )
            )
        return made[-2], made[-1]

    yield make
    for each in made:
        each.close()


def started(ends: tuple[StreamingQueuePair, StreamingQueuePair]) -> list[seam.Completion]:
    """Complete MPA start-up; what has come meanwhile."""
    heard: list[seam.Completion] = []
    for end in ends:
        end.start(b"", b"")
    turns = 0
    while not all(end.established for end in ends):
        turns += 1
        assert turns < 10
        for end in ends:
            heard += end.progress(0.0)
    return heard


@pytest.mark.parametrize("crc", [True, False])
def test_what_was_prepared_belongs_to_the_queue_pair(pair: Made, crc: bool) -> None:
    """Slots, receives, requests and the peer's MaxULPDULength."""
    ends = pair(crc)
    taken: list[seam.QueuePair] = []
    for end in ends:
        end.on_started = taken.append
        end.post_receive(3)
        end.post_receive(1)
        end.allow_ulpdu(ddp.MAX_ULPDU)
    (slot,) = ends[0].alloc_headers(1, 100)
    slot.view[:5] = b"hello"
    request = seam.WorkRequest(seam.SEND, "token")
    request.header, request.header_length, request.signaled = slot, 5, True
    ends[0].post([request])
    heard = started(ends)
    assert [type(each) for each in taken] == [IwarpQueuePair] * 2
    initiator, target = sorted(taken, key=lambda each: each is not ends[0]._pair)
    while len(heard) < 2:
        # What came with the end of the start-up is in no socket any more.
        heard += target.progress(0.0) + initiator.progress(0.0)
        select.select([target.fileno()], [], [], 0.01)
    came, left = sorted(heard, key=lambda each: each.token is not None)
    assert came.data is not None and bytes(came.data) == b"hello"
    assert left.token == "token"
    assert initiator.describe()["mpa_crc"] == crc
    if crc:
        assert (
            initiator.describe()["mulpdu"] == ddp.MAX_ULPDU - 1
        )  # a multiple of 4, with its length
    for end, real in zip(ends, (initiator, target), strict=True):
        assert (end.ird, end.ord, end.fileno()) == (real.ird, real.ord, real.fileno())
        assert end.describe() == real.describe() and end.progress(0.0) == []


def test_before_the_start_the_stream_is_not_touched(pair: Made) -> None:
    left, right = pair()
    assert left.progress(0.0) == [] == right.progress(0.0)
    assert not select.select([left.fileno(), right.fileno()], [], [], 0)[0]
    assert not left.wants_write() and left.next_deadline() is None
    assert left.describe()["provider"] == "iwarp"


def test_what_needs_a_peer(pair: Made) -> None:
    left, _ = pair()
    for call in (
        lambda: left.advertise(memoryview(bytearray(8)), seam.REMOTE_READ),
        lambda: left.retire(0x100),
        lambda: left.limit_reads(0, 0),
    ):
        with pytest.raises(LocalProtocolError, match="streaming mode"):
            call()


@pytest.mark.parametrize("cut", [0, 1, 19, 20, 23])
def test_bytes_that_came_with_the_stream(pair: Made, cut: int) -> None:
    """And more from the socket behind them: ``next_deadline`` says that they wait."""
    left, right = pair()
    left.start(b"", b"")
    request = MpaInitiator(crc=True, ird=8).data_to_send()
    assert left._stream.fileno() == left.fileno()
    waste = bytearray(len(request))
    assert right._stream.receive([memoryview(waste)]) == len(request) and waste == request
    left._stream.send([request[cut:]], len(request) - cut)
    right.start(request[:cut], b"")
    assert right.next_deadline() == (0.0 if cut else None)
    right.progress(0.0)
    assert right.established


def test_bytes_that_are_still_to_be_sent(pair: Made) -> None:
    left, right = pair()
    right.start(b"", b"the end of the login")
    heard = bytearray(100)
    assert left._stream.receive([memoryview(heard)]) == 20
    assert heard[:20] == b"the end of the login"


def test_the_peer_goes_away(pair: Made) -> None:
    left, right = pair()
    left.start(b"", b"")
    right.close()
    with pytest.raises(ConnectionLost):
        for _ in range(3):
            left.progress(0.0)
    assert left.next_deadline() is None or left.next_deadline() == 0.0
    with pytest.raises(ConnectionLost):
        left.progress(0.0)


def test_a_bad_request(pair: Made) -> None:
    _, right = pair()
    right.start(b"MPA ID Rep Frame", b"")
    with pytest.raises(RemoteProtocolError, match="acts as an MPA responder"):
        right.progress(0.0)
    with pytest.raises(ConnectionLost, match="has ended"):
        right.post([seam.WorkRequest()])


def test_disconnect_and_close_in_every_state(pair: Made) -> None:
    for state in range(3):
        ends = pair()
        if state == 1:
            ends[0].start(b"", b"")
        if state == 2:
            started(ends)
        ends[0].disconnect()
        if state:
            with pytest.raises(ConnectionLost):
                for _ in range(3):
                    ends[0].progress(0.0)
        ends[0].close()
        ends[0].close()
        with pytest.raises(ConnectionLost):
            ends[0].post([])


@pytest.mark.plain("derives from a compiled class")
def test_a_connection_that_breaks_at_the_last_moment(
    pair: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket is closed, whose it is at that moment."""
    made: list[socket.socket] = []

    class Broken(queuepair.IwarpQueuePair):
        def __init__(self, sock: socket.socket, *_arguments: object, **_options: object) -> None:
            made.append(sock)
            raise OSError(104, "Connection reset by peer")

    left, right = pair()
    left.start(b"", b"")
    right.start(b"", b"")
    monkeypatch.setattr("iserblk.rcap.iwarp.streaming.IwarpQueuePair", Broken)
    with pytest.raises(ConnectionLost, match="Connection reset by peer"):
        right.progress(0.0)
    assert [sock.fileno() for sock in made] == [-1]
