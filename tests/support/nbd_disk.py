"""A LUN through NBD's wire, behind the names of the disk seam.

Our server is at one end of socket pairs, and a client that is written from the protocol's document
at the other. A disk has several connections, each of its own form (simple replies, structured
replies, extended headers). Each request goes over any of them; so a flush often covers writes of
other connections. The client sends in pieces, reads in pieces, and has requests of all callers in
flight at once. An answer that breaks the protocol, or a connection that the server ends, fails the
test.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import trio

from iserblk.disk.seam import EXTENT_DATA, DirectDisk, Extent, FlushClient, LossCount, LunInfo
from iserblk.errors import IserblkError
from iserblk.loop.strands import Strands, open_strands
from iserblk.nbd.buffers import Memory
from iserblk.nbd.client import Client
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Tls
from tests.nbd import conversation
from tests.nbd.conversation import EXTENDED, SIMPLE, STRUCTURED

FORMS = conversation.MODES
_DATA, _STATUS, _STATUS_EXT, _ERROR = 1, 5, 6, 1 << 15 | 1
_HEADERS = {SIMPLE: 16, STRUCTURED: 20, EXTENDED: 32}  # bytes, of replies
_PIECES = 0.1  # share of the requests that are sent in pieces
_NARROW = 0.5  # share of the connections whose socket takes few bytes at once
_NARROW_BYTES = 8192


class NbdError(IserblkError):
    """An answer with an error. ``errno``: as it was on the wire. A simple reply has no text.
    ``may_repeat``: of a flush: the answer may tell its connection of a loss of which another
    connection was told before: each connection is a client of its own."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(text or f"NBD error {number}")
        self.errno = number
        self.has_text = bool(text)
        self.may_repeat = False

    @property
    def tells_of_loss(self) -> bool:
        return "were lost at the target" in str(self)


class Breach(AssertionError):
    """The server has broken the protocol."""


@dataclass
class _Asked:
    """A request that is not answered yet, and then its answer."""

    command: int
    offset: int
    length: int
    done: trio.Event = field(default_factory=trio.Event)
    error: int = 0
    kind: int = 0
    data: bytes = b""


