"""Signals, full or closed streams, and targets that die: nothing hangs, nothing is left.

test_nbd.py, test_cli_mount.py and test_target.py end commands that serve after a ready line.
"""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, environment, good
from tests.cli.ways import WAYS, ended, one_line
from tests.support.fuse import need_fuse
from tests.support.nbdkit import need, running_nbdkit
from tests.support.target import END_S, IQN, ROOT, running_target
from tests.support.until import until_blocking

BENCH = ["-q", "bench", "{}", "--rw", "write", "--destroy", "--time", "60"]
ENDING = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ALONE = ["nbd", *(way for way in WAYS if way not in ("nbd", "nbdkit"))]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/disk:size=1M"], files / "log") as target:
        yield target.url


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "place"
    directory.mkdir()
    return directory


# --- signals -----------------------------------------------------------------------------------


def taken(server: socket.socket, process: subprocess.Popen[str]) -> socket.socket:
    """The connection of the process."""
    until_blocking(lambda: select.select([server], [], [], 0)[0] or process.poll() is not None)
    if process.returncode is not None:
        _, said = process.communicate()
        pytest.fail(f"it ended with {process.returncode}: {said}")
    connection, _ = server.accept()
    return connection


@pytest.mark.parametrize(
    ("way", "group", "number"),
    [
        *zip(ALONE, itertools.repeat(False), itertools.cycle(SIGNALS)),
        *(("nbd", False, number) for number in SIGNALS[1:]),  # ALONE has it with the first
        *(("mount", True, number) for number in SIGNALS),
        ("mount -f", True, signal.SIGINT),
        ("nbd --background", True, signal.SIGINT),
    ],
)
def test_a_signal_while_it_connects(
    way: str, number: signal.Signals, group: bool, place: Path
) -> None:
    """The command ends at once with all its processes, although the portal never answers.
    ``group``: the signal goes to all of them, as with Ctrl-C in a terminal."""
    need_fuse()
    if "nbdkit" in way:
        need("nbdkit")
    with socket.create_server(("127.0.0.1", 0)) as server:
        portal = f"iser://127.0.0.1:{server.getsockname()[1]}/{IQN}/0"
        process = subprocess.Popen(
            # nohup, perhaps around all tests, has SIGHUP ignored.
            ["env", "--default-signal=HUP", *WAYS[way].call(portal, place)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        with process:
            try:
                with taken(server, process) as connection:
                    assert connection.recv(1) == b"M"  # the MPA Request: handlers are set by now
                    if group:
                        os.killpg(process.pid, number)
                    else:
                        process.send_signal(number)
                    # Until every process that has stderr open has ended.
                    _, said = process.communicate(timeout=END_S)
            finally:
                process.kill()  # it ends, or has ended
    assert process.returncode == 128 + number
    assert len(said.strip().splitlines()) <= 1
    assert not os.path.ismount(place)
    if way != "copy from":
        assert list(place.iterdir()) == []


@ENDING
@pytest.mark.parametrize(
    "words",
    [
        [*BENCH, "--face", "async"],
        [*BENCH, "--face", "queue", "--plot", "{source}.svg"],
        [*BENCH, "--face", "blocking"],
        ["copy", "{source}", "{}"],
    ],
    ids=["bench", "bench queue", "bench blocking", "copy"],
)
def test_a_signal_while_it_works(words: list[str], number: signal.Signals, tmp_path: Path) -> None:
    """SCSI commands in flight are aborted, the session is logged out, and the target serves on. A
    bench says what it has measured."""
    lun, source = tmp_path / "lun", tmp_path / "source"
    source.write_bytes(b"\x11" * (192 << 20))
    with running_target([f"{lun}:size=192M"], tmp_path / "log") as busy:
        filled = [word.format(f"{busy.url}/0", source=source) for word in words]
        process = subprocess.Popen(
            [*COMMAND, *filled],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        # More than is in flight: some requests have ended.
        until_blocking(lambda: lun.stat().st_blocks > 2048 or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(number)
        said, complaint = process.communicate(timeout=END_S)
        assert (process.returncode, complaint.strip()) == (128 + number, "")
        if "bench" in words:
            assert " s of 60 s\n" in said and "IOPS" in said and "p99" in said
            assert Path(f"{source}.svg").exists() == ("--plot" in words)
        else:
            assert said == ""
        good("info", f"{busy.url}/0")
    assert source.stat().st_size == 192 << 20


@ENDING
@pytest.mark.parametrize("out", [False, True], ids=["from stdin", "to stdout"])
def test_a_signal_while_a_pipe_keeps_it_waiting(
    out: bool, number: signal.Signals, url: str, tmp_path: Path
) -> None:
    """The program at the other end of the pipe does nothing for now."""
    made = tmp_path / "made"
    words = ["copy", f"{url}/0", "-"] if out else ["copy", "-", str(made)]
    with subprocess.Popen(
        [*COMMAND, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        if out:
            assert process.stdout.read(1) == bytes(1)
        else:
            process.stdin.write(bytes(1 << 20))  # more than a pipe has room for
            process.stdin.flush()
            assert made.exists()
        process.send_signal(number)
        process.wait(END_S)
        assert process.stderr is not None and process.stderr.read() == b""
    assert process.returncode == 128 + number
    assert not made.exists()


@ENDING
def test_a_signal_while_nbdkit_logs_in(number: signal.Signals, tmp_path: Path) -> None:
    need("nbdkit")
    with socket.create_server(("127.0.0.1", 0)) as server:
        portal = f"iser://127.0.0.1:{server.getsockname()[1]}/{IQN}/0"
        process = subprocess.Popen(
            WAYS["nbdkit"].call(portal, tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        with taken(server, process) as connection:
            connection.recv(1)
            process.send_signal(number)
            _, said = process.communicate(timeout=END_S)
            while connection.recv(1000):  # until its child process has ended, too
                pass
    assert process.returncode
    assert len(said.splitlines()) <= 1


def test_a_signal_among_the_imports(tmp_path: Path) -> None:
    """The first imported package sends the signal: there is no traceback."""
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [*COMMAND, "--version"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(PYTHONPATH=path),
        timeout=END_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("words", "status"),
    [(["target"], 3), (["-v", "-q", "target", "info"], 3), (["info", "target"], -signal.SIGHUP)],
)
def test_a_target_is_told_to_read_its_files_again_as_it_begins(
    words: list[str], status: int, tmp_path: Path
) -> None:
    """The signal comes during the imports. It is kept for a target, and ends other commands: these
    do nothing with it."""
    kill = "import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nraise SystemExit(3)\n"
    (tmp_path / "click.py").write_text(kill)
    done = subprocess.run(
        # nohup, perhaps around all tests, has it ignored.
        ["env", "--default-signal=HUP", *COMMAND, *words],
        check=False,
        cwd=tmp_path,
        env=environment(PYTHONPATH=f"{tmp_path}:{ROOT}"),
        timeout=END_S,
    )
    assert done.returncode == status


# --- streams that are full or closed -----------------------------------------------------------


@pytest.mark.parametrize(
    "words", ["info {}", "info {} --json", "--help", "trim {}/0 --length 0", "target {target}"]
)
@pytest.mark.parametrize("stream", [">/dev/full", ">&-"])
def test_stdout_full_or_closed(words: str, stream: str, url: str, tmp_path: Path) -> None:
    serve = f"--listen 127.0.0.1:0 --iqn {IQN} --lun {tmp_path}/disk:size=1M"
    line = f"{sys.executable} -m iserblk.cli {words.format(url, target=serve)} {stream}"
    said = one_line(ended(["sh", "-c", line]), 1)
    assert said.startswith("iserblk: cannot write to stdout: ")


def test_stderr_closed(url: str) -> None:
    """No file or socket gets the descriptor of the closed stderr: the message goes nowhere."""
    done = ended(["sh", "-c", f"{sys.executable} -m iserblk.cli info {url}/7 2>&-"])
    assert (done.returncode, done.stdout, done.stderr) == (21, "", "")


def test_stderr_full(url: str) -> None:
    """The message cannot be written; the exit status is the same."""
    done = ended(["sh", "-c", f"{sys.executable} -m iserblk.cli info {url}/7 2>/dev/full"])
    assert (done.returncode, done.stdout, done.stderr) == (21, "", "")


# --- a target that goes away -------------------------------------------------------------------


def test_a_target_that_dies_under_nbd(tmp_path: Path) -> None:
    """NBD clients get an error, the server logs why, and ends on a signal."""
    nbd = pytest.importorskip("nbd", reason="libnbd's Python module: python3-libnbd")
    need("nbdkit")
    with (
        running_target([f"{tmp_path}/lun:size=1M:wce=0"], tmp_path / "target.log") as target,
        running_nbdkit([f"{target.url}/0?io-timeout=1"], tmp_path) as uri,
    ):
        client = nbd.NBD()
        client.connect_uri(uri)
        client.pwrite(b"x" * 512, 0)
        target.kill()
        with pytest.raises(nbd.Error) as caught:
            client.pread(512, 0)
        assert caught.value.errno == "EIO"
        client.shutdown()
    assert "Traceback" not in (tmp_path / "nbdkit.log").read_text()
