"""``iserblk stats`` of disks in use: as text, as JSON, on a terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import struct
import subprocess
import tempfile
import termios
from collections import Counter
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from iserblk.cli import main, stats
from iserblk.disk.blocking import open_disks
from iserblk.disk.seam import BlockingDisk
from iserblk.errors import IserblkError
from iserblk.metrics import address
from tests.cli.commands import COMMAND, bad, environment, good, good_json, iserblk, serving
from tests.cli.runs import JSON_DOCUMENT, documented
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need, run
from tests.support.target import END_S, IQN, TargetProcess, running_target
from tests.support.until import until_blocking

MIB = 1 << 20


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: names of sockets have at most 107 bytes, and contain the escaped path that they
    serve."""
    with tempfile.TemporaryDirectory(prefix="iserblk.") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    specs = [str(files / spec) for spec in ("one:size=8M", "two:size=4M")]
    with running_target(specs, files / "log") as process:
        yield process


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics") / "socket"


@pytest.fixture(scope="module")
def disk(target: TargetProcess, place: Path) -> Iterator[BlockingDisk]:
    """A disk that this process uses, with some operations counted."""
    with open_disks([target.url], {"metrics": str(place), "connections": "2"}) as disks:
        disk = disks.disks["lun0"]
        buffer = memoryview(bytearray(4096))
        for number in range(10):
            disk.write(buffer, number * 4096)
            disk.read_into(buffer, number * 4096)
        disk.flush()
        disk.trim(0, 8192)
        disk.zero(8192, 4096)
        with pytest.raises(IserblkError):
            disk.read_into(buffer, 8 * MIB)
        yield disk


def test_for_people(disk: BlockingDisk, place: Path) -> None:
    said = good("stats", place)
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in said.splitlines()), said
    lines = [" ".join(line.split()) for line in said.replace("\n    ", " ").splitlines()]
    assert lines[0] == f"{place}: lun0, {disk.info.url}"
    assert f"process {os.getpid()}" in lines
    path = f"{disk.info.url.split('/')[2]} (iwarp)"
    assert f"path {path}, 2 of 2 connections" in lines and "connections 2 of 2" in lines
    for cid in range(2):
        line = rf"connection {cid} {re.escape(path)}, 0 in flight, \d+ commands, [\d.]+ (KiB|bytes)"
        assert any(re.fullmatch(line, each) for each in lines), lines
    assert "recoveries 0, tasks reassigned 0" in lines
    assert "PDUs lost to digests 0, SNACKs 0" in lines
    assert any(re.match(r"read 11 requests, 40.0 KiB, mean .*s, p99 .*s, 1 failed", each)
               for each in lines)  # fmt: skip
    assert any(re.match(r"all 24 requests, 92.0 KiB, mean", each) for each in lines)
    assert lines.count("write none") == 1  # LUN 1, without writes


def test_json_is_as_documented(disk: BlockingDisk, place: Path) -> None:
    found = good_json("stats", place)
    assert list(found) == ["luns", "targets"] and found["targets"] == []
    lun = found["luns"][0]
    read = lun["operations"]["read"]
    assert [each["cid"] for each in lun["per_connection"]] == [0, 1]
    assert sum(each["bytes"] for each in lun["per_connection"]) >= 20 * 4096
    assert {*lun, *read, *lun["per_connection"][0]} == documented("stats")
    for name in ("luns", *lun["operations"], *read["latency_us"]):
        assert f"`{name}`" in JSON_DOCUMENT
    assert (lun["where"], lun["pid"], lun["target"]) == (str(place), os.getpid(), IQN)
    assert (lun["connected"], lun["in_flight"]) == (True, 0)
    assert lun["unflushed_bytes"] < 1024  # a trim and a zero, without data
    assert (read["requests"], read["bytes"], read["errors"]) == (11, 40960, 1)
    assert lun["operations"]["write"]["bytes"] == 40960
    assert lun["operations"]["flush"]["requests"] == 1
    assert lun["operations"]["trim"]["bytes"] == 8192
    assert lun["operations"]["zero"]["bytes"] == 4096
    assert sum(count for _, count in read["histogram_us"]) == 11
    assert 0 < read["latency_us"]["mean"] < 60e6
    assert 0 < read["latency_us"]["p50"] <= read["latency_us"]["p99"]
    assert found["luns"][1]["operations"]["read"]["latency_us"]["mean"] is None


def test_on_a_terminal(disk: BlockingDisk, place: Path) -> None:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 300, 0, 0))
    process = subprocess.Popen(
        [*COMMAND, "stats", str(place), "--interval", "0.2"],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env=environment(TERM="xterm", COLUMNS="300"),
        start_new_session=True,
    )
    os.close(theirs)
    try:
        shown = b""
        buffer = memoryview(bytearray(4096))
        while not re.search(rb"lun0 +[1-9][0-9]* +[0-9]+\.[0-9] +[0-9.]+ (\xc2\xb5|m)s", shown):
            for _ in range(10):
                disk.read_into(buffer, 0)
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()
    for word in ("IOPS", "MiB/s", "p99", "in flight", "retries", "reconnects", "unflushed"):
        assert word.encode() in shown


