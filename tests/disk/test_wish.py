"""What a command that ends the use of LUNs and their server tell each other by files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from iserblk.disk.wish import Wish
from tests.support.target import ROOT

FILES = [f"ending.wish-{number:016x}" for number in range(2)]

_WISHES = """
import sys, pathlib
from iserblk.disk.wish import Wish
wish = Wish(pathlib.Path(sys.argv[1]))
wish.make(by_force=True)
print("made", flush=True)
sys.stdin.read()
"""


def test_a_wish_is_made_and_withdrawn(tmp_path: Path) -> None:
    wish = Wish(tmp_path / "ending")
    assert not wish.made and not wish.by_force
    wish.make()
    assert wish.made and not wish.by_force
    wish.make(by_force=True)
    assert wish.made and wish.by_force
    wish.withdraw()
    wish.withdraw()
    assert not wish.made
    (tmp_path / FILES[0]).touch()  # not locked
    assert not wish.made


def test_what_several_wish_is_withdrawn_one_by_one(tmp_path: Path) -> None:
    first, second, server = (Wish(tmp_path / "ending") for _ in range(3))
    first.make()
    assert first.made and not first.made_by_others and second.made_by_others
    second.make(by_force=True)
    assert first.made_by_others and server.by_force
    second.make()
    assert server.made and not server.by_force
    first.withdraw()
    assert server.made and not second.made_by_others
    first.withdraw()
    assert server.made
    second.withdraw()
    assert not server.made
    assert list(tmp_path.iterdir()) == []


def test_a_wish_is_none_of_another_name(tmp_path: Path) -> None:
    others = [
        Wish(tmp_path / name) for name in ("mnt.ending.wish-1", "mnt.ending2", "a.mnt.ending")
    ]
    for other in others:
        other.make()
        assert other.made
    assert not Wish(tmp_path / "mnt").made
    assert not Wish(tmp_path / "mnt.ending").made


def test_a_wish_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    """However it ends: else requests would never wait again as long as they may."""
    with subprocess.Popen(
        [sys.executable, "-c", _WISHES, tmp_path / "ending"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        wish = Wish(tmp_path / "ending")
        assert wish.made and wish.by_force
        process.kill()
        process.wait()
    assert len(list(tmp_path.iterdir())) == 1
    assert not wish.made and not wish.by_force
    wish.make()
    assert len(list(tmp_path.iterdir())) == 1
    assert wish.made and not wish.by_force


def test_what_a_server_leaves(tmp_path: Path) -> None:
    wish = Wish(tmp_path / "ending")
    assert wish.left is None
    wish.leave(4096)
    assert wish.left == 4096 and not wish.made
    wish.leave(None)
    assert wish.left == 0
    wish.begin()
    assert wish.left is None
    wish.make()
    wish.leave(1)
    wish.forget()
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_sense_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "ending.unflushed").write_text("many")
    (tmp_path / FILES[0]).mkdir()
    (tmp_path / FILES[1]).write_bytes(b"\xff")
    wish = Wish(tmp_path / "ending")
    assert wish.left is None and not wish.by_force
    gone = Wish(tmp_path / "gone" / "ending")
    gone.make()
    gone.leave(1)
    assert not gone.made and gone.left is None


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all")
    for name in (FILES[0], "ending.unflushed"):
        (tmp_path / name).symlink_to(precious)
    wish = Wish(tmp_path / "ending")
    wish.make(by_force=True)
    wish.leave(1)
    assert precious.read_text() == "all"
    assert wish.by_force and wish.left == 1
