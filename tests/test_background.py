"""A process that leaves its terminal."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk import background
from tests.support.target import END_S
from tests.support.until import until_blocking

CODE = """
import logging, sys
from iserblk import background
background.SYSLOG = sys.argv[1]
logging.basicConfig(level=logging.INFO)
print("said", flush=True)
background.log_to_syslog("iserblk-test")
logging.warning("logged")
background.release_streams()
print("not said", flush=True)
print("not said", file=sys.stderr)
sys.stdin.read()
"""
# The child does what the first argument says; the parent prints what it hears of that.
FORKS = """
import os, signal, sys
from iserblk.background import Child, Parent, fork
print("once", end="")  # not flushed
other = fork()
if isinstance(other, Parent):
    exec(sys.argv[1])
    os._exit(7)
assert isinstance(other, Child)
print("", other.said(), other.status, other.pid, flush=True)
"""


@pytest.mark.parametrize("there", [True, False])
def test_logs_go_to_syslog_and_nothing_to_the_terminal(there: bool, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        if there:
            syslog.bind(str(tmp_path / "log"))
        with subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path / "log")],
            stdin=subprocess.PIPE,  # which stays open: the process ends all the same
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            assert (process.stdout.read(), process.stderr.read()) == ("said\n", "")
            assert process.wait() == 0
            if there:
                line = syslog.recv(4096)
                assert f"iserblk-test[{process.pid}]: logged".encode() in line


def forked(body: str, directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, body],
        capture_output=True,
        text=True,
        check=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=END_S,
    )
    assert done.stderr == ""
    return done.stdout.split()


def until_gone(pid: int) -> None:
    """Wait until a process that is no child of ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], END_S)[0], f"process {pid} is still there"
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("stays", [False, True])
def test_a_child_that_serves_goes_on_without_a_terminal(stays: bool, tmp_path: Path) -> None:
    """Its caller's pipes are closed: ``forked`` waits for that."""
    directory = None if stays else "/"
    body = f"other.release('iserblk-test', {directory!r}); signal.pause()"
    once, said, status, pid = forked(body, tmp_path)
    try:
        assert (once, said, status) == ("once", "b'ready'", "0")
        assert os.getsid(int(pid)) == int(pid)
        assert os.readlink(f"/proc/{pid}/cwd") == (str(tmp_path) if stays else "/")
        assert {os.readlink(f"/proc/{pid}/fd/{stream}") for stream in range(3)} == {"/dev/null"}
    finally:
        os.kill(int(pid), signal.SIGTERM)
    until_gone(int(pid))


def test_a_child_that_does_not_serve(tmp_path: Path) -> None:
    """What it says is heard, and how it ended."""
    once, said, status, _ = forked("other.refuse(b'why')", tmp_path)
    assert (once, said, os.waitstatus_to_exitcode(int(status))) == ("once", "b'why'", 7)
    _, said, status, _ = forked("", tmp_path)
    assert (said, os.waitstatus_to_exitcode(int(status))) == ("b''", 7)
    _, said, status, _ = forked("os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert (said, int(status)) == ("b''", signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_anybody_waits(number: signal.Signals) -> None:
    """It comes between the fork and the waiting: the new process ends with its parent."""
    code = f"""
import os, signal, sys
from iserblk.background import Parent, fork
me = os.getpid()
def end(*_): sys.exit("ended" if os.getpid() == me else 0)
signal.signal({number}, end)
other = fork()
if isinstance(other, Parent):
    signal.pause()
os.kill(os.getpid(), {number})
print(other.pid, flush=True)
other.said()
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=END_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "ended\n")
    until_gone(int(done.stdout))


def test_nobody_waits_any_more(tmp_path: Path) -> None:
    """A child that serves already cannot refuse: it has to log why it ends."""
    body = (
        "other.release('iserblk-test')\n"
        "open('told', 'w').write(f'{other.released} {other.refuse(b\"x\")}')\n"
    ).replace("'told'", repr(str(tmp_path / "told.new")))
    body += f"os.rename({str(tmp_path / 'told.new')!r}, {str(tmp_path / 'told')!r})"
    *_, pid = forked(body, tmp_path)
    until_gone(int(pid))
    assert (tmp_path / "told").read_text() == "True False"


def test_a_child_whose_parent_has_gone(tmp_path: Path) -> None:
    """It learns that it is not wanted, when it begins to serve: OSError."""
    body = (
        "os.kill(os.getppid(), signal.SIGKILL)\n"
        "while os.getppid() == before: pass\n"
        "try:\n"
        "    other.release('iserblk-test')\n"
        "except BrokenPipeError:\n"
        f"    os.mkdir({str(tmp_path / 'heard')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", FORKS, f"before = os.getppid()\n{body}"],
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=END_S,
        stdout=subprocess.PIPE,  # until the child has closed it, too
    )
    assert done.returncode == -signal.SIGKILL
    until_blocking((tmp_path / "heard").exists)  # it closes the pipe before it hears that


@pytest.mark.parametrize(
    ("there", "words"),
    [("JOURNAL", "journalctl -t iserblk-mount"), ("SYSLOG", "syslog"), ("", "no syslog; with -f")],
)
def test_where_the_log_is(
    there: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JOURNAL", "SYSLOG"):
        monkeypatch.setattr(background, name, str(tmp_path / name))
    if there:
        (tmp_path / there).touch()
    assert words in background.where_log_is("iserblk-mount")
