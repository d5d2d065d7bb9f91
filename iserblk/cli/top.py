"""``iserblk top``: all LUNs in use on this machine, live, in the terminal."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import click

from iserblk.cli.command import Command
from iserblk.cli.here import Here, NamedLun, all_named, look_around
from iserblk.cli.options import Seconds
from iserblk.cli.states import RUNNING
from iserblk.cli.status import end_unseen
from iserblk.cli.watch.history import SORT, SORTS, History, Look, Seen, Silent, in_order
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic, processor_seconds, since_epoch

if TYPE_CHECKING:
    from iserblk.cli.watch.frame import View

INTERVAL_S = 1.0
_WIDTH = 120  # of the one picture without a terminal
_SHARE = 4  # a look may take one part of so many of a processor
_LOOK = Callable[[], Look]


@click.command("top", cls=Command)
@click.option(
    "--interval",
    type=Seconds(0.1, 3600),
    default=INTERVAL_S,
    metavar="S",
    help=f"Seconds between two updates. Default {INTERVAL_S:g}.",
)
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    default=SORT,
    show_default=True,
    help="By what to sort at first.",
)
def command(interval: float, sort: str) -> None:
    """Show all LUNs in use on this machine, live: throughput, IOPS, latencies, commands in flight,
    unflushed bytes; and of one LUN a heat map of the last minutes, its paths, and what happened.

    Keys: arrows choose a LUN, Enter shows its page, a letter sorts, h shows help, q quits. Root
    sees the LUNs of all users; what cannot be looked at is named. Where stdout is no terminal, one
    picture is printed, with the rates of one interval.
    """
    from iserblk.cli.watch.frame import View  # noqa: PLC0415 - rich takes a while

    named = all_named()
    view = View(sort)
    if sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        found: Here | None = None

        def look() -> Look:
            nonlocal found
            found = look_around(before=found)
            return look_of(found, named)

        _watch(look, interval, view)
    else:
        _print_one(named, interval, view)


def _print_one(named: Sequence[NamedLun], interval: float, view: View) -> None:
    from iserblk.cli.watch.frame import LEAST_WIDTH, frame, text_of  # noqa: PLC0415

    history = History()
    here = look_around()
    history.add(look_of(here, named))
    if history.luns:
        sleep(interval)
        here = look_around(before=here)
        history.add(look_of(here, named))
    width = max(LEAST_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns)
    found = bool(here.uses)
    if found or not here.unseen:
        click.echo(text_of(frame(history, view, width, host=socket.gethostname())), nl=False)
    end_unseen(here.unseen, found=found)


def look_of(here: Here, named: Sequence[NamedLun] = ()) -> Look:
    """What is shown of ``here``, which was found just now."""
    luns: list[Seen] = []
    silent = []
    for answer in here.answers:
        place, reading = answer.place, answer.reading
        if reading is None:
            silent.append(Silent(place.uid, place.where, answer.state))
            continue
        for lun in reading.luns:
            known = (each for each in named if each.has(lun.target, lun.lun, lun.url, lun.portal))
            name = next(
                (each.name if each.lun is not None else f"{each.name}/{lun.lun}" for each in known),
                "",
            )
            luns.append(
                Seen(place.where, place.uid, reading.pid, answer.at, lun, reading.command, name)
            )
    readings = [each.reading for each in here.answers if each.reading is not None]
    targets = [target for each in readings for target in each.targets]
    others = dict.fromkeys(
        f"{each.what} {each.where}".rstrip()
        for each in here.uses
        if each.state == RUNNING and each.has_lun
    )
    return Look(
        monotonic(),
        since_epoch(),
        tuple(luns),
        tuple(silent),
        tuple(each.words for each in here.unseen),
        tuple(others),
        len(targets),
        sum(each.sessions for each in targets),
    )


# --- on a terminal -------------------------------------------------------------------------------


def _watch(look: _LOOK, interval: float, view: View) -> None:
    from iserblk.cli.watch.frame import frame  # noqa: PLC0415
    from iserblk.cli.watch.terminal import Screen  # noqa: PLC0415

    history = History()
    host = socket.gethostname()
    try:
        with (
            Screen(sys.stdin, sys.stdout) as screen,
            Looking(look, interval, screen.wake) as looking,
        ):
            while True:
                for each in looking.take():
                    if not view.paused:
                        history.add(each)
                width, height = screen.size
                screen.show(frame(history, view, width, height, host=host))
                for key in screen.keys(looking.has_come):
                    if not press(key, view, history, height):
                        return
    except KeyboardInterrupt:
        pass  # the regular end


class Looking:
    """Looks again and again in a thread, while the context is open: a process that hangs does not
    keep keys from working. ``tell``: is called after each look."""

    def __init__(self, look: _LOOK, interval: float, tell: Callable[[], None]) -> None:
        self._look = look
        self._interval = interval
        self._tell = tell
        self._looks: list[Look] = []
        self._error: BaseException | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="looking")

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()  # the thread may wait for a process that hangs: it is not waited for

    def has_come(self) -> bool:
        """Whether ``take`` has something to give, or to raise."""
        return bool(self._looks) or self._error is not None

    def take(self) -> list[Look]:
        """The looks since the last call. Raises what looking has raised."""
        if self._error is not None:
            raise self._error
        taken, self._looks = self._looks, []
        return taken

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                began, used = monotonic(), processor_seconds()
                self._looks.append(self._look())
                self._tell()
                used = processor_seconds() - used
                took = monotonic() - began
                self._end.wait(max(self._interval - took, _SHARE * used))
        except BaseException as error:
            self._error = error
            self._tell()


def press(key: str, view: View, history: History, height: int) -> bool:
    """Do what ``key`` asks for. False: it quits."""
    sorts = {letter: name for name, letter in SORTS.items()}
    if key == "q":
        return False
    if view.help:
        view.help = False
    elif key in ("h", "?"):
        view.help = True
    elif key in ("enter", "right"):
        view.page = True
    elif key in ("escape", "back", "left"):
        view.page = False
    elif key == "r":
        view.reverse = not view.reverse
    elif key == "p":
        view.paused = not view.paused
    elif key in sorts:
        view.sort = sorts[key]
        view.reverse = False
    else:
        _choose(key, view, history, height)
    return True


def _choose(key: str, view: View, history: History, height: int) -> None:
    steps = {
        "up": -1,
        "k": -1,
        "down": 1,
        "j": 1,
        "page up": -(height // 3),
        "page down": height // 3,
        "home": -(1 << 30),
        "end": 1 << 30,
    }
    luns = [each.seen.key for each in in_order(history, view.sort, view.reverse)]
    if key not in steps or not luns:
        return
    at = luns.index(view.chosen) if view.chosen in luns else 0
    view.chosen = luns[min(max(at + steps[key], 0), len(luns) - 1)]
