"""One connection of an NBD client, on a socket of a simulated world.

It speaks the protocol by the product's numbers and layouts, and takes replies of all three kinds.
What a request was answered is returned or raised; a request that was not answered raises Gone.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

import trio

from iserblk.nbd import messages as nbd
from iserblk.nbd.messages import Option
from tests.simulation.network import TrioSocket

SIMPLE, STRUCTURED, EXTENDED = "simple", "structured", "extended"
STYLES: Final = (SIMPLE, STRUCTURED, EXTENDED)
_MOST: Final = 64 << 10  # bytes that are received at once
_GO: Final = struct.Struct(">IH")  # length of the name, which is empty; how much it wants to know


class Gone(Exception):
    """The connection has ended, and the request was not answered."""


class Refused(Exception):
    """The answer is an error. ``text``: the server's, where replies have one."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(f"error {number} {text}".rstrip())
        self.number = number


class Extent(NamedTuple):
    offset: int
    length: int
    flags: int


class _Asked:
    """A request. ``data``: of a READ. ``extents``: of a BLOCK_STATUS, with their lengths."""

    def __init__(self, command: int, offset: int, length: int) -> None:
        self.command = command
        self.offset = offset
        self.data = bytearray(length if command == nbd.READ else 0)
        self.extents: list[Extent] = []
        self.error: Exception | None = None
        self.ended = trio.Event()