def test_of_the_directory_of_a_unit_only_its_own_sockets_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its user could make root speak with any server by a link."""
    unit = tmp_path / "units" / "disk"
    unit.mkdir(parents=True)
    monkeypatch.setattr(address, "UNITS", (unit.parent,))
    monkeypatch.setattr(stats, "directory", lambda: None)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s"))  # no process listens
        address.socket_of("/dev/nbd7", unit).symlink_to(tmp_path / "s")
        for word in ("/dev/nbd7", "nbd7"):
            with pytest.raises(SystemExit):
                main.main(["stats", word])
            assert "that serves metrics; `iserblk status` lists" in capsys.readouterr().err
    address.socket_of("/dev/nbd7", unit).unlink()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(address.socket_of("/dev/nbd7", unit)))
        with pytest.raises(SystemExit):
            main.main(["stats", "nbd7"])
        assert "no process serves metrics there" in capsys.readouterr().err


# --- what is served by default -------------------------------------------------------------------


def runtime(tmp_path: Path) -> dict[str, str]:
    """The environment that makes ``tmp_path`` the runtime directory. Users other than root have
    their own, which may be missing in a test."""
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def places(tmp_path: Path) -> list[str]:
    done = iserblk("stats", "--json", **runtime(tmp_path))  # type: ignore[arg-type]
    assert (done.returncode, done.stderr) == (0, ""), done
    return re.findall('"where": "(.*?)"', done.stdout)


def test_nbd_and_mount_are_listed(target: TargetProcess, tmp_path: Path) -> None:
    need("nbdinfo")
    need_fuse()
    nbd, files = tmp_path / "a socket", tmp_path / "files"
    files.mkdir()
    user = runtime(tmp_path)
    with (
        serving("nbd", target.url, "--socket", nbd, log=tmp_path / "log", **user) as by_path,
        serving("nbd", target.url, "--listen", "127.0.0.1:0", log=tmp_path / "log", **user) as tcp,
        serving("mount", "-f", target.url, files, log=tmp_path / "log", **user) as mounted,
    ):
        listen = tcp.url.removeprefix("nbd://")
        # Two LUNs each. What does not answer within seconds, on a busy machine, is left out.
        wanted = {str(nbd): 2, listen: 2, str(files): 2}
        until_blocking(lambda: wanted.items() <= Counter(places(tmp_path)).items())
        run("nbdinfo", "--size", by_path.url)
        (files / "lun0").read_bytes()
        for place in (nbd, listen, files):
            done = iserblk("stats", place, **user)  # type: ignore[arg-type]
            assert (done.returncode, done.stderr) == (0, ""), done
            assert " ".join(done.stdout.split()).startswith(f"{place}: lun0, iser://")
            assert ("requests, 8.0 MiB" in done.stdout) == (place == files)
        for server in (by_path, tcp, mounted):
            server.end(signal.SIGTERM)
    assert not {str(nbd), listen, str(files)} & set(places(tmp_path))
    assert not list(tmp_path.glob("iserblk/*"))


def test_told_where_and_told_not_to(target: TargetProcess, tmp_path: Path) -> None:
    need_fuse()
    files, place = tmp_path / "files", tmp_path / "here"
    files.mkdir()
    user = runtime(tmp_path)
    words = ("mount", "-f", target.url, files)
    with serving(*words, "--metrics", place, log=tmp_path / "log", **user) as server:
        assert len(good_json("stats", place)["luns"]) == 2
        assert str(files) not in places(tmp_path)
        server.end(signal.SIGTERM)
    assert not place.exists()
    with serving(*words, "-o", "metrics=off", log=tmp_path / "log", **user) as server:
        assert str(files) not in places(tmp_path)
        server.end(signal.SIGTERM)


@pytest.mark.parametrize("server", [(), ("--nbdkit",)])
def test_one_that_was_killed_is_not_listed(
    target: TargetProcess, tmp_path: Path, server: tuple[str, ...]
) -> None:
    need(*(["nbdkit"] if server else []))
    path = tmp_path / "socket"
    user = runtime(tmp_path)
    words = ("nbd", target.url, "--socket", path, *server)
    with serving(*words, log=tmp_path / "log", **user) as running:
        assert str(path) in places(tmp_path)
        if server:
            children = subprocess.run(
                ["ps", "-o", "pid=", "--ppid", str(running.process.pid)],
                capture_output=True,
                text=True,
                check=True,
            )
            (child,) = children.stdout.split()
            os.kill(int(child), signal.SIGKILL)
        else:
            running.process.kill()
        running.process.wait(END_S)
        assert str(path) not in places(tmp_path)
    with serving(*words, log=tmp_path / "log", **user) as running:
        assert str(path) in places(tmp_path)
        running.end(signal.SIGTERM)


# --- what is wrong -------------------------------------------------------------------------------


def test_wrong_arguments(disk: BlockingDisk, place: Path, tmp_path: Path) -> None:
    assert "that serves metrics; `iserblk status` lists" in bad(7, "stats", "/dev/nbd99")
    assert "that serves metrics; `iserblk status` lists" in bad(7, "stats", tmp_path)
    assert "that serves metrics; `iserblk status` lists" in bad(
        7, "stats", "iqn.2026-11.example:nothing"
    )
    assert "loopback interface only" in bad(7, "stats", "192.0.2.1:9100")
    assert "--interval" in bad(7, "stats", place, "--json", "--interval", "2")
    assert "--interval" in bad(7, "stats", place, "--interval", "0")
    assert "--interval" in bad(7, "stats", place, "--interval", "nan")
    assert "metrics" in bad(
        7, "info", "iser://127.0.0.1/iqn.2026-11.example:disk", "--metrics", "x"
    )


def test_nobody_serves(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        assert "no process serves metrics there" in bad(4, "stats", f"127.0.0.1:{port}")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "left"))
        assert "no process serves metrics there" in bad(4, "stats", tmp_path / "left")


def test_a_place_that_is_taken(disk: BlockingDisk, target: TargetProcess, place: Path) -> None:
    words = bad(28, "info", target.url, "--metrics", place)
    assert "a process serves there already" in words
