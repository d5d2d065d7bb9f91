"""URLs and options: everything a user can say about where a LUN is and how to reach it.

    iser://[user[%password]@]host[:port]/target-iqn[/lun][?key=value&…]
    iscsi://… the same over Traditional iSCSI

libiscsi's grammar. User info ends at the last ``@`` before the first ``/``, splits at its first
``%`` or ``:``, is not percent-decoded, and is never shown: where a URL may hold some in the wrong
place, errors quote nothing of it. The target name is percent-decoded. ``iscsi://…?iser`` is
``iser://…``. Errors name the thing and the remedy.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from iserblk.errors import BadArgument, NotSupported
from iserblk.metrics.address import parse_address
from iserblk.secret import Secret

DEFAULT_PORT = 3260
ISNS_PORT = 3205
MAXIMUM_LUN = 16383
SMALLEST_JOURNAL = 64 << 10
BUSY_POLL_US = 300  # a round trip on a local network, and some more
_EXAMPLE = "iser://HOST/iqn.2026-11.example:disk/0"
_NAME_FILE = Path("/etc/iscsi/initiatorname.iscsi")
_MACHINE_ID = Path("/etc/machine-id")
_IQN = re.compile(r"iqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9][a-z0-9.-]*(:[^\s/\x00-\x1f]+)?", re.IGNORECASE)
_EUI = re.compile(r"eui\.[0-9A-Fa-f]{16}")
_NAA = re.compile(r"naa\.([0-9A-Fa-f]{16}|[0-9A-Fa-f]{32})")
_MAXIMUM_NAME = 223
_SIZE = re.compile("([0-9]{1,19})([kKmMgGtT]?)")
_HOST = re.compile(r"[^\W_]([\w.-]*[^\W_])?\.?")  # letters of any script: resolvers know IDNA


@dataclass(slots=True, frozen=True)
class Url:
    """One URL, taken apart. ``lun`` None: every disk of the target. ``options``: the keys behind
    ``?``, as given. ``user`` and ``password``: empty where there is no user info."""

    scheme: str
    host: str
    port: int
    iqn: str
    lun: int | None
    user: str = field(default="", repr=False)
    password: Secret = field(default_factory=Secret, repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)  # hyphenated keys

    def redacted(self) -> str:
        """The URL without user info and options: fit for logs."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lun = "" if self.lun is None else f"/{self.lun}"
        return f"{self.scheme}://{host}:{self.port}/{self.iqn}{lun}"


@dataclass(slots=True, frozen=True)
class Options:
    """Everything that is no address. Times are seconds."""

    rcap: str = "auto"
    mpa_crc: bool = True
    mpa_frames: int = 0  # TCP segments that one may fill; 0: as the peer takes them
    initiator_name: str = ""
    io_timeout: float = 30.0
    queue_depth: int = 128
    journal: int = 64 << 20  # bytes; 0: none
    shared: bool = False  # other hosts write to the LUNs, too
    busy_poll_us: int = BUSY_POLL_US
    immediate_data: bool = True
    header_digest: str = "None"  # as the text key has it: a list, best first
    data_digest: str = "None"
    auth: str = ""  # "": as credentials are given, or not
    target_user: str = ""
    target_password: Secret = field(default_factory=Secret)
    chap_secret_file: str = ""  # an absolute path
    chap_secret_fd: int | None = None
    chap_secret_credential: str = ""  # a file's name
    reserve: bool = False  # exclusively
    reserve_key: int = 0  # 0: this machine's own
    fallback: str = "none"  # or "iscsi"
    discover: bool = False  # more portals of the target
    metrics: str = ""  # where they are served, as iserblk.metrics.address has it; "": nowhere

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> Options:
        """From keys as users write them, ``-`` or ``_`` alike. Raises BadArgument, NotSupported."""
        values: dict[str, object] = {}
        seen: set[str] = set()
        for raw, value in pairs:
            key = raw.replace("_", "-")
            if key not in _KEYS and key not in _LATER:
                raise BadArgument(
                    f"unknown option {_shown(raw)}; known are: {', '.join(OPTION_NAMES)}"
                )
            if key in seen:
                raise BadArgument(f"option {key} is given twice")
            seen.add(key)
            if value == "":
                raise BadArgument(f"option {key} has no value; write {key}=VALUE")
            if key in _LATER:
                _check_later(key, value)
            else:
                name, convert = _KEYS[key]
                values[name] = convert(key, value)
        if values.get("reserve_key") and not values.get("reserve"):
            raise BadArgument("reserve-key means nothing without reserve=exclusive; add it")
        return cls(**values)  # type: ignore[arg-type]


def _shown(text: str) -> str:
    return repr(text[:60])


