"""``--background`` and ``--pidfile``: of each command that serves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from iserblk.background import Child, Parent
from iserblk.cli import background
from iserblk.cli.background import Ground
from iserblk.errors import IserblkError
from tests.cli.commands import COMMAND, bad, environment, good, good_json, iserblk, serving
from tests.contract.nbd_servers import libnbd
from tests.support.nbdkit import need, run
from tests.support.target import END_S, IQN, running_target
from tests.support.until import until_blocking

MIB = 1 << 20
DATA = b"not flushed by its writer"


@contextmanager
def in_background(
    *arguments: object, pidfile: Path, cwd: Path | None = None
) -> Iterator[tuple[list[str], int]]:
    """The lines that a command has printed, and its process, which is to end in order. It holds
    nothing of its caller's: else this would wait for its end."""
    words = [*arguments, "--background", "--pidfile", pidfile]
    done = iserblk(*words, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, ""), done
    pid = int(pidfile.read_text())
    process = os.pidfd_open(pid)
    try:
        yield done.stdout.splitlines(), pid
        signal.pidfd_send_signal(process, signal.SIGTERM)
        assert select.select([process], [], [], END_S)[0], "it does not end"
        assert not pidfile.exists()
    finally:
        with suppress(ProcessLookupError):  # as it should be
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


@pytest.fixture
def pidfile(tmp_path: Path) -> Path:
    return tmp_path / "pid"


@pytest.mark.parametrize("more", [(), ("--nbdkit",)], ids=["", "nbdkit"])
def test_nbd(more: tuple[str, ...], pidfile: Path, tmp_path: Path) -> None:
    """Clients can connect when it has returned; at its end all is flushed, and nothing is left."""
    need("nbdinfo", *(["nbdkit"] if more else []))
    lun, path = tmp_path / "lun", tmp_path / "socket"
    with running_target([f"{lun}:size=1M:volatile-cache=1M"], tmp_path / "target.log") as target:
        words = ("nbd", f"{target.url}/0", "--socket", path, *more)
        with in_background(*words, pidfile=pidfile) as (lines, pid):
            (line,) = lines
            assert line == f"ready nbd+unix:///?socket={path}"
            assert os.getsid(pid) == pid
            assert run("nbdinfo", "--size", line.removeprefix("ready ")).strip() == str(MIB)
            client = libnbd().NBD()
            client.connect_unix(str(path))
            client.pwrite(DATA, 0)
            client.shutdown()
            assert lun.read_bytes()[: len(DATA)] != DATA
        assert lun.read_bytes()[: len(DATA)] == DATA
        assert not path.exists()


def test_target_reads_relative_files_again(pidfile: Path, tmp_path: Path) -> None:
    """It stays in its directory: files that are named there are read after SIGHUP, too."""
    (tmp_path / "luns").write_text("1 one:size=1M\n")
    words = ("--listen", "127.0.0.1:0", "--iqn", IQN, "--lun", "zero:size=1M", "--luns", "luns")
    with in_background("target", *words, pidfile=pidfile, cwd=tmp_path) as (lines, pid):
        (line,) = lines
        url = line.removeprefix("ready ")
        assert len(good_json("info", url)["disks"]) == 2
        (tmp_path / "luns").write_text("1 one:size=1M\n2 two:size=1M\n")
        os.kill(pid, signal.SIGHUP)
        until_blocking((tmp_path / "two").exists)
        until_blocking(lambda: len(good_json("info", url)["disks"]) == 3)


def test_target_by_a_file(pidfile: Path, tmp_path: Path) -> None:
    """How it runs stands beside --config, as it is nothing that it serves."""
    config = tmp_path / "target.toml"
    config.write_text(
        f'iqn = "{IQN}"\n[[portal]]\nlisten = "127.0.0.1:0"\n[lun.0]\nfile = "a"\nsize = "1M"\n'
    )
    with in_background("target", "--config", config, pidfile=pidfile) as (lines, _):
        good("info", lines[0].removeprefix("ready "))


