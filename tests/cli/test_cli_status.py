"""``iserblk status``: the table, its colour, what to do about bad states, and JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.cli import status
from iserblk.cli.here import Here, NamedLun, Unseen, Use
from iserblk.cli.states import AWAY, CONNECTED, DEGRADED, KILLED, RUNNING, SERVING, SILENT, WRONG
from iserblk.cli.status import end_unseen, lines, remedies, since_words
from iserblk.errors import PermissionDenied
from iserblk.metrics.target_reading import SessionReading
from tests.cli.commands import COMMAND, bad, environment, good, good_json, iserblk, serving
from tests.cli.runs import documented
from tests.support.fuse import need_fuse
from tests.support.target import END_S, IQN, TargetProcess, running_target
from tests.support.until import until_blocking

MIB = 1 << 20
NOBODY = 65534
URL = f"iser://host:3260/{IQN}/0"
LUN = Use(CONNECTED, "mount", "/mnt/a", IQN, 0, URL, 64 * MIB, 512, 1_700_000_000, 7, "0", "/run/m")
TARGET = Use(
    SERVING, "target", "host:3260", IQN, url=URL, pid=8, session_count=3,
    sessions=(SessionReading("iqn.h", "10.0.0.1"), SessionReading("\x1b[2J", "")),
)  # fmt: skip
DB = NamedLun("db", IQN, 0, "host:3260")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 80 columns."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_nothing() -> None:
    assert lines([], []) == ["nothing of iserblk runs here"]


def test_a_line_for_each() -> None:
    head, lun, target, *sessions = (line.split() for line in lines([LUN, TARGET], [DB]))
    assert head == ["STATE", "WHAT", "WHERE", "LUN", "SIZE", "UNFLUSHED", "SINCE"]
    day = time.strftime("%Y-%m-%d", time.localtime(LUN.since))
    assert lun == ["connected", "mount", "/mnt/a", "db", "64.0", "MiB", "512", "bytes", day]
    assert target == ["serving", "target", "host:3260", IQN, "-", "-", "-"]
    assert sessions == [
        ["logged", "in", "session", "10.0.0.1", "iqn.h", "-", "-", "-"],
        ["logged", "in", "session", "-", "?[2J", "-", "-", "-"],
        ["logged", "in", "sessions", "-", "1", "more", "-", "-", "-"],
    ]


def test_since() -> None:
    now = time.mktime((2026, 11, 27, 18, 0, 0, 0, 0, -1))
    assert since_words(int(now) - 3600, now) == "17:00"
    assert since_words(int(now) - 86400, now) == "11-26 18:00"
    assert since_words(int(now) - 400 * 86400, now) == "2025-10-23"
    assert since_words(None, now) == "-"


def test_bad_states_are_red_on_a_terminal(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Use(AWAY, "nbd", "/s", IQN, 0, URL)
    _, good_line, bad_line, *_ = lines([LUN, away], [])
    assert "\x1b" not in good_line
    assert bad_line.startswith("\x1b[31mnot connected\x1b[0m  nbd")
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert not any("\x1b" in line for line in lines([LUN, away], []))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert not any("\x1b" in line for line in lines([LUN, away], []))


def test_a_narrow_terminal_shows_the_ends_of_long_names(terminal: None) -> None:
    long = Use(CONNECTED, "mount", f"/mnt/{'a' * 90}/end", f"iqn.{'b' * 90}", 3, "", MIB, 0, 1)
    shown = lines([long], [])
    assert all(len(line) <= 80 for line in shown)
    assert "…" in shown[1] and "/end " in shown[1] and "b/3 " in shown[1]


def test_all_of_a_long_name_stands_in_a_file() -> None:
    place = f"/mnt/{'a' * 90}"
    assert place in lines([Use(CONNECTED, "mount", place)], [])[1]


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (Use(KILLED, "mount", "/mnt/a b"), "`iserblk umount '/mnt/a b'`"),
        (Use(KILLED, "attach", "/dev/nbd0"), "`iserblk detach /dev/nbd0`"),
        (Use(KILLED, "nbd", "/s", metrics="/run/m"), "`rm /run/m`"),
        (Use(AWAY, "nbd", "/s", IQN, 0, URL), f"`iserblk doctor {URL}`"),
        (Use(SILENT, "nbd", "/s"), "hangs"),
    ],
)
def test_what_to_do(use: Use, words: str) -> None:
    (line,) = remedies([use, use])
    assert line.startswith(f"{use.what} {use.where}: {use.state}: ") and words in line


def test_since_when_a_target_is_away() -> None:
    since = int(time.time())
    use = Use(AWAY, "attach", "/dev/nbd0", IQN, 0, URL, away_since=since)
    (line,) = remedies([use])
    then = since_words(since, time.time())
    assert line == (
        f"attach /dev/nbd0: not connected since {then}, and requests wait: `iserblk doctor {URL}`"
        " looks for the reason"
    )


def test_nothing_to_do() -> None:
    assert remedies([LUN, TARGET, Use(DEGRADED, "nbd", "/s"), Use(WRONG, "nbd", "/s")]) == []


def test_what_is_not_seen(capsys: pytest.CaptureFixture[str]) -> None:
    unseen = [Unseen("root", ("/dev/nbd0",), "why"), Unseen("", (), "no place")]
    end_unseen([], found=False)
    end_unseen(unseen, found=True)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "iserblk: not looked at: root: /dev/nbd0: why\niserblk: not looked at: no place\n"
    )
    with pytest.raises(PermissionDenied, match="not looked at: root: /dev/nbd0: why; no place"):
        end_unseen(unseen, found=False)


def test_json_is_as_documented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = Here(
        uses=[LUN, TARGET, Use(RUNNING, "csi", "/csi")], unseen=[Unseen("root", (), "why")]
    )
    monkeypatch.setattr(status, "look_around", lambda **_: found)
    monkeypatch.setattr(status, "all_named", lambda: [DB])
    assert status.command.callback is not None
    status.command.callback(as_json=True)
    told = json.loads(capsys.readouterr().out)
    lun, target, csi = told["uses"]
    (unseen,) = told["unseen"]
    assert {*told, *lun, *target["sessions"][0], *unseen} == documented("status")
    assert (lun["name"], lun["unflushed_bytes"], lun["bad"]) == ("db", 512, False)
    assert target["sessions"][1] == {"initiator": "\x1b[2J", "address": None}
    assert (target["session_count"], target["lun"]) == (3, None)
    assert {name: value for name, value in csi.items() if value} == {
        "state": "running", "what": "csi", "where": "/csi",
    }  # fmt: skip


# --- the whole command ---------------------------------------------------------------------------


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path, for names of sockets."""
    with tempfile.TemporaryDirectory(prefix="iserblk.") as path:
        yield Path(path)


