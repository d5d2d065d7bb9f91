"""TLS of the NBD server: its files, and its stream without a server."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, NotSupported
from iserblk.nbd import tls
from iserblk.sockets.wire import WOULD_BLOCK, wire
from tests.support.certificates import Authority

MIB = 1 << 20
PSK = hasattr(ssl.SSLContext, "set_psk_server_callback")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def directory(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.server(tmp_path_factory.mktemp("server"))


@pytest.fixture
def own(directory: Path, tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    return Path(shutil.copytree(directory, tmp_path / "own"))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ca-cert.pem", "server-cert.pem", "server-key.pem"])
def test_a_file_that_is_missing_or_nonsense(own: Path, name: str) -> None:
    (own / name).write_text("no PEM")
    with pytest.raises(BadArgument, match=rf"--tls-certificates {own}: .*{name}"):
        tls.by_certificates(str(own), False)
    (own / name).unlink()
    with pytest.raises(BadArgument, match=f"it has no {name}"):
        tls.by_certificates(str(own), False)


def test_a_key_of_another_certificate(own: Path, authority: Authority, tmp_path: Path) -> None:
    other = authority.server(tmp_path / "other")
    shutil.copy(other / "server-key.pem", own)
    with pytest.raises(BadArgument, match="KEY_VALUES_MISMATCH"):
        tls.by_certificates(str(own), False)


def test_a_key_with_a_pass_phrase_asks_nobody(own: Path) -> None:
    key = own / "server-key.pem"
    done = subprocess.run(
        ["openssl", "rsa", "-aes128", "-in", key, "-out", key, "-passout", "pass:word"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    with pytest.raises(BadArgument, match=r"server-key\.pem is encrypted"):
        tls.by_certificates(str(own), False)


def test_a_list_of_revoked_certificates_that_is_nonsense(own: Path) -> None:
    (own / "ca-crl.pem").write_text("no PEM")
    with pytest.raises(BadArgument, match=r"ca-crl\.pem"):
        tls.by_certificates(str(own), True)


def test_a_peer_is_asked_for_its_certificate_where_it_is_to_be(directory: Path) -> None:
    assert tls.by_certificates(str(directory), False).verify_mode == ssl.CERT_NONE
    assert tls.by_certificates(str(directory), True).verify_mode == ssl.CERT_REQUIRED


@pytest.mark.skipif(PSK, reason="this Python has pre-shared keys")
def test_keys_where_python_has_none(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("alice:00112233\n")
    with pytest.raises(NotSupported, match=r"no pre-shared keys.*--tls-certificates.*--nbdkit"):
        tls.by_keys(str(tmp_path / "keys"))


# --- the stream ----------------------------------------------------------------------------------


def client_context(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.place / "ca-cert.pem"))


class Peer:
    """A TLS client without a socket of its own: its records are carried by hand."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.into, self.out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.into, self.out, server_hostname="localhost")

    def shake_hands(self) -> bool:
        try:
            self.tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def read(self) -> bytes:
        found = bytearray()
        while True:
            try:
                data = self.tls.read(65536)
            except ssl.SSLWantReadError:
                return bytes(found)
            if not data:
                return bytes(found)
            found += data


@contextmanager
def pair(
    directory: Path, context: ssl.SSLContext, small: bool = False
) -> Iterator[tuple[tls.TlsStream, Peer, socket.socket]]:
    """A stream of the server, a client, and the client's end of the socket."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        if small:
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield (
            tls.TlsStream(
                wire(here, end_of_record=False), tls.by_certificates(str(directory), False)
            ),
            Peer(context),
            there,
        )


def carry(peer: Peer, there: socket.socket, step: int = 1 << 20) -> None:
    """Take the client's records to the socket, and what is there to the client."""
    while data := peer.out.read(step):
        there.send(data)
    try:
        while data := there.recv(step):
            peer.into.write(data)
    except BlockingIOError:
        pass


def agree(stream: tls.TlsStream, peer: Peer, there: socket.socket) -> None:
    ours = theirs = False
    while not (ours and theirs):
        theirs = theirs or peer.shake_hands()
        carry(peer, there)
        ours = ours or stream.shake_hands()
        carry(peer, there)


def test_there_and_back(directory: Path, authority: Authority) -> None:
    with pair(directory, client_context(authority)) as (stream, peer, there):
        agree(stream, peer, there)
        buffer = memoryview(bytearray(100))
        assert stream.receive([buffer]) == WOULD_BLOCK
        assert not stream.pending()
        peer.tls.write(b"to the server")
        carry(peer, there)
        assert stream.receive([buffer[:5]]) == 5
        assert stream.pending()  # which no socket shows
        assert stream.receive([buffer[5:]]) == 8
        assert bytes(buffer[:13]) == b"to the server"
        assert stream.receive([buffer]) == WOULD_BLOCK
        assert not stream.pending()
        assert stream.send([b"to ", memoryview(b"the client")], 13) == 13
        carry(peer, there)
        assert peer.read() == b"to the client"


