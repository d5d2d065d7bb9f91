"""What the first bytes of a peer say about it."""

from __future__ import annotations

import pytest

from iserblk.initiator.connecting.protocols import (
    ISCSI,
    ISER,
    MAIL,
    SSH,
    TLS,
    WEB,
    is_stranger,
    who_untrusted,
)


@pytest.mark.parametrize(
    ("start", "who"),
    [
        (b"", ""),
        (b"\x23" + bytes(46), ""),  # not the whole of a BHS
        (b"\x23" + bytes(47), ISCSI),
        (b"\x3f\x80" + bytes(46), ISCSI),
        (b"\x23" + b"#" * 47, ""),
        (b"MPA ID Rep Frame\x60\x01\0\0", ISER),
        (b"MPA ID Rep", ""),
        (b"SSH-2.0-dropbear\r\n", SSH),
        (b"HTTP/1.0 400", WEB),
        (b"<!DOCTYPE HTML>\n<html>", WEB),
        (b"\x15\x03\x01\0\x02\x02\x46", TLS),
        (b"220 mail.example ESMTP\r\n", MAIL),
        (b"\xff" * 64, ""),
    ],
)
def test_first_bytes(start: bytes, who: str) -> None:
    assert who_untrusted(start) == who
    assert is_stranger(who) == (who not in ("", ISCSI, ISER))
