"""The screen of `iserblk top`: a terminal that is drawn on whole, and whose keys are read.

Only lines that differ from those on the screen are written, each over the whole width, and none is
cleared before: nothing flickers, and a slow connection carries little.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import termios
import tty
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from iserblk.loop.blocking import any_readable, readable
from iserblk.loop.clock import monotonic

_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"  # the alternate screen, without a cursor
_LEAVE = "\x1b[0m\x1b[?25h\x1b[?1049l"
# Terminals that know these show all of what is between them at once; others take no notice.
_BEGIN, _END = "\x1b[?2026h", "\x1b[?2026l"
_REST_S = 0.05  # for the rest of a key's bytes
# Keys that are more than a character, by the end of what they send.
_NAMES = {
    "A": "up",
    "B": "down",
    "C": "right",
    "D": "left",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "page up",
    "6~": "page down",
    "7~": "home",
    "8~": "end",
}
_SEQUENCE = re.compile(rb"\x1b(?:\[([0-9;]*[@-~])|O([@-~]))")
_CHARACTERS = {"\r": "enter", "\n": "enter", "\x1b": "escape", "\x7f": "back", "\b": "back"}
# Terminals that know nothing of Unicode.
_PLAIN = str.maketrans("░▒▓█│├└─×…↑↓µ▁▂▃▄▅▆▇→", ".:+#|||-x.^vu_.,-=+#>")


def keys_untrusted(data: bytes) -> list[str]:
    """The keys in what a terminal has sent: names, or characters. Sequences that are not known are
    left out. Never raises."""
    found = []
    at = 0
    while at < len(data):
        sequence = _SEQUENCE.match(data, at)
        if sequence is not None:
            code = (sequence[1] or sequence[2]).decode("ascii")
            if name := _NAMES.get(code):
                found.append(name)
            at = sequence.end()
            continue
        character = chr(data[at])
        if name := _CHARACTERS.get(character):
            found.append(name)
        elif " " < character < "\x7f":
            found.append(character)
        at += 1
    return found


def _encodable(text: str, encoding: str) -> str:
    """``text``, in which what ``encoding`` lacks is replaced, cell by cell: names may have any
    character."""

    def shown(character: str) -> str:
        try:
            character.encode(encoding)
        except UnicodeEncodeError:
            return "?" * cell_len(character)
        return character

    return "".join(map(shown, text))


class Screen:
    """The terminal, while the context is open: keys come one by one, and are not echoed. Where
    ``stdin`` is no terminal there are no keys. ``wake``, which threads and handlers of signals may
    call, has ``keys`` return."""

    def __init__(self, stdin: TextIO, stdout: TextIO) -> None:
        """``stdout``: a terminal."""
        self._stdout = stdout
        self._console = Console(file=stdout, highlight=False)
        self._stdin = stdin.fileno() if stdin.isatty() else None
        self._before: list[str] = []
        self._size = (0, 0)
        self._settings: list[object] | None = None
        self._heard, self._waker = -1, -1
        self._handlers: list[tuple[int, object]] = []
        self._stopping = False
        self._deaf = False

    def __enter__(self) -> Screen:
        self._heard, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number, handler in ((signal.SIGWINCH, self._resized), (signal.SIGTSTP, self._stopped)):
            self._handlers.append((number, signal.signal(number, handler)))
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers:
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._close()
        heard, waker, self._heard, self._waker = self._heard, self._waker, -1, -1
        os.close(heard)
        os.close(waker)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, in characters."""
        try:
            found = os.get_terminal_size(self._stdout.fileno())
        except OSError:
            found = os.terminal_size((0, 0))
        return found.columns or 80, found.lines or 24  # a serial line does not know

    def show(self, lines: Sequence[Text]) -> None:
        """Show ``lines``, as many as the terminal has."""
        width, _ = self.size
        parts = []
        if self.size != self._size:
            self._size, self._before = self.size, []
            parts.append("\x1b[2J")
        now = [self._drawn(line, width) for line in lines]
        for row, line in enumerate(now):
            if row >= len(self._before) or self._before[row] != line:
                parts.append(f"\x1b[{row + 1};1H{line}")
        self._before = now
        if parts:
            self._write(f"{_BEGIN}{''.join(parts)}{_END}")

    def keys(self, until: Callable[[], bool]) -> list[str]:
        """Wait for keys, or for ``wake``; ``until``: there is something else to do already."""
        if self._stopping:
            self._stop()
            return []
        if until():
            return []
        stdin = self._stdin
        heard = [self._heard] if stdin is None or self._deaf else [self._heard, stdin]
        ready = any_readable(heard)
        if self._heard in ready:
            os.read(self._heard, 4096)
        if stdin is None or stdin not in ready:
            return []
        data = os.read(stdin, 1024)
        if not data:
            self._deaf = True  # the terminal has gone
        while data.endswith(b"\x1b") or re.search(rb"\x1b[\[O][0-9;]*$", data):
            if not readable(stdin, monotonic() + _REST_S):
                break
            data += os.read(stdin, 1024)
        return keys_untrusted(data)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it is awake, or closed
            os.write(self._waker, b"\0")

    # -- the terminal ------------------------------------------------------------------------------

    def _drawn(self, line: Text, width: int) -> str:
        line = line.copy()
        line.truncate(width, overflow="crop", pad=True)
        with self._console.capture() as capture:
            self._console.print(line, end="", no_wrap=True, overflow="crop", width=width)
        drawn = capture.get()
        if "utf" in self._console.encoding:
            return drawn
        return _encodable(drawn.translate(_PLAIN), self._console.encoding)

    def _open(self) -> None:
        if self._stdin is not None:
            self._settings = termios.tcgetattr(self._stdin)
            tty.setcbreak(self._stdin)
        self._size = (0, 0)
        self._write(_ENTER)

    def _close(self) -> None:
        # A terminal that has gone needs nothing any more.
        with contextlib.suppress(OSError):
            self._write(_LEAVE)
        with contextlib.suppress(termios.error):
            if self._stdin is not None and self._settings is not None:
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._settings)  # type: ignore[arg-type]

    def _write(self, text: str) -> None:
        self._stdout.write(text)
        self._stdout.flush()

    def _resized(self, _number: int, _frame: FrameType | None) -> None:
        self.wake()

    def _stopped(self, _number: int, _frame: FrameType | None) -> None:
        self._stopping = True
        self.wake()

    def _stop(self) -> None:
        """Stop as by ^Z, with the terminal as it was, until SIGCONT."""
        self._stopping = False
        self._close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._open()
