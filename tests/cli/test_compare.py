"""``iserblk compare``."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import IO, NoReturn

import pytest
from click.testing import CliRunner

from iserblk.cli.compare import command
from tests.cli.commands import bad, good, good_json, iserblk
from tests.cli.runs import MIB, documented


def test_a_lun_and_its_copy(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        file.write(random.Random(1).randbytes(3 * MIB + 5))
        file.truncate(64 * MIB)
    good("copy", source, f"{url}/0")
    words = good("compare", source, f"{url}/0")
    assert words.startswith("identical: 64.0 MiB in ")
    said = good_json("compare", f"{url}/0", source)
    assert set(said) == documented("compare")
    assert (said["identical"], said["first_difference"]) == (True, None)
    assert said["bytes"] == [64 * MIB, 64 * MIB]


def test_the_first_byte_that_differs_is_named(url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(64 * MIB))
    good("copy", source, f"{url}/0")
    with source.open("r+b") as file:
        for at in (40 * MIB, 2 * MIB + 3):
            file.seek(at)
            file.write(b"x")
    done = iserblk("compare", source, f"{url}/0")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == f"different: the first byte that differs is byte {2 * MIB + 3}\n"
    done = iserblk("compare", source, f"{url}/0", "--json")
    assert done.returncode == 1 and f'"first_difference": {2 * MIB + 3}' in done.stdout


def test_sizes_that_differ(tmp_path: Path) -> None:
    """A rest of zeroes is none, but for --strict; any other is named."""
    short, long = tmp_path / "short", tmp_path / "long"
    short.write_bytes(b"x" * 1000)
    long.write_bytes(b"x" * 1000 + bytes(500))
    assert good("compare", short, long).endswith("; 500 bytes of zeroes follow in B\n")
    assert good("compare", long, short).endswith("; 500 bytes of zeroes follow in A\n")
    strict = iserblk("compare", "--strict", short, long)
    assert strict.returncode == 1
    words = "different: A has 1000 bytes, B 1500; the bytes from 1000 on are in one of them only\n"
    assert strict.stdout == words
    long.write_bytes(b"x" * 999 + b"y" + bytes(499) + b"y")
    done = iserblk("compare", short, long)
    assert done.returncode == 1 and "the first byte that differs is byte 999\n" in done.stdout


def test_what_cannot_be_compared(url: str, files: Path, tmp_path: Path) -> None:
    """It has another status than a difference."""
    (tmp_path / "file").write_bytes(b"x")
    assert "both are the same" in bad(7, "compare", tmp_path / "file", tmp_path / "file")
    assert "both are the same" in bad(7, "compare", f"{url}/1", f"{url}/1")
    assert "compare takes two" in bad(7, "compare", tmp_path / "file")
    assert "missing" in bad(7, "compare", tmp_path / "file", tmp_path / "missing")
    assert "a target serves it" in bad(28, "compare", files / "small", tmp_path / "file")
    bad(21, "compare", tmp_path / "file", f"{url}/9")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_an_answer_that_cannot_be_written_is_no_difference(tmp_path: Path) -> None:
    """Nor is one that nobody reads, nor a bug: status 1 says one thing."""
    for name in ("one", "other"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    ends = str(tmp_path / "one"), str(tmp_path / "other")
    with open("/dev/full", "wb") as full:
        done = started("compare", *ends, stdout=full)
    assert done == (2, "iserblk: cannot write to stdout: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as nobody:
        assert started("compare", "--json", *ends, stdout=nobody) == (2, "")


def test_a_bug_is_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> NoReturn:
        raise ZeroDivisionError

    monkeypatch.setattr("iserblk.cli.compare.two_ends", fail)
    done = CliRunner().invoke(command, ["a", "b"])
    assert done.exit_code == 2 and "ZeroDivisionError" in done.output


def started(*words: str, stdout: IO[bytes]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "iserblk.cli", *words],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stderr
