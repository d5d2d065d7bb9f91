"""Messages of SLP, the Service Location Protocol (RFC 2608), and the service of iSCSI targets
(RFC 4018).

Every message has this header; its length counts the header, too:

    0    version, 2        5-6  flags                       12-13  length of the language tag
    1    FUNCTION ID       7-9  offset of the first         14-    language tag
    2-4  length                 extension; 0: none
                          10-11 XID

Behind it a message has numbers, and strings with two bytes of length in front. An initiator is a
user agent, a target a service agent; a directory agent keeps what service agents register. Messages
are not authenticated: authentication blocks are skipped, and none are sent. Everything received is
untrusted: only RemoteProtocolError is raised for it. No I/O here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.send_targets import MAXIMUM_HOST, Portal
from iserblk.names import may_name

VERSION = 2
GROUP = "239.255.255.253"  # multicast address of directory agents and service agents
PORT = 427
MTU = 1400  # bytes of a datagram, at most
HEADER = struct.Struct(">BBBHHBHHH")
MAXIMUM_MESSAGE = 1 << 20  # bytes that we take by TCP
MAXIMUM_TARGETS = 4096  # URLs in one answer
MAXIMUM_ATTRIBUTES = 1024
MAXIMUM_DEPTH = 16  # of nested filters

SERVICE_REQUEST = 1
SERVICE_REPLY = 2
SERVICE_REGISTRATION = 3
SERVICE_DEREGISTRATION = 4
SERVICE_ACKNOWLEDGE = 5
ATTRIBUTE_REQUEST = 6
ATTRIBUTE_REPLY = 7
DA_ADVERTISEMENT = 8
SERVICE_TYPE_REQUEST = 9
SERVICE_TYPE_REPLY = 10
SA_ADVERTISEMENT = 11

OVERFLOW = 0x8000  # there is more than the datagram has room for: ask by TCP
FRESH = 0x4000  # a registration that is no update
MULTICAST = 0x2000  # a request that was sent to many

LANGUAGE_NOT_SUPPORTED = 1
PARSE_ERROR = 2
SCOPE_NOT_SUPPORTED = 4
AUTHENTICATION_UNKNOWN = 5
VERSION_NOT_SUPPORTED = 9
OPTION_NOT_UNDERSTOOD = 12
MESSAGE_NOT_SUPPORTED = 14
_ERRORS = {
    LANGUAGE_NOT_SUPPORTED: "language not supported",
    PARSE_ERROR: "it cannot parse the message",
    3: "invalid registration",
    SCOPE_NOT_SUPPORTED: "scope not supported",
    AUTHENTICATION_UNKNOWN: "unknown kind of authentication",
    6: "it wants authentication",
    7: "authentication failed",
    VERSION_NOT_SUPPORTED: "version not supported",
    10: "internal error",
    11: "busy",
    OPTION_NOT_UNDERSTOOD: "option not understood",
    13: "invalid update",
    MESSAGE_NOT_SUPPORTED: "message not supported",
    15: "refreshed too often",
}
_MANDATORY_OPTIONS = range(0x4000, 0x8000)

TARGET = "service:iscsi:target"
TARGETS = ("service:iscsi:target", "service:iscsi")  # the type, and the abstract type above it
DIRECTORY_AGENT = "service:directory-agent"
SERVICE_AGENT = "service:service-agent"
DEFAULT_SCOPE = "DEFAULT"
LANGUAGE = "en"

Attributes = Mapping[str, Sequence[str]]  # values by tag, which is in lower case


def error_words(error: int) -> str:
    return _ERRORS.get(error) or f"error {error}"


def _bad(words: str) -> RemoteProtocolError:
    return RemoteProtocolError("SLP", words)


# -- messages --------------------------------------------------------------------------------------


class Message(NamedTuple):
    """One message. ``body``: what follows the language tag, up to the first extension.
    ``unknown``: there is an extension that must be understood, and is not."""

    function: int
    flags: int
    xid: int
    language: str
    body: bytes
    unknown: bool = False


class UrlEntry(NamedTuple):
    """``lifetime``: seconds."""

    url: str
    lifetime: int


class Request(NamedTuple):
    """A SrvRqst, an AttrRqst or a SrvTypeRqst. ``about``: the service type, the URL, or the naming
    authority ("*": any). ``condition``: the predicate, or the list of tags. ``spi``: how the answer
    is to be authenticated."""

    previous: frozenset[str]
    about: str
    scopes: frozenset[str]  # in lower case
    condition: str = ""
    spi: str = ""


class Advertisement(NamedTuple):
    """A DAAdvert. ``boot``: when the directory agent began, in its own seconds; 0: it ends."""

    error: int
    boot: int
    url: str
    scopes: frozenset[str]


def encode(function: int, xid: int, body: bytes, flags: int = 0, language: str = LANGUAGE) -> bytes:
    tag = language.encode()
    length = HEADER.size + len(tag) + len(body)
    header = HEADER.pack(
        VERSION, function, length >> 16, length & 0xFFFF, flags, 0, 0, xid, len(tag)
    )
    return header + tag + body


def length_untrusted(start: bytes) -> int | None:
    """The length of the message that begins with ``start``; None: more bytes are needed."""
    if start[:1] not in (b"", bytes((VERSION,))):
        raise _bad(f"version {start[0]}: is this an SLP agent of version 2?")
    if len(start) < 5:
        return None
    length = int.from_bytes(start[2:5], "big")
    if not HEADER.size <= length <= MAXIMUM_MESSAGE:
        raise _bad(f"a message of {length} bytes")
    return length


def message_untrusted(data: bytes) -> Message:
    """Decode one whole message. Bytes behind it are ignored."""
    length = length_untrusted(data)
    if length is None or length > len(data):
        raise _bad("a message is cut off")
    _, function, _, _, flags, high, low, xid, tag_length = HEADER.unpack_from(data)
    body_at, extension = HEADER.size + tag_length, high << 16 | low
    if body_at > length or (extension and not body_at <= extension <= length):
        raise _bad("a header that points behind the message")
    try:
        language = data[HEADER.size : body_at].decode("ascii")
    except UnicodeDecodeError:
        raise _bad("a language tag that is not ASCII") from None
    end = extension or length
    return Message(
        function,
        flags,
        xid,
        language,
        data[body_at:end],
        _has_unknown_untrusted(data[:length], extension),
    )


def _has_unknown_untrusted(data: bytes, at: int) -> bool:
    """Whether a mandatory extension is in the chain that begins at ``at`` (section 9.1)."""
    while at:
        if at + 5 > len(data):
            raise _bad("an extension is cut off")
        kind, following = int.from_bytes(data[at : at + 2], "big"), data[at + 2 : at + 5]
        if kind in _MANDATORY_OPTIONS:
            return True
        before, at = at, int.from_bytes(following, "big")
        if at and at <= before:
            raise _bad("a chain of extensions that goes back")
    return False


def _string(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 0xFFFF:
        raise ValueError(f"a string of {len(raw)} bytes")
    return struct.pack(">H", len(raw)) + raw


def _list(items: Iterable[str]) -> bytes:
    return _string(",".join(items))


class _Fields:
    """Reads the fields of a body, in order."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def _take(self, count: int) -> bytes:
        raw = self._body[self._at : self._at + count]
        if len(raw) != count:
            raise _bad("a message ends within a field")
        self._at += count
        return raw

    def number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def string(self) -> str:
        raw = self._take(self.number(2))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise _bad("a string is not UTF-8") from None

    def list(self) -> frozenset[str]:
        return items(self.string())

    def url_entry(self) -> UrlEntry:
        self.number(1)
        lifetime = self.number(2)
        # One that is not UTF-8 is no URL of a target; the entries behind it may be.
        url = self._take(self.number(2)).decode(errors="surrogateescape")
        entry = UrlEntry(url, lifetime)
        self.authentication()
        return entry

    def authentication(self) -> None:
        for _ in range(self.number(1)):
            self.number(2)
            length = self.number(2)
            if length < 4:
                raise _bad(f"an authentication block of {length} bytes")
            self._take(length - 4)


