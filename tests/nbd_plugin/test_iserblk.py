"""The nbdkit plugin in a real nbdkit, over fake disks, driven by libnbd: what is about nbdkit.

What holds for our own server, too, is in tests/contract/test_nbd_front_ends.py. Tests with real
disks are in tests/cli/test_nbd.py and tests/integration/test_accept_nbd.py.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.disk.wish import Wish
from tests.contract.nbd_servers import BY_NBDKIT, PLUGIN, URL, Server, Start, Starter, libnbd
from tests.support.until import until_blocking

nbd = libnbd()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    starter = Starter(BY_NBDKIT, tmp_path)
    yield starter
    starter.close()


def test_an_unknown_export_is_refused_in_words(start: Start) -> None:
    server = start()
    with pytest.raises(nbd.Error) as caught:
        server.connect("lun7")
    assert caught.value.errnum == errno.ENOENT
    assert "open: error: no export 'lun7'; there are: lun0" in server.end()


def test_a_trim_that_the_lun_refuses_is_left_undone(start: Start) -> None:
    """A trim is a hint, and nbdkit would tell the client EINVAL."""
    server = start(trim="NotSupported")
    client = server.connect()
    client.trim(4096, 0)
    client.trim(4096, 0, nbd.CMD_FLAG_FUA)
    client.shutdown()
    assert "error" not in server.end()


@pytest.mark.parametrize(
    ("error", "number"),
    [
        ("CommandTimeout", errno.EIO),
        ("ConnectionLost", errno.EIO),
        ("ScsiError", errno.EIO),
        ("WriteProtected", errno.EPERM),
        ("OutOfSpace", errno.ENOSPC),
        ("OutOfRange", errno.EINVAL),
    ],
)
def test_errors_reach_the_client_as_errno_and_the_log_as_one_line(
    start: Start, error: str, number: int
) -> None:
    server = start(write=error, read=error, flush=error, trim=error)
    client = server.connect()
    for operation in (
        lambda: client.pwrite(b"x", 0),
        lambda: client.pread(1, 0),
        client.flush,
        lambda: client.trim(1, 0),
    ):
        with pytest.raises(nbd.Error) as caught:
            operation()
        assert caught.value.errnum == number
    said = server.end().splitlines()
    assert [line.partition(" error: ")[2].partition(" error: ")[2] for line in said[:4]] == [
        f"{name}: made to fail" for name in ("write", "read", "flush", "trim")
    ]
    assert said[4:] == [
        "nbdkit: iserblk: lun0: the last flush failed, data may be lost: flush: made to fail"
    ]


def test_nothing_of_python_outlives_a_request_in_a_thread(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's state of a thread is made and deleted in that thread, by PyGILState_Ensure and
    Release around each callback. If another thread deletes it, Python 3.13 aborts."""
    monkeypatch.setenv("FAKE_LOCALS", "1")
    server = start("--threads=1")
    client = server.connect()
    for _ in range(2):
        client.pwrite(b"x", 0)
        client.pread(1, 0)
    client.shutdown()
    assert server.end() == ""
    found = [line for line in server.log() if " after " in line]
    assert found == [*["write after None", "read after None"] * 2, "flush after None"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["colour=blue"], "colour"),
        (["io-timeout=5", "io_timeout=6"], "io-timeout= was given twice"),
        (["io-timeout=soon"], "io-timeout"),
        (["uri=http://somewhere"], "http"),
        (["script=other.py"], "a URL is given as uri=URL"),
    ],
)
def test_bad_parameters_end_in_one_line(start: Start, words: list[str], text: str) -> None:
    server = start(*words)
    (said,) = server.end().splitlines()
    assert server.process.returncode == 1
    assert said.startswith("nbdkit: error: ")
    assert text in said


def test_options_go_to_the_disks(start: Start) -> None:
    server = start("io_timeout=5", "mpa-crc=no")
    server.connect()  # the log has also the calls of the trial before the server listens
    assert server.log()[-1] == f'open [["{URL}"], {{"io-timeout": "5", "mpa-crc": "no"}}]'


def test_no_url(start: Start, tmp_path: Path) -> None:
    server = Server(BY_NBDKIT, tmp_path, [], [{}])
    assert "give uri=iser://" in server.end()
    assert server.process.returncode == 1


