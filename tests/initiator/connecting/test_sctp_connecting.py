"""SCTP is asked for, and the kernel has none: one line with the remedy, at both ends."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from iserblk.errors import BadArgument, NotSupported
from iserblk.initiator.connecting.reach import connect
from iserblk.options import Options
from iserblk.target.iscsi.listening import listen_sctp
from iserblk.url import check_scheme, parse_url

URL = parse_url("iser://127.0.0.1:3260/iqn.2026-11.example:disk/0?rcap=iwarp-sctp")
OPTIONS = Options(rcap="iwarp-sctp")


@pytest.fixture
def no_sctp(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without(*words: Any, **more: Any) -> socket.socket:
        if socket.IPPROTO_SCTP in words:
            raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
        return real(*words, **more)

    monkeypatch.setattr("iserblk.rcap.iwarp.sctp_association.socket.socket", without)


@pytest.mark.usefixtures("no_sctp")
async def test_the_initiator_says_what_to_do() -> None:
    with pytest.raises(NotSupported, match=r"rcap=iwarp-sctp: .*modprobe sctp.*or say rcap=iwarp"):
        await connect(URL, OPTIONS)


@pytest.mark.usefixtures("no_sctp")
def test_the_target_says_what_to_do() -> None:
    with pytest.raises(NotSupported, match=r"transport=sctp: .*modprobe sctp"):
        listen_sctp(("127.0.0.1", 3260))


def test_sctp_has_no_byte_stream() -> None:
    with pytest.raises(NotSupported, match="SCTP has no byte stream"):
        check_scheme(URL, Options(rcap="iwarp-sctp", style="stream"))


def test_the_option_names_its_values() -> None:
    with pytest.raises(BadArgument, match="iwarp-sctp"):
        Options.from_pairs([("rcap", "sctp")])
