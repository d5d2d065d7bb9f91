"""The nbdkit plugin in a real nbdkit, over fake disks, driven by libnbd.

Tests with real disks are in tests/cli/test_nbd.py and tests/integration/test_accept_nbd.py.
"""

from __future__ import annotations

import errno
import json
import os
import select
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.until import until_blocking

nbd = pytest.importorskip("nbd", reason="libnbd's Python module is missing: python3-libnbd")
if shutil.which("nbdkit") is None:
    pytest.skip("nbdkit is missing: run scripts/setup --tests", allow_module_level=True)

PLUGIN = Path(__file__).with_name("fake_plugin.py")
URL = "iser://127.0.0.1/iqn.2026-11.example:fake/0"
MIB = 1 << 20


class Server:
    """An nbdkit in the foreground. ``log``: calls of the fake disks."""

    def __init__(
        self, directory: Path, words: list[str], luns: list[dict[str, Any]], **faults: str
    ):
        self.socket = directory / "nbd.sock"
        self.calls = directory / "calls"
        pidfile = directory / "pid"
        self.clients: list[Any] = []
        environment = dict(
            os.environ,
            FAKE_LUNS=json.dumps(luns),
            FAKE_LOG=str(self.calls),
            **({"FAKE_FAULTS": json.dumps(faults)} if faults else {}),
        )
        self.process = subprocess.Popen(
            ["nbdkit", "-f", "-U", self.socket, "-P", pidfile, "python", PLUGIN, *words],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        until_blocking(lambda: pidfile.exists() or self.process.poll() is not None)

    def connect(self, export: str = "") -> Any:
        client = nbd.NBD()
        client.add_meta_context("base:allocation")
        client.set_export_name(export)
        client.connect_unix(str(self.socket))
        self.clients.append(client)
        return client

    def end(self) -> str:
        """End the server as systemd would; returns what it wrote to stderr.

        nbdkit 1.32 ends only when its clients have disconnected, even after SIGTERM.
        """
        for client in self.clients:
            if client.aio_is_ready():
                client.shutdown()
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=30)
        return said

    def close(self) -> None:
        """End the server in any state, and close its clients and pipes."""
        assert self.process.stderr is not None
        try:
            if self.process.poll() is None:
                self.end()
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()

    def log(self) -> list[str]:
        return self.calls.read_text().splitlines()


Start = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers: list[Server] = []

    def begin(*words: str, luns: list[dict[str, Any]] | None = None, **faults: str) -> Server:
        servers.append(Server(tmp_path, [f"uri={URL}", *words], luns or [{}], **faults))
        return servers[-1]

    yield begin
    for server in servers:
        server.close()


def test_what_is_advertised(start: Start) -> None:
    client = start().connect()
    assert client.get_size() == 8 * MIB
    assert client.can_flush() and client.can_fua() and client.can_trim() and client.can_zero()
    assert client.can_fast_zero() and client.can_cache() and client.can_multi_conn()
    assert not client.is_read_only() and not client.is_rotational()
    assert client.get_block_size(nbd.SIZE_MINIMUM) == 1
    assert client.get_block_size(nbd.SIZE_PREFERRED) == 4096
    assert client.get_block_size(nbd.SIZE_MAXIMUM) == 32 * MIB


def test_what_a_lun_cannot_do_is_not_advertised(start: Start) -> None:
    lun = {
        "can_trim": False,
        "rotational": True,
        "physical_block_size": 65536,
        "can_extents": False,
    }
    client = start(luns=[lun]).connect()
    assert not client.can_trim()
    assert client.is_rotational()
    assert client.get_block_size(nbd.SIZE_PREFERRED) == 65536
    assert client.can_zero()  # the disk writes zeroes then


@pytest.mark.parametrize("offset", [0, 1, 511, 4096, 8 * MIB - 70_000])
def test_what_was_written_is_read(start: Start, offset: int) -> None:
    client = start().connect()
    data = os.urandom(70_000)
    client.pwrite(data, offset)
    assert client.pread(len(data), offset) == data


def test_requests_of_32_mib(start: Start) -> None:
    client = start(luns=[{"size": 32 * MIB}]).connect()
    data = os.urandom(32 * MIB)
    client.pwrite(data, 0)
    assert client.pread(len(data), 0) == data


def test_flush_trim_zero_cache_and_their_flags(start: Start) -> None:
    server = start()
    client = server.connect()
    client.pwrite(b"x" * 4096, 4096, nbd.CMD_FLAG_FUA)
    client.pwrite(b"x" * 4096, 0)
    client.flush()
    client.trim(4096, 8192)
    client.trim(4096, 8192, nbd.CMD_FLAG_FUA)
    client.zero(512, 1024)
    client.zero(512, 1024, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    client.cache(100, 200)
    assert server.log()[3:] == [  # after the trial's open and close, and our open
        "lun0 fua write 4096 4096",
        "lun0 flush",
        "lun0 trim 8192 4096 fua=False",
        "lun0 trim 8192 4096 fua=True",
        "lun0 zero 1024 512 may_trim=True fast=False fua=False",
        "lun0 zero 1024 512 may_trim=False fast=False fua=True",
        "lun0 cache 200 100",
    ]


def test_a_fast_zero_that_is_not_fast_is_refused(start: Start) -> None:
    client = start().connect()
    client.pwrite(b"x" * 4096, 0)
    with pytest.raises(nbd.Error) as caught:
        client.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_NO_HOLE)
    assert caught.value.errnum == errno.ENOTSUP
    assert client.pread(4096, 0) == b"x" * 4096
    client.zero(4096, 0, nbd.CMD_FLAG_FAST_ZERO)
    assert client.pread(4096, 0) == bytes(4096)


