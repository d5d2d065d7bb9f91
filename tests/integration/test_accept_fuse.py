"""Through FUSE: fio's verification, and whole file systems on a LUN."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.integration.conftest import StartTarget
from tests.support import fio
from tests.support.fuse import loop_mount, need_fuse, need_loop_mounts, running_mount
from tests.support.nbdkit import need, run

MIB = 1 << 20

# mkfs, fsck without changes, and a size that every file system accepts (XFS: at least 300 MiB).
FILE_SYSTEMS = {
    "ext4": (["mkfs.ext4", "-q", "-F"], ["e2fsck", "-f", "-n"]),
    "xfs": (["mkfs.xfs", "-q", "-f"], ["xfs_repair", "-n", "-f"]),
    "btrfs": (["mkfs.btrfs", "-q", "-f"], ["btrfs", "check", "--readonly"]),
}
FILE_SYSTEM_SIZE = "400M"


@pytest.mark.parametrize("options", ["", "direct_io"])
def test_fio_verifies_what_it_wrote(
    start_target: StartTarget, tmp_path: Path, options: str
) -> None:
    """Sixteen jobs at depth 32, mixed sizes, each in its own region of one file."""
    need_fuse()
    need("fio")
    region = 16 * MIB
    url = start_target(f"lun:size={fio.JOBS * region}").url
    with running_mount([url], tmp_path / "luns", *filter(None, [options])) as mounted:
        fio.verify(f"--filename={mounted}/lun0", "--ioengine=libaio", "--direct=1", region=region)


@pytest.mark.parametrize("size", [128, pytest.param(512, marks=pytest.mark.long)])  # MiB
def test_through_the_page_cache(start_target: StartTarget, tmp_path: Path, size: int) -> None:
    """cp in and out through the page cache; after fsync the data is in the target's file."""
    need_fuse()
    source, copy = tmp_path / "source", tmp_path / "copy"
    with source.open("wb") as file:
        chance = random.Random(513)
        for _ in range(size // 8):
            file.write(chance.randbytes(8 * MIB))
    url = start_target(f"lun:size={size}M").url
    with running_mount([url], tmp_path / "luns") as mounted:
        run("dd", f"if={source}", f"of={mounted}/lun0", "bs=1M", "conv=fsync,notrunc")
        run("cmp", source, tmp_path / "lun")
    with running_mount([url], tmp_path / "luns") as mounted:
        run("cp", f"{mounted}/lun0", copy)
    run("cmp", source, copy)


def checksums(tree: Path) -> dict[str, tuple[int, str]]:
    """Path → mode and content of every file, link and directory below ``tree``."""
    found: dict[str, tuple[int, str]] = {}
    for directory, directories, files in os.walk(tree):
        for name in (*directories, *files):
            path = Path(directory, name)
            mode = path.lstat().st_mode
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_dir():
                content = ""
            else:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path.relative_to(tree))] = (mode, content)
    return found


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The standard library's sources."""
    tree = tmp_path_factory.mktemp("source") / "tree"
    shutil.copytree(
        sysconfig.get_path("stdlib"),
        tree,
        symlinks=True,
        ignore=shutil.ignore_patterns("__pycache__", "*-packages"),
    )
    return tree


@pytest.mark.parametrize(
    ("kind", "block"), [("ext4", 512), ("ext4", 4096), ("xfs", 4096), ("btrfs", 512)]
)
def test_a_file_system_on_a_lun(
    start_target: StartTarget, tmp_path: Path, source_tree: Path, kind: str, block: int
) -> None:
    """mkfs, a source tree copied in, everything unmounted and mounted again, compared, checked."""
    need_fuse()
    need_loop_mounts(kind)
    mkfs, fsck = FILE_SYSTEMS[kind]
    need(mkfs[0], fsck[0])
    expected = checksums(source_tree)
    assert len(expected) > 500
    url = start_target(f"lun:size={FILE_SYSTEM_SIZE}:block={block}").url
    inside = tmp_path / "inside"
    with running_mount([url], tmp_path / "luns") as mounted:
        run(*mkfs, mounted / "lun0")
        with loop_mount(mounted / "lun0", inside):
            run("cp", "-a", source_tree, inside)
            # Blocks are freed, and used again.
            run("rm", "-r", inside / "tree" / "email")
            run("cp", "-a", source_tree / "email", inside / "tree")
    with running_mount([url], tmp_path / "luns", "ro") as mounted:
        run(*fsck, mounted / "lun0")
    with running_mount([url], tmp_path / "luns") as mounted:
        with loop_mount(mounted / "lun0", inside, "ro"):
            assert checksums(inside / "tree") == expected
        run(*fsck, mounted / "lun0")


def test_a_killed_target_is_an_error_for_the_reader(
    start_target: StartTarget, tmp_path: Path
) -> None:
    """Reads and fsync fail. The mount still ends in order, and says that data may be lost."""
    need_fuse()
    running = start_target("lun:size=16M")
    mountpoint = tmp_path / "luns"
    with (
        pytest.raises(AssertionError, match="data may be lost"),  # of the server's exit status
        running_mount([f"{running.url}?io-timeout=1"], mountpoint, "direct_io") as mounted,
        (mounted / "lun0").open("r+b", buffering=0) as file,
    ):
        assert file.write(b"x" * 4096) == 4096
        running.kill()
        with pytest.raises(OSError):
            os.pread(file.fileno(), 4096, 0)
        with pytest.raises(OSError):
            os.fsync(file.fileno())
    assert not os.path.ismount(mountpoint)


def test_nothing_stays_mounted(start_target: StartTarget, tmp_path: Path) -> None:
    need_fuse()
    url = start_target("lun:size=1M").url
    with running_mount([url], tmp_path / "luns") as mounted:
        assert os.path.ismount(mounted)
        assert (mounted / "lun0").stat().st_size == MIB
    assert not os.path.ismount(tmp_path / "luns")
    attached = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=False)
    assert str(tmp_path) not in attached.stdout
