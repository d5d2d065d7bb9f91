"""qemu-nbd (QEMU's iSCSI driver, libiscsi) and our NBD server, one beside the other, on our target,
which goes away."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartTarget
from tests.support.interop import Record, package
from tests.support.nbdkit import OURS, need
from tests.support.target import END_S, ROOT, TargetProcess
from tests.support.until import until_blocking

MIB = 1 << 20
KIB64 = 1 << 16
OLD, NEW = b"o" * KIB64, b"n" * KIB64


class Server:
    """An NBD server with a LUN, at a Unix socket. ``by``: qemu-nbd or iserblk."""

    def __init__(self, by: str, target: TargetProcess, place: Path, *options: str) -> None:
        url = f"{target.url}/0".replace("iser://", "iscsi://")
        self._place = place / f"{by}.sock"
        self._log = place / f"{by}.log"
        if by == "qemu-nbd":
            need("qemu-nbd")
            self._words = ["qemu-nbd", "--format=raw", "--cache=none", "--persistent", "--shared=4"]
            self._words += ["--socket", str(self._place), url]
        else:
            self._words = [*OURS, url, "--socket", str(self._place), *options]
        self.uri = f"nbd+unix:///?socket={self._place}"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log, cwd=ROOT)
        until_blocking(self._listens)

    def _listens(self) -> bool:
        if self._process.poll() is not None:
            said = self._log.read_text()
            if "Unknown protocol" in said or "Unknown driver" in said:
                pytest.skip("qemu-block-extra is not installed: run scripts/setup --tests")
            raise AssertionError(said)
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(str(self._place)) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(END_S)


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(by: str, target: TargetProcess, *options: str) -> Server:
            server = Server(by, target, tmp_path, *options)
            stack.callback(server.kill)
            return server

        yield start


@contextmanager
def client(server: Server) -> Iterator[Any]:
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    made = nbd.NBD()
    made.connect_uri(server.uri)
    try:
        yield made
    finally:
        with suppress(nbd.Error):  # of one whose server is gone
            made.shutdown()


@pytest.mark.parametrize("by", ["qemu-nbd", "iserblk"])
def test_a_target_that_loses_its_cache(
    start_target: StartTarget, start_server: Any, by: str, record: Record
) -> None:
    """It has answered a write that is in its cache, dies, and comes back. Behind qemu-nbd the flush
    that follows succeeds, and what was written is gone. Behind ours it is there."""
    spec = "lun:size=4M:volatile-cache=4M"
    target = start_target(spec)
    with client(start_server(by, target)) as disk:
        disk.pwrite(OLD, 0)
        disk.flush()
        disk.pwrite(NEW, 0)
        target.kill()
        start_target(spec, listen=target.listen)
        disk.flush()
        assert disk.pread(KIB64, 0) == (OLD if by == "qemu-nbd" else NEW)
    if by == "qemu-nbd":
        record(
            ours="target",
            peer="QEMU's iSCSI driver (qemu-nbd)",
            version=package("qemu-block-extra"),
            transport="TCP",
            ran="the target is killed and comes back: qemu-nbd goes on, without what the target "
            "had in its cache",
        )


def test_how_long_a_request_waits(start_target: StartTarget, start_server: Any) -> None:
    """While the target is away: behind qemu-nbd without any limit, behind ours for io-timeout. Both
    go on when it is back."""
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    spec = "lun:size=4M"
    target = start_target(spec)
    theirs, ours = (
        start_server("qemu-nbd", target),
        start_server("iserblk", target, "--io-timeout=2"),
    )
    with client(theirs) as one, client(ours) as other:
        for disk in (one, other):
            disk.pwrite(OLD, 0)
            disk.flush()
        target.kill()
        waiting = one.aio_pread(nbd.Buffer(KIB64), 0)
        with pytest.raises(nbd.Error) as caught:
            other.pread(KIB64, 0)
        assert caught.value.errno == "EIO"
        one.poll(0)
        assert not one.aio_command_completed(waiting)
        start_target(spec, listen=target.listen)
        while not one.aio_command_completed(waiting):
            one.poll(-1)

        def back() -> bool:
            try:
                return bool(other.pread(KIB64, 0) == OLD)
            except nbd.Error:
                return False

        until_blocking(back)


@pytest.mark.parametrize("by", ["qemu-nbd", "iserblk"])
def test_a_server_that_is_killed(
    start_target: StartTarget, start_server: Any, by: str, record: Record
) -> None:
    """A client that does not connect again has lost its disk, whichever server it is. QEMU with
    reconnect-delay goes on with the next server."""
    need("qemu-io")
    server = start_server(by, start_target("lun:size=4M"))
    nbd = pytest.importorskip("nbd", reason="not installed: python3-libnbd")
    path = server.uri.partition("=")[2]
    image = f"driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={path}"
    words = ["qemu-io", "--image-opts", f"{image},file.reconnect-delay=60"]
    with (
        client(server) as disk,
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
        ) as qemu,
    ):
        try:
            said = [ask(qemu, "write -P 7 0 64k")]
            server.kill()
            server.start()
            said += [ask(qemu, f"read -P {number} 0 64k") for number in (7, 8)]
            with pytest.raises(nbd.Error):
                disk.pread(512, 0)
        finally:
            qemu.communicate("quit\n", timeout=END_S)
    wrote, same, other = said
    assert wrote.startswith("wrote 65536") and same.startswith("read 65536")
    assert other.startswith("Pattern verification failed")
    if by == "iserblk":
        record(
            ours="iserblk nbd",
            peer="QEMU's NBD driver",
            version=package("qemu-utils"),
            transport="NBD, Unix socket",
            ran="qemu-io with reconnect-delay goes on when the server is killed and another comes",
        )


def ask(qemu: subprocess.Popen[str], command: str) -> str:
    """The first line of what qemu-io answers to a command that reads or writes."""
    assert qemu.stdin is not None and qemu.stdout is not None
    qemu.stdin.write(f"{command}\n")
    qemu.stdin.flush()
    line = ""
    while not line.startswith(("wrote", "read", "Pattern")):
        line = qemu.stdout.readline().replace("qemu-io> ", "")
        assert line, "qemu-io has ended"
    return line
