"""Options of a connection, in one table: everything that a user can set and that is no address.

Keys of URLs, nbdkit's parameters and ``-o`` are read with it; hyphens and underscores mean the
same. Errors name the option and the remedy, and show no value that may be a secret.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from iserblk.errors import BadArgument
from iserblk.metrics.address import parse_address
from iserblk.names import check_name, shown, suggestion
from iserblk.secret import Secret

RCAPS = ("auto", "verbs", "iwarp", "iwarp-sctp")  # RDMA providers, and: the best one
# Those whose connections were never a byte stream, and what they are in words.
NO_BYTE_STREAM = {"verbs": "an RDMA device", "iwarp-sctp": "SCTP"}
PORTAL = "portal"  # of ``Options.discover``: the target itself is asked, by SendTargets
SMALLEST_JOURNAL = 64 << 10
SMALLEST_TRANSFER = 512
LARGEST_TRANSFER = 1 << 20
MOST_CONNECTIONS = 8  # of one session
COMMAND_TIMEOUT_S = 30.0  # where io-timeout is longer, and says nothing of it
# The defaults of attach and mount, whose users a failed request ends; and the same in words.
LASTING = {"io-timeout": f"180/{COMMAND_TIMEOUT_S:g}"}
LASTING_WORDS = {"io-timeout": "180"}
FOREVER = "forever"
BUSY_POLL_US = 1000  # longer than a round trip on a local network, in virtual machines, too
_SIZE = re.compile(
    r"([0-9]{1,19})(?:(?:\.([0-9]{1,9}))?([kmgt])(?:i?b)?)?", re.IGNORECASE | re.ASCII
)


@dataclass(slots=True, frozen=True)
class Options:
    """The options of one connection. Times are seconds.

    ``io_timeout``: after which a request fails, whatever the cause; ``math.inf``: never.
    ``command_timeout``: after which a command is aborted, and sent again, that the target leaves
    unanswered on a living connection; never longer than ``io_timeout``, and where both are the
    same, the request fails.
    """

    rcap: str = "auto"
    style: str = "auto"  # or "cm", "stream": how a connection becomes iSER
    mpa_crc: bool = True
    mpa_frames: int = 0  # TCP segments that a frame may fill; 0: as many as the peer accepts
    initiator_name: str = ""
    isid: bytes = b""  # of the first session; b"": a random one
    io_timeout: float = 30.0
    command_timeout: float = 30.0
    queue_depth: int = 128
    max_transfer: int = 0  # bytes of one READ or WRITE; 0: as the LUN says
    journal: int = 56 << 20  # bytes; 0: none. A server then takes less than 110 MiB
    shared: bool = False  # other hosts also write to the LUNs
    connections: int = 1  # of the session, at most
    error_recovery_level: int = 0  # the highest that is asked for
    busy_poll_us: int = BUSY_POLL_US
    immediate_data: bool = True
    hello: bool = False  # declare iSERHelloRequired; with the 12-byte header there is always one
    header: int = 28  # bytes of the iSER header: 28 (RFC 7145) or 12 (RFC 5046)
    unsolicited_data: str = "auto"  # or "yes", "no"
    header_digest: str = "None"  # value of the text key: a list, best first
    data_digest: str = "None"
    auth: str = ""  # "": CHAP if credentials are given
    target_user: str = ""
    target_password: Secret = field(default_factory=Secret)
    chap_secret_file: str = ""  # an absolute path
    chap_secret_fd: int | None = None
    chap_secret_credential: str = ""  # a file's name
    reserve: bool = False  # exclusively
    reserve_key: int = 0  # 0: this machine's own key
    fallback: str = "none"  # or "iscsi"
    discover: str = ""  # PORTAL, or the URL of a server or agent: it tells of other portals
    alua: str = "ask"  # or "follow": whether a port's state may be set
    metrics: str = ""  # address as iserblk.metrics.address takes it; "": metrics are not served

    @classmethod
    def from_pairs(cls, pairs: Iterable[tuple[str, str]]) -> Options:
        """The options for keys as users write them, with ``-`` or ``_``. Raises BadArgument,
        NotSupported."""
        values: dict[str, object] = {}
        seen: set[str] = set()
        for raw, value in pairs:
            key = raw.replace("_", "-")
            if key not in _KEYS:
                meant = suggestion(key, OPTION_NAMES)
                raise BadArgument(
                    f"unknown option {shown(raw)}"
                    f"{meant or '; the options are: ' + ', '.join(OPTION_NAMES)}"
                )
            if key in seen:
                raise BadArgument(f"option {key} is given twice")
            seen.add(key)
            if value == "":
                raise BadArgument(f"option {key} has no value; write {key}=VALUE")
            name, convert = _KEYS[key]
            values[name] = convert(key, value)
            if key == "io-timeout":
                values["io_timeout"], values["command_timeout"] = parse_timeouts(key, value)
        if values.get("reserve_key") and not values.get("reserve"):
            raise BadArgument("reserve-key has no effect without reserve=exclusive; add that")
        if values.get("header") == 12 and values.get("hello") is False:
            raise BadArgument(
                "header=12 is RFC 5046, whose connections always begin with a Hello; leave out"
                " hello=no"
            )
        return cls(**values)  # type: ignore[arg-type]


def parse_metrics(key: str, value: str) -> str:
    """Where metrics are to be served, as ``iserblk.metrics.address`` takes it; "": nowhere. Raises
    BadArgument."""
    if value.lower() in ("off", "no"):
        return ""
    parse_address(value, key)
    return value


def _yes_no(key: str, value: str) -> bool:
    if value.lower() in ("yes", "on", "true", "1"):
        return True
    if value.lower() in ("no", "off", "false", "0"):
        return False
    raise BadArgument(f"{key}={shown(value)}: say yes or no")


def _auto_yes_no(key: str, value: str) -> str:
    if value.lower() == "auto":
        return "auto"
    try:
        return "yes" if _yes_no(key, value) else "no"
    except BadArgument:
        raise BadArgument(f"{key}={shown(value)}: say auto, yes or no") from None


def _rcap(key: str, value: str) -> str:
    if value not in RCAPS:
        raise BadArgument(f"{key}={shown(value)}: say {', '.join(RCAPS[:-1])} or {RCAPS[-1]}")
    return value


def _style(key: str, value: str) -> str:
    if value.lower() not in ("auto", "cm", "stream"):
        raise BadArgument(f"{key}={shown(value)}: say auto, cm or stream")
    return value.lower()


def _frames(key: str, value: str) -> int:
    if value.lower() == "auto":
        return 0
    if not value.isascii() or not value.isdigit() or not 1 <= int(value[:9]) <= 64:
        raise BadArgument(f"{key}={shown(value)}: say auto, or a number of segments from 1 to 64")
    return int(value)


def _fallback(key: str, value: str) -> str:
    if value.lower() not in ("none", "iscsi"):
        raise BadArgument(f"{key}={shown(value)}: say none or iscsi")
    return value.lower()


def _portals(key: str, value: str) -> str:
    if value.lower() == "given":
        return ""
    if value.lower() == "discover":
        return PORTAL
    if not value.lower().startswith(("isns://", "slp://")):
        raise BadArgument(f"{key}={shown(value)}: say given, discover, isns://HOST or slp://[HOST]")
    return value


def _alua(key: str, value: str) -> str:
    if value.lower() not in ("ask", "follow"):
        raise BadArgument(f"{key}={shown(value)}: say ask or follow")
    return value.lower()


def _header(key: str, value: str) -> int:
    if value not in ("28", "12"):
        raise BadArgument(f"{key}={shown(value)}: say 28 or 12")
    return int(value)


def parse_timeouts(key: str, value: str) -> tuple[float, float]:
    """The limits for a request and for a command (see Options): ``SECONDS``, which holds for both;
    ``forever``, which is about requests alone; or either, a slash, and the limit for a command.
    Raises BadArgument."""
    first, slash, second = value.partition("/")
    lasting = first.lower() == FOREVER
    request = math.inf if lasting else _seconds(first)
    command = _seconds(second) if slash else COMMAND_TIMEOUT_S if lasting else request
    if request is None or command is None:
        raise BadArgument(f"{key}={shown(value)}: give seconds, from 1 to 86400, or {FOREVER}")
    if command > request:
        raise BadArgument(
            f"{key}={shown(value)}: the limit for one command, behind the slash, is longer than "
            "that for a request"
        )
    return request, command


def _seconds(text: str) -> float | None:
    """None: it is no number of seconds from 1 to 86400."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        return None
    return seconds if 1 <= seconds <= 86400 else None


