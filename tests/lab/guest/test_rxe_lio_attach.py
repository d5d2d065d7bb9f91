"""The three uses of a LUN on a real kernel: a block device with file systems, files through FUSE,
and fio straight on the device. On the lab's LUN where the set-up has one, else on our own target's.
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import good
from tests.lab.guest.attached import DEVICE, MIB, RUN, attached, block, mounted, nothing_left
from tests.support.fuse import running_mount
from tests.support.interop import Record
from tests.support.programs import run
from tests.support.target import ROOT, running_target

TREE = ("iserblk/disk", "fuse_mount", "nbd_plugin", "docs")


@pytest.fixture(scope="module")
def lun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the LUN, of about 256 MiB."""
    if "LAB_URL" in os.environ:
        yield os.environ["LAB_URL"]
        return
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/lun:size=320M"], files / "log") as target:
        yield f"{target.url}/0"


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    yield
    nothing_left()


def make_tree(directory: Path) -> None:
    """A tree with sources, and a file of random bytes, which no compression can hide."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    for name in TREE:
        shutil.copytree(ROOT / name, directory / name, ignore=ignore)
    (directory / "random").write_bytes(os.urandom(4 * MIB + 123))


def assert_equal(one: Path, other: Path) -> None:
    difference = filecmp.dircmp(one, other, ignore=["lost+found"])
    assert difference.left_only == difference.right_only == []
    _, differ, errors = filecmp.cmpfiles(one, other, difference.common_files, shallow=False)
    assert differ == errors == []
    for name in difference.common_dirs:
        assert_equal(one / name, other / name)


def fio(filename: Path, size: int, *words: str) -> None:
    """Run fio: random writes in mixed sizes, each read again and compared."""
    output = run(
        "fio",
        "--name=verify",
        f"--filename={filename}",
        f"--size={size}",
        "--rw=randwrite",
        "--verify=crc32c",
        "--verify_state_save=0",
        "--verify_fatal=1",
        "--randrepeat=0",
        "--output-format=json",
        *words,
        timeout=300,
    )
    (job,) = json.loads(output[output.index("{") :])["jobs"]
    assert job["error"] == 0
    assert job["write"]["io_bytes"] == job["read"]["io_bytes"] == size


def note(record: Record, ours: str, ran: str) -> None:
    if "LAB_URL" in os.environ:
        record(ours=ours, peer="LIO isert on rxe", transport="RoCE v2", ran=ran)


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.long)])
def test_a_file_system_on_the_block_device(
    kind: str, lun: str, tmp_path: Path, record: Record
) -> None:
    make = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}[kind]
    source, place = tmp_path / "source", tmp_path / "place"
    source.mkdir()
    make_tree(source)
    with attached(lun, DEVICE) as device:
        assert device == DEVICE
        small = kind == "xfs" and int(block("nbd0", "size")) * 512 < 300 * MIB
        run(*make, *(["--unsupported"] if small else []), device)
        with mounted(device, place):
            shutil.copytree(source, place, dirs_exist_ok=True)
            fio(place / "fio", 4 * MIB, "--bsrange=4k-64k", "--ioengine=libaio", "--iodepth=8")
            (place / "fio").unlink()
    nothing_left()
    with attached(lun) as device:
        run(*{"ext4": ["fsck.ext4", "-n", "-f"], "xfs": ["xfs_repair", "-n"]}[kind], device)
        with mounted(device, place, "-o", "ro"):
            assert_equal(source, place)
    note(
        record,
        "iserblk attach",
        f"mkfs.{kind} on /dev/nbd0, mount, a source tree copied in, fio verify, unmount, detach; "
        "attach again, check, mount, compare",
    )


def test_cp_and_dd_through_fuse(lun: str, tmp_path: Path, record: Record) -> None:
    (tmp_path / "data").write_bytes(os.urandom(8 * MIB))
    (tmp_path / "more").write_bytes(os.urandom(MIB))
    with running_mount([lun], tmp_path / "mount") as place:
        (file,) = place.iterdir()
        run("cp", tmp_path / "data", file)
        run("dd", f"if={tmp_path}/more", f"of={file}", "bs=64k", "seek=128", "conv=notrunc,fsync")
        run("dd", f"if={file}", f"of={tmp_path}/back", "bs=1M", "count=9")
    expected = (tmp_path / "data").read_bytes() + (tmp_path / "more").read_bytes()
    assert (tmp_path / "back").read_bytes() == expected
    with attached(lun) as device, device.open("rb") as disk:
        assert disk.read(9 * MIB) == expected
    note(record, "iserblk mount", "cp and dd into the LUN's file and out of it; compared")


def test_fio_straight_on_the_device(lun: str, record: Record) -> None:
    """fio at depth 32, with four NBD connections."""
    (disk,) = json.loads(good("info", lun, "--json"))["disks"]
    with attached(lun, "--connections", "4", "-o", "io-timeout=7") as device:
        assert int(block(device.name, "size")) * 512 == disk["size"]
        assert int(block(device.name, "queue/logical_block_size")) == disk["block_size"]
        assert block(device.name, "queue/io_timeout") == "44000"  # ms; far above io-timeout
        assert block(device.name, "queue/write_cache") == "write back"
        assert (RUN / device.name).stat().st_mode & 0o777 == 0o700
        lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
        # Field 5 is the state: 01 listens, 03 is connected.
        here = str(RUN / device.name / "socket")
        states = [line[5] for line in lines if line[-1] == here]
        assert sorted(states) == ["01", "03", "03", "03", "03"]
        fio(
            device,
            16 * MIB,
            *("--ioengine=libaio", "--iodepth=32", "--direct=1", "--bsrange=512-256k"),
        )
    note(record, "iserblk attach", "fio verify on the device, depth 32, four NBD connections")
