"""The transmission phase of the NBD server without sockets: requests in any pieces, replies in any
pieces, and memory that is bounded and given back."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, EXTENT_ZERO
from iserblk.errors import RemoteProtocolError
from iserblk.nbd import messages as nbd
from iserblk.nbd.buffers import (
    CLIENT_BYTES,
    GUARANTEED,
    GUARANTEED_REQUESTS,
    INTAKE,
    LEAST,
    TOTAL_REQUESTS,
    Memory,
    size_of,
)
from iserblk.nbd.messages import Negotiated
from iserblk.nbd.transmission import (
    LEAST_MOVED,
    MOST_REFUSALS,
    MOST_REQUESTS,
    SMALL,
    STATUS_COST,
    Request,
    Transmission,
)
from tests.nbd.conversation import (
    BLOCK_STATUS,
    CACHE,
    DF,
    DISC,
    EXTENDED,
    FAST_ZERO,
    FLUSH,
    FUA,
    MODES,
    NO_HOLE,
    PAYLOAD_LEN,
    READ,
    REQ_ONE,
    SIMPLE,
    STRUCTURED,
    TRIM,
    WRITE,
    WRITE_ZEROES,
    Reply,
    replies,
    request,
    write,
)

EPERM, EINVAL, EOVERFLOW = 1, 22, 75
ERROR = 1 << 15 | 1
EVERYTHING = (
    nbd.HAS_FLAGS
    | nbd.SEND_FLUSH
    | nbd.SEND_FUA
    | nbd.SEND_TRIM
    | nbd.SEND_WRITE_ZEROES
    | nbd.SEND_FAST_ZERO
    | nbd.SEND_CACHE
)


def negotiated(mode: str, flags: int = EVERYTHING, contexts: bool = True) -> Negotiated:
    structured = mode != SIMPLE
    return Negotiated(
        "lun0",
        structured,
        mode == EXTENDED,
        contexts and structured,
        flags | (nbd.SEND_DF if structured else 0),
    )


class Owner:
    """Implements Answered."""

    def __init__(self) -> None:
        self.heard: list[Request] = []
        self.losses: list[int] = []

    def answered(self, request: Request) -> None:
        self.heard.append(request)

    def told(self, losses: int) -> None:
        self.losses.append(losses)


@dataclass
class Server:
    """One connection. ``said``: what has been sent. ``reads``: lengths by cookie."""

    mode: str = SIMPLE
    memory: Memory = field(default_factory=Memory)
    flags: int = EVERYTHING
    contexts: bool = True
    first: bytes = b""

    def __post_init__(self) -> None:
        self.transmission = Transmission(
            negotiated(self.mode, self.flags, self.contexts), Owner(), self.memory, self.first
        )
        self.said = bytearray()
        self.reads: dict[int, int] = {}

    def receive(self, data: bytes) -> tuple[int, list[Request]]:
        """One receive of as much as there is room for: how much, and what it completed."""
        count = 0
        for buffer in self.transmission.get_buffers():
            assert len(buffer)
            piece = data[count : count + len(buffer)]
            buffer[: len(piece)] = piece
            count += len(piece)
        return count, self.note(self.transmission.received(count)) if count else []

    def note(self, found: list[Request]) -> list[Request]:
        self.reads.update({each.cookie: each.length for each in found if each.command == READ})
        return found

    def feed(self, data: bytes) -> list[Request]:
        """All of ``data``, for which there must be room."""
        found: list[Request] = []
        while data:
            count, some = self.receive(data)
            assert count, "no room"
            data = data[count:]
            found += some
        return found

    def send(self, most: int = 1 << 40) -> None:
        """One send, which takes at most so many bytes."""
        transmission = self.transmission
        assert transmission.out_size == sum(map(len, transmission.out))
        data = b"".join(transmission.out)[:most]
        if data:
            self.said += data
            transmission.sent(len(data))

    def replies(self) -> list[Reply]:
        """All that was to be sent, since the last call."""
        self.send()
        said, self.said = bytes(self.said), bytearray()
        return replies(said, self.mode, self.reads)

    def request(self, command: int, **arguments: int | bytes) -> bytes:
        return request(command, 7, **arguments, extended=self.mode == EXTENDED)  # type: ignore[arg-type]

    def write(self, data: bytes, cookie: int = 7, flags: int = 0) -> bytes:
        return write(cookie, 512, data, flags, self.mode == EXTENDED)

    def at_rest(self) -> None:
        """Nothing is open, and all memory was given back."""
        assert self.transmission.open == 0 and not self.transmission.out
        self.transmission.close()
        assert self.memory.used == 0


@pytest.fixture(params=MODES)
def server(request: pytest.FixtureRequest) -> Server:
    return Server(request.param)


def pattern(seed: int, length: int) -> bytes:
    return (random.Random(seed).randbytes(4099) * (length // 4099 + 1))[:length]


# -- single requests -------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 512, 4096, 5000, 1 << 20])
def test_read(server: Server, length: int) -> None:
    (found,) = server.feed(server.request(READ, offset=512, length=length))
    assert (found.command, found.offset, found.length, found.flags) == (READ, 512, length, 0)
    assert len(found.data) == length
    found.data[:] = data = pattern(1, length)
    server.transmission.reply(found)
    (reply,) = server.replies()
    if server.mode == SIMPLE:
        assert reply == (7, 0, int(length > 0), data, 0)
    elif length:
        offset = 512 if server.mode == EXTENDED else 0
        assert reply == (7, 0, 1, struct.pack(">Q", 512) + data, offset)
    else:
        assert reply[:4] == (7, 0, 0, b"")
    server.at_rest()


def test_golden_bytes_of_a_read() -> None:
    """Sections "Simple reply message", "Structured reply chunk message" and, on the branch
    extension-ext-header, "Extended reply chunk message"."""
    for mode, golden in (
        (SIMPLE, "67446698 00000000 0000000000000007"),
        (STRUCTURED, "668e33ef 0001 0001 0000000000000007 0000000a 0000000000000200"),
        (
            EXTENDED,
            "6e8a278c 0001 0001 0000000000000007 0000000000000200 000000000000000a0000000000000200",
        ),
    ):
        server = Server(mode)
        (found,) = server.feed(server.request(READ, offset=512, length=2))
        found.data[:] = b"ab"
        server.transmission.reply(found)
        assert b"".join(server.transmission.out) == bytes.fromhex(golden) + b"ab"


@pytest.mark.parametrize(
    ("length", "flags"),
    [(0, 0), (1, FUA), (512, 0), (SMALL, 0), (SMALL + 1, 0), (300_000, FUA), (32 << 20, 0)],
)
def test_write(server: Server, length: int, flags: int) -> None:
    data = pattern(2, length)
    (found,) = server.feed(server.write(data, flags=flags))
    assert (found.command, found.offset, found.length, found.flags) == (WRITE, 512, length, flags)
    assert found.data == data
    server.transmission.reply(found)
    (reply,) = server.replies()
    assert reply == (7, 0, 0, b"", 512 if server.mode == EXTENDED else 0)
    server.at_rest()


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (FLUSH, 0),
        (FLUSH, FUA),
        (TRIM, 0),
        (TRIM, FUA),
        (CACHE, 0),
        (CACHE, FUA),
        (WRITE_ZEROES, 0),
        (WRITE_ZEROES, FUA | NO_HOLE | FAST_ZERO),
    ],
)
def test_commands_without_data(server: Server, command: int, flags: int) -> None:
    length = 1 << 40 if server.mode == EXTENDED else 0xFFFFFFFF
    (found,) = server.feed(server.request(command, offset=1 << 50, length=length, flags=flags))
    assert (found.command, found.flags, found.cookie) == (command, flags, 7)
    assert (found.offset, found.length) == (1 << 50, length)
    server.transmission.reply(found)
    assert server.replies()[0][:4] == (7, 0, 0, b"")
    server.at_rest()


def test_a_failure_has_words_where_there_is_room_for_them(server: Server) -> None:
    (found,) = server.feed(server.request(READ, length=512))
    server.transmission.refuse(found, 5, "the target is äway" * 400)
    (reply,) = server.replies()
    assert reply.error == 5
    if server.mode != SIMPLE:
        assert reply.kind == ERROR
        assert ("the target is äway" * 400).startswith(reply.data.decode())
        assert 4090 < len(reply.data) <= 4096
    server.at_rest()


@pytest.mark.parametrize("mode", [STRUCTURED, EXTENDED])
@pytest.mark.parametrize("flags", [0, REQ_ONE])
def test_block_status(mode: str, flags: int) -> None:
    server = Server(mode)
    (found,) = server.feed(server.request(BLOCK_STATUS, offset=512, length=3000, flags=flags))
    hole = EXTENT_HOLE | EXTENT_ZERO
    server.transmission.reply_status(
        found, [(512, 1000, hole), (1512, 1000, EXTENT_DATA), (2512, 1 << 40, hole)]
    )
    (reply,) = server.replies()
    # Section "Structured reply types": the last one may not be longer than was asked for.
    wanted = [(1000, 3), (1000, 0), (1000, 3)][: 1 if flags else 3]
    if mode == EXTENDED:
        assert reply.kind == 6 and reply.offset == 512
        assert reply.data[:8] == struct.pack(">II", 1, len(wanted))
        assert list(struct.iter_unpack(">QQ", reply.data[8:])) == wanted
    else:
        assert reply.kind == 5 and reply.data[:4] == b"\0\0\0\1"
        assert list(struct.iter_unpack(">II", reply.data[4:])) == wanted
    server.at_rest()


def test_a_large_block_status_is_bounded() -> None:
    server = Server(EXTENDED)
    (found,) = server.feed(server.request(BLOCK_STATUS, length=1 << 40))
    server.transmission.reply_status(found, [(512 * n, 512, n & 1) for n in range(100_000)])
    (reply,) = server.replies()
    assert len(reply.data) - 8 == STATUS_COST
    server.at_rest()


@pytest.mark.parametrize(
    ("payload", "fine"),
    [
        (struct.pack(">QI", 1 << 40, 1), True),
        (b"", False),
        (bytes(7), False),
        (struct.pack(">Q", 512), False),  # of no context
        (struct.pack(">QI", 512, 2), False),
        (struct.pack(">QII", 512, 1, 1), False),
        (struct.pack(">QI", 512, 1) + b"x", False),
        (bytes(257), False),
        (bytes(100_000), False),
    ],
)
def test_block_status_of_contexts_that_are_named(payload: bytes, fine: bool) -> None:
    """Section "Request types" on the branch extension-ext-header: what is wrong is consumed, and
    answered with EINVAL."""
    server = Server(EXTENDED)
    data = server.request(
        BLOCK_STATUS, offset=512, length=len(payload), flags=PAYLOAD_LEN, data=payload
    )
    found = server.feed(data + server.request(FLUSH))
    if fine:
        status = found.pop(0)
        assert (status.command, status.length, status.flags) == (BLOCK_STATUS, 1 << 40, 0)
        server.transmission.reply_status(status, [(512, 1 << 40, 0)])
    assert [each.command for each in found] == [FLUSH]
    server.transmission.reply(found[0])
    first, second = server.replies()
    assert (first.error, first.offset) == ((0, 512) if fine else (EINVAL, 512))
    assert second.error == 0
    server.at_rest()


# -- refusals --------------------------------------------------------------------------------------

READ_ONLY = (
    EVERYTHING & ~(nbd.SEND_TRIM | nbd.SEND_WRITE_ZEROES | nbd.SEND_FAST_ZERO) | nbd.READ_ONLY
)


def flush(server: Server) -> None:
    """The next request is understood."""
    (found,) = server.feed(request(FLUSH, 8, extended=server.mode == EXTENDED))
    server.transmission.reply(found)
    assert [each[:2] for each in server.replies()] == [(8, 0)]
    server.at_rest()


def test_the_answer_to_a_flush_that_tells_of_a_loss(server: Server) -> None:
    """Its client is told when all of it has been sent, and not when it never is."""
    owner = Owner()
    transmission = server.transmission = Transmission(
        negotiated(server.mode, server.flags, server.contexts), owner, server.memory
    )
    for losses, sent in [(1, True), (0, True), (2, False)]:
        owner.losses.clear()
        (found,) = server.feed(server.request(FLUSH))
        found.losses = losses
        transmission.refuse(found, 5, "lost")
        server.send(transmission.out_size - 1)
        assert owner.losses == []
        if sent:
            server.send()
        else:
            transmission.discard()
        assert owner.losses == ([losses] if losses and sent else [])
    server.at_rest()


@pytest.mark.parametrize(
    ("command", "flags", "payload"),
    [
        (8, 0, 0),  # RESIZE, of an extension
        (99, 0, 0),
        (0xFFFF, 0xFFFF & ~PAYLOAD_LEN, 0),
        (READ, NO_HOLE, 0),
        (WRITE, DF, 100),
        (WRITE, 1 << 15, 300_000),
        (FLUSH, REQ_ONE, 0),
        (TRIM, NO_HOLE, 0),
        (CACHE, FAST_ZERO, 0),
        (WRITE_ZEROES, REQ_ONE, 0),
        (BLOCK_STATUS, DF, 0),
    ],
)
def test_what_is_unknown_is_refused(server: Server, command: int, flags: int, payload: int) -> None:
    """Section "Error values": unknown commands, and flags that do not go with a command."""
    if server.mode == EXTENDED and payload:
        flags |= PAYLOAD_LEN
    data = server.request(command, length=payload or 512, flags=flags, data=bytes(payload))
    assert server.feed(data) == []
    (reply,) = server.replies()
    assert (reply.cookie, reply.error) == (7, EINVAL)
    assert server.mode == SIMPLE or reply.data.decode()
    flush(server)


@pytest.mark.parametrize("length", [0, 100, SMALL, 300_000])
def test_changes_of_a_read_only_export(length: int) -> None:
    for mode in MODES:
        server = Server(mode, flags=READ_ONLY)
        assert server.feed(server.write(bytes(length))) == []
        for command in (TRIM, WRITE_ZEROES):
            assert server.feed(server.request(command, length=512)) == []
        assert [each.error for each in server.replies()] == [EPERM] * 3
        flush(server)


@pytest.mark.parametrize("length", [1, SMALL, 300_000])
def test_a_refused_write_is_answered_when_its_data_has_come(server: Server, length: int) -> None:
    """libnbd takes an answer to what it has not sent whole for a bug."""
    data = server.write(bytes(length), flags=NO_HOLE)
    assert server.feed(data[:-1]) == [] and server.replies() == []
    assert server.feed(data[-1:]) == []
    assert [each.error for each in server.replies()] == [EINVAL]


@pytest.mark.parametrize(
    ("command", "flags", "offer"),
    [
        (FLUSH, 0, nbd.SEND_FLUSH),
        (TRIM, 0, nbd.SEND_TRIM),
        (CACHE, 0, nbd.SEND_CACHE),
        (WRITE_ZEROES, 0, nbd.SEND_WRITE_ZEROES),
        (WRITE_ZEROES, FAST_ZERO, nbd.SEND_FAST_ZERO),
        (WRITE_ZEROES, FUA, nbd.SEND_FUA),
    ],
)
def test_what_was_not_offered_is_refused(command: int, flags: int, offer: int) -> None:
    for mode in MODES:
        server = Server(mode, flags=EVERYTHING & ~offer)
        assert server.feed(server.request(command, length=512, flags=flags)) == []
        assert [each.error for each in server.replies()] == [EINVAL]
        (found,) = server.feed(server.request(READ, length=512))
        server.transmission.reply(found)
        server.send()
        server.at_rest()


def test_df_goes_with_structured_replies(server: Server) -> None:
    found = server.feed(server.request(READ, length=512, flags=DF))
    if server.mode == SIMPLE:
        assert found == [] and server.replies()[0].error == EINVAL
    else:
        assert found[0].flags == DF


def test_block_status_without_a_context() -> None:
    for mode in MODES:
        server = Server(mode, contexts=False)
        assert server.feed(server.request(BLOCK_STATUS, length=512)) == []
        assert [each.error for each in server.replies()] == [EINVAL]
        flush(server)


def test_a_read_that_is_too_large(server: Server) -> None:
    assert server.feed(server.request(READ, length=(32 << 20) + 1)) == []
    assert server.replies()[0].error == (EINVAL if server.mode == SIMPLE else EOVERFLOW)
    flush(server)


@pytest.mark.parametrize("command", [READ, FLUSH, TRIM, CACHE, WRITE_ZEROES, 99])
@pytest.mark.parametrize("length", [0, 1, 300_000])
def test_data_that_should_not_be_is_passed_over(command: int, length: int) -> None:
    """Section "Request message" on the branch extension-ext-header."""
    server = Server(EXTENDED)
    data = server.request(command, length=length, flags=PAYLOAD_LEN, data=bytes(length))
    assert server.feed(data) == []
    assert [each.error for each in server.replies()] == [EINVAL]
    flush(server)


def test_the_flag_of_extended_headers_has_no_meaning_without() -> None:
    for mode in (SIMPLE, STRUCTURED):
        server = Server(mode)
        assert server.feed(server.request(READ, length=512, flags=PAYLOAD_LEN)) == []
        assert server.feed(server.write(bytes(512), flags=PAYLOAD_LEN)) == []
        assert [each.error for each in server.replies()] == [EINVAL] * 2
        flush(server)


def test_an_extended_write_without_its_flag_has_its_data_all_the_same() -> None:
    server = Server(EXTENDED)
    (found,) = server.feed(server.request(WRITE, length=3, data=b"abc"))
    assert bytes(found.data) == b"abc" and found.flags == 0


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [0, FUA, 0xFFFF & ~PAYLOAD_LEN, PAYLOAD_LEN])
def test_disc_is_obeyed_whatever_its_flags_are(server: Server, flags: int) -> None:
    (before,) = server.feed(server.request(READ, length=512))
    assert server.feed(server.request(DISC, flags=flags)) == []
    assert server.transmission.ended and server.transmission.get_buffers() == []
    server.transmission.reply(before)  # section "Request types": what is open is answered
    assert [each.cookie for each in server.replies()] == [7]
    server.at_rest()


def test_nothing_behind_disc_is_looked_at(server: Server) -> None:
    (before,) = server.feed(
        server.request(FLUSH) + server.request(DISC) + server.write(b"abc") + bytes(100)
    )
    assert before.command == FLUSH
    assert server.transmission.resume() == []
    assert server.replies() == []


@pytest.mark.parametrize("length", [10, SMALL + 10])
def test_a_client_that_is_gone_in_the_middle_of_a_write(server: Server, length: int) -> None:
    """What has not come whole is not open: its connection has nothing to wait for."""
    assert server.feed(server.write(bytes(length))[:-1]) == []
    server.at_rest()


def test_a_lost_connection_gives_everything_back(server: Server) -> None:
    found = server.feed(
        server.request(READ, length=4096) * 3
        + server.request(TRIM, length=4096)
        + server.write(bytes(100))
        + server.write(bytes(SMALL + 1))
        + server.write(bytes(SMALL + 2))[:-1]
    )
    transmission = server.transmission
    transmission.reply(found[0])
    server.send(10)
    transmission.reply(found[1])
    transmission.discard()
    assert transmission.open == len(found) - 2 and not transmission.out_size
    assert transmission.get_buffers() == [] and transmission.resume() == []
    for each in found[2:-1]:
        transmission.reply(each)
    transmission.refuse(found[-1], 5, "lost")
    assert not transmission.out and not transmission.out_size
    server.at_rest()


@pytest.mark.parametrize(
    ("breach", "words"),
    [
        (bytes(64), "begins with 0x0"),
        (struct.pack(">IHHQQQ", 0x67446698, 0, 0, 0, 0, 0), "begins with 0x67446698"),
    ],
)
def test_what_is_no_request_ends_the_connection(server: Server, breach: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        server.feed(breach)


def test_headers_of_the_other_kind_end_the_connection(server: Server) -> None:
    other = SIMPLE if server.mode == EXTENDED else EXTENDED
    with pytest.raises(RemoteProtocolError, match="begins with"):
        server.feed(Server(other).request(READ, length=1) * 2)


def test_more_data_than_may_be_ends_the_connection(server: Server) -> None:
    flags = PAYLOAD_LEN if server.mode == EXTENDED else 0
    for length in ((32 << 20) + 1, 0xFFFFFFFF, (1 << 64) - 1):
        if length >> 32 and server.mode != EXTENDED:
            continue
        with pytest.raises(RemoteProtocolError, match=f"{length} bytes of data"):
            Server(server.mode).feed(server.request(WRITE, length=length, flags=flags))


def test_what_came_with_a_breach_is_not_left_open(server: Server) -> None:
    """The caller never hears of these requests: nothing would end them."""
    with pytest.raises(RemoteProtocolError):
        server.feed(server.request(READ, length=512) + server.write(b"abc") + bytes(64))
    assert server.transmission.open == 0
    assert server.transmission.get_buffers() == [] and server.transmission.resume() == []
    server.transmission.discard()
    server.at_rest()


def test_what_came_behind_the_handshake() -> None:
    server = Server(first=request(FLUSH, 1) + write(2, 0, b"abc")[:-1])
    (found,) = server.note(server.transmission.resume())
    assert found.cookie == 1
    (found,) = server.feed(b"c")
    assert bytes(found.data) == b"abc"
    with pytest.raises(RemoteProtocolError, match="before the handshake was over"):
        Server(first=bytes(INTAKE + 1))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_pause_in_the_middle_of_a_write(server: Server, read_only: bool) -> None:
    """It is received to its end, also where it is only passed over; what is behind it is for
    another process."""
    flags = EVERYTHING | (nbd.READ_ONLY if read_only else 0)
    server = Server(server.mode, flags=flags)
    transmission = server.transmission
    large, small = server.write(pattern(1, 300_000), 1), server.write(b"small", 2)
    assert server.feed(large[:100_000]) == []
    transmission.paused = True
    assert transmission.midway
    found = server.feed(large[100_000:] + small[:-2])
    assert not transmission.midway
    if read_only:
        assert found == []
    else:
        assert [bytes(each.data) for each in found] == [pattern(1, 300_000)]
        transmission.reply(found[0])
    assert [(each.cookie, each.error) for each in server.replies()] == [(1, EPERM * read_only)]
    assert transmission.resume() == []
    rest = transmission.unparsed()
    assert rest == small[:-2]
    server.at_rest()
    other = Server(server.mode, first=rest)
    assert other.transmission.resume() == []
    (request,) = other.feed(small[-2:])
    assert bytes(request.data) == b"small"
    transmission.paused = False


# -- streams in pieces, against a model ------------------------------------------------------------


@dataclass
class Expected:
    """What is to come of a request. ``error``: it is refused at once."""

    command: int
    flags: int
    offset: int
    length: int
    data: bytes
    error: int = 0


LENGTHS = (0, 1, 511, 4096, 5000, SMALL - 1, SMALL, SMALL + 1, 100_000, 300_000)
Kind = Callable[[int, int, str], tuple[bytes, Expected]]


def _write(cookie: int, length: int, mode: str, flags: int = 0) -> tuple[bytes, Expected]:
    data = pattern(cookie, length)
    error = EINVAL if flags & ~FUA else 0
    return (
        write(cookie, cookie * 512, data, flags, mode == EXTENDED),
        Expected(WRITE, flags, cookie * 512, length, data, error),
    )


def _read(cookie: int, length: int, mode: str) -> tuple[bytes, Expected]:
    return (
        request(READ, cookie, cookie * 512, length, extended=mode == EXTENDED),
        Expected(READ, 0, cookie * 512, length, pattern(cookie, length)),
    )


def _other(cookie: int, length: int, mode: str, command: int = FLUSH) -> tuple[bytes, Expected]:
    return (
        request(command, cookie, cookie, length, extended=mode == EXTENDED),
        Expected(command, 0, cookie, length, b"", 0 if command <= BLOCK_STATUS else EINVAL),
    )


def _status(cookie: int, length: int, mode: str) -> tuple[bytes, Expected]:
    if mode != EXTENDED:
        return _other(cookie, length, mode, TRIM)
    payload = struct.pack(">QI", length, 1)
    return (
        request(BLOCK_STATUS, cookie, cookie, 12, PAYLOAD_LEN, payload, extended=True),
        Expected(BLOCK_STATUS, 0, cookie, length, b""),
    )


def _strange(cookie: int, length: int, mode: str) -> tuple[bytes, Expected]:
    """Data that should not be, where there can be any."""
    if mode != EXTENDED:
        return _other(cookie, length, mode, 99)
    data = pattern(cookie, length)
    return (
        request(TRIM, cookie, 0, length, PAYLOAD_LEN, data, extended=True),
        Expected(TRIM, 0, 0, length, b"", EINVAL),
    )


KINDS: dict[str, Kind] = {
    "read": _read,
    "write": _write,
    "write with FUA": lambda cookie, length, mode: _write(cookie, length, mode, FUA),
    "refused write": lambda cookie, length, mode: _write(cookie, length, mode, NO_HOLE),
    "flush": _other,
    "unknown": lambda cookie, length, mode: _other(cookie, length, mode, 77),
    "status": _status,
    "strange": _strange,
}


@dataclass
class Run:
    """A stream of requests that arrives and is answered in pieces, as ``chance`` has it."""

    server: Server
    expected: dict[int, Expected]
    chance: random.Random
    open: list[Request] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)

    def take(self, found: list[Request]) -> None:
        for each in found:
            wanted = self.expected[each.cookie]
            assert not wanted.error
            assert (each.command, each.flags) == (wanted.command, wanted.flags)
            assert (each.offset, each.length) == (wanted.offset, wanted.length)
            if each.command == WRITE:
                assert each.data == wanted.data
            elif each.command == READ:
                each.data[:] = wanted.data
        self.open += found
        self.seen += [each.cookie for each in found]

    def answer(self) -> None:
        """One of those that are open. Its memory was nobody else's until now."""
        each = self.open.pop(self.chance.randrange(len(self.open)))
        if each.command <= WRITE:
            assert each.data == self.expected[each.cookie].data
        if each.command == BLOCK_STATUS:
            self.server.transmission.reply_status(each, [(each.offset, 1 << 40, 0)])
        elif self.chance.random() < 0.1:
            self.expected[each.cookie].error = 5
            self.server.transmission.refuse(each, 5, "no")
        else:
            self.server.transmission.reply(each)

    def play(self, stream: bytes) -> None:
        """Until all is received, answered and sent."""
        server, chance, transmission = self.server, self.chance, self.server.transmission
        while stream or self.open or transmission.out or transmission.held:
            step = chance.random()
            if step < 0.5 and stream and not transmission.ended:
                piece = chance.choice((1, 7, 28, 40, 4096, 70_000, 1 << 20))
                count, found = server.receive(stream[:piece])
                stream = stream[count:]
                self.take(found)
            elif step < 0.7 and self.open:
                self.answer()
            else:
                server.send(chance.choice((1, 15, 5000, 1 << 20)))
            if transmission.held:
                self.take(server.note(transmission.resume()))
                assert not transmission.held or self.open or transmission.out


