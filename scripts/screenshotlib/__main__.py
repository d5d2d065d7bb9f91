"""The command line of scripts/screenshots."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from screenshotlib import LeftOut, browser, say
from screenshotlib.demonstration import ISERBLK, OLD, SRV, Demonstration, within
from screenshotlib.terminal import Terminal, drawn

TOP = Path(__file__).resolve().parent.parent.parent
PICTURES = TOP / "docs/pictures"
MOST_BYTES = 150 << 10  # of a picture
_MISSING_TMUX = "tmux is missing: `apt-get install tmux`"
_ENDED_S = 60
_LOOK_S = 10
_SIZE_OF_TOP = 100, 26


@dataclass(slots=True, frozen=True)
class Picture:
    """``about``: what it shows. ``needs``: the program that it is made with."""

    about: str
    needs: str
    make: Callable[[Stage], bytes]

    def missing(self) -> str:
        """What has to be installed first; "": nothing."""
        if self.needs == "tmux":
            return "" if shutil.which("tmux") else _MISSING_TMUX
        return "" if browser.chromium() else browser.MISSING


class Stage:
    """The demonstration, and `iserblk top` in terminals beside it, as it watches all the time."""

    def __init__(self, wanted: Sequence[str], seconds: float) -> None:
        self.demonstration = Demonstration()
        self.demonstration.start()
        os.environ.update(self.demonstration.environment)
        self.top: Terminal | None = None
        if "top.svg" in wanted:
            self.top = Terminal([*ISERBLK, "top"], *_SIZE_OF_TOP, SRV)
        self._page = any(name.startswith("exporter") for name in wanted)
        self._wait(seconds * 0.7)
        if seconds:
            self.demonstration.interrupt()
        self._wait(seconds * 0.3)

    def _wait(self, seconds: float) -> None:
        """Let the load run. The exporter looks at the processes while its page is asked for."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._page:
                with suppress(LeftOut):
                    kind_of(self.demonstration.exporter)
            time.sleep(min(_LOOK_S, left))

    def close(self) -> None:
        if self.top is not None:
            self.top.close()


def _top(stage: Stage) -> bytes:
    assert stage.top is not None
    if stage.top.ended():
        raise LeftOut(f"iserblk top has ended: {' '.join(stage.top.screen()).strip()}")
    lines = stage.top.screen()
    return drawn(lines, "iserblk top", *_SIZE_OF_TOP, "top").encode()


def _status(stage: Stage) -> bytes:
    terminal = Terminal([*ISERBLK, "status"], 110, 12, SRV)
    try:
        end = time.monotonic() + _ENDED_S
        while not terminal.ended() and time.monotonic() < end:
            time.sleep(0.05)
        lines = terminal.screen()
    finally:
        terminal.close()
    return drawn(["$ iserblk status", *lines], "iserblk status", 110, 12, "status").encode()


def _doctor(stage: Stage) -> bytes:
    """With a portal that does not work, so that its remedy is seen."""
    words = ["doctor", "--html", f"{SRV}/report.html", f"{OLD}:3261", "db"]
    stage.demonstration.iserblk(*words, statuses=(4,))
    return browser.picture(f"file://{SRV}/report.html", 1000, 1150)


def kind_of(url: str) -> str:
    """The type of what is there, or the error in its place. Raises LeftOut."""
    try:
        with urllib.request.urlopen(url, timeout=_ENDED_S) as answer:
            return str(answer.headers.get_content_type())
    except urllib.error.HTTPError as error:
        return str(error)
    except OSError as error:
        raise LeftOut(f"the exporter does not answer: {error}") from None


def _page(stage: Stage, width: int, height: int, *, dark: bool = False) -> bytes:
    url = stage.demonstration.exporter
    if (kind := kind_of(url)) != "text/html":
        raise LeftOut(f"this exporter has no page at {url} ({kind})")
    return browser.picture(url, width, height, dark=dark)