class Connection:
    """One connection of a client."""

    def __init__(self, sock: socket.socket, form: str, chance: random.Random) -> None:
        self.form = form
        self.heard = 0  # flushes of the disk that had failed when one of this connection told all
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._chance = chance
        self._in = bytearray()
        self._asked: dict[int, _Asked] = {}
        self._sending = trio.Lock()
        self._context = b""

    async def shake_hands(self, export: str) -> None:
        greeting = await self._receive(18)
        assert greeting[:16] == b"NBDMAGICIHAVEOPT"
        await self._stream.send_all(conversation.client_flags())
        if self.form == EXTENDED:
            await self._option(conversation.EXTENDED_HEADERS)
        elif self.form == STRUCTURED:
            await self._option(conversation.STRUCTURED_REPLY)
        if self.form != SIMPLE:
            wanted = conversation.contexts(export, "base:allocation")
            (context,) = await self._option(conversation.SET_META_CONTEXT, wanted)
            self._context = context[:4]  # the server chooses the number
            assert context[4:] == b"base:allocation"
        await self._option(conversation.GO, conversation.about(export))

    async def _option(self, number: int, data: bytes = b"") -> list[bytes]:
        """The data of the replies before the last one, which must be ACK."""
        await self._stream.send_all(conversation.option(number, data))
        found: list[bytes] = []
        while True:
            header = await self._receive(20)
            length = int.from_bytes(header[16:])
            (answer,) = conversation.answers(header + await self._receive(length))
            assert answer.option == number
            if answer.kind == conversation.ACK:
                return found
            assert answer.kind < conversation.UNSUP, answer
            found.append(answer.data)

    async def _receive(self, count: int) -> bytes:
        """Raises EOFError."""
        while len(self._in) < count:
            most = self._chance.choice((7, 4096, 1 << 18, 1 << 18))
            more = await self._stream.receive_some(most)
            if not more:
                raise EOFError(bytes(self._in))
            self._in += more
        data = bytes(self._in[:count])
        del self._in[:count]
        return data

    async def ask(
        self, command: int, offset: int = 0, length: int = 0, flags: int = 0, data: bytes = b""
    ) -> _Asked:
        """Returns when the answer has come. Raises NbdError."""
        cookie = self._chance.getrandbits(64)
        assert cookie not in self._asked
        extended = self.form == EXTENDED
        if extended and command == conversation.WRITE:
            flags |= conversation.PAYLOAD_LEN
        message = conversation.request(command, cookie, offset, length, flags, data, extended)
        asked = self._asked[cookie] = _Asked(command, offset, length)
        async with self._sending:
            await self._send(message)
        await asked.done.wait()
        if asked.error:
            raise NbdError(asked.error, asked.data.decode())
        return asked

    async def _send(self, message: bytes) -> None:
        if self._chance.random() < _PIECES:
            at = self._chance.randrange(len(message))
            await self._stream.send_all(message[:at])
            await trio.lowlevel.checkpoint()
            message = message[at:]
        await self._stream.send_all(message)

    async def status(self, offset: int, length: int, one: bool) -> list[tuple[int, int]]:
        """Lengths and flags of the extents; with ``one`` only the first is asked for."""
        flags = conversation.REQ_ONE if one else 0
        asked = await self.ask(conversation.BLOCK_STATUS, offset, length, flags)
        extents = asked.data[8:] if asked.kind == _STATUS_EXT else asked.data[4:]
        told = list(struct.iter_unpack(">QQ" if asked.kind == _STATUS_EXT else ">II", extents))
        if asked.kind == _STATUS_EXT and len(told) != int.from_bytes(asked.data[4:8]):
            raise Breach(f"{len(told)} extents come, and the chunk tells another number")
        if asked.data[:4] != self._context or not all(length for length, _ in told):
            raise Breach(f"BLOCK_STATUS is answered with {asked.data.hex()}")
        return [(length, flags) for length, flags in told]

    async def disconnect(self) -> None:
        await self._stream.send_all(
            conversation.request(conversation.DISC, 0, extended=self.form == EXTENDED)
        )

    async def receive(self) -> None:
        """Hand out the answers, until the server ends the connection. Raises Breach."""
        async with self._stream:
            while True:
                try:
                    header = await self._receive(_HEADERS[self.form])
                except EOFError as error:
                    if self._asked or error.args[0]:
                        raise Breach("the server has ended the connection") from None
                    return
                asked = await (self._simple if self.form == SIMPLE else self._chunk)(header)
                asked.done.set()

    def _of(self, cookie: int) -> _Asked:
        """Each request is answered once."""
        asked = self._asked.pop(cookie, None)
        if asked is None:
            raise Breach(f"an answer to cookie {cookie:#x}, which is not open")
        return asked

    async def _simple(self, header: bytes) -> _Asked:
        magic, error, cookie = struct.unpack(">IIQ", header)
        if magic != 0x67446698:
            raise Breach(f"a simple reply begins with {magic:#x}")
        asked = self._of(cookie)
        asked.error = error
        if asked.command == conversation.READ and not error:
            asked.data = await self._receive(asked.length)
        return asked

    async def _chunk(self, header: bytes) -> _Asked:
        """The server answers each request with one chunk."""
        if self.form == STRUCTURED:
            magic, flags, kind, cookie, length = struct.unpack(">IHHQI", header)
            wanted, offset = 0x668E33EF, None
        else:
            magic, flags, kind, cookie, offset, length = struct.unpack(">IHHQQQ", header)
            wanted = 0x6E8A278C
        if magic != wanted or flags != 1:
            raise Breach(f"a chunk begins with {magic:#x}, and has flags {flags:#x}")
        asked = self._of(cookie)
        asked.kind = kind
        payload = await self._receive(length)
        if offset is not None and offset != asked.offset:
            raise Breach(f"an answer for offset {offset}, not {asked.offset}")
        if kind == _ERROR:
            asked.error, words = struct.unpack_from(">IH", payload)
            asked.data = payload[6:]
            if not asked.error or words != len(asked.data):
                raise Breach(f"an error {asked.error} with {len(asked.data)} bytes of text")
        elif asked.command == conversation.READ:
            if kind != _DATA or payload[:8] != struct.pack(">Q", asked.offset):
                raise Breach(f"a READ is answered with a chunk of type {kind}")
            asked.data = payload[8:]
            if len(asked.data) != asked.length:
                raise Breach(f"{len(asked.data)} bytes, not {asked.length}")
        elif asked.command == conversation.BLOCK_STATUS:
            if kind != (_STATUS_EXT if self.form == EXTENDED else _STATUS):
                raise Breach(f"BLOCK_STATUS is answered with a chunk of type {kind}")
            asked.data = payload
        elif kind or payload:
            raise Breach(f"command {asked.command} is answered with a chunk of type {kind}")
        return asked