requests_of_all_kinds = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.sampled_from(LENGTHS)), max_size=30
)


@settings(max_examples=60)
@given(st.sampled_from(MODES), requests_of_all_kinds, st.integers(0, 1 << 32), st.booleans())
def test_any_requests_in_any_pieces(
    mode: str, kinds: list[tuple[str, int]], seed: int, tight: bool
) -> None:
    """What comes out is what went in, in order, whatever the pieces are; each is answered once; and
    no memory is left over. ``tight``: others have all the memory beyond what is guaranteed."""
    memory = Memory()
    others = memory.total if tight else 0
    memory.used += others
    server = Server(mode, memory)
    expected: dict[int, Expected] = {}
    stream = b""
    for cookie, (kind, length) in enumerate(kinds):
        data, expected[cookie] = KINDS[kind](cookie, length, mode)
        stream += data
    stream += request(DISC, 99, extended=mode == EXTENDED)
    run = Run(server, expected, random.Random(seed))
    run.play(stream)
    assert server.transmission.ended
    assert run.seen == [cookie for cookie, each in expected.items() if each.error in (0, 5)]
    answers = {each.cookie: each for each in server.replies()}
    assert answers.keys() == expected.keys()
    for cookie, each in expected.items():
        assert answers[cookie].error == each.error
        if each.command == READ and not each.error:
            assert answers[cookie].data.endswith(each.data)
    memory.used -= others
    server.at_rest()


