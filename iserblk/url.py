"""URLs and options: everything a user can say about where a LUN is and how to reach it.

    iser://[user[%password]@]host[:port]/target-iqn[/lun][?key=value&…]

libiscsi's grammar. User info ends at the last ``@`` before the first ``/``, splits at its first
``%`` or ``:``, is not percent-decoded, and is never shown. Errors name the thing and the remedy.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from iserblk.errors import BadArgument, NotSupported

DEFAULT_PORT = 3260
MAXIMUM_LUN = 16383
_EXAMPLE = "iser://HOST/iqn.2026-11.example:disk/0"
_NAME_FILE = Path("/etc/iscsi/initiatorname.iscsi")
_MACHINE_ID = Path("/etc/machine-id")
_IQN = re.compile(r"iqn\.\d{4}-\d{2}\.[a-z0-9][a-z0-9.-]*(:.+)?", re.IGNORECASE)
_EUI = re.compile(r"eui\.[0-9A-Fa-f]{16}")
_NAA = re.compile(r"naa\.([0-9A-Fa-f]{16}|[0-9A-Fa-f]{32})")
_MAXIMUM_NAME = 223
_SIZE = re.compile(r"(\d+)([kKmMgGtT]?)")


class Secret(str):
    """Text that must not be seen: ``str()``, ``repr()`` and formats of it say ``***``.

    ``reveal`` gives the plain text, for the one place that needs it.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return "***"

    __repr__ = __str__

    def __format__(self, _spec: str) -> str:
        return "***"

    def reveal(self) -> str:
        return str.__str__(self)


@dataclass(slots=True, frozen=True)
class Url:
    """One URL, taken apart. ``lun`` None: every disk of the target. ``options``: the keys behind
    ``?``, as given."""

    scheme: str
    host: str
    port: int
    iqn: str
    lun: int | None
    user: str = field(default="", repr=False)
    password: Secret = field(default=Secret(), repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)

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
    initiator_name: str = ""
    io_timeout: float = 30.0
    queue_depth: int = 128
    immediate_data: bool = False

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> Options:
        """From keys as users write them, ``-`` or ``_`` alike. Raises BadArgument, NotSupported."""
        values: dict[str, object] = {}
        for raw, value in pairs:
            key = raw.replace("_", "-")
            if key in _LATER:
                _check_later(key, value)
                continue
            known = _KEYS.get(key)
            if known is None:
                close = ", ".join(sorted({*_KEYS, *_LATER}))
                raise BadArgument(f"unknown option {_shown(raw)}; known are: {close}")
            name, convert = known
            if value == "":
                raise BadArgument(f"option {key} has no value; write {key}=VALUE")
            values[name] = convert(key, value)
        return cls(**values)  # type: ignore[arg-type]


def _shown(text: str) -> str:
    return repr(text[:60])


def _yes_no(key: str, value: str) -> bool:
    if value.lower() in ("yes", "on", "true", "1"):
        return True
    if value.lower() in ("no", "off", "false", "0"):
        return False
    raise BadArgument(f"{key}={_shown(value)}: say yes or no")


def _rcap(key: str, value: str) -> str:
    if value == "verbs":
        raise NotSupported("rcap=verbs is not supported yet; use rcap=iwarp (or auto)")
    if value not in ("auto", "iwarp"):
        raise BadArgument(f"{key}={_shown(value)}: say auto or iwarp")
    return value