def test_extents(start: Start) -> None:
    client = start().connect()
    client.pwrite(b"x" * 8192, 4096)
    found: list[int] = []
    client.block_status(16384, 0, lambda context, offset, entries, error: found.extend(entries))
    # 32-bit block status: pairs of length and NBD_STATE_HOLE | NBD_STATE_ZERO.
    assert found[:4] == [4096, 3, 8192, 0]
    assert found[5] == 3


def test_several_luns_are_exports(start: Start) -> None:
    server = start(luns=[{}, {"size": MIB}])
    lister = nbd.NBD()
    lister.set_opt_mode(True)
    lister.connect_unix(str(server.socket))
    listed: list[str] = []
    lister.opt_list(lambda name, description: listed.append(f"{name}: {description}"))
    lister.opt_abort()
    assert listed == [
        "lun0: iserblk fake, iqn.2026-11.example:fake LUN 0",
        "lun1: iserblk fake, iqn.2026-11.example:fake LUN 1",
    ]
    first, second = server.connect("lun0"), server.connect("lun1")
    assert server.connect("").get_size() == first.get_size() == 8 * MIB
    assert second.get_size() == MIB
    first.pwrite(b"first", 0)
    assert second.pread(5, 0) == bytes(5)


def test_an_unknown_export_is_refused_in_words(start: Start) -> None:
    server = start()
    with pytest.raises(nbd.Error) as caught:
        server.connect("lun7")
    assert caught.value.errnum == errno.ENOENT
    assert "open: error: no export 'lun7'; there are: lun0" in server.end()


def test_a_read_only_lun(start: Start) -> None:
    client = start(luns=[{"read_only": True}]).connect()
    assert client.is_read_only()
    client.set_strict_mode(0)
    with pytest.raises(nbd.Error) as caught:
        client.pwrite(b"x", 0)
    assert caught.value.errnum == errno.EPERM


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


def test_many_requests_at_once_keep_apart(start: Start) -> None:
    """Several connections with several threads each; the threads end with their connection."""
    server = start()
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(10):
            client = server.connect()
            data = bytes([number, turn]) * 2048
            for slot in range(8):
                client.pwrite(data, number * 64 * 1024 + slot * 4096)
            for slot in range(8):
                if client.pread(4096, number * 64 * 1024 + slot * 4096) != data:
                    wrong.append(number)
            client.shutdown()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.process.poll() is None


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


def test_nothing_stays_open_of_a_server_that_died(start: Start) -> None:
    """``close`` leaves no pipe or socket open: else a later test fails when it is collected."""
    server = start()
    server.connect()
    server.process.kill()
    server.process.wait()
    server.close()
    assert server.process.stderr is not None and server.process.stderr.closed
    server.close()


def test_ending_flushes_and_logs_out(start: Start) -> None:
    """Only disks that were written are flushed: while a target is away, each flush takes long."""
    server = start(luns=[{}, {}, {"read_only": True}])
    server.connect().pwrite(b"x", 0)
    server.end()
    assert server.process.returncode == 0
    assert server.log()[-2:] == ["lun0 flush", "close"]
    assert "lun1 flush" not in server.log()


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


def test_memory_of_a_connection_is_given_back(start: Start) -> None:
    """The buffers of nbdkit's 16 threads are freed with their connection. malloc keeps some memory,
    but more connections do not need more of it."""
    server = start()

    def resident() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10

    before = resident()
    for _ in range(4):
        client = server.connect()
        buffers = [nbd.Buffer(MIB) for _ in range(64)]
        for number, buffer in enumerate(buffers):
            client.aio_pread(buffer, number % 8 * MIB)
        while client.aio_in_flight():
            client.poll(-1)
        client.shutdown()
        server.clients.remove(client)
    # The memory is freed when the connections' threads end.
    until_blocking(lambda: resident() <= before + 24 * MIB)


def test_options_go_to_the_disks(start: Start) -> None:
    server = start("io_timeout=5", "mpa-crc=no")
    server.connect()  # the log has also the calls of the trial before the server listens
    assert server.log()[-1] == f'open [["{URL}"], {{"io-timeout": "5", "mpa-crc": "no"}}]'


def test_no_url(tmp_path: Path) -> None:
    server = Server(tmp_path, [], [{}])
    assert "give uri=iser://" in server.end()
    assert server.process.returncode == 1


def test_a_failed_login_is_said_before_nbdkit_goes_into_the_background(tmp_path: Path) -> None:
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


def test_in_the_background_from_another_directory(tmp_path: Path) -> None:
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
