"""SendTargets: portal addresses, target records, and the initiator of a discovery session
(RFC 7143 section 13.8, appendix C, sections 11.10 and 11.11).

All that is decoded here comes from the network, and raises no exception but RemoteProtocolError.
Harmless errors of targets are tolerated: a portal group tag that is missing or none (-1, 65536), a
missing or empty address, port 0, unknown text behind the tag. What else cannot be read is left out,
and named; the rest of the answer counts.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.iscsi import bhs, pdu, reasons
from iserblk.iscsi.serial import MASK32
from iserblk.iscsi.text import encode
from iserblk.names import may_name

DEFAULT_PORT = 3260
MAXIMUM_ANSWER = 4 << 20  # bytes of one answer, all its PDUs together: some 40,000 targets
MAXIMUM_RECORDS = 65536  # keys in one answer
MAXIMUM_PARTS = 8192  # PDUs of one answer
MAXIMUM_HOST = 255

# The type of the portal group: a field that was proposed and never adopted. Parsed, never sent.
ISCSI_ONLY = 0
IWARP_TCP = 1
IWARP_SCTP = 2
INFINIBAND = 3
_TYPES = (ISCSI_ONLY, IWARP_TCP, IWARP_SCTP, INFINIBAND)
TYPE_WORDS = {
    ISCSI_ONLY: "iSCSI",
    IWARP_TCP: "iWARP over TCP",
    IWARP_SCTP: "iWARP over SCTP",
    INFINIBAND: "InfiniBand",
}

_NUMBER = re.compile("[0-9]{1,5}|0[xX][0-9a-fA-F]{1,4}")
_HOST_NAME = re.compile(r"[^\W_]([\w.-]*[^\W_])?\.?")
# An IPv6 address as some targets write it, without brackets. A port behind it cannot be told apart.
_BARE_IPV6 = re.compile("[0-9a-fA-F:.]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*")


class Portal(NamedTuple):
    """One TargetAddress. ``host``: without brackets. ``tag``: the target portal group tag.
    ``kind``: the type of the portal group. Both are None where the target gave none."""

    host: str
    port: int
    tag: int | None = None
    kind: int | None = None


class TargetRecord(NamedTuple):
    """One target of an answer, and its portals in the order of the answer."""

    name: str
    portals: tuple[Portal, ...]


MAXIMUM_LEFT_OUT = 1000


class LeftOut(list[str]):
    """What could not be read, in words: MAXIMUM_LEFT_OUT lines, and then one that says that there
    is more."""

    def append(self, words: str) -> None:
        if len(self) < MAXIMUM_LEFT_OUT:
            super().append(words)
        elif len(self) == MAXIMUM_LEFT_OUT:
            super().append("and more")


class Told(NamedTuple):
    """An answer: its targets, and, for the user, what of it could not be read and is left out."""

    targets: list[TargetRecord]
    left_out: list[str]


def needs_interface(host: str) -> bool:
    """An IPv6 address that is valid on one link, and does not say on which interface of this
    machine that link is (%INTERFACE): it cannot be used (RFC 4007 section 6)."""
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return address.is_link_local and not address.scope_id


def _bad(text: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError("iSCSI", f"TargetAddress {text[:80]!r}: {why}")


def _number(digits: str, most: int) -> int | None:
    if not _NUMBER.fullmatch(digits):
        return None
    value = int(digits, 16 if digits[:2] in ("0x", "0X") else 10)
    return value if value <= most else None


def portal_untrusted(text: str, default_port: int = DEFAULT_PORT) -> Portal:
    """Read ``host[:port][,tag[,type]]``, with an IPv6 address in brackets (section 13.8).
    ``default_port``: in place of port 0."""
    address, *fields = (field.strip() for field in text.split(","))
    tag = kind = None
    if fields:
        tag = _number(fields[0], 0xFFFF)
    if len(fields) > 1 and fields[1]:
        kind = _number(fields[1], 0xFFFF)
        if kind not in _TYPES:
            kind = None  # ignore undefined types
    host, port_text = _split_host(text, address)
    port: int | None = DEFAULT_PORT
    if port_text is not None:
        port = _number(port_text, 0xFFFF)
    if port is None:
        raise _bad(text, "the port is no number from 0 to 65535")
    return Portal(host, port or default_port, tag, kind)


def _split_host(text: str, address: str) -> tuple[str, str | None]:
    """Host and port; the port is None where there is none."""
    if address.startswith("["):
        host, bracket, rest = address[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad(text, "no IPv6 address in [ ]")
        return _ipv6(text, host), rest[1:] if rest else None
    if _BARE_IPV6.fullmatch(address):
        return _ipv6(text, address), None
    host, colon, port_text = address.partition(":")
    if not _HOST_NAME.fullmatch(host) or len(host) > MAXIMUM_HOST:
        raise _bad(text, "no host name and no address")
    return host, port_text if colon else None


def _ipv6(text: str, host: str) -> str:
    try:
        # An interface behind % is one of the target's host, and has no meaning on this host.
        return str(ipaddress.IPv6Address(host.partition("%")[0]))
    except ValueError:
        raise _bad(text, "no IPv6 address") from None


def records_untrusted(pairs: Iterable[tuple[str, str]], here: Portal | None = None) -> Told:
    """The targets of an answer to SendTargets, in its order. A target that comes twice is merged.

    ``here``: the portal that was asked. It is used for targets without an address that can be read,
    its host for addresses with an unspecified host (0.0.0.0, ::), and its port for port 0. Raises
    RemoteProtocolError where nothing of the answer can be read.
    """
    found: dict[str, dict[Portal, None]] = {}
    left_out: list[str] = LeftOut()
    portals: dict[Portal, None] | None = None
    skipped = False  # the last target, and what belongs to it
    for key, value in pairs:
        if key == "TargetName":
            skipped = not may_name(value)
            if skipped:
                left_out.append(f"TargetName {value[:80]!r} is no iSCSI name")
            else:
                portals = found.setdefault(value, {})
        elif key == "TargetAddress" and not skipped:
            if portals is None:
                left_out.append(f"TargetAddress {value[:80]!r} in front of any TargetName")
                continue
            try:
                portal = _place(value, here)
            except RemoteProtocolError as error:
                left_out.append(str(error).removeprefix(f"{error.layer}: "))
                continue
            if portal is not None:
                portals[portal] = None
        elif not key:
            left_out.append(f"text that is no key=value pair: {value[:40]!r}")
        # Other keys are not permitted there, but do no harm.
    if left_out and not found:
        raise RemoteProtocolError("iSCSI", left_out[0])
    return Told(
        [
            TargetRecord(name, tuple(each) or ((here,) if here is not None else ()))
            for name, each in found.items()
        ],
        left_out,
    )


def _place(text: str, here: Portal | None) -> Portal | None:
    """The portal of a TargetAddress in an answer of ``here``; None where it names none. Raises
    RemoteProtocolError."""
    if not text.partition(",")[0].strip():
        return None
    if here is None:
        return portal_untrusted(text)
    portal = portal_untrusted(text, here.port)
    if portal.host in ("0.0.0.0", "::"):
        return portal._replace(host=here.host)
    _, percent, interface = here.host.partition("%")
    if percent and needs_interface(portal.host):  # on the link on which it was asked
        return portal._replace(host=f"{portal.host}%{interface}")
    return portal


def pairs_untrusted(data: bytes) -> list[tuple[str, str]]:
    """The pairs of an answer to SendTargets, in its order. More is tolerated than in a login: any
    key, how often it may come, and bytes that are not UTF-8, which become lone surrogates. An item
    that is no pair has the key "". Raises RemoteProtocolError for more than MAXIMUM_RECORDS."""
    found: list[tuple[str, str]] = []
    for item in data.split(b"\0"):
        if not item:
            continue
        key, equals, value = item.decode(errors="surrogateescape").partition("=")
        found.append((key, value) if equals else ("", key))
        if len(found) > MAXIMUM_RECORDS:
            raise RemoteProtocolError("iSCSI", f"a text of more than {MAXIMUM_RECORDS} keys")
    return found


class DiscoveryInitiator:
    """The initiator of a discovery session after login, PDU by PDU. Sans-IO.

    ``ask`` and ``log_out`` return the PDU to send. ``receive`` takes each PDU of the target, and
    returns the PDUs to send next. ``answer`` holds the pairs once the answer is complete, None
    before. ``logged_out``: the target has answered the logout.
    """

    def __init__(self, cmd_sn: int, exp_stat_sn: int) -> None:
        self._cmd_sn = cmd_sn
        self._exp_stat_sn = exp_stat_sn
        self._itt = 0
        self._parts = bytearray()
        self._count = 0
        self._asking = False
        self.answer: list[tuple[str, str]] | None = None
        self.logged_out = False

    def ask(self, value: str) -> tuple[bytes, bytes]:
        """Ask SendTargets=``value``: ``All``, or the name of a target. One question at a time."""
        self._itt += 1
        self._parts.clear()
        self._count = 0
        self._asking = True
        self.answer = None
        return self._text(encode([("SendTargets", value)]), bhs.NO_TAG, bytes(8))

    def log_out(self) -> tuple[bytes, bytes]:
        """End the session."""
        self._itt += 1
        self._asking = False
        request = pdu.LogoutRequest(
            reason=pdu.LOGOUT_CLOSE_SESSION,
            itt=self._itt,
            cmd_sn=self._cmd_sn,
            exp_stat_sn=self._exp_stat_sn,
        )
        return request.pack(), b""

    def _text(self, data: bytes, ttt: int, lun: bytes) -> tuple[bytes, bytes]:
        request = pdu.TextRequest(
            data_length=len(data),
            lun=lun,
            itt=self._itt,
            ttt=ttt,
            cmd_sn=self._cmd_sn,
            exp_stat_sn=self._exp_stat_sn,
        )
        return request.pack(), data

    def receive(self, header: bytes, data: bytes) -> list[tuple[bytes, bytes]]:
        """Take a PDU of the target; returns the PDUs to send next.

        Raises RemoteProtocolError when the target breaks the protocol, IserblkError when it refuses
        or ends the session; then the connection is to be closed."""
        head = pdu.TargetHeader.unpack_from(header)
        opcode = head.opcode & bhs.OPCODE_MASK
        if head.advances_stat_sn:
            self._exp_stat_sn = (head.stat_sn + 1) & MASK32
        if opcode == bhs.NOP_IN:
            return self._pong(pdu.NopIn.unpack_from(header))
        if opcode == bhs.ASYNC_MESSAGE:
            words = reasons.async_event(pdu.AsyncMessage.unpack_from(header).event)
            raise IserblkError(f"the target ends the discovery session: {words}")
        if opcode == bhs.REJECT:
            raise IserblkError(f"the target refuses: {reasons.reject_reason(head.response)}")
        if opcode == bhs.LOGOUT_RESPONSE and head.itt == self._itt and not self._asking:
            self.logged_out = True
            return []
        if opcode != bhs.TEXT_RESPONSE or head.itt != self._itt or not self._asking:
            raise RemoteProtocolError("iSCSI", f"PDU {opcode:#x} in a discovery session")
        return self._text_response(pdu.TextResponse.unpack_from(header), data)

    def _pong(self, ping: pdu.NopIn) -> list[tuple[bytes, bytes]]:
        if ping.ttt == bhs.NO_TAG:
            return []
        self._counted()
        answer = pdu.NopOut(
            lun=ping.lun,
            itt=bhs.NO_TAG,
            ttt=ping.ttt,
            cmd_sn=self._cmd_sn,
            exp_stat_sn=self._exp_stat_sn,
        )
        return [(answer.pack(), b"")]

    def _counted(self) -> None:
        self._count += 1
        if self._count > MAXIMUM_PARTS:
            raise RemoteProtocolError("iSCSI", f"no end of an answer after {MAXIMUM_PARTS} PDUs")

    def _text_response(self, response: pdu.TextResponse, data: bytes) -> list[tuple[bytes, bytes]]:
        self._counted()
        if len(self._parts) + len(data) > MAXIMUM_ANSWER:
            raise RemoteProtocolError("iSCSI", f"an answer of more than {MAXIMUM_ANSWER} bytes")
        self._parts += data
        final = bool(response.flags & bhs.FLAG_FINAL)
        if response.flags & bhs.FLAG_CONTINUE and final:
            raise RemoteProtocolError("iSCSI", "a Text Response with both F and C")
        if final:
            self._asking = False
            whole = bytes(self._parts)
            self._parts.clear()
            self.answer = pairs_untrusted(whole)
            return []
        if response.ttt == bhs.NO_TAG:
            raise RemoteProtocolError("iSCSI", "a Text Response that is not the last has no tag")
        return [self._text(b"", response.ttt, response.lun)]