def _seconds(key: str, value: str) -> float:
    try:
        seconds = float(value.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= 86400:
        raise BadArgument(f"{key}={_shown(value)}: give seconds, from 1 to 86400")
    return seconds


def _depth(key: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= 1024:
        raise BadArgument(f"{key}={_shown(value)}: give a number from 1 to 1024")
    return int(value)


def _name(key: str, value: str) -> str:
    return check_name(value, key)


_KEYS = {
    "rcap": ("rcap", _rcap),
    "mpa-crc": ("mpa_crc", _yes_no),
    "initiator-name": ("initiator_name", _name),
    "io-timeout": ("io_timeout", _seconds),
    "queue-depth": ("queue_depth", _depth),
    "immediate-data": ("immediate_data", _yes_no),
}

# Known, and with one value that is what happens anyway; another value is refused in words.
_LATER: dict[str, tuple[tuple[str, ...], str]] = {
    "style": (("cm",), "only style=cm is supported so far"),
    "header": (("28",), "only header=28 is supported so far"),
    "fallback": (("none",), "falling back to Traditional iSCSI is not supported yet"),
    "journal": (("off",), "recovery of unflushed writes is not supported yet; say journal=off"),
    "shared": (("yes", "no"), "say yes or no"),
    "reserve": (("none",), "persistent reservations are not supported yet"),
    "reserve-key": ((), "persistent reservations are not supported yet"),
    "chap-secret-file": ((), "CHAP is not supported yet"),
    "chap-secret-fd": ((), "CHAP is not supported yet"),
    "chap-secret-credential": ((), "CHAP is not supported yet"),
    "target-user": ((), "CHAP is not supported yet"),
    "target-password": ((), "CHAP is not supported yet"),
    "auth": (("none",), "CHAP is not supported yet; only auth=none"),
    "header-digest": (
        ("none",),
        "digests do not exist over iSER; the MPA CRC (mpa-crc=yes) protects the data",
    ),
    "data-digest": (
        ("none",),
        "digests do not exist over iSER; the MPA CRC (mpa-crc=yes) protects the data",
    ),
}
OPTION_NAMES = tuple(sorted({*_KEYS, *_LATER}))


def _check_later(key: str, value: str) -> None:
    allowed, words = _LATER[key]
    if value.lower() not in allowed:
        # The value may be a secret: it is not shown.
        raise NotSupported(f"option {key}: {words}")


def check_name(text: str, what: str) -> str:
    """An iSCSI name (RFC 7143 section 4.2.7). Raises BadArgument."""
    if len(text.encode()) > _MAXIMUM_NAME:
        raise BadArgument(f"{what}: a name of {len(text.encode())} bytes; at most {_MAXIMUM_NAME}")
    if not any(pattern.fullmatch(text) for pattern in (_IQN, _EUI, _NAA)):
        raise BadArgument(
            f"{what} {_shown(text)} is no iSCSI name; "
            "write iqn.YYYY-MM.reversed.domain[:string], eui.<16 hex> or naa.<16 or 32 hex>"
        )
    return text


def parse_url(text: str) -> Url:
    """Take a URL apart. Raises BadArgument or NotSupported; the text never shows user info."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        raise BadArgument(f"not a URL: it has no scheme; write {_EXAMPLE}")
    if scheme == "iscsi":
        raise NotSupported(
            "iscsi:// (Traditional iSCSI over TCP) is not supported yet; "
            "use iser:// with a portal that has iSER enabled"
        )
    if scheme != "iser":
        raise BadArgument(f"unknown scheme {_shown(scheme)}; write {_EXAMPLE}")
    rest, question, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    user, password, authority = _user_info(authority)
    host, port = _host_port(authority)
    if not slash or not path:
        raise BadArgument(f"the URL names no target; write {_EXAMPLE}")
    iqn, _, lun_text = path.partition("/")
    check_name(iqn, "target name")
    if user or password:
        raise NotSupported("user and password: CHAP is not supported yet; remove them from the URL")
    return Url(
        scheme=scheme,
        host=host,
        port=port,
        iqn=iqn,
        lun=_lun(lun_text) if lun_text else None,
        user=user,
        password=password,
        options=_query(query) if question else {},
    )


def _user_info(authority: str) -> tuple[str, Secret, str]:
    info, at, host = authority.rpartition("@")
    if not at:
        return "", Secret(), authority
    match = re.search("[%:]", info)
    if match is None:
        return info, Secret(), host
    return info[: match.start()], Secret(info[match.end() :]), host


def _host_port(authority: str) -> tuple[str, int]:
    if authority.startswith("["):
        host, bracket, port = authority[1:].partition("]")
        if not bracket:
            raise BadArgument("the URL has a [ without ]; write [IPv6 address]:port")
        if port and not port.startswith(":"):
            raise BadArgument(f"{_shown(port)} behind ]: write [IPv6 address]:port")
        port = port[1:] if port else str(DEFAULT_PORT)
    else:
        host, colon, port = authority.partition(":")
        if ":" in port:
            raise BadArgument("an IPv6 address needs brackets: write [address]:port")
        if not colon:
            port = str(DEFAULT_PORT)
    if not host:
        raise BadArgument(f"the URL has no host; write {_EXAMPLE}")
    if any(character.isspace() or ord(character) < 32 for character in host):
        raise BadArgument("the URL's host has a blank or control character in it")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535):
        raise BadArgument(f"port {_shown(port)}: give a number from 1 to 65535")
    return host, int(port)


def _lun(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 5 and int(text) <= MAXIMUM_LUN):
        raise BadArgument(f"LUN {_shown(text)}: give a number from 0 to {MAXIMUM_LUN}")
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
    if match is None or len(match[1]) > 19:
        raise BadArgument(f"{what} {_shown(text)}: give a size such as 4096, 64M or 1G")
    return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[match[2].lower()]
