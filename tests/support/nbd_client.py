"""An NBD client that says what it is told to, byte by byte: for tests of the server."""

from __future__ import annotations

import socket
import ssl
import struct
from pathlib import Path
from typing import NamedTuple

import trio

from iserblk.nbd import messages as nbd
from tests.support.until import until

WHOLE = nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES


class Reply(NamedTuple):
    """A simple reply; ``data`` only of a READ."""

    error: int
    cookie: int
    data: bytes = b""


def option(number: int, data: bytes = b"", length: int | None = None) -> bytes:
    """``length``: what the header says, where that is a lie."""
    said = len(data) if length is None else length
    return nbd.OPTION.pack(nbd.OPTION_MAGIC, number, said) + data


def go(export: str = "") -> bytes:
    """Without any information."""
    name = export.encode()
    return option(nbd.Option.GO, struct.pack(">I", len(name)) + name + bytes(2))


def request(
    command: int, offset: int = 0, length: int = 0, cookie: int = 0, flags: int = 0
) -> bytes:
    return nbd.REQUEST.pack(nbd.REQUEST_MAGIC, flags, command, cookie, offset, length)


def write(data: bytes, offset: int = 0, cookie: int = 0) -> bytes:
    return request(nbd.WRITE, offset, len(data), cookie) + data


class RawClient:
    """A client on a trio stream, closed by ``async with``."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self.stream = stream
        self._in = bytearray()

    async def __aenter__(self) -> RawClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await trio.aclose_forcefully(self.stream)

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def send_eof(self) -> None:
        """Nothing more comes from here. (Not with TLS.)"""
        assert isinstance(self.stream, trio.SocketStream)
        await self.stream.send_eof()

    async def receive(self, count: int) -> bytes:
        """Raises EOFError where the server has ended the connection before that."""
        while len(self._in) < count:
            try:
                more = await self.stream.receive_some(1 << 20)
            except trio.BrokenResourceError:
                more = b""
            if not more:
                raise EOFError(bytes(self._in))
            self._in += more
        data = bytes(self._in[:count])
        del self._in[:count]
        return data

    async def end(self) -> bytes:
        """What comes until the server ends the connection."""
        while True:
            try:
                more = await self.stream.receive_some(1 << 20)
            except trio.BrokenResourceError:
                more = b""
            if not more:
                data = bytes(self._in)
                self._in.clear()
                return data
            self._in += more

    async def greet(self, flags: int = WHOLE) -> None:
        magic, _, _ = nbd.GREETING.unpack(await self.receive(nbd.GREETING.size))
        assert magic == nbd.MAGIC
        await self.send(nbd.CLIENT_FLAGS.pack(flags))

    async def option_reply(self) -> tuple[int, bytes]:
        """Its type and its data."""
        header = await self.receive(nbd.OPTION_REPLY.size)
        magic, _, kind, length = nbd.OPTION_REPLY.unpack(header)
        assert magic == nbd.OPTION_REPLY_MAGIC
        return kind, await self.receive(length)

    async def ask(self, export: str) -> int:
        """INFO of an export; the type of the last reply."""
        name = export.encode()
        data = struct.pack(">I", len(name)) + name + bytes(2)
        await self.send(option(nbd.Option.INFO, data))
        while True:
            kind, _ = await self.option_reply()
            if kind != nbd.REP_INFO:
                return kind

    async def shake_hands(self, export: str = "") -> int:
        """To the transmission, with simple replies; the size."""
        await self.greet()
        return await self.choose(export)

    async def choose(self, export: str = "") -> int:
        """As ``shake_hands``, when flags have been said."""
        await self.send(go(export))
        size = 0
        while True:
            kind, data = await self.option_reply()
            if kind == nbd.REP_ACK:
                return size
            assert kind == nbd.REP_INFO, data
            if data[:2] == bytes(2):
                _, size, _ = nbd.INFO_EXPORT_DATA.unpack(data)

    async def reply(self, length: int = 0) -> Reply:
        """``length``: of the data of a READ."""
        header = await self.receive(nbd.SIMPLE_REPLY.size)
        magic, error, cookie = nbd.SIMPLE_REPLY.unpack(header)
        assert magic == nbd.SIMPLE_REPLY_MAGIC
        return Reply(error, cookie, await self.receive(length) if length and not error else b"")

    async def replies(self, lengths: dict[int, int]) -> dict[int, Reply]:
        """To requests by cookie, in any order. ``lengths``: of the data, 0 if it is no READ."""
        found: dict[int, Reply] = {}
        while len(found) < len(lengths):
            header = await self.receive(nbd.SIMPLE_REPLY.size)
            magic, error, cookie = nbd.SIMPLE_REPLY.unpack(header)
            assert magic == nbd.SIMPLE_REPLY_MAGIC
            assert cookie in lengths and cookie not in found
            data = await self.receive(lengths[cookie]) if not error else b""
            found[cookie] = Reply(error, cookie, data)
        return found


async def connect(place: Path | str) -> RawClient:
    """Over a Unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)

    def is_connected() -> bool:
        """Where too many wait to be accepted, a Unix socket refuses for the moment (EAGAIN); trio
        would take that for a connection that is being made."""
        try:
            sock.connect(str(place))
        except BlockingIOError:
            return False
        return True

    try:
        await until(is_connected)
    except BaseException:
        sock.close()
        raise
    return RawClient(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))


async def connected(place: Path | str, export: str = "") -> RawClient:
    """In the transmission."""
    client = await connect(place)
    await client.shake_hands(export)
    return client


class Corked(trio.abc.Stream):
    """Keeps what is sent until ``pull``: so it comes at once."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._kept = bytearray()
        self.keeps = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.keeps:
            self._kept += data
            await trio.lowlevel.checkpoint()
        else:
            await self._stream.send_all(data)

    async def pull(self) -> None:
        self.keeps = False
        await self._stream.send_all(bytes(self._kept))

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


async def behind_tls(plain: RawClient, trust: ssl.SSLContext) -> tuple[RawClient, Corked]:
    """A client that has chosen its export behind TLS, and what keeps back its records."""
    await plain.greet()
    await plain.send(option(nbd.Option.STARTTLS))
    assert await plain.option_reply() == (nbd.REP_ACK, b"")
    cork = Corked(plain.stream)
    client = RawClient(trio.SSLStream(cork, trust, server_hostname="localhost"))
    await client.choose()
    cork.keeps = True
    return client, cork
