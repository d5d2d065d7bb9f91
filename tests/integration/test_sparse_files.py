"""Files with holes, copied onto a LUN's file by the programs that people use: the old data must not
shine through."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import StartTarget
from tests.support.fuse import loop_mount, need_fuse, need_loop_mounts, running_mount
from tests.support.nbdkit import need, run

MIB = 1 << 20
SIZE = 4 * MIB
OLD = b"\xff"


def sparse(path: Path, *, size: int, **data: int) -> bytes:
    """Make a file with holes but for 64 KiB at each offset of ``data``. Returns its content."""
    with path.open("wb") as file:
        file.truncate(size)
        for letter, offset in data.items():
            file.seek(offset)
            file.write(letter.encode() * 65536)
    # rsync leaves out what has the same size and time.
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path.read_bytes()


def by_tar(source: Path, lun: Path) -> None:
    archive = source.with_suffix(".tar")
    run("tar", "-C", source.parent, "--transform", "s/.*/lun0/", "-cSf", archive, source.name)
    # Owner, mode and time cannot be set: tar says so, after the data.
    subprocess.run(
        ["tar", "-C", lun.parent, "--overwrite", "-xf", archive],
        stderr=subprocess.DEVNULL,
        check=False,
    )


def by_tar_to_stdout(source: Path, lun: Path) -> None:
    archive = source.with_suffix(".tar")
    run("tar", "-C", source.parent, "-cSf", archive, source.name)
    with lun.open("wb") as file:
        subprocess.run(["tar", "-xOf", archive], stdout=file, check=True)


def by_qemu_img(source: Path, lun: Path) -> None:
    image = source.with_suffix(".qcow2")
    run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", source, image)
    run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", image, lun)


def by_truncate(source: Path, lun: Path) -> None:
    """The file is emptied and made long by one program, and written by another."""
    run("truncate", "-s", "0", lun)
    run("truncate", "-s", str(source.stat().st_size), lun)
    with source.open("rb") as data, lun.open("r+b", buffering=0) as file:
        offset = 0
        while piece := data.read(65536):
            if any(piece):
                os.pwrite(file.fileno(), piece, offset)
            offset += len(piece)


def by_python(source: Path, lun: Path) -> None:
    with source.open("rb") as data, lun.open("wb") as file:
        while piece := data.read(65536):
            if any(piece):
                file.write(piece)
            else:
                file.seek(len(piece), os.SEEK_CUR)
        file.truncate()


def by_shutil(source: Path, lun: Path) -> None:
    shutil.copyfile(source, lun)


def command(*words: str) -> Callable[[Path, Path], None]:
    """``words`` with SRC and DST in them."""

    def call(source: Path, lun: Path) -> None:
        places = {"SRC": source, "DST": lun, "of=DST": f"of={lun}", "if=SRC": f"if={source}"}
        run(*(places.get(word, word) for word in words))

    return call


WAYS: dict[str, Callable[[Path, Path], None]] = {
    "cp": command("cp", "SRC", "DST"),
    "cp --sparse=always": command("cp", "--sparse=always", "SRC", "DST"),
    "dd conv=sparse": command("dd", "if=SRC", "of=DST", "bs=64k", "conv=sparse"),
    "dd conv=sparse,fsync": command("dd", "if=SRC", "of=DST", "bs=1M", "conv=sparse,fsync"),
    "qemu-img convert": by_qemu_img,
    "rsync --inplace": command("rsync", "--inplace", "SRC", "DST"),
    "rsync --inplace --sparse": command("rsync", "--inplace", "--sparse", "SRC", "DST"),
    "rsync --no-whole-file": command("rsync", "--inplace", "-S", "--no-whole-file", "SRC", "DST"),
    "tar -x --overwrite": by_tar,
    "tar -xO": by_tar_to_stdout,
    "truncate": by_truncate,
    "python": by_python,
    "shutil": by_shutil,
    "iserblk copy": command(sys.executable, "-m", "iserblk.cli", "copy", "SRC", "DST"),
}


CACHED = ("cp", "dd conv=sparse", "qemu-img convert", "python")


@pytest.mark.parametrize(
    ("way", "options"),
    [*((way, "direct_io") for way in WAYS), *((way, "auto_cache") for way in CACHED)],
)
def test_holes_become_zero(
    start_target: StartTarget, tmp_path: Path, way: str, options: str
) -> None:
    """Holes at the beginning, in the middle, at the end; nothing but holes; files shorter than the
    LUN, which keeps what is behind them."""
    need_fuse()
    need(*[name for name in ("qemu-img", "rsync", "tar") if way.startswith(name)])
    source = tmp_path / "source"
    with running_mount(
        [start_target(f"lun:size={SIZE}").url], tmp_path / "luns", options
    ) as mounted:
        lun = mounted / "lun0"
        for size, data in (
            (SIZE, {"d": 0, "e": 2 * MIB}),
            (SIZE, {}),
            (MIB + 512, {"f": MIB // 2}),
            (2 * MIB, {"g": 2 * MIB - 65536}),
        ):
            with lun.open("r+b") as file:
                file.write(OLD * SIZE)
            content = sparse(source, size=size, **data)
            WAYS[way](source, lun)
            assert lun.stat().st_size == SIZE
            found = lun.read_bytes()
            assert found[:size] == content
            assert found[size:] == OLD * (SIZE - size)
    assert (tmp_path / "lun").read_bytes() == found


def test_dd_of_a_boot_sector_keeps_the_rest(start_target: StartTarget, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "lun").write_bytes(OLD * SIZE)
    (tmp_path / "mbr").write_bytes(b"m" * 512)
    url = start_target("lun").url
    with running_mount([url], tmp_path / "luns") as mounted:
        run("dd", f"if={tmp_path}/mbr", f"of={mounted}/lun0", "count=1")
        assert (mounted / "lun0").read_bytes() == b"m" * 512 + OLD * (SIZE - 512)
    with running_mount([url], tmp_path / "luns") as mounted:
        run("dd", f"if={tmp_path}/mbr", f"of={mounted}/lun0", "seek=7", "conv=notrunc")
    after = (tmp_path / "lun").read_bytes()
    assert after == b"m" * 512 + OLD * 512 * 6 + b"m" * 512 + OLD * (SIZE - 8 * 512)


def test_a_file_system_behind_a_boot_sector_stays(
    start_target: StartTarget, tmp_path: Path
) -> None:
    """dd truncates the file, and then it is used as a disk, in the same mount."""
    need_fuse()
    need_loop_mounts("ext4")
    (tmp_path / "mbr").write_bytes(b"m" * 512)
    tree = tmp_path / "tree"
    with running_mount([start_target("lun:size=16M").url], tmp_path / "luns") as mounted:
        lun = mounted / "lun0"
        run("mkfs.ext4", "-q", "-F", "-E", f"offset={MIB}", lun, "15M")
        with loop_mount(lun, tree, f"offset={MIB}"):
            (tree / "kept").write_bytes(b"k" * MIB)
        run("dd", f"if={tmp_path}/mbr", f"of={lun}", "count=1")
        with loop_mount(lun, tree, f"offset={MIB}"):
            (tree / "new").write_bytes(b"n" * MIB)
        run("dd", f"if={tmp_path}/mbr", f"of={lun}", "count=1")
        with loop_mount(lun, tree, f"offset={MIB}"):
            assert (tree / "kept").read_bytes() == b"k" * MIB
            assert (tree / "new").read_bytes() == b"n" * MIB
            run("dd", f"if={tmp_path}/mbr", f"of={lun}", "count=1")  # while it is in use
            (tree / "newer").write_bytes(b"w" * MIB)
        with loop_mount(lun, tree, f"offset={MIB}"):
            assert (tree / "kept").read_bytes() == b"k" * MIB
            assert (tree / "newer").read_bytes() == b"w" * MIB
        assert lun.read_bytes()[:512] == b"m" * 512
    run("e2fsck", "-f", "-n", f"{tmp_path}/lun?offset={MIB}")


def test_what_is_not_truncated_is_a_block_device(start_target: StartTarget, tmp_path: Path) -> None:
    """With notrunc the user asks for what dd does on a block device: what it skips, stays."""
    need_fuse()
    source = tmp_path / "source"
    sparse(source, size=SIZE, a=MIB)
    (tmp_path / "lun").write_bytes(OLD * SIZE)
    with running_mount([start_target("lun").url], tmp_path / "luns") as mounted:
        run("dd", f"if={source}", f"of={mounted}/lun0", "bs=64k", "conv=sparse,notrunc")
    after = (tmp_path / "lun").read_bytes()
    assert after == OLD * MIB + b"a" * 65536 + OLD * (SIZE - MIB - 65536)


def test_as_an_ordinary_file(start_target: StartTarget, tmp_path: Path) -> None:
    """Random writes and truncations, by name and through open files, here and on an ordinary file.
    Behind the end of the ordinary file the LUN has what it had."""
    need_fuse()
    chance = random.Random("holes")
    size = MIB
    (tmp_path / "lun").write_bytes(OLD * size)
    ordinary = tmp_path / "ordinary"
    ordinary.write_bytes(OLD * size)
    expected = bytearray(OLD * size)
    with running_mount([start_target("lun").url], tmp_path / "luns") as mounted:
        lun = mounted / "lun0"
        for turn in range(150):
            flags = chance.choice([os.O_WRONLY, os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
            offset = chance.choice([0, 1, 511, 4096, size - 1, chance.randrange(size)])
            data = bytes([turn]) * min(chance.choice([1, 511, 512, 70_000]), size - offset)
            for path in (lun, ordinary):
                if turn % 5 == 0:
                    os.truncate(path, offset)
                    continue
                fd = os.open(path, flags)
                assert os.pwrite(fd, data, offset) == len(data)
                if path == ordinary:
                    content = ordinary.read_bytes()
                    expected[: len(content)] = content
                if turn % 7 == 0:
                    os.ftruncate(fd, min(offset + 10_000, size))
                os.close(fd)
            content = ordinary.read_bytes()
            expected[: len(content)] = content
            assert lun.read_bytes() == expected, turn
    assert (tmp_path / "lun").read_bytes() == expected
