"""``iserblk exporter``: what it serves, where, and until when; and its unit."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.cli.exporter import look_of
from iserblk.cli.watch.page import POLICY
from iserblk.disk.blocking import open_disks
from iserblk.metrics.address import socket_of
from iserblk.metrics.joining import NO_ANSWER, NO_PROCESS, Answer
from iserblk.metrics.places import Place
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.target_reading import TargetReading
from tests.cli.commands import COMMAND, bad, environment, serving
from tests.metrics.test_merging import samples
from tests.support.nbdkit import need
from tests.support.ports import free_port
from tests.support.target import END_S, ROOT, TargetProcess, running_target
from tests.support.unit import Unit
from tests.support.watched import lun

UNIT = ROOT / "scripts/systemd/iserblk-exporter.service"
# Of 100: 95 is a service without any hardening. Those of the kinds below need what they have.
EXPOSURE = 25


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    specs = [str(files / spec) for spec in ("one:size=8M", "two:size=4M")]
    with running_target(specs, files / "log") as process:
        yield process


def asked(url: str) -> str:
    with urllib.request.urlopen(url, timeout=END_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text: str = answer.read().decode()
    return text


def page_of(url: str, path: str = "/") -> str:
    with urllib.request.urlopen(url.replace("/metrics", path), timeout=END_S) as answer:
        assert answer.headers["Content-Security-Policy"] == POLICY
        text: str = answer.read().decode()
    return text


def test_what_a_page_shows_of_answers() -> None:
    place = Place("/dev/nbd0", "0", Path("/a"))
    reading = ProcessReading(
        7, "1", (lun(),), (TargetReading("t", "u", sessions=2),), command="attach"
    )
    dead = [f"{NO_PROCESS} (x)", NO_ANSWER, "the answer is no text"]
    found = look_of([Answer(place, reading, "", 5.0), *(Answer(place, None, e, 0.0) for e in dead)])
    (only,) = found.luns
    assert (only.where, only.pid, only.at, only.command) == ("/dev/nbd0", 7, 5.0, "attach")
    assert (found.targets, found.sessions) == (1, 2)
    assert [each.state for each in found.silent] == ["killed", "no answer", "wrong answer"]


def test_all_luns_of_a_machine(target: TargetProcess, tmp_path: Path) -> None:
    """Two processes, one of them with two LUNs; one that is dead; and one at a port."""
    port = free_port()
    first, second = socket_of("/dev/nbd0", tmp_path), socket_of("/mnt/luns", tmp_path)
    with (
        serving("exporter", "--listen", "127.0.0.1:0", "--directory", tmp_path,
                f"127.0.0.1:{port}", log=tmp_path / "log") as server,
        open_disks([target.url], {"metrics": str(first)}),
        open_disks([f"{target.url}/1"], {"metrics": str(second)}),
        open_disks([f"{target.url}/0"], {"metrics": f"127.0.0.1:{port}"}),
        socket.socket(socket.AF_UNIX) as dead,
    ):  # fmt: skip
        dead.bind(str(socket_of("/dev/nbd1", tmp_path)))
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", server.url)
        found = samples(asked(server.url))
        up = {dict(key)["where"]: value for (name, key), value in found.items() if "_up" in name}
        assert up == {"/dev/nbd0": 1, "/mnt/luns": 1, f"127.0.0.1:{port}": 1, "/dev/nbd1": 0}
        sizes = {
            (dict(key)["where"], dict(key)["lun"], dict(key)["uid"]): value
            for (name, key), value in found.items()
            if name == "iserblk_size_bytes"
        }
        assert sizes == {
            ("/dev/nbd0", "0", str(os.geteuid())): 8 << 20,
            ("/dev/nbd0", "1", str(os.geteuid())): 4 << 20,
            ("/mnt/luns", "1", str(os.geteuid())): 4 << 20,
            (f"127.0.0.1:{port}", "0", ""): 8 << 20,
        }
        shown = page_of(server.url)
        for words in ("/mnt/luns", "/dev/nbd0 lun0", "/dev/nbd1", "killed"):
            assert words in shown, words
        (of,) = {each for each in re.findall(r'href="(/\?lun=\w+)" id="t', shown)
                 if "/mnt/luns" in shown.partition(each)[2][:80]}  # fmt: skip
        alone = page_of(server.url, of)
        assert "all LUNs" in alone and "4.0M" in alone and "/dev/nbd0" not in alone
        assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    line, *more = (tmp_path / "log").read_text().splitlines()
    assert line == "iserblk: /dev/nbd1: no process serves metrics there (Connection refused)"
    assert not more


def test_every_metric_is_documented(tmp_path: Path) -> None:
    dead = socket_of("/dev/nbd0", tmp_path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
        with serving("exporter", "--listen", "127.0.0.1:0", "--directory", tmp_path,
                     log=tmp_path / "log") as server:  # fmt: skip
            names = re.findall(r"^# TYPE (\S+)", asked(server.url), re.MULTILINE)
    document = (ROOT / "docs/monitoring.md").read_text()
    assert len(names) == 4
    assert [name for name in names if f"`{name}`" not in document] == []


def test_what_is_wrong(tmp_path: Path) -> None:
    assert "give HOST:PORT" in bad(7, "exporter", "--listen", "here")
    assert "does not exist" in bad(7, "exporter", "--directory", tmp_path / "missing")
    assert "ADDRESS 'x'" in bad(7, "exporter", "--listen", "127.0.0.1:0", "x")
    assert "loopback" in bad(7, "exporter", "--listen", "127.0.0.1:0", "192.0.2.1:9")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert "the port is in use" in bad(28, "exporter", "--listen", address)


# --- the unit ------------------------------------------------------------------------------------


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit as scripts/install-units installs it."""
    done = subprocess.run(
        [ROOT / "scripts/install-units", "--root", tmp_path], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return tmp_path / "etc/systemd/system" / UNIT.name


def test_the_unit(unit: Path, tmp_path: Path) -> None:
    assert Unit(unit, {}).setting("Environment") == "LISTEN=127.0.0.1:13260"
    running = Unit(unit, {"LISTEN": "127.0.0.1:0", "XDG_RUNTIME_DIR": str(tmp_path)})
    with running.started(tmp_path) as process:
        assert process.stdout is not None
        word, _, url = process.stdout.readline().strip().partition(" ")
        assert word == "ready"
        assert "iserblk_exporter_info" in asked(url)
        process.send_signal(signal.SIGTERM)
        # As SuccessExitStatus= has it.
        assert process.wait(END_S) == 143
        assert Unit(unit, {}).setting("SuccessExitStatus") == "143"


def test_the_unit_is_hardened(unit: Path) -> None:
    need("systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", f"--threshold={EXPOSURE}",
         "--no-pager", "--json=short", unit],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unrecognized option" in done.stderr:
        pytest.skip("requires systemd-analyze security --offline: systemd 250 or later")
    open_doors = [
        each["name"] for each in json.loads(done.stdout or "[]") if float(each["exposure"] or 0) > 0
    ]
    assert done.returncode == 0, open_doors


def test_install_units_removes_it(unit: Path, tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "scripts/install-units", "--root", tmp_path, "--remove"],
        capture_output=True, check=True,
    )  # fmt: skip
    assert not unit.exists()


