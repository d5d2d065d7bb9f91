"""Text as man(7) macros. In text that comes in, `…` is code and **…** is bold, as in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_CHARACTERS = {
    "\\": r"\e",
    "…": "...",
    "→": r"\(->",
    "–": r"\(en",
    "µ": r"\(mc",
    "×": r"\(mu",
    "^": r"\(ha",
    "~": r"\(ti",
    "`": r"\(ga",
    '"': r"\(dq",
}
_INLINE = re.compile(r"`([^`]+)`|\*\*(.+?)\*\*|(?<![\w-])(--?[a-z][a-z-]*\b)")


def escape(text: str) -> str:
    """Plain text. No line of it begins a request."""
    out = [_CHARACTERS.get(each, each) for each in text]
    out = [each if each.isascii() else f"\\[u{ord(each):04X}]" for each in out]
    joined = "".join(out)
    return f"\\&{joined}" if joined[:1] in (".", "'") else joined


def code(text: str) -> str:
    """Text that stands as it is to be typed: no hyphen comes into it where a line ends. A long word
    may be broken without."""
    return " ".join(map(_word, text.split(" ")))


def _word(text: str) -> str:
    out = escape(text).replace("-", r"\-").replace("'", r"\(aq")
    if len(text) > 30:
        out = re.sub(r"([]/,&|])(?=.)", r"\1\\:", out)
    return rf"\%{out}" if re.search("[A-Za-z]{4}", text) else out


def bold(text: str) -> str:
    return rf"\fB{code(text)}\fR"


def italic(text: str) -> str:
    return rf"\fI{code(text)}\fR"


def inline(text: str) -> str:
    """One paragraph: code, options and what is bold become bold."""
    out, end = [], 0
    for match in _INLINE.finditer(text):
        out.append(_plain(text[end : match.start()]))
        typed, strong, option = match.groups()
        out.append(rf"\fB{_plain(strong.replace('`', ''))}\fR" if strong else bold(typed or option))
        end = match.end()
    out.append(_plain(text[end:]))
    joined = "".join(out)
    return f"\\&{joined}" if joined[:1] in (".", "'") else joined


def _plain(text: str) -> str:
    return escape(text).removeprefix(r"\&")


class Page:
    """The text of one page, made from top to bottom."""

    def __init__(self, name: str, section: int, date: str, version: str) -> None:
        self.name, self.section = name, section
        self._fresh = True  # a heading has just begun: a paragraph needs no macro
        title = _plain(name).replace("-", r"\-")
        self._lines = [
            r".\" Made by scripts/manpages from the commands and docs/: change those.",
            f'.TH {title} {section} {date} "iserblk {version}" "iserblk"',
            ".ad l",
        ]

    def text(self) -> str:
        return "\n".join([*self._lines, ""])

    def heading(self, title: str) -> None:
        self._begin(f'.SH "{escape(title.upper())}"')

    def subheading(self, title: str) -> None:
        self._begin(f'.SS "{escape(title)}"')

    def _begin(self, line: str) -> None:
        self._lines.append(line)
        self._fresh = True

    def named(self, names: Sequence[str], summary: str) -> None:
        """The section NAME, which indexes are made from."""
        self.heading("Name")
        self.raw(f"{', '.join(map(code, names))} \\- {inline(summary)}")

    def raw(self, line: str) -> None:
        """Text that has its escapes."""
        if not self._fresh:
            self._lines.append(".PP")
        self._lines.append(line)
        self._fresh = False

    def paragraph(self, text: str) -> None:
        self.raw(inline(text))

    def synopsis(self, lines: Iterable[str]) -> None:
        for number, line in enumerate(lines):
            self._lines += [".br"] * (number > 0) + [line]
        self._fresh = False

    def item(self, text: str) -> None:
        self._lines += [r".IP \(bu 2", inline(text)]
        self._fresh = False

    def definition(self, tag: str, text: str) -> None:
        """``tag`` has its escapes."""
        self._lines += [".TP", tag, inline(text)]
        self._fresh = False

    def example(self, lines: Iterable[str]) -> None:
        self._lines += [] if self._fresh else [".PP"]
        self._lines += [".in +4n", ".EX", *map(_example, lines), ".EE", ".in"]
        self._fresh = False


def _example(line: str) -> str:
    if len(line) > 80:  # the columns of a page are few
        line = re.sub("  +", "  ", line)
    return escape(line).replace("-", r"\-").replace("'", r"\(aq")