class Connection:
    """``run`` is the body of its task, from the handshake to the end. ``is_over``: no request may
    be sent any more. ``flags``: what the export takes, when ``ready``. ``failed``: flushes that
    were answered with an error."""

    def __init__(self, sock: TrioSocket, style: str) -> None:
        self.style = style
        self.flags = 0
        self.failed = 0
        self.is_over = False
        self.ready = trio.Event()
        self._sock = sock
        self._scope = trio.CancelScope()
        self._open: dict[int, _Asked] = {}  # by cookie
        self._next = 1
        self._out = bytearray()
        self._has_out = trio.Event()
        self._in = bytearray()

    async def run(self, asks: Callable[[], object], over: Callable[[], object]) -> None:
        """``asks`` is called before it asks for the export, ``over`` when it is closed."""
        try:
            with self._scope:
                await self._shake_hands(asks)
                self.ready.set()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._send_all)
                    while True:
                        await self._take_reply()
        except* (OSError, Gone):
            pass
        finally:
            self.is_over = True
            self._sock.close()
            for asked in self._open.values():
                asked.error = Gone()
                asked.ended.set()
            self._open.clear()
            self.ready.set()
            over()

    def close(self) -> None:
        """At once: what is under way is not answered."""
        self.is_over = True
        self._scope.cancel()

    def disconnect(self) -> None:
        """DISC: the server answers what it has, and ends the connection."""
        self._put(nbd.DISC, 0, 0, 0, 0)
        self.is_over = True

    @property
    def open(self) -> int:
        """Requests that are not answered."""
        return len(self._open)

    def has_open(self, command: int) -> bool:
        return any(each.command == command for each in self._open.values())

    # -- requests ---------------------------------------------------------------------------------

    async def read(self, offset: int, length: int) -> bytes:
        return bytes((await self._ask(nbd.READ, 0, offset, length)).data)

    async def write(self, data: bytes, offset: int, fua: bool) -> None:
        await self._ask(nbd.WRITE, nbd.FLAG_FUA if fua else 0, offset, len(data), data)

    async def zero(self, offset: int, length: int, may_trim: bool, fua: bool) -> None:
        flags = (0 if may_trim else nbd.FLAG_NO_HOLE) | (nbd.FLAG_FUA if fua else 0)
        await self._ask(nbd.WRITE_ZEROES, flags, offset, length)

    async def trim(self, offset: int, length: int) -> None:
        await self._ask(nbd.TRIM, 0, offset, length)

    async def cache(self, offset: int, length: int) -> None:
        await self._ask(nbd.CACHE, 0, offset, length)

    async def flush(self) -> None:
        await self._ask(nbd.FLUSH, 0, 0, 0)

    async def extents(self, offset: int, length: int) -> list[Extent]:
        return (await self._ask(nbd.BLOCK_STATUS, 0, offset, length)).extents

    async def _ask(
        self, command: int, flags: int, offset: int, length: int, data: bytes = b""
    ) -> _Asked:
        """Raises Gone and Refused."""
        if self.is_over:
            raise Gone
        cookie, self._next = self._next, self._next + 1
        asked = self._open[cookie] = _Asked(command, offset, length)
        self._put(command, flags, cookie, offset, length, data)
        await asked.ended.wait()
        if asked.error is not None:
            raise asked.error
        return asked

    def _put(
        self, command: int, flags: int, cookie: int, offset: int, length: int, data: bytes = b""
    ) -> None:
        if self.style == EXTENDED:
            flags |= nbd.FLAG_PAYLOAD_LEN if command == nbd.WRITE else 0
            words = nbd.EXTENDED_REQUEST_MAGIC, flags, command, cookie, offset, length
            self._out += nbd.EXTENDED_REQUEST.pack(*words) + data
        else:
            words = nbd.REQUEST_MAGIC, flags, command, cookie, offset, length
            self._out += nbd.REQUEST.pack(*words) + data
        self._has_out.set()

    async def _send_all(self) -> None:
        while True:
            while self._out:
                count = await self._sock.send(bytes(self._out))
                del self._out[:count]
            self._has_out = trio.Event()
            await self._has_out.wait()

    # -- replies ----------------------------------------------------------------------------------

    async def _take(self, size: int) -> bytes:
        while len(self._in) < size:
            data = await self._sock.recv(_MOST)
            if not data:
                raise Gone
            self._in += data
        taken = bytes(self._in[:size])
        del self._in[:size]
        return taken

    async def _take_reply(self) -> None:
        if self.style == SIMPLE:
            magic, error, cookie = nbd.SIMPLE_REPLY.unpack(await self._take(nbd.SIMPLE_REPLY.size))
            assert magic == nbd.SIMPLE_REPLY_MAGIC, f"a reply begins with {magic:#x}"
            asked = self._open[cookie]
            if not error:
                asked.data[:] = await self._take(len(asked.data))
            else:
                asked.error = Refused(error)
            self._end(cookie)
            return
        if self.style == EXTENDED:
            header = await self._take(nbd.EXTENDED_CHUNK.size)
            magic, flags, kind, cookie, offset, length = nbd.EXTENDED_CHUNK.unpack(header)
            assert magic == nbd.EXTENDED_CHUNK_MAGIC, f"a reply begins with {magic:#x}"
            assert offset == self._open[cookie].offset, f"a reply of {kind} at {offset}"
        else:
            header = await self._take(nbd.CHUNK.size)
            magic, flags, kind, cookie, length = nbd.CHUNK.unpack(header)
            assert magic == nbd.CHUNK_MAGIC, f"a reply begins with {magic:#x}"
        self._take_chunk(self._open[cookie], kind, await self._take(length))
        if flags & nbd.REPLY_DONE:
            self._end(cookie)

    def _take_chunk(self, asked: _Asked, kind: int, payload: bytes) -> None:
        if kind == nbd.TYPE_OFFSET_DATA:
            at = int.from_bytes(payload[: nbd.DATA_OFFSET]) - asked.offset
            data = payload[nbd.DATA_OFFSET :]
            assert 0 <= at <= len(asked.data) - len(data), f"data at {at} of a read"
            asked.data[at : at + len(data)] = data
        elif kind == nbd.TYPE_ERROR:
            number, size = nbd.ERROR_DATA.unpack_from(payload)
            text = payload[nbd.ERROR_DATA.size :][:size].decode()
            asked.error = Refused(number, text)
        elif kind in (nbd.TYPE_BLOCK_STATUS, nbd.TYPE_BLOCK_STATUS_EXT):
            extended = kind == nbd.TYPE_BLOCK_STATUS_EXT
            begin = (nbd.EXTENDED_CONTEXT if extended else nbd.CONTEXT_ID).size
            layout = nbd.EXTENDED_EXTENT if extended else nbd.EXTENT
            offset = asked.offset
            for length, flags in layout.iter_unpack(payload[begin:]):
                asked.extents.append(Extent(offset, length, flags))
                offset += length
        else:
            assert kind == nbd.TYPE_NONE, f"a chunk of type {kind}"

    def _end(self, cookie: int) -> None:
        asked = self._open.pop(cookie)  # (KeyError: no such request, or answered twice)
        self.failed += asked.command == nbd.FLUSH and asked.error is not None
        asked.ended.set()

    # -- the handshake ----------------------------------------------------------------------------

    async def _shake_hands(self, asks: Callable[[], object]) -> None:
        magic, option_magic, flags = nbd.GREETING.unpack(await self._take(nbd.GREETING.size))
        assert (magic, option_magic) == (nbd.MAGIC, nbd.OPTION_MAGIC)
        assert flags == nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES
        await self._send(nbd.CLIENT_FLAGS.pack(flags))
        if self.style != SIMPLE:
            extended = self.style == EXTENDED
            await self._choose(Option.EXTENDED_HEADERS if extended else Option.STRUCTURED_REPLY)
            context = nbd.BASE_ALLOCATION.encode()
            one = struct.pack(">III", 0, 1, len(context))  # of the default export
            await self._choose(Option.SET_META_CONTEXT, one + context)
        asks()
        for kind, payload in await self._choose(Option.GO, _GO.pack(0, 0)):
            if kind == nbd.REP_INFO and nbd.INFO.unpack_from(payload) == (nbd.INFO_EXPORT,):
                _, _, self.flags = nbd.INFO_EXPORT_DATA.unpack(payload)

    async def _choose(self, option: int, data: bytes = b"") -> list[tuple[int, bytes]]:
        await self._send(nbd.OPTION.pack(nbd.OPTION_MAGIC, option, len(data)) + data)
        replies: list[tuple[int, bytes]] = []
        while not replies or replies[-1][0] != nbd.REP_ACK:
            header = await self._take(nbd.OPTION_REPLY.size)
            magic, of, kind, length = nbd.OPTION_REPLY.unpack(header)
            assert (magic, of) == (nbd.OPTION_REPLY_MAGIC, option)
            assert kind in (nbd.REP_ACK, nbd.REP_INFO, nbd.REP_META_CONTEXT), f"a reply {kind:#x}"
            replies.append((kind, await self._take(length)))
        return replies

    async def _send(self, data: bytes) -> None:
        while data:
            data = data[await self._sock.send(data) :]
