"""SLP messages: recorded ones, attribute lists, filters, and what any host may send."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.discovery import slp
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.send_targets import Portal
from tests.vectors import slp as golden

DEFAULT = frozenset(("default",))
PORTAL = Portal(golden.HERE, 3260)


def test_what_slptool_asks() -> None:
    message = slp.message_untrusted(golden.TOOL_MULTICAST)
    assert (message.function, message.flags) == (slp.SERVICE_REQUEST, slp.MULTICAST)
    assert (message.xid, message.language) == (0xCBF1, "en")
    predicate = f"(iscsi-name={golden.TARGET})"
    expected = slp.Request(frozenset((golden.HERE,)), slp.TARGET, DEFAULT, predicate)
    assert slp.request_untrusted(message) == expected
    request = slp.request_untrusted(slp.message_untrusted(golden.TOOL_ATTRIBUTES))
    assert request == slp.Request(frozenset(), golden.URL, DEFAULT)
    types = slp.type_request_untrusted(slp.message_untrusted(golden.TOOL_TYPES))
    assert types == slp.Request(frozenset(), "*", DEFAULT)


def test_our_requests_are_those_of_slptool() -> None:
    """The same questions are the same bytes."""
    body = slp.service_request((), slp.TARGET, ["DEFAULT"], f"(iscsi-name={golden.TARGET})")
    assert slp.encode(slp.SERVICE_REQUEST, 0xAA7F, body) == golden.TOOL_REQUEST
    body = slp.attribute_request((), golden.URL, ["DEFAULT"])
    assert slp.encode(slp.ATTRIBUTE_REQUEST, 0x39D3, body) == golden.TOOL_ATTRIBUTES


def test_what_slpd_answers() -> None:
    message = slp.message_untrusted(golden.SERVICE_REPLY)
    assert slp.service_reply_untrusted(message) == (0, [slp.UrlEntry(golden.URL, 0x267)])
    error, attributes = slp.attribute_reply_untrusted(slp.message_untrusted(golden.ATTRIBUTE_REPLY))
    assert error == 0
    assert attributes == {
        "iscsi-name": [golden.TARGET],
        "portal-group": ["4"],
        "transports": ["tcp"],
        "auth-name": ["any"],
    }
    assert slp.group_untrusted(attributes) == 4
    assert slp.acknowledge_untrusted(slp.message_untrusted(golden.ACKNOWLEDGE)) == 0
    said = slp.advertisement_untrusted(slp.message_untrusted(golden.DA_ADVERT))
    assert (said.error, said.boot, said.scopes) == (0, 0x6B0707E4, DEFAULT)
    assert slp.agent_host_untrusted(said.url) == golden.HERE


def test_a_registration_and_its_end() -> None:
    """As slpd took them."""
    entry = slp.UrlEntry(golden.URL, 600)
    attributes = slp.encode_attributes(
        {
            "iscsi-name": [golden.TARGET],
            "portal-group": ["4"],
            "transports": ["tcp"],
            "auth-name": ["any"],
        }
    )
    body = slp.registration(entry, ["DEFAULT"], attributes)
    assert slp.encode(slp.SERVICE_REGISTRATION, 1, body, slp.FRESH) == golden.REGISTRATION
    body = slp.deregistration(entry, ["DEFAULT"])
    assert slp.encode(slp.SERVICE_DEREGISTRATION, 1, body) == golden.DEREGISTRATION


def test_an_answer_that_is_cut_short() -> None:
    """What is whole is taken, if the message says that it is cut short."""
    body = slp.service_reply(0, [slp.UrlEntry(golden.URL, 1)] * 3)[:-20]
    cut = slp.message_untrusted(slp.encode(slp.SERVICE_REPLY, 1, body, slp.OVERFLOW))
    assert len(slp.service_reply_untrusted(cut)[1]) == 2
    with pytest.raises(RemoteProtocolError, match="ends within a field"):
        slp.service_reply_untrusted(cut._replace(flags=0))


def test_authentication_blocks_are_skipped() -> None:
    block = struct.pack(">HH", 2, 10) + b"secret"
    url = golden.URL.encode()
    entry = struct.pack(">BHH", 0, 7, len(url)) + url + b"\x02" + block * 2
    body = struct.pack(">HH", 0, 2) + entry * 2
    message = slp.message_untrusted(slp.encode(slp.SERVICE_REPLY, 1, body))
    assert slp.service_reply_untrusted(message) == (0, [slp.UrlEntry(golden.URL, 7)] * 2)
    wrong = body.replace(struct.pack(">HH", 2, 10), struct.pack(">HH", 2, 3), 1)
    with pytest.raises(RemoteProtocolError, match="authentication block of 3 bytes"):
        slp.service_reply_untrusted(message._replace(body=wrong))


def extended(*extensions: tuple[int, int]) -> bytes:
    """A message with extensions: number, and how far behind this one the next begins (0: none)."""
    body = slp.service_request((), slp.TARGET, ["DEFAULT"])
    plain = slp.encode(slp.SERVICE_REQUEST, 1, body)
    at = len(plain)
    chain = b""
    for kind, step in extensions:
        following = at + len(chain) + step if step else 0
        chain += struct.pack(">H", kind) + following.to_bytes(3, "big") + b"data"
    whole = plain + chain
    return (
        whole[:2] + len(whole).to_bytes(3, "big") + whole[5:7] + at.to_bytes(3, "big") + whole[10:]
    )


def test_extensions() -> None:
    """Those that must be understood are found, and the body ends before the first."""
    for extensions, unknown in (
        ([(2, 0)], False),
        ([(2, 9), (0x8000, 0)], False),
        ([(0x4001, 0)], True),
        ([(2, 9), (0x7FFF, 0)], True),
    ):
        message = slp.message_untrusted(extended(*extensions))
        assert message.unknown is unknown
        assert slp.request_untrusted(message).about == slp.TARGET
    for wrong in (extended((2, -5)), extended((2, 0))[:-7], extended((2, 100))):
        with pytest.raises(RemoteProtocolError):
            slp.message_untrusted(wrong)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "cut off"),
        (b"\x02\x01\x00", "cut off"),
        (golden.TOOL_TYPES[:-1], "cut off"),
        (b"\x01" + golden.TOOL_TYPES[1:], "version 1"),
        (b"\x02\x01\xff\xff\xff" + golden.TOOL_TYPES[5:], "a message of 16777215 bytes"),
        (b"\x02\x01\x00\x00\x05" + golden.TOOL_TYPES[5:], "a message of 5 bytes"),
        (golden.TOOL_TYPES[:12] + b"\xff\xff" + golden.TOOL_TYPES[14:], "points behind"),
        (golden.TOOL_TYPES[:14] + b"\xff\xff" + golden.TOOL_TYPES[16:], "not ASCII"),
    ],
)
def test_bad_headers(raw: bytes, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        slp.message_untrusted(raw)


@pytest.mark.parametrize("cut", range(1, len(golden.TOOL_MULTICAST) - 16))
def test_a_body_that_is_cut_anywhere(cut: int) -> None:
    message = slp.message_untrusted(golden.TOOL_MULTICAST)
    with pytest.raises(RemoteProtocolError):
        slp.request_untrusted(message._replace(body=message.body[:-cut]))


# -- attributes ------------------------------------------------------------------------------------


def test_attribute_lists() -> None:
    found = slp.attributes_untrusted(r"(A=1, two words ,\2C\28x\29),keyword,(b=),(a=4),last")
    assert found == {"a": ["1", "two words", ",(x)", "4"], "keyword": [], "b": [""], "last": []}
    assert slp.attributes_untrusted("") == {}
    for wrong in ("(a=1", "(a)", "(a=1)(b=2)", r"(a=\FF)"):
        with pytest.raises(RemoteProtocolError):
            slp.attributes_untrusted(wrong)
    with pytest.raises(RemoteProtocolError, match="more than 1024 attributes"):
        slp.attributes_untrusted(",".join(f"k{number}" for number in range(1025)))


@given(
    st.dictionaries(st.from_regex("[a-z-]{1,9}", fullmatch=True), st.lists(st.text(), min_size=1))
)
def test_attributes_survive(attributes: dict[str, list[str]]) -> None:
    """Any text, but for white space around it."""
    stripped = {tag: [each.strip() for each in values] for tag, values in attributes.items()}
    assert slp.attributes_untrusted(slp.encode_attributes(stripped)) == stripped


# -- filters ---------------------------------------------------------------------------------------

DISK = {
    "iscsi-name": ["iqn.2026-11.example:disk"],
    "portal-group": ["4"],
    "auth-name": ["iqn.2026-11.example:a", "iqn.2026-11.example:b"],
    "alias": ["A  Disk, (big)"],
    "keyword": [],
}


@pytest.mark.parametrize(
    ("predicate", "matches"),
    [
        ("", True),
        ("(iscsi-name=IQN.2026-11.EXAMPLE:disk)", True),
        ("(iscsi-name=iqn.2026-11.example:disk2)", False),
        ("(auth-name=iqn.2026-11.example:b)", True),  # any of the values
        ("(portal-group>=4)", True),
        ("(portal-group>=10)", False),  # numbers, not text
        ("(portal-group<=10)", True),
        ("(portal-group<=3)", False),
        ("(alias>=a)", True),
        ("(missing=1)", False),
        ("(!(missing=1))", True),
        ("(alias=*)", True),
        ("(missing=*)", False),
        ("(iscsi-name=iqn.*:disk)", True),
        ("(iscsi-name=*example*)", True),
        ("(iscsi-name=iqn*iqn*)", False),
        ("(iscsi-name=*disk*disk)", False),
        (r"(alias=a disk\2C \28big\29)", True),
        ("(&(portal-group=4)(iscsi-name=*disk))", True),
        ("(&(portal-group=5)(iscsi-name=*disk))", False),
        ("(|(portal-group=5)(iscsi-name=*disk))", True),
        ("(& (portal-group=4) (!(portal-group=5)) )", True),
        ("(|(auth-name=any)(auth-name=iqn.2026-11.example:a))", True),
    ],
)
def test_filters(predicate: str, matches: bool) -> None:
    assert slp.matches_untrusted(predicate, DISK) is matches


@pytest.mark.parametrize(
    "predicate",
    ["a=b", "(a=b", "(a)", "(=b)", "(>=b)", "(a=b))", "(a=b)(c=d)", "(&)", "(!)", "(!(a=b)(c=d))",
     "(&(a=b)", "(!" * 17 + "(a=b)" + ")" * 17, r"(alias=\FF)"],
)  # fmt: skip
def test_what_is_no_filter(predicate: str) -> None:
    with pytest.raises(RemoteProtocolError):
        slp.matches_untrusted(predicate, DISK)


def test_a_filter_with_very_many_stars_takes_no_time() -> None:
    """Its time grows with its length, and no faster."""
    value = {"a": ["x" * 20000 + "y"]}
    assert not slp.matches_untrusted(f"(a={'*x' * 5000}*z)", value)
    assert slp.matches_untrusted(f"(a={'*x' * 5000}*y)", value)


# -- targets ---------------------------------------------------------------------------------------


def test_urls_of_targets() -> None:
    assert slp.target_url(PORTAL, golden.TARGET) == golden.URL
    assert slp.target_untrusted(golden.URL, 860) == (golden.TARGET, PORTAL)
    assert slp.target_url(Portal("2001:db8::1", 1), "iqn.2026-11.é:d/1") == (
        "service:iscsi:target://[2001:db8::1]:1/iqn.2026-11.%C3%A9:d%2F1"
    )
    for url, name, host, port in (
        ("service:iscsi:target://h/iqn.x:y", "iqn.x:y", "h", 860),
        ("SERVICE:iscsi:target://[::1]:5/iqn.x:%79/identity", "iqn.x:y", "::1", 5),
        (r"service:iscsi:target://h:6/iqn.x:\79", "iqn.x:y", "h", 6),  # as RFC 4018 writes it
    ):
        assert slp.target_untrusted(url, 860) == (name, Portal(host, port))


@pytest.mark.parametrize(
    "url",
    ["", "iscsi://h/n", "service:iscsi:target://h", "service:iscsi:target://h/",
     "service:iscsi:target://h:0/n", "service:iscsi:target://h:65536/n",
     "service:iscsi:target:///n", "service:iscsi:target://u@h/n", "service:iscsi:target://h/%0a",
     "service:iscsi:target://h/%ff", "service:iscsi:target://h/" + "n" * 224,
     "service:iscsi:target://" + "h" * 256 + "/n"],
)  # fmt: skip
def test_urls_of_no_target(url: str) -> None:
    with pytest.raises(RemoteProtocolError):
        slp.target_untrusted(url, 3260)


@given(st.text(min_size=1).filter(str.isprintable).filter(lambda name: len(name.encode()) < 224))
def test_any_name_survives_in_a_url(name: str) -> None:
    assert slp.target_untrusted(slp.target_url(PORTAL, name), 1) == (name, PORTAL)


def test_portal_groups() -> None:
    for values, tag in ((["7"], 7), (["65536"], None), (["x"], None), ([], None)):
        assert slp.group_untrusted({"portal-group": values}) == tag
    assert slp.group_untrusted({}) is None


def test_hosts_of_directory_agents() -> None:
    assert slp.agent_host_untrusted("service:directory-agent://10.0.0.1/x") == "10.0.0.1"
    for wrong in ("service:directory-agent:", "service:service-agent://h", "x", f"{'h' * 300}"):
        with pytest.raises(RemoteProtocolError):
            slp.agent_host_untrusted(wrong)


@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        message = slp.message_untrusted(b"\x02" + data)
        for decode in (
            slp.request_untrusted,
            slp.type_request_untrusted,
            slp.service_reply_untrusted,
            slp.attribute_reply_untrusted,
            slp.advertisement_untrusted,
        ):
            with contextlib.suppress(RemoteProtocolError):
                decode(message)