def test_records_without_data_end_a_turn(directory: Path, authority: Authority) -> None:
    """A client could keep the socket full of them for ever. Here it is a record that is long in
    coming; the socket shows what is left."""

    class Drops:
        """Implements what TlsStream needs of Wire: a byte at a time."""

        end_of_record = False

        def __init__(self, sock: socket.socket) -> None:
            self.whole = wire(sock, end_of_record=False)
            self.send = self.whole.send
            self.count = 0

        def receive(self, buffers: list[memoryview]) -> int:
            self.count += 1
            return self.whole.receive([buffers[0][:1]])

    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        there.setblocking(False)
        drops = Drops(here)
        stream = tls.TlsStream(drops, tls.by_certificates(str(directory), False))
        peer = Peer(client_context(authority))
        agree(stream, peer, there)
        peer.tls.write(bytes(1000))
        carry(peer, there)
        drops.count = 0
        buffer = memoryview(bytearray(2000))
        assert stream.receive([buffer]) == WOULD_BLOCK and not stream.pending()
        assert drops.count < 10
        while (count := stream.receive([buffer])) == WOULD_BLOCK:
            pass
        assert count == 1000


def test_more_than_the_socket_takes(directory: Path, authority: Authority) -> None:
    """What ``send`` has taken is sent by ``flush``, piece by piece."""
    data = os.urandom(MIB)
    with pair(directory, client_context(authority), small=True) as (stream, peer, there):
        agree(stream, peer, there)
        got = bytearray()
        assert stream.send([data], len(data)) == len(data)
        assert not stream.flush()
        assert stream.send([b"more"], 4) == WOULD_BLOCK
        while not stream.flush():
            carry(peer, there)
            got += peer.read()
        assert stream.send([b"more"], 4) == 4
        carry(peer, there)
        assert got + peer.read() == data + b"more"


def test_what_is_taken_at_once_has_a_limit(directory: Path, authority: Authority) -> None:
    """A client that takes no replies costs no second copy of all of them, which nothing counts."""
    buffers: list[bytes | memoryview] = [bytes(64 << 10)] * 16
    with pair(directory, client_context(authority), small=True) as (stream, peer, there):
        agree(stream, peer, there)
        assert stream.send(buffers, MIB) == 64 << 10
        assert stream.send(buffers, MIB) == WOULD_BLOCK


def test_the_end(directory: Path, authority: Authority) -> None:
    with pair(directory, client_context(authority)) as (stream, peer, there):
        agree(stream, peer, there)
        peer.tls.write(b"last")
        with pytest.raises(ssl.SSLWantReadError):
            peer.tls.unwrap()
        carry(peer, there)
        buffer = memoryview(bytearray(100))
        assert stream.receive([buffer]) == 4
        assert stream.receive([buffer]) == 0
        stream.close_notify()
        carry(peer, there)
        peer.tls.unwrap()  # raises nothing: both ends have said so


def test_an_end_without_a_word(directory: Path, authority: Authority) -> None:
    with pair(directory, client_context(authority)) as (stream, peer, there):
        agree(stream, peer, there)
        there.shutdown(socket.SHUT_WR)
        assert stream.receive([memoryview(bytearray(100))]) == 0
        stream.close_notify()


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(50), b""]
)
def test_what_is_no_tls(directory: Path, authority: Authority, said: bytes) -> None:
    with pair(directory, client_context(authority)) as (stream, _, there):
        there.send(said)
        there.shutdown(socket.SHUT_WR)
        with pytest.raises(ssl.SSLError):
            stream.shake_hands()


def test_the_client_is_told_why(directory: Path, authority: Authority) -> None:
    """It speaks only what is older than TLS 1.2: the alert leaves before the error."""
    context = client_context(authority)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pair(directory, context) as (stream, peer, there):
        assert not peer.shake_hands()
        hello = bytearray(peer.out.read())
        hello[9:11] = b"\x03\x01"  # client_version: TLS 1.0
        there.send(hello)
        with pytest.raises(ssl.SSLError, match="UNSUPPORTED_PROTOCOL"):
            stream.shake_hands()
        alert = there.recv(100)
        assert (alert[0], alert[-1]) == (21, 70)  # an alert: protocol_version


def test_records_that_are_nonsense(directory: Path, authority: Authority) -> None:
    with pair(directory, client_context(authority)) as (stream, peer, there):
        agree(stream, peer, there)
        there.send(b"\x17\x03\x03\x00\x20" + os.urandom(32))
        with pytest.raises(ssl.SSLError):
            stream.receive([memoryview(bytearray(100))])