def items(text: str) -> frozenset[str]:
    """The items of a list, in lower case: case does not count in scopes and tags."""
    return frozenset(each for part in text.split(",") if (each := part.strip().lower()))


def _url_entry(entry: UrlEntry) -> bytes:
    return bytes(1) + struct.pack(">H", entry.lifetime) + _string(entry.url) + bytes(1)


def service_request(
    previous: Iterable[str], service_type: str, scopes: Iterable[str], predicate: str = ""
) -> bytes:
    """The body of a SrvRqst. ``previous``: addresses of agents that have answered already."""
    return (
        _list(previous) + _string(service_type) + _list(scopes) + _string(predicate) + _string("")
    )


def attribute_request(previous: Iterable[str], url: str, scopes: Iterable[str]) -> bytes:
    """The body of an AttrRqst for all attributes."""
    return _list(previous) + _string(url) + _list(scopes) + _string("") + _string("")


def request_untrusted(message: Message) -> Request:
    """The body of a SrvRqst or AttrRqst."""
    fields = _Fields(message.body)
    return Request(fields.list(), fields.string(), fields.list(), fields.string(), fields.string())


def type_request_untrusted(message: Message) -> Request:
    """The body of a SrvTypeRqst."""
    fields = _Fields(message.body)
    previous = fields.list()
    # -1 as the length means all naming authorities.
    authority = "*" if message.body[(at := fields._at) : at + 2] == b"\xff\xff" else None
    if authority is None:
        authority = fields.string()
    else:
        fields.number(2)
    return Request(previous, authority, fields.list())


