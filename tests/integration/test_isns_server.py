"""``iserblk discover``, ``iserblk target --isns`` and Debian's iSNS server. Needs ``scripts/peers
isns``."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from iserblk.discovery import isns
from iserblk.discovery.isns import Attribute
from iserblk.iscsi.send_targets import Portal
from iserblk.target.announcing.announced import Announced
from iserblk.target.announcing.isns import PERIOD_S, Registration
from tests.cli.commands import bad, good, good_json, serving
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write
from tests.support.interop import Record
from tests.support.target import IQN, ROOT, TargetProcess, running_target
from tests.support.until import until, until_blocking

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
        self._environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
        self._prefix, self._place = prefix, place
        self._start()

    def _start(self) -> None:
        with (self._place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [self._prefix / "usr/sbin/isnsd", "-f", "-4", "-c", self._place / "conf"],
                stdout=log,
                stderr=log,
                env=self._environment,
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

    def isnsadm(self, *arguments: str) -> str:
        """Run the server's own client; its output."""
        config = self._place / "admin"
        config.write_text(
            "Security = 0\nSourceName = iqn.2026-11.example:admin\n"
            f"ServerAddress = 127.0.0.1:{self.port}\n"
        )
        return subprocess.run(
            [self._prefix / "usr/sbin/isnsadm", "-c", config, *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=START_S,
            env=self._environment,
        ).stdout

    def restart(self) -> None:
        """With an empty database."""
        self.stop()
        (self._place / "pid").unlink(missing_ok=True)
        shutil.rmtree(self._place / "db")
        self._start()

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
    assert good("discover", server.url) == f"{server.url} knows no targets for this initiator\n"


def test_many_targets(server: Isnsd) -> None:
    names = [f"{IQN}{number:03}" for number in range(60)]
    for name in names:
        server.add(name, ("10.9.8.7", 3000 + int(name[-3:])))
    report = good_json("discover", server.url)
    assert sorted(each["name"] for each in report["targets"]) == names
    assert all(len(each["portals"]) == 1 for each in report["targets"])


def test_our_target_registers(server: Isnsd, tmp_path: Path, record: Record) -> None:
    """Its portals, groups and node are what isnsadm and discover find; at its end they are gone.

    proves: ISER-B.2-2, SYSTEM-10
    """
    with serving(*registering(tmp_path, server), log=tmp_path / "target") as running:
        until_blocking(lambda: "registered" in (tmp_path / "target").read_text())
        (found,) = good_json("discover", server.url)["targets"]
        assert found["name"] == IQN
        assert [(each["host"], each["group"]) for each in found["portals"]] == [
            ("127.0.0.1", 1),
            ("127.0.0.1", 4),
        ]
        assert found["portals"][0]["url"].partition("://")[2] == running.url.partition("://")[2]
        assert good_json("info", found["portals"][1]["url"])["disks"][0]["target"] == IQN
        portals, nodes = server.isnsadm("--list", "portals"), server.isnsadm("--list", "nodes")
        assert all(f" = {each['port']}/tcp" in portals for each in found["portals"])
        assert f'iSCSI name = "{IQN}"' in nodes and "node type = Target" in nodes
        assert running.end(signal.SIGTERM) == 143
    assert IQN not in server.isnsadm("--list", "nodes")
    assert IQN not in server.isnsadm("--list", "entities")
    record(
        ours="target",
        peer="open-isns' isnsd and isnsadm",
        version=f"open-isns-server {version_of(server)}",
        transport="iSNS",
        ran="registration of two portals in two groups, list, deregistration",
    )


def version_of(server: Isnsd) -> str:
    done = subprocess.run(
        ["apt-cache", "policy", "open-isns-server"],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    words = done.stdout.partition("Candidate:")[2].split()
    return words[0] if words else "of unknown version"


def registering(place: Path, server: Isnsd) -> list[object]:
    listen = ["--listen", "127.0.0.1:0,1", "--listen", "127.0.0.1:0,4,transport=tcp"]
    return ["-v", "target", "--iqn", IQN, "--lun", f"{place}/lun:size=1M", *listen,
            "--isns", f"127.0.0.1:{server.port}"]  # fmt: skip


def test_a_target_that_was_killed_comes_back(server: Isnsd, tmp_path: Path) -> None:
    """Its registration replaces the old one, whose portals nobody listens at any more."""
    ports = []
    for number in range(2):
        log = tmp_path / f"target{number}"
        with serving(*registering(tmp_path, server), log=log) as running:
            until_blocking(lambda log=log: "registered" in log.read_text())  # type: ignore[misc]
            (found,) = good_json("discover", server.url)["targets"]
            ports.append([each["port"] for each in found["portals"]])
            running.process.kill()
    assert len(ports[0]) == len(ports[1]) == 2 and not set(ports[0]) & set(ports[1])


@pytest.mark.logs(logs.RECONNECTED, logs.ANOTHER_PORTAL, logs.LOST_POWER)
@pytest.mark.parametrize("face", FACES)
async def test_a_target_that_moves_is_found_again(face: str, server: Isnsd, tmp_path: Path) -> None:
    """The disk is in use, the target ends, and another is there on another port: the session finds
    it by the iSNS server. proves: ISER-GEN-3.3-1, SYSTEM-10"""
    first = serving(*registering(tmp_path, server), log=tmp_path / "one")
    second = serving(*registering(tmp_path, server), log=tmp_path / "two")
    with first as one:
        await until(lambda: "registered" in (tmp_path / "one").read_text())
        async with one_disk(face, f"{one.url}/0", {"portals": server.url}) as disk:
            assert [str(each["portal"])[:5] for each in disk.info.paths] == ["iser:", "iser:"]
            await write(disk, b"moved" * 1024, 0)
            await disk.flush()
            await trio.to_thread.run_sync(one.kill)  # the LUN's file has one user at a time
            with second as two:
                assert two.url != one.url
                assert await read(disk, 0, 5120) == b"moved" * 1024


async def test_a_server_that_lost_its_database(
    server: Isnsd, mock_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The next registration, long before the period ends, makes the target known again."""
    mock_clock.rate = 1.0
    caplog.set_level(logging.INFO)
    registration = Registration(
        ("127.0.0.1", server.port),
        Announced(IQN, [Portal("127.0.0.1", 3260, 1)], lambda: None),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(registration.run)
        await until(lambda: "registered as an iSNS entity" in caplog.text)
        assert IQN in server.isnsadm("--list", "nodes")
        server.restart()
        assert IQN not in server.isnsadm("--list", "nodes")
        mock_clock.jump(PERIOD_S / 2)
        await until(lambda: IQN in server.isnsadm("--list", "nodes"))
        nursery.cancel_scope.cancel()
    assert IQN not in server.isnsadm("--list", "nodes")


def test_a_server_that_is_none(target: TargetProcess) -> None:
    assert "is this an iSNS server?" in bad(4, "discover", f"isns://{target.listen}")
