"""``iserblk nbd``: its sockets, its end, and what it refuses."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from iserblk.url import parse_url
from tests.cli.commands import bad, iserblk, serving
from tests.cli.runs import MIB
from tests.support.nbdkit import need, run
from tests.support.target import END_S, running_target
from tests.support.until import until_blocking


def test_nbd_on_a_unix_socket(url: str, tmp_path: Path) -> None:
    need("nbdinfo", "nbdcopy")
    path = tmp_path / "a socket"
    with serving("nbd", url, "--socket", path, log=tmp_path / "log") as server:
        assert server.url == f"nbd+unix:///?socket={str(path).replace(' ', '%20')}"
        assert run("nbdinfo", "--size", server.url).strip() == str(64 * MIB)
        assert run("nbdinfo", "--list", server.url).count('export="lun') == 3
        assert "listens there" in bad(28, "nbd", url, "--socket", path)
        assert server.end(signal.SIGTERM) == 143
    assert not path.exists()


def test_nbd_on_a_socket_whose_name_is_not_utf8(url: str, tmp_path: Path) -> None:
    need("nbdinfo")
    path = tmp_path / os.fsdecode(b"socket-\xff")
    with serving("nbd", f"{url}/1", "--socket", path, log=tmp_path / "log") as server:
        assert server.url == f"nbd+unix:///?socket={tmp_path}/socket-%FF"
        assert run("nbdinfo", "--size", server.url).strip() == str(4 * MIB)
        assert server.end(signal.SIGTERM) == 143
    assert not path.exists()


def test_nbd_on_tcp(url: str, tmp_path: Path) -> None:
    need("nbdinfo")
    with serving("nbd", f"{url}/1", "--listen", "127.0.0.1:0", log=tmp_path / "log") as server:
        assert re.fullmatch(r"nbd://127\.0\.0\.1:\d+", server.url)
        assert run("nbdinfo", "--size", server.url).strip() == str(4 * MIB)
        listen = server.url.removeprefix("nbd://")
        assert "the port is in use; choose another, or 0" in bad(28, "nbd", url, "--listen", listen)
        assert server.end(signal.SIGINT) == 130


def test_nbd_works_behind_another_python(url: str, tmp_path: Path) -> None:
    """nbdkit's Python must not take the library of the python3 that is first in PATH."""
    need("nbdkit", "nbdinfo")
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib" / "python3.11" / "lib-dynload").mkdir(parents=True)
    (tmp_path / "bin" / "python3").touch(mode=0o755)
    (tmp_path / "lib" / "python3.11" / "os.py").write_text("raise SystemExit('wrong library')")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    socket_path = tmp_path / "s"
    words = ("nbd", url, "--socket", socket_path, "--nbdkit")
    with serving(*words, log=tmp_path / "log", PATH=path) as server:
        assert run("nbdinfo", "--size", server.url).strip() == str(64 * MIB)


def test_nbd_ends_when_it_is_killed(url: str, tmp_path: Path) -> None:
    """No nbdkit stays behind, and the next ``iserblk nbd`` replaces the stale socket."""
    need("nbdkit", "nbdinfo")
    path = tmp_path / "s"
    words = ("nbd", url, "--socket", path, "--nbdkit")
    with serving(*words, log=tmp_path / "log") as server:
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
        (child,) = children.read_text().split()
        pidfd = os.pidfd_open(int(child))
        try:
            server.process.kill()
            assert select.select([pidfd], [], [], END_S)[0], "nbdkit is still there"
        finally:
            os.close(pidfd)
    assert path.exists()
    with serving(*words, log=tmp_path / "log") as server:
        assert run("nbdinfo", "--size", server.url).strip() == str(64 * MIB)


