"""Which sockets get TCP's plain algorithm."""

from __future__ import annotations

import errno
import socket

import pytest

from iserblk.sockets.pacing import unpace

ALGORITHM = (socket.IPPROTO_TCP, socket.TCP_CONGESTION)


class Recorder:
    """Stands in for a socket. ``refuses``: an administrator allows another algorithm only."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.options: list[tuple[int, int, bytes]] = []

    def setsockopt(self, level: int, optname: int, value: bytes, /) -> None:
        self.options.append((level, optname, value))
        if self.refuses:
            raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("address", [("127.0.0.1", 3260), ("127.8.0.1", 0), ("::1", 3260, 0, 0)])
def test_within_the_machine_the_algorithm_is_the_plain_one(address: object) -> None:
    sock = Recorder()
    unpace(sock, address)
    assert sock.options == [(*ALGORITHM, b"reno")]


@pytest.mark.parametrize(
    "address", [("192.0.2.1", 3260), ("0.0.0.0", 0), ("fe80::1%lo", 3260, 0, 1), ("localhost", 1)]
)
def test_elsewhere_the_system_decides(address: object) -> None:
    sock = Recorder()
    unpace(sock, address)
    assert not sock.options


def test_where_that_is_forbidden_the_connection_is_as_it_was() -> None:
    sock = Recorder(refuses=True)
    unpace(sock, ("127.0.0.1", 3260))
    assert sock.options


def test_connections_have_the_algorithm_of_their_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        unpace(listener, listener.getsockname())
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as taken:
            assert taken.getsockopt(*ALGORITHM, 16).rstrip(b"\0") == b"reno"
