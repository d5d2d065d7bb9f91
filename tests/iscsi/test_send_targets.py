"""SendTargets: addresses, records, and the text operation, whole and in parts, of both sides."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.iscsi import bhs, pdu, send_targets
from iserblk.iscsi.send_targets import (
    MAXIMUM_LEFT_OUT,
    DiscoveryInitiator,
    Portal,
    TargetRecord,
    needs_interface,
    pairs_untrusted,
    portal_untrusted,
    records_untrusted,
)
from iserblk.iscsi.text import encode
from iserblk.iscsi.text_target import TextResponder

A, B = "iqn.2026-11.example:a", "iqn.2026-11.example:b"


# shows: SYSTEM-8
@pytest.mark.parametrize(
    ("text", "portal"),
    [
        ("10.0.0.1:5003,1", Portal("10.0.0.1", 5003, 1)),
        ("[1080:0:0:0:8:800:200C:417A],65", Portal("1080::8:800:200c:417a", 3260, 65)),
        ("[1080::8:800:200C:417A]:5003,1", Portal("1080::8:800:200c:417a", 5003, 1)),
        ("computingcenter.example.com,23", Portal("computingcenter.example.com", 3260, 23)),
        ("10.0.0.1", Portal("10.0.0.1", 3260)),  # of a redirect: no tag
        ("10.0.0.1:3260,", Portal("10.0.0.1", 3260)),
        ("10.0.0.1:0x1000,0xffff", Portal("10.0.0.1", 4096, 65535)),
        ("10.0.0.1,1,0", Portal("10.0.0.1", 3260, 1, 0)),
        ("10.0.0.1,1,", Portal("10.0.0.1", 3260, 1)),  # a blank type is not known
        ("10.0.0.1,1,1", Portal("10.0.0.1", 3260, 1, 1)),
        ("10.0.0.1,1,2", Portal("10.0.0.1", 3260, 1, 2)),
        ("10.0.0.1:3260,2,3", Portal("10.0.0.1", 3260, 2, 3)),
        ("10.0.0.1,1,9", Portal("10.0.0.1", 3260, 1)),  # an unknown type
        ("10.0.0.1,1,iser,more", Portal("10.0.0.1", 3260, 1)),
        ("fe80::1,1", Portal("fe80::1", 3260, 1)),  # no brackets: it has no port then
        ("[fe80::1%eth0]:3260,1", Portal("fe80::1", 3260, 1)),
        ("münchen.example:1,1", Portal("münchen.example", 1, 1)),
        *((f"h,{tag}", Portal("h", 3260)) for tag in ("-1", "65536", "x")),  # no tag
        ("10.0.0.1:3260,1 ", Portal("10.0.0.1", 3260, 1)),
        ("10.0.0.1:0,1", Portal("10.0.0.1", 3260, 1)),
    ],
)
def test_addresses(text: str, portal: Portal) -> None:
    """The examples of the standard, and what is tolerated. A fourth field is the type of the
    portal; a type that nobody has defined is as good as none.

    proves: ISER-7143-13.8-1, ISER-GEN-4-1, ISER-GEN-4-3
    """
    assert portal_untrusted(text) == portal


@pytest.mark.parametrize(
    "text",
    [
        *("", ",1", ":3260,1", "h:65536,1", "h:x,1", "[::1,1", "[x],1", "[fe80::1%eth0,1"),
        *("[::1]3260,1", "a b,1", "user@h,1", "h/x,1", "::::,1", "h" * 256, "\u202eh\n,1"),
    ],
)
def test_no_addresses(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        portal_untrusted(text)


@given(st.text(max_size=80))
def test_any_address(text: str) -> None:
    with contextlib.suppress(RemoteProtocolError):
        portal = portal_untrusted(text)
        assert portal.host and 1 <= portal.port <= 65535


@given(
    st.lists(st.tuples(st.sampled_from(["TargetName", "TargetAddress", "X"]), st.text(max_size=40)))
)
def test_any_records(pairs: list[tuple[str, str]]) -> None:
    with contextlib.suppress(RemoteProtocolError):
        for record in records_untrusted(pairs, Portal("h", 1)).targets:
            assert record.name and record.portals


# shows: SYSTEM-8, SYSTEM-22
def test_records() -> None:
    """Records keep their order; a repeated address counts once; none means the portal asked."""
    pairs = [
        ("TargetName", B),
        ("TargetAddress", "10.0.0.1:3260,1"),
        ("TargetAddress", "0.0.0.0:860,2"),
        ("TargetName", A),
        ("X-vendor", "?"),
        ("TargetName", B),
        ("TargetAddress", "10.0.0.1:3260,1"),
        ("TargetAddress", "[::1],3"),
    ]
    here = Portal("10.0.0.9", 3333)
    assert records_untrusted(pairs, here).targets == [
        TargetRecord(
            B, (Portal("10.0.0.1", 3260, 1), Portal("10.0.0.9", 860, 2), Portal("::1", 3260, 3))
        ),
        TargetRecord(A, (here,)),
    ]
    assert records_untrusted(pairs, here).left_out == []
    assert records_untrusted([("TargetName", A)]).targets == [TargetRecord(A, ())]


@pytest.mark.parametrize(
    "pairs",
    [
        [("TargetAddress", "h,1")],
        [("TargetName", "")],
        [("TargetName", "x" * 224)],
        [("TargetName", "a\nb")],
        [("", "rubbish")],
    ],
)
def test_no_records(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(RemoteProtocolError):
        records_untrusted(pairs)


@pytest.mark.parametrize("address", ["", " ", ",1", "0.0.0.0:0,1", "10.0.0.9:0"])
def test_addresses_that_do_not_tell_the_portal(address: str) -> None:
    """It is that which was asked, wholly or in part."""
    here = Portal("10.0.0.9", 3333)
    told = records_untrusted([("TargetName", A), ("TargetAddress", address)], here)
    ((portal,),) = (each.portals for each in told.targets)
    assert (portal.host, portal.port, told.left_out) == ("10.0.0.9", 3333, [])


@pytest.mark.parametrize(
    "odd",
    [
        b"TargetAddress=10.0.0.1:iscsi,1",
        b"TargetAddress=[fe80::1%eth0,1",
        b"TargetAddress=10.0.0.1:65536,1",
        b"TargetAddress=\xff\xfe,1",
        b"TargetName=\0TargetAddress=10.9.9.9,1",
        b"TargetName=iqn.\xff\0TargetAddress=10.9.9.9,1",
        b"TargetName=" + b"x" * 224 + b"\0TargetAddress=10.9.9.9,1",
        b"no pair",
        b"\xff\xff",
    ],
)
def test_what_cannot_be_read_does_not_hide_the_rest(odd: bytes) -> None:
    """It is named. Addresses behind a name that is none are left out with it."""
    before = encode([("TargetName", A), ("TargetAddress", "10.0.0.1,1"), ("TargetAlias", "one")])
    after = encode([("TargetName", B), ("TargetAddress", "10.0.0.2,1"), ("TargetAlias", "two")])
    told = records_untrusted(pairs_untrusted(before + odd + b"\0" + after), Portal("h", 1))
    assert told.targets == [
        TargetRecord(A, (Portal("10.0.0.1", 3260, 1),)),
        TargetRecord(B, (Portal("10.0.0.2", 3260, 1),)),
    ]
    (words,) = told.left_out
    assert "\n" not in words and words.isprintable()


def test_what_is_left_out_does_not_pile_up() -> None:
    pairs = [("TargetName", "iqn.x"), *[("TargetAddress", "no address at all")] * 5000]
    told = records_untrusted(pairs)
    assert len(told.left_out) == MAXIMUM_LEFT_OUT + 1 and told.left_out[-1] == "and more"


def test_a_target_whose_only_address_cannot_be_read() -> None:
    """It is looked for where it was heard of."""
    here = Portal("10.0.0.9", 3333)
    told = records_untrusted([("TargetName", A), ("TargetAddress", "10.0.0.1:x,1")], here)
    assert told.targets == [TargetRecord(A, (here,))]
    assert told.left_out == ["TargetAddress '10.0.0.1:x,1': the port is no number from 0 to 65535"]


def test_link_local_addresses() -> None:
    """Of the link on which the target was asked, if that has a name."""
    pairs = [("TargetName", A), ("TargetAddress", "[fe80::1%target0]:860,1")]
    for here, host in (("fe80::9%eth1", "fe80::1%eth1"), ("10.0.0.9", "fe80::1")):
        ((record,), _) = records_untrusted(pairs, Portal(here, 3260))
        assert record.portals == (Portal(host, 860, 1),)
    assert [needs_interface(host) for host in ("fe80::1", "fe80::1%eth1", "2001:db8::1")] == [
        *(True, False, False)
    ]
    assert [needs_interface(host) for host in ("169.254.0.1", "host", "")] == [False] * 3


# -- the text operation --------------------------------------------------------------------------


def ask_ours(limit: int, count: int) -> tuple[DiscoveryInitiator, list[int], dict[str, list[str]]]:
    """Our initiator asks our responder; returns it, the lengths of the parts, and the targets."""
    targets = {
        f"{A}{i:05}": [f"10.0.{i >> 8}.{i & 255}:3260,1", "[::1]:3260,2"] for i in range(count)
    }
    responder, one, lengths = TextResponder(), DiscoveryInitiator(7, 3), []
    requests, stat_sn = [one.ask("All")], 3
    while requests:
        header, data = requests.pop()
        request = pdu.TextRequest.unpack_from(header)
        assert request.exp_stat_sn == stat_sn
        assert request.cmd_sn == 7  # immediate: it uses up none
        part = responder.receive(request, data, targets, limit)
        assert part is not None and len(part.data) <= limit
        lengths.append(len(part.data))
        requests += one.receive(response(one, stat_sn=stat_sn, **part._asdict()), part.data)
        stat_sn += 1
    return one, lengths, targets


def response(one: DiscoveryInitiator, **fields: object) -> bytes:
    data = fields.pop("data", b"")
    assert isinstance(data, bytes)
    values: dict[str, object] = {
        "itt": 1,
        "data_length": len(data),
        "stat_sn": 3,
        "exp_cmd_sn": 7,
        "max_cmd_sn": 7,
        **fields,
    }
    return pdu.TextResponse(**values).pack()  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "count"), [(8192, 1), (8192, 3000), (512, 100), (8192, 0)])
def test_answers_in_parts(limit: int, count: int) -> None:
    one, lengths, targets = ask_ours(limit, count)
    assert one.answer is not None
    records = records_untrusted(one.answer).targets
    assert [record.name for record in records] == list(targets)
    assert all(len(record.portals) == 2 for record in records)
    assert len(lengths) == max(1, -(-sum(lengths) // limit))


def test_a_question_in_parts() -> None:
    """The target collects a question that comes with C."""
    responder = TextResponder()
    text = encode([("SendTargets", "All")])
    first = pdu.TextRequest(flags=0x40, data_length=5, itt=1, cmd_sn=1, exp_stat_sn=1)
    part = responder.receive(first, text[:5], {A: ["h:1,1"]}, 8192)
    assert part is not None and (part.flags, part.data) == (0, b"")
    rest = pdu.TextRequest(data_length=len(text) - 5, itt=1, ttt=part.ttt, cmd_sn=1, exp_stat_sn=2)
    whole = responder.receive(rest, text[5:], {A: ["h:1,1"]}, 8192)
    assert whole is not None
    assert (whole.flags, whole.ttt) == (bhs.FLAG_FINAL, bhs.NO_TAG)
    assert whole.data == encode([("TargetName", A), ("TargetAddress", "h:1,1")])


def test_stale_tags_are_refused() -> None:
    responder = TextResponder()
    text = encode([("SendTargets", "All")])
    first = pdu.TextRequest(data_length=len(text), itt=1, cmd_sn=1, exp_stat_sn=1)
    part = responder.receive(first, text, {A: ["h:1,1"]}, 16)
    assert part is not None
    for itt, ttt in ((1, part.ttt + 1), (2, part.ttt)):
        stale = pdu.TextRequest(data_length=0, itt=itt, ttt=ttt, cmd_sn=1, exp_stat_sn=1)
        assert responder.receive(stale, b"", {A: ["h:1,1"]}, 16) is None
    again = responder.receive(first, text, {A: ["h:1,1"]}, 8192)  # a new operation resets
    assert again is not None and again.flags == bhs.FLAG_FINAL


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"flags": 0xC0}, "both F and C"),
        ({"flags": 0}, "no tag"),
        ({"flags": 0x80, "itt": 2}, "in a discovery session"),
        ({"opcode": bhs.SCSI_RESPONSE}, "in a discovery session"),
        ({"opcode": bhs.LOGOUT_RESPONSE}, "in a discovery session"),
    ],
)
def test_nonsense(fields: dict[str, object], words: str) -> None:
    one = DiscoveryInitiator(7, 3)
    one.ask("All")
    with pytest.raises(RemoteProtocolError, match=words):
        one.receive(response(one, **fields), b"")


def test_answers_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is bounded in PDUs and in bytes."""
    monkeypatch.setattr(send_targets, "MAXIMUM_PARTS", 10)
    one = DiscoveryInitiator(7, 3)
    one.ask("All")
    with pytest.raises(RemoteProtocolError, match="no end of an answer after 10"):
        for _ in range(11):
            one.receive(response(one, flags=0, ttt=5), b"")
    monkeypatch.setattr(send_targets, "MAXIMUM_ANSWER", 100)
    one.ask("All")
    with pytest.raises(RemoteProtocolError, match="more than 100 bytes"):
        one.receive(response(one, itt=2, flags=0, ttt=5), bytes(101))


