"""File systems by the system's own programs, on files in place of devices; what of mounts needs no
root. The rest, and devices, are in tests/lab/guest/test_none_csi.py."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from iserblk.crc import crc32c
from iserblk.csi import host
from iserblk.csi.host import Machine, Mounted
from iserblk.csi.refusals import Code, Refused
from iserblk.csi.volumes import BLOCK, MOUNT, Records, Volume
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.state import Home, State

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(Directories(sys=tmp_path / "sys", dev=tmp_path / "dev", run=tmp_path / "run"))


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    """On a file of 16 MiB."""
    path = tmp_path / "disk"
    path.write_bytes(bytes(16 * MIB))
    return Volume("one", ("iser://h/iqn.2026-11.x:y/0",), {}, "/s", MOUNT, "ext4", device=str(path))


def test_a_file_system_is_made_and_found_and_grows(machine: Machine, volume: Volume) -> None:
    assert machine.file_system(volume) == ""
    machine.format(volume)
    assert machine.file_system(volume) == "ext4"
    machine.format(volume)  # once more, behind one that was interrupted
    with open(volume.device, "r+b") as file:
        file.truncate(32 * MIB)
    before = Path(volume.device).read_bytes()[1024:2048]
    machine.grow(volume, "/s")
    assert Path(volume.device).read_bytes()[1024:2048] != before  # the super block
    assert machine.file_system(volume) == "ext4"


def test_a_partition_table_is_no_file_system(machine: Machine, volume: Volume) -> None:
    with open(volume.device, "r+b") as file:
        entry = bytes((0, 0, 2, 0, 0x83, 0, 2, 0)) + (64).to_bytes(4, "little")
        file.seek(446)
        file.write(entry + (1000).to_bytes(4, "little"))
        file.seek(510)
        file.write(b"\x55\xaa")
    with pytest.raises(Refused, match=r"partition table \(dos\)") as caught:
        machine.file_system(volume)
    assert caught.value.code is Code.FAILED_PRECONDITION


def test_what_cannot_be_read_is_not_empty(machine: Machine, volume: Volume) -> None:
    """A device whose first block is an I/O error, and which blkid takes for an empty one."""
    with pytest.raises(Refused, match="cannot be read: Input/output error") as caught:
        machine.file_system(replace(volume, device="/proc/self/mem"))
    assert caught.value.code is Code.UNAVAILABLE


def test_an_xfs_whose_mkfs_was_interrupted(machine: Machine, volume: Volume) -> None:
    """It is made again behind a mkfs of ours, and at no other time."""
    if not shutil.which("mkfs.xfs"):
        pytest.skip("xfsprogs is not installed: scripts/setup --tests")
    os.truncate(volume.device, 400 * MIB)
    volume = replace(volume, fs="xfs", formatting=True)
    machine.format(volume)
    assert machine.file_system(volume) == "xfs"
    with open(volume.device, "r+b") as file:
        sector = bytearray(file.read(512))
        sector[126] = 1  # sb_inprogress
        sector[224:228] = bytes(4)  # sb_crc, of the sector without it
        sector[224:228] = crc32c(sector).to_bytes(4, "little")
        file.seek(0)
        file.write(sector)
    assert machine.file_system(volume) == ""
    with pytest.raises(Refused, match=r"has not ended; .* \(wipefs -a\)") as caught:
        machine.file_system(replace(volume, formatting=False))
    assert caught.value.code is Code.FAILED_PRECONDITION
    machine.erase_unfinished(volume)
    assert machine.file_system(replace(volume, formatting=False)) == ""


def test_a_file_system_that_is_complete_is_not_erased(machine: Machine, volume: Volume) -> None:
    machine.format(volume)
    before = Path(volume.device).read_bytes()
    machine.erase_unfinished(volume)
    assert Path(volume.device).read_bytes() == before


def test_where_else_a_lun_is_attached(machine: Machine, tmp_path: Path) -> None:
    """Its name tells, not its URL; a device whose state is lost has none."""
    places = Directories(sys=tmp_path / "sys", dev=tmp_path / "dev", run=tmp_path / "run")
    (tmp_path / "run").mkdir()
    for index, name in enumerate(("a", "a", "b", "a", "", "")):
        (tmp_path / f"sys/block/nbd{index}").mkdir(parents=True)
        home = Home(Device(f"nbd{index}", places))
        home.make(State(f"iser://h{index}:3260/iqn.2026-11.x:y/0", 30.0, 0, name))
        if index != 3:  # that was attached once
            (tmp_path / f"sys/block/nbd{index}/pid").write_text("5\n")
            home.client_pid.write_text("5\n")

    def also(index: int) -> list[str]:
        device = f"{tmp_path}/dev/nbd{index}"
        found = machine.also_attached_at(Volume("one", (), {}, "/s", MOUNT, device=device))
        return [os.path.basename(path) for path in found]

    assert [also(index) for index in (0, 1, 2, 4)] == [["nbd1"], ["nbd0"], [], []]


def test_a_program_that_fails(machine: Machine, volume: Volume, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"mkfs\.ext4: ") as caught:
        machine.format(replace(volume, device=str(tmp_path / "nothing")))
    assert caught.value.code is Code.INTERNAL and "\n" not in caught.value.words


def test_a_program_that_is_missing(
    machine: Machine, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Refused, match="blkid: no such program"):
        machine.file_system(volume)


def program(directory: Path, name: str, script: str, patched: pytest.MonkeyPatch) -> None:
    """Put a program of that name before all others."""
    path = directory / "programs" / name
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    patched.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


_FORMATTING = """
import sys
from pathlib import Path
from iserblk.csi import host
from iserblk.csi.host import Machine, Mounted
from iserblk.csi.volumes import BLOCK, MOUNT, Records, Volume
from iserblk.nbd.kernel.device import Directories
with Records(Path(sys.argv[1])).locked("one"):
    Machine(Directories()).format(Volume("one", (), {}, "/s", MOUNT, "ext4", device="/nothing"))
