"""What a command shows in a terminal, as tmux has it, drawn as SVG."""

from __future__ import annotations

import io
import shlex
import subprocess
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

# Without rich's own font, which it fetches from elsewhere: the viewer's monospaced font has to do,
# and the lengths of all texts are in the picture, so the columns stay where they are.
_FORMAT = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix{{font-family:ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;\
font-size:{char_height}px;line-height:{line_height}px}}
.{unique_id}-title{{font-size:18px;font-weight:bold;font-family:system-ui,sans-serif}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
_THEME = TerminalTheme(
    (17, 20, 24),
    (222, 226, 230),
    [(60, 66, 72), (255, 123, 114), (111, 208, 138), (240, 176, 76),
     (88, 166, 255), (210, 168, 255), (86, 212, 221), (222, 226, 230)],
    [(139, 148, 158), (255, 161, 152), (152, 226, 172), (248, 206, 128),
     (150, 200, 255), (226, 197, 255), (140, 230, 236), (255, 255, 255)],
)  # fmt: skip


class Terminal:
    """A terminal of ``columns`` × ``rows``, in which ``words`` run, until ``close``. ``place``: a
    directory for its socket and settings."""

    def __init__(self, words: list[str], columns: int, rows: int, place: Path) -> None:
        self.columns, self.rows = columns, rows
        self._socket = place / f"tmux-{columns}x{rows}-{words[-1].strip('-')}"
        settings = self._socket.with_suffix(".conf")
        # What has ended stays to be looked at.
        settings.write_text(
            "set -g status off\nset -g remain-on-exit on\nset -g default-terminal tmux-256color\n"
        )
        self._tmux("-u", "-f", str(settings), "new-session", "-d", "-x", str(columns),
                   "-y", str(rows), shlex.join(words))  # fmt: skip

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *words], capture_output=True, text=True, check=True
        )
        return done.stdout

    def ended(self) -> bool:
        """Whether the command has."""
        return self._tmux("display-message", "-p", "#{pane_dead}").strip() == "1"

    def press(self, key: str) -> None:
        self._tmux("send-keys", key)

    def screen(self) -> list[str]:
        """The lines that are shown, with escape sequences for their colours. Of a command that has
        ended, all that it has printed: tmux moves the lines up for a line of its own."""
        words = ["-S", "-"] if self.ended() else []
        lines = self._tmux("capture-pane", "-e", "-p", *words).split("\n")
        return [line for line in lines if "Pane is dead" not in line][: self.rows]

    def close(self) -> None:
        self._tmux("kill-server")


def drawn(lines: list[str], title: str, columns: int, rows: int, name: str) -> str:
    """The picture of ``lines``: always of the same size. ``name``: part of its identifiers."""
    console = Console(
        record=True, width=columns, file=io.StringIO(), color_system="truecolor",
        force_terminal=True, legacy_windows=False, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    for line in [*lines, *[""] * rows][:rows]:
        text = Text.from_ansi(line)
        text.truncate(columns)
        console.print(text, no_wrap=True, overflow="crop")
    return console.export_svg(title=title, theme=_THEME, code_format=_FORMAT, unique_id=name)
