"""``iserblk copy`` between files and LUNs."""

from __future__ import annotations

import json
import os
import random
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import COMMAND, LIMIT_S, bad, environment, good, good_json, iserblk, serving
from tests.cli.runs import MIB, documented
from tests.support.fuse import need_fuse, running_mount
from tests.support.nbdkit import need, run
from tests.support.target import IQN, running_target
from tests.support.until import until_blocking


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


@pytest.mark.parametrize("there_before", [False, True])
def test_what_a_full_disk_has_left(url: str, tmp_path: Path, there_before: bool) -> None:
    """A file system of 1 MiB for 4 MiB of data: nothing stays of a new file, and the message names
    one that was there before."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    (tmp_path / "full").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=1M", "none", tmp_path / "full")
    file = tmp_path / "full" / "file"
    try:
        if there_before:
            file.write_bytes(b"x")
        words = bad(1, "copy", f"{url}/1", file)
        assert f"{file}: No space left on device; {file} " in words
        assert file.exists() == there_before
        assert words.endswith("holds a part of the copy now" if there_before else "removed again")
    finally:
        run("umount", tmp_path / "full")


@pytest.mark.parametrize("there_before", [False, True])
def test_what_a_signal_has_left(tmp_path: Path, there_before: bool) -> None:
    """The same as a full disk; what is as it was before is not worth a word."""
    file = tmp_path / "file"
    if there_before:
        file.write_bytes(b"x" * 4 * MIB)
    with subprocess.Popen(
        [*COMMAND, "copy", "-", str(file)],
        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=False, env=environment(),
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(b"\x11" * 2 * MIB)
        process.stdin.flush()
        until_blocking(lambda: file.exists() and file.read_bytes()[:MIB] == b"\x11" * MIB)
        process.terminate()
        _, said = process.communicate()
    assert process.returncode == 143
    words = f"iserblk: interrupted: {file} holds a part of the copy now\n"
    assert said.decode() == (words if there_before else "")
    assert file.exists() == there_before


def test_a_link_that_leads_nowhere_gets_its_file(url: str, tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "made")
    good("copy", f"{url}/2", tmp_path / "file")
    assert (tmp_path / "made").read_bytes() == b"written once" * 4096


# --- standard input and output --------------------------------------------------------------------


def piped(*arguments: object, stdin: bytes | Path = b"") -> subprocess.CompletedProcess[bytes]:
    """Run ``iserblk`` with these bytes in a pipe, or with a file, as its stdin."""
    words = [*COMMAND, *map(str, arguments)]
    keywords: dict[str, Any] = {"input": stdin}
    with ExitStack() as stack:
        if isinstance(stdin, Path):
            keywords = {"stdin": stack.enter_context(stdin.open("rb"))}
        return subprocess.run(
            words, capture_output=True, check=False, env=environment(), timeout=LIMIT_S, **keywords
        )


def test_copy_through_pipes(url: str, tmp_path: Path) -> None:
    """Nothing but data is on stdout, with --json, too."""
    content = random.Random(5).randbytes(2 * MIB) + bytes(MIB) + random.Random(6).randbytes(MIB)
    done = piped("copy", "-", f"{url}/1", stdin=content)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"copied 4.0 MiB (1.0 MiB of zeroes)")
    done = piped("copy", f"{url}/1", "-", "--json")
    assert (done.returncode, done.stdout) == (0, content)
    assert set(json.loads(done.stderr)) == documented("copy")
    done = piped("-q", "copy", f"{url}/1", "-")
    assert (done.returncode, done.stdout, done.stderr) == (0, content, b"")
    (tmp_path / "longer").write_bytes(b"\xff" * 5 * MIB)
    assert piped("copy", "-", tmp_path / "longer", stdin=content).returncode == 0
    assert (tmp_path / "longer").read_bytes() == content


def test_stdin_that_does_not_fit(url: str, tmp_path: Path) -> None:
    """Of a pipe nobody knows before; of a file it is known, and nothing is written."""
    ones, twos = b"\x11" * 4 * MIB, b"\x22" * 1000
    assert piped("copy", "-", f"{url}/1", stdin=ones).returncode == 0
    done = piped("copy", "-", f"{url}/1", stdin=ones + b"x")
    assert done.returncode == 1
    assert b"stdin has more than the 4194304 bytes of the destination" in done.stderr
    done = piped("copy", "-", f"{url}/1", stdin=twos)
    assert done.returncode == 1
    assert b"stdin ended after 1000 bytes, and the destination has 4194304" in done.stderr
    done = piped("copy", "--short", "-", f"{url}/1", stdin=b"\x33" * 999)
    assert done.returncode == 0 and b"its last 4193305 bytes stay as they are" in done.stderr
    good("copy", f"{url}/1", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"\x33" * 999 + b"\x22" + ones[1000:]
    (tmp_path / "large").write_bytes(bytes(4 * MIB + 1))
    done = piped("copy", "-", f"{url}/1", stdin=tmp_path / "large")
    assert done.returncode == 7 and b"the destination is too small" in done.stderr
    (tmp_path / "small").write_bytes(twos)
    done = piped("copy", "-", f"{url}/1", stdin=tmp_path / "small")
    assert done.returncode == 0 and b"its last 4193304 bytes stay" in done.stderr


def test_what_streams_cannot(url: str, tmp_path: Path) -> None:
    assert "SRC and DST are both -" in bad(7, "copy", "-", "-")
    assert "leave out --verify" in bad(7, "copy", "-", f"{url}/1", "--verify")
    assert "leave out --short" in bad(7, "copy", f"{url}/1", tmp_path / "file", "--short")
    (tmp_path / "file").write_bytes(b"x" * 512)
    done = piped("copy", "-", tmp_path / "file", stdin=tmp_path / "file")
    assert done.returncode == 7 and b"are the same" in done.stderr
    assert (tmp_path / "file").read_bytes() == b"x" * 512


# --- files that a target serves ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["path", "hard link", "symbolic link"])
def test_what_a_target_serves_is_not_copied_past_it(
    url: str, files: Path, tmp_path: Path, name: str
) -> None:
    """The file behind a LUN is neither destination nor source, whatever the other end is, and by
    whatever name. Neither it nor a new destination is touched."""
    file = files / "small"
    if name == "hard link":
        file = tmp_path / "link"
        file.hardlink_to(files / "small")
    elif name == "symbolic link":
        file = tmp_path / "link"
        file.symlink_to(files / "small")
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    (tmp_path / "file").write_bytes(b"\x22" * 8192)
    good("copy", tmp_path / "ones", f"{url}/1")
    for source, destination in (
        (f"{url}/1", file),
        (f"{url}/2", file),
        (tmp_path / "file", file),
        (file, f"{url}/1"),
        (file, f"{url}/0"),
        (file, tmp_path / "never"),
    ):
        words = bad(28, "copy", source, destination, "--verify")
        assert f"{file}: a target serves it" in words
    assert (files / "small").read_bytes() == b"\x11" * 4 * MIB
    assert not (tmp_path / "never").exists()


def test_a_read_only_lun_may_be_read_as_a_file(url: str, files: Path, tmp_path: Path) -> None:
    good("copy", files / "read-only", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"written once" * 4096
    assert "a target serves it" in bad(28, "copy", tmp_path / "back", files / "read-only")
    assert (files / "read-only").read_bytes() == b"written once" * 4096


def test_a_destination_that_does_not_fit_is_not_touched(url: str, tmp_path: Path) -> None:
    """Nor is one whose source cannot be read."""
    (tmp_path / "precious").write_bytes(b"precious")
    for source in (tmp_path / "missing", f"{url}/9", tmp_path):
        assert iserblk("copy", source, tmp_path / "precious").returncode
    assert (tmp_path / "precious").read_bytes() == b"precious"


def test_a_lun_is_recognised_by_another_name(url: str, tmp_path: Path) -> None:
    """A gateway serves it under names of its own. Its other LUN is another one."""
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    words = ["target", "--iqn", f"{IQN}-gateway", "--listen", "127.0.0.1:0"]
    words += ["--lun", f"{url}/1", "--lun", f"{tmp_path}/other:size=4M:block=4096"]
    with serving(*words, log=tmp_path / "log") as gateway:
        for source, destination in (
            (f"{url}/1", f"{gateway.url}/0"),
            (f"{gateway.url}/0", f"{url}/1"),
        ):
            assert "the same" in bad(7, "copy", source, destination)
        good("copy", f"{gateway.url}/0", f"{gateway.url}/1", "--verify")
        good("copy", f"{url}/1", f"{gateway.url}/1", "--verify")


def test_a_copy_of_a_lun_onto_itself_loses_nothing(url: str, tmp_path: Path) -> None:
    """A mount's file of the LUN: nothing tells that it is the same. As with a file, and the LUN
    that another program's target makes of it."""
    need_fuse()
    content = random.Random(7).randbytes(MIB) + bytes(MIB) + random.Random(8).randbytes(2 * MIB)
    (tmp_path / "content").write_bytes(content)
    good("copy", tmp_path / "content", f"{url}/1")
    with running_mount([f"{url}/1"], tmp_path / "luns") as mounted:
        good("copy", f"{url}/1", mounted / "lun1", "--verify")
        assert (mounted / "lun1").read_bytes() == content
        good("copy", mounted / "lun1", f"{url}/1?shared=yes", "--verify")
        assert (mounted / "lun1").read_bytes() == content
        assert "the same" in bad(7, "copy", mounted / "lun1", mounted / "lun1")
    good("copy", f"{url}/1", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content


def test_a_luns_file_of_a_mount_keeps_its_size(url: str, tmp_path: Path) -> None:
    need_fuse()
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    (tmp_path / "short").write_bytes(b"\x22" * 1000)
    (tmp_path / "large").write_bytes(b"\x33" * (4 * MIB + 1))
    good("copy", tmp_path / "ones", f"{url}/1")
    with running_mount([f"{url}/1"], tmp_path / "luns") as mounted:
        lun = mounted / "lun1"
        assert "the destination is too small" in bad(7, "copy", tmp_path / "large", lun)
        done = iserblk("copy", tmp_path / "short", lun)
        assert done.returncode == 0 and "stay as they are" in done.stderr
        expected = b"\x22" * 1000 + b"\x11" * (4 * MIB - 1000)
        assert lun.read_bytes() == expected
        # It has no end: what is skipped stays.
        with lun.open("r+b", buffering=0) as file:
            file.seek(2 * MIB)
            file.write(b"x")
        assert lun.read_bytes()[: 2 * MIB] == expected[: 2 * MIB]


# --- images -------------------------------------------------------------------------------------


def test_an_image_with_a_format_is_warned_of(url: str, tmp_path: Path) -> None:
    """As the file of a LUN, too."""
    need("qemu-img")
    image = tmp_path / "vm.qcow2"
    run("qemu-img", "create", "-q", "-f", "qcow2", image, "8M")
    done = iserblk("copy", image, f"{url}/0")
    assert done.returncode == 0
    first = done.stderr.splitlines()[0]
    assert first.startswith(f"iserblk: {image}: a qcow2 image is taken byte by byte")
    assert "`qemu-img convert -f qcow2 -O raw`" in first
    run("truncate", "-s", "%4096", image)
    with running_target([str(image)], tmp_path / "log"):
        assert f"{image}: a qcow2 image is taken byte by byte" in (tmp_path / "log").read_text()
