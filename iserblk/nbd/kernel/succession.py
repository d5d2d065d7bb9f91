"""The server of a device gives the kernel's connections to its successor: two processes, and a
channel between them (module ``channel``; module ``handover`` has the messages).

Until TAKEN has been sent, the connections are the old server's, whatever happens to the successor;
from then on they are the successor's. A packet that ``send`` has taken is in the receiver's queue,
also if the sender dies. An old server that will not wait any longer first shuts its end down for
receiving: TAKEN is then either in the queue, or ``send`` fails, and cannot come later.

Until it has logged out, the old server may hear of a loss of writes, which the kernel has to be
told by its successor then. So it sends what it counts behind LOSSES at once (``Giver.tell``), and
the successor looks before it serves, and listens until the old server has ended.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from iserblk.disk.seam import LossCount
from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.loop.tasks import sleep, until_readable
from iserblk.nbd.client import PausedConnection
from iserblk.nbd.kernel.channel import Channel, PacketSocket, check_peer, connected
from iserblk.nbd.kernel.handover import (
    TABLE,
    VERSION,
    WITHOUT_LOSSES,
    Event,
    Given,
    Kind,
    OlderServer,
    Refused,
    State,
    Takeover,
    encode,
    encode_all,
    encode_connection,
    encode_losses,
    encode_refused,
    expect_untrusted,
    hello_untrusted,
    more_losses_untrusted,
)
from iserblk.nbd.kernel.orders import NoHandOver
from iserblk.nbd.server import NbdServer
from iserblk.state_tables import step

log = logging.getLogger(__name__)

HELLO_S = 5.0  # that a successor has for saying what it wants
DRAIN_S = 10.0  # for the requests that have begun, and a flush
TAKEN_S = 10.0  # that a successor has for taking the connections
OFFER_S = DRAIN_S + 5.0  # that the old server has for offering them
_BACKLOG = 4
_UNTOLD = (
    "the kernel was not told yet that writes were lost, and the new server is too old to tell it: "
    "flush the device (blockdev --flushbufs), which tells, and try again"
)
_ACCEPT_PAUSE_S = 0.1


class Giver:
    """The old server's side. ``losses``: those of its LUN."""

    def __init__(self, losses: Callable[[], LossCount] = LossCount) -> None:
        self.state = State.SERVING
        self._losses = losses
        self._version = VERSION  # of the successor
        self._held: Channel | None = None
        self._told: int | None = None  # losses that were sent; None: nothing is offered

    async def offer(
        self, listening: socket.socket, server: NbdServer, flush: Callable[[], Awaitable[None]]
    ) -> None:
        """Give the connections of ``server`` to a successor that connects to ``listening``; return
        when they are given. Cancelled, it leaves them here, or there, and not in between."""
        listening.setblocking(False)
        while self.state is not State.GIVEN:
            await until_readable(listening)
            try:
                sock, _ = listening.accept()
            except OSError as error:  # the process has no descriptor left, for example
                log.info("no successor: %s", error.strerror)
                sock = None
            if sock is None:
                await sleep(_ACCEPT_PAUSE_S)
                continue
            try:
                check_peer(sock)
            except (RemoteProtocolError, OSError) as error:
                log.warning("the connections stay here: %s", error)
                sock.close()
            else:
                await self.attend(PacketSocket(sock), server, flush)

    def tell(self) -> bool:
        """Tell the successor of the losses that were counted behind LOSSES. False: it does not know
        all of them."""
        losses = self._losses()
        if self._held is None or self._told is None:
            return False
        if losses.losses > self._told:
            if self._version == WITHOUT_LOSSES:
                return False
            try:
                self._held.send_at_once(encode_losses(losses))
            except OSError as error:
                log.warning("the successor does not hear of a loss: %s", error.strerror or error)
                return False
            self._told = losses.losses
        return True

    def close(self) -> None:
        """The successor sees this, or the end of the process."""
        if self._held is not None:
            self._held.close()

    def enter(self, event: Event) -> None:
        """Make the transition of ``event``. Raises LocalProtocolError where the table has no such
        transition; then nothing has changed."""
        self.state = step(TABLE, "a hand-over", self.state, event)

    async def attend(
        self, channel: Channel, server: NbdServer, flush: Callable[[], Awaitable[None]]
    ) -> None:
        """One successor, which has connected; see ``offer``. ``channel`` is closed unless the
        connections are given: then ``close`` does that. Raises nothing but Cancelled."""
        self._held = channel
        self._version = VERSION
        try:
            with trio.fail_after(HELLO_S):
                self._version = hello_untrusted(await channel.receive())
            await self._give(channel, server, flush)
        except Refused as error:
            log.warning("the connections stay here: %s", error)
            refusal = encode_refused(str(error), error.may_end, self._version)
            with suppress(OSError):
                channel.send_at_once(refusal)
        except trio.TooSlowError:
            log.warning("the connections stay here: the successor is too slow")
        except (IserblkError, OSError) as error:
            log.warning("the connections stay here: %s", error)
        finally:
            if self.state is not State.GIVEN:
                channel.close()

    async def _give(
        self, channel: Channel, server: NbdServer, flush: Callable[[], Awaitable[None]]
    ) -> None:
        self.enter(Event.ASKED)
        try:
            with trio.move_on_after(DRAIN_S) as limit:
                await server.pause()
                await _flushed(flush)
            if limit.cancelled_caught:
                raise Refused(f"requests are under way for more than {DRAIN_S:g} s", True)
            connections = server.connections()
            if not connections:
                raise Refused("it has no connections", True)
            losses = self._losses()  # behind ``connections``, which may change it
            if self._version == WITHOUT_LOSSES and losses.told < losses.losses:
                # Its successor, too, would take what was lost for safe if this one ended.
                raise Refused(_UNTOLD, False)
            self.enter(Event.STILL)
            self._told = losses.losses  # first: what is heard from now on comes before ALL
            with trio.move_on_after(TAKEN_S):
                if self._version != WITHOUT_LOSSES:
                    await channel.send(encode_losses(losses))
                for each in connections:
                    await _send_connection(channel, each, self._version)
                await channel.send(encode_all(len(connections), self._version))
                await channel.until_received()
        finally:
            if self.state is State.OFFERED and _taken(channel, self._version):
                self.enter(Event.TAKEN)
                server.hand_over()
                log.info("another server has the connections")
            else:
                if self.state is State.OFFERED:
                    log.warning("the connections stay here: the successor did not take them")
                self._told = None
                self.enter(Event.KEPT)
                server.go_on()


