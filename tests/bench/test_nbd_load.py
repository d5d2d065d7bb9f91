"""The NBD client of scripts/bench growth: what it sends, and what it makes of the answers."""

from __future__ import annotations

import json
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchlib import nbd_load
from benchlib.nbd_load import BLOCK, Connection, LoadFailed

SIZE = 8 * BLOCK
EIO = 5
DISCONNECT = 2
GREETING = b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3)
EXPORT = struct.pack(">QH", SIZE, 1)
WAIT_S = 30.0


def reply(error: int = 0, data: bytes = bytes(BLOCK)) -> bytes:
    """A simple reply of the protocol."""
    return struct.pack(">IIQ", 0x67446698, error, 0) + data


class Peer:
    """The server's end of one connection, played by a test."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(WAIT_S)
        self.sock = sock

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def hear(self, length: int) -> bytes:
        return self.sock.recv(length, socket.MSG_WAITALL)

    def export_name(self) -> bytes:
        """The rest of the handshake from the client."""
        flags, magic, option, length = struct.unpack(">I8sII", self.hear(20))
        assert (flags, magic, option) == (3, b"IHAVEOPT", 1)
        return self.hear(length)

    def request(self) -> tuple[int, int, int]:
        """Command, offset and length."""
        magic, flags, command, _cookie, offset, length = struct.unpack(">IHHQQI", self.hear(28))
        assert (magic, flags) == (0x25609513, 0)
        return command, offset, length

    def is_quiet(self) -> bool:
        """Nothing is there to be heard, not even an end."""
        return not select.select([self.sock], [], [], 0)[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def connect(stack: ExitStack, said: bytes = GREETING + EXPORT) -> tuple[Connection, Peer]:
    ours, theirs = (stack.enter_context(sock) for sock in socket.socketpair(socket.AF_UNIX))
    peer = Peer(theirs)
    peer.say(said)
    connection = Connection(ours, "lun7")
    assert peer.export_name() == b"lun7"
    return connection, peer


def test_requests_are_whole_blocks_inside_the_export(stack: ExitStack) -> None:
    connection, peer = connect(stack)
    for _ in range(200):
        connection.request()
    assert peer.is_quiet()
    connection.send()
    requests = [peer.request() for _ in range(200)]
    assert {(command, length) for command, _, length in requests} == {(0, BLOCK)}
    assert {offset for _, offset, _ in requests} == set(range(0, SIZE, BLOCK))
    connection.send()
    assert peer.is_quiet()
    connection.disconnect()
    assert peer.request() == (DISCONNECT, 0, 0)


def test_replies_count_when_they_are_whole(stack: ExitStack) -> None:
    connection, peer = connect(stack)
    both = reply() + reply()
    for start, end, count in ((0, 4000, 0), (4000, 4121, 1), (4121, 8223, 0), (8223, 8224, 1)):
        peer.say(both[start:end])
        assert connection.answered() == count
    peer.say(both)
    assert connection.answered() == 2


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (reply(EIO, b""), "lun7: a read failed.*error 5"),
        (reply() + reply(EIO, b""), "lun7: a read failed.*error 5"),
        (b"x" * 16, "lun7: a read failed: magic 0x78787878"),
    ],
)
def test_read_that_fails_is_told(stack: ExitStack, answer: bytes, words: str) -> None:
    connection, peer = connect(stack)
    peer.say(answer)
    with pytest.raises(LoadFailed, match=words):
        connection.answered()


def test_server_that_goes_away_is_told(stack: ExitStack) -> None:
    connection, peer = connect(stack)
    peer.sock.close()
    with pytest.raises(LoadFailed, match="lun7: the server closed the connection"):
        connection.answered()


@pytest.mark.parametrize("said", [b"", GREETING[:5], GREETING, GREETING + EXPORT[:-1]])
def test_export_that_is_not_served_is_named(stack: ExitStack, said: bytes) -> None:
    ours, theirs = (stack.enter_context(sock) for sock in socket.socketpair(socket.AF_UNIX))
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(LoadFailed, match="lun7: the server does not serve it"):
        Connection(ours, "lun7")


class Program:
    """The program, and the server that it is a client of, played by a test."""

    def __init__(self, stack: ExitStack, tmp_path: Path, *words: str) -> None:
        """``words``: what follows the socket in its command line."""
        path = str(tmp_path / "nbd.sock")
        self._stack = stack
        self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listener.bind(path)
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self.process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", nbd_load.__file__, path, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        stack.callback(self.process.kill)

    def accept(self, name: bytes) -> Peer:
        peer = Peer(self._stack.enter_context(self._listener.accept()[0]))
        peer.say(GREETING)
        assert peer.export_name() == name
        peer.say(EXPORT)
        return peer


def test_program_prints_what_it_counted(stack: ExitStack, tmp_path: Path) -> None:
    program = Program(stack, tmp_path, "0.1", "4096", "3", "lun0")
    peer = program.accept(b"lun0")
    answers = 0
    while peer.request()[0] != DISCONNECT:
        peer.say(reply())
        answers += 1
    output, errors = program.process.communicate(timeout=WAIT_S)
    assert (program.process.returncode, errors) == (0, "")
    counted = json.loads(output)
    assert counted["ios"] == answers > 0
    assert counted["seconds"] > 0


def test_requests_in_flight_are_those_of_all_connections(stack: ExitStack, tmp_path: Path) -> None:
    program = Program(stack, tmp_path, "600", "4096", "3", "lun0", "lun1", "lun0", "lun1")
    peers = [program.accept(b"lun%d" % (number % 2)) for number in range(4)]
    for peer in peers[:3]:
        peer.request()
    # Each answer makes room for one request, of the next connection in turn.
    for asked, answering in ((3, 1), (0, 0), (1, 2)):
        assert all(peer.is_quiet() for peer in peers)
        peers[answering].say(reply())
        peers[asked].request()
    assert all(peer.is_quiet() for peer in peers)
    peers[3].say(reply(EIO, b""))
    output, errors = program.process.communicate(timeout=WAIT_S)
    assert (program.process.returncode, output) == (1, "")
    assert "lun1: a read failed" in errors


def test_program_without_a_server_says_so(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-P",
        nbd_load.__file__,
        str(tmp_path / "none"),
        "1",
        "4096",
        "1",
        "lun0",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (1, "")
    assert "No such file" in done.stderr
