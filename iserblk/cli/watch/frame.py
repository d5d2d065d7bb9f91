"""The picture of `iserblk top`: what is known of the LUNs, in the characters of a terminal.

``frame`` is the one call: from a history, a view and a size it makes the lines, each of at most so
many cells. It reads no clock and knows no terminal, so tests and documents have pictures by the
same way; ``text_of`` and ``svg_of`` make such of the lines.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from iserblk.cli.output import size_words
from iserblk.cli.states import CONNECTED
from iserblk.cli.stats_rows import plain
from iserblk.cli.watch.events import Event
from iserblk.cli.watch.history import (
    SHADES,
    SLOT_S,
    SLOTS,
    SORT,
    SORTS,
    History,
    Key,
    LunHistory,
    heat_map,
    in_order,
)
from iserblk.cli.watch.words import (
    Branch,
    bound_words,
    bytes_words,
    count_words,
    duration_words,
    latency_words,
    paths_of,
)
from iserblk.metrics.counting import OPERATIONS
from iserblk.metrics.reading import LunReading

LEAST_WIDTH, LEAST_HEIGHT = 60, 16
BESIDE = 150  # from this width on, paths stand beside the heat map
_LABEL = 7  # characters of the labels of a heat map's rows
_ROWS = 6  # of a heat map, if there is room
_SHADED = " ░▒▓█"
_SHADE_STYLES = ("", "blue", "cyan", "green", "bright_yellow")
_BARS = " ▁▂▃▄▅▆▇█"
_BAD, _GOOD, _FAINT, _HEAD, _CHOSEN = "bold red", "green", "dim", "bold", "reverse"
_KEYS = "↑↓ choose  Enter one LUN  {sorts} sort  r reverse  p pause  h help  q quit"
_HELP = (
    ("↑ ↓ k j", "choose a LUN; also PgUp, PgDn, Home, End"),
    ("Enter", "the page of the chosen LUN; Esc or Backspace: all LUNs"),
    ("s t i l f u w", "sort by state (bad ones first, then throughput), throughput, IOPS,"),
    ("", "latency (p99), commands in flight, unflushed bytes, where"),
    ("r", "sort the other way round"),
    ("p", "pause, and go on"),
    ("q", "quit; also ^C"),
    ("", ""),
    ("READ/s WRITE/s", "bytes a second since the last update; K, M, G are binary"),
    ("p50 p99", "so long took half of the requests, or 99 of 100, at most:"),
    ("", "of those of the last 5 to 10 seconds"),
    ("FLY", "SCSI commands that are sent, or wait to be sent"),
    ("UNFLUSH", "bytes that the target has acknowledged, kept until a flush"),
    ("AGAIN RECON", "commands sent again, and reconnections, since the LUN was opened"),
    ("heat map", "a column is 5 seconds: how many of its requests took so long"),
    ("×", "below the heat map: there was no connection"),
)


@dataclass(slots=True)
class View:
    """What the user has chosen. ``sort``: one of SORTS. ``chosen``: a LUN; None: the first.
    ``page``: only that LUN is shown. ``first``: the row of the table that is on top."""

    sort: str = SORT
    reverse: bool = False
    chosen: Key | None = None
    page: bool = False
    help: bool = False
    paused: bool = False
    first: int = 0


def frame(
    history: History, view: View, width: int, height: int | None = None, *, host: str = ""
) -> list[Text]:
    """The lines of one picture, of at most ``width`` cells each. ``height``: there are exactly so
    many; None: as many as it takes. ``host``: the name of the machine. ``view.first`` is set so
    that the LUN that is chosen is in the picture."""
    if width < LEAST_WIDTH or (height is not None and height < LEAST_HEIGHT):
        words = f"the terminal is too small: {LEAST_WIDTH}x{LEAST_HEIGHT} is the least"
        return _fitted([Text(words)], width, height)
    luns = in_order(history, view.sort, view.reverse)
    picture = _Picture(history, view, luns, width, host)
    if view.help:
        lines = picture.help()
    elif not luns:
        lines = picture.nothing()
    elif view.page:
        lines = picture.page(height)
    else:
        lines = picture.overview(height)
    if height is None:
        return _fitted(lines, width, None)
    return [*_fitted(lines, width, height - 1), *_fitted([picture.footer()], width, 1)]


def text_of(lines: Iterable[Text]) -> str:
    """The characters alone."""
    return "".join(f"{line.plain.rstrip()}\n" for line in lines)


def svg_of(lines: Sequence[Text], width: int, title: str = "iserblk top") -> str:
    """A drawing of a terminal with the lines in it. It needs no other file: fonts are the
    viewer's."""
    console = Console(
        file=io.StringIO(), record=True, width=width, color_system="truecolor",
        force_terminal=True, no_color=False, legacy_windows=False, highlight=False,
    )  # fmt: skip
    for line in lines:
        console.print(line, no_wrap=True, crop=True, overflow="crop")
    drawn = console.export_svg(title=title, theme=SVG_EXPORT_THEME, unique_id="top")
    begin, end = drawn.index("@font-face"), drawn.rindex("@font-face")
    end = drawn.index("}", end) + 1
    return drawn[:begin] + drawn[end:].replace("Fira Code", "monospace")


