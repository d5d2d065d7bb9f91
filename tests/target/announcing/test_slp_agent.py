"""What the target answers to SLP requests; no sockets."""

from __future__ import annotations

import ipaddress

import pytest

from iserblk.discovery import slp
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.send_targets import Portal
from iserblk.target.announcing.announced import Announced
from iserblk.target.announcing.slp_agent import LIFETIME_S, ServiceAgent
from tests.discovery.test_slp import extended
from tests.vectors import slp as golden

HERE = golden.HERE
PORTALS = (Portal("0.0.0.0", 3260, 4),)


def agent(
    *portals: Portal, scopes: tuple[str, ...] = ("DEFAULT",), initiators: list[str] | None = None
) -> ServiceAgent:
    return ServiceAgent(Announced(golden.TARGET, portals or PORTALS, lambda: initiators), scopes)


def asked(
    body: bytes, function: int = slp.SERVICE_REQUEST, flags: int = 0, language: str = "en"
) -> bytes:
    return slp.encode(function, 9, body, flags, language)


def services(predicate: str = "", kind: str = slp.TARGET, scope: str = "DEFAULT") -> bytes:
    return slp.service_request((), kind, [scope], predicate)


def urls(answer: bytes | None) -> list[str]:
    assert answer is not None
    error, entries = slp.service_reply_untrusted(slp.message_untrusted(answer))
    assert error == 0 and all(each.lifetime == LIFETIME_S for each in entries)
    return [each.url for each in entries]


def error(answer: bytes | None) -> int:
    assert answer is not None
    return int.from_bytes(slp.message_untrusted(answer).body[:2], "big")


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (golden.TOOL_REQUEST, golden.OUR_SERVICES),
        (golden.TOOL_ATTRIBUTES, golden.OUR_ATTRIBUTES),
        (golden.TOOL_TYPES, golden.OUR_TYPES),
    ],
)
def test_what_slptool_took(question: bytes, answer: bytes) -> None:
    """The answers that OpenSLP's tool understood, byte for byte. proves: ISER-B.2-2"""
    assert agent().answer(question, HERE) == answer


def test_an_agent_that_has_answered_does_not_answer_again() -> None:
    assert agent().answer(golden.TOOL_MULTICAST, HERE, multicast=True) is None
    answer = agent().answer(golden.TOOL_MULTICAST, "10.55.0.2", multicast=True)
    assert urls(answer) == [golden.URL.replace(HERE, "10.55.0.2")]


@pytest.mark.parametrize(
    ("predicate", "kind", "found"),
    [
        ("", "service:iscsi", 2),  # the abstract type
        ("", "SERVICE:ISCSI:TARGET", 2),
        ("", "service:iscsi:sms", 0),
        ("(portal-group=4)", slp.TARGET, 1),
        ("(iscsi-name=iqn.2026-11.example:disk)", slp.TARGET, 2),
        ("(iscsi-name=iqn.2026-11.example:other)", slp.TARGET, 0),
        ("(|(auth-name=any)(auth-name=iqn.x:me))", slp.TARGET, 2),
        ("(transports=sctp)", slp.TARGET, 0),
    ],
)
def test_which_services(predicate: str, kind: str, found: int) -> None:
    """Who has nothing to tell answers unicast requests only."""
    both = agent(Portal("10.0.0.1", 3260, 4), Portal("::1", 1, 2), Portal("10.0.0.2", 860, 7))
    question = asked(services(predicate, kind))
    assert len(urls(both.answer(question, HERE))) == found
    heard = both.answer(question, HERE, multicast=True)
    assert heard is None if not found else len(urls(heard)) == found


def test_portals_as_the_peer_can_use_them() -> None:
    """All addresses means the one by which the question came; loopback is told to this machine."""
    many = Announced(
        golden.TARGET,
        [Portal("0.0.0.0", 1, 1), Portal("::", 1, 1), Portal("127.0.0.1", 2, 1),
         Portal("10.0.0.1", 3, 2)],
        lambda: None,
    )  # fmt: skip
    for here, hosts in (
        ("10.9.9.9", ["10.9.9.9", "10.0.0.1"]),
        ("127.0.0.1", ["127.0.0.1", "127.0.0.1", "10.0.0.1"]),
        ("fe80::1%eth0", ["fe80::1", "10.0.0.1"]),
    ):
        found = many.portals_at(here)
        assert [each.host for each in found] == hosts
        assert all(ipaddress.ip_address(each.host) for each in found)


def test_who_has_access() -> None:
    question = asked(slp.attribute_request((), slp.TARGET, ["DEFAULT"]), slp.ATTRIBUTE_REQUEST)
    for initiators, told in (
        (["iqn.x:a", "iqn.x:b"], ["iqn.x:a", "iqn.x:b"]),
        (None, ["any"]),
        ([f"iqn.x:{number}" for number in range(257)], None),
    ):
        answer = agent(initiators=initiators).answer(question, HERE, datagram=False)
        assert answer is not None
        _, attributes = slp.attribute_reply_untrusted(slp.message_untrusted(answer))
        assert attributes.get("auth-name") == told


