"""iSCSI names: what one is (RFC 7143 section 4.2.7), and which this machine has."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable
from pathlib import Path

from iserblk.errors import BadArgument

NAME_FILE = Path("/etc/iscsi/initiatorname.iscsi")
MACHINE_ID = Path("/etc/machine-id")
_IQN = re.compile(r"iqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9][a-z0-9.-]*(:[^\s/\x00-\x1f]+)?", re.IGNORECASE)
_EUI = re.compile(r"eui\.[0-9A-Fa-f]{16}")
_NAA = re.compile(r"naa\.([0-9A-Fa-f]{16}|[0-9A-Fa-f]{32})")
_MAXIMUM_NAME = 223


def shown(text: str) -> str:
    """Text of the user's, as errors quote it."""
    return repr(text[:60])


def check_name(text: str, what: str, quote: Callable[[str], str] = shown) -> str:
    """An iSCSI name (RFC 7143 section 4.2.7). Raises BadArgument, which quotes it by ``quote``."""
    # What is not UTF-8 on the command line is here as lone surrogates.
    length = len(text.encode(errors="surrogatepass"))
    if length > _MAXIMUM_NAME:
        raise BadArgument(f"{what}: a name of {length} bytes; at most {_MAXIMUM_NAME}")
    if not _is_utf8(text) or not any(pattern.fullmatch(text) for pattern in (_IQN, _EUI, _NAA)):
        raise BadArgument(
            f"{what} {quote(text)} is no iSCSI name; "
            "write iqn.YYYY-MM.reversed.domain[:string], eui.<16 hex> or naa.<16 or 32 hex>"
        )
    return text


def _is_utf8(text: str) -> bool:
    """Text of the command line or of the environment, in which Python has a lone surrogate for
    each byte that is none of UTF-8. What goes into iSCSI's text keys has to be UTF-8."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def machine_id() -> str:
    """machine-id(5); "" where there is none."""
    try:
        return MACHINE_ID.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def initiator_name(given: str) -> str:
    """Who we are: what was ``given``, else the machine's file, else a stable name of this machine.

    Raises BadArgument when the file holds no iSCSI name.
    """
    if given:
        return given
    try:
        lines = NAME_FILE.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        lines = []
    for line in lines:
        key, equals, value = line.strip().partition("=")
        if equals and key.strip() == "InitiatorName":
            return check_name(value.strip(), f"{NAME_FILE}: InitiatorName")
    # Hashed: the machine's ID itself is not to be shown to the network.
    digest = hashlib.sha256(f"iserblk {machine_id() or socket.gethostname()}".encode()).hexdigest()
    return f"iqn.2026-11.io.github.iserblk:{digest[:12]}"
