"""Which protocol the first bytes of a peer belong to. For messages alone."""

from __future__ import annotations

from iserblk.iscsi import bhs
from iserblk.rcap.iwarp import mpa

ISCSI = "Traditional iSCSI"
ISER = "iSER"
SSH = "an SSH server"
WEB = "a web server"
TLS = "a TLS server"
MAIL = "a mail or FTP server"

_TLS_ALERT = b"\x15\x03"


def who_untrusted(start: bytes) -> str:
    """What speaks with these first bytes: one of the constants; "": nothing that is known. They may
    be the answer to a Login Request, to an MPA Request, or a greeting."""
    if start.startswith((mpa.REPLY_KEY, mpa.REQUEST_KEY)):
        return ISER
    if start.startswith(b"SSH-"):
        return SSH
    if start.startswith(b"HTTP/") or start[:64].lstrip().lower().startswith(
        (b"<html", b"<!doctype")
    ):
        return WEB
    if start.startswith(_TLS_ALERT):
        return TLS
    if start[:4] in (b"220 ", b"220-", b"500 ", b"502 "):
        return MAIL
    if len(start) >= bhs.BHS_LENGTH and start[0] in (bhs.LOGIN_RESPONSE, bhs.REJECT):
        # The version, AHS and reserved bytes of these PDUs are zero in all versions of iSCSI.
        return ISCSI if not start[4] else ""
    return ""


def is_stranger(who: str) -> bool:
    """Whether ``who`` is known, and no target."""
    return who not in ("", ISCSI, ISER)
