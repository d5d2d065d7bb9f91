"""SCTP is asked for, and the kernel has none: one line with the remedy, at both ends."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from iserblk.errors import BadArgument, ConnectFailed, NotSupported
from iserblk.initiator.connecting.iwarp import Address
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.connecting.sctp import check_available, connect_sctp
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


@pytest.fixture
def no_socket(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The system gives none. The families that were asked for."""
    asked: list[int] = []

    def refuse(family: int) -> socket.socket:
        asked.append(family)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("iserblk.rcap.iwarp.sctp_association.open_socket", refuse)
    monkeypatch.setattr("iserblk.target.iscsi.listening.open_socket", refuse)
    return asked


async def test_no_socket_to_connect_with(no_socket: list[int]) -> None:
    """All addresses are tried: one may be of a family that is switched off."""
    addresses = [
        Address(socket.AF_INET6, ("::1", 3260, 0, 0)),
        Address(socket.AF_INET, ("127.0.0.1", 3260)),
    ]
    check_available()  # the kernel may have SCTP
    del no_socket[:]
    with pytest.raises(ConnectFailed, match=r"cannot connect to portal by SCTP: Too many open"):
        await connect_sctp(addresses, "portal", 5, private_data=b"", ird=1)
    assert no_socket == [socket.AF_INET6, socket.AF_INET]


@pytest.mark.usefixtures("no_socket")
def test_no_socket_to_listen_with() -> None:
    with pytest.raises(BadArgument, match=r"cannot listen on 127\.0\.0\.1:3260: Too many open"):
        listen_sctp(("127.0.0.1", 3260))


def test_sctp_has_no_byte_stream() -> None:
    with pytest.raises(NotSupported, match="SCTP has no byte stream"):
        check_scheme(URL, Options(rcap="iwarp-sctp", style="stream"))


def test_the_option_names_its_values() -> None:
    with pytest.raises(BadArgument, match="iwarp-sctp"):
        Options.from_pairs([("rcap", "sctp")])
