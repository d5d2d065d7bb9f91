"""TLS of both NBD front-ends, by certificates, with libnbd as the client."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.contract.nbd_servers import (
    BY_ISERBLK,
    SERVERS,
    Server,
    Start,
    Starter,
    exchange_many,
    libnbd,
)
from tests.support.certificates import Authority

nbd = libnbd()
MIB = 1 << 20


@dataclass(frozen=True)
class Places:
    """Directories with certificates."""

    server: str
    client: str
    anonymous: str  # a client without a certificate
    stranger: str  # a client of another CA
    trusting: str  # a client of another CA, which knows the server's


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("tls")
    ours, other = Authority(root / "ca"), Authority(root / "other", "Another CA")
    trusting = other.client(root / "trusting")
    (trusting / "ca-cert.pem").write_bytes((ours.place / "ca-cert.pem").read_bytes())
    return Places(
        str(ours.server(root / "server")),
        str(ours.client(root / "client")),
        str(ours.client(root / "anonymous", certificate=False)),
        str(other.client(root / "stranger")),
        str(trusting),
    )


@pytest.fixture(params=SERVERS)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Start]:
    starter = Starter(request.param, tmp_path)
    if request.param != BY_ISERBLK:
        about = subprocess.run(["nbdkit", "--dump-config"], capture_output=True, check=False)
        if b"tls=yes" not in about.stdout:
            pytest.skip("this nbdkit has no TLS")
    yield starter
    starter.close()


def served(start: Start, places: Places, mode: str, *more: str) -> Server:
    options = (f"--tls={mode}", f"--tls-certificates={places.server}", *more)
    return start(luns=[{"size": 64 * MIB}], options=options)


def secure(server: Server, certificates: str) -> Any:
    """A client with TLS that is connected."""
    client = server.client()
    client.set_tls(nbd.TLS_REQUIRE)
    client.set_tls_certificates(certificates)
    client.connect_unix(str(server.socket))
    assert client.get_tls_negotiated()
    return client


def works(client: Any) -> bool:
    client.pwrite(b"works", 4095)
    return bytes(client.pread(5, 4095)) == b"works"


def test_required(start: Start, places: Places) -> None:
    server = served(start, places, "require")
    with pytest.raises(nbd.Error):
        server.connect()
    assert works(secure(server, places.anonymous))


def test_optional(start: Start, places: Places) -> None:
    server = served(start, places, "on")
    plain = server.connect()
    assert not plain.get_tls_negotiated()
    assert works(plain)
    assert works(secure(server, places.anonymous))


def test_off(start: Start, places: Places) -> None:
    server = start()
    with pytest.raises(nbd.Error, match="TLS"):
        secure(server, places.client)
    assert works(server.connect())


def test_a_server_of_another_ca_is_refused_by_the_client(tmp_path: Path, places: Places) -> None:
    """(Over TCP, because libnbd verifies the name of a host.)"""
    starter = Starter(BY_ISERBLK, tmp_path)
    options = ("--tls=require", f"--tls-certificates={places.server}")
    server = starter(options=options, listen="127.0.0.1:0")
    port = server.uri.rpartition(":")[2]

    def connected(certificates: str, host: str) -> Any:
        client = nbd.NBD()
        client.set_tls(nbd.TLS_REQUIRE)
        client.set_tls_certificates(certificates)
        client.connect_tcp(host, port)
        server.clients.append(client)
        return client

    with pytest.raises(nbd.Error):
        connected(places.stranger, "127.0.0.1")
    for host in ("localhost", "127.0.0.1"):
        assert works(connected(places.client, host))
    server.end()
    assert server.ended_well
    starter.close()


def test_clients_have_to_show_who_they_are(start: Start, places: Places) -> None:
    server = served(start, places, "require", "--tls-verify-peer")
    for certificates in (places.anonymous, places.trusting):
        # (In TLS 1.3 the client hears of it only with its first answer.)
        with pytest.raises(nbd.Error):
            secure(server, certificates)
    assert works(secure(server, places.client))
    if server.kind == BY_ISERBLK:
        said = server.end()
        assert said.count("PEER_DID_NOT_RETURN_A_CERTIFICATE") == 1
        assert said.count("CERTIFICATE_VERIFY_FAILED") == 1


def test_bulk_data(start: Start, places: Places) -> None:
    """More than the sockets take, with many requests open, large and small."""
    client = secure(served(start, places, "require"), places.client)
    exchange_many(client, 64 * MIB)
    whole = os.urandom(32 * MIB)
    client.pwrite(whole, 0)
    assert client.pread(len(whole), 0) == whole


def test_a_client_that_leaves_in_the_middle(start: Start, places: Places) -> None:
    server = served(start, places, "require")
    for _ in range(5):
        client = secure(server, places.client)
        for number in range(16):
            client.aio_pread(nbd.Buffer(MIB), number * MIB)
        server.clients.remove(client)
        del client  # which closes its socket
    assert works(secure(server, places.client))
