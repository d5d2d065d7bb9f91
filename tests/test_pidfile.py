"""The file with the number of a process that serves."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, Busy, PermissionDenied
from iserblk.pidfile import Pidfile, read_pid
from tests.support.descriptors import descriptors, descriptors_to_begin_with


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.pid"


@contextmanager
def a_process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


def test_it_is_there_as_long_as_the_process_serves(path: Path) -> None:
    with Pidfile(str(path)) as file:
        assert not path.exists()
        file.write()
        assert path.read_text() == f"{os.getpid()}\n"
        assert list(path.parent.iterdir()) == [path]
    assert list(path.parent.iterdir()) == []


def test_a_start_that_fails_leaves_nothing(path: Path) -> None:
    path.write_text("4194304\n")  # no process has that number
    with pytest.raises(KeyError), Pidfile(str(path)):
        raise KeyError
    assert (path.read_text(), len(list(path.parent.iterdir()))) == ("4194304\n", 1)


def test_another_process_has_it(path: Path) -> None:
    """While it starts, and while it serves, whatever is in the file; then there is room again."""
    with Pidfile(str(path)) as first:
        with pytest.raises(Busy, match="another process is starting with it"):
            Pidfile(str(path)).__enter__()
        first.write()
        with pytest.raises(Busy, match=f"process {os.getpid()} has it, and runs"):
            Pidfile(str(path)).__enter__()
        path.write_text("")
        with pytest.raises(Busy):
            Pidfile(str(path)).__enter__()
        assert list(path.parent.iterdir()) == [path]
    with Pidfile(str(path)) as second:
        second.write()


def test_a_process_of_another_program_has_it(path: Path) -> None:
    """Without a lock: the number is what there is."""
    with a_process() as other:
        path.write_text(f"{other.pid}\n")
        with pytest.raises(Busy, match=f"process {other.pid} has it, and runs"):
            Pidfile(str(path)).__enter__()
        assert path.read_text() == f"{other.pid}\n"
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie serves nobody
        with Pidfile(str(path)) as file:
            file.write()
            assert read_pid(path) == os.getpid()


def test_a_number_that_has_come_again(path: Path) -> None:
    """A process that is younger than the file is not what the file is of; nor is this one."""
    with a_process() as other:
        path.write_text(f"{other.pid}\n")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        with Pidfile(str(path)) as file:
            file.write()
        path.write_text(f"{os.getpid()}\n")
        with Pidfile(str(path)) as file:
            file.write()


def test_what_a_process_that_was_killed_has_left(path: Path) -> None:
    """Both its files: that of its start has no lock any more."""
    path.write_text("4194304\n")
    (path.parent / "server.pid.new").write_text("a longer text than a number")
    with Pidfile(str(path)) as file:
        file.write()
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_file_that_is_another_s_by_now_stays(path: Path) -> None:
    with Pidfile(str(path)) as file:
        file.write()
        path.unlink()
        path.write_text("1\n")
    assert path.read_text() == "1\n"


@pytest.mark.parametrize("serves", [True, False])
def test_another_process_starts_between_open_and_lock(
    serves: bool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the file that was opened, and has it still; or has removed it."""
    real = fcntl.flock
    others: list[Pidfile] = []

    def flock(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        other = Pidfile(str(path)).__enter__()
        other.write()
        if serves:
            others.append(other)
        else:
            other.__exit__(None, None, None)
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    if serves:
        with pytest.raises(Busy):
            Pidfile(str(path)).__enter__()
        others[0].__exit__(None, None, None)
    else:
        with Pidfile(str(path)) as file:
            file.write()
            assert path.exists()
    assert list(path.parent.iterdir()) == []


def test_where_it_cannot_be(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors_to_begin_with()
    with pytest.raises(BadArgument, match="the name is empty"):
        Pidfile("")
    with pytest.raises(BadArgument, match="No such file or directory"):
        Pidfile(str(path / "no")).__enter__()
    path.mkdir()
    with pytest.raises(BadArgument, match="exists, and is no regular file"):
        Pidfile(str(path)).__enter__()
    path.rmdir()
    path.symlink_to("somewhere")
    with pytest.raises(BadArgument, match="exists, and is no regular file"):
        Pidfile(str(path)).__enter__()
    path.unlink()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(PermissionDenied, match=r"--pidfile .*: Permission denied"):
            Pidfile(str(path)).__enter__()
    with Pidfile(str(path)) as file, monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(PermissionDenied):
            file.write()
    assert list(path.parent.iterdir()) == []
    assert descriptors() == before


def test_a_relative_path_means_the_directory_of_the_start(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    with Pidfile(path.name) as file:
        monkeypatch.chdir("/")
        file.write()
        assert path.exists()
    assert not path.exists()


@pytest.mark.parametrize(
    ("text", "pid"),
    [("4711\n", 4711), ("", 0), ("no number", 0), ("-1", 0), ("9" * 5000, 0), (None, 0)],
)
def test_numbers_in_files(path: Path, text: str | None, pid: int) -> None:
    if text is not None:
        path.write_text(text)
    assert read_pid(path) == pid


def test_a_directory_is_no_name_of_a_file(tmp_path: Path) -> None:
    for place in ("/", "//", "/tmp/..", str(tmp_path)):
        with pytest.raises(BadArgument, match="--pidfile /"), Pidfile(place):
            pass


def test_what_is_in_the_way_is_named(path: Path, tmp_path: Path) -> None:
    """A file beside it, of which the user knows nothing. It is neither followed nor removed."""
    part = tmp_path / "server.pid.new"
    (tmp_path / "victim").write_text("content")
    for make in (os.mkfifo, os.mkdir, lambda name: os.symlink(tmp_path / "victim", name)):
        make(part)
        with (
            pytest.raises(BadArgument, match=r"server\.pid\.new is in the way"),
            Pidfile(str(path)),
        ):
            pass
        os.rmdir(part) if part.is_dir() and not part.is_symlink() else part.unlink()
    assert (tmp_path / "victim").read_text() == "content"