def _fitted(lines: Sequence[Text], width: int, height: int | None) -> list[Text]:
    found = list(lines if height is None else lines[:height])
    for line in found:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return found + [Text() for _ in range((height or 0) - len(found))]


# --- pieces of lines -----------------------------------------------------------------------------


def _cell(text: str, width: int, right: bool = False) -> str:
    """``text`` in ``width`` cells; of a longer one both ends."""
    text = plain(text)
    missing = width - cell_len(text)
    if missing >= 0:
        return f"{' ' * missing}{text}" if right else f"{text}{' ' * missing}"
    tail = (width - 1) * 2 // 3
    end = ""
    for each in reversed(text):
        if cell_len(each + end) > tail:
            break
        end = each + end
    return set_cell_size(text, width - 1 - cell_len(end)) + "…" + end


def _beside(left: Sequence[Text], right: Sequence[Text], left_width: int) -> list[Text]:
    """Two blocks, one beside the other."""
    found = []
    for index in range(max(len(left), len(right))):
        line = left[index].copy() if index < len(left) else Text()
        if index < len(right):
            line.truncate(left_width, overflow="ellipsis", pad=True)
            line = line + Text("  ") + right[index]
        found.append(line)
    return found


def _rule(words: str, width: int, more: str = "") -> Text:
    """A title with a line behind it; ``more``: behind the title."""
    line = Text.assemble(("─ ", _FAINT))
    line.append(plain(words), style=_HEAD)
    if more:
        line.append(f"  {more}", style="")
    rest = width - line.cell_len - 1
    if rest > 0:
        line.append(f" {'─' * rest}", style=_FAINT)
    return line


