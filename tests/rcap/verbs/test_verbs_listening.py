"""Taking connections by rdma_cm, on a device without a kernel: requests, refusals, and patience."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from iserblk.errors import BadArgument, Busy, ConnectFailed, NotSupported
from iserblk.rcap.verbs import api, listening, statuses
from iserblk.rcap.verbs.listening import MOST_EVENTS, PENDING_S, VerbsListener
from tests.rcap.verbs.fake import FakeChannel, FakeEvent

REFUSED = "connection refused: "
NOT_ESTABLISHED = "connection not established: "


class Channel(FakeChannel):
    """``made``: all of them, the listener's first."""

    made: list[Channel]

    def __init__(self) -> None:
        super().__init__()
        self.raw = self
        Channel.made.append(self)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Request(FakeEvent):
    """An initiator asks for a connection, with ``private_data``."""

    def __init__(self, private_data: bytes = b"hello") -> None:
        super().__init__(statuses.CONNECT_REQUEST, private_data=private_data)
        self.raw = self
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Identifier:
    """Stands in for pyverbs' CMID. ``error``: what ``listen`` raises."""

    error: Exception | None = None

    def __init__(self, creator: object = None, listen_id: object = None) -> None:
        self.creator = creator
        self.accepted: object = None
        self.rejected = self.closed = False
        self.listening = False

    def listen(self, backlog: int) -> None:
        if Identifier.error is not None:
            raise Identifier.error
        self.listening = True

    def accept(self, parameters: object) -> None:
        self.accepted = parameters

    def reject(self) -> None:
        self.rejected = True

    def close(self) -> None:
        self.closed = True


class Link:
    """Stands in for the link of one accepted connection."""

    device = SimpleNamespace(max_reads_in=16, max_reads_out=8, iwarp=False)
    error: Exception | None = None

    def __init__(
        self, identifier: Identifier, channel: Channel, context: object, domain: object, mode: str
    ) -> None:
        if Link.error is not None:
            raise Link.error
        self.identifier, self.channel = identifier, channel

    def ready(self, ird: int, ord: int) -> tuple[int, int]:
        return ird, ord - 1

    def parameters(self, ird: int, ord: int, private_data: bytes) -> object:
        return ird, ord, private_data


class QueuePair:
    def __init__(self, link: Link, *, receive_size: int, receives: int, budget: int) -> None:
        self.link = link
        self.receives = (receives, receive_size)
        self.established: tuple[object, ...] | None = None
        self.closed = False

    def connected(self, ird: int, ord: int, private_data: bytes, peer: str) -> None:
        self.established = (ird, ord, private_data)

    def close(self) -> None:
        self.closed = True
        self.link.channel.close()


class PyverbsError(Exception):
    pass


class Gaps:
    """Stands in for the compiled module. ``bound``: the socket address; ``device``: it has one."""

    bound = b""
    device = True

    def bind(self, identifier: Identifier, address: bytes) -> bool:
        self.bound = address
        return self.device

    def source_port(self, identifier: Identifier) -> int:
        return 3260

    def migrate(self, identifier: Identifier, channel: Channel) -> None:
        identifier.creator = channel


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> Gaps:
    made = Gaps()
    modules = {
        "cmid": SimpleNamespace(CMID=Identifier),
        "pyverbs_error": SimpleNamespace(PyverbsError=PyverbsError),
        "device": SimpleNamespace(Context=lambda cmid: "context"),
        "pd": SimpleNamespace(PD=lambda identifier: "domain"),
    }
    monkeypatch.setattr(listening, "available", lambda: None)
    monkeypatch.setattr(api, "pyverbs", modules.__getitem__)
    monkeypatch.setattr(api, "gaps", lambda: made)
    for name, value in (("Channel", Channel), ("Link", Link), ("VerbsQueuePair", QueuePair)):
        monkeypatch.setattr(listening, name, value)
    for of in (Identifier, Link):
        monkeypatch.setattr(of, "error", None)
    Channel.made = []
    return made


def accepting(private_data: bytes) -> bytes:
    return private_data[::-1]


