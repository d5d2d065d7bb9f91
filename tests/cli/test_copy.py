"""``iserblk copy`` between files and LUNs."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.cli.commands import bad, good, good_json, iserblk
from tests.cli.runs import MIB, documented
from tests.support.nbdkit import run


def test_copy_there_and_back(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for offset in (0, 9 * MIB + 17, 40 * MIB):
            file.seek(offset)
            file.write(random.Random(offset).randbytes(MIB + 1))
        file.truncate(64 * MIB)
    there = good_json("copy", source, f"{url}/0", "--verify")
    assert set(there) == documented("copy")
    assert (there["bytes"], there["verified"]) == (64 * MIB, True)
    assert there["zero_bytes"] > 50 * MIB
    words = good("copy", f"{url}/0", tmp_path / "back", "--verify")
    assert words.startswith("copied 64.0 MiB (") and words.endswith(", verified\n")
    run("cmp", source, tmp_path / "back")
    assert (tmp_path / "back").stat().st_blocks * 512 < 8 * MIB


def test_copy_replaces_a_file_by_one_of_the_right_size(url: str, tmp_path: Path) -> None:
    (tmp_path / "back").write_bytes(b"\xff" * 5 * MIB)
    good("copy", f"{url}/2", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"written once" * 4096


def test_copy_of_part_of_a_block_keeps_the_rest(url: str, tmp_path: Path) -> None:
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    (tmp_path / "short").write_bytes(b"\x22" * 1000)
    good("copy", tmp_path / "ones", f"{url}/1")
    done = iserblk("copy", tmp_path / "short", f"{url}/1", "--verify")
    assert done.returncode == 0
    assert done.stderr == (
        f"iserblk: the destination is larger: its last {4 * MIB - 1000} bytes stay as they are\n"
    )
    good("copy", f"{url}/1", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"\x22" * 1000 + b"\x11" * (4 * MIB - 1000)


def test_copy_refuses(url: str, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"\x33" * (4 * MIB + 1))
    (tmp_path / "file").write_bytes(b"x")
    words = bad(7, "copy", tmp_path / "large", f"{url}/1")
    assert f"has {4 * MIB} bytes, the source {4 * MIB + 1}" in words
    assert "the same" in bad(7, "copy", f"{url}/1", f"{url}/1")
    assert "the same" in bad(7, "copy", tmp_path / "file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert "add one of /0, /1, /2" in bad(7, "copy", url, tmp_path / "back")
    assert "read-only" in bad(13, "copy", tmp_path / "file", f"{url}/2")
    assert "missing" in bad(7, "copy", tmp_path / "missing", f"{url}/1")
    bad(21, "copy", f"{url}/9", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_copy_says_when_the_disk_is_full(url: str, tmp_path: Path) -> None:
    """A file system of 1 MiB for 4 MiB of data."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    (tmp_path / "full").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1M", "none", tmp_path / "full")
    try:
        assert "No space left" in bad(1, "copy", f"{url}/1", tmp_path / "full" / "file")
    finally:
        run("umount", tmp_path / "full")