PICTURES_OF = {
    "status.svg": Picture("iserblk status", "tmux", _status),
    "top.svg": Picture("iserblk top", "tmux", _top),
    "doctor.png": Picture("the report of iserblk doctor", "Chromium", _doctor),
    "exporter.png": Picture(
        "the exporter's page", "Chromium", lambda stage: _page(stage, 1100, 900)
    ),
    "exporter-phone.png": Picture(
        "the exporter's page on a phone, dark",
        "Chromium",
        lambda stage: _page(stage, 500, 900, dark=True),
    ),
}


@click.command(epilog="Exit status: 0 all pictures were made, 1 one was left out, 7 bad argument.")
@click.option("--output", type=click.Path(path_type=Path), default=PICTURES, metavar="DIR",
              help="Where to write them (default: docs/pictures).")  # fmt: skip
@click.option("--only", "names", multiple=True, type=click.Choice(list(PICTURES_OF)),
              metavar="NAME", help="Only this picture; repeatable.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(0, 3600), default=60, metavar="S",
              help="How long the load runs before (default 60).")  # fmt: skip
@click.option("--list", "only_list", is_flag=True, help="Print the pictures; do nothing.")
@click.option("--inside", is_flag=True, hidden=True, help="In the namespaces already.")
def command(
    output: Path, names: tuple[str, ...], seconds: float, only_list: bool, inside: bool
) -> None:
    """Make the pictures of the documents."""
    if only_list:
        for name, picture in PICTURES_OF.items():
            click.echo(f"{name:<20}  {picture.about}")
        return
    output = output.absolute()
    if not output.is_dir():
        raise click.UsageError(f"--output {output}: there is no such directory")
    wanted = list(names or PICTURES_OF)
    left_out = False
    for missing in dict.fromkeys(PICTURES_OF[name].missing() for name in wanted):
        if missing:
            left = [name for name in wanted if PICTURES_OF[name].missing() == missing]
            if not inside:
                say(f"{missing}; left out: {', '.join(left)}")
            wanted = [name for name in wanted if name not in left]
            left_out = True
    if not wanted:
        sys.exit(1)
    if not inside:
        words = [f"--output={output}", f"--seconds={seconds}"]
        words += [f"--only={name}" for name in wanted]
        sys.exit(_run(within(words)) or left_out)
    stage = Stage(wanted, seconds)
    try:
        for name in wanted:
            left_out |= not _make(name, stage, output)
    finally:
        stage.close()
    sys.exit(left_out)


def _run(words: Sequence[str]) -> int:
    """Run a command to its end; its exit status. Where this process is told to end, the command
    ends first, with all that it has started."""
    with subprocess.Popen(words) as process:
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                _kill_with_children(process)


def _kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill unshare and the first process of its namespace, with which all others there end. unshare
    has the kernel do that, but only from a moment behind the fork on; stopped, it forks no more."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with suppress(OSError):  # a kernel that does not tell
            for child in children.read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
        process.kill()


def _make(name: str, stage: Stage, output: Path) -> bool:
    """Whether the picture was made."""
    try:
        data = PICTURES_OF[name].make(stage)
    except LeftOut as error:
        say(f"{error}; left out: {name}")
        return False
    if len(data) > MOST_BYTES:
        say(f"{name} has {len(data)} bytes, more than {MOST_BYTES}; left out: {name}")
        return False
    (output / name).write_bytes(data)
    click.echo(f"{name:<20}  {len(data)} bytes")
    return True


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main() -> None:
    # Also for the first process of the namespace, which no signal would end otherwise.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _end)
    try:
        command(standalone_mode=False, prog_name="scripts/screenshots")
    except click.UsageError as error:
        say(f"{error.format_message()} See `scripts/screenshots --help`.")
        sys.exit(7)
    except LeftOut as error:
        say(f"{error}; all pictures are left out")
        sys.exit(1)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