def _hidden(_text: str) -> str:
    return "(not shown)"


def _metrics(key: str, value: str) -> str:
    if value.lower() in ("off", "no"):
        return ""
    parse_address(value, key)
    return value


def _yes_no(key: str, value: str) -> bool:
    if value.lower() in ("yes", "on", "true", "1"):
        return True
    if value.lower() in ("no", "off", "false", "0"):
        return False
    raise BadArgument(f"{key}={_shown(value)}: say yes or no")


def _rcap(key: str, value: str) -> str:
    if value not in ("auto", "verbs", "iwarp"):
        raise BadArgument(f"{key}={_shown(value)}: say auto, verbs or iwarp")
    return value


def _frames(key: str, value: str) -> int:
    if value.lower() == "auto":
        return 0
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= 64:
        raise BadArgument(f"{key}={_shown(value)}: say auto, or a number of segments from 1 to 64")
    return int(value)


def _fallback(key: str, value: str) -> str:
    if value.lower() not in ("none", "iscsi"):
        raise BadArgument(f"{key}={_shown(value)}: say none or iscsi")
    return value.lower()


def _portals(key: str, value: str) -> bool:
    if value.lower() not in ("given", "discover"):
        raise BadArgument(f"{key}={_shown(value)}: say given or discover")
    return value.lower() == "discover"


