"""iSNS messages: attributes, PDUs cut anywhere, and any bytes that a server may send."""

from __future__ import annotations

import contextlib
import ipaddress
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.discovery import isns
from iserblk.discovery.isns import HEADER, Attribute, Message, MessageReader
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.send_targets import Portal

US, TARGET, OTHER = "iqn.2026-11.example:host", "iqn.2026-11.example:a", "iqn.2026-11.example:b"
END = Attribute(isns.DELIMITER, b"")


def pdu(payload: bytes, flags: int, sequence: int = 0, function: int = 0x8002) -> bytes:
    return HEADER.pack(1, function, len(payload), isns.SERVER | flags, 7, sequence) + payload


def address(text: str) -> bytes:
    number = ipaddress.ip_address(text)
    prefix = b"" if number.version == 6 else bytes(10) + b"\xff\xff"
    return prefix + number.packed


def group(name: str, host: str, port: int, tag: int | None) -> list[Attribute]:
    return [
        isns.text(isns.GROUP_ISCSI_NAME, name),
        Attribute(isns.GROUP_ADDRESS, address(host)),
        isns.number(isns.GROUP_PORT, port),
        Attribute(isns.GROUP_TAG, b"" if tag is None else struct.pack(">I", tag)),
    ]


def test_request() -> None:
    """The bytes of a query, by hand from the standard's tables."""
    raw = isns.encode_request(isns.DEV_ATTR_QRY, 3, isns.target_query("iqn.2026-11.x:i"))
    assert raw.hex() == (
        "00010002003c8c0000030000"
        "0000002000000010" + b"iqn.2026-11.x:i\0".hex() + "000000210000000400000001"
        "0000000000000000"
        "0000002000000000"
        "0000002100000000"
    )


def test_the_registration_of_a_target() -> None:
    """The bytes, by hand from the standard's tables: entity, portals, node, portal groups."""
    portals = [Portal("192.0.2.1", 3260, 1), Portal("2001:db8::1", 861, 4)]
    attributes = isns.target_registration("iqn.x:t", "iqn.x:t", portals, 300)
    raw = isns.encode_request(isns.DEV_ATTR_REG, 3, attributes, isns.REPLACE)
    name = b"iqn.x:t\0".hex()
    one = "00000000000000000000ffffc0000201"
    two = "20010db8000000000000000000000001"
    assert raw.hex() == (
        "0001000101349c0000030000"
        f"0000002000000008{name}0000000100000008{name}"
        "0000000000000000"
        f"0000000100000008{name}00000002000000040000000200000006000000040000012c"
        f"0000001000000010{one}000000110000000400000cbc"
        f"0000001000000010{two}00000011000000040000035d"
        f"0000002000000008{name}000000210000000400000001"
        f"0000003000000008{name}0000003100000010{one}000000320000000400000cbc"
        "000000330000000400000001"
        f"0000003000000008{name}0000003100000010{two}00000032000000040000035d"
        "000000330000000400000004"
    )
    assert isns.portals_untrusted(attributes, "IQN.x:t", []) == portals


def test_a_message_of_several_pdus() -> None:
    """A target with very many portals; the PDUs are put together again."""
    portals = [Portal("192.0.2.1", port, 1) for port in range(1, 1500)]
    attributes = isns.target_registration(TARGET, TARGET, portals, 300)
    raw = isns.encode_request(isns.DEV_ATTR_REG, 3, attributes)
    (message,) = MessageReader().feed(raw)
    assert len(message.payload) > 2 * isns.MAXIMUM_PDU
    assert isns.attributes_untrusted(message.payload) == attributes


def test_the_registration_period() -> None:
    entity = [isns.text(isns.ENTITY_IDENTIFIER, "e"), END, isns.text(isns.ENTITY_IDENTIFIER, "e")]
    assert isns.period_untrusted([*entity, isns.number(isns.REGISTRATION_PERIOD, 77)], 5) == 77
    assert isns.period_untrusted(entity, 5) == 5
    with pytest.raises(RemoteProtocolError):
        isns.period_untrusted([*entity, Attribute(isns.REGISTRATION_PERIOD, bytes(8))], 5)


