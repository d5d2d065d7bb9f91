"""Text, PDUs and login, both roles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from iserblk.errors import AuthenticationError, IserblkError, LoginError, RemoteProtocolError
from iserblk.initiator.connecting.protocols import who_untrusted
from iserblk.iscsi import bhs, chap, keys, pdu, send_targets, text
from iserblk.iscsi.chap import Accounts, ChapInitiator, ChapTarget, Credentials
from iserblk.iscsi.login_initiator import LoginInitiator
from iserblk.iscsi.login_target import LoginTarget
from iserblk.iscsi.text_target import TextResponder, send_targets_answer, understand_nothing
from iserblk.secret import Secret
from tests.fuzz.engine import Case, Row, decoder
from tests.iscsi import logins

_SECRET, _OTHER = Secret("hush-hush-hush"), Secret("not-a-word-more")
_ONE_WAY = Credentials("host", _SECRET)
_MUTUAL = Credentials("host", _SECRET, "disk", _OTHER)
_ACCOUNTS = Accounts({"host": _SECRET}, "disk", _OTHER)
_TEXTS = (
    text.encode([("RDMAExtensions", "Yes"), ("MaxBurstLength", "262144"), ("X-a", "b")]),
    text.encode([("HeaderDigest", "CRC32C,None"), ("DataDigest", "None"), ("InitialR2T", "No")]),
    text.encode([("InitiatorName", logins.INITIATOR), ("TargetName", logins.TARGET)]),
    text.encode([("AuthMethod", "CHAP"), ("CHAP_A", "5,7"), ("SessionType", "Normal")]),
    text.encode([("CHAP_A", "5"), ("CHAP_I", "7"), ("CHAP_C", "0x" + "a5" * 16)]),
    text.encode([("CHAP_N", "host"), ("CHAP_R", "0x" + "00" * 16)]),
    text.encode(
        [
            ("CHAP_N", "host"),
            ("CHAP_R", "0b" + "QUJD" * 8),
            ("CHAP_I", "1"),
            ("CHAP_C", "0x" + "5a" * 16),
        ]
    ),
    text.encode([("TargetName", logins.TARGET), ("TargetAddress", "[::1]:3260,1")]),
    text.encode([("SendTargets", "All"), ("TargetPortalGroupTag", "1")]),
)
_VALUES = tuple(
    each.encode()
    for each in ("0x1f", "0b" + "QUJD" * 4, "0X" + "ab" * 20, "255", "0x100", "Yes", "5,6,7,8",
                 "CRC32C,None", "Reject", "NotUnderstood", "8192", "0")
)  # fmt: skip
_CLASSES = [
    each
    for each in vars(pdu).values()
    if isinstance(each, type) and issubclass(each, pdu.Pdu) and each is not pdu.Pdu
]
_HEADERS = (
    bytes((0x21, 0x80)) + bytes(46),
    bytes((0x01, 0xC1, 0, 0, 3, 0, 0, 8)) + bytes(40) + bytes((0, 9, 1, 0)) + bytes(16),
    bytes((0x01, 0xE1, 0, 0, 2)) + bytes(43) + bytes((0, 5, 2, 0, 0, 0, 16, 0)),
    bytes((0x3F, 0x80, 4, 0, 0, 0, 0, 48)) + bytes(40) + bytes(48),
    bytes((0x21, 0x80, 0, 2, 0, 0, 0, 20)) + bytes(40) + b"\0\x12p\0\5" + bytes(15),
)


def _collector(case: Case) -> None:
    collector = text.Collector()
    for _ in range(case.chance.randrange(3)):
        collector.add(case.data)
    seen = collector.look(b"")
    assert collector.take() == seen


def _pdus(case: Case) -> None:
    data = case.data.ljust(bhs.BHS_LENGTH, b"\0")
    bhs.check_untrusted(data, 0)
    unit = case.chance.choice(_CLASSES).unpack_from(data)
    assert len(unit.pack()) == bhs.BHS_LENGTH


def _segments(case: Case) -> None:
    message = memoryview(case.data)
    at = case.chance.choice((0, 0, 0, 28))
    for part in (bhs.data_segment_untrusted, bhs.sense_of_untrusted, bhs.extended_cdb_untrusted):
        with contextlib.suppress(RemoteProtocolError):
            assert len(part(message, at)) <= len(message)
    with contextlib.suppress(RemoteProtocolError):
        assert 0 <= bhs.bidirectional_read_length_untrusted(message, at) < 1 << 32
    with contextlib.suppress(RemoteProtocolError):
        assert len(bhs.additional_headers_untrusted(message, at)) < 256


_ADDRESSES = tuple(
    each.encode()
    for each in ("10.0.0.1:3260,1", "[fe80::1%eth0]:3260,2,1", "fe80::1", "host.example,0xff",
                 "[::]:860", "h:1,", "a-b_c.d.:65535,65535,9")
)  # fmt: skip
_HERE = send_targets.Portal("10.0.0.9", 3260)


def _discovery(case: Case) -> None:
    """Answers to SendTargets, in parts, of a target that may say anything."""
    session = send_targets.DiscoveryInitiator(1, 1)
    session.ask("All")
    for _ in range(4):
        data = case.data
        header = pdu.TextResponse(
            flags=case.chance.choice((0x80, 0x80, 0x40, 0, 0xC0)),
            data_length=len(data),
            lun=bytes(8),
            itt=1,
            ttt=case.chance.choice((7, 7, bhs.NO_TAG)),
            stat_sn=1,
            exp_cmd_sn=1,
            max_cmd_sn=9,
        ).pack()
        if case.chance.random() < 0.3:
            header = case.mutated(header).ljust(bhs.BHS_LENGTH, b"\0")[: bhs.BHS_LENGTH]
        if case.chance.random() < 0.1:
            header = bytes((bhs.NOP_IN, 0x80)) + header[2:]
        session.receive(header, data)
        if session.answer is not None:
            for record in send_targets.records_untrusted(session.answer, _HERE).targets:
                assert record.name and record.portals
            return


def _questions(case: Case) -> None:
    responder = TextResponder()
    for _ in range(3):
        data = case.data
        request = pdu.TextRequest(
            flags=case.chance.choice((0x80, 0x80, 0x40, 0, 0xC0)),
            data_length=len(data),
            lun=bytes(8),
            itt=1,
            ttt=case.chance.choice((0, 1, bhs.NO_TAG, bhs.NO_TAG)),
            cmd_sn=1,
            exp_stat_sn=1,
        )
        part = responder.receive(request, data, {logins.TARGET: ["[::1]:3260,1"] * 9}, 64)
        assert part is None or len(part.data) <= 64


def _value(case: Case) -> str:
    return case.data.decode("utf-8", "surrogateescape")


def _chap_values(case: Case) -> None:
    with contextlib.suppress(RemoteProtocolError):
        assert 1 <= len(chap.decode_binary_untrusted(_value(case), "CHAP_C")) <= 1024
    assert 0 <= chap.decode_number_untrusted(_value(case), "CHAP_I", 255) <= 255


def _keys(case: Case) -> None:
    name = case.chance.choice((*keys.TABLE, "X-a"))
    with contextlib.suppress(RemoteProtocolError):
        if name in keys.TABLE and keys.TABLE[name].kind != keys.OBSOLETE:  # what may be offered
            keys.accept(keys.SessionParameters(), name, _value(case))
    keys.answer(
        keys.SessionParameters(),
        name,
        _value(case),
        discovery=case.chance.random() < 0.3,
        by_target=case.chance.random() < 0.5,
    )


def _chap(make: Callable[[], ChapInitiator | ChapTarget]) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        side = make()
        if isinstance(side, ChapInitiator):
            side.start()
        for _ in range(2):
            side.receive(text.decode_untrusted(case.data))

    return run


def _login_initiator(credentials: Credentials | None) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        one: LoginInitiator = logins.initiator(
            credentials=credentials, discovery=case.chance.random() < 0.2
        )
        one.start()
        stage = 0 if credentials else 1
        for _ in range(3):
            following = case.chance.choice((None, 1, 3, 3))
            header, data = logins.response(case.data, stage, following)
            if case.chance.random() < 0.3:
                header = case.mutated(header)
            one.receive(header, data)
            assert not (one.done and credentials)  # no sequence has the secret
            stage = case.chance.choice((stage, 1))

    return run


def _login_target(accounts: Accounts | None) -> Callable[[Case], None]:
    def run(case: Case) -> None:
        other: LoginTarget = logins.target(accounts=accounts)
        stage = 0 if accounts else 1
        for _ in range(3):
            following = case.chance.choice((None, 1, 3, 3))
            header, data = logins.request(case.data, stage, following)
            if case.chance.random() < 0.3:
                header = case.mutated(header)
            user = other.claimed_user(header, data)
            assert accounts or not user
            for _, answer in other.receive(header, data):
                assert len(answer) <= 8192
            assert not (other.done and accounts)
            if other.done or other.failed:
                return

    return run


_LOGIN_ERRORS = (RemoteProtocolError, LoginError)
_CHAP_ERRORS = (RemoteProtocolError, AuthenticationError)

ROWS = (
    decoder(
        "who answers",
        who_untrusted,
        *(b"\x23" + bytes(47), b"\x3f\x80" + bytes(46), b"MPA ID Rep Frame\x60\x01\0\0"),
        *(b"SSH-2.0-x\r\n", b"HTTP/1.0 400 x\r\n", b"<html>", b"220 x", b"\x15\x03\x01\0\2"),
        allowed=(),
    ),
    decoder("text", text.decode_untrusted, *_TEXTS),
    Row("text in parts", _collector, _TEXTS),
    decoder(
        "SendTargets",
        lambda data: send_targets_answer(
            text.decode_untrusted(data), {logins.TARGET: ["[::1]:3260"]}, understand_nothing
        ),
        *_TEXTS,
    ),
    Row("questions in parts", _questions, _TEXTS, each=3),
    Row("discovery", _discovery, _TEXTS, (IserblkError,), 4),
    Row(
        "portal",
        lambda case: (send_targets.portal_untrusted(_value(case)), None)[1],
        _ADDRESSES,
    ),
    Row("segments", _segments, _HEADERS),
    Row("PDUs", _pdus, _HEADERS),
    Row("CHAP values", _chap_values, _VALUES),
    Row("keys", _keys, _VALUES),
    Row("CHAP initiator", _chap(lambda: ChapInitiator(_MUTUAL)), _TEXTS, _CHAP_ERRORS, 2),
    Row("CHAP target", _chap(lambda: ChapTarget(_ACCOUNTS)), _TEXTS, _CHAP_ERRORS, 2),
    Row("login initiator", _login_initiator(None), _TEXTS, _LOGIN_ERRORS, 3),
    Row("login initiator CHAP", _login_initiator(_MUTUAL), _TEXTS, _LOGIN_ERRORS, 3),
    Row("login target", _login_target(None), _TEXTS, _LOGIN_ERRORS, 3),
    Row("login target CHAP", _login_target(_ACCOUNTS), _TEXTS, _LOGIN_ERRORS, 3),
)
