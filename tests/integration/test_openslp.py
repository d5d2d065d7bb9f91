"""``iserblk discover slp://`` and ``iserblk target --slp``: with each other, and with OpenSLP.

Debian has no package of OpenSLP any more. Where slpd and slptool are in PATH, or below
$ISERBLK_OPENSLP (the --prefix of a build), the tests that need them run. What they said to each
other is in tests/vectors/slp.py, which the other tests compare with.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.commands import COMMAND, environment
from tests.support.interop import Record
from tests.support.namespace import ADDRESS, network
from tests.support.target import IQN
from tests.support.until import until_blocking

START_S = 30.0
OTHER = f"service:iscsi:target://10.9.8.7:3260/{IQN}-other"
OTHER_ATTRIBUTES = f"(iscsi-name={IQN}-other),(portal-group=7),(transports=tcp),(auth-name=any)"


class Net:
    """Commands in the namespace."""

    def __init__(self, prefix: list[str], place: Path) -> None:
        self.prefix = prefix
        self.place = place

    def run(self, *command: object, **changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, *map(str, command)],
            capture_output=True,
            text=True,
            check=False,
            timeout=2 * START_S,
            env=environment(**changes),
        )

    def discover(self, where: str) -> list[dict[str, Any]]:
        done = self.run(*COMMAND, "discover", where, "--json")
        assert (done.returncode, done.stderr) == (0, ""), done
        report = json.loads(done.stdout)
        assert report["source"] == where.partition("?")[0]
        targets: list[dict[str, Any]] = report["targets"]
        return targets

    @contextmanager
    def running(self, ready: str, *command: object, **changes: str) -> Iterator[Path]:
        """A server, once its log has ``ready``. At the end SIGTERM ends it."""
        log = self.place / f"log{len(list(self.place.iterdir()))}"
        with log.open("wb") as file, subprocess.Popen(
            [*self.prefix, *map(str, command)],
            stdout=file, stderr=file, env=environment(**changes),
        ) as process:  # fmt: skip
            try:

                def is_ready() -> bool:
                    assert process.poll() is None, log.read_text()
                    return ready in log.read_text()

                until_blocking(is_ready)
                yield log
                process.send_signal(signal.SIGTERM)
                process.wait(START_S)
            finally:
                process.kill()

    def target(self, ready: str, *options: str) -> Any:
        listen = ["--listen", f"{ADDRESS}:3260,4", "--listen", "127.0.0.1:3261,1"]
        lun = ["--lun", f"{self.place}/lun:size=1M"]
        return self.running(ready, *COMMAND, "-v", "target", "--iqn", IQN, *lun, *listen, *options)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    with network() as prefix:
        yield Net(prefix, tmp_path)


class OpenSlp(NamedTuple):
    slpd: str
    slptool: str
    libraries: str


@pytest.fixture
def openslp() -> OpenSlp:
    prefix = Path(os.environ.get("ISERBLK_OPENSLP", "/nonexistent"))
    path = os.pathsep.join([f"{prefix}/sbin", f"{prefix}/bin", os.environ["PATH"], "/usr/sbin"])
    found = [shutil.which(name, path=path) for name in ("slpd", "slptool")]
    if not all(found):
        pytest.skip("requires slpd and slptool (OpenSLP), in PATH or below $ISERBLK_OPENSLP")
    return OpenSlp(str(found[0]), str(found[1]), f"{prefix}/lib")


def places(targets: list[dict[str, Any]]) -> list[tuple[str, str, int, int | None]]:
    return [
        (target["name"], each["host"], each["port"], each["group"])
        for target in targets
        for each in target["portals"]
    ]


def test_our_two_ends(net: Net) -> None:
    """The portal of the network by multicast and by unicast; that of the loopback interface only
    on it. With its portal group each can be used. proves: ISER-GEN-3.3-1, SYSTEM-9"""
    portal = (IQN, ADDRESS, 3260, 4)
    with net.target("ready", "--slp", "--slp-scopes", "DEFAULT,lab"):
        for where in ("slp://", f"slp://{ADDRESS}:427", f"slp://{ADDRESS}:427?scope=lab"):
            assert places(net.discover(where)) == [portal]
        assert sorted(places(net.discover("slp://127.0.0.1:427"))) == [
            portal,
            (IQN, "127.0.0.1", 3261, 1),
        ]
        assert net.discover("slp://?scope=other") == []
        url = net.discover(f"slp://{ADDRESS}:427")[0]["portals"][0]["url"]
        info = json.loads(net.run(*COMMAND, "info", url, "--json").stdout)
        assert info["disks"][0]["target"] == IQN
        unknown = net.run(*COMMAND, "discover", f"slp://{ADDRESS}/{IQN}-other")
        assert unknown.returncode == 21 and "does not know" in unknown.stderr
        busy = net.run(*COMMAND, "target", "--iqn", IQN, "--lun", f"{net.place}/lun",
                       "--listen", "127.0.0.1:0", "--slp")  # fmt: skip
        assert busy.returncode == 28 and "register there with --slp-da" in busy.stderr
    gone = net.run(*COMMAND, "discover", f"slp://{ADDRESS}")
    assert gone.returncode == 4 and "is there an SLP agent?" in gone.stderr


def test_slptool_finds_our_target(net: Net, openslp: OpenSlp, record: Record) -> None:
    """By multicast and by unicast, with a predicate, and its attributes. proves: SYSTEM-9"""

    def tool(*arguments: str) -> list[str]:
        done = net.run(openslp.slptool, *arguments, LD_LIBRARY_PATH=openslp.libraries)
        assert done.returncode == 0, done
        return done.stdout.splitlines()

    url = f"service:iscsi:target://{ADDRESS}:3260/{IQN}"
    predicate = f"(&(iscsi-name={IQN})(portal-group>=2))"
    with net.target("ready", "--slp"):
        assert tool("findsrvs", "service:iscsi:target", predicate) == [f"{url},600"]
        here = ("-u", ADDRESS)
        assert tool(*here, "findsrvs", "service:iscsi") == [f"{url},600"]
        assert tool(*here, "findsrvs", "service:iscsi:target", "(portal-group=5)") == []
        assert f"(iscsi-name={IQN}),(portal-group=4)" in tool(*here, "findattrs", url)[0]
        assert tool(*here, "findsrvtypes") == ["service:iscsi:target"]
    record(
        ours="target",
        peer="OpenSLP's slptool",
        version="OpenSLP 2.0.0",
        transport="SLP, UDP multicast and unicast",
        ran="findsrvs, findattrs, findsrvtypes",
    )


@pytest.mark.parametrize("directory", [False, True], ids=["service agent", "directory agent"])
def test_we_find_what_slpd_knows(
    directory: bool, net: Net, openslp: OpenSlp, record: Record
) -> None:
    """What slptool has registered; and our target, where slpd is a directory agent: it registers
    there, and is gone at its end. proves: ISER-GEN-3.3-1, ISER-B.2-2, SYSTEM-9"""
    (net.place / "conf").write_text(
        f"net.slp.isDA = {str(directory).lower()}\nnet.slp.interfaces = {ADDRESS}\n"
        "net.slp.useScopes = DEFAULT\n"
    )
    (net.place / "slpd.log").touch()
    libraries = {"LD_LIBRARY_PATH": openslp.libraries}
    log = net.place / "slpd.log"
    command = [openslp.slpd, "-d", "-c", net.place / "conf", "-l", log, "-p", net.place / "pid"]
    other = (f"{IQN}-other", "10.9.8.7", 3260, 7)
    with net.running("", *command, **libraries):
        until_blocking(lambda: "Startup complete" in log.read_text())
        register = (openslp.slptool, "register", OTHER, OTHER_ATTRIBUTES)
        assert net.run(*register, **libraries).returncode == 0
        for where in ("slp://", f"slp://{ADDRESS}:427"):
            assert places(net.discover(where)) == [other]
        if directory:
            with net.target("registered with this directory agent", "--slp-da", ADDRESS):
                found = places(net.discover("slp://"))
                assert sorted(found) == [(IQN, ADDRESS, 3260, 4), other]
            assert places(net.discover(f"slp://{ADDRESS}:427")) == [other]
    record(
        ours="initiator and target" if directory else "initiator",
        peer=f"OpenSLP's slpd, a {'directory' if directory else 'service'} agent",
        version="OpenSLP 2.0.0",
        transport="SLP, UDP multicast and unicast, TCP",
        ran="discover" + (", registration and deregistration" if directory else ""),
    )