def test_registration_and_its_end() -> None:
    tags = [each.tag for each in isns.registration(US)]
    assert tags == [32, 0, 1, 2, 32, 33]
    assert isns.deregistration(US, "e")[-1] == Attribute(1, b"e\0\0\0")
    assert isns.entity_untrusted([isns.text(1, "isns.entity.1"), END]) == "isns.entity.1"
    assert isns.entity_untrusted([Attribute(1, b""), END]) == ""


@given(st.lists(st.tuples(st.integers(0, 99), st.binary(max_size=40)), max_size=20))
def test_round_trip(values: list[tuple[int, bytes]]) -> None:
    attributes = [Attribute(tag, raw + bytes(-len(raw) % 4)) for tag, raw in values]
    assert isns.attributes_untrusted(isns.encode_attributes(attributes)) == attributes


@pytest.mark.parametrize(
    "payload", ["00", "0000000100000004", "000000010000000361626300", "00000001fffffffc"]
)
def test_attributes_that_are_none(payload: str) -> None:
    with pytest.raises(RemoteProtocolError):
        isns.attributes_untrusted(bytes.fromhex(payload))


@pytest.mark.parametrize("size", [1, 5, 13, 1000])
def test_messages_cut_anywhere(size: int) -> None:
    """Two messages, the first in three PDUs."""
    stream = (
        pdu(b"abcd", isns.FIRST)
        + pdu(b"efgh", 0, 1)
        + pdu(b"ijkl", isns.LAST, 2)
        + pdu(b"", isns.FIRST | isns.LAST)
    )
    reader = MessageReader()
    found = [
        message
        for at in range(0, len(stream), size)
        for message in reader.feed(stream[at : at + size])
    ]
    assert found == [Message(0x8002, 7, b"abcdefghijkl"), Message(0x8002, 7, b"")]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (b"HTTP/1.0 400 Bad", "is this an iSNS server"),
        (pdu(b"", isns.AUTHENTICATED | isns.FIRST), "authentication"),
        (pdu(b"", isns.FIRST, 1), "PDU 1 of a message, expected 0"),
        (pdu(b"", isns.LAST), "PDU 0"),
        (pdu(b"", isns.FIRST) + pdu(b"", isns.LAST, 2), "PDU 2 of a message, expected 1"),
        (pdu(b"", isns.FIRST) * 2, "PDU 0 of a message, expected 1"),
    ],
)
def test_messages_that_are_none(stream: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        MessageReader().feed(stream)


def test_messages_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isns, "MAXIMUM_MESSAGE", 100)
    reader = MessageReader()
    reader.feed(pdu(bytes(60), isns.FIRST))
    with pytest.raises(RemoteProtocolError, match="more than 100 bytes"):
        reader.feed(pdu(bytes(60), 0, 1))


def test_responses() -> None:
    good = Message(0x8002, 1, bytes(4) + isns.encode_attributes([isns.number(33, 1)]))
    assert isns.response_untrusted(good) == (0, [isns.number(33, 1)])
    assert isns.response_untrusted(Message(0x8002, 1, b"\0\0\0\x09rubbish")) == (9, [])
    with pytest.raises(RemoteProtocolError, match="without a status"):
        isns.response_untrusted(Message(0x8002, 1, b"\0"))
    assert isns.status_words(8) == "the source is not authorized"
    assert isns.status_words(99) == "status 99"


def test_targets() -> None:
    """Targets stand behind the delimiter; initiators are left out; each target is listed once."""
    answer = [isns.number(33, 1), END]
    for name, kind in ((TARGET, 1), (US, 2), (OTHER, 3), (TARGET, 1)):
        answer += [isns.text(32, name), isns.number(33, kind)]
    assert isns.targets_untrusted(answer, []) == [TARGET, OTHER]
    assert isns.targets_untrusted([isns.text(32, TARGET), isns.number(33, 1), END], []) == []


