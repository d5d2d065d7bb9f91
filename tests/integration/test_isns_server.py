"""``iserblk discover`` and Debian's iSNS server. Needs ``scripts/peers isns``."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from iserblk.discovery import isns
from iserblk.discovery.isns import Attribute
from tests.cli.commands import bad, good, good_json
from tests.support.target import IQN, ROOT, TargetProcess, running_target
from tests.support.until import until_blocking

START_S = 20.0
OTHER = "iqn.2026-11.example:other"
WATCHER = "iqn.2026-11.example:watcher"


class Isnsd:
    """The server on a free port, with a database of its own; and a plain client for it."""

    def __init__(self, prefix: Path, place: Path) -> None:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port: int = sock.getsockname()[1]
        self.url = f"isns://127.0.0.1:{self.port}"
        (place / "conf").write_text(
            f"Database = {place}/db\nPIDFile = {place}/pid\nControlSocket = {place}/ctl\n"
            f"BindAddress = 127.0.0.1:{self.port}\nDefaultDiscoveryDomain = 1\n"
            "SLPRegister = 0\nSecurity = 0\nSourceName = iqn.2026-11.example:isns\n"
        )
        libraries = ":".join(str(each) for each in prefix.glob("usr/lib/*-linux-gnu"))
        with (place / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [prefix / "usr/sbin/isnsd", "-f", "-4", "-c", place / "conf"],
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_LIBRARY_PATH": libraries},
            )
        self._socket = self._connect()
        self._reader = isns.MessageReader()
        self._transaction = 0

    def _connect(self) -> socket.socket:
        made: list[socket.socket] = []

        def listens() -> bool:
            assert self.process.poll() is None, "isnsd has ended"
            with suppress(ConnectionRefusedError):
                made.append(socket.create_connection(("127.0.0.1", self.port), START_S))
            return bool(made)

        until_blocking(listens)
        return made[0]

    def stop(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()

    def ask(self, function: int, attributes: list[Attribute]) -> tuple[int, list[Attribute]]:
        self._transaction += 1
        self._socket.sendall(isns.encode_request(function, self._transaction, attributes))
        while True:
            data = self._socket.recv(65536)
            assert data, "isnsd closed the connection"
            for message in self._reader.feed(data):
                return isns.response_untrusted(message)

    def add(self, name: str, *portals: tuple[str, int]) -> None:
        """Register a target, as targets do."""
        attributes = [
            isns.text(isns.ISCSI_NAME, name),
            Attribute(isns.DELIMITER, b""),
            Attribute(isns.ENTITY_IDENTIFIER, b""),
            isns.number(isns.ENTITY_PROTOCOL, isns.PROTOCOL_ISCSI),
        ]
        for host, port in portals:
            mapped = bytes(10) + b"\xff\xff" + socket.inet_aton(host)
            attributes += [
                Attribute(isns.PORTAL_ADDRESS, mapped),
                isns.number(isns.PORTAL_PORT, port),
            ]
        attributes += [
            isns.text(isns.ISCSI_NAME, name),
            isns.number(isns.ISCSI_NODE_TYPE, isns.NODE_TARGET),
        ]
        status, _ = self.ask(isns.DEV_ATTR_REG, attributes)
        assert status == 0, isns.status_words(status)

    def nodes(self) -> list[str]:
        """Names of the registered initiators, as a target sees them."""
        query = isns.target_query(IQN)
        query[1] = isns.number(isns.ISCSI_NODE_TYPE, isns.NODE_INITIATOR)
        _, attributes = self.ask(isns.DEV_ATTR_QRY, query)
        return isns.names_untrusted(attributes)


@pytest.fixture(scope="module")
def programs() -> Path:
    found = subprocess.run(
        [ROOT / "scripts/peers", "isns"], capture_output=True, text=True, check=False, timeout=100
    )
    if found.returncode:
        pytest.skip(f"requires isnsd: {found.stderr.strip().splitlines()[-1]}")
    return Path(found.stdout.strip())


@pytest.fixture
def server(programs: Path, tmp_path: Path) -> Iterator[Isnsd]:
    running = Isnsd(programs, tmp_path)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("isns")
    with running_target([f"{place}/disk:size=1M"], place / "log") as process:
        yield process


# shows: SYSTEM-10
def test_targets_and_portals(server: Isnsd, target: TargetProcess) -> None:
    """Discovery lists targets and portals, and their URLs work. proves: ISER-GEN-3.3-1"""
    server.add(IQN, ("127.0.0.1", target.port), ("10.9.8.7", 860))
    server.add(OTHER, ("10.9.8.7", 3260))
    report = good_json("discover", server.url)
    assert report["source"] == server.url
    found = {each["name"]: each["portals"] for each in report["targets"]}
    assert set(found) == {IQN, OTHER}
    first, second = found[IQN]
    assert first["url"] == f"iscsi://{target.listen}/{IQN}"
    assert (second["host"], second["port"], second["group"]) == ("10.9.8.7", 860, 1)
    assert good_json("info", first["url"])["disks"][0]["target"] == IQN


def test_probing(server: Isnsd, target: TargetProcess) -> None:
    server.add(IQN, ("127.0.0.1", target.port))
    assert f"iser://{target.listen}/{IQN}" in good("discover", server.url, "--probe")


def test_one_target(server: Isnsd) -> None:
    server.add(IQN, ("10.9.8.7", 3261))
    server.add(OTHER, ("10.9.8.7", 3260))
    text = good("discover", f"{server.url}/{OTHER}")
    assert OTHER in text and IQN not in text
    assert "does not know" in bad(21, "discover", f"{server.url}/{OTHER}2")


def test_nothing_is_left_behind(server: Isnsd) -> None:
    """The initiator is registered while it asks, and no longer."""
    server.add(IQN, ("10.9.8.7", 3260))
    for _ in range(2):
        assert IQN in good("discover", server.url, "--initiator-name", WATCHER)
        assert server.nodes() == []


def test_an_initiator_that_is_registered_already(server: Isnsd) -> None:
    """A registration by another program of this machine, say, stays."""
    server.add(IQN, ("10.9.8.7", 3260))
    status, _ = server.ask(isns.DEV_ATTR_REG, isns.registration(WATCHER))
    assert status == 0
    assert IQN in good("discover", server.url, "--initiator-name", WATCHER)
    assert server.nodes() == [WATCHER]


def test_no_targets(server: Isnsd) -> None:
    assert good("discover", server.url) == f"{server.url} knows no targets for us\n"


def test_many_targets(server: Isnsd) -> None:
    names = [f"{IQN}{number:03}" for number in range(60)]
    for name in names:
        server.add(name, ("10.9.8.7", 3000 + int(name[-3:])))
    report = good_json("discover", server.url)
    assert sorted(each["name"] for each in report["targets"]) == names
    assert all(len(each["portals"]) == 1 for each in report["targets"])


def test_a_server_that_is_none(target: TargetProcess) -> None:
    assert "is this an iSNS server?" in bad(4, "discover", f"isns://{target.listen}")