def service_reply(error: int, entries: Sequence[UrlEntry]) -> bytes:
    return struct.pack(">HH", error, len(entries)) + b"".join(map(_url_entry, entries))


def service_reply_untrusted(message: Message) -> tuple[int, list[UrlEntry]]:
    """Error and URLs of a SrvRply. Where the message says that it is cut short, so may be its last
    entry."""
    fields = _Fields(message.body)
    error = fields.number(2)
    if error:
        return error, []
    count = fields.number(2)
    if count > MAXIMUM_TARGETS:
        raise _bad(f"an answer with {count} URLs")
    entries: list[UrlEntry] = []
    for _ in range(count):
        try:
            entries.append(fields.url_entry())
        except RemoteProtocolError:
            if message.flags & OVERFLOW:
                break
            raise
    return 0, entries


def attribute_reply(error: int, attributes: str) -> bytes:
    return struct.pack(">H", error) + _string(attributes) + bytes(1)


def attribute_reply_untrusted(message: Message) -> tuple[int, dict[str, list[str]]]:
    """Error and attributes of an AttrRply."""
    fields = _Fields(message.body)
    error = fields.number(2)
    return (error, {}) if error else (0, attributes_untrusted(fields.string()))


def type_reply(error: int, types: Iterable[str]) -> bytes:
    return struct.pack(">H", error) + _list(types)


def agent_advertisement(url: str, scopes: Iterable[str]) -> bytes:
    """The body of a SAAdvert."""
    return _string(url) + _list(scopes) + _string("") + bytes(1)


def registration(entry: UrlEntry, scopes: Iterable[str], attributes: str) -> bytes:
    """The body of a SrvReg of an iSCSI target."""
    return _url_entry(entry) + _string(TARGET) + _list(scopes) + _string(attributes) + bytes(1)


def deregistration(entry: UrlEntry, scopes: Iterable[str]) -> bytes:
    return _list(scopes) + _url_entry(entry) + _string("")


def acknowledge_untrusted(message: Message) -> int:
    """The error of a SrvAck; 0: none."""
    return _Fields(message.body).number(2)


def advertisement_untrusted(message: Message) -> Advertisement:
    fields = _Fields(message.body)
    return Advertisement(fields.number(2), fields.number(4), fields.string(), fields.list())


def agent_host_untrusted(url: str) -> str:
    """The host in the URL of a directory agent."""
    scheme, separator, rest = url.partition("://")
    host = rest.partition("/")[0]
    if scheme.lower() != DIRECTORY_AGENT or not separator or not host or not _is_host(host):
        raise _bad(f"{url[:80]!r} is no URL of a directory agent")
    return host