def test_what_cannot_start_ends_as_in_the_foreground(
    url: str, pidfile: Path, tmp_path: Path
) -> None:
    """One line, and the same status."""
    path = tmp_path / "socket"
    behind = ("--background", "--pidfile", pidfile)
    nbd = ("nbd", "--socket", path, *behind)
    bad(21, *nbd, f"{url}x")
    bad(24, *nbd, url.replace("//", "//user%secret@"))
    assert "Give either --socket" in bad(7, "nbd", url, *behind)
    target = ("target", "--iqn", IQN, *behind)
    assert "no such file" in bad(7, *target, "--lun", tmp_path / "missing")
    listen = url.split("/")[2]
    words = ("--listen", listen, "--lun", f"{tmp_path}/lun:size=1M")
    assert "the port is in use" in bad(28, *target, *words)
    behind = ("--background", "--pidfile", tmp_path / "no" / "pid")
    assert "No such file" in bad(7, "nbd", url, "--socket", path, *behind)
    assert [each.name for each in tmp_path.iterdir()] == ["lun"]


def test_in_the_foreground(url: str, pidfile: Path, tmp_path: Path) -> None:
    """The file is there when the ready line is; a second server cannot have it."""
    words = ("nbd", f"{url}/1", "--pidfile", pidfile)
    with serving(*words, "--socket", tmp_path / "s", log=tmp_path / "log") as server:
        assert pidfile.read_text() == f"{server.process.pid}\n"
        for more in ((), ("--background",)):
            line = bad(28, *words, "--socket", tmp_path / "other", *more)
            assert f"--pidfile {pidfile}: process {server.process.pid} has it, and runs" in line
        assert server.end(signal.SIGTERM) == 143
    assert sorted(each.name for each in tmp_path.iterdir()) == ["log"]


def test_a_server_that_was_killed_leaves_its_file(url: str, pidfile: Path, tmp_path: Path) -> None:
    """Which the next one replaces."""
    words = ("nbd", f"{url}/1", "--pidfile", pidfile, "--socket", tmp_path / "s")
    with serving(*words, log=tmp_path / "log") as server:
        server.kill()
        assert pidfile.exists()
    with in_background(*words[:-2], "--socket", tmp_path / "s", pidfile=pidfile):
        pass


def test_sockets_of_systemd_are_for_what_systemd_starts(url: str) -> None:
    words = [*COMMAND, "nbd", url, "--background"]
    done = subprocess.run(
        ["sh", "-c", 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"', "sh", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        timeout=END_S,
    )
    assert done.returncode == 7
    assert "--background: systemd hands its sockets to what it starts" in done.stderr


# --- one process alone -------------------------------------------------------------------------


class _Parent(Parent):
    """Waits for this process, which stays as it is."""

    def __init__(self) -> None:
        super().__init__(-1)

    def release(self, name: str, directory: str | None = "/") -> None:
        self.released = True


class _Child(Child):
    """Has ended."""

    def __init__(self, status: int) -> None:
        super().__init__(0, -1)
        self.status = status

    def said(self) -> bytes:
        return b""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (IserblkError("data may be lost"), "data may be lost"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ZeroDivisionError("a mistake"), "internal error"),
    ],
)
@pytest.mark.logs
def test_an_error_of_a_server_in_the_background_is_logged(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody reads its stderr any more. Before it serves, the error is on the terminal."""
    monkeypatch.setattr(background, "fork", _Parent)
    ground = Ground("iserblk-test", background=True)
    with pytest.raises(type(error)), ground.serving(lambda _url: None) as _:
        raise error
    assert caplog.text == ""
    with pytest.raises(type(error)), ground.serving(lambda _url: None) as ready:
        ready("url")
        raise error
    assert said in caplog.text


def test_a_server_that_is_killed_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "fork", lambda: _Child(signal.SIGKILL))
    with pytest.raises(IserblkError, match="ended by signal 9"), Ground("x", True).serving():
        pass
    monkeypatch.setattr(background, "fork", lambda: _Child(24 << 8))
    with pytest.raises(SystemExit) as caught, Ground("x", True).serving():
        pass
    assert caught.value.code == 24
