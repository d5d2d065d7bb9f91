"""FileStore and a LUN on real devices that fail: loop devices over files that cannot take it.

The tests need root, loop devices and mounts; without them they are skipped.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from iserblk.errors import Busy, PermissionDenied
from iserblk.scsi import capacity, cdb, opcodes, sense
from iserblk.target.scsi import device
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.lunfile import open_file
from iserblk.target.store.store import FileStore
from tests.support import logs
from tests.support.until import until_blocking
from tests.target.scsi_client import GOOD, IQN, WRITE_PROTECTED, Client

pytestmark = pytest.mark.logs(logs.FILE_ERRORS, "LUN 0")

MIB = 1 << 20
LOST = (sense.MEDIUM_ERROR, sense.WRITE_ERROR)
FULL = (sense.DATA_PROTECT, sense.SPACE_ALLOCATION_FAILED)
GONE = (sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
FLUSH = cdb.synchronize_cache16(0, 0)
FUA = 0x08
BLOCKS = 8  # 4096 bytes


def call(*command: str) -> str:
    """Raises CalledProcessError, or FileNotFoundError."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def needed(*command: str) -> str:
    try:
        return call(*command)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"it needs root, loop devices and mounts: {error}")


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    needed("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place))
    yield place
    call("umount", "--lazy", str(place))


@pytest.fixture
def thin(small: Path) -> Iterator[Path]:
    """A loop device of 8 MiB that has 2 MiB."""
    yield from loop(small / "image", 8 * MIB)


def loop(image: Path, size: int) -> Iterator[Path]:
    with open(image, "wb") as file:
        file.truncate(size)
    path = needed("losetup", "--find", "--show", str(image))
    call("blockdev", "--setrw", path)  # that it was read-only outlasts what was attached
    yield Path(path)
    call("blockdev", "--setrw", path)
    call("losetup", "--detach", path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A loop device of 1 MiB."""
    yield from loop(tmp_path / "image", MIB)


def served(store: FileStore) -> tuple[DeviceServer, LogicalUnit]:
    unit = LogicalUnit(store, serial="S")
    return DeviceServer({0: unit}, IQN), unit


def write(client: Client, at: int, flags: int = 0) -> tuple[int, int]:
    """Write 4096 bytes at ``at``, a number of such pieces."""
    command = cdb.RW10.pack(opcodes.WRITE_10, flags, at * BLOCKS, 0, BLOCKS, 0)
    return client.code(command, b"x" * 4096)


def test_each_host_hears_what_a_device_has_lost(thin: Path) -> None:
    """The device takes 2 MiB of the 4 that are in the page cache. Which host's flush the kernel
    tells of it does not matter, nor a write with FUA before."""
    server, unit = served(open_file(str(thin)))
    one, other, reader = (Client(server, isid=name) for name in (b"one...", b"other.", b"reader"))
    for at in range(0, 1024, 2):
        assert write(one, at) == write(other, at + 1) == GOOD
    write(reader, 1500, FUA)  # it may or may not have room
    first = one.code(FLUSH)
    assert first == LOST
    assert other.code(FLUSH) == LOST
    assert one.code(FLUSH) == other.code(FLUSH) == GOOD, "once"
    unit.close()


def test_another_descriptor_has_met_the_error(thin: Path) -> None:
    """Another program's fsync of the device takes nothing from the target."""
    server, unit = served(open_file(str(thin)))
    client, other = Client(server), Client(server, isid=b"other.")
    for at in range(1024):
        assert write(client, at) == GOOD
    fd = os.open(thin, os.O_RDWR)
    with pytest.raises(OSError):
        os.fsync(fd)
    os.close(fd)
    assert write(other, 0, FUA) == LOST, "the kernel tells it here"
    assert client.code(FLUSH) == LOST
    assert client.code(FLUSH) == GOOD
    unit.close()


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_file_on_a_device_without_room(tmp_path: Path, kind: str) -> None:
    """Thin provisioning below a file system: writes are taken, and lost when they are written
    back, with ENOSPC. That is a loss, not a lack of room of the write that meets it."""
    room, place = tmp_path / "room", tmp_path / "place"
    for each in (room, place):
        each.mkdir()
    needed("mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(room))
    image = room / "image"
    devices = loop(image, 320 * MIB)
    device_path = str(next(devices))
    try:
        needed(f"mkfs.{kind}", "-q", device_path)
        needed("mount", device_path, str(place))
        try:
            server, unit = served(open_file(str(place / "lun"), size=8 * MIB))
            one, other = Client(server), Client(server, isid=b"other.")
            os.sync()
            try:
                # What mkfs has left to be done later writes meanwhile, too.
                with open(room / "filler", "wb", buffering=0) as filler, suppress(OSError):
                    while filler.write(bytes(65536)):
                        pass
                for at in range(1024):
                    assert write(one, at) == GOOD
                refused = write(other, 2000, FUA)
                assert refused in (GOOD, LOST, FULL, WRITE_PROTECTED)
                assert one.code(FLUSH) == LOST
            finally:
                unit.store.close()
        finally:
            (room / "filler").unlink(missing_ok=True)
            call("umount", str(place))
    finally:
        for _ in devices:
            pass
        call("umount", "--lazy", str(room))


def test_a_full_file_system(small: Path) -> None:
    """A write fails, what is there stays, and there is no loss to tell of."""
    server, unit = served(open_file(str(small / "lun"), size=8 * MIB))
    client, other = Client(server), Client(server, isid=b"other.")
    assert write(other, 0) == GOOD
    with open(small / "filler", "wb", buffering=0) as filler:
        with pytest.raises(OSError) as caught:
            while filler.write(bytes(4096)):
                pass
        assert caught.value.errno == errno.ENOSPC
    assert write(client, 100) == write(client, 100, FUA) == FULL
    assert client.code(cdb.write_same16(800, 8), b"y" * 512) == FULL
    assert write(other, 0) == GOOD, "it has its space"
    assert client.code(FLUSH) == other.code(FLUSH) == GOOD
    (small / "filler").unlink()
    assert write(client, 100, FUA) == GOOD
    unit.close()


def test_a_device_that_becomes_read_only(disk: Path) -> None:
    server, unit = served(open_file(str(disk)))
    client = Client(server)
    assert write(client, 0) == client.code(FLUSH) == GOOD
    call("blockdev", "--setro", str(disk))
    assert write(client, 0) == write(client, 0, FUA) == WRITE_PROTECTED
    assert client.data(cdb.RW10.pack(opcodes.READ_10, 0, 0, 0, 1, 0)) == b"x" * 512
    assert client.code(FLUSH) == GOOD
    unit.close()
    with pytest.raises(PermissionDenied, match="`ro` serves it read-only"):
        open_file(str(disk))
    open_file(str(disk), read_only=True).close()


def test_a_device_that_grows(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Initiators get a unit attention, and may use what is new."""
    monkeypatch.setattr(device, "LOOK_S", 0.0)
    server, unit = served(open_file(str(disk)))
    client = Client(server)
    os.truncate(tmp_path / "image", 2 * MIB)
    call("losetup", "--set-capacity", str(disk))
    assert client.code(bytes(6)) == (sense.UNIT_ATTENTION, sense.CAPACITY_CHANGED)
    found = capacity.decode16(memoryview(client.data(cdb.read_capacity16())))
    assert found.blocks == 2 * MIB // 512
    assert write(client, 300) == client.code(FLUSH) == GOOD
    os.truncate(tmp_path / "image", MIB)
    call("losetup", "--set-capacity", str(disk))
    assert write(client, 300) == LOST, "and nothing grows by it"
    assert write(client, 0) == GOOD
    unit.store.close()


def test_a_device_without_a_size_has_gone(disk: Path, tmp_path: Path) -> None:
    """As /dev/nbdX is, when it is disconnected. Nothing is written to what takes its place."""
    server, unit = served(open_file(str(disk)))
    client = Client(server)
    os.truncate(tmp_path / "image", 0)
    call("losetup", "--set-capacity", str(disk))
    assert write(client, 0) == write(client, 0, FUA) == GONE
    assert client.code(cdb.unmap(24), b"\0\x16\0\x10" + bytes(15) + b"\x08" + bytes(4)) == GONE
    assert os.stat(tmp_path / "image").st_size == 0
    unit.store.close()


def test_a_mounted_device_is_not_served(disk: Path, tmp_path: Path) -> None:
    """Nor is one that is served mounted."""
    place = tmp_path / "place"
    place.mkdir()
    needed("mkfs.ext4", "-q", str(disk))
    needed("mount", str(disk), str(place))
    with pytest.raises(Busy, match="perhaps mounted"):
        open_file(str(disk))
    call("umount", str(place))
    opened: list[FileStore] = []

    def opens() -> bool:
        """Another test may have copied our mounts into a namespace of its own meanwhile."""
        with suppress(Busy):
            opened.append(open_file(str(disk)))
        return bool(opened)

    until_blocking(opens)
    (store,) = opened
    with pytest.raises(subprocess.CalledProcessError):
        call("mount", str(disk), str(place))
    store.close()