def _is_host(text: str) -> bool:
    return len(text) <= MAXIMUM_HOST and text.isprintable() and not set(text) & set(" ,()/@")


# -- attributes ------------------------------------------------------------------------------------

_RESERVED = frozenset("(),\\!<=>~;*+")
_ESCAPED = re.compile(r"\\([0-9A-Fa-f]{2})")


def escape(text: str) -> str:
    """``text`` as a value of an attribute (section 5)."""
    return "".join(
        "".join(f"\\{byte:02X}" for byte in each.encode())
        if each in _RESERVED or ord(each) < 0x20
        else each
        for each in text
    )


def _unescape_untrusted(text: str) -> str:
    if "\\" not in text:
        return text
    raw = b""
    at = 0
    for match in _ESCAPED.finditer(text):
        raw += text[at : match.start()].encode() + bytes((int(match[1], 16),))
        at = match.end()
    try:
        return (raw + text[at:].encode()).decode()
    except UnicodeDecodeError:
        raise _bad("an escaped value is not UTF-8") from None


def encode_attributes(attributes: Attributes) -> str:
    """An attribute list. Values are escaped here."""
    return ",".join(
        f"({tag}={','.join(escape(each) for each in values)})" if values else tag
        for tag, values in attributes.items()
    )


def attributes_untrusted(text: str) -> dict[str, list[str]]:
    """An attribute list: ``(tag=value,value),(tag=value),keyword``."""
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(text):
        if text[at] == "(":
            end = text.find(")", at)
            tag, equals, values = text[at + 1 : end].partition("=")
            if end < 0 or not equals:
                raise _bad(f"an attribute that begins {text[at : at + 40]!r}")
            parts = [_unescape_untrusted(each.strip()) for each in values.split(",")]
        else:
            end = text.find(",", at)
            end = len(text) - 1 if end < 0 else end - 1
            tag, parts = text[at : end + 1], []
        found.setdefault(_unescape_untrusted(tag.strip()).lower(), []).extend(parts)
        if len(found) > MAXIMUM_ATTRIBUTES:
            raise _bad(f"more than {MAXIMUM_ATTRIBUTES} attributes")
        at = end + 1
        if at < len(text) and text[at] != ",":
            raise _bad(f"no comma between attributes, but {text[at : at + 40]!r}")
        at += 1
    return found


# -- filters ---------------------------------------------------------------------------------------


def matches_untrusted(predicate: str, attributes: Attributes) -> bool:
    """Whether a service with these attributes is one that ``predicate`` asks for: an LDAPv3 search
    filter without approximate and extensible matching (section 8.1). No predicate matches all.
    Raises RemoteProtocolError for what is no such filter."""
    if not predicate.strip():
        return True
    result, end = _filter_untrusted(predicate, 0, attributes, 0)
    if predicate[end:].strip():
        raise _bad(f"a predicate with {predicate[end : end + 40]!r} behind its end")
    return result


def _filter_untrusted(text: str, at: int, attributes: Attributes, depth: int) -> tuple[bool, int]:
    """The filter that begins at ``at``: its result, and where it ends."""
    at = _behind_spaces(text, at)
    if text[at : at + 1] != "(" or depth > MAXIMUM_DEPTH:
        raise _bad(f"a predicate that is no filter at {text[at : at + 40]!r}")
    at = _behind_spaces(text, at + 1)
    operator = text[at : at + 1]
    if operator not in ("&", "|", "!") or not operator:
        end = text.find(")", at)
        if end < 0:
            raise _bad("a predicate without its end")
        return _item_untrusted(text[at:end], attributes), end + 1
    results: list[bool] = []
    at = _behind_spaces(text, at + 1)
    while text[at : at + 1] == "(":
        result, at = _filter_untrusted(text, at, attributes, depth + 1)
        results.append(result)
        at = _behind_spaces(text, at)
    if text[at : at + 1] != ")" or not results or (operator == "!" and len(results) > 1):
        raise _bad(f"a predicate that is no filter at {text[at : at + 40]!r}")
    if operator == "!":
        return not results[0], at + 1
    return (all(results) if operator == "&" else any(results)), at + 1


