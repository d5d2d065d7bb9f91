"""How connections of the target's server end: what is freed, in which order, and what the peer
sees. The initiator is ours, over a pair of queue pairs in this process."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic

import pytest
import trio
import trio.testing

from iserblk.commands.running import fill_write
from iserblk.datamover.iser import HEADER_LENGTH
from iserblk.errors import RemoteProtocolError, TargetNotFound, TransportError
from iserblk.initiator.connecting.login import Login, over_rdma
from iserblk.initiator.session.session import Session
from iserblk.iscsi import bhs, pdu
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.inprocess import MemoryQueuePair, Message, memory_pair
from iserblk.scsi import luns
from iserblk.scsi.tasks import NO_DATA
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import Nexus
from iserblk.target.server import TargetServer
from iserblk.url import parse_url
from tests.initiator.fake import CountingWaiter
from tests.iscsi import logins
from tests.support.descriptors import descriptors, descriptors_to_begin_with
from tests.support.until import until
from tests.target.fake_store import FakeStore
from tests.target.iser_client import rw10
from tests.vectors import streaming_login as golden

IQN = "iqn.2026-11.example:disk"
LUN = luns.encode(0)
DATA = bytes(i & 255 for i in range(65536))
HEAD = b"\x10" + bytes(HEADER_LENGTH - 1)
NOT_VALID = 0x7777  # an STag
PATIENCE_S = 20.0  # only a test that fails ever waits that long


class Watched:
    """The device server; ``on_detach`` is called when it hears that a session has ended."""

    def __init__(self, device: DeviceServer, on_detach: Callable[[], None]) -> None:
        self._device = device
        self._on_detach = on_detach

    def __getattr__(self, name: str) -> object:
        return getattr(self._device, name)

    def detach(self, nexus: Nexus) -> None:
        self._on_detach()
        self._device.detach(nexus)


@dataclass
class Held:
    """What a connection still had when the layer above heard of its end."""

    closed: bool
    buffers: int


@dataclass
class Bench:
    """A server, and a connection to it. ``sent``: kinds of the target's messages. ``ended``: one
    element for each session of which the SCSI layer has heard the end."""

    server: TargetServer
    ours: MemoryQueuePair
    theirs: MemoryQueuePair
    sent: list[int] = field(default_factory=list)
    ended: list[Held] = field(default_factory=list)

    @property
    def held(self) -> Held:
        return Held(self.theirs.fileno() == -1, self.server.parts.budget.used)

    def send(self, message: bytes, opcode: int = seam.SEND_SE, stag: int = 0) -> None:
        request = seam.WorkRequest(opcode)
        request.data, request.stag = memoryview(message), stag
        self.ours.post([request])

    async def log_in(self, iqn: str = IQN) -> Session:
        """A session, and its unit attention has been taken."""
        url = parse_url(f"iser://10.0.0.1/{iqn}/0")
        session = await Login(
            over_rdma(self.ours), url, Options(queue_depth=4), "portal:3260"
        ).run()
        waiter = CountingWaiter()
        slot = session.queue.take_now()
        assert slot is not None
        slot.cdb[:] = bytes(16)
        slot.length, slot.direction, slot.waiter = 0, NO_DATA, waiter
        waiter.pending = 1
        session.queue.submit(slot)
        while waiter.pending:
            await trio.lowlevel.wait_readable(session.fileno())
            session.progress(monotonic())
        session.queue.release(slot)
        return session

    def write(self, session: Session) -> None:
        """A WRITE whose data does not come, as long as nothing drives the session."""
        slot = session.queue.take_now()
        assert slot is not None
        slot.cdb[:] = rw10(0x2A, len(DATA)).ljust(16, b"\0")
        slot.waiter = CountingWaiter()
        slot.waiter.pending = 1
        fill_write(slot, LUN, memoryview(DATA))
        session.queue.submit(slot)


@asynccontextmanager
async def serving(ord: int = 64) -> AsyncIterator[Bench]:
    """Leaves when the server has served the connection to its end."""
    unit = LogicalUnit(FakeStore(1 << 20), serial="S", block=512)
    server = TargetServer(IQN, {0: unit})
    ours, theirs = memory_pair(ord=ord)
    bench = Bench(server, ours, theirs)
    watched = Watched(server.device, lambda: bench.ended.append(bench.held))
    server.device = watched  # type: ignore[assignment]

    def left(message: Message) -> bool:
        bench.sent.append(message.kind)
        return True

    theirs.intercept = left
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_queue_pair, theirs, "10.0.0.1:3260", "peer")
            yield bench
    ours.close()
    assert bench.held == Held(True, 0)
    assert not server._tsihs


async def lost(pair: MemoryQueuePair) -> None:
    """Wait until ``pair`` finds that the connection has ended, if it is not closed."""
    with suppress(TransportError):
        while pair.fileno() >= 0:
            await trio.lowlevel.wait_readable(pair.fileno())
            pair.progress(0.0)


# -- in full feature phase -------------------------------------------------------------------------


async def _peer_closes(bench: Bench) -> None:
    bench.ours.close()


async def _peer_breaks_rdma(bench: Bench) -> None:
    bench.send(b"x", seam.RDMA_WRITE, NOT_VALID)  # the target finds it, and sends a Terminate


async def _peer_terminates(bench: Bench) -> None:
    bench.ours.posted = bench.ours.consumed  # so the response finds no receive
    unit = bhs.SCSI_COMMAND_FIELDS.pack(
        bhs.SCSI_COMMAND | bhs.IMMEDIATE, 0x81, 0, bytes(8), 99, 0, 0, 0, bytes(16)
    )
    bench.send(HEAD + unit)
    with pytest.raises(RemoteProtocolError):
        while True:
            await trio.lowlevel.wait_readable(bench.ours.fileno())
            bench.ours.progress(0.0)


async def _peer_breaks_iser(bench: Bench) -> None:
    bench.send(b"\x40" + bytes(75))


# shows: SYSTEM-43
@pytest.mark.parametrize(
    "end", [_peer_closes, _peer_breaks_rdma, _peer_terminates, _peer_breaks_iser]
)
async def test_all_is_freed_before_the_end_is_told(
    end: Callable[[Bench], object],
) -> None:
    """A write is being fetched when the connection ends: by the peer, by an error that either end's
    RCaP finds, or by a format error of iSER. The SCSI layer hears of it, once, when the connection
    is closed and has no buffer any more.

    proves: ISER-3.2.4-1, ISER-5.2.3.1-2, ISER-5.2.3.2-2, ISER-10.1.1.2-2, ISER-10.1.2.1-3
    proves: ISER-10.1.2.2-2, ISER-10.1.3.3-2, ISER-10.1.3.3-5, ISER-10.1.3.3-6
    """
    async with serving() as bench:
        session = await bench.log_in()
        bench.write(session)
        await until(lambda: seam.RDMA_READ in bench.sent)
        assert bench.held.buffers and not bench.ended
        await end(bench)  # type: ignore[misc]
        await lost(bench.ours)
    assert bench.ended == [Held(True, 0)]


async def test_no_reads_where_the_initiator_takes_none() -> None:
    """ORD 0, and a WRITE that needs an RDMA Read: the target ends the connection, gives back what
    it had, and then tells the layer above.

    proves: ISER-7.3.6-5, ISER-7.3.6-6
    """
    async with serving(ord=0) as bench:
        session = await bench.log_in()
        bench.write(session)
        await lost(bench.ours)
    assert bench.ended == [Held(True, 0)]
    assert seam.RDMA_READ not in bench.sent


# -- in the login phase ----------------------------------------------------------------------------


async def test_a_connection_that_is_lost_in_the_login_phase() -> None:
    """After the security stage the peer is gone: nothing that the connection had been given is
    left, and no session was ever announced.

    proves: ISER-10.1.1.1-2
    """
    async with serving() as bench:
        pairs = [("InitiatorName", "iqn.x:y"), ("TargetName", IQN), ("AuthMethod", "None")]
        header, data = logins.request(pairs, stage=0, following=1)
        bench.ours.post_receive(4)
        bench.send(HEAD + header + data)
        await until(lambda: bench.sent)
        assert not bench.held.closed and bench.theirs.posted and bench.server._tsihs
        bench.ours.close()
    assert not bench.ended


@pytest.mark.parametrize("behind", ["the security stage", "the login", "the MPA Request"])
async def test_a_byte_stream_that_is_lost_before_its_rcap_is_there(
    behind: str,
) -> None:
    """style=stream: the peer goes away in the login, behind the final Login Response, or in the
    middle of MPA start-up. Nothing is left of the connection.

    proves: ISER-10.1.1.1-2
    """
    unit = LogicalUnit(FakeStore(1 << 20), serial="S", block=512)
    server = TargetServer(IQN, {0: unit})
    before = descriptors_to_begin_with()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        accepted = trio.socket.from_stdlib_socket(listener.accept()[0])
    with peer, trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.serve_tcp, accepted)
            if behind == "the security stage":
                pairs = [("InitiatorName", "iqn.x:y"), ("TargetName", IQN), ("AuthMethod", "None")]
                header, data = logins.request(pairs, stage=0, following=1)
                peer.sendall(header + data + bytes(-len(data) & 3))
            else:
                peer.sendall(golden.LOGIN_REQUEST)
            await trio.lowlevel.wait_readable(peer)
            answer = peer.recv(4096)
            assert pdu.LoginResponse.unpack_from(answer).status == 0
            assert server._tsihs and server._connections
            if behind == "the MPA Request":
                peer.sendall(golden.MPA_REQUEST[:10])
                await trio.testing.wait_all_tasks_blocked()
            peer.close()
    assert not server._tsihs and not server._connections and server.parts.budget.used == 0
    assert descriptors() == before


async def test_a_login_that_fails_ends_the_connection() -> None:
    """The target refuses a login to a target that it is not: it closes the connection, and has
    nothing left of it.

    proves: ISER-10.1.4.6-3, ISER-10.1.4.6-4
    """
    async with serving() as bench:
        with pytest.raises(TargetNotFound):
            await bench.log_in("iqn.2026-11.example:another")
        await lost(bench.ours)  # the target closes it by itself
        assert bench.sent[0] == seam.SEND_SE
    assert not bench.ended


async def test_negotiation_that_fails_ends_the_connection() -> None:
    """iSER without RDMAExtensions=Yes cannot be had here. proves: ISER-10.1.4.6-3"""
    async with serving() as bench:
        header, data = logins.request(
            [("InitiatorName", "iqn.x:y"), ("TargetName", IQN), ("RDMAExtensions", "No")]
        )
        bench.ours.post_receive(4)
        bench.send(HEAD + header + data)
        await lost(bench.ours)
    assert not bench.ended