def test_attributes_of_all_portals_and_of_some_tags() -> None:
    both = agent(Portal("10.0.0.1", 3260, 4), Portal("10.0.0.2", 3260, 7))
    for tags, found in (("", 4), ("portal-group", 1), ("PORTAL-*,transports", 2), ("x*", 0)):
        body = slp.attribute_request((), slp.TARGET, ["DEFAULT"])
        body = body[:-4] + len(tags).to_bytes(2, "big") + tags.encode() + bytes(2)
        answer = both.answer(asked(body, slp.ATTRIBUTE_REQUEST), HERE)
        assert answer is not None
        _, attributes = slp.attribute_reply_untrusted(slp.message_untrusted(answer))
        assert len(attributes) == found
        if "portal-group" in attributes:
            assert attributes["portal-group"] == ["4", "7"]


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (asked(services(scope="other")), slp.SCOPE_NOT_SUPPORTED),
        (asked(slp.service_request((), slp.TARGET, [])), slp.SCOPE_NOT_SUPPORTED),
        (asked(services("(a")), slp.PARSE_ERROR),
        (asked(services()[:-3]), slp.PARSE_ERROR),
        (asked(services()[:-2] + b"\0\x03spi"), slp.AUTHENTICATION_UNKNOWN),
        (asked(services("(a=b)"), language="de"), slp.LANGUAGE_NOT_SUPPORTED),
        (asked(slp.attribute_request((), slp.TARGET, ["DEFAULT"]), slp.ATTRIBUTE_REQUEST,
               language="fr"), slp.LANGUAGE_NOT_SUPPORTED),
        (asked(slp.attribute_request((), slp.TARGET, ["x"]), slp.ATTRIBUTE_REQUEST),
         slp.SCOPE_NOT_SUPPORTED),
        (asked(b"\0\0\xff\xff\0\x01x", slp.SERVICE_TYPE_REQUEST), slp.SCOPE_NOT_SUPPORTED),
        (extended((0x4001, 0)), slp.OPTION_NOT_UNDERSTOOD),
        (golden.REGISTRATION, slp.MESSAGE_NOT_SUPPORTED),  # we are no directory agent
        (golden.DEREGISTRATION, slp.MESSAGE_NOT_SUPPORTED),
        (asked(services(kind=slp.SERVICE_AGENT, scope="x")), slp.SCOPE_NOT_SUPPORTED),
    ],
)  # fmt: skip
def test_refusals(question: bytes, words: int) -> None:
    """An error by unicast; nothing by multicast."""
    assert error(agent().answer(question, HERE)) == words
    assert agent().answer(question, HERE, multicast=True) is None


def test_services_without_a_predicate_are_told_in_any_language() -> None:
    answer = agent().answer(asked(services(), language="de"), HERE)
    assert len(urls(answer)) == 1
    assert slp.message_untrusted(answer or b"").language == "de"


def test_the_agent_itself() -> None:
    question = asked(services(kind=slp.SERVICE_AGENT), flags=slp.MULTICAST)
    answer = agent(scopes=("DEFAULT", "lab")).answer(question, HERE, multicast=True)
    message = slp.message_untrusted(answer or b"")
    assert message.function == slp.SA_ADVERTISEMENT
    assert b"service:service-agent://10.55.0.1\0\x0bDEFAULT,lab" in message.body
    question = asked(services(kind=slp.DIRECTORY_AGENT), flags=slp.MULTICAST)
    assert agent().answer(question, HERE, multicast=True) is None


def test_answers_that_need_no_answer_get_none() -> None:
    for message in (golden.DA_ADVERT, golden.SERVICE_REPLY, golden.ACKNOWLEDGE):
        assert agent().answer(message, HERE) is None
    with pytest.raises(RemoteProtocolError):
        agent().answer(b"\x01" + golden.TOOL_REQUEST[1:], HERE)


def test_what_does_not_fit_into_a_datagram() -> None:
    """A part of the URLs, no attributes, and the flag that says so; all of it by TCP."""
    many = agent(
        *(Portal("10.0.0.1", port, 1) for port in range(1, 100)),
        initiators=[f"iqn.2026-11.example:host-{number}" for number in range(100)],
    )
    questions = (
        asked(services()),
        asked(slp.attribute_request((), slp.TARGET, ["DEFAULT"]), slp.ATTRIBUTE_REQUEST),
    )
    for question in questions:
        short, whole = many.answer(question, HERE), many.answer(question, HERE, datagram=False)
        assert short is not None and whole is not None
        assert len(short) <= slp.MTU < len(whole)
        assert slp.message_untrusted(short).flags == slp.OVERFLOW
        assert slp.message_untrusted(whole).flags == 0
    assert 10 < len(urls(many.answer(questions[0], HERE))) < 99
    assert len(urls(many.answer(questions[0], HERE, datagram=False))) == 99
