"""The target's LUNs on devices of the device mapper and on /dev/nbdX, which fail and hang."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.scsi import cdb, lba, opcodes, sense
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.lunfile import open_file
from tests.cli.commands import iserblk
from tests.lab.guest.attached import MIB, attached
from tests.support import logs
from tests.support.programs import run
from tests.support.target import running_target
from tests.support.until import until_blocking
from tests.target.scsi_client import GOOD, IQN, Client

pytestmark = pytest.mark.logs(logs.FILE_ERRORS)

NAME = "lun"
SECTORS = 8 * MIB // 512
LOST = (sense.MEDIUM_ERROR, sense.WRITE_ERROR)
UNREADABLE = (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR)
FLUSH = cdb.synchronize_cache16(0, 0)
DATA = b"x" * 4096


def pages(opcode: int, at: int, flags: int = 0) -> bytes:
    """READ or WRITE of the page with the number ``at``."""
    return cdb.RW10.pack(opcode, flags, at * 8, 0, 8, 0)


def write(client: Client, at: int, flags: int = 0) -> tuple[int, int]:
    return client.code(pages(opcodes.WRITE_10, at, flags), DATA)


class Mapped:
    """A device of the device mapper over a loop device of 8 MiB."""

    def __init__(self, folder: Path) -> None:
        image = folder / "image"
        with open(image, "wb") as file:
            file.truncate(8 * MIB)
        run("modprobe", "dm_mod")
        run("modprobe", "loop")
        self._loop = run("losetup", "--find", "--show", image).strip()
        self._linear = f"0 {SECTORS} linear {self._loop} 0"
        run("dmsetup", "create", NAME, "--noudevsync", "--table", self._linear)
        run("dmsetup", "mknodes")
        self.path = f"/dev/mapper/{NAME}"

    def suspend(self) -> None:
        """Requests wait from now on."""
        run("dmsetup", "suspend", "--noflush", "--nolockfs", "--noudevsync", NAME)

    def resume(self) -> None:
        run("dmsetup", "resume", "--noudevsync", NAME)

    def fail(self) -> None:
        self._become(f"0 {SECTORS} error")

    def work(self) -> None:
        self._become(self._linear)

    def _become(self, table: str) -> None:
        run("dmsetup", "load", NAME, "--table", table)
        self.suspend()
        self.resume()

    def close(self) -> None:
        run("dmsetup", "remove", "--noudevsync", NAME)
        run("losetup", "--detach", self._loop)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Mapped]:
    device = Mapped(tmp_path)
    yield device
    device.close()


def test_a_device_that_fails(mapped: Mapped, tmp_path: Path) -> None:
    """Each host that has written hears of the loss, once, and another LUN goes on."""
    units = [
        LogicalUnit(open_file(mapped.path), serial="A"),
        LogicalUnit(open_file(str(tmp_path / "other"), size=MIB), serial="B"),
    ]
    server = DeviceServer(dict(enumerate(units)), IQN)
    one, other = Client(server), Client(server, isid=b"other.")
    beside = Client(server, 1)
    assert write(one, 0) == write(other, 1) == one.code(FLUSH) == other.code(FLUSH) == GOOD
    assert write(one, 2) == write(other, 3) == GOOD
    mapped.fail()
    assert one.code(FLUSH) == LOST
    assert write(other, 4, cdb.FUA) == LOST
    assert one.code(pages(opcodes.READ_10, 1000)) == UNREADABLE
    assert one.code(cdb.write_same16(64, 8), b"y" * 512) == GOOD, "in the page cache"
    assert one.code(cdb.compare_and_write(4096, 1), bytes(1024)) == UNREADABLE
    assert write(beside, 0) == beside.code(FLUSH) == GOOD
    mapped.work()
    assert other.code(FLUSH) == LOST
    assert other.code(FLUSH) == GOOD
    assert one.code(FLUSH) == LOST, "it has written since it was told"
    assert write(one, 2, cdb.FUA) == one.code(FLUSH) == GOOD
    for unit in units:
        unit.close()


def test_a_device_that_hangs(mapped: Mapped, tmp_path: Path) -> None:
    """Its commands wait in threads, the writes into the page cache, too; another LUN goes on."""
    units = [
        LogicalUnit(open_file(mapped.path), serial="A"),
        LogicalUnit(open_file(str(tmp_path / "other"), size=MIB), serial="B"),
    ]
    server = DeviceServer(dict(enumerate(units)), IQN)
    client, beside = Client(server), Client(server, 1)
    assert write(client, 0) == GOOD
    mapped.suspend()
    ends: list[tuple[int, int]] = []
    flushing = threading.Thread(target=lambda: ends.append(client.code(FLUSH)))
    flushing.start()

    def waits() -> bool:
        task = server.begin(client.nexus, 0, pages(opcodes.WRITE_10, 1))
        return not server.run(task, memoryview(bytearray(DATA)), nowait=True)

    until_blocking(waits)
    assert write(beside, 0) == beside.code(FLUSH) == GOOD
    # Part of a page that is not cached: to read the rest takes the device.
    task = server.begin(client.nexus, 0, cdb.RW10.pack(opcodes.WRITE_10, 0, 8000, 0, 1, 0))
    assert not server.run(task, memoryview(bytearray(512)), nowait=True)
    assert flushing.is_alive()
    mapped.resume()
    flushing.join()
    assert ends == [GOOD] and write(client, 1) == client.code(FLUSH) == GOOD
    for unit in units:
        unit.close()


def test_a_kernel_nbd_device(tmp_path: Path) -> None:
    """It is a LUN as any other device, and nobody detaches it under the target."""
    with (
        running_target([f"{tmp_path}/far:size=8M"], tmp_path / "log") as target,
        attached(f"{target.url}/0") as path,
    ):
        unit = LogicalUnit(open_file(str(path)), serial="A")
        client = Client(DeviceServer({0: unit}, IQN))
        assert unit.blocks == SECTORS
        assert write(client, 5) == write(client, 6, cdb.FUA) == client.code(FLUSH) == GOOD
        unmap = lba.unmap_parameters([(40, 8)])
        assert client.code(cdb.unmap(len(unmap)), unmap) == GOOD
        assert client.code(cdb.write_same16(64, 64, ndob=True)) == GOOD
        assert client.code(FLUSH) == GOOD
        refused = iserblk("detach", path)
        assert refused.returncode and "in use" in refused.stderr
        with open(path, "rb", buffering=0) as device:
            expected = bytes(4096) + DATA + bytes(4096)
            assert os.pread(device.fileno(), 12288, 5 * 4096) == expected
        unit.close()
