"""Every command against a real target, and all that can be wrong in what a user says."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from iserblk.cli import nbd
from tests.cli.commands import COMMAND, bad, environment, good, good_json, iserblk, serving
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need, run
from tests.support.target import END_S, IQN, ROOT, TargetProcess, running_target

MIB = 1 << 20
JSON_DOCUMENT = (ROOT / "docs/json.md").read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="module")
def target(files: Path) -> Iterator[TargetProcess]:
    """LUN 0 is there to be written; 1 is small, with blocks of 4096 bytes; 2 is read-only."""
    (files / "read-only").write_bytes(b"written once" * 4096)
    specs = ["big:size=64M", "small:size=4M:block=4096", "read-only:ro"]
    with running_target([str(files / spec) for spec in specs], files / "log") as process:
        yield process


@pytest.fixture(scope="module")
def url(target: TargetProcess) -> str:
    return target.url


def documented(command: str) -> set[str]:
    """Field names that docs/json.md gives for a command: what is code in the first column."""
    section = JSON_DOCUMENT.partition(f"\n## iserblk {command}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall("`(.*?)`", cell)}


# --- info --------------------------------------------------------------------------------------


def test_info_shows_every_disk(url: str) -> None:
    lines = [" ".join(line.split()) for line in good("info", url).splitlines()]
    assert [line for line in lines if line.startswith("size")] == [
        "size 67108864 bytes (64.0 MiB)",
        "size 4194304 bytes (4.0 MiB)",
        "size 49152 bytes (48.0 KiB)",
    ]
    assert [line for line in lines if line.startswith("read-only")] == [
        "read-only no",
        "read-only no",
        "read-only yes",
    ]
    assert [line for line in lines if line.startswith("lun")] == [
        f"lun{number}: {url}/{number}" for number in range(3)
    ]
    assert "provider iwarp" in lines
    assert any(line.startswith("provider chosen because: rcap=auto") for line in lines)


PATH_FIELDS = {"portal", "in_use", "state", "error", "failures"}


def test_info_shows_the_portals(url: str) -> None:
    dead = url.replace(url.partition("//")[2].partition("/")[0], "127.0.0.1:1")
    done = iserblk("info", f"{dead}/1", f"{url}/1", "--json")
    (disk,) = json.loads(done.stdout)["disks"]
    first, second = disk["paths"]
    assert set(first) == PATH_FIELDS
    assert (first["in_use"], second["in_use"]) == (False, True)
    assert "refused" in first["error"] and not second["error"]
    assert "is used: " in done.stderr
    text = iserblk("info", f"{dead}/1", f"{url}/1").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"{url.rpartition('/')[0]} in use" in lines
    assert any(line.startswith("iser://127.0.0.1:1 not in use, ") for line in lines)


def test_info_json_is_as_documented(url: str) -> None:
    info = good_json("info", f"{url}/1", "--rcap", "iwarp")
    (disk,) = info["disks"]
    assert set(disk) == documented("info")
    assert disk["paths"] == []
    assert (disk["lun"], disk["size"], disk["block_size"]) == (1, 4 * MIB, 4096)
    assert disk["provider_reason"] == "asked for with rcap"
    assert disk["connection"]["provider"] == "iwarp"


@pytest.mark.skipif(os.path.exists("/dev/infiniband"), reason="this machine has RDMA devices")
def test_without_a_device_nothing_of_verbs_is_loaded(url: str) -> None:
    script = (
        "import sys; from iserblk.cli import main\n"
        "try: main.main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "info", url],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0
    loaded = set(done.stderr.split())
    assert "iserblk.rcap.verbs" in loaded
    assert not {"pyverbs", "iserblk.rcap.verbs.connecting"} & loaded


def test_options_reach_the_connection(url: str) -> None:
    def crc(*arguments: str) -> Any:
        return good_json("info", *arguments)["disks"][0]["connection"]["mpa_crc"]

    assert crc(f"{url}/0") is True
    assert crc(f"{url}/0", "--mpa-crc", "no") is False
    assert crc(f"{url}/0?mpa-crc=yes", "--mpa-crc", "no") is True


def test_frames_between_our_ends_are_as_large_as_they_can_be(url: str) -> None:
    def largest(*arguments: str) -> Any:
        return good_json("info", *arguments)["disks"][0]["connection"]["mulpdu"]

    assert largest(f"{url}/0") == 65534
    assert largest(f"{url}/0?mpa-crc=no") == 65534
    one_segment = largest(f"{url}/0", "--mpa-frames", "1")  # of the loopback device: it is large
    assert 1000 < one_segment < 65534


# --- copy --------------------------------------------------------------------------------------


def test_copy_there_and_back(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for offset in (0, 9 * MIB + 17, 40 * MIB):
            file.seek(offset)
            file.write(random.Random(offset).randbytes(MIB + 1))
        file.truncate(64 * MIB)
    there = good_json("copy", source, f"{url}/0", "--verify")
    assert set(there) == documented("copy")
    assert (there["bytes"], there["verified"]) == (64 * MIB, True)
    assert there["zero_bytes"] > 50 * MIB
    words = good("copy", f"{url}/0", tmp_path / "back", "--verify")
    assert words.startswith("copied 64.0 MiB (") and words.endswith(", verified\n")
    run("cmp", source, tmp_path / "back")
    assert (tmp_path / "back").stat().st_blocks * 512 < 8 * MIB


def test_copy_replaces_a_file_by_one_of_the_right_size(url: str, tmp_path: Path) -> None:
    (tmp_path / "back").write_bytes(b"\xff" * 5 * MIB)
    good("copy", f"{url}/2", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"written once" * 4096


def test_copy_of_part_of_a_block_keeps_the_rest(url: str, tmp_path: Path) -> None:
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    (tmp_path / "short").write_bytes(b"\x22" * 1000)
    good("copy", tmp_path / "ones", f"{url}/1")
    done = iserblk("copy", tmp_path / "short", f"{url}/1", "--verify")
    assert done.returncode == 0
    assert done.stderr == (
        f"iserblk: the destination is larger: its last {4 * MIB - 1000} bytes stay as they are\n"
    )
    good("copy", f"{url}/1", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"\x22" * 1000 + b"\x11" * (4 * MIB - 1000)


def test_copy_refuses(url: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"\x33" * (4 * MIB + 1))
    (tmp_path / "file").write_bytes(b"x")
    words = bad(7, "copy", tmp_path / "large", f"{url}/1")
    assert f"has {4 * MIB} bytes, the source {4 * MIB + 1}" in words
    assert "the same" in bad(7, "copy", f"{url}/1", f"{url}/1")
    assert "the same" in bad(7, "copy", tmp_path / "file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert "add one of /0, /1, /2" in bad(7, "copy", url, tmp_path / "back")
    assert "read-only" in bad(13, "copy", tmp_path / "file", f"{url}/2")
    assert "missing" in bad(7, "copy", tmp_path / "missing", f"{url}/1")
    bad(21, "copy", f"{url}/9", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_copy_says_when_the_disk_is_full(url: str, tmp_path: Path) -> None:
    """A file system of 1 MiB for 4 MiB of data."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    (tmp_path / "full").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1M", "none", tmp_path / "full")
    try:
        assert "No space left" in bad(1, "copy", f"{url}/1", tmp_path / "full" / "file")
    finally:
        run("umount", tmp_path / "full")