def listen(
    host: str = "0.0.0.0", ird: int = 64, reply: Callable[[bytes], bytes] = accepting
) -> VerbsListener:
    return VerbsListener(host, 3260, receive_size=8268, receives=4, ird=ird, reply=reply)


def readable(listener: VerbsListener) -> bool:
    return bool(select.select([listener], [], [], 0)[0])


def ask(request: Request) -> None:
    """The request arrives at the listener's channel."""
    Channel.made[0].events.append(request)
    os.eventfd_write(Channel.made[0].fd, 1)


def connect(listener: VerbsListener, now: float = 0.0) -> QueuePair:
    """A connection from its request to its establishment."""
    ask(Request())
    assert readable(listener) and not listener.progress(now)
    Channel.made[-1].put(statuses.ESTABLISHED)
    assert readable(listener)
    (qp,) = listener.progress(now)
    assert isinstance(qp, QueuePair)
    return qp


def all_closed() -> bool:
    return all(channel.fd < 0 for channel in Channel.made)


def test_a_connection_is_handed_out_when_it_is_established(gaps: Gaps) -> None:
    """With the data of both sides, and the RDMA Read depths that the device has."""
    listener = listen()
    request = Request(b"hello")
    ask(request)
    assert listener.progress(0.0) == []
    assert request.closed
    assert listener.progress(1.0) == []
    Channel.made[1].put(statuses.ESTABLISHED)
    ((qp),) = listener.progress(2.0)
    assert isinstance(qp, QueuePair)
    assert qp.link.identifier.accepted == (8, 7, b"olleh")
    assert qp.established == (8, 7, b"hello")
    assert qp.receives == (4, 8268)
    assert qp.link.identifier.creator is Channel.made[1]
    listener.close()
    assert not qp.closed, "it goes on without the listener"
    qp.close()
    assert all_closed()


@pytest.mark.parametrize(("ird", "iwarp", "depths"), [(64, True, (8, 8)), (2, False, (2, 1))])
def test_depths(
    gaps: Gaps,
    monkeypatch: pytest.MonkeyPatch,
    ird: int,
    iwarp: bool,
    depths: tuple[int, int],
) -> None:
    """iWARP has no state to prepare before accepting; no depth is above what was asked for, or what
    the device has. proves: ISER-RC-14"""
    monkeypatch.setattr(
        Link, "device", SimpleNamespace(max_reads_in=16, max_reads_out=8, iwarp=iwarp)
    )
    listener = listen(ird=ird)
    qp = connect(listener)
    assert qp.established is not None and qp.established[:2] == depths
    qp.close()
    listener.close()


def refuse(_private_data: bytes) -> bytes:
    raise NotSupported("no iSER")


@pytest.mark.logs(REFUSED)
@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), PyverbsError("broken")])
def test_a_device_that_fails_refuses_one_connection_alone(gaps: Gaps, error: Exception) -> None:
    listener = listen()
    Link.error = error
    ask(Request())
    assert listener.progress(0.0) == []
    failed = Channel.made[-1]
    assert isinstance(failed, Channel) and failed.fd < 0
    Link.error = None
    connect(listener).close()
    listener.close()
    assert all_closed()


@pytest.mark.logs(REFUSED)
def test_a_reply_may_refuse(gaps: Gaps, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Identifier] = []
    creating = Identifier.__init__

    def note(self: Identifier, creator: object = None, listen_id: object = None) -> None:
        creating(self, creator, listen_id)
        made.append(self)

    Identifier.__init__ = note  # type: ignore[method-assign]
    try:
        listener = listen(reply=refuse)
        ask(Request())
        assert listener.progress(0.0) == []
    finally:
        Identifier.__init__ = creating  # type: ignore[method-assign]
    (refused,) = [each for each in made if each.rejected]
    assert refused.closed and "no iSER" in caplog.text
    assert len(Channel.made) == 1
    listener.close()


@pytest.mark.logs(NOT_ESTABLISHED)
def test_a_peer_that_does_not_finish_is_given_up(gaps: Gaps) -> None:
    listener = listen()
    ask(Request())
    listener.progress(5.0)
    assert listener.progress(5.0 + PENDING_S - 0.01) == []
    assert Channel.made[1].fd >= 0
    assert listener.progress(5.0 + PENDING_S) == []
    assert Channel.made[1].fd < 0
    assert not readable(listener)
    listener.close()


