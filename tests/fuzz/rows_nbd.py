"""What an NBD client says: the handshake, and the transmission in its three modes; what the server
of a device says in the handshake for the kernel; and what two such servers say to each other."""

from __future__ import annotations

import socket
import struct

from iserblk.errors import RemoteProtocolError
from iserblk.nbd.buffers import INTAKE, Memory
from iserblk.nbd.handshake import Handshake, Look, Tls
from iserblk.nbd.kernel.handover import (
    VERSION,
    WITHOUT_LOSSES,
    Kind,
    OlderServer,
    Refused,
    Takeover,
    encode,
    encode_all,
    encode_refused,
    expect_untrusted,
    hello_untrusted,
    more_losses_untrusted,
)
from iserblk.nbd.kernel.links import shake_hands
from iserblk.nbd.messages import Negotiated
from iserblk.nbd.transmission import Request, Transmission
from tests.fuzz.engine import Case, Row
from tests.nbd import conversation as said
from tests.nbd.conversation import EXTENDED, MODES, SIMPLE
from tests.nbd.kernel.test_handover import EVERYTHING, LOSSES, connections, given
from tests.nbd.kernel.test_links import GOOD, GREETING, reply

_EXPORTS = {"lun0": said.export("lun0"), "lun1": said.export("lun1", read_only=True)}
_ALLOCATION = said.contexts("lun0", "base:allocation", "qemu:x")
_OPTIONS = [
    said.option(said.LIST),
    said.option(said.STRUCTURED_REPLY),
    said.option(said.EXTENDED_HEADERS),
    said.option(said.LIST_META_CONTEXT, said.contexts("lun0")),
    said.option(said.SET_META_CONTEXT, _ALLOCATION),
    said.option(said.INFO, said.about("lun1", 0, 1, 2, 3)),
    said.option(said.GO, said.about("lun0", 3)),
    said.option(said.EXPORT_NAME, b"lun0"),
    said.option(said.STARTTLS),
    said.option(said.ABORT),
    said.option(77, bytes(40)),
]


def _handshake(case: Case) -> None:
    """Options, each changed or not, in pieces."""
    chance = case.chance
    handshake = Handshake(_EXPORTS, "lun0", chance.choice(list(Tls)))
    flags = b"\0\0\0\3" if chance.random() < 0.95 else chance.randbytes(4)
    stream = flags + _stream(case, _OPTIONS)
    cut = int(chance.random() * len(stream))
    for piece in (stream[:cut], stream[cut:]):
        event = handshake.receive_data(piece)
        while event is not None:
            if isinstance(event, Look):
                handshake.looked()
            else:
                handshake.secured()
            event = handshake.receive_data(b"")
        handshake.data_to_send()


def _stream(case: Case, samples: list[bytes]) -> bytes:
    """Four messages. Most are as they should be, or the changed ones would never be reached."""
    chance = case.chance
    return b"".join(
        [chance.choice(samples) if chance.random() < 0.7 else case.data for _ in range(4)]
    )


class Owner:
    """Implements Answered."""

    def answered(self, request: Request) -> None:
        """Commands do not end here: their requests are replied to at once."""

    def told(self, losses: int) -> None:
        """Nor is anything lost."""


def _requests(mode: str) -> list[bytes]:
    extended = mode == EXTENDED
    found = [
        said.request(command, 7, 512, 4096, flags, extended=extended)
        for command, flags in (
            *((said.READ, 0), (said.READ, said.DF), (said.FLUSH, 0), (said.TRIM, said.FUA)),
            *((said.CACHE, 0), (said.WRITE_ZEROES, said.NO_HOLE | said.FAST_ZERO), (99, 0)),
            *((said.BLOCK_STATUS, said.REQ_ONE), (said.DISC, 0)),
        )
    ]
    found += [said.write(8, 0, bytes(length), extended=extended) for length in (0, 5, 700)]
    found.append(said.write(8, 0, bytes(300), said.NO_HOLE, extended=extended))
    found.append(said.write(8, 0, bytes(70_000), extended=extended))
    if extended:
        payload = struct.pack(">QI", 4096, 1)
        for command in (said.BLOCK_STATUS, said.READ):
            found.append(said.request(command, 9, 0, 12, said.PAYLOAD_LEN, payload, extended=True))
    return found


SAMPLES = {mode: _requests(mode) for mode in MODES}
EVERY_FLAG = 0x1DFD  # all flags that this server has, but READ_ONLY