# --- trim, bench -------------------------------------------------------------------------------


def test_trim_gives_space_back(url: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    assert good_json("trim", f"{url}/1", "--offset", "1M", "--length", "2M") == {
        "offset": MIB,
        "length": 2 * MIB,
    }
    assert (files / "small").stat().st_blocks * 512 == 2 * MIB
    good("copy", f"{url}/1", tmp_path / "back")
    ones = b"\x11" * MIB
    assert (tmp_path / "back").read_bytes() == ones + bytes(2 * MIB) + ones
    assert good("trim", f"{url}/1") == "trimmed 4.0 MiB from offset 0\n"
    assert (files / "small").stat().st_blocks == 0
    assert documented("trim") == {"offset", "length"}


@pytest.mark.parametrize(
    "arguments",
    [["--offset", 5 * MIB], ["--length", 5 * MIB], ["--offset", 4 * MIB, "--length", 1]],
)
def test_trim_behind_the_end_is_refused(url: str, arguments: list[object]) -> None:
    assert f"has {4 * MIB} bytes" in bad(7, "trim", f"{url}/1", *arguments)


def test_trim_of_what_must_not_be_written(url: str) -> None:
    assert "read-only" in bad(13, "trim", f"{url}/2")


@pytest.mark.parametrize("face", ["async", "blocking"])
@pytest.mark.parametrize("pattern", ["randread", "read", "randwrite", "write"])
def test_bench(url: str, face: str, pattern: str) -> None:
    found = good_json(
        "bench", f"{url}/0", "--face", face, "--rw", pattern, "--time", "0.2", "--destroy"
    )
    latencies = found["latency_us"]
    assert set(found) == documented("bench")
    assert all(f"`{name}`" in JSON_DOCUMENT for name in latencies)
    assert (found["rw"], found["face"], found["depth"]) == (pattern, face, 32)
    assert found["bytes"] == found["ios"] * 4096 > 0
    assert latencies["min"] <= latencies["p50"] <= latencies["p99.9"] <= latencies["max"]


def test_bench_for_people(url: str) -> None:
    words = good("bench", f"{url}/0", "--time", "0.1", "--bs", "64k", "--depth", "2")
    assert "IOPS" in words and "MB/s" in words and "p99" in words


def test_bench_does_not_write_unasked(url: str) -> None:
    assert "--destroy" in bad(7, "bench", f"{url}/0", "--rw", "randwrite")
    assert "read-only" in bad(13, "bench", f"{url}/2", "--rw", "write", "--yes")
    assert f"which has {4 * MIB} bytes" in bad(7, "bench", f"{url}/1", "--bs", "5M")
    assert "--bs 0" in bad(7, "bench", f"{url}/1", "--bs", "0")


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "1e300"])
def test_bench_wants_a_time_that_ends(url: str, seconds: str) -> None:
    assert "is not in the range" in bad(7, "bench", f"{url}/0", f"--time={seconds}")