def unmount(files: Path) -> None:
    """What a test that failed has left mounted."""
    subprocess.run(["umount", "-l", files], stderr=subprocess.DEVNULL, check=False)


@pytest.fixture
def clean_up(tmp_path: Path) -> Iterator[contextlib.ExitStack]:
    """What is called before the directory goes."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    files = tmp_path_factory.mktemp("target")
    with running_target([f"{files}/lun:size=4M"], files / "log") as process:
        yield process


def test_from_the_first_look_to_the_last(
    target: TargetProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clean_up: contextlib.ExitStack,
) -> None:
    """A LUN by its name, in use by two commands, of which the second is warned; then a killed
    mount, and what is left of it."""
    need_fuse()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(tmp_path / "named"))
    files, nbd = tmp_path / "files", tmp_path / "s"
    files.mkdir()
    clean_up.callback(unmount, files)
    name = "db"
    good("add", name, target.url)

    def mine() -> dict[str, dict[str, object]]:
        told = json.loads(iserblk("status", "--json").stdout)
        return {use["where"]: use for use in told["uses"] if str(tmp_path) in use["where"]}

    assert mine() == {}
    assert good("list").split() == [name, target.url]
    with (
        serving("mount", "-f", name, files, log=tmp_path / "mount.log") as mounted,
        serving("nbd", name, "--socket", nbd, log=tmp_path / "nbd.log") as server,
    ):
        words = f"written to by process {mounted.process.pid} (iserblk mount at {files}), too"
        assert words in (tmp_path / "nbd.log").read_text()
        assert (tmp_path / "mount.log").read_text() == ""
        # (A process that does not answer within seconds, on a busy machine, counts as hung.)
        until_blocking(lambda: [use["state"] for use in mine().values()] == ["connected"] * 2)
        found = mine()
        assert set(found) == {str(files), str(nbd)}
        for place, what in ((files, "mount"), (nbd, "nbd")):
            use = found[str(place)]
            assert (use["state"], use["what"], use["name"]) == ("connected", what, name)
            assert (use["size"], use["unflushed_bytes"]) == (4 * MIB, 0)
        assert f"in use: mount {files}, nbd {nbd}" in good("list")
        until_blocking(lambda: len(good_json("stats", name)["luns"]) == 2)
        line = bad(28, "remove", name)
        assert f"first `iserblk umount {files}`" in line
        assert f"iserblk nbd at {nbd} (process {server.process.pid})" in line
        server.end(signal.SIGTERM)
        mounted.kill()
        killed = mine()[str(files)]
        assert (killed["state"], killed["what"], killed["bad"]) == ("killed", "mount", True)
        assert f"`iserblk umount {files}` cleans up" in iserblk("status").stdout
        assert str(files) not in iserblk("stats", "--json").stdout
        assert "not in use here" in bad(7, "stats", name)
    good("umount", files)
    assert mine() == {}
    assert list(tmp_path.glob("iserblk/*")) == []
    assert good("remove", name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_of_a_user_who_may_not_look(target: TargetProcess, tmp_path: Path) -> None:
    """What runs is told by its record, and what is not seen by its name."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        changes = {"HOME": str(tmp_path)}
        env = {k: v for k, v in environment(**changes).items() if k != "XDG_RUNTIME_DIR"}
        try:
            done = subprocess.run(
                [*COMMAND, *words], capture_output=True, text=True, check=False, env=env,
                user=NOBODY, group=NOBODY, extra_groups=[], timeout=END_S,
            )  # fmt: skip
        except PermissionError:
            pytest.skip("others cannot run this checkout's interpreter")
        if "Permission denied" in done.stderr:
            pytest.skip("others cannot read this checkout")
        return done

    nbd = tmp_path / "s"
    with serving("nbd", target.url, "--socket", nbd, log=tmp_path / "log") as server:
        done = run("status", "--json")
        told = json.loads(done.stdout)
        (use,) = [use for use in told["uses"] if use["where"] == str(nbd)]
        assert (use["state"], use["pid"], use["size"]) == ("running", server.process.pid, 4 * MIB)
        (root,) = [each for each in told["unseen"] if each["user"] == "root"]
        assert str(nbd) in root["places"]
        assert "not looked at: root: " in done.stderr and done.returncode == 0
        done = run("stats")
        assert (done.returncode, done.stdout) == (13, "")
        assert done.stderr.startswith("iserblk: not looked at: ")
        server.end(signal.SIGTERM)