@pytest.mark.parametrize("words", [(), ("--nbdkit",)])
def test_nbd_refuses(url: str, tmp_path: Path, words: tuple[str, ...]) -> None:
    if words:
        need("nbdkit")
    (tmp_path / "file").touch()
    assert "no socket" in bad(7, "nbd", *words, url, "--socket", tmp_path / "file")
    assert "No such file" in bad(7, "nbd", *words, url, "--socket", tmp_path / "no" / "s")
    assert "107 at most" in bad(7, "nbd", *words, url, "--socket", tmp_path / ("s" * 200))
    assert "write --socket PATH" in bad(7, "nbd", *words, url, "--socket", "")
    assert "give HOST:PORT" in bad(7, "nbd", *words, url, "--listen", "10809")
    for host in ("no.such.invalid", "a..b", "a" * 64):
        assert f"--listen {host}:0: " in bad(7, "nbd", *words, url, "--listen", f"{host}:0")
    assert "give HOST:PORT" in bad(7, "nbd", *words, url, "--listen", f"127.0.0.1:{'9' * 5000}")
    bad(21, "nbd", *words, f"{url}x", "--socket", tmp_path / "s")
    bad(24, "nbd", *words, url.replace("//", "//user%secret@"), "--socket", tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_nbd_with_what_nbdkit_does_not_take(url: str, tmp_path: Path) -> None:
    """One line, and the remedy; also of what only nbdkit itself finds out."""
    need("nbdkit")
    words = ("nbd", url, "--socket", tmp_path / "s", "--nbdkit")
    line = bad(7, *words, "--filter", "nosuch")
    assert "--filter nosuch: nbdkit has no such filter; those of this machine are in /" in line
    line = bad(1, *words, "--filter", "/no/such.so")
    assert re.search("nbdkit does not start: cannot open filter ['\"]/no/such.so['\"]", line)
    assert not (tmp_path / "s").exists()


def test_nbd_passes_on_what_nbdkit_says(tmp_path: Path) -> None:
    """Until it is killed; nothing is left in /tmp then."""
    need("nbdkit", "nbdinfo")
    log, scratch = tmp_path / "log", tmp_path / "scratch"
    scratch.mkdir()
    words = ("--socket", tmp_path / "s", "--nbdkit")
    with (
        running_target([f"{tmp_path}/lun:size=1M"], tmp_path / "target.log") as own,
        serving("nbd", own.url, *words, log=log, TMPDIR=str(scratch)) as server,
    ):
        assert run("nbdinfo", "--size", server.url).strip() == str(MIB)
        own.kill()
        until_blocking(lambda: "connection lost" in log.read_text())
    assert not list(scratch.iterdir())


def test_nbdkit_is_ready_when_its_plugin_has_logged_in(url: str, tmp_path: Path) -> None:
    """Its login is the third: our command and nbdkit's beginning try it before. If it fails, there
    is no ready line, but one of the error, and its exit status."""
    need("nbdkit")
    host, port = parse_url(url).host, parse_url(url).port
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def forward() -> None:
            for _ in range(2):
                client, _ = server.accept()
                other = socket.create_connection((host, port))
                stack.enter_context(client)
                stack.enter_context(other)
                for one, two in ((client, other), (other, client)):
                    threading.Thread(target=copy, args=(one, two), daemon=True).start()
            server.accept()[0].close()

        thread = threading.Thread(target=forward)
        thread.start()
        through = url.replace("iser://", "iscsi://")
        through = through.replace(f"{host}:{port}", f"127.0.0.1:{server.getsockname()[1]}")
        done = iserblk("nbd", through, "--socket", tmp_path / "s", "--nbdkit")
        thread.join(END_S)
    assert done.returncode == 4 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "nbdkit" not in done.stderr


def copy(one: socket.socket, two: socket.socket) -> None:
    with suppress(OSError):
        while data := one.recv(65536):
            two.sendall(data)
        two.shutdown(socket.SHUT_WR)


def test_nbd_without_nbdkit(url: str, tmp_path: Path) -> None:
    if shutil.which("nbdkit", path="/usr/sbin"):
        pytest.skip("nbdkit is in /usr/sbin, which is always searched")
    done = iserblk("nbd", url, "--socket", tmp_path / "s", "--nbdkit", PATH=str(tmp_path))
    assert done.returncode == 1
    assert "scripts/setup" in done.stderr
