"""The screen: what is written to a terminal, its keys, and how it is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from iserblk.cli.watch.terminal import Screen, keys_untrusted


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", []),
        (b"q", ["q"]),
        (b"\x1b[A\x1b[B\x1bOA\x1bOB", ["up", "down", "up", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[4~", ["page up", "page down", "home", "end"]),
        (b"\x1b", ["escape"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\r\n\x7f\x08", ["enter", "enter", "back", "back"]),
        (b"\x1b[1;5Pq", ["q"]),  # a key that means nothing
        (b"\x1b[200~s\x1b[201~", ["s"]),  # what is pasted
        (b"\xc3\xa4\x00\x01 q", ["q"]),
    ],
)
def test_keys(data: bytes, wanted: list[str]) -> None:
    assert keys_untrusted(data) == wanted


@given(st.binary())
def test_any_bytes_are_keys_or_none(data: bytes) -> None:
    for each in keys_untrusted(data):
        assert each.isprintable() and each


class Terminal:
    """A terminal of 30x3. ``fd``: its other end."""

    def __init__(self, fd: int, stdin: TextIO, stdout: TextIO) -> None:
        self.fd = fd
        self.stdin = stdin
        self.stdout = stdout

    def screen(self) -> Screen:
        return Screen(self.stdin, self.stdout)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    other, own = os.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with open(own, closefd=False) as stdin, open(own, "w", encoding="utf-8") as stdout:
        found = Terminal(other, stdin, stdout)
        found.resize(30, 3)
        yield found
    if found.fd >= 0:
        os.close(found.fd)


def written(terminal: Terminal, encoding: str = "utf-8") -> str:
    """What has been written to the terminal since the last call: a mark ends it."""
    terminal.stdout.write("\0")
    terminal.stdout.flush()
    found = b""
    while not found.endswith(b"\0"):
        found += os.read(terminal.fd, 1 << 16)
    return found.decode(encoding).removesuffix("\0")


def lines(*words: str) -> list[Text]:
    return [Text(each) for each in words]


def never() -> bool:
    return False


def test_only_what_differs_is_written(terminal: Terminal) -> None:
    with terminal.screen() as screen:
        written(terminal)
        screen.show(lines("one", "two", "three"))
        first = written(terminal)
        assert [first.index(each) for each in ("one", "two", "three")]
        screen.show(lines("one", "TWO", "three"))
        second = written(terminal)
        assert f"\x1b[2;1HTWO{' ' * 27}" in second
        assert "one" not in second and "three" not in second
        assert "\x1b[2J" not in second and "\x1b[K" not in second  # nothing is cleared
        screen.show(lines("one", "TWO", "three"))
        assert written(terminal) == ""


def test_a_line_fills_the_width_and_no_more(terminal: Terminal) -> None:
    with terminal.screen() as screen:
        written(terminal)
        screen.show(lines("x" * 50))
        assert written(terminal).count("x") == 30


def test_after_a_new_size_all_is_drawn(terminal: Terminal) -> None:
    with terminal.screen() as screen:
        screen.show(lines("one"))
        written(terminal)
        terminal.resize(40, 5)
        os.kill(os.getpid(), signal.SIGWINCH)
        assert screen.keys(never) == []  # it has been woken
        assert screen.size == (40, 5)
        screen.show(lines("one"))
        assert "one" in written(terminal)


def test_the_terminal_is_left_as_it_was(terminal: Terminal) -> None:
    before = termios.tcgetattr(terminal.fd)
    handlers = [signal.getsignal(each) for each in (signal.SIGWINCH, signal.SIGTSTP)]
    with pytest.raises(ZeroDivisionError), terminal.screen() as screen:
        begun = written(terminal)
        assert "\x1b[?1049h" in begun and "\x1b[?25l" in begun
        assert not termios.tcgetattr(terminal.fd)[3] & (termios.ECHO | termios.ICANON)
        screen.show(lines("one"))
        raise ZeroDivisionError
    assert written(terminal).endswith("\x1b[0m\x1b[?25h\x1b[?1049l")
    assert termios.tcgetattr(terminal.fd) == before
    assert [signal.getsignal(each) for each in (signal.SIGWINCH, signal.SIGTSTP)] == handlers
    screen.wake()  # by a thread that has not noticed


def test_keys_come_one_by_one(terminal: Terminal) -> None:
    with terminal.screen() as screen:
        os.write(terminal.fd, b"\x1b[Aq")
        assert screen.keys(never) == ["up", "q"]
        os.write(terminal.fd, b"\x1b")
        assert screen.keys(never) == ["escape"]
        assert screen.keys(lambda: True) == []
        screen.wake()
        assert screen.keys(never) == []


def test_no_colour(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    red = [Text("one", style="red")]
    with terminal.screen() as screen:
        written(terminal)
        screen.show(red)
        assert "\x1b[31m" in written(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal.screen() as screen:
        written(terminal)
        screen.show(red)
        assert "\x1b[31m" not in written(terminal)


def test_a_terminal_without_unicode(terminal: Terminal) -> None:
    with (
        open(os.dup(terminal.stdout.fileno()), "w", encoding="ascii") as stdout,
        Screen(terminal.stdin, stdout) as screen,
    ):
        written(terminal)
        screen.show(lines("8µs │░▒▓█×…"))
        assert "8us |.:+#x." in written(terminal)


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "/mnt/???? 8us|x ?"), ("latin-1", "/mnt/???? 8us|x é")]
)
def test_a_name_that_the_terminal_cannot_write(
    terminal: Terminal, encoding: str, shown: str
) -> None:
    """It takes as many cells as it would."""
    with (
        open(os.dup(terminal.stdout.fileno()), "w", encoding=encoding) as stdout,
        Screen(terminal.stdin, stdout) as screen,
    ):
        written(terminal)
        screen.show(lines("/mnt/名前 8µs│x é"))
        assert f"{shown}{' ' * 13}" in written(terminal, encoding)


def test_without_keys(terminal: Terminal, tmp_path: Path) -> None:
    """stdin is a file."""
    with (tmp_path / "file").open("w+") as stdin, Screen(stdin, terminal.stdout) as screen:
        screen.wake()
        assert screen.keys(never) == []


def test_the_terminal_goes(terminal: Terminal) -> None:
    """As at the end of a connection: what is left to do is to end."""
    with terminal.screen() as screen:
        os.close(terminal.fd)
        terminal.fd = -1
        with contextlib.suppress(OSError):
            screen.keys(never)
    with contextlib.suppress(OSError):
        terminal.stdout.close()  # what could not be written is left