"""


def test_a_program_of_a_killed_plugin_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its volume stays locked until it has ended."""
    began, to_end = tmp_path / "began", tmp_path / "to end"
    for each in (began, to_end):
        os.mkfifo(each)
    program(tmp_path, "mkfs.ext4", f"echo > '{began}'; read it < '{to_end}'", monkeypatch)
    plugin = subprocess.Popen([sys.executable, "-c", _FORMATTING, str(tmp_path / "csi")])
    began.read_text()
    plugin.kill()
    plugin.wait()
    refusing = Records(tmp_path / "csi", patience_s=0).locked("one")
    with pytest.raises(Refused) as caught, refusing:
        pass
    assert caught.value.code is Code.ABORTED
    to_end.write_text("\n")
    with Records(tmp_path / "csi").locked("one"), Records(tmp_path / "csi").locked("two"):
        pass


def test_a_device_is_read_only_for_readers_alone(
    machine: Machine, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a plugin was killed behind the attach; and for no later LUN of the device."""
    log = tmp_path / "log"
    program(tmp_path, "blockdev", f"echo $* >> '{log}'", monkeypatch)
    monkeypatch.setattr(machine, "is_attached", lambda _: True)
    monkeypatch.setattr(machine, "is_served", lambda _: True)
    for read_only in (True, False):
        assert machine.attach(replace(volume, read_only=read_only), tmp_path / "secret")
    assert log.read_text() == f"--setro {volume.device}\n--setrw {volume.device}\n"


@pytest.mark.parametrize("busy", [False, True])
def test_a_device_that_stays_attached_stays_read_only(
    busy: bool, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    program(tmp_path, "blockdev", f"[ $1 != --getro ] || echo 1; echo $1 >> '{log}'", monkeypatch)
    (tmp_path / "sys/block/nbd0").mkdir(parents=True)
    (tmp_path / "run/nbd0").mkdir(parents=True)
    if busy:
        (tmp_path / "sys/block/nbd0/pid").write_text("5\n")
        (tmp_path / "run/nbd0/client.pid").write_text("5\n")

    def detach(words: list[str]) -> subprocess.CompletedProcess[str]:
        assert words == ["detach", "/dev/nbd0"]
        return subprocess.CompletedProcess(words, 28 if busy else 0, "", "in use")

    monkeypatch.setattr("iserblk.csi.host.run_iserblk", detach)
    if busy:
        with pytest.raises(Refused, match="in use") as caught:
            machine.detach("/dev/nbd0")
        assert caught.value.code is Code.FAILED_PRECONDITION
    else:
        machine.detach("/dev/nbd0")
    assert log.read_text().split() == ["--getro", "--setrw", *["--setro"] * busy]


def test_programs_that_say_what_is_no_text(
    machine: Machine, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "mkfs.ext4", "printf 'it failed \\351' >&2; exit 1", monkeypatch)
    with pytest.raises(Refused, match=r"mkfs\.ext4: it failed"):
        machine.format(volume)


def test_what_is_mounted(machine: Machine, tmp_path: Path) -> None:
    root = machine.mounted("/")
    assert root is not None and root.place == "/"
    assert machine.mounted(str(tmp_path / "nothing")) is None
    proc = machine.mounted("/proc")
    assert proc is not None and proc.number == machine.number("/proc")
    assert proc.source == "proc"


def test_unmounting_what_is_not_mounted_removes_its_place(machine: Machine, tmp_path: Path) -> None:
    for path in (tmp_path / "directory", tmp_path / "file"):
        machine.unmount(str(path))
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").touch()
    for path in (tmp_path / "directory", tmp_path / "file"):
        machine.unmount(str(path))
        assert not path.exists()
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "data").touch()
    with pytest.raises(OSError, match="not empty"):
        machine.unmount(str(tmp_path / "directory"))
    assert (tmp_path / "directory" / "data").exists()


def test_numbers_of_devices(machine: Machine) -> None:
    device = os.stat("/dev/null")
    assert stat.S_ISCHR(device.st_mode)
    assert machine.number("/dev/null") == f"{os.major(device.st_rdev)}:{os.minor(device.st_rdev)}"


MOUNTS = (
    Mounted("/staging/one", "43:0", "/", False, "/dev/nbd0"),
    Mounted("/pods/a/mount", "43:0", "/", False, "/dev/nbd0"),
    Mounted("/pods/b/mount", "43:0", "/", True, "/dev/nbd0"),
    Mounted("/pods/a/volume-subpaths/1", "43:0", "/data", False, "/dev/nbd0"),
    Mounted("/pods/c/mount", "43:1", "/", False, "/dev/nbd1"),
)


def test_where_a_file_system_is_shown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a part of it, which a kubelet binds for a container."""
    monkeypatch.setattr(host, "mounts", lambda: iter(MOUNTS))
    volume = Volume(
        "one",
        ("iser://h/iqn.2026-11.x:y/0",),
        {},
        "/staging/one",
        MOUNT,
        "ext4",
        device="/dev/nbd0",
    )
    assert machine.shown(volume) == list(MOUNTS[1:3])
    assert machine.shown(replace(volume, staging="/nowhere")) == []


def test_where_a_device_is_shown(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a kubelet binds of a pod's device itself, nor another file of devtmpfs."""
    places = ("/staging/one/device", "/publish/one/pod", "/one/dev/pod", "/null")
    mounts = [Mounted(each, "0:6", "/nbd0", False, "udev") for each in places]
    monkeypatch.setattr(host, "mounts", lambda: iter(mounts))
    monkeypatch.setattr(machine, "number", lambda _path: "43:0")
    monkeypatch.setattr(host, "is_device", lambda path, _number: path != "/null")
    volume = Volume(
        "one", ("iser://h/iqn.2026-11.x:y/0",), {}, "/staging/one", BLOCK, device="/dev/nbd0"
    )
    assert machine.shown(volume) == [mounts[1]]
