"""One NBD client, from its first byte to its last: the shell around handshake and transmission.

The loop watches a client's socket, and one strand is resumed when commands of its requests have
ended; where few are open, the loop calls the client instead. All of these do one thing, a **turn**:
end the commands that have been answered, send the replies in one system call, receive what there
is, and begin a command for each request. No request has a task, a thread or a lock. Requests that
take more than one command (flushes, trims, what is not aligned, what has to be tried again) each
have a strand.

With many requests open the socket is not waited for: it is looked at in the turns in which answers
come.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import socket
import ssl
import termios
from array import array
from collections.abc import Callable, Mapping
from math import inf
from typing import Final, NamedTuple, Protocol

import trio

from iserblk.disk.seam import DirectDisk, Extent, FlushClient, Rest
from iserblk.errors import BadArgument, IserblkError, OutOfRange, RemoteProtocolError
from iserblk.loop.blocking import hung_up
from iserblk.loop.busy_polling import FEW, pace_of
from iserblk.loop.here import loop_here
from iserblk.loop.interrupts import uninterrupted
from iserblk.loop.nap import Nap
from iserblk.loop.seam import Watch
from iserblk.loop.strands import Strands, park
from iserblk.loop.tasks import task_time, until_readable, until_writable
from iserblk.nbd import messages as nbd
from iserblk.nbd.buffers import Memory
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Handshake, Look, State, Tls
from iserblk.nbd.limited_log import ClientLogs
from iserblk.nbd.long_changes import LONG
from iserblk.nbd.tls import TlsStream
from iserblk.nbd.transmission import Request, Transmission
from iserblk.sockets.wire import WOULD_BLOCK, wire

log = logging.getLogger(__name__)

HANDSHAKE_S = 15.0  # that a client may take for its handshake, and
HANDSHAKE_EACH_S = 1.0  # for each export that it asks about
MANY: Final = 8  # open requests, from which on the socket is looked at when answers come
_MOST_BUFFERS: Final = 1024  # of one system call (IOV_MAX)
# Times that one turn receives, at most: behind TLS the socket is looked at until it is empty.
_MOST_RECEIVES: Final = 64
_STEP: Final = 4096  # bytes of a handshake that are received at once
# Bytes of what is long, after which it may end early; powers of two. Steps that the LUN carries out
# by itself are larger.
_LONG_STEP: Final = 32 << 20
_LONG_STEP_ALONE: Final = 256 << 20
_SCRATCH, _MOST_SCRATCHES = 64 << 10, 128
_BUG: Final = "internal error of the server"


class Stream(Protocol):
    """The bytes of a client. ``send`` and ``receive`` are those of ``sockets.wire.Wire``."""

    def send(self, buffers: list[bytes | memoryview], size: int) -> int: ...

    def receive(self, buffers: list[memoryview]) -> int: ...


class PausedConnection(NamedTuple):
    """A connection in its transmission, with nothing under way. ``unparsed``: bytes received of
    requests that have not begun."""

    sock: socket.socket
    negotiated: nbd.Negotiated
    unparsed: bytes


def _bytes_in(sock: socket.socket, which: int) -> int:
    """A number of bytes in the socket, by ioctl(2)."""
    count = array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        fcntl.ioctl(sock, which, count)
    return count[0]


class _Hearing:
    """Whether a client has received what it was told of losses. ``client``: as the LUN knows it.
    ``unsure``: it was told of a loss, and may not have received that yet. ``reset``: the connection
    broke: perhaps the client has not read everything."""

    def __init__(self, sock: socket.socket, client: FlushClient) -> None:
        self.client = client
        self.unsure = False
        self.reset = False
        self._sock = sock

    def told(self, losses: int) -> None:
        """The answer is in the socket."""
        if self.unsure:  # so may be the answer before it: none of both counts as heard
            self.client.unheard()
        self.client.told(losses)
        self.unsure = True

    def look(self) -> None:
        """A TCP socket keeps what the other end has not acknowledged, a Unix socket what it has not
        read. An end that was closed before it had read everything has left an error behind, and a
        Unix socket keeps nothing then."""
        if self.unsure and not self.reset and not _bytes_in(self._sock, termios.TIOCOUTQ):
            # (The error is told once: to whom it comes is noted here.)
            self.reset = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
            self.unsure = self.reset

    def doubt(self) -> None:
        """Implements Hearing. (A client that has heard after all, and flushes once more, hears of
        the same loss again.)"""
        self.look()
        if self.unsure:
            self.client.unheard()
        self.client.ended()

    def end(self) -> None:
        """The connection is over, or goes to another process."""
        self.look()
        if self.unsure:
            self.client.unheard()
            self.unsure = False  # what looks later would find the socket closed


class Client:
    """One connection. ``group``: of its strands. ``name``: for ``logs``, which all clients of a
    server share. ``sock``: the caller closes it when ``serve`` has returned."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        group: Strands,
        memory: Memory,
        busy_poll_us: int,
        logs: ClientLogs | None = None,
    ) -> None:
        sock.setblocking(False)
        self._logs = logs or ClientLogs(log)
        self.name = name
        self._sock = sock
        self._wire = wire(sock, end_of_record=False)
        self._tls: TlsStream | None = None  # what is behind the wire, where there is TLS
        self._group = group
        self._memory = memory
        self._pace = pace_of(busy_poll_us)
        self._loop = loop_here()
        self._watch: Watch | None = None  # of the socket, in the transmission
        self._reads = True  # what the watch waits for
        self._writes = False
        self._ended = trio.Event()
        self._ending = Nap()  # while commands are being aborted
        self._done: list[Request] = []  # whose commands have ended since the last turn
        self._answers = 0
        self._blocked = False  # the socket takes no more at the moment
        self._over = False  # nothing more is received: the client has said so, or is gone
        self._woken = False  # the strand
        self._tells = 0  # losses, by an answer of which TLS keeps a part
        self._unfinished = False  # there is more to receive that the socket may not show
        self._stopped = False
        self._cut_short = False  # what is long ends early: the client is gone, or the server ends
        self._closing = False  # the group of the strands is
        self._handed_over = False  # the connection is another process's
        self._still: trio.Event | None = None  # while it is paused: nothing is under way

    # -- handshake --------------------------------------------------------------------------------

    async def shake_hands(
        self,
        exports: Mapping[str, Export],
        default: str,
        tls: Tls,
        context: ssl.SSLContext | None,
        begun: Callable[[], None] = lambda: None,
    ) -> tuple[Export, Transmission] | None:
        """``begun`` is called when the client has said something that makes sense. None: the client
        has ended it. Raises RemoteProtocolError, OSError, trio.TooSlowError."""
        handshake = Handshake(exports, default, tls)
        buffer = memoryview(bytearray(_STEP))
        asked: set[str] = set()
        with trio.fail_after(HANDSHAKE_S) as limit:
            while True:
                await self._send_all(handshake.data_to_send())
                if handshake.negotiated is not None:
                    export = exports[handshake.negotiated.export]
                    return export, Transmission(
                        handshake.negotiated, self, self._memory, handshake.rest()
                    )
                if handshake.state is State.ENDED:
                    return None
                count = await self._receive_some(buffer)
                if not count:
                    return None
                event = handshake.receive_data(bytes(buffer[:count]))
                if handshake.state is not State.GREETED:
                    begun()
                while event is not None:
                    if isinstance(event, Look):
                        left = limit.deadline - task_time()
                        if event.export.name not in asked:
                            asked.add(event.export.name)
                            left += HANDSHAKE_EACH_S
                        limit.deadline = inf  # the limit is the client's, not the target's
                        await self._look(event.export)
                        limit.deadline = task_time() + left
                        handshake.looked()
                    else:
                        assert context is not None
                        await self._send_all(handshake.data_to_send())
                        await self._secure(context)
                        handshake.secured()
                    event = handshake.receive_data(b"")

    async def _look(self, export: Export) -> None:
        """NBD has no way to tell a client of a change: so it is given what is true now."""
        try:
            await export.disk.refresh()
        except IserblkError as error:
            self._logs.failed(f"{export.name}: the size is the last one known", error)

    async def _secure(self, context: ssl.SSLContext) -> None:
        stream = TlsStream(self._wire, context)
        while not stream.shake_hands():
            if not stream.flush():
                await until_writable(self._sock)
            else:
                await until_readable(self._sock)
        self._tls = stream

    def _stream(self) -> Stream:
        return self._wire if self._tls is None else self._tls

    def _all_has_left(self) -> bool:
        """TLS may keep a part of what it was given."""
        return self._tls is None or self._tls.flush()

    async def _send_all(self, data: bytes) -> None:
        rest: bytes | memoryview = memoryview(data)
        while rest or not self._all_has_left():
            count = self._stream().send([rest], len(rest)) if rest else WOULD_BLOCK
            if count == WOULD_BLOCK:
                await until_writable(self._sock)
            else:
                rest = rest[count:]

    async def _receive_some(self, buffer: memoryview) -> int:
        while True:
            count = self._stream().receive([buffer])
            if count != WOULD_BLOCK:
                return count
            await until_readable(self._sock)

    # -- transmission -----------------------------------------------------------------------------

    def continued(self, connection: PausedConnection) -> Transmission:
        """In place of a handshake: it was made in another process, with this connection."""
        return Transmission(connection.negotiated, self, self._memory, connection.unparsed)

    async def serve(self, export: Export, transmission: Transmission) -> None:
        """Until the client has ended, or is gone, and the last command of its requests has ended,
        too. Raises nothing but Cancelled; its strands are closed by their group then, which aborts
        the commands."""
        self._export = export
        self._disk: DirectDisk = export.disk
        self._hearing = _Hearing(self._sock, export.new_client())
        export.connected(self._hearing)
        self._transmission = transmission
        self._strand = self._group.start_soon(self._on_answers, name=self.name)
        self._strand.abandon = self._abandon
        try:
            await self._run()
        except BaseException:
            # The caller closes the socket before the strands are closed. A turn of theirs must not
            # use its number, which another descriptor may have then.
            if transmission.paused:
                self._drop()  # another process may have the connection by now, or will in a moment
            else:
                self._lose()
            raise
        finally:
            self._forget_socket()
            self._memory.forget(self._wake)
            self._end_flushes()
        self._stopped = True
        self._wake()
        if not self._handed_over:  # else what comes is for another process
            if self._tls is not None:
                self._tls.close_notify()
            self._drop_unreceived()
        transmission.close()

    def _end_flushes(self) -> None:
        self._hearing.end()
        self._export.disconnected(self._hearing)

    def stop(self) -> None:
        """Receive nothing more: ``serve`` ends when what is open is answered. Requests that are in
        the socket still are not answered: a client that is connected again may repeat them, which
        the kernel does, and would not after an error."""
        if not self._over and self._left_in_socket():
            self._logs.conduct.warning(
                "%s: the server ends; requests that it has not received are not answered", self.name
            )
        self._over = self._cut_short = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
        self._look_on()

    def _left_in_socket(self) -> int:
        """Bytes that have come and were not received."""
        return _bytes_in(self._sock, termios.FIONREAD)

    def _drop_unreceived(self) -> None:
        """Closing a TCP socket in which something waits resets the connection: replies that have
        not reached the client yet would be lost."""
        scratch = [memoryview(bytearray(_SCRATCH))]
        with contextlib.suppress(OSError):
            for _ in range(_MOST_SCRATCHES):  # a client could send for ever
                if self._wire.receive(scratch) <= 0:
                    return

    def hurry(self) -> None:
        """After ``stop``, some time later: if the client takes no replies, give it up."""
        if self._blocked:
            self.give_up()

    def give_way(self, starved: bool) -> None:
        """Called from time to time. ``starved``: others wait for memory. A client that has much of
        it, and hardly moves, is given up then."""
        self._hearing.look()
        if self._transmission.hoards() and starved:
            self._logs.conduct.warning(
                "%s: let go: others need the memory that it keeps waiting", self.name
            )
            self.give_up()

    @property
    def has_begun(self) -> bool:
        """It has sent a request, or a part of one."""
        return self._transmission.has_begun

    def give_up(self) -> None:
        """Another client needs the place. ``serve`` ends."""
        self._lose()
        self._look_on()

    # -- a pause ----------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Begin no request any more, and return when all that have begun are answered. A large
        write of which a part has come is one of these. The socket keeps what comes meanwhile.
        ``go_on`` or ``hand_over`` is to follow, also when this is cancelled. Not with TLS, whose
        state has bytes of the client, too."""
        self._transmission.paused = True
        self._still = trio.Event()
        self._look_whether_still(self._still)
        self._look_on()
        await self._still.wait()

    def _look_whether_still(self, still: trio.Event) -> None:
        transmission = self._transmission
        under_way = transmission.open or transmission.out_size
        if not under_way and (self._over or not transmission.midway):
            still.set()

    @property
    def open_requests(self) -> int:
        """Those that were received, and not answered yet."""
        return self._transmission.open

    @property
    def over(self) -> bool:
        """The client has ended, or is gone."""
        return self._over

    def hear_no_more(self) -> None:
        """While it is paused: a loss that it was told of, and may not have received yet, is not
        told. (Another process may have the connection when that ends.)"""
        self._hearing.end()

    def connection(self) -> PausedConnection:
        """While it is paused, and nothing is under way: all there is to know of it."""
        transmission = self._transmission
        return PausedConnection(self._sock, transmission.negotiated, transmission.unparsed())

    def go_on(self) -> None:
        """After ``pause``."""
        self._still = None
        self._transmission.paused = False
        self._turn(first=True)
        self._look_on()

    def hand_over(self) -> None:
        """After ``pause``: another process has the connection now. ``serve`` ends, and does nothing
        that the client could notice."""
        self._handed_over = True
        self._ended.set()

    # -- turns ------------------------------------------------------------------------------------

    @uninterrupted  # an interrupt is for the owner of the loop
    async def _run(self) -> None:
        """Have the loop do the turns, until all is over."""
        try:
            self._watch = self._loop.watch(self._sock.fileno(), self._come)
        except OSError as error:
            self._logs.conduct.warning("%s: cannot be waited for: %s", self.name, error.strerror)
            return
        self._turn(first=True)
        self._look_on()
        await self._ended.wait()

    def _come(self) -> None:
        """Requests have come, or the end of the connection; or the socket takes more."""
        blocked = self._blocked
        if not (blocked or self._reads):
            return  # that its peer is gone is found out when it is received from
        pace = self._pace
        if pace is not None:
            pace.work()
        self._blocked = False
        self._turn(flush=blocked)
        self._look_on()
        watch = self._watch
        if pace is None or watch is None:
            return
        alone = self._reads and self._transmission.open <= 1
        if alone and pace.rest(self._answers):
            watch.expect(pace.until)

    def _look_on(self) -> None:
        """After a turn, and whatever else may change what is waited for."""
        watch, transmission = self._watch, self._transmission
        if watch is None or self._ended.is_set():
            return
        writes = self._blocked
        reads = not (
            self._over
            or writes
            or transmission.held
            or transmission.open >= MANY
            or (transmission.paused and not transmission.midway)
        )
        if self._over and not (transmission.open or transmission.held or writes):
            self._ended.set()
        if reads is not self._reads or writes is not self._writes:
            self._reads, self._writes = reads, writes
            watch.want(reads, writes)

    def _forget_socket(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    async def _on_answers(self) -> None:
        """Body of the strand: it is resumed as soon as the answers that came together are taken in,
        and what is begun then leaves with what other strands begin."""
        while True:
            await park()
            self._woken = False
            if self._stopped:
                return
            self._take_answers()

    def _on_answer(self) -> None:
        self._woken = False
        if self._stopped:  # another turn has ended the last request meanwhile
            self._wake()  # for the strand to end
        elif not self._group.closing:  # else ``_abandon`` ends them
            self._take_answers()

    def _take_answers(self) -> None:
        receive, self._unfinished = self._unfinished, False
        self._turn(receive=receive or self._transmission.open + len(self._done) >= MANY)
        self._look_on()

    def answered(self, request: Request) -> None:
        """Implements Answered."""
        self._done.append(request)
        if self._closing:
            self._ending.wake()
        elif not self._woken:
            self._woken = True
            if self._transmission.open > FEW:
                self._strand.wake()
            else:  # nothing else comes with it: the call alone takes less
                self._loop.call_soon(self._on_answer)

    def told(self, losses: int) -> None:
        """Implements Answered. The answer is in the socket, where its client reads it, as a rule;
        ``_Hearing`` looks whether it has. Where TLS has kept a part of it, ``_send`` tells when
        that has left. (Nothing may be sent here: an error would come while requests are being
        released.)"""
        if self._tls is not None and self._tls.keeps():
            self._tells = losses
        else:
            self._hearing.told(losses)

    def _wake(self) -> None:
        """The strand takes a turn soon."""
        if not self._woken:
            self._woken = True
            self._strand.wake()

    def _receive_soon(self) -> None:
        if not self._stopped:
            self._wake()

    def _turn(self, receive: bool = True, first: bool = False, flush: bool = False) -> None:
        held = self._disk.begin_batch()
        transmission = self._transmission
        try:
            if self._done:
                done, self._done = self._done, []
                self._answers += len(done)
                for request in done:
                    self._end(request)
            if (transmission.out_size or flush) and not self._blocked:
                self._send()
            if transmission.held or first:
                self._begin(transmission.resume())
                receive = True  # with TLS there may be bytes that the socket does not show
            if receive:
                self._receive()
            if transmission.out_size and not self._blocked:
                self._send()  # refusals
                if transmission.held and not self._blocked:
                    self._receive_soon()  # perhaps it was for their number
            if self._memory.starved:
                self._memory.share_out()
            if transmission.starved:
                self._memory.wait(self._wake)
        except RemoteProtocolError as error:
            self._logs.conduct.warning("%s: %s", self.name, error)
            self._lose()
        except OSError as error:
            if error.errno not in _GONE:
                self._logs.conduct.warning("%s: %s", self.name, error.strerror or error)
            self._hearing.reset = True
            self._lose()
        except Exception:  # a bug; it ends this client only
            log.exception("%s: internal error", self.name)
            self._lose()
        finally:
            self._disk.end_batch(held)
        if self._still is not None:
            self._look_whether_still(self._still)

    def _lose(self) -> None:
        """The connection is over. What is open ends as it would, and is not answered."""
        self._drop()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _drop(self) -> None:
        """As ``_lose``, without telling the client."""
        self._over = self._cut_short = True
        self._blocked = False
        self._hearing.look()  # before the socket has its own end to send
        self._transmission.discard()
        if self._still is not None:  # nothing may follow that would look
            self._look_whether_still(self._still)

    def _receive(self) -> None:
        transmission, tls = self._transmission, self._tls
        stream: Stream = self._wire if tls is None else tls
        for _ in range(_MOST_RECEIVES):
            if self._over or self._blocked:
                break
            if transmission.paused and not transmission.midway:
                break
            buffers = transmission.get_buffers()
            if not buffers:
                break
            count = stream.receive(buffers)
            if count == WOULD_BLOCK:
                return
            if not count:
                self._over = True
                return
            self._begin(transmission.received(count))
            if tls is None or not tls.pending():
                break
        else:
            # What it has brought about, and the other clients, have their turn before the rest,
            # which the socket may not show.
            self._unfinished = True
            self._loop.call_soon(self._receive_soon)
        if transmission.ended:
            self._over = True

    def _send(self) -> None:
        transmission = self._transmission
        out, size = transmission.out, transmission.out_size
        if len(out) > _MOST_BUFFERS:
            out = out[:_MOST_BUFFERS]
            size = sum(map(len, out))
        tls = self._tls
        stream: Stream = self._wire if tls is None else tls
        count = stream.send(out, size) if size else 0
        if count != WOULD_BLOCK:
            transmission.sent(count)
        if transmission.out_size or (tls is not None and not tls.flush()):
            self._blocked = True
        elif self._tells:
            losses, self._tells = self._tells, 0
            self._hearing.told(losses)

    def _begin(self, requests: list[Request]) -> None:
        """Send the command of each, where one will do and there is room for it."""
        disk = self._disk
        free = not self._export.long.under_way  # what is long begins later
        begun = 0
        try:
            for request in requests:
                command = request.command
                slot = None
                if command == nbd.READ:
                    slot = disk.begin_read(request.data, request.offset, request)
                elif command == nbd.WRITE and not request.flags and free:
                    slot = disk.begin_write(request.data, request.offset, request)
                if slot is None:
                    self._carry_out_soon(request, None)
                else:
                    request.slot = slot
                begun += 1
        except Exception:
            # A bug; it ends the client, which is over when no request is open.
            for request in requests[begun:]:
                request.slot = None
                if not request.pending:  # else its command is under way, in spite of the error
                    self._transmission.refuse(request, nbd.EIO, _BUG)
            raise

    def _end(self, request: Request) -> None:
        """The command of a request has ended."""
        slot = request.slot
        try:
            assert slot is not None  # ``_begin`` set it
            if request.command == nbd.READ:
                rest = self._disk.end_read(slot)
            else:
                buffer = request.buffer
                if buffer is not None:  # of a large write
                    other = self._disk.take_over(slot, buffer)
                    if other is not None:
                        request.buffer = other
                rest = self._disk.end_write(slot)
        except IserblkError as error:
            self._refuse(request, error)
            return
        except Exception:
            self._refuse_for_bug(request)
            return
        if rest is None:
            self._transmission.reply(request)
        elif self._closing:
            self._transmission.refuse(request, nbd.ESHUTDOWN, "the server is ending")
        else:
            self._carry_out_soon(request, rest)

    def _refuse_for_bug(self, request: Request) -> None:
        """While the exception is being handled, which is logged."""
        log.exception("%s: internal error", self.name)
        self._transmission.refuse(request, nbd.EIO, _BUG)

    def _refuse(self, request: Request, error: IserblkError) -> None:
        number = nbd.error_of(error)
        if isinstance(error, OutOfRange) and request.command in (nbd.WRITE, nbd.WRITE_ZEROES):
            number = nbd.ENOSPC
        if number == nbd.ENOTSUP and request.command == nbd.TRIM:
            # This client was told that trims are taken. (The protocol has no error of this meaning
            # for them. With ENOTSUP qemu goes on without; with any other it fails.)
            if not self._export.no_trims_told:
                self._export.no_trims_told = True
                log.warning("%s; clients are told that trims are not supported", error)
        elif number == nbd.ENOTSUP and not request.flags & nbd.FLAG_FAST_ZERO:
            number = nbd.EINVAL
        if number == nbd.EIO and not self._closing:  # then the command was aborted by ourselves
            self._logs.failed(self.name, error)
        if request.command == nbd.FLUSH:
            request.losses = error.losses
        self._transmission.refuse(request, number, str(error))

    def _carry_out_soon(self, request: Request, rest: Rest | None) -> None:
        self._group.start_soon(self._carry_out, request, rest, name=self.name, owner=self)

    async def _carry_out(self, request: Request, rest: Rest | None) -> None:
        """Body of a strand: a request that takes more than one command. ``rest``: of one that has
        begun already."""
        extents: list[Extent] | None = None
        try:
            extents = await self._obey(request, rest)
        except IserblkError as error:
            self._refuse(request, error)
        except Exception:
            self._refuse_for_bug(request)
        else:
            if extents is None:
                self._transmission.reply(request)
            else:
                self._transmission.reply_status(request, extents)
        self._answers += 1
        self._wake()

    async def _obey(self, request: Request, rest: Rest | None) -> list[Extent] | None:
        disk, offset, length, flags = self._disk, request.offset, request.length, request.flags
        fua = flags & nbd.FLAG_FUA != 0
        if offset + length > disk.size and request.command != nbd.FLUSH:
            await disk.refresh()  # it may have grown
        long = self._export.long
        if long.under_way and request.command in nbd.CHANGES:
            await long.let_end(offset, length)
        if (
            length > LONG
            and self._export.patient
            and request.command in (nbd.TRIM, nbd.WRITE_ZEROES)
        ):
            with long.one(offset, length):
                await self._change_in_steps(request)
            return None
        match request.command:
            case nbd.READ:
                await disk.read_into(request.data, offset, rest)
            case nbd.WRITE:
                await disk.write(request.data, offset, fua, rest)
            case nbd.FLUSH:
                self._hearing.look()
                await disk.flush(self._hearing.client)
            case nbd.TRIM:
                await disk.trim(offset, length, fua)
            case nbd.WRITE_ZEROES:
                await disk.zero(
                    offset,
                    length,
                    may_trim=not flags & nbd.FLAG_NO_HOLE,
                    fast=flags & nbd.FLAG_FAST_ZERO != 0,
                    fua=fua,
                )
            case nbd.CACHE:
                await disk.cache(offset, length)
            case nbd.BLOCK_STATUS:
                if not length:
                    raise BadArgument("BLOCK_STATUS of nothing, or of a context that is not in use")
                return await disk.extents(offset, length)
        return None

    async def _change_in_steps(self, request: Request) -> None:
        """A large TRIM or WRITE_ZEROES: as long as it makes progress, until the client is gone, or
        the server ends."""
        disk, offset, flags = self._disk, request.offset, request.flags
        end = offset + request.length
        fua = flags & nbd.FLAG_FUA != 0
        while offset < end:
            if self._cut_short or (self._over and self._is_gone()):
                early = IserblkError(f"{self._export.name}: the server ends, before all is done")
                early.errno = errno.ESHUTDOWN
                raise early
            alone = request.command == nbd.TRIM or disk.info.can_zero
            most = _LONG_STEP_ALONE if alone else _LONG_STEP
            step = min(most - offset % most, end - offset)
            if request.command == nbd.TRIM:
                await disk.trim(offset, step, fua, patient=True)
            else:
                await disk.zero(
                    offset,
                    step,
                    may_trim=not flags & nbd.FLAG_NO_HOLE,
                    fast=flags & nbd.FLAG_FAST_ZERO != 0,
                    fua=fua,
                    patient=True,
                )
            offset += step

    def _is_gone(self) -> bool:
        """The client takes nothing either: it has closed its end. (TCP tells of that later.)"""
        return hung_up(self._sock.fileno())

    async def _abandon(self, _waiter: object) -> None:
        """The strands are being closed. Abort the commands, and wait until they have ended: before
        that no buffer is free."""
        self._over = self._closing = True
        self._look_on()  # no turn may take what has ended from here
        ended = len(self._done)
        ended += self._disk.abandon(
            lambda waiter: isinstance(waiter, Request) and waiter.owner is self
        )
        while len(self._done) < ended:
            await self._ending.sleep()
        for request in self._done:
            self._end(request)
        self._transmission.discard()


_GONE: Final = (errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.ENOTCONN)