def _request_timeout(key: str, value: str) -> float:
    return parse_timeouts(key, value)[0]


def _number(value: str) -> int:
    """A decimal number of up to 9 digits; -1 for anything else."""
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else -1


def _depth(key: str, value: str) -> int:
    depth = _number(value)
    if not 1 <= depth <= 1024:
        raise BadArgument(f"{key}={shown(value)}: give a number from 1 to 1024")
    return depth


def _connections(key: str, value: str) -> int:
    connections = _number(value)
    if not 1 <= connections <= MOST_CONNECTIONS:
        raise BadArgument(f"{key}={shown(value)}: give a number from 1 to {MOST_CONNECTIONS}")
    return connections


def _level(key: str, value: str) -> int:
    if value not in ("0", "1", "2"):
        raise BadArgument(f"{key}={shown(value)}: say 0, 1 or 2")
    return int(value)


def _microseconds(key: str, value: str) -> int:
    microseconds = _number(value)
    if not 0 <= microseconds <= 1_000_000:
        raise BadArgument(f"{key}={shown(value)}: give microseconds from 0 (never) to 1000000")
    return microseconds


def _transfer(key: str, value: str) -> int:
    size = size_of(value) or 0
    if not SMALLEST_TRANSFER <= size <= LARGEST_TRANSFER:
        raise BadArgument(
            f"{key}={shown(value)}: give a size from {SMALLEST_TRANSFER} to"
            f" {LARGEST_TRANSFER >> 20}M"
        )
    return size