@pytest.mark.logs(NOT_ESTABLISHED)
def test_a_connection_that_fails_meanwhile_is_dropped(gaps: Gaps) -> None:
    listener = listen()
    ask(Request())
    listener.progress(0.0)
    Channel.made[1].put(statuses.REJECTED)
    assert listener.progress(0.0) == []
    assert Channel.made[1].fd < 0
    connect(listener).close()
    listener.close()


@pytest.mark.logs(REFUSED, NOT_ESTABLISHED)
def test_pending_connections_are_bounded(gaps: Gaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_PENDING", 2)
    listener = listen()
    for _ in range(3):
        ask(Request())
    listener.progress(0.0)
    assert len(Channel.made) == 3, "the third has got no channel"
    listener.close()
    assert all_closed()


def test_a_device_that_goes_away_ends_listening(gaps: Gaps) -> None:
    listener = listen()
    Channel.made[0].put(statuses.DEVICE_REMOVAL)
    with pytest.raises(ConnectFailed, match="no longer listening"):
        listener.progress(0.0)
    listener.close()


def test_other_events_of_the_listener_are_passed_over(gaps: Gaps) -> None:
    listener = listen()
    Channel.made[0].put(statuses.TIMEWAIT_EXIT)
    connect(listener).close()
    listener.close()


def test_events_without_end_are_for_several_turns(gaps: Gaps) -> None:
    listener = listen()
    events = Channel.made[0].events
    for _ in range(2 * MOST_EVENTS + 1):
        Channel.made[0].put(statuses.TIMEWAIT_EXIT)
    for left in (MOST_EVENTS + 1, 1, 0):
        listener.progress(0.0)
        assert len(events) == left
    listener.close()


def test_a_closed_listener(gaps: Gaps) -> None:
    listener = listen()
    listener.close()
    listener.close()
    assert listener.fileno() == -1 and all_closed()
    with pytest.raises(ConnectFailed):
        listener.progress(0.0)


def test_addresses_are_those_of_the_system(gaps: Gaps) -> None:
    """struct sockaddr_in and sockaddr_in6, with the port in network order."""
    listen("192.0.2.1").close()
    assert gaps.bound == bytes.fromhex("0200 0cbc c0000201") + bytes(8)
    listen("2001:db8::1").close()
    assert gaps.bound == (
        bytes.fromhex("0a00 0cbc 00000000 20010db8000000000000000000000001 00000000")
    )


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EADDRINUSE, Busy, "in use"),
        (errno.EADDRNOTAVAIL, BadArgument, "no RDMA device"),
        (errno.EINVAL, BadArgument, "cannot listen on"),
    ],
)
def test_an_address_that_cannot_be_listened_on(
    gaps: Gaps, number: int, kind: type[Exception], words: str
) -> None:
    Identifier.error = OSError(number, os.strerror(number))
    with pytest.raises(kind, match=words) as raised:
        listen("192.0.2.1")
    assert "192.0.2.1:3260" in str(raised.value)
    assert all_closed()


@pytest.mark.parametrize(("host", "taken"), [("192.0.2.1", False), ("0.0.0.0", True)])
def test_an_address_without_a_device(gaps: Gaps, host: str, taken: bool) -> None:
    """Only the wildcard address may be bound before there is a device."""
    gaps.device = False
    if taken:
        listen(host).close()
        return
    with pytest.raises(BadArgument, match="no RDMA device"):
        listen(host)
    assert all_closed()


def test_where_rdma_is_not_to_be_had(gaps: Gaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "available", lambda: "no RDMA device")
    with pytest.raises(NotSupported, match="no RDMA device"):
        listen()
    monkeypatch.setattr(listening, "available", lambda: None)
    nothing: Any = lambda: None  # noqa: E731
    monkeypatch.setattr(api, "gaps", nothing)
    with pytest.raises(NotSupported, match="compiled module"):
        listen()
    assert not Channel.made
