"""The messages between two servers of a device."""

from __future__ import annotations

import struct

import pytest

from iserblk.disk.seam import LossCount
from iserblk.errors import RemoteProtocolError
from iserblk.nbd.buffers import INTAKE
from iserblk.nbd.kernel.handover import (
    MOST,
    MOST_CONNECTIONS,
    TABLE,
    VERSION,
    WITHOUT_LOSSES,
    Event,
    Given,
    Kind,
    Message,
    OlderServer,
    Refused,
    State,
    Takeover,
    decode_untrusted,
    encode,
    encode_all,
    encode_connection,
    encode_losses,
    encode_refused,
    expect_untrusted,
    hello_untrusted,
    more_losses_untrusted,
)
from iserblk.nbd.messages import Negotiated


def given(
    unparsed: bytes = b"",
    structured: bool = False,
    extended: bool = False,
    contexts: bool = False,
) -> Given:
    return Given(Negotiated("", structured, extended, contexts, 0x1FD), unparsed)


EVERYTHING = [
    given(),
    given(b"x"),
    given(bytes(range(256)) * (INTAKE // 256)),
    given(b"y" * MOST, structured=True),
    given(structured=True, contexts=True),
    given(structured=True, contexts=True, extended=True),
]


LOSSES = encode_losses(LossCount(3, 2))


def heard(*packets: bytes) -> Takeover:
    """With a descriptor where one belongs; behind LOSSES."""
    takeover = Takeover()
    takeover.receive_untrusted(LOSSES, 0)
    assert takeover.losses == (3, 2)
    for packet in packets:
        takeover.receive_untrusted(packet, int(packet[10:12] == Kind.CONNECTION.to_bytes(2)))
    return takeover


def connections(*all_of_them: Given, version: int = VERSION) -> list[bytes]:
    return [packet for each in all_of_them for packet in encode_connection(each, version)]


@pytest.mark.parametrize("version", [WITHOUT_LOSSES, VERSION])
def test_golden_bytes(version: int) -> None:
    begin = b"iserblkN\0" + bytes((version,)) + b"\0"
    assert encode(Kind.HELLO, version=version) == begin + b"\1"
    assert encode_refused("no", True, version) == begin + b"\2\1no"
    first, second = encode_connection(given(b"abc", structured=True, contexts=True), version)
    assert first == begin + b"\3" + struct.pack(">HHI", 5, 0x1FD, 3)
    assert second == begin + b"\4abc"
    assert encode_all(4, version) == begin + b"\5\0\4"
    assert encode(Kind.TAKEN, version=version) == begin + b"\6"


def test_golden_bytes_of_losses() -> None:
    assert b"iserblkN\0\2\0\7" + struct.pack(">QQ", 3, 2) == LOSSES


def test_losses_that_are_heard_of_meanwhile() -> None:
    """Between any two messages; those of the first message may come behind them."""
    more = encode_losses(LossCount(5, 2))
    first, second = connections(given(b"abc"))
    takeover = heard(more, LOSSES, first, more, second, LOSSES, encode_all(1))
    assert takeover.complete and takeover.losses == (5, 2)
    with pytest.raises(RemoteProtocolError, match="out of place"):
        Takeover(WITHOUT_LOSSES).receive_untrusted(encode(Kind.LOSSES, LOSSES[12:], 1), 0)


def test_losses_behind_all() -> None:
    assert [more_losses_untrusted(LOSSES, known) for known in range(5)] == [3, 2, 1, 0, 0]
    for packet in (encode_all(1), encode(Kind.LOSSES, b"7"), LOSSES + b"\0"):
        with pytest.raises(RemoteProtocolError, match="behind ALL"):
            more_losses_untrusted(packet, 0)
    with pytest.raises(RemoteProtocolError, match="a message of 0 bytes"):
        more_losses_untrusted(b"", 0)


def test_every_connection_arrives() -> None:
    packets = [*connections(*EVERYTHING), encode_all(len(EVERYTHING))]
    assert max(map(len, packets)) <= MOST
    takeover = heard(*packets[:-1])
    assert not takeover.complete
    takeover.receive_untrusted(packets[-1], 0)
    assert takeover.complete
    assert takeover.given == EVERYTHING


def test_most_connections() -> None:
    most = [given()] * MOST_CONNECTIONS
    assert heard(*connections(*most), encode_all(MOST_CONNECTIONS)).complete
    with pytest.raises(RemoteProtocolError, match="more than a server has"):
        heard(*connections(*most, given()))


@pytest.mark.parametrize("may_end", [True, False])
def test_a_refusal_of_any_version(may_end: bool) -> None:
    with pytest.raises(Refused, match=r"^because\?$") as raised:
        heard(encode_refused("because\n", may_end, version=7))
    assert raised.value.may_end == may_end


def test_a_long_refusal_is_cut_between_characters() -> None:
    with pytest.raises(Refused) as raised:
        heard(encode_refused("ü" * 400, True))
    assert str(raised.value) == "ü" * 250


def test_another_version_is_no_breach() -> None:
    for packet in (encode(Kind.ALL, b"??", VERSION + 1), encode(Kind.TAKEN, b"", VERSION + 1)):
        with pytest.raises(Refused, match="hands over in version 3, and not 2"):
            heard(packet)
    with pytest.raises(Refused, match="version 0"):
        expect_untrusted(encode(Kind.HELLO, b"?", 0), Kind.HELLO)


def test_versions_of_a_hello() -> None:
    for version in (WITHOUT_LOSSES, VERSION):
        assert hello_untrusted(encode(Kind.HELLO, version=version)) == version
    for version in (0, VERSION + 1):
        with pytest.raises(Refused, match=f"version {version}, and not {VERSION}"):
            hello_untrusted(encode(Kind.HELLO, version=version))
    for packet in (encode(Kind.HELLO, b"?"), encode(Kind.TAKEN)):
        with pytest.raises(RemoteProtocolError, match="in place of HELLO"):
            hello_untrusted(packet)


def test_a_server_of_version_1() -> None:
    """It refuses a HELLO of ours, and takes one of its own version; it knows of no losses."""
    with pytest.raises(OlderServer, match="version 1, and not 2"):
        Takeover().receive_untrusted(encode_refused("what?", True, WITHOUT_LOSSES), 0)
    takeover = Takeover(WITHOUT_LOSSES)
    for packet in encode_connection(given(b"abc"), WITHOUT_LOSSES):
        takeover.receive_untrusted(packet, int(not takeover.given and packet[11] == 3))
    takeover.receive_untrusted(encode_all(1, WITHOUT_LOSSES), 0)
    assert takeover.complete and takeover.losses == (0, 0)
    with pytest.raises(Refused, match="no"):
        Takeover(WITHOUT_LOSSES).receive_untrusted(encode_refused("no", True, WITHOUT_LOSSES), 0)


@pytest.mark.parametrize(
    "packet",
    [
        encode_losses(LossCount(1, 2)),
        encode(Kind.LOSSES, b"short"),
        encode(Kind.CONNECTION, struct.pack(">HHI", 0, 1, 0)),
    ],
)
def test_losses_come_first(packet: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        Takeover().receive_untrusted(packet, int(packet[11] == Kind.CONNECTION))


def connection(modes: int = 0, unparsed: int = 0) -> bytes:
    return encode(Kind.CONNECTION, struct.pack(">HHI", modes, 1, unparsed))


@pytest.mark.parametrize(
    "packets",
    [
        [b""],
        [b"iserblkN\0\2\0"],
        [b"iserblkM\0\2\0\5\0\1"],
        [b"iserblkN\0\2\0\5" + bytes(MOST)],
        [encode_all(0)],
        [encode_all(1)],
        [connection(), encode_all(2)],
        [connection(), encode(Kind.ALL, b"\1")],
        [connection(8)],
        [connection(2)],
        [connection(4)],
        [encode(Kind.CONNECTION, b"short")],
        [connection(0, INTAKE + 1)],
        [connection(0, 1), connection()],
        [connection(0, 1), encode_all(1)],
        [connection(0, 1), encode(Kind.BYTES)],
        [connection(0, 1), encode(Kind.BYTES, b"12")],
        [connection(), encode(Kind.BYTES, b"1")],
        [encode(Kind.BYTES, b"1")],
        [connection(), encode_refused("late", True)],
        [encode(Kind.REFUSED)],
        [encode(Kind.HELLO)],
        [encode(Kind.TAKEN)],
        [connection(), encode_all(1), connection()],
        [b"iserblkN\0\2\0\x63"],
    ],
)
def test_what_does_not_belong_there(packets: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        heard(*packets)


@pytest.mark.parametrize(
    ("packet", "count"),
    [(connection(), 0), (connection(), 2), (encode_all(1), 1), (encode(Kind.BYTES, b"1"), 1)],
)
def test_descriptors_that_do_not_belong_there(packet: bytes, count: int) -> None:
    takeover = heard(connection(0, 1), encode(Kind.BYTES, b"1"))
    with pytest.raises(RemoteProtocolError, match=f"with {count} descriptors"):
        takeover.receive_untrusted(packet, count)


def test_the_other_side_expects_one_message() -> None:
    expect_untrusted(encode(Kind.TAKEN), Kind.TAKEN)
    assert decode_untrusted(encode(Kind.HELLO, b"x")) == Message(VERSION, Kind.HELLO, b"x")
    for packet in (b"", encode(Kind.HELLO), encode(Kind.TAKEN, b"x")):
        with pytest.raises(RemoteProtocolError):
            expect_untrusted(packet, Kind.TAKEN)


def test_only_what_is_offered_can_be_taken() -> None:
    ways = {before for (before, event) in TABLE if event is Event.TAKEN}
    assert ways == {State.OFFERED}
    assert not [before for before, _ in TABLE if before is State.GIVEN]