def test_byte_by_byte_as_in_one_piece(server: Server) -> None:
    lengths = (0, 3, SMALL, SMALL + 1)
    parts = [kind(9 + n, lengths[n % 4], server.mode) for n, kind in enumerate(KINDS.values())]
    stream = b"".join(data for data, _ in parts) + b"more"
    whole = Server(server.mode)
    at_once = [(each.cookie, bytes(each.data)) for each in whole.feed(stream) if each.command]
    single = []
    for at in range(len(stream)):
        count, found = server.receive(stream[at : at + 1])
        assert count == 1
        single += [(each.cookie, bytes(each.data)) for each in found if each.command]
    assert single == at_once and len(single) > 3
    assert b"".join(server.transmission.out) == b"".join(whole.transmission.out) != b""


@settings(max_examples=200)
@given(st.sampled_from(MODES), st.lists(st.binary(max_size=100), max_size=10))
def test_bytes_of_any_kind(mode: str, pieces: list[bytes]) -> None:
    server = Server(mode)
    try:
        for piece in pieces:
            for each in server.feed(server.request(FLUSH)[:4] + piece):
                server.transmission.reply(each)
            server.send()
    except RemoteProtocolError:
        server.transmission.discard()
    except AssertionError:
        assert server.transmission.ended  # by DISC
    server.at_rest()