def test_pings_and_refusals() -> None:
    one = DiscoveryInitiator(7, 3)
    one.ask("All")
    numbers = {"stat_sn": 3, "exp_cmd_sn": 7, "max_cmd_sn": 7}
    ((header, _),) = one.receive(pdu.NopIn(itt=bhs.NO_TAG, ttt=9, **numbers).pack(), b"")  # type: ignore[arg-type]
    pong = pdu.NopOut.unpack_from(header)
    assert (pong.ttt, pong.itt) == (9, bhs.NO_TAG)
    assert one.receive(pdu.NopIn(itt=bhs.NO_TAG, **numbers).pack(), b"") == []  # type: ignore[arg-type]
    with pytest.raises(IserblkError, match="refuses: protocol error"):
        one.receive(pdu.Reject(reason=4, data_length=48, **numbers).pack(), bytes(48))
    with pytest.raises(IserblkError, match="the target asks for a logout"):
        one.receive(pdu.AsyncMessage(event=1, **numbers).pack(), b"")  # type: ignore[arg-type]


def test_logout() -> None:
    one = DiscoveryInitiator(7, 3)
    header, _ = one.log_out()
    itt = pdu.LogoutRequest.unpack_from(header).itt
    numbers = {"stat_sn": 3, "exp_cmd_sn": 7, "max_cmd_sn": 7}
    assert one.receive(pdu.LogoutResponse(response=0, itt=itt, **numbers).pack(), b"") == []
    assert one.logged_out


@given(st.lists(st.tuples(st.binary(min_size=48, max_size=48), st.binary(max_size=64)), max_size=5))
def test_any_pdus(pdus: list[tuple[bytes, bytes]]) -> None:
    one = DiscoveryInitiator(7, 3)
    one.ask("All")
    with contextlib.suppress(IserblkError):
        for header, data in pdus:
            one.receive(header, data)


@given(st.integers(0, 255), st.integers(0, 3), st.binary(max_size=64), st.integers(1, 64))
def test_any_question(flags: int, ttt: int, data: bytes, limit: int) -> None:
    responder = TextResponder()
    for tag in (bhs.NO_TAG, ttt):
        request = pdu.TextRequest(
            flags=flags, data_length=len(data), itt=1, ttt=tag, cmd_sn=1, exp_stat_sn=1
        )
        with contextlib.suppress(RemoteProtocolError):
            part = responder.receive(request, data, {A: ["h:1,1"]}, limit)
            assert part is None or len(part.data) <= limit