def test_a_target_that_cannot_be_read_is_left_out() -> None:
    bad = (Attribute(32, b"\xff" * 4), isns.number(33, 1), isns.text(32, US), Attribute(33, b""))
    answer = [END, isns.text(32, TARGET), isns.number(33, 1), *bad]
    answer += [isns.text(32, OTHER), isns.number(33, 1)]
    left_out: list[str] = []
    assert isns.targets_untrusted(answer, left_out) == [TARGET, OTHER]
    assert ["not UTF-8" in left_out[0], "0 bytes instead of 4" in left_out[1]] == [True, True]


# shows: SYSTEM-10
def test_portals() -> None:
    answer = [isns.text(48, TARGET), END]
    answer += group(TARGET.upper(), "10.0.0.1", 3260, 1)
    answer += group(TARGET, "2001:db8::1", 860, 2)
    answer += group(TARGET, "10.0.0.2", 3260, None)  # the target is not there
    answer += group(TARGET, "10.0.0.3", 0x10000 | 3260, 1)  # UDP
    answer += group(OTHER, "10.0.0.4", 3260, 1)
    answer += group(TARGET, "10.0.0.1", 3260, 1)
    assert isns.portals_untrusted(answer, TARGET, []) == [
        Portal("10.0.0.1", 3260, 1),
        Portal("2001:db8::1", 860, 2),
    ]


@pytest.mark.parametrize(
    "attribute",
    [
        Attribute(48, b"\xff\xff\xff\xff"),
        Attribute(48, bytes(4)),
        Attribute(48, b"a\nb\0"),
        Attribute(48, b"x" * 224),
        Attribute(49, bytes(4)),
        Attribute(50, bytes(8)),
    ],
)
def test_a_portal_that_cannot_be_read_is_left_out(attribute: Attribute) -> None:
    """With the attributes that belong to it."""
    left_out: list[str] = []
    odd = group(TARGET, "10.0.0.1", 3260, 1)
    odd[[each.tag for each in odd].index(attribute.tag)] = attribute
    answer = [END, *odd, *group(TARGET, "10.0.0.2", 3260, 1)]
    assert isns.portals_untrusted(answer, TARGET, left_out) == [Portal("10.0.0.2", 3260, 1)]
    (words,) = left_out
    assert f"a portal of {TARGET}" in words and f"attribute {attribute.tag}" in words


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_any_bytes(parts: list[bytes]) -> None:
    reader = MessageReader()
    with contextlib.suppress(RemoteProtocolError):
        for part in parts:
            for message in reader.feed(part):
                isns.response_untrusted(message)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 32, 33, 48, 49, 50, 51]),
            st.one_of(
                st.binary(max_size=20).map(lambda raw: raw[: len(raw) & ~3]),
                st.sampled_from([b"\0\0\0\x01", address("10.0.0.1"), b"iqn.2026-11.x:a\0"]),
            ),
        ),
        max_size=30,
    )
)
def test_any_attributes(values: list[tuple[int, bytes]]) -> None:
    attributes = [Attribute(*value) for value in values]
    for read in (
        lambda given: isns.targets_untrusted(given, []),
        isns.entity_untrusted,
        lambda given: isns.portals_untrusted(given, "iqn.2026-11.x:a", []),
    ):
        with contextlib.suppress(RemoteProtocolError):
            read(attributes)


@given(st.integers(0, 63), st.integers(0, 255), st.integers(0, 60))
def test_a_byte_that_is_wrong(at: int, value: int, cut: int) -> None:
    """Mutations of a good answer."""
    payload = bytes(4) + isns.encode_attributes(group(TARGET, "10.0.0.1", 3260, 1))
    raw = bytearray(pdu(payload, isns.FIRST | isns.LAST))
    raw[at % len(raw)] = value
    with contextlib.suppress(RemoteProtocolError):
        for message in MessageReader().feed(bytes(raw[: len(raw) - cut])):
            isns.portals_untrusted([END, *isns.response_untrusted(message)[1]], TARGET, [])