# --- nbd ---------------------------------------------------------------------------------------


def test_nbd_on_a_unix_socket(url: str, tmp_path: Path) -> None:
    need("nbdkit", "nbdinfo", "nbdcopy")
    path = tmp_path / "a socket"
    with serving("nbd", url, "--socket", path, log=tmp_path / "log") as server:
        assert server.url == f"nbd+unix:///?socket={str(path).replace(' ', '%20')}"
        assert run("nbdinfo", "--size", server.url).strip() == str(64 * MIB)
        assert run("nbdinfo", "--list", server.url).count('export="lun') == 3
        assert "listens there" in bad(28, "nbd", url, "--socket", path)
        assert server.end(signal.SIGTERM) == 143
    assert not path.exists()


def test_nbd_on_a_socket_whose_name_is_not_utf8(url: str, tmp_path: Path) -> None:
    need("nbdkit", "nbdinfo")
    path = tmp_path / os.fsdecode(b"socket-\xff")
    with serving("nbd", f"{url}/1", "--socket", path, log=tmp_path / "log") as server:
        assert server.url == f"nbd+unix:///?socket={tmp_path}/socket-%FF"
        assert run("nbdinfo", "--size", server.url).strip() == str(4 * MIB)
        assert server.end(signal.SIGTERM) == 143
    assert not path.exists()


def test_nbd_on_tcp(url: str, tmp_path: Path) -> None:
    need("nbdkit", "nbdinfo")
    with serving("nbd", f"{url}/1", "--listen", "127.0.0.1:0", log=tmp_path / "log") as server:
        assert re.fullmatch(r"nbd://127\.0\.0\.1:\d+", server.url)
        assert run("nbdinfo", "--size", server.url).strip() == str(4 * MIB)
        listen = server.url.removeprefix("nbd://")
        assert "in use" in bad(28, "nbd", url, "--listen", listen)
        assert server.end(signal.SIGINT) == 130


def test_nbd_works_behind_another_python(url: str, tmp_path: Path) -> None:
    """nbdkit's Python must not take the library of whatever python3 is first in PATH."""
    need("nbdkit", "nbdinfo")
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib" / "python3.11" / "lib-dynload").mkdir(parents=True)
    (tmp_path / "bin" / "python3").touch(mode=0o755)
    (tmp_path / "lib" / "python3.11" / "os.py").write_text("raise SystemExit('wrong library')")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    socket_path = tmp_path / "s"
    with serving("nbd", url, "--socket", socket_path, log=tmp_path / "log", PATH=path) as server:
        assert run("nbdinfo", "--size", server.url).strip() == str(64 * MIB)