def _journal(key: str, value: str) -> int:
    if value.lower() == "off":
        return 0
    size = size_of(value) or 0
    if size < SMALLEST_JOURNAL:
        least = f"{SMALLEST_JOURNAL >> 10}k"
        raise BadArgument(f"{key}={shown(value)}: say off, or a size of {least} or more")
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
        raise BadArgument(f"{key}={shown(value)}: say none, crc32c, or crc32c,none for either")
    return digest


def _name(key: str, value: str) -> str:
    return check_name(value, key)


def _isid(key: str, value: str) -> bytes:
    if not re.fullmatch("[0-9A-Fa-f]{12}", value):
        raise BadArgument(f"{key}={shown(value)}: give 12 hexadecimal digits")
    return bytes.fromhex(value)


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
        raise BadArgument(f"{key}: give the file's full path, beginning with /")
    return value


def _descriptor(key: str, value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 6):
        raise BadArgument(f"{key}: give the number of an open file descriptor")
    return int(value)


def _file_name(key: str, value: str) -> str:
    if "/" in value or value in (".", ".."):
        raise BadArgument(f"{key}: give the name of a systemd credential, not a path")
    return value


def _reserve(key: str, value: str) -> bool:
    if value.lower() not in ("none", "exclusive"):
        raise BadArgument(f"{key}={shown(value)}: say none or exclusive")
    return value.lower() == "exclusive"


def _reserve_key(key: str, value: str) -> int:
    number = int(value, 16) if re.fullmatch("0[xX][0-9A-Fa-f]{1,16}", value) else 0
    if not number:
        raise BadArgument(f"{key}={shown(value)}: give a number from 0x1 to 0xffffffffffffffff")
    return number


_KEYS: dict[str, tuple[str, Callable[[str, str], object]]] = {
    "rcap": ("rcap", _rcap),
    "style": ("style", _style),
    "mpa-crc": ("mpa_crc", _yes_no),
    "mpa-frames": ("mpa_frames", _frames),
    "initiator-name": ("initiator_name", _name),
    "isid": ("isid", _isid),
    "io-timeout": ("io_timeout", _request_timeout),
    "queue-depth": ("queue_depth", _depth),
    "connections": ("connections", _connections),
    "error-recovery-level": ("error_recovery_level", _level),
    "busy-poll": ("busy_poll_us", _microseconds),
    "immediate-data": ("immediate_data", _yes_no),
    "hello": ("hello", _yes_no),
    "header": ("header", _header),
    "unsolicited-data": ("unsolicited_data", _auto_yes_no),
    "max-transfer": ("max_transfer", _transfer),
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
    "alua": ("alua", _alua),
    "metrics": ("metrics", parse_metrics),
}


OPTION_NAMES = tuple(sorted(_KEYS))


def default_of(key: str) -> str:
    """The default of an option, as users would write it; "": it is no word."""
    value = getattr(Options(), _KEYS[key][0])
    if isinstance(value, bool):
        return "yes" if value else "no"
    if key == "mpa-frames":
        return "auto"
    if key == "journal":
        return size_text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def size_text(size: int) -> str:
    """A number of bytes as users would write it: 56M."""
    for shift, unit in ((40, "T"), (30, "G"), (20, "M"), (10, "k")):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


def size_of(text: str) -> int | None:
    """The number of bytes that ``text`` means: a number, or one with k, M, G or T behind it, which
    are powers of 1024, perhaps with a fraction (rounded down), iB or B: 1.5G, 64MiB. None: it means
    none."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    whole, fraction, unit = match.groups(default="")
    shift = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[unit.lower()]
    scale: int = 10 ** len(fraction)
    return (int(whole + fraction) << shift) // scale


def parse_size(text: str, what: str) -> int:
    """The number of bytes that ``text`` means (``size_of``). Raises BadArgument; ``what`` names the
    thing in its text."""
    size = size_of(text)
    if size is None:
        raise BadArgument(f"{what} {shown(text)}: give a size such as 4096, 64M or 1.5G")
    return size