async def _flushed(flush: Callable[[], Awaitable[None]]) -> None:
    try:
        await flush()
    except IserblkError as error:
        # If it were told to end now, what is not flushed would be lost without a word.
        raise Refused(f"the target could not flush: {error}", False) from None


async def _send_connection(channel: Channel, connection: PausedConnection, version: int) -> None:
    beside: socket.socket | None = connection.sock
    for packet in encode_connection(Given(connection.negotiated, connection.unparsed), version):
        await channel.send(packet, beside)
        beside = None


def _taken(channel: Channel, version: int) -> bool:
    """TAKEN has come; if not, it cannot come any more."""
    try:
        expect_untrusted(channel.receive_last(), Kind.TAKEN, version)
    except (IserblkError, OSError):
        return False
    return True


class Taker:
    """The successor's side. ``path``: where the old server listens. ``connect``: connects there;
    see ``connected``. ``losses``: those of the LUN that the old server has counted, after
    ``take``."""

    def __init__(self, path: Path, connect: Callable[[Path], Channel] = connected) -> None:
        self.losses = LossCount()
        self._path = path
        self._connect = connect
        self._channel: Channel | None = None
        self._taken = False

    async def take(self) -> list[PausedConnection]:
        """Raises NoHandOver, with the connections where they are; IserblkError when the old server
        must not end, either."""
        sockets: list[socket.socket] = []
        try:
            with trio.fail_after(OFFER_S):
                version = VERSION
                try:
                    takeover, channel = await self._offered(sockets, version)
                except OlderServer:
                    self.close()
                    version = WITHOUT_LOSSES
                    takeover, channel = await self._offered(sockets, version)
            if any(each.type != socket.SOCK_STREAM for each in sockets):
                raise RemoteProtocolError("hand-over", "a connection that is no stream")
            self.losses = takeover.losses
            channel.send_at_once(encode(Kind.TAKEN, version=version))
            self._taken = True
            taken, sockets = sockets, []
        except Refused as error:
            if error.may_end:
                raise NoHandOver(str(error)) from None
            raise IserblkError(f"the old server goes on: {error}") from None
        except trio.TooSlowError:
            raise NoHandOver(f"it has not answered for {OFFER_S:g} s") from None
        except RemoteProtocolError as error:
            raise NoHandOver(str(error)) from None
        except OSError as error:
            raise NoHandOver(error.strerror or str(error)) from None
        finally:
            for each in sockets:
                each.close()
        with suppress(OSError):  # nothing is there: so it is, as a rule
            while packet := channel.receive_at_once():
                self._count(packet)
        return [
            PausedConnection(sock, each.negotiated, each.unparsed)
            for sock, each in zip(taken, takeover.given, strict=True)
        ]

    async def _offered(
        self, sockets: list[socket.socket], version: int
    ) -> tuple[Takeover, Channel]:
        channel = self._channel = self._connect(self._path)
        await channel.send(encode(Kind.HELLO, version=version))
        takeover = Takeover(version)
        while not takeover.complete:
            packet, beside = await channel.receive_with_sockets()
            sockets += beside
            takeover.receive_untrusted(packet, len(beside))
        return takeover, channel

    def _count(self, packet: bytes) -> int:
        """A packet that came behind ALL; returns the losses that it tells of. (A packet that makes
        no sense stands for a loss.)"""
        losses, told = self.losses
        try:
            more = more_losses_untrusted(packet, losses)
        except RemoteProtocolError as error:
            log.warning("%s", error)
            more = 1
        self.losses = LossCount(losses + more, told)
        return more

    async def old_server_ended(self, lost: Callable[[int], object]) -> None:
        """After ``take``. ``lost`` is called with the number of losses that it hears of meanwhile,
        which ``losses`` has then."""
        with suppress(OSError):
            while self._channel is not None and (packet := await self._channel.receive()):
                lost(self._count(packet))

    def close(self) -> int:
        """Returns the losses that came last; of those that would come later the old server keeps
        account."""
        lost = 0
        if self._channel is not None:
            with suppress(OSError):
                packet = self._channel.receive_last() if self._taken else b""
                while packet:
                    lost += self._count(packet)
                    packet = self._channel.receive_at_once()
            self._channel.close()
        return lost


@contextmanager
def listening_for_successors(path: Path) -> Iterator[socket.socket]:
    """What an earlier server has left at ``path`` is removed: it has ended. Raises OSError."""
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(path))
        try:
            sock.listen(_BACKLOG)
            yield sock
        finally:
            path.unlink(missing_ok=True)