def test_a_failed_login_is_said_before_nbdkit_goes_into_the_background(
    start: Start, tmp_path: Path
) -> None:
    environment = dict(os.environ, FAKE_FAULTS='{"open": "ConnectFailed"}')
    ended = subprocess.run(
        ["nbdkit", "-U", tmp_path / "sock", "python", PLUGIN, f"uri={URL}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    (said,) = ended.stderr.splitlines()
    assert said.endswith("error: open: made to fail")


def test_in_the_background_from_another_directory(start: Start, tmp_path: Path) -> None:
    """A daemonised server with a relative path and only PATH set serves, and ends on SIGTERM."""
    socket, pidfile = tmp_path / "sock", tmp_path / "pid"
    relative = os.path.relpath(PLUGIN, tmp_path)
    subprocess.run(
        ["nbdkit", "-U", socket, "-P", pidfile, "python", relative, f"uri={URL}"],
        env={"PATH": os.environ["PATH"], "FAKE_LOG": str(tmp_path / "calls")},
        cwd=tmp_path,
        timeout=60,
        check=True,
    )
    until_blocking(pidfile.exists)
    ended = os.pidfd_open(int(pidfile.read_text()))
    client = nbd.NBD()
    client.connect_unix(str(socket))
    client.pwrite(b"background", 0)
    assert client.pread(10, 0) == b"background"
    client.shutdown()
    signal.pidfd_send_signal(ended, signal.SIGTERM)
    poll = select.poll()
    poll.register(ended, select.POLLIN)  # not a child of this process: a pidfd shows its end
    assert poll.poll(30_000), "nbdkit did not end"
    os.close(ended)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "close"


def test_connections_of_one_device_are_one_client(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of a loss of writes once, on whichever; also of one that an earlier server had."""
    owed = tmp_path / "owed"
    owed.write_text("2 1\n")
    monkeypatch.setenv("ISERBLK_OWED", str(owed))
    monkeypatch.setenv("FAKE_LOSE", str(tmp_path / "lose"))
    server = start()
    one, other = server.connect(), server.connect()
    for losses in (3, 4):
        with pytest.raises(nbd.Error) as caught:
            other.flush()
        assert caught.value.errnum == errno.EIO and not owed.exists()
        one.flush()
        if losses == 3:
            (tmp_path / "lose").touch()
            one.pwrite(b"x", 0)
            assert owed.read_text() == f"{losses} {losses - 1}\n"
    (tmp_path / "lose").touch()
    one.pwrite(b"x", 0)
    assert "lun0: the last flush failed, data may be lost: lun0: writes were lost" in server.end()
    assert owed.exists()


def test_a_device_that_has_heard_owes_nothing_at_the_end(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one of its connections began while it owed a failure."""
    owed = tmp_path / "owed"
    owed.write_text("2 1\n")
    monkeypatch.setenv("ISERBLK_OWED", str(owed))
    server = start()
    one, other = server.connect(), server.connect()
    with pytest.raises(nbd.Error):
        other.flush()
    one.flush()
    assert "the last flush" not in server.end() and not owed.exists()


def test_a_loss_that_comes_while_the_client_is_made(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by the thread of the disks, which must not find half of what is to write it
    down."""
    owed = tmp_path / "owed"
    owed.write_text("2 1\n")
    monkeypatch.setenv("ISERBLK_OWED", str(owed))
    monkeypatch.setenv("FAKE_CHANGES", "")
    server = start()
    server.connect().shutdown()
    assert "Traceback" not in server.end()


def test_told_to_end_it_has_no_patience_with_a_target_that_is_away(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nbdkit waits for the requests that it has, and tells its plugin nothing: that looks."""
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("FAKE_HOLD", str(hold))
    monkeypatch.setenv("FAKE_AWAY", "1")
    server = start()
    client = server.connect()
    client.pwrite(b"x", 0)
    client.aio_flush()
    until_blocking(lambda: "a flush waits" in server.log())
    # It looks, and nothing is wished for yet.
    until_blocking(lambda: "the end is not wanted" in server.log())
    assert "the end is wanted" not in server.log()
    server.process.terminate()
    until_blocking(lambda: "the end is wanted" in server.log())
    hold.unlink()
    server.end()


def test_while_its_device_is_being_detached_it_has_no_patience(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_AWAY", "1")
    monkeypatch.setenv("ISERBLK_OWED", str(tmp_path / "owed"))
    server = start()
    until_blocking(lambda: "the end is not wanted" in server.log())
    wish = Wish(tmp_path / "ending")
    wish.make()
    until_blocking(lambda: "the end is wanted" in server.log())
    server.end()


def test_the_last_flushes_begin_together(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A LUN whose target is away holds up no other."""
    hold = tmp_path / "hold"
    monkeypatch.setenv("FAKE_HOLD", str(hold))
    server = start(luns=[{}, {}, {}])
    for name in ("lun0", "lun1"):  # and lun2 is not written to
        client = server.connect(name)
        client.pwrite(b"x", 0)
        client.shutdown()
    hold.touch()
    server.process.terminate()
    until_blocking(lambda: server.log().count("a flush waits") == 2)
    hold.unlink()
    server.end()


def test_one_last_flush_of_two_that_fails_is_told(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISERBLK_OWED", str(tmp_path / "owed"))
    monkeypatch.setenv("FAKE_LOSE", str(tmp_path / "lose"))
    server = start(luns=[{}, {}])
    for name in ("lun0", "lun1"):
        if name == "lun1":
            (tmp_path / "lose").touch()
        client = server.connect(name)
        client.pwrite(b"x", 0)
        client.shutdown()
    said = server.end()
    assert "lun1: the last flush failed" in said and "lun0: the last flush" not in said
    assert Wish(tmp_path / "ending").left is not None