def _transmission(mode: str, case: Case) -> None:
    """Requests, each changed or not, in pieces; replied to in pieces. No memory is left over."""
    chance = case.chance
    memory = Memory()
    structured = mode != SIMPLE
    agreed = Negotiated(
        "lun0",
        structured,
        mode == EXTENDED,
        structured and chance.random() < 0.8,
        EVERY_FLAG | (2 if chance.random() < 0.2 else 0),
    )
    stream = _stream(case, SAMPLES[mode])
    transmission = Transmission(agreed, Owner(), memory)
    try:
        while stream and not transmission.ended:
            count = 0
            most = 1 + int(chance.random() * len(stream))
            for buffer in transmission.get_buffers():
                piece = stream[count : min(most, count + len(buffer))]
                buffer[: len(piece)] = piece
                count += len(piece)
            stream = stream[count:]
            _answer(case, transmission, transmission.received(count))
    except RemoteProtocolError:
        transmission.discard()
        assert not transmission.open
        transmission.close()
        assert not memory.used
        raise
    if transmission.out_size:
        transmission.sent(transmission.out_size)
    assert not transmission.open
    transmission.close()
    assert not memory.used


def _answer(case: Case, transmission: Transmission, found: list[Request]) -> None:
    """Reply to what was ``found``, and to what there was no room for before."""
    while True:
        for each in found:
            if each.command == said.BLOCK_STATUS:
                transmission.reply_status(each, [(each.offset, each.length or 1, 0)])
            elif case.chance.random() < 0.2:
                transmission.refuse(each, 5, "no")
            else:
                transmission.reply(each)
        size = transmission.out_size
        if size and transmission.held:
            transmission.sent(size)
        elif size:
            transmission.sent(1 + int(case.chance.random() * size))
        if not transmission.held:
            return
        assert not transmission.open
        found = transmission.resume()
        assert found or not transmission.held  # with everything given back there is room


def _behind(case: Case) -> None:
    """What came behind the handshake."""
    length = case.chance.choice((0, 100, INTAKE, INTAKE + 1))
    agreed = Negotiated("lun0", False, False, False, EVERY_FLAG)
    transmission = Transmission(agreed, Owner(), Memory(), (case.data + bytes(length))[:length])
    _answer(case, transmission, transmission.resume())


def _server(case: Case) -> None:
    """A server that has said it all, and says no more."""
    ours, its = socket.socketpair()
    with ours, its:
        its.sendall(case.data)
        its.shutdown(socket.SHUT_WR)
        shake_hands(ours)


_UNPARSED = given(b"z" * 40_000, structured=True)
_HANDOVER = [
    *connections(given(), given(b"12345"), _UNPARSED),
    *(encode_all(count) for count in (1, 2, 3)),
    LOSSES,
    *(encode_refused("no", True, version) for version in (WITHOUT_LOSSES, VERSION)),
    *(encode(Kind.HELLO, version=version) for version in (WITHOUT_LOSSES, VERSION)),
    encode(Kind.TAKEN),
]


def _hand_over(case: Case) -> None:
    """Losses and connections, each message changed or not; and a successor's message."""
    chance = case.chance
    version = chance.choice((WITHOUT_LOSSES, VERSION))
    takeover = Takeover(version)
    packets = [
        *([LOSSES] if version != WITHOUT_LOSSES else []),
        *connections(*(chance.choice(EVERYTHING) for _ in range(3)), version=version),
        encode_all(3, version),
    ]
    try:
        if chance.random() < 0.2:
            match chance.randrange(3):
                case 0:
                    assert WITHOUT_LOSSES <= hello_untrusted(case.data) <= VERSION
                case 1:
                    expect_untrusted(case.data, Kind.TAKEN, version)
                case _:
                    assert more_losses_untrusted(case.data, 2) >= 0
            return
        for packet in packets:
            sent = packet if chance.random() < 0.9 else case.data
            descriptors = int(sent[10:12] == b"\0\3") if chance.random() < 0.97 else 2
            takeover.receive_untrusted(sent, descriptors)
        assert not takeover.complete or len(takeover.given) in (1, 2, 3)
        assert takeover.losses.told <= takeover.losses.losses
    except (Refused, OlderServer) as error:
        assert str(error).isprintable()


ROWS = (
    Row("NBD hand-over", _hand_over, _HANDOVER, each=4),
    Row("NBD server", _server, (GOOD, GREETING + reply(1 << 31 | 6, b"no export"))),
    Row("NBD handshake", _handshake, _OPTIONS, each=4),
    *(
        Row(
            f"NBD requests, {mode}",
            lambda case, mode=mode: _transmission(mode, case),  # type: ignore[misc]
            SAMPLES[mode],
            each=4,
        )
        for mode in MODES
    ),
    Row("NBD behind the handshake", _behind, SAMPLES[SIMPLE]),
)