class NbdDisk:
    """Implements AsyncDisk over connections of one export. Errors are NbdError."""

    def __init__(
        self, disk: DirectDisk, connections: list[Connection], chance: random.Random
    ) -> None:
        self.info: LunInfo = disk.info
        self._disk = disk
        self.client = disk.client
        self._all = connections
        self._knowing = [each for each in connections if each.form != SIMPLE]
        self._chance = chance
        self._failed = 0  # flushes, each of which may have told its connection of a loss

    @property
    def size(self) -> int:
        return self.info.size

    @property
    def dirty(self) -> bool:
        return self._disk.dirty

    @property
    def unflushed(self) -> int | None:
        return self._disk.unflushed

    async def refresh(self) -> int:
        """NBD does not tell clients of a new size."""
        await trio.lowlevel.checkpoint()
        return self.size

    def _any(self) -> Connection:
        return self._chance.choice(self._all)

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        connection = self._any()
        unbroken = connection.form != SIMPLE and self._chance.random() < 0.5
        flags = conversation.DF if unbroken else 0
        asked = await connection.ask(conversation.READ, offset, len(buffer), flags)
        buffer[:] = asked.data

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        flags = conversation.FUA if fua else 0
        await self._any().ask(conversation.WRITE, offset, len(buffer), flags, bytes(buffer))

    def new_client(self) -> FlushClient:
        return self._disk.new_client()

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        return self._disk.only_client(before, changed)

    async def flush(self, client: FlushClient | None = None) -> None:
        """Of whichever connection: each is a client."""
        connection, failed = self._any(), self._failed
        repeats = connection.heard < failed  # each flush that is under way then tells of the loss
        try:
            await connection.ask(conversation.FLUSH)
        except NbdError as error:
            error.may_repeat = repeats
            alone = self._failed == failed
            self._failed += 1
            if error.tells_of_loss:
                connection.heard = max(connection.heard, failed + alone)
            raise
        connection.heard = max(connection.heard, failed)

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        flags = conversation.FUA if fua else 0
        await self._any().ask(conversation.TRIM, offset, length, flags)

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        flags = conversation.FUA if fua else 0
        flags |= 0 if may_trim else conversation.NO_HOLE
        flags |= conversation.FAST_ZERO if fast else 0
        await self._any().ask(conversation.WRITE_ZEROES, offset, length, flags)

    async def extents(self, offset: int, length: int) -> list[Extent]:
        """Simple replies have no BLOCK_STATUS: such a client takes everything for data."""
        if not self._knowing:
            await trio.lowlevel.checkpoint()
            return [(offset, length, EXTENT_DATA)]
        one = self._chance.random() < 0.2
        told = await self._chance.choice(self._knowing).status(offset, length, one)
        found: list[Extent] = []
        at = offset
        for count, flags in told:
            found.append((at, count, flags))
            at += count
        if not found or (one and len(found) > 1) or at > offset + length:
            raise Breach(f"BLOCK_STATUS of {offset}+{length} is answered with {found}")
        return found

    async def cache(self, offset: int, length: int) -> None:
        await self._any().ask(conversation.CACHE, offset, length)


@asynccontextmanager
async def through_nbd(
    disk: DirectDisk, forms: Sequence[str], seed: object = 0
) -> AsyncIterator[NbdDisk]:
    """``disk`` through a connection of each of ``forms``. ``seed``: of all choices of the client.
    At the end the clients disconnect, and the server must have all of its memory back."""
    chance = random.Random(f"nbd {seed}")
    export, memory = Export(disk.info.name, disk), Memory()
    failure: Exception | None = None
    async with AsyncExitStack() as stack:
        scope = stack.enter_context(trio.CancelScope())
        group = await stack.enter_async_context(open_strands())
        nursery = await stack.enter_async_context(trio.open_nursery())
        connections = []
        for form in forms:
            here, there = socket.socketpair()
            there.setblocking(False)
            if chance.random() < _NARROW:
                here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _NARROW_BYTES)
            nursery.start_soon(_serve, here, export, group, memory)
            connection = Connection(there, form, chance)
            await connection.shake_hands(export.name)
            nursery.start_soon(connection.receive)
            connections.append(connection)
        try:
            yield NbdDisk(disk, connections, chance)
        except Exception as error:
            failure = error  # raised below, not inside the nursery's exception group
            scope.cancel()
        else:
            for each in connections:
                await each.disconnect()
    if failure is not None:
        raise failure
    assert memory.used == 0


async def _serve(sock: socket.socket, export: Export, group: Strands, memory: Memory) -> None:
    """What the server does with a connection that it has accepted."""
    with sock:
        client = Client(sock, "NBD client", group, memory, 0)
        agreed = await client.shake_hands({export.name: export}, export.name, Tls.OFF, None)
        assert agreed is not None
        await client.serve(*agreed)