def _behind_spaces(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _item_untrusted(item: str, attributes: Attributes) -> bool:
    tag, equals, wanted = item.partition("=")
    if not equals or not tag.strip("<> "):
        raise _bad(f"a predicate with {item[:40]!r}")
    order = tag[-1] if tag[-1] in "<>" else ""
    values = attributes.get(_unescape_untrusted(tag.rstrip("<>").strip()).lower())
    if values is None:
        return False
    if order:
        limit = _folded(_unescape_untrusted(wanted))
        return any(_in_order(_folded(each), limit, order) for each in values)
    if wanted.strip() == "*":
        return True
    parts = [_folded(_unescape_untrusted(each)) for each in wanted.split("*")]
    return any(_has_parts(_folded(each), parts) for each in values)


def is_like(text: str, pattern: str) -> bool:
    """Whether ``text`` is like ``pattern``, in which * stands for anything."""
    return _has_parts(text, pattern.split("*"))


def _has_parts(value: str, parts: Sequence[str]) -> bool:
    """Whether ``value`` consists of ``parts``, in order, with anything between them."""
    if len(parts) == 1:
        return value == parts[0]
    first, *middle, last = parts
    at, end = len(first), len(value) - len(last)
    if at > end or not value.startswith(first) or not value.endswith(last):
        return False
    for each in middle:
        at = value.find(each, at, end)
        if at < 0:
            return False
        at += len(each)
    return True


def _folded(text: str) -> str:
    """Neither case nor the amount of white space counts (section 6.4)."""
    return " ".join(text.split()).lower()


def _in_order(value: str, limit: str, order: str) -> bool:
    if _is_number(value) and _is_number(limit):
        one, other = int(value), int(limit)
        return one <= other if order == "<" else one >= other
    return value <= limit if order == "<" else value >= limit


def _is_number(text: str) -> bool:
    return re.fullmatch("-?[0-9]{1,18}", text) is not None


# -- iSCSI targets ---------------------------------------------------------------------------------


def target_url(portal: Portal, target: str) -> str:
    """The service URL of a target at one portal (RFC 4018 section 5.2)."""
    host = f"[{portal.host}]" if ":" in portal.host else portal.host
    name = "".join(each if each.isalnum() and each.isascii() else _percent(each) for each in target)
    return f"{TARGET}://{host}:{portal.port}/{name}"


def _percent(character: str) -> str:
    if character in ":-.":
        return character
    return "".join(f"%{byte:02X}" for byte in character.encode())


_URL = re.compile(
    r"service:iscsi:target://(\[([0-9A-Fa-f:.]+)\]|[^\s,()/@:\[\]]+)(?::([0-9]{1,5}))?/([^/\s]+)"
    r"(/.*)?",
    re.IGNORECASE | re.DOTALL,
)
_PERCENT = re.compile(r"[%\\]([0-9A-Fa-f]{2})")


def target_untrusted(url: str, default_port: int) -> tuple[str, Portal]:
    """Name and portal of the target in a service URL. An identity behind the name is ignored."""
    match = _URL.fullmatch(url)
    if match is None:
        raise _bad(f"{url[:80]!r} is no URL of an iSCSI target")
    host = match[2] or match[1]
    port = int(match[3]) if match[3] else default_port
    raw = _PERCENT.sub(lambda each: f"\\{each[1]}", match[4])
    name = _unescape_untrusted(raw)
    if not 0 < port < 65536 or len(host) > MAXIMUM_HOST or not host.isprintable():
        raise _bad(f"{url[:80]!r} has no usable portal")
    if not may_name(name):
        raise _bad(f"{url[:80]!r} has no iSCSI name")
    return name, Portal(host, port)


def group_untrusted(attributes: Attributes) -> int | None:
    """The portal group tag among the attributes of a target; None: there is none."""
    values = attributes.get("portal-group") or ("",)
    if not re.fullmatch("[0-9]{1,5}", values[0]) or int(values[0]) > 0xFFFF:
        return None
    return int(values[0])
