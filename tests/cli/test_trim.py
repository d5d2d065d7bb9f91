"""``iserblk trim``."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.cli.output import size_words
from tests.cli.commands import bad, good, good_json, iserblk
from tests.cli.runs import MIB, documented
from tests.support.target import ROOT, running_target


def test_trim_gives_space_back(url: str, files: Path, tmp_path: Path) -> None:
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    assert good_json("trim", f"{url}/1", "--offset", "1M", "--length", "2M") == {
        "offset": MIB,
        "length": 2 * MIB,
    }
    assert (files / "small").stat().st_blocks * 512 == 2 * MIB
    good("copy", f"{url}/1", tmp_path / "back")
    ones = b"\x11" * MIB
    assert (tmp_path / "back").read_bytes() == ones + bytes(2 * MIB) + ones
    assert good("trim", f"{url}/1", "--all") == "trimmed 4.0 MiB from offset 0\n"
    assert (files / "small").stat().st_blocks == 0
    assert documented("trim") == {"offset", "length"}


def test_the_blocks_that_were_trimmed_are_named(url: str) -> None:
    """Not the range, where blocks are in it in part only."""
    (disk,) = good_json("info", f"{url}/1")["disks"]
    block = disk["block_size"]
    said = good("trim", f"{url}/1", "--offset", "1", "--length", 2 * block)
    assert said == f"trimmed {size_words(block)} from offset {block}\n"
    said = good("trim", f"{url}/1", "--offset", "1", "--length", block)
    assert said == "trimmed nothing: there is no whole block in the range\n"


def test_several_portals(url: str, files: Path, tmp_path: Path) -> None:
    """copy, trim and bench go on where the first portal of a LUN is down."""
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    down = re.sub(":[0-9]+/", ":1/", f"{url}/1")
    both = down, f"{url}/1"

    def done(*arguments: object) -> str:
        ended = iserblk(*arguments)
        assert ended.returncode == 0, ended.stderr
        assert "is used: cannot connect to" in ended.stderr
        return ended.stdout

    done("copy", tmp_path / "ones", *both, "--verify")
    done("copy", *both, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"\x11" * 4 * MIB
    assert "trimmed 4.0 MiB" in done("trim", *both, "--all")
    assert (files / "small").stat().st_blocks == 0
    for face in ("async", "blocking"):
        assert "IOPS" in done("bench", *both, "--time", "0.1", "--face", face)


def test_several_luns_are_refused(url: str) -> None:
    """Before anything is done to one of them."""
    for arguments in (["trim", "--all"], ["bench", "--rw", "write", "--destroy"]):
        words = bad(7, *arguments, f"{url}/1", f"{url}/0")
        assert "name several LUNs" in words


@pytest.mark.parametrize(
    "arguments",
    [["--offset", 5 * MIB], ["--length", 5 * MIB], ["--offset", 4 * MIB, "--length", 1]],
)
def test_trim_behind_the_end_is_refused(url: str, arguments: list[object]) -> None:
    assert f"has {4 * MIB} bytes" in bad(7, "trim", f"{url}/1", *arguments)


def test_trim_of_what_must_not_be_written(url: str) -> None:
    assert "read-only" in bad(13, "trim", f"{url}/2", "--all")


def test_a_lun_that_refuses_to_trim(tmp_path: Path) -> None:
    """One line, and the status of what is not supported."""
    with running_target(
        [f"{tmp_path}/lun:size=8M"], tmp_path / "log", environment={"PROFILE": "summitstor"}
    ) as target:
        # The profile's LUN has one name in all tests: others write to it at this time.
        ended = iserblk("trim", f"{target.url}/0", "--all", "--shared", "yes")
    assert ended.returncode == 27 and len(ended.stderr.splitlines()) == 1
    assert "lun0" in ended.stderr and "5/20/00" in ended.stderr


def test_a_whole_lun_is_not_trimmed_by_mistake(url: str, tmp_path: Path) -> None:
    (tmp_path / "ones").write_bytes(b"\x11" * 4 * MIB)
    good("copy", tmp_path / "ones", f"{url}/1")
    assert "add --all, or give --offset" in bad(7, "trim", f"{url}/1")
    assert "leave out --offset" in bad(7, "trim", f"{url}/1", "--all", "--length", "1M")
    assert answered("n\n", url) == 1
    good("compare", tmp_path / "ones", f"{url}/1")
    assert answered("y\n", url) == 0
    good("copy", f"{url}/1", tmp_path / "back")
    assert not any((tmp_path / "back").read_bytes())


def answered(words: str, url: str) -> int:
    """The exit status, where somebody at a terminal is asked and answers with ``words``."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "iserblk.cli", "trim", f"{url}/1"],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        os.write(ours, words.encode())
        _, asked = process.communicate(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "All its data is lost. [y/N]:" in asked
    return process.returncode