def test_nbd_ends_when_it_is_killed(url: str, tmp_path: Path) -> None:
    """No nbdkit stays behind, and its stale socket is in nobody's way."""
    need("nbdkit", "nbdinfo")
    path = tmp_path / "s"
    with serving("nbd", url, "--socket", path, log=tmp_path / "log") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        (child,) = children.read_text().split()
        pidfd = os.pidfd_open(int(child))
        try:
            server.process.kill()
            assert select.select([pidfd], [], [], END_S)[0], "nbdkit is still there"
        finally:
            os.close(pidfd)
    assert path.exists()
    with serving("nbd", url, "--socket", path, log=tmp_path / "log") as server:
        assert run("nbdinfo", "--size", server.url).strip() == str(64 * MIB)


def test_nbd_refuses(url: str, tmp_path: Path) -> None:
    need("nbdkit")
    (tmp_path / "file").touch()
    assert "no socket" in bad(7, "nbd", url, "--socket", tmp_path / "file")
    assert "No such file" in bad(7, "nbd", url, "--socket", tmp_path / "no" / "s")
    assert "too long" in bad(7, "nbd", url, "--socket", tmp_path / ("s" * 200))
    assert "give HOST:PORT" in bad(7, "nbd", url, "--listen", "10809")
    for host in ("no.such.invalid", "a..b", "a" * 64):
        assert f"--listen {host}:0: " in bad(7, "nbd", url, "--listen", f"{host}:0")
    assert "give HOST:PORT" in bad(7, "nbd", url, "--listen", f"127.0.0.1:{'9' * 5000}")
    bad(21, "nbd", f"{url}x", "--socket", tmp_path / "s")
    bad(24, "nbd", url.replace("//", "//user%secret@"), "--socket", tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nbd_without_nbdkit(url: str, tmp_path: Path) -> None:
    if shutil.which("nbdkit", path="/usr/sbin"):
        pytest.skip("nbdkit is in /usr/sbin, which is always searched")
    done = iserblk("nbd", url, "--socket", tmp_path / "s", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "scripts/setup" in done.stderr


# --- mount, umount -----------------------------------------------------------------------------


def test_mount_and_umount(url: str, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    assert good("mount", url, place, "-o", "noauto", "--io-timeout", "20") == ""
    try:
        assert sorted(path.name for path in place.iterdir()) == ["lun0", "lun1", "lun2"]
        assert (place / "lun2").read_bytes() == b"written once" * 4096
        assert "mounted there already" in bad(1, "mount", url, place)
    finally:
        assert good("umount", place) == ""
    assert list(place.iterdir()) == []
    assert "no LUNs are mounted" in bad(1, "umount", place)


def test_mount_in_the_foreground(url: str, tmp_path: Path) -> None:
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    with serving("mount", f"{url}/1", place, "-f", log=tmp_path / "log") as server:
        assert server.url == str(place)
        assert (place / "lun1").stat().st_size == 4 * MIB
        assert server.end(signal.SIGTERM) == 0
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("more", ["", "?io-timeout=60"])
def test_the_mount_table_names_the_url(url: str, tmp_path: Path, more: str) -> None:
    """As it was given, for mount(8) to find the line of fstab mounted; but options are nobody's."""
    need_fuse()
    place = tmp_path / "place"
    place.mkdir()
    good("mount", url + more, place)
    try:
        table = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
        assert [line[0] for line in table if line[1] == str(place)] == [url]
    finally:
        good("umount", place)


def test_mount_refuses(url: str, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "file").touch()
    place = tmp_path / "place"
    place.mkdir()
    assert "no such directory" in bad(1, "mount", url, tmp_path / "missing")
    assert "not a directory" in bad(1, "mount", url, tmp_path / "file")
    assert "not empty" in bad(1, "mount", url, tmp_path)
    assert "unknown option" in bad(1, "mount", url, place, "-o", "frobnicate")
    assert "io-timeout" in bad(1, "mount", url, place, "--io-timeout", "soon")
    assert "scheme" in bad(1, "mount", "nonsense", place)
    assert "no target" in bad(32, "mount", f"{url}x", place)


@pytest.mark.parametrize("words", ["mount {url} place", "mount -f {url} place", "umount place"])
def test_in_a_directory_that_is_gone(words: str, url: str, tmp_path: Path) -> None:
    need_fuse()
    gone = tmp_path / "gone"
    gone.mkdir()
    command = shlex.join([*COMMAND, *words.format(url=url).split()])
    done = subprocess.run(
        ["sh", "-c", f"rmdir {shlex.quote(str(gone))}; exec {command}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=gone,
        env=environment(),
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("iserblk: place: the current directory is gone"), done.stderr


# --- URLs, portals, targets, LUNs --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("disk", 7, "no scheme"),
        ("http://host/x", 7, "unknown scheme"),
        ("iser:///iqn.2026-11.example:a", 7, "no host"),
        ("iser://host", 7, "names no target"),
        ("iser://host/", 7, "names no target"),
        ("iser://host:99999/iqn.2026-11.example:a", 7, "port"),
        ("iser://host:x/iqn.2026-11.example:a", 7, "port"),
        ("iser://[::1/iqn.2026-11.example:a", 7, "without ]"),
        ("iser://host/disk", 7, "no iSCSI name"),
        ("iser://host/iqn.2026-11.example:a/x", 7, "LUN 'x'"),
        ("iser://host/iqn.2026-11.example:a/99999", 7, "LUN '99999'"),
        ("iser://host/iqn.2026-11.example:a/0?frob=1", 7, "unknown option"),
        ("iser://host/iqn.2026-11.example:a/0?io-timeout=x", 7, "io-timeout"),
        ("iser://host/iqn.2026-11.example:a/0?io-timeout=5&io-timeout=5", 7, "given twice"),
        ("iser://host/iqn.2026-11.example:a/0?", 7, "empty option"),
        ("iser://user%hush@no.such.host.invalid/iqn.2026-11.example:a", 23, "no.such.host"),
        ("iser://u%hush@host/iqn.2026-11.example:a?target-password=hush", 7, "both secrets"),
        ("iser://hush@host/iqn.2026-11.example:a", 7, "without a secret"),
        ("iscsi://host/iqn.2026-11.example:a?rcap=verbs", 27, "means TCP"),
        ("iser://host/iqn.2026-11.example:a?data_digest=crc32c", 27, "no iSCSI digests over iSER"),
        ("iser://host/iqn.2026-11.example:a/0?style=stream", 27, "style"),
        ("iser://host/iqn.2026-11.example:a/0?header=12", 27, "header"),
        ("iser://no.such.host.invalid/iqn.2026-11.example:a", 23, "no.such.host.invalid"),
    ],
)
def test_bad_urls(text: str, status: int, words: str) -> None:
    line = bad(status, "info", text)
    assert words in line
    assert "hush" not in line


@pytest.mark.skipif(os.path.exists("/dev/infiniband"), reason="this machine has RDMA devices")
def test_verbs_without_a_device() -> None:
    line = bad(27, "info", "iser://host/iqn.2026-11.example:a/0?rcap=verbs")
    assert "rcap=verbs: " in line and "or say rcap=iwarp" in line


def test_no_such_target_or_lun(url: str) -> None:
    assert f"{IQN}x" in bad(21, "info", f"{url}x")
    assert "no LUN 7" in bad(21, "info", f"{url}/7")


def test_nobody_listens() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        port = reserved.getsockname()[1]
        assert f"127.0.0.1:{port}" in bad(4, "info", f"iser://127.0.0.1:{port}/{IQN}")


def test_something_else_listens() -> None:
    """A server that says something at once, as SSH and SMTP servers do, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        bad(4, "info", f"iser://127.0.0.1:{port}/{IQN}")
        thread.join()


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EROFS, 13), (errno.EPERM, 13), (errno.EACCES, 13), (errno.EADDRINUSE, 28)],
)
def test_a_place_that_nbd_may_not_listen_in_is_no_bad_argument(number: int, status: int) -> None:
    """A read-only file system among them."""
    assert nbd.refusal(OSError(number, "")).exit_status == status