def with_capabilities(words: str, directory: Path) -> str:
    """What the exporter serves as root with no other capabilities than these (setpriv(1)), or what
    it says instead."""
    command = ["setpriv", "--bounding-set", words, "--inh-caps", "-all", "--", *COMMAND]
    with subprocess.Popen(
        [*command, "exporter", "--listen", "127.0.0.1:0", "--directory", directory],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            word, _, url = process.stdout.readline().strip().partition(" ")
            return asked(url) if word == "ready" else process.stderr.read()
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to another user")
def test_the_capability_of_the_unit_is_needed_and_enough(
    target: TargetProcess, tmp_path: Path
) -> None:
    """For the LUNs of another user, whose directory nobody else may enter."""
    need("setpriv")
    assert Unit(UNIT, {}).setting("CapabilityBoundingSet") == "CAP_DAC_OVERRIDE"
    theirs = tmp_path / "iserblk"
    theirs.mkdir(mode=0o700)
    path = socket_of("/mnt/luns", theirs)
    with open_disks([f"{target.url}/0"], {"metrics": str(path)}):
        for each in (path, theirs):
            os.chown(each, 1234, 1234)
        assert 'iserblk_up{uid="1234",where="/mnt/luns"} 1\n' in with_capabilities(
            "-all,+dac_override", theirs
        )
        refusal = with_capabilities("-all", theirs)
        assert re.search("is not (readable|executable)", refusal), refusal  # (click 8.1.0)
