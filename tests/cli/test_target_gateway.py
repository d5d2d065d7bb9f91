"""``iserblk target --lun URL``: errors in words, and both ends of a gateway as processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.commands import bad, good, good_json, serving
from tests.support.target import IQN, running_target

GATE = "iqn.2026-11.example:gate"
START = ("target", "--listen", "127.0.0.1:0", "--iqn", GATE, "--lun")
SECRET = "hush-hush-hush"
NOBODY = f"iser://bob%{SECRET}@127.0.0.1:1"


@pytest.mark.parametrize(
    ("status", "spec", "words"),
    [
        (4, f"{NOBODY}/{IQN}/0", "cannot connect to 127.0.0.1:1"),
        (4, f"{NOBODY}/{IQN}/0:ro", "cannot connect to 127.0.0.1:1"),
        (7, f"{NOBODY}/{GATE.upper()}/0", "this is the target itself; name a LUN of another"),
        (7, f"{NOBODY}/{IQN}/0:wce=0", "give a number from 0 to 16383"),
        (7, f"{NOBODY}/{IQN}/0?head=12", "unknown option 'head'"),
        (7, f"{NOBODY}/{IQN}/0?header=13", "say 28 or 12"),
        (7, f"{NOBODY}/nothing/0", "is no iSCSI name"),
        (7, f"{NOBODY}/{IQN}/0".replace("//", "/"), "the // behind its scheme is missing"),
        (27, f"{NOBODY.replace('iser', 'iscsi')}/{IQN}/0?header=12", "Traditional iSCSI"),
    ],
)
def test_errors_in_words(status: int, spec: str, words: str) -> None:
    line = bad(status, *START, spec)
    assert words in line and SECRET not in line


def test_luns_that_are_not_there(tmp_path: Path) -> None:
    specs = [f"{tmp_path}/one:size=1M", f"{tmp_path}/two:size=1M"]
    with running_target(specs, tmp_path / "log") as target:
        assert "has no LUN 7" in bad(21, *START, f"{target.url}/7")
        assert "names 2 disks; add one of /0, /1" in bad(7, *START, target.url)


def test_a_gateway_serves_files_and_luns(tmp_path: Path) -> None:
    """One LUN of a file, one by iSER, one by TCP and read-only from ``--luns``; and its end."""
    data = bytes(range(256)) * 4096
    (tmp_path / "data").write_bytes(data)
    specs = [f"{tmp_path}/one:size=1M", f"{tmp_path}/two:size=1M"]
    with running_target(specs, tmp_path / "log") as target:
        (tmp_path / "luns").write_text(f"7 {target.url.replace('iser:', 'iscsi:')}/1:ro\n")
        lun = f"{target.url}/0?metrics={tmp_path}/metrics"
        arguments = ["--lun", f"{tmp_path}/own:size=1M", "--lun", lun, "--luns"]
        with serving(*START[:-1], *arguments, f"{tmp_path}/luns", log=tmp_path / "gate") as gate:
            disks = good_json("info", gate.url)["disks"]
            assert [(disk["lun"], disk["read_only"]) for disk in disks] == [
                (0, False),
                (1, False),
                (7, True),
            ]
            lines = [" ".join(line.split()) for line in good("info", gate.url).splitlines()]
            assert lines.count(f"gateway to {IQN}") == 2
            behind = good_json("info", target.url)["disks"]
            assert [disk["serial"] for disk in disks[1:]] == [disk["serial"] for disk in behind]
            good("copy", tmp_path / "data", f"{gate.url}/1")
            assert (tmp_path / "one").read_bytes() == data
            good("copy", f"{gate.url}/1", tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == data
            assert f"{target.url}/0" in good("stats", tmp_path / "metrics")
            assert gate.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert not (tmp_path / "gate").read_text()