# -- memory ----------------------------------------------------------------------------------------


def fill(server: Server, data: bytes) -> list[Request]:
    """The same request until there is no room for it."""
    found: list[Request] = []
    rest = b""
    while server.transmission.get_buffers():
        rest = rest or data * 8
        count, some = server.receive(rest)
        rest = rest[count:]
        found += some
    assert server.transmission.held
    return found


def release(server: Server, found: list[Request]) -> None:
    """Answer them, and what was held, until nothing is left."""
    while found:
        for each in found:
            server.transmission.reply(each)
        server.send()
        found = server.transmission.resume() if server.transmission.held else []


@pytest.mark.parametrize("length", [1, 4096, 100_000, 1 << 20, 16 << 20])
def test_a_client_that_reads_is_held_when_it_has_its_share(server: Server, length: int) -> None:
    found = fill(server, server.request(READ, length=length))
    held = max(length, LEAST) * len(found)
    assert held <= max(CLIENT_BYTES, length) and server.memory.used >= held
    assert server.memory.used <= max(CLIENT_BYTES, length)
    assert len(found) == min(MOST_REQUESTS, max(1, CLIENT_BYTES // size_of(length)))
    assert not server.transmission.starved
    release(server, found)
    server.at_rest()


@pytest.mark.parametrize("length", [1, 4096, SMALL, SMALL + 1, 1 << 20])
def test_a_client_that_writes_is_held_when_it_has_its_share(server: Server, length: int) -> None:
    found = fill(server, server.write(bytes(length)))
    assert server.memory.used <= CLIENT_BYTES
    assert len(found) == MOST_REQUESTS or length * len(found) > CLIENT_BYTES // 2
    release(server, found)
    server.at_rest()


def test_small_writes_that_pin_large_memory_are_counted_with_it(server: Server) -> None:
    """Each is followed by data that is passed over, so that it has an intake for itself."""
    flags = PAYLOAD_LEN if server.mode == EXTENDED else 0
    junk = server.request(WRITE, length=INTAKE, flags=NO_HOLE | flags, data=bytes(INTAKE))
    data = server.write(b"x") + junk
    found: list[Request] = []
    rest = data
    while server.transmission.get_buffers():
        count, some = server.receive(rest)
        rest = rest[count:] or data
        found += some
        server.send()
    assert len(found) <= CLIENT_BYTES // INTAKE + 1
    assert CLIENT_BYTES - INTAKE <= server.memory.used <= CLIENT_BYTES
    assert all(bytes(each.data) == b"x" for each in found)
    for each in found:
        server.transmission.reply(each)
    server.send()
    assert server.memory.used == 0
    server.transmission.resume()
    assert server.transmission.get_buffers()


@pytest.mark.parametrize("mode", [STRUCTURED, EXTENDED])
def test_answers_of_block_status_are_counted(mode: str) -> None:
    server = Server(mode)
    found = fill(server, server.request(BLOCK_STATUS, length=1 << 30))
    assert len(found) == CLIENT_BYTES // STATUS_COST
    extents = [(512 * n, 512, n & 1) for n in range(5000)]
    for each in found:
        server.transmission.reply_status(each, extents)
    assert server.transmission.out_size <= CLIENT_BYTES + 64 * len(found)
    assert server.transmission.resume() == [] and server.transmission.held  # not sent yet


def test_answers_to_what_is_refused_are_bounded(server: Server) -> None:
    """They belong to no request that is counted. The rest is refused when these have been sent."""
    count = 3 * MOST_REFUSALS
    junk = server.request(77) * (count // 2) + server.request(READ, length=1 << 31) * (count // 2)
    assert server.receive(junk) == (len(junk), [])
    transmission = server.transmission
    assert len(transmission.out) == MOST_REFUSALS and transmission.held
    answered = 0
    while transmission.out:
        answered += len(transmission.out)
        transmission.sent(transmission.out_size)
        assert transmission.resume() == []
    assert answered == count and not transmission.held


def test_requests_without_data_are_counted_too() -> None:
    """Each has a strand. Clients that have few of them go on."""
    memory = Memory()
    memory.open = TOTAL_REQUESTS - 1
    server, other = Server(memory=memory), Server(memory=memory)
    found = fill(server, server.request(TRIM, length=512) * MOST_REQUESTS)
    assert len(found) == GUARANTEED_REQUESTS and server.transmission.starved
    assert len(fill(other, other.request(TRIM, length=512) * 30)) == GUARANTEED_REQUESTS
    woken: list[bool] = []
    memory.wait(lambda: woken.append(True))
    for each in found[:2]:
        server.transmission.reply(each)
    server.transmission.sent(server.transmission.out_size)
    memory.share_out()
    assert woken and memory.open == TOTAL_REQUESTS - 1 + 2 * GUARANTEED_REQUESTS - 2


def test_replies_that_are_not_read_are_bounded(server: Server) -> None:
    """A client sends flushes, and does not take their replies."""
    found = fill(server, server.request(FLUSH))
    assert len(found) == MOST_REQUESTS
    for each in found:
        server.transmission.reply(each)
    assert server.transmission.resume() == [] and server.transmission.held
    server.send(100 * {SIMPLE: 16, STRUCTURED: 20, EXTENDED: 32}[server.mode])
    more = server.transmission.resume()
    assert len(more + fill(server, server.request(FLUSH))) == 100


def test_each_client_has_what_is_guaranteed() -> None:
    memory = Memory()
    memory.used = memory.total
    server = Server(SIMPLE, memory)
    found = fill(server, server.request(READ, length=LEAST))
    assert len(found) == GUARANTEED // LEAST
    assert server.transmission.starved
    release(server, found)


def test_what_others_give_back_is_used() -> None:
    memory = Memory()
    memory.used = memory.total
    server = Server(SIMPLE, memory)
    server.feed(server.request(READ, length=GUARANTEED + 1))
    assert server.transmission.held and server.transmission.starved
    assert server.transmission.get_buffers() == []
    woken: list[int] = []
    memory.wait(lambda: woken.append(1))
    memory.give_back(2 * GUARANTEED)
    memory.share_out()
    assert woken == [1]
    (found,) = server.transmission.resume()
    assert found.length == GUARANTEED + 1
    assert not server.transmission.held and not server.transmission.starved


@pytest.mark.parametrize("end", ["discard", "close"])
def test_a_client_that_ends_wakes_those_that_wait(end: str) -> None:
    server = Server()
    server.feed(server.write(bytes(4 << 20))[:-1])
    woken: list[int] = []
    server.memory.wait(lambda: woken.append(1))
    getattr(server.transmission, end)()
    assert woken == [1] and server.memory.used == 0


def test_a_client_that_stalls_with_much_memory_hoards(server: Server) -> None:
    transmission, size = server.transmission, LEAST_MOVED + GUARANTEED + 10
    data = server.write(bytes(size))
    server.feed(data[:1000])
    assert not transmission.hoards()  # its turn may have come a moment ago
    assert transmission.hoards()
    server.feed(data[1000:1010])
    assert transmission.hoards()  # a byte now and then does not help
    server.feed(data[1010:-1])
    assert not transmission.hoards()
    (found,) = server.feed(data[-1:])
    for _ in range(3):
        assert not transmission.hoards()  # it is the disk's turn
    transmission.reply(found)
    server.send()
    (found,) = server.feed(server.request(READ, length=size))
    transmission.reply(found)
    assert not transmission.hoards() and transmission.hoards()
    server.send(LEAST_MOVED)
    assert not transmission.hoards() and not transmission.hoards() and transmission.hoards()
    server.send()
    for _ in range(3):
        assert not transmission.hoards()
    server.at_rest()


def test_little_memory_is_no_hoard(server: Server) -> None:
    server.feed(server.write(bytes(GUARANTEED))[:-1])
    for _ in range(3):
        assert not server.transmission.hoards()


def test_reads_of_many_lengths_do_not_keep_memory_without_bound(server: Server) -> None:
    memory = server.memory
    for length in range(0, 400_000, 997):
        found = server.feed(server.request(READ, length=length) * 3)
        release(server, found)
        assert memory.kept <= 16 << 20
    server.transmission.close()
    assert memory.used == 0


def test_memory_is_used_again(server: Server) -> None:
    """Most clients ask for one length only."""
    data = server.request(READ, length=8192)
    first = server.feed(data * 4)
    places = {id(each.data.obj) for each in first}
    release(server, first)
    for _ in range(3):
        again = server.feed(data * 4)
        assert {id(each.data.obj) for each in again} == places
        release(server, again)
    server.at_rest()


def test_a_waiter_tells_its_owner_when_its_command_has_ended() -> None:
    owner = Owner()
    one = Request(owner)
    one.pending = 2
    one.task_done()
    assert not owner.heard
    one.task_done()
    assert owner.heard == [one]
