"""``iserblk top``: looks, keys, one picture without a terminal, and the whole command on one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from iserblk.cli import top
from iserblk.cli.here import Answer, Here, NamedLun, Unseen, Use
from iserblk.cli.states import RUNNING, SILENT
from iserblk.cli.top import Looking, look_of, press
from iserblk.cli.watch.frame import View
from iserblk.cli.watch.history import SORTS, History, Look, Silent, in_order
from iserblk.errors import ConnectFailed
from iserblk.metrics.places import Place
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.target_reading import TargetReading
from tests.cli.commands import COMMAND, environment
from tests.cli.test_command import said
from tests.support.until import until_blocking
from tests.support.watched import example, lun

END_S = 60
PLACE = Place("/dev/nbd0", "0", Path("/run/iserblk/a.metrics"))


def here(at: float = 1.0, *more: Answer) -> Here:
    reading = ProcessReading(7, "1", (lun(),), (TargetReading("t", "u", sessions=2),), "attach")
    return Here([Answer(PLACE, reading, at=at), *more], [Use("connected", "attach", "/dev/nbd0")])


# --- a look --------------------------------------------------------------------------------------


def test_a_look() -> None:
    found = here(5.0, Answer(replace(PLACE, where="/mnt"), None, SILENT))
    found.uses.append(Use(RUNNING, "copy", "", "iqn", 0))
    found.uses.append(Use(RUNNING, "csi", "a socket"))
    found.unseen.append(Unseen("root", ("/dev/nbd9",), "only root can"))
    of = NamedLun("db", lun().target, 0, "10.0.0.1:3260")
    seen = look_of(found, [of])
    (only,) = seen.luns
    assert (only.where, only.uid, only.pid, only.at, only.command) == (
        "/dev/nbd0", "0", 7, 5.0, "attach",
    )  # fmt: skip
    assert only.title == "db"
    assert seen.silent == (Silent("0", "/mnt", SILENT),)
    assert seen.notes == ("root: /dev/nbd9: only root can",)
    assert seen.others == ("copy",)
    assert (seen.targets, seen.sessions) == (1, 2)
    all_of_it = replace(of, lun=None)
    assert look_of(found, [all_of_it]).luns[0].title == "db/0"
    assert look_of(found).luns[0].title == f"{lun().target}/0"


# --- keys ----------------------------------------------------------------------------------------


def test_keys() -> None:
    history = example(3)
    view = View()
    assert not press("q", view, history, 24)
    for name, key in SORTS.items():
        view.reverse = True
        assert press(key, view, history, 24)
        assert (view.sort, view.reverse) == (name, False)
    order = [each.seen.key for each in in_order(history, view.sort)]
    pressed = {
        "down": order[1], "j": order[2], "up": order[1], "k": order[0], "end": order[-1],
        "page up": order[0], "page down": order[-1], "home": order[0],
    }  # fmt: skip
    for key, wanted in pressed.items():
        press(key, view, history, 24)
        assert view.chosen == wanted, key
    press("enter", view, history, 24)
    assert view.page
    press("escape", view, history, 24)
    assert not view.page
    press("r", view, history, 24)
    press("p", view, history, 24)
    assert view.reverse and view.paused
    press("h", view, history, 24)
    assert view.help
    press("r", view, history, 24)  # any key leaves it
    assert view.reverse and not view.help
    press("F", view, history, 24)
    press("down", view, History(), 24)  # nothing to choose


def test_no_key_has_two_meanings() -> None:
    assert not set(SORTS.values()) & set("qhrpkj?")


# --- looking -------------------------------------------------------------------------------------


def test_looks_come_from_a_thread() -> None:
    woken = threading.Event()
    numbers = iter(range(1000))
    with Looking(lambda: Look(next(numbers), 0.0), 0.0, woken.set) as looking:
        assert woken.wait(END_S)
        first = looking.take()
        until_blocking(looking.has_come)
        second = looking.take()
    assert [each.at for each in first + second] == list(range(len(first + second)))


def test_what_looking_raises_comes_out() -> None:
    def look() -> Look:
        raise ConnectFailed("no")

    with Looking(look, 0.0, lambda: None) as looking:
        until_blocking(looking.has_come)
        with pytest.raises(ConnectFailed):
            looking.take()


# --- without a terminal --------------------------------------------------------------------------


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Here]]:
    """What the looks of the command find, one after the other."""
    found: list[Here] = []
    monkeypatch.setattr(top, "look_around", lambda **_: found.pop(0))
    monkeypatch.setattr(top, "all_named", list)
    monkeypatch.setenv("COLUMNS", "100")
    yield found


def test_one_picture(looks: list[Here], capsys: pytest.CaptureFixture[str]) -> None:
    looks += [here(1.0), here(2.0)]
    status, shown, complaints = said(capsys, "top", "--interval", "0.1")
    assert (status, complaints, looks) == (0, "", [])
    assert "/dev/nbd0" in shown and "\x1b" not in shown and "1 LUN" in shown
    assert max(map(len, shown.splitlines())) <= 100


def test_a_narrow_picture_has_the_least_width(
    looks: list[Here], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    looks += [here(1.0), here(2.0)]
    _, shown, _ = said(capsys, "top", "--interval", "0.1")
    assert "too small" not in shown and "/dev/nbd0" in shown


def test_nothing_to_show(looks: list[Here], capsys: pytest.CaptureFixture[str]) -> None:
    looks.append(Here())
    status, shown, complaints = said(capsys, "top")
    assert (status, complaints) == (0, "") and "no LUN is in use" in shown


def test_nothing_that_this_user_may_see(
    looks: list[Here], capsys: pytest.CaptureFixture[str]
) -> None:
    looks.append(Here(unseen=[Unseen("root", ("/dev/nbd0",), "only root can look at it")]))
    status, shown, complaints = said(capsys, "top")
    assert (status, shown) == (13, "")
    assert "not looked at: root: /dev/nbd0: only root can look at it" in complaints


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, complaint = said(capsys, "top", "--sort", "size")
    assert status == 7 and "'size' is not one of" in complaint


def test_rich_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [*sys.modules]:
        if name.startswith(("rich", "iserblk.cli.watch.frame")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.cells", None)
    status, shown, complaint = said(capsys, "top")
    assert (status, shown) == (1, "")
    assert complaint.startswith("iserblk: the Python package rich")
    assert len(complaint.splitlines()) == 1


# --- on a terminal -------------------------------------------------------------------------------


def test_the_whole_command_on_a_terminal(tmp_path: Path) -> None:
    """It shows, answers to keys, stops and goes on, and leaves the terminal as it was."""
    other, own = os.openpty()
    environ = environment(XDG_RUNTIME_DIR=str(tmp_path), TERM="xterm", COLUMNS="", LINES="")
    before = subprocess.check_output(["stty", "-g"], stdin=own)
    subprocess.check_call(["stty", "rows", "24", "cols", "80"], stdin=own)
    process = subprocess.Popen([*COMMAND, "top"], stdin=own, stdout=own, stderr=own, env=environ)
    shown = b""
    os.set_blocking(other, False)

    def has(words: bytes) -> Callable[[], bool]:
        def look() -> bool:
            nonlocal shown
            with contextlib.suppress(BlockingIOError):
                shown += os.read(other, 1 << 16)
            return words in shown

        return look

    try:
        until_blocking(has(b"none for"))
        os.write(other, b"h")
        until_blocking(has(b"heat map"))
        shown = b""
        process.send_signal(signal.SIGTSTP)
        until_blocking(has(b"\x1b[?1049l"))
        until_blocking(lambda: _state(process.pid) == "T")
        process.send_signal(signal.SIGCONT)
        until_blocking(has(b"\x1b[?1049h"))
        shown = b""
        os.write(other, b"xq")
        until_blocking(has(b"\x1b[?1049l"))
        assert process.wait(END_S) == 0
        assert (
            subprocess.check_output(["stty", "-g"], stdin=own).split(b":")[:4]
            == (before.split(b":")[:4])
        )
    finally:
        process.kill()
        process.wait()
        os.close(other)
        os.close(own)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("size", ["80x24", "120x40", "200x60"])
def test_in_tmux(size: str, tmp_path: Path) -> None:
    """What a user sees is what was drawn: no line is wrapped, and none is missing."""
    tmux = shutil.which("tmux")
    if tmux is None:
        pytest.skip("tmux is not installed")
    width, height = map(int, size.split("x"))
    script = tmp_path / "shows.py"
    script.write_text(_SHOWS)
    server = [tmux, "-f", "/dev/null", "-S", str(tmp_path / "s")]
    environ = {**environment(), "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
    words = f"exec {sys.executable} {script}"
    subprocess.run(
        [*server, "new-session", "-d", "-x", str(width), "-y", str(height), words],
        env=environ, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    try:

        def captured() -> list[str]:
            done = subprocess.run(
                [*server, "capture-pane", "-p"], capture_output=True, text=True, check=True
            )
            return done.stdout.splitlines()

        until_blocking(lambda: any("q quit" in line for line in captured()))
        seen = captured()
    finally:
        subprocess.run([*server, "kill-server"], check=False, capture_output=True)
    assert len(seen) == height
    assert seen[0].startswith("iserblk top") and "q quit" in seen[-1]
    table = [line for line in seen if line.startswith(("/dev/nbd0", "/mnt/backup"))]
    assert len(table) == 2 and max(map(len, seen)) <= width


_SHOWS = """
import sys, time
sys.path.insert(0, ".")
from iserblk.cli.watch.frame import View, frame
from iserblk.cli.watch.terminal import Screen
from tests.support.watched import example
with Screen(sys.stdin, sys.stdout) as screen:
    width, height = screen.size
    screen.show(frame(example(40), View(), width, height))
    while "q" not in screen.keys(lambda: False):
        pass
"""
