"""iSCSI names: their syntax (RFC 7143 section 4.2.7), and the name of this machine."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

from iserblk.errors import BadArgument

log = logging.getLogger(__name__)

NAME_FILE = Path("/etc/iscsi/initiatorname.iscsi")
MACHINE_ID = Path("/etc/machine-id")
_IQN = re.compile(r"iqn\.[0-9]{4}-[0-9]{2}\.[a-z0-9][a-z0-9.-]*(:[^\s/\x00-\x1f]+)?", re.IGNORECASE)
_EUI = re.compile(r"eui\.[0-9A-Fa-f]{16}")
_NAA = re.compile(r"naa\.([0-9A-Fa-f]{16}|[0-9A-Fa-f]{32})")
MAXIMUM_NAME = 223  # bytes
SAID: set[str] = set()  # what was said: a name is looked for at each login


def shown(text: str) -> str:
    """The beginning of a user's text, quoted for error texts. One with an @ is not shown: on either
    side there may be a secret, where it was meant for a URL."""
    return "(not shown, for its @)" if "@" in text else repr(text[:60])


def suggestion(word: str, known: Iterable[str]) -> str:
    """What was meant, perhaps, as the end of a sentence; "": nothing is known that is similar."""
    import difflib  # noqa: PLC0415 - for mistakes alone

    close = difflib.get_close_matches(word, list(known), 3)
    return f": is it {' or '.join(close)}?" if close else ""


def check_name(text: str, what: str, quote: Callable[[str], str] = shown) -> str:
    """Check an iSCSI name (RFC 7143 section 4.2.7), and return it. Raises BadArgument, whose text
    quotes the name with ``quote``; ``what`` says what it names."""
    # Bytes of the command line that are not UTF-8 are lone surrogates here.
    length = len(text.encode(errors="surrogatepass"))
    if length > MAXIMUM_NAME:
        raise BadArgument(f"{what}: a name of {length} bytes; at most {MAXIMUM_NAME}")
    if not _is_utf8(text) or not any(pattern.fullmatch(text) for pattern in (_IQN, _EUI, _NAA)):
        raise BadArgument(
            f"{what} {quote(text)} is no iSCSI name; "
            "write iqn.YYYY-MM.reversed.domain[:string], eui.<16 hex> or naa.<16 or 32 hex>"
        )
    return text


def may_name(text: str) -> bool:
    """Whether a name that comes from the network, or from a file that such names go into, may be
    kept, compared and logged: it is printable, and has 1 to MAXIMUM_NAME bytes, also in lower case,
    in which names are compared (RFC 7143 section 4.2.7). Its form is not looked at: there are
    initiators that call themselves otherwise."""
    return (
        0 < len(text) <= MAXIMUM_NAME
        and text.isprintable()  # which lone surrogates are not
        and max(len(text.encode()), len(text.lower().encode())) <= MAXIMUM_NAME
    )


def _is_utf8(text: str) -> bool:
    """Whether text of the command line or environment was UTF-8, as iSCSI's text keys require.
    Python puts a lone surrogate in place of each byte that is not UTF-8."""
    return not any("\ud800" <= each <= "\udfff" for each in text)


def machine_id() -> str:
    """The machine's ID, machine-id(5); "" if there is none."""
    try:
        return MACHINE_ID.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def initiator_name(given: str) -> str:
    """The initiator's name: ``given``, else that of NAME_FILE, else a stable name of this machine;
    in the last case with a warning, once, where there is such a file.

    Raises BadArgument if the name in the file is no iSCSI name.
    """
    if given:
        return given
    name, problem = _name_in_file()
    if name:
        return check_name(name, f"{NAME_FILE}: InitiatorName")
    # Hashed, because the machine's ID itself must not be sent to the network.
    digest = hashlib.sha256(f"iserblk {machine_id() or socket.gethostname()}".encode()).hexdigest()
    own = f"iqn.2026-11.io.github.iserblk:{digest[:12]}"
    if problem and problem not in SAID:
        SAID.add(problem)
        log.warning(
            "%s: %s: this host calls itself %s, which targets may not admit; correct the file, or"
            " give initiator-name=",
            NAME_FILE,
            problem,
            own,
        )
    return own


def _name_in_file() -> tuple[str, str]:
    """What NAME_FILE has as a name, "" for none; and then what is wrong with the file, "" where
    there is none. A mark of its encoding, and comments in any encoding, do no harm."""
    try:
        text = NAME_FILE.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    except (FileNotFoundError, NotADirectoryError):
        return "", ""
    except OSError as error:
        return "", error.strerror or str(error)
    for line in text.splitlines():
        key, equals, value = line.strip().partition("=")
        if equals and key.strip() == "InitiatorName":
            return value.strip(), ""
    return "", "it has no line InitiatorName=NAME"


def random_isid() -> bytes:
    """An ISID of one session alone: two processes must not reinstate each other's."""
    return bytes((0x80, *secrets.token_bytes(5)))