def _bars(values: Sequence[float]) -> str:
    """A value by the height of a character; the largest is the highest."""
    most = max(values, default=0.0)
    if not most:
        return " " * len(values)
    last = len(_BARS) - 1
    return "".join(_BARS[min(last, -(-int(each * last * 1000 / most) // 1000))] for each in values)


# --- the table -----------------------------------------------------------------------------------


@dataclass(slots=True, frozen=True)
class _Column:
    """``least``: of the terminal's width, where it is shown. ``sort``: by what it sorts."""

    head: str
    width: int
    cell: Callable[[LunHistory, float], str]
    least: int = 0
    sort: str = ""
    right: bool = True


def _percentile(percent: float) -> Callable[[LunHistory, float], str]:
    return lambda lun, now: latency_words(lun.recent(now).percentile_us(percent))


_COLUMNS = (
    _Column("STATE", 13, lambda lun, _: lun.state, sort="state", right=False),
    _Column("IOPS", 5, lambda lun, _: count_words(lun.rates.iops()), sort="iops"),
    _Column("READ/s", 6, lambda lun, _: bytes_words(lun.rates.bytes_s("read")), sort="throughput"),
    _Column("WRITE/s", 7, lambda lun, _: bytes_words(lun.rates.bytes_s("write"))),
    _Column("p50", 6, _percentile(50)),
    _Column("p99", 6, _percentile(99), sort="latency"),
    _Column("p99.9", 6, _percentile(99.9), least=100),
    _Column("FLY", 4, lambda lun, _: count_words(lun.seen.lun.in_flight), sort="flight"),
    _Column("UNFLUSH", 7, lambda lun, _: bytes_words(lun.seen.lun.unflushed), sort="unflushed"),
    _Column("AGAIN", 5, lambda lun, _: count_words(lun.seen.lun.retries), least=120),
    _Column("RECON", 5, lambda lun, _: count_words(lun.seen.lun.reconnects), least=120),
    _Column("REPLAY", 6, lambda lun, _: count_words(lun.seen.lun.replayed), least=140),
    _Column(
        "ERRORS",
        6,
        lambda lun, _: count_words(sum(each.errors for each in lun.seen.lun.operations.values())),
        least=140,
    ),
    _Column("SIZE", 5, lambda lun, _: bytes_words(lun.seen.lun.size), least=140),
    _Column(
        "PORTAL",
        28,
        lambda lun, _: f"{lun.seen.lun.portal} ({lun.seen.lun.provider})",
        least=160,
        right=False,
    ),
)


class _Picture:
    """The blocks of one picture."""

    def __init__(
        self, history: History, view: View, luns: Sequence[LunHistory], width: int, host: str
    ) -> None:
        self._history = history
        self._view = view
        self._luns = luns
        self._width = width
        self._host = host
        self._now = history.look.at
        keys = [each.seen.key for each in luns]
        self._at = keys.index(view.chosen) if view.chosen in keys else 0

    # -- parts -------------------------------------------------------------------------------------

    def header(self, shown: int = 1 << 30) -> list[Text]:
        """``shown``: so many LUNs are in the table."""
        look = self._history.look
        bad = sum(each.bad for each in self._luns) + len(self._history.unknown)
        line = Text.assemble(("iserblk top", _HEAD))
        if self._host:
            line.append(f"  {plain(self._host)}", style="")
        line.append(time.strftime("  %H:%M:%S", time.localtime(look.when)), style="")
        line.append(f"  {_number(len(self._luns), 'LUN')}", style="")
        line.append(f", {bad} bad" if bad else "", style=_BAD)
        if shown < len(self._luns):
            first = self._view.first + 1
            line.append(f" ({first}-{first + shown - 1} shown)", style=_FAINT)
        if look.targets:
            sessions = _number(look.sessions, "session")
            line.append(f"  {_number(look.targets, 'target')}, {sessions}", style="")
        if self._view.paused:
            line.append("  paused", style=_CHOSEN)
        return [line, self._sums(), *self._notes()]

    def _sums(self) -> Text:
        known = [each for each in self._luns if each.rates.seconds]
        read = sum(each.rates.bytes_s("read") or 0 for each in known) if known else None
        written = sum(each.rates.bytes_s("write") or 0 for each in known) if known else None
        iops = sum(each.rates.iops() or 0 for each in known) if known else None
        flight = sum(each.seen.lun.in_flight for each in self._luns)
        unflushed = sum(each.seen.lun.unflushed for each in self._luns)
        return Text(
            f"read {bytes_words(read)}/s  write {bytes_words(written)}/s  {count_words(iops)} IOPS"
            f"  {count_words(flight)} in flight  {bytes_words(unflushed)} unflushed"
        )

    def _notes(self) -> list[Text]:
        """What is not in the table, and why."""
        found = [
            Text(f"{plain(each.where)}: {each.state}", style=_BAD) for each in self._history.unknown
        ]
        notes = [f"not looked at: {plain(each)}" for each in self._history.look.notes]
        if self._history.look.others:
            notes.append(f"without metrics: {plain(', '.join(self._history.look.others))}")
        found += [Text(each, style=_FAINT) for each in notes]
        if len(found) > 3:
            more = len(found) - 2
            found = [*found[:2], Text(f"and {more} more: `iserblk status`", style=_FAINT)]
        return found

    def table(self, rows: int | None) -> list[Text]:
        """The head, and ``rows`` LUNs around the one that is chosen; None: all."""
        columns = [each for each in _COLUMNS if self._width >= each.least]
        room = self._width - sum(each.width + 1 for each in columns)
        lun_width = 0 if self._width < 100 else room // 2
        where = room - (lun_width + 1 if lun_width else 0)
        view, luns = self._view, self._luns
        if rows is None:
            rows = len(luns)
        most = max(0, len(luns) - rows)
        view.first = min(max(view.first, self._at - rows + 1), self._at, most)
        head = Text(_cell("WHERE", where), style="bold underline")
        if view.sort == "where":
            head.stylize("reverse", 0, 5)
        for each in columns:
            head.append(" ")
            words = each.head
            marked = each.sort == view.sort
            cell = _cell(words, each.width, each.right)
            head.append(cell, style="reverse" if marked else "")
        if lun_width:
            head.append(f" {_cell('LUN', lun_width)}")
        found = [head]
        for lun in luns[view.first : view.first + rows]:
            style = _CHOSEN if lun is luns[self._at] and self._interactive else ""
            line = Text(_cell(self._history.where(lun), where), style=style)
            for each in columns:
                line.append(" ")
                cell = _cell(each.cell(lun, self._now), each.width, each.right)
                colour = ""
                if each.head == "STATE":
                    colour = _BAD if lun.bad else _GOOD if lun.state == CONNECTED else ""
                line.append(cell, style=colour)
            if lun_width:
                line.append(f" {_cell(lun.seen.title, lun_width)}")
            found.append(line)
        return found

    _interactive = True

    def heat(self, lun: LunHistory, columns: int, rows: int) -> list[Text]:
        """Title, the map in ``rows`` lines, or in fewer where the durations are less different, its
        axis, and what the shades mean."""
        width = columns + _LABEL + 1
        recent = lun.recent(self._now, slots=12)
        figures = " ".join(
            f"p{percent:g} {latency_words(recent.percentile_us(percent))}"
            for percent in (50, 90, 99, 99.9)
        )
        where = plain(self._history.where(lun))
        room = width - cell_len(figures) - len("─ latency of   1 min: ") - 3
        name = where if cell_len(where) <= room else _cell(where, max(8, room))
        title = _rule(f"latency of {name}", width, f"1 min: {figures}")
        chart = heat_map(lun, self._now, columns, rows)
        found = [title]
        for bound, row in zip(chart.bounds, chart.rows, strict=True):
            line = Text.assemble((f"{bound_words(bound):>{_LABEL - 1}} │", _FAINT))
            for shade in row:
                line.append(_SHADED[shade], style=_SHADE_STYLES[shade])
            found.append(line)
        while len(found) <= min(rows, _ROWS):
            words = " no requests" if len(found) == 1 and not chart.rows else ""
            found.insert(1, Text(f"{'':{_LABEL}}│{words}", style=_FAINT))
        axis = Text.assemble((f"{'':{_LABEL}}└", _FAINT))
        for away in chart.away:
            axis.append("×" if away else "─", style=_BAD if away else _FAINT)
        span = f"-{duration_words(columns * SLOT_S)}"
        shades = " ".join(
            f"{_SHADED[index + 1]}{'>' if share else '<'}{share or SHADES[1]:.0%}"
            for index, share in enumerate(SHADES)
        )
        legend = Text(f"{'':{_LABEL + 1}}{span}", style=_FAINT)
        middle = columns - len(span) - len("now")
        legend.append(f"{shades:^{max(0, middle)}}now" if middle > len(shades) else "")
        return [*found, axis, legend]

    def paths(self, lun: LunHistory, width: int, most: int | None) -> list[Text]:
        """Title, and the tree, of at most ``most`` lines."""
        branches = paths_of(lun.seen.lun, lun.away_s(self._now), lun.state)
        found = [_rule("paths", width)]
        shown = branches if most is None or len(branches) <= most else branches[: most - 1]
        for index, each in enumerate(shown):
            line = Text.assemble((_lines_before(branches, index), _FAINT))
            room = width - line.cell_len - cell_len(each.state) - 2
            words = plain(each.words)
            line.append(words if cell_len(words) <= room else _cell(words, max(8, room)), style="")
            style = _FAINT if each.good is None else _GOOD if each.good else _BAD
            line.append(f"  {plain(each.state)}", style=style)
            found.append(line)
        if len(shown) < len(branches):
            found.append(Text(f"└ {len(branches) - len(shown)} more: Enter", style=_FAINT))
        return found

    def events(self, width: int, most: int | None, lun: LunHistory | None = None) -> list[Text]:
        """Title, and the last ``most`` events: the latest first."""
        every = self._history.events_of(lun) if lun is not None else list(self._history.events)
        found = [_rule("events", width)]
        began = self._history.began
        for each in reversed(every if most is None else every[-most:]):
            found.append(_event_line(each, lun is None))
        if not every and began is not None:
            seconds = duration_words(self._now - began)
            found.append(Text(f"none for {seconds}", style=_FAINT))
        return found

    def footer(self) -> Text:
        sorts = "".join(SORTS.values())
        if self._view.page:
            return Text("Esc all LUNs  ↑↓ another LUN  p pause  h help  q quit", style=_FAINT)
        return Text(_KEYS.format(sorts=sorts), style=_FAINT)

    # -- whole pictures ----------------------------------------------------------------------------

    def help(self) -> list[Text]:
        lines = [Text("iserblk top: keys, and what is shown", style=_HEAD), Text()]
        for name, words in _HELP:
            line = Text.assemble((_cell(name, 16), _HEAD))
            line.append(words, style="")
            lines.append(line)
        return lines

    def nothing(self) -> list[Text]:
        words = "no LUN is in use here by attach, mount or nbd"
        return [*self.header(), Text(), Text(words), Text(), *self.events(self._width, 5)]

    def overview(self, height: int | None) -> list[Text]:
        head = self.header()
        lun = self._luns[self._at]
        if height is None:
            self._interactive = False
            rest = self._below(lun, 8, None)
            return [*head, Text(), *self.table(None), Text(), *rest]
        left = height - 1 - len(head) - 1  # without the footer, and the head of the table
        wide = self._width >= BESIDE
        least = 13 if wide else 15  # lines of what is below the table
        rows = max(3, min(len(self._luns), left - least))
        below = left - rows
        table = self.table(rows)
        head = self.header(rows)
        heat_rows = max(3, min(16, below - 7 if wide else (below - 3) * 2 // 5))
        return [*head, *table, *self._below(lun, heat_rows, below)]

    def _below(
        self, lun: LunHistory, heat_rows: int, height: int | None, *, only: bool = False
    ) -> list[Text]:
        """Heat map, paths and events, in ``height`` lines; None: as many as they need. ``only``:
        the events of this LUN alone, and all of its paths, as far as there is room."""
        of = lun if only else None
        wide = self._width >= BESIDE
        columns = min(SLOTS, (self._width - 2) * 6 // 10 if wide else self._width - _LABEL - 1)
        heat = self.heat(lun, columns, heat_rows)
        if wide:
            left_width = columns + _LABEL + 1
            right_width = self._width - left_width - 2
            block = _beside(heat, self.paths(lun, right_width, len(heat) - 1), left_width)
        else:
            left = None if height is None else height - len(heat) - 1
            most = None if left is None else max(2, left - 2 if only else left // 2)
            block = [*heat, *self.paths(lun, self._width, most)]
        most = 12 if height is None else max(1, height - len(block) - 1)
        return [*block, *self.events(self._width, most, of)]

    def page(self, height: int | None) -> list[Text]:
        """All of the LUN that is chosen."""
        lun = self._luns[self._at]
        seen, reading = lun.seen, lun.seen.lun
        width = self._width
        title = Text.assemble((plain(self._history.where(lun)), _HEAD))
        title.append(f"  {lun.state}", style=_BAD if lun.bad else _GOOD)
        title.append(f"  {plain(seen.title)}", style="")
        about = (
            f"{size_words(reading.size)}  {seen.command or 'process'} {seen.pid}  "
            f"{reading.in_flight} in flight  {bytes_words(reading.unflushed)} unflushed"
        )
        counters = f"since opened: {_counters(reading)}"
        top = [title, Text(plain(reading.url)), Text(about), Text(counters)]
        top += self._operations(lun)
        top += self._throughput(lun)
        if height is None:
            return [*top, *self._below(lun, 12, None, only=True)]
        left = height - 1 - len(top)
        if left < 6:
            return top
        wide = width >= BESIDE
        # Room for all paths and the last event, as far as there is any.
        needed = len(paths_of(reading, None)) + 3
        heat_rows = max(3, min(20, left - 7 if wide else left - 3 - needed))
        return [*top, *self._below(lun, heat_rows, left, only=True)]

    def _operations(self, lun: LunHistory) -> list[Text]:
        """A line for each operation: rates since the last update, latencies of the last minute."""
        heads = ("", "IOPS", "bytes/s", "mean", "p50", "p90", "p99", "p99.9", "failed")
        widths = (6, 6, 8, 7, 7, 7, 7, 7, 7)
        line = " ".join(
            _cell(each, width, right=bool(each)) for each, width in zip(heads, widths, strict=True)
        )
        found = [Text(line, style="bold underline")]
        every = lun.seen.lun.operations
        for name in (*OPERATIONS, ""):
            if name in ("trim", "zero") and not every[name].requests:
                continue
            recent = lun.recent(self._now, name, 12)
            failed = every[name].errors if name else sum(each.errors for each in every.values())
            cells = (
                name or "all",
                count_words(lun.rates.iops(name)),
                bytes_words(lun.rates.bytes_s(name)) if name != "flush" else "",
                latency_words(recent.mean_us),
                *(latency_words(recent.percentile_us(each)) for each in (50, 90, 99, 99.9)),
                count_words(failed),
            )
            words = " ".join(
                _cell(each, width, right=index > 0)
                for index, (each, width) in enumerate(zip(cells, widths, strict=True))
            )
            found.append(Text(words, style="" if recent.requests or not name else _FAINT))
        return found

    def _throughput(self, lun: LunHistory) -> list[Text]:
        """Read and written over time, each by bars."""
        columns = min(SLOTS, self._width - 30)
        slots = lun.columns(columns, self._now)
        found = []
        for name in ("read", "write"):
            values = [
                each.operations[name].bytes / each.seconds
                if each.seconds and name in each.operations
                else 0.0
                for each in slots
            ]
            line = Text(_cell(f"{name}/s", _LABEL), style="")
            line.append(" ")
            line.append(_bars(values), style="cyan" if name == "read" else "green")
            line.append(f" most {bytes_words(max(values, default=0.0))}/s", style=_FAINT)
            found.append(line)
        return found


def _counters(lun: LunReading) -> str:
    """What has gone wrong since the LUN was opened: those that are not 0."""
    counts = (
        (lun.reconnects, "reconnects"),
        (lun.replayed, "replayed"),
        (lun.retries, "sent again"),
        (lun.recovered, "recoveries"),
        (lun.aborted, "past deadline"),
        (lun.resets, "LUN resets"),
        (lun.damaged, "bad digests"),
        (sum(each.errors for each in lun.operations.values()), "failed"),
    )
    return ", ".join(f"{count} {words}" for count, words in counts if count) or "nothing lost"


def _lines_before(branches: Sequence[Branch], index: int) -> str:
    """The lines of the tree in front of a branch."""
    depths = [each.depth for each in branches]
    depth = depths[index]
    found = ""
    for level in range(1, depth + 1):
        later = depths[index + 1 :]
        end = next((at for at, each in enumerate(later) if each < level), len(later))
        more = level in later[:end]
        if level == depth:
            found += "├ " if more else "└ "
        else:
            found += "│ " if more else "  "
    return found


def _event_line(event: Event, with_place: bool) -> Text:
    line = Text.assemble((time.strftime("%H:%M:%S ", time.localtime(event.when)), _FAINT))
    if with_place:
        line.append(f"{plain(event.where)} ", style="")
    line.append(plain(event.words), style=_BAD if event.bad else "")
    return line


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