def _seconds(key: str, value: str) -> float:
    try:
        seconds = float(value.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= 86400:
        raise BadArgument(f"{key}={_shown(value)}: give seconds, from 1 to 86400")
    return seconds


def _number(value: str) -> int:
    """-1 for what is none, and for more digits than any option has use for."""
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else -1


def _depth(key: str, value: str) -> int:
    depth = _number(value)
    if not 1 <= depth <= 1024:
        raise BadArgument(f"{key}={_shown(value)}: give a number from 1 to 1024")
    return depth


def _microseconds(key: str, value: str) -> int:
    microseconds = _number(value)
    if not 0 <= microseconds <= 1_000_000:
        raise BadArgument(f"{key}={_shown(value)}: give microseconds from 0 (never) to 1000000")
    return microseconds


def _journal(key: str, value: str) -> int:
    if value.lower() == "off":
        return 0
    size = parse_size(value, key) if _SIZE.fullmatch(value) else 0
    if size < SMALLEST_JOURNAL:
        least = f"{SMALLEST_JOURNAL >> 10}k"
        raise BadArgument(f"{key}={_shown(value)}: say off, or a size of {least} or more")
    return size


_DIGESTS = {
    "none": "None",
    "crc32c": "CRC32C",
    "crc32c,none": "CRC32C,None",
    "none,crc32c": "None,CRC32C",
}


def _digest(key: str, value: str) -> str:
    digest = _DIGESTS.get(value.lower())
    if digest is None:
        raise BadArgument(f"{key}={_shown(value)}: say none, crc32c, or crc32c,none for either")
    return digest


def _name(key: str, value: str) -> str:
    return check_name(value, key)


# What is said about CHAP may be a secret in the wrong place: nothing of it is shown.


def _auth(key: str, value: str) -> str:
    known = {"sha-256": "sha256", "sha3256": "sha3-256"}.get(value.lower(), value.lower())
    if known not in ("none", "chap", "md5", "sha1", "sha256", "sha3-256"):
        raise BadArgument(f"{key}: say none, chap, md5, sha1, sha256 or sha3-256")
    return known


def _text(_key: str, value: str) -> str:
    return value


def _secret(_key: str, value: str) -> Secret:
    return Secret(value)


def _secret_file(key: str, value: str) -> str:
    if not value.startswith("/"):
        raise BadArgument(f"{key}: give the file's whole path, from / on")
    return value


def _descriptor(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise BadArgument(f"{key}: give the number of an open file descriptor")
    return int(value)


def _file_name(key: str, value: str) -> str:
    if "/" in value or value in (".", ".."):
        raise BadArgument(f"{key}: give the name of a systemd credential, no path")
    return value


def _reserve(key: str, value: str) -> bool:
    if value.lower() not in ("none", "exclusive"):
        raise BadArgument(f"{key}={_shown(value)}: say none or exclusive")
    return value.lower() == "exclusive"


def _reserve_key(key: str, value: str) -> int:
    number = int(value, 16) if re.fullmatch("0[xX][0-9A-Fa-f]{1,16}", value) else 0
    if not number:
        raise BadArgument(f"{key}={_shown(value)}: give a number from 0x1 to 0xffffffffffffffff")
    return number


_KEYS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "rcap": ("rcap", _rcap),
    "mpa-crc": ("mpa_crc", _yes_no),
    "mpa-frames": ("mpa_frames", _frames),
    "initiator-name": ("initiator_name", _name),
    "io-timeout": ("io_timeout", _seconds),
    "queue-depth": ("queue_depth", _depth),
    "busy-poll": ("busy_poll_us", _microseconds),
    "immediate-data": ("immediate_data", _yes_no),
    "journal": ("journal", _journal),
    "shared": ("shared", _yes_no),
    "header-digest": ("header_digest", _digest),
    "data-digest": ("data_digest", _digest),
    "auth": ("auth", _auth),
    "target-user": ("target_user", _text),
    "target-password": ("target_password", _secret),
    "chap-secret-file": ("chap_secret_file", _secret_file),
    "chap-secret-fd": ("chap_secret_fd", _descriptor),
    "chap-secret-credential": ("chap_secret_credential", _file_name),
    "reserve": ("reserve", _reserve),
    "reserve-key": ("reserve_key", _reserve_key),
    "fallback": ("fallback", _fallback),
    "portals": ("discover", _portals),
    "metrics": ("metrics", _metrics),
}


class _Later(NamedTuple):
    """An option that has one effect so far: ``now`` are the values that ask for it. ``later``
    matches those that will mean something else; ``words`` say why not yet, and what to do."""

    now: tuple[str, ...]
    later: str
    words: str


_DIGEST = (
    "header-digest, data-digest: there are no iSCSI digests over iSER; the MPA CRC (mpa-crc=yes) "
    "protects the data; leave them out, or use an iscsi:// URL"
)
_LATER = {
    "style": _Later(("cm",), "stream", "only style=cm is supported so far"),
    "header": _Later(("28",), "12", "only header=28 is supported so far"),
}
OPTION_NAMES = tuple(sorted({*_KEYS, *_LATER}))


def _check_later(key: str, value: str) -> None:
    row = _LATER[key]
    if value.lower() in row.now:
        return
    if row.later and re.fullmatch(row.later, value, re.IGNORECASE | re.DOTALL):
        # The value may be a secret: it is not shown.
        raise NotSupported(f"option {key}: {row.words}")
    raise BadArgument(f"{key}={_shown(value)}: say {' or '.join(row.now)}")


def check_name(text: str, what: str, shown: Callable[[str], str] = _shown) -> str:
    """An iSCSI name (RFC 7143 section 4.2.7). Raises BadArgument, with ``shown`` of it."""
    # What is not UTF-8 on the command line is here as lone surrogates.
    length = len(text.encode(errors="surrogatepass"))
    if length > _MAXIMUM_NAME:
        raise BadArgument(f"{what}: a name of {length} bytes; at most {_MAXIMUM_NAME}")
    if not _is_utf8(text) or not any(pattern.fullmatch(text) for pattern in (_IQN, _EUI, _NAA)):
        raise BadArgument(
            f"{what} {shown(text)} is no iSCSI name; "
            "write iqn.YYYY-MM.reversed.domain[:string], eui.<16 hex> or naa.<16 or 32 hex>"
        )
    return text


def _is_utf8(text: str) -> bool:
    """Text of the command line or of the environment, in which Python has a lone surrogate for
    each byte that is none of UTF-8. What goes into iSCSI's text keys has to be UTF-8."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def parse_url(text: str) -> Url:
    """Take a URL apart. Raises BadArgument, or NotSupported for what is not built yet; the text
    never shows user info."""
    url = split_url(text)
    return url


def check_scheme(url: Url, options: Options) -> None:
    """Raises NotSupported for ``options`` that the URL's scheme knows nothing of."""
    asked = (options.header_digest, options.data_digest)
    if url.scheme == "iser" and asked != ("None", "None"):
        raise NotSupported(_DIGEST)
    if url.scheme == "iscsi" and options.rcap != "auto":
        raise NotSupported("rcap: an iscsi:// URL means TCP; leave it out, or use an iser:// URL")


def parse_place(text: str) -> Url:
    """A URL that needs no target: ``iqn`` is "" then. ``isns://HOST[:PORT]`` is one, too. Raises
    BadArgument."""
    return split_url(text, needs_target=False)


def split_url(text: str, needs_target: bool = True) -> Url:
    """The grammar alone. Raises BadArgument."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise BadArgument(f"not a URL: it has no scheme; write {_EXAMPLE}")
    scheme = scheme.lower()
    if scheme not in (("iser", "iscsi") if needs_target else ("iser", "iscsi", "isns")):
        name = _shown(scheme) if scheme.isalnum() else "in front of ://"
        raise BadArgument(f"unknown scheme {name}; write {_EXAMPLE}")
    authority, slash, path = rest.partition("/")
    if slash:
        path, question, query = path.partition("?")
    else:
        authority, question, query = authority.partition("?")
    # With an @ behind the first slash, user info was meant that has a slash in it.
    shown: Callable[[str], str] = _shown if "@" not in path else _hidden
    user, password, portal = _user_info(authority)
    host, port = _host_port(portal, ISNS_PORT if scheme == "isns" else DEFAULT_PORT)
    if not path and needs_target:
        raise BadArgument(f"the URL names no target; write {_EXAMPLE}")
    iqn, slash, lun = path.partition("/")
    iqn = check_name(unquote(iqn), "target name", shown) if path else ""
    if slash and not lun:
        raise BadArgument("the URL ends in / without a LUN; add its number, or leave out the /")
    options = _query(query) if question else {}
    if options.pop("iser", None) is not None:
        scheme = "iser"  # libiscsi's other way to say it
    return Url(
        scheme=scheme,
        host=host,
        port=port,
        iqn=iqn,
        lun=_lun(lun, shown) if lun else None,
        user=user,
        password=password,
        options=options,
    )


def parse_portal(text: str) -> tuple[str, int]:
    """Host and port of ``HOST[:PORT]``, ``[IPv6 address][:PORT]``. Raises BadArgument."""
    if "/" in text or "@" in text:
        raise BadArgument(f"portal {text.rpartition('@')[2][:60]!r}: write HOST[:PORT], or a URL")
    return _host_port(text)


def _user_info(authority: str) -> tuple[str, Secret, str]:
    info, at, portal = authority.rpartition("@")
    if not at:
        return "", Secret(), authority
    match = re.search("[%:]", info)
    user = info[: match.start()] if match else info
    if not user:
        raise BadArgument("the URL has an @ without a user in front of it; write user%password@")
    return user, Secret(info[match.end() :] if match else ""), portal


def _host_port(portal: str, default: int = DEFAULT_PORT) -> tuple[str, int]:
    """Nothing of a portal is quoted: it may be user info, where the @ was forgotten."""
    if portal.startswith("["):
        host, bracket, port = portal[1:].partition("]")
        if not bracket:
            raise BadArgument("the URL has a [ without ]; write [IPv6 address]:port")
        if port and not port.startswith(":"):
            raise BadArgument("the URL has something behind ]; write [IPv6 address]:port")
        colon, port = port[:1], port[1:]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            raise BadArgument("there is no IPv6 address in the URL's [ ]; write [::1]") from None
    else:
        host, colon, port = portal.partition(":")
        if ":" in port:
            raise BadArgument("an IPv6 address in a URL needs brackets: write [address]:port")
        if not host:
            raise BadArgument(f"the URL has no host; write {_EXAMPLE}")
        if not _HOST.fullmatch(host):
            raise BadArgument(
                "the URL's host has a character that no host name has; "
                "is the @ behind user%password missing?"
            )
    if not colon:
        return host, default
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise BadArgument("the URL's port is not a number from 1 to 65535")
    return host, int(port)


def _lun(text: str, shown: Callable[[str], str]) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MAXIMUM_LUN):
        raise BadArgument(f"LUN {shown(text)}: give a number from 0 to {MAXIMUM_LUN}")
    return int(text)


def _query(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for item in query.split("&"):
        key, _, value = item.partition("=")
        key = key.replace("_", "-")
        if not key:
            raise BadArgument("an empty option in the URL; write ?key=value&key=value")
        if key in options:
            raise BadArgument(f"option {_shown(key)} is given twice in the URL")
        options[key] = value
    return options


def name_portal(host: str, port: int) -> str:
    """As people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def initiator_name(options: Options) -> str:
    """Who we are: the option, else the machine's file, else a stable name of this machine.

    Raises BadArgument when the file holds no iSCSI name.
    """
    if options.initiator_name:
        return options.initiator_name
    try:
        lines = _NAME_FILE.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in lines:
        key, equals, value = line.strip().partition("=")
        if equals and key.strip() == "InitiatorName":
            return check_name(value.strip(), f"{_NAME_FILE}: InitiatorName")
    try:
        machine = _MACHINE_ID.read_text().strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    # Hashed: the machine's ID itself is not to be shown to the network.
    digest = hashlib.sha256(f"iserblk {machine or socket.gethostname()}".encode()).hexdigest()
    return f"iqn.2026-11.io.github.iserblk:{digest[:12]}"


def parse_size(text: str, what: str) -> int:
    """Bytes, with an optional k, M, G or T (powers of 1024). Raises BadArgument."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise BadArgument(f"{what} {_shown(text)}: give a size such as 4096, 64M or 1G")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2].lower()]
