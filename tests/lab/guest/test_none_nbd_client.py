"""nbd-client connects the kernel's device to ``iserblk nbd``, without attach."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cli.commands import serving
from tests.lab.guest.attached import DEVICE, block, connected, mounted, nothing_left
from tests.support.interop import Record, package
from tests.support.programs import run
from tests.support.target import TargetProcess, running_target
from tests.support.until import until_blocking

SIZE = 64 << 20


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    with running_target([f"{tmp_path}/lun:size={SIZE}"], tmp_path / "log") as process:
        yield process


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    for name in connected():  # after a failure: for the next test
        run("nbd-client", "-d", f"/dev/{name}")
    nothing_left()


@pytest.mark.parametrize("way", ["unix", pytest.param("tcp", marks=pytest.mark.long)])
def test_a_file_system(way: str, target: TargetProcess, tmp_path: Path, record: Record) -> None:
    run("modprobe", "nbd")
    socket = tmp_path / "nbd.sock"
    listens = ("--socket", socket) if way == "unix" else ("--listen", "127.0.0.1:0")
    with serving("nbd", f"{target.url}/0", *listens, log=tmp_path / "nbd.log") as server:
        port = str(urlsplit(server.url).port)
        to = ("-unix", socket) if way == "unix" else ("127.0.0.1", port)
        run("nbd-client", *to, DEVICE, "-C", "2")
        until_blocking(lambda: block("nbd0", "size") == str(SIZE // 512))
        run("mkfs.ext4", "-q", "-F", DEVICE)
        with mounted(DEVICE, tmp_path / "place") as place:
            said = run(
                *("fio", "--name=verify", f"--directory={place}", "--size=4M", "--bsrange=512-64k"),
                *("--rw=randwrite", "--verify=crc32c", "--verify_state_save=0", "--direct=1"),
                *("--ioengine=libaio", "--iodepth=16", "--output-format=json"),
            )
            (job,) = json.loads(said[said.index("{") :])["jobs"]
            assert job["error"] == 0
            assert job["write"]["io_bytes"] == job["read"]["io_bytes"] == 4 << 20
        run("e2fsck", "-f", "-n", DEVICE)
        run("nbd-client", "-d", DEVICE)
        until_blocking(lambda: not connected())
        assert server.end(signal.SIGTERM) == 128 + signal.SIGTERM
    # What the kernel wrote is in the target's file.
    run("e2fsck", "-f", "-n", tmp_path / "lun")
    record(
        ours="iserblk nbd",
        peer="nbd-client, Linux nbd",
        version=package("nbd-client"),
        transport=f"NBD, {'Unix socket' if way == 'unix' else 'TCP'}; iSER, software iWARP",
        ran="mkfs.ext4 on /dev/nbd0, two connections, mount, fio verify, e2fsck, disconnect",
    )
