"""What sysfs and /proc say of NBD devices."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from iserblk.errors import BadArgument, Busy, NotSupported, PermissionDenied
from iserblk.nbd.kernel import device
from iserblk.nbd.kernel.attaching import warn_of_panic
from iserblk.nbd.kernel.device import Device, Directories

# The fields of Documentation/block/stat.rst, each with a number of its own.
STAT = " ".join(str(10**field) for field in range(17))


@pytest.fixture
def places(tmp_path: Path) -> Directories:
    places = Directories(tmp_path / "sys", tmp_path / "dev", tmp_path / "proc", tmp_path / "run")
    for name in ("nbd0", "nbd2", "nbd10", "sda"):
        (places.sys / "block" / name).mkdir(parents=True)
    (places.proc / "self").mkdir(parents=True)
    places.dev.mkdir()
    return places


def write(places: Directories, name: str, attribute: str, text: str) -> None:
    path = places.sys / "block" / name / attribute
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{text}\n")


def test_devices_in_the_order_of_their_numbers(places: Directories) -> None:
    assert [each.name for each in device.every(places)] == ["nbd0", "nbd2", "nbd10"]


@pytest.mark.parametrize("path", ["nbd2", "{dev}/nbd2", "{dev}/../dev/nbd2", "{dev}/link"])
def test_names_of_a_device(path: str, places: Directories) -> None:
    (places.dev / "link").symlink_to("nbd2")
    assert device.find(path.format(dev=places.dev), places) == Device("nbd2", places)


@pytest.mark.parametrize("path", ["", "/", "nbd2p1", "sda", "/dev/sda", "../nbd2", "nbd", "nbd²"])
def test_names_of_no_device(path: str, places: Directories) -> None:
    with pytest.raises(BadArgument, match="no NBD device"):
        device.find(path, places)


def test_an_absent_device(places: Directories) -> None:
    with pytest.raises(BadArgument, match="nbd1: no such device; there are nbd0 to nbd10"):
        device.find("nbd1", places)


def test_what_sysfs_says(places: Directories) -> None:
    found = Device("nbd2", places)
    assert (found.client, found.size, found.completed(), found.changed()) == (0, 0, 0, 0)
    write(places, "nbd2", "pid", "4711")
    write(places, "nbd2", "size", "2048")
    write(places, "nbd2", "stat", STAT)
    assert (found.client, found.size) == (4711, 1 << 20)
    assert found.completed() == 10**0 + 10**4 + 10**11 + 10**15
    assert found.changed() == 10**6 + 10**13
    assert found.unchanged_since(found.changed()) and not found.unchanged_since(found.changed() - 1)
    (places.sys / "block" / "nbd2" / "queue").mkdir(exist_ok=True)
    write(places, "nbd2", "queue/iostats", "1")
    assert found.unchanged_since(found.changed())
    write(places, "nbd2", "queue/iostats", "0")  # the kernel does not count
    assert not found.unchanged_since(found.changed())


def test_the_kernel_is_told_of_a_change(places: Directories) -> None:
    found = Device("nbd0", places)
    found.announce()  # the kernel has no such file: nothing is made
    assert not list((places.sys / "block" / "nbd0").iterdir())
    write(places, "nbd0", "uevent", "DEVNAME=nbd0")
    found.announce()
    assert (places.sys / "block" / "nbd0" / "uevent").read_text().startswith("change")


def test_where_it_is_mounted(places: Directories) -> None:
    write(places, "nbd2", "dev", "43:64")
    write(places, "nbd2", "nbd2p1/dev", "259:0")
    dev = places.dev
    (places.proc / "self" / "mountinfo").write_text(
        f"30 1 8:1 / / rw - ext4 {dev}/sda1 rw\n"
        f"31 30 43:64 / /whole rw,relatime shared:1 - ext4 {dev}/nbd2 rw\n"
        f"32 30 259:0 / /partition rw - xfs {dev}/other-name rw\n"
        f"33 30 0:50 / /many-devices rw - btrfs {dev}/nbd2p3 rw\n"
        f"34 30 0:51 / /longer rw - btrfs {dev}/nbd20 rw\n"
        f"35 30 0:52 / /elsewhere rw - fuse /tmp/nbd2 rw\n"
    )
    assert Device("nbd2", places).mounts() == ["/whole", "/partition", "/many-devices"]


def test_who_has_it_open(places: Directories) -> None:
    for pid, target in ((11, "nbd2"), (12, "nbd2p1"), (13, "nbd20"), (14, "null")):
        descriptors = places.proc / str(pid) / "fd"
        descriptors.mkdir(parents=True)
        (descriptors / "3").symlink_to(places.dev / target)
        (places.proc / str(pid) / "comm").write_text(f"name{pid}\n")
    mine = places.proc / str(os.getpid()) / "fd"
    mine.mkdir(parents=True)
    (mine / "3").symlink_to(places.dev / "nbd2")
    assert sorted(Device("nbd2", places).openers()) == ["name11 (11)", "name12 (12)"]


def test_claims_name_the_mount(places: Directories, monkeypatch: pytest.MonkeyPatch) -> None:
    write(places, "nbd2", "dev", "43:64")
    mountinfo = places.proc / "self" / "mountinfo"
    mountinfo.write_text("31 30 43:64 / /data rw - ext4 /dev/nbd2 rw\n")

    def busy(*_arguments: object) -> int:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(os, "open", busy)
    with pytest.raises(Busy, match="mounted on /data: umount it first"):
        Device("nbd2", places).claim()
    mountinfo.write_text("")
    with pytest.raises(Busy, match="swap, RAID, device mapper"):
        Device("nbd2", places).claim()


def test_a_kernel_without_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modprobe").write_text("#!/bin/sh\necho modprobe: FATAL: not found >&2; exit 1\n")
    (tmp_path / "modprobe").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NotSupported, match=r"FATAL: not found.*`iserblk mount`"):
        device.need_module(Directories(sys=tmp_path / "sys"))


def test_the_module_is_loaded(places: Directories, tmp_path: Path) -> None:
    places.sys.rename(tmp_path / "later")
    program = tmp_path / "modprobe"
    program.write_text(f'#!/bin/sh\n[ "$*" = nbd ] && mv {tmp_path}/later {places.sys}\n')
    program.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        device.need_module(places)
    assert device.every(places)


def test_for_root_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionDenied, match="only root"):
        device.need_root()


@pytest.mark.parametrize(
    ("panics", "seconds", "limit"),
    [("1", "120", 120.0), ("0", "120", math.inf), ("1", "0", math.inf), ("", "", math.inf)],
)
def test_a_machine_that_panics(
    panics: str, seconds: str, limit: float, places: Directories, caplog: pytest.LogCaptureFixture
) -> None:
    """When a task waits for too long; where requests may wait for longer, attach warns."""
    kernel = places.proc / "sys" / "kernel"
    kernel.mkdir(parents=True)
    if panics:
        (kernel / "hung_task_panic").write_text(f"{panics}\n")
        (kernel / "hung_task_timeout_secs").write_text(f"{seconds}\n")
    assert device.panics_after(places) == limit
    warn_of_panic(119.0, places)
    assert not caplog.records
    warn_of_panic(180.0, places)
    assert len(caplog.records) == (limit < math.inf)
    assert all("give less as io-timeout" in each.getMessage() for each in caplog.records)
