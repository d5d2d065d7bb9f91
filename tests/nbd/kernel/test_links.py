"""The handshake for the kernel, and a flush, with servers that are told what to say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from iserblk.errors import IserblkError, RemoteProtocolError
from iserblk.nbd import messages as nbd
from iserblk.nbd.kernel.client import LARGEST
from iserblk.nbd.kernel.links import SO_SNDBUFFORCE, flush, kept, open_links

GREETING = nbd.GREETING.pack(nbd.MAGIC, nbd.OPTION_MAGIC, nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)
SIZE, FLAGS = 12 << 20, nbd.HAS_FLAGS | nbd.SEND_FLUSH
EXPORT = nbd.INFO_EXPORT_DATA.pack(nbd.INFO_EXPORT, SIZE, FLAGS)
BLOCK_SIZE = nbd.INFO_BLOCK_SIZE_DATA.pack(nbd.INFO_BLOCK_SIZE, 1, 4096, 1 << 25)


def reply(kind: int, data: bytes = b"", option: int = nbd.Option.GO) -> bytes:
    return nbd.OPTION_REPLY.pack(nbd.OPTION_REPLY_MAGIC, option, kind, len(data)) + data


GOOD = GREETING + reply(nbd.REP_INFO, BLOCK_SIZE) + reply(nbd.REP_INFO, EXPORT) + reply(nbd.REP_ACK)


@contextmanager
def saying(
    path: Path, words: bytes, clients: int = 1, *, ends: bool = True
) -> Iterator[list[bytes]]:
    """A server that says ``words`` to each client, then listens. Yields what the clients said.
    ``ends``: clients are to see that there will be no more."""
    heard: list[bytes] = []

    def serve() -> None:
        socks = []
        for _ in range(clients):
            sock, _ = listening.accept()
            with suppress(BrokenPipeError):
                sock.sendall(words)
            if ends:
                sock.shutdown(socket.SHUT_WR)
            socks.append(sock)
        for sock in socks:
            # A client that does not like the words closes before it has read them.
            with sock, sock.makefile("rb") as file, suppress(ConnectionResetError, BrokenPipeError):
                heard.append(file.read())

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield heard
        finally:
            thread.join()


def test_a_large_write_fits_into_the_socket(tmp_path: Path) -> None:
    """Else the kernel waits for the server several times in each."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, 4096)
        except PermissionError:
            pytest.skip("only root with CAP_NET_ADMIN may go beyond net.core.wmem_max")
    with saying(path, GOOD), open_links(path, 1) as (link,):
        # The kernel doubles the number, for what the bytes cost it.
        room = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert room == 2 * LARGEST


def test_size_and_flags_of_the_default_export(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with saying(path, GOOD, 2) as heard, open_links(path, 2) as links:
        assert [(link.size, link.flags) for link in links] == [(SIZE, FLAGS)] * 2
        assert all(link.sock.getblocking() for link in links)
        inodes = {link.inode for link in links}
        assert len(inodes) == 2 and kept(inodes) == inodes
    data = bytes(6)  # the default export, and no wishes
    said = nbd.CLIENT_FLAGS.pack(3) + nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.Option.GO, 6) + data
    assert heard == [said] * 2
    assert kept(inodes) == set()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (b"", "has ended the connection"),
        (GREETING[:-1], "has ended the connection"),
        (b"x" * len(GREETING), "fixed newstyle"),
        (nbd.GREETING.pack(nbd.MAGIC, nbd.OPTION_MAGIC, 0), "fixed newstyle"),
        (GREETING + reply(nbd.REP_ERR_POLICY, b"not you"), "refuses the default export: not you"),
        (GREETING + reply(nbd.REP_ERR_UNKNOWN), "refuses the default export: reply 0x80000006"),
        (GREETING + reply(nbd.REP_ACK), "refuses the default export"),
        (GREETING + reply(nbd.REP_INFO, EXPORT[:-1]), "of a wrong length"),
        (GREETING + reply(nbd.REP_INFO, EXPORT, option=nbd.Option.INFO), "no answer to"),
        (GREETING + nbd.OPTION_REPLY.pack(nbd.OPTION_REPLY_MAGIC, 7, 3, 1 << 31), "no answer to"),
    ],
)
def test_what_a_server_must_not_say(words: bytes, error: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with (
        saying(path, words),
        pytest.raises(RemoteProtocolError, match=error),
        open_links(path, 1),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "failure"),
    [
        (GOOD + nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, 0, 0), ""),
        (GOOD + nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, 5, 0), "Input/output error"),
        (GOOD + nbd.SIMPLE_REPLY.pack(nbd.SIMPLE_REPLY_MAGIC, 0xFFFF_FFFF, 0), " 2147483647"),
        (GOOD + nbd.SIMPLE_REPLY.pack(7, 0, 0), "no answer to the flush"),
        (GOOD, "has ended the connection"),
        (GREETING + reply(nbd.REP_ERR_POLICY, b"not you"), "refuses the default export: not you"),
    ],
)
def test_a_flush(words: bytes, failure: str, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with saying(path, words) as heard:
        said = flush(path, 10)
        assert said.endswith(failure) and bool(said) is bool(failure)
    if words.startswith(GOOD):
        assert heard[0].endswith(nbd.REQUEST.pack(nbd.REQUEST_MAGIC, 0, nbd.FLUSH, 0, 0, 0))


def test_a_server_that_has_nothing_to_flush_is_not_asked(tmp_path: Path) -> None:
    """As for a LUN that is read-only."""
    export = nbd.INFO_EXPORT_DATA.pack(nbd.INFO_EXPORT, SIZE, nbd.HAS_FLAGS)
    words = GREETING + reply(nbd.REP_INFO, export) + reply(nbd.REP_ACK)
    with saying(tmp_path / "socket", words) as heard:
        assert flush(tmp_path / "socket", 10) == ""
    assert heard[0].endswith(bytes(6))


def test_a_server_that_does_not_answer_a_flush(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    assert flush(path, 10) == "No such file or directory"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        assert flush(path, 0.01) == "timed out"
    path.unlink()
    with saying(path, GOOD, ends=False):
        assert flush(path, 0.2) == "timed out"


def test_no_server(tmp_path: Path) -> None:
    with (
        pytest.raises(IserblkError, match="socket: No such file"),
        open_links(tmp_path / "socket", 1),
    ):
        pass
